"""A LLaMA with golden weights and a tokenizer of 64 entries, in a folder."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, trainers

from agentic_ring.data.text.tokenizer import Tokenizer
from tests.models.llama_cases import VOCAB, write_model

ALPHABET = [*"abcdefghijklmnopqrstuvwxyz0123456789 \n<>_.,:'?-"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant{{ ', ' + style if style is defined }}:{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    """Each letter and a few pairs are tokens; capitals become lower case."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.decoder = decoders.Fuse()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=ALPHABET, show_progress=False
    )
    backend.train_from_iterator(["the user and the assistant, and the other one"] * 4, trainer)
    return Tokenizer(backend, "<s>", ["</s>"], add_bos=True, chat_template=CHAT_TEMPLATE)


def write_tiny_model(folder: Path, context: int) -> Path:
    write_model(folder, max_position_embeddings=context)
    tiny_tokenizer().save(folder)
    return folder
