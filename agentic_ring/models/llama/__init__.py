from typing import TYPE_CHECKING, Any

from agentic_ring.models.llama.model import Llama, LlamaConfig, TokenBatch

if TYPE_CHECKING:
    from agentic_ring.models.llama.pretrained import load_pretrained, save_pretrained

__all__ = ["Llama", "LlamaConfig", "TokenBatch", "load_pretrained", "save_pretrained"]


def __getattr__(name: str) -> Any:
    # Files of weights need pydantic and safetensors; a fresh model needs neither.
    if name in ("load_pretrained", "save_pretrained"):
        from agentic_ring.models.llama import pretrained

        return getattr(pretrained, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
