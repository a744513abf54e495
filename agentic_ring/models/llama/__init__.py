from agentic_ring.models.llama.model import Llama, LlamaConfig, TokenBatch, token_loss
from agentic_ring.models.llama.pretrained import load_pretrained, save_pretrained

__all__ = ["Llama", "LlamaConfig", "TokenBatch", "load_pretrained", "save_pretrained", "token_loss"]
