"""LoRA adapters in the format of ``peft``: put on a model when it is loaded, and written after finetuning.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors`` (the layout of
https://github.com/huggingface/peft). What that format has no place for is in ``adapter_training.json``: what
the adapter changes of the base's configuration, its chat template, and what identifies its base.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod, sqrt
from pathlib import Path
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np

from agentic_ring.errors import ConfigError, DataError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing_folder
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.models.llama.families import FAMILIES, Weight, weights
from agentic_ring.models.llama.model import Llama, LlamaConfig
from agentic_ring.models.llama.tensor_files import SafetensorsFiles, TensorFiles, save_tensors
from agentic_ring.models.lora import LoraConfig, LoraModel
from agentic_ring.models.model import Params

with needs_extra("models"):
    from flax import nnx
    from flax.traverse_util import flatten_dict, unflatten_dict
    from pydantic import BaseModel, ConfigDict, Field

CONFIG, WEIGHTS, OWN = "adapter_config.json", "adapter_model.safetensors", "adapter_training.json"
_FINAL_NORM = "model.norm.weight"
_REMEDY = f"give the folder of a LoRA adapter as peft writes it: {CONFIG} and {WEIGHTS}"
_ABSENT = (
    *("use_dora", "use_qalora", "use_bdlora", "kasa_config", "arrow_config", "alora_invocation_tokens"),
    *("fan_in_fan_out", "rank_pattern", "alpha_pattern", "lora_bias", "layer_replication"),
    *("modules_to_save", "trainable_token_indices", "target_parameters"),
)
"""Fields of variants that are not supported, where they are neither false nor empty."""


class _PeftFields(BaseModel):
    model_config = ConfigDict(extra="allow")

    peft_type: Literal["LORA"]
    r: Annotated[int, Field(ge=1, le=2**16)]
    lora_alpha: Annotated[float, Field(gt=0)]
    use_rslora: bool = False
    bias: str = "none"
    base_model_name_or_path: str | None = None


@dataclass(frozen=True)
class AdapterTraining:
    """How an adapter of ours was trained; one of another program says none of it."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the base's ``config.json`` that the adapter changes, such as its rotary scaling."""
    template: str | None = None
    """Name of the chat template; None where it is not known."""
    base: str | None = None
    """Digest of the base's final norm, see ``base_digest``."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder and what its configuration says; the matrices are read when they are used."""

    path: Path
    lora: LoraConfig
    base: str | None
    """The base as the file names it."""
    training: AdapterTraining

    @property
    def fields(self) -> Mapping[str, Any]:
        """Fields of the base's ``config.json`` that the adapter changes."""
        return self.training.fields

    def check_base(self, files: TensorFiles) -> None:
        """Raises a DataError if these are not the tensors of the model that the adapter was trained on."""
        if self.training.base not in (None, base_digest(files)):
            raise DataError(
                f"the adapter {self.path} was trained on another model than {files.path}: on {self.base}; "
                "name that model, or an adapter of this one"
            )

    def params(self, config: LlamaConfig) -> Params:
        """Reads A and B of every matrix as ``LoraModel`` of this model has them, float32 on the host.

        A matrix that the adapter leaves out has zeros.

        Raises:
          DataError: a file is missing, damaged or pickled, or holds what does not fit the model.
          ConfigError: files of the model's family hold several projections as one matrix.
        """
        _check_family(config)
        files, names = SafetensorsFiles(self.path, WEIGHTS), _tensor_names(config)
        if unknown := sorted(files.names - {name for pair in names.values() for name in pair}):
            raise DataError(
                f"{self.path} has {len(unknown)} tensors that are no part of an adapter of this model, such "
                f"as {unknown[0]}; only matrices of attention and feedforward can be adapted"
            )
        shapes: dict[Any, Any] = flatten_dict(LoraModel(config, self.lora, "float32").abstract_params())
        params = {path: np.zeros(leaf.shape, np.float32) for path, leaf in shapes.items()}
        for (weight, layer), pair in names.items():
            if not files.names & set(pair):
                continue
            for kind, name in zip("ab", pair, strict=True):
                matrix = _as_stored(kind, params[*weight.path, kind][layer])
                found = files.shape(name) if name in files.names else None
                if found != matrix.shape:
                    raise DataError(
                        f"{name} of the adapter {self.path} has shape {found and list(found)}; by the model "
                        f"it should be {list(matrix.shape)}. Take an adapter of this model"
                    )
                matrix[...] = files.read(name, (slice(None),))
        return unflatten_dict(params)

    def merged(self, llama: Llama) -> Llama:
        """The model with the adapter's products added to its weights, which keep their dtype."""
        graphdef, state = nnx.split(llama)
        model = LoraModel(llama.config, self.lora, llama.config.transformer.dtype)
        return nnx.merge(graphdef, model.merged(self.params(llama.config), nnx.to_pure_dict(state)))


