"""A model as the flags --model and --adapter name it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.files.model_path import find_model
from agentic_ring.models.llama.adapter import Adapter, open_adapter
from agentic_ring.models.llama.config_file import read_config, read_fields, usable_context
from agentic_ring.models.llama.model import Llama
from agentic_ring.models.llama.pretrained import load_pretrained
from agentic_ring.models.transformer_config import Dtype


@dataclass(frozen=True)
class NamedModel:
    """The files of a model, and the adapter on it if there is one."""

    name: str
    path: Path
    """A folder in Hugging Face's layout, or a GGUF file."""
    adapter: Adapter | None

    @classmethod
    def find(cls, model: str | Path, adapter: str | Path | None = None) -> "NamedModel":
        """Finds both; see ``find_model`` and ``open_adapter`` for their errors."""
        path, name = find_model(model), Path(model).resolve().name
        if adapter is None:
            return cls(name, path, None)
        return cls(f"{name}+{Path(adapter).resolve().name}", path, open_adapter(adapter))

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of ``config.json``."""
        return read_fields(self.path, self.adapter)

    def context(self, asked: int | None, allow_extrapolation: bool) -> int:
        """The context length in tokens; see ``usable_context``."""
        return usable_context(self.path, asked, allow_extrapolation, self.adapter)

    def tokenizer(self, kind: type[Tokenizer] = Tokenizer) -> Tokenizer:
        """Loads the tokenizer; one that has more entries than the model is a DataError."""
        tokenizer = kind.load(self.path)
        tokenizer.check_fits(read_config(self.path, adapter=self.adapter).vocab_size)
        return tokenizer

    def template(self, tokenizer: Tokenizer) -> str | None:
        """Name of its chat template: the adapter's or the tokenizer's own; None if it has none."""
        trained_with = None if self.adapter is None else self.adapter.training.template
        return trained_with or ("tokenizer" if tokenizer.chat_template is not None else None)

    def load(self, mesh: Mesh, dtype: Dtype | None = None, context: int | None = None) -> Llama:
        """Loads the weights; see ``load_pretrained``."""
        return load_pretrained(self.path, mesh, dtype, context=context, adapter=self.adapter)