def open_adapter(name: str | Path) -> Adapter:
    """Returns the adapter in a folder.

    Raises:
      DataError: there is none, its files are damaged, or it is a variant that is not supported.
    """
    path = Path(name)
    if not path.is_dir():
        raise DataError(f"there is no adapter {name}; {_REMEDY}")
    fields = read_json(path / CONFIG, _PeftFields, _REMEDY, foreign=True)
    given = fields.model_dump()
    odd = [name for name in _ABSENT if given.get(name)] + (["bias"] if fields.bias != "none" else [])
    if odd:
        raise DataError(
            f"{path / CONFIG} has {odd[0]} {given[odd[0]]!r}, which is not supported; merge the adapter into "
            "its base with peft, and give the merged model"
        )
    training = AdapterTraining()
    if (path / OWN).exists():
        training = read_json(path / OWN, AdapterTraining, "export the adapter again")
    scale = fields.lora_alpha / (sqrt(fields.r) if fields.use_rslora else fields.r)
    return Adapter(path, LoraConfig(fields.r, scale), fields.base_model_name_or_path, training)


def base_digest(files: TensorFiles) -> str:
    """Identifies a model by its final norm, which files of every precision hold at least in bfloat16."""
    norm = files.read(_FINAL_NORM, (slice(None),)).astype(jnp.bfloat16)
    return hashlib.sha256(norm.tobytes()).hexdigest()[:16]


def save_adapter(
    params: Params, config: LlamaConfig, lora: LoraConfig, folder: Path, base: str, training: AdapterTraining
) -> None:
    """Writes an adapter as ``peft`` reads it, in half precision, atomically.

    Args:
      params: A and B, as ``LoraModel`` has them, on this process.
      base: name or folder of the model, for ``peft``.

    Raises:
      ConfigError: files of the model's family hold several projections as one matrix.
    """
    _check_family(config)
    trained: dict[Any, Any] = flatten_dict(params)
    tensors = {}
    for (weight, layer), pair in _tensor_names(config).items():
        for kind, name in zip("ab", pair, strict=True):
            matrix = _as_stored(kind, np.asarray(trained[*weight.path, kind][layer]))
            tensors[name] = np.ascontiguousarray(matrix, np.float16)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.rank * lora.scale,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "inference_mode": True,
    }
    with replacing_folder(folder) as beside:
        save_tensors(tensors, beside / WEIGHTS)
        (beside / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
        write_json(beside / OWN, asdict(training))


def _check_family(config: LlamaConfig) -> None:
    if FAMILIES[config.family].fused:
        raise ConfigError(
            f"adapters of {config.family} are not supported, as its files hold queries, keys and values in "
            "one matrix; merge the adapter into its base"
        )


def _as_stored(kind: str, matrix: np.ndarray) -> np.ndarray:
    """A view of A [*inputs, R] as [R, inputs], or of B [R, *outputs] as [outputs, R]: as peft stores it."""
    rows = prod(matrix.shape[:-1]) if kind == "a" else len(matrix)
    return matrix.reshape(rows, -1).T


def _tensor_names(config: LlamaConfig) -> dict[tuple[Weight, int], tuple[str, str]]:
    """Names of A and B of each matrix that can be adapted, and layer."""
    smallest = LoraModel(config, LoraConfig(1), "float32")
    adapted = {path[:-1] for path in flatten_dict(smallest.abstract_params())}
    found = {}
    for weight in weights(config):
        if weight.path not in adapted:
            continue
        for layer, name in enumerate(weight.names(config.transformer.layers)):
            stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            found[weight, layer] = f"{stem}A.weight", f"{stem}B.weight"
    return found
