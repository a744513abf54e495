"""LLaMA checkpoints in Hugging Face's format: loaded into sharded arrays, and saved.

A folder holds ``config.json`` and ``*.safetensors``. Each device's part of each array is read directly from
the files: no host ever holds a whole model.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, SingleDeviceSharding

from agentic_ring.errors import ArgumentError, DataError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing_folder
from agentic_ring.files.json_files import read_json
from agentic_ring.files.read_errors import remedy_for
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.llama.config_file import REMEDY, config_fields, read_config
from agentic_ring.models.llama.families import Weight, weights
from agentic_ring.models.llama.model import Llama, LlamaConfig
from agentic_ring.models.transformer_config import Dtype
from agentic_ring.terminal.progress import say

with needs_extra("models"):
    from flax import nnx
    from pydantic import BaseModel, Field
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 4 * 2**30
"""Maximum size of a saved file, unless one tensor is larger, and of the host memory used while saving."""
_WEIGHT_FILES = r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")
_REDUNDANT = ("rotary_emb.inv_freq",)
"""Name endings of tensors in older files that the configuration already determines."""
_HEAD = "lm_head.weight"
_COMPARED_ROWS = 4096
_READABLE = ("F32", "F16", "BF16")


def load_pretrained(
    path: str | Path,
    mesh: Mesh | None = None,
    dtype: Dtype | None = None,
    *,
    rules: ShardingRules = ShardingRules(),
    context: int | None = None,
) -> Llama:
    """Loads a model from a folder with ``config.json`` and ``*.safetensors``, sharded over a mesh.

    Args:
      mesh: devices of the weights; call the model under ``jax.set_mesh(mesh)``. None is one device.
      dtype: dtype of weights and computation; None is the stored one, or float32 if that is float16.
      rules: mesh axes of each logical axis.
      context: context in use, in tokens; only "dynamic" rotary scaling needs it.

    Raises:
      DataError: a file is missing, damaged, pickled, or does not fit ``config.json``.
      UnknownNameError: the family is not supported.
    """
    path = Path(path)
    config = read_stored_config(path, context)
    stack = replace(config.transformer, rules=rules, dtype=dtype or config.transformer.dtype)
    return load_weights(path, replace(config, transformer=stack), mesh, stack.dtype)


def read_stored_config(path: Path, context: int | None = None) -> LlamaConfig:
    """Reads the configuration of the weights in a folder: their head may differ from what config.json says.

    As with ``transformers``, a head that is stored and is not the embedding counts, with a warning.
    """
    config = read_config(path, context)
    if config.tied and TensorFiles(path).differ(_HEAD, "model.embed_tokens.weight"):
        say(f"warning: {path} has a head of its own, though by config.json it is the embedding; it is used")
        config = replace(config, tied=False)
    return config


def load_weights(path: Path, config: LlamaConfig, mesh: Mesh | None, dtype: Dtype) -> Llama:
    """Loads the weights of the model ``config`` from the folder ``path``, in ``dtype``."""
    layers, rules = config.transformer.layers, config.transformer.rules
    files, ours = TensorFiles(path), weights(config)
    files.check_names({name for weight in ours for name in weight.names(layers)}, config.tied)
    graphdef, state = nnx.split(jax.eval_shape(lambda: config.build(jax.random.key(0))))
    parameters: dict[Any, Any] = dict(nnx.to_flat_state(state))
    one_device = SingleDeviceSharding(jax.devices()[0])
    for weight in ours:
        parameter = parameters[weight.path]
        shape, axes = parameter.get_value().shape, parameter.get_metadata()["logical_axes"]
        source = _Source(files, weight, layers, shape)
        sharding = one_device if mesh is None else rules.sharding(mesh, shape, axes)
        array = jax.make_array_from_callback(
            shape, sharding, lambda index, source=source: source.read(index).astype(jnp.dtype(dtype))
        )
        parameters[weight.path] = parameter.replace(array)
    return nnx.merge(graphdef, nnx.from_flat_state(parameters))


class _Index(BaseModel):
    weight_map: dict[str, Annotated[str, Field(max_length=200, pattern=r"\.safetensors$")]]


class TensorFiles:
    """Read-only access by name to tensors in ``model.safetensors``, or in several files with an index.

    Any method raises a DataError if there are no weights, only pickled ones, or a file is missing or damaged.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[Path, Any] = {}

    def check_names(self, wanted: set[str], tied: bool) -> None:
        """Raises a DataError if the files do not hold exactly the ``wanted`` tensors.

        A head that repeats the embedding it is ``tied`` to, and tables of rotary frequencies, are ignored.
        """
        present = {name for name in self._files if not name.endswith(_REDUNDANT)}
        if tied:
            present.discard(_HEAD)
        if wanted != present:
            missing, unknown = sorted(wanted - present), sorted(present - wanted)
            parts = "; ".join(
                f"{len(names)} tensors are {kind}, such as {names[0]}"
                for kind, names in (("missing", missing), ("unknown", unknown))
                if names
            )
            remedy = "Fetch the model again"
            if missing == [_HEAD] and not unknown:
                remedy = "If its head is its embedding, set tie_word_embeddings to true in config.json"
            raise DataError(f"the weights in {self._folder} do not fit its config.json: {parts}. {remedy}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; raises a DataError if it is quantised or of another data type."""
        tensor = self._slice(name)
        if tensor.get_dtype() not in _READABLE:
            raise DataError(
                f"{name} in {self._files[name]} is stored as {tensor.get_dtype()}; only "
                f"{', '.join(_READABLE)} are read, so give a checkpoint that is not quantised"
            )
        return tuple(tensor.get_shape())

    def differ(self, name: str, other: str) -> bool:
        """Whether there is a tensor of this name, and it has other values than the other one."""
        if name not in self._files or other not in self._files:
            return False
        shape, step = self.shape(name), _COMPARED_ROWS
        parts = ((slice(row, min(row + step, shape[0])),) for row in range(0, shape[0], step))
        return shape != self.shape(other) or any(
            not np.array_equal(self.read(name, part), self.read(other, part)) for part in parts
        )

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a tensor in its stored dtype."""
        return self._slice(name)[index]

    def _slice(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        try:
            return self._open[path].get_slice(name)
        except SafetensorError as error:
            fault = f"has no tensor {name}, though its index says so; fetch it again"
            raise DataError(f"{path} {fault}") from error

    @cached_property
    def _files(self) -> dict[str, Path]:
        index = self._folder / INDEX
        if index.exists():
            weight_map = read_json(index, _Index, REMEDY, foreign=True).weight_map
            files = {name: self._folder / Path(file).name for name, file in weight_map.items()}
            for path in sorted(set(files.values())):
                if not path.exists():
                    raise DataError(f"{path} does not exist, though {index} names it; fetch it")
            return files
        single = self._folder / SINGLE
        if single.exists():
            return dict.fromkeys(_opened(single).keys(), single)
        pickles = sorted(path.name for pattern in _PICKLES for path in self._folder.glob(pattern))
        if pickles:
            raise DataError(
                f"{self._folder} holds only pickled weights ({pickles[0]}), which can run any code when "
                "they are opened and are not read. If you trust them, convert them with transformers: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        raise DataError(f"{self._folder} holds neither {SINGLE} nor {INDEX}; give a model's folder")


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy").__enter__()
    except (SafetensorError, OSError) as error:
        remedy = remedy_for(error, "it may be cut short; fetch it again")
        raise DataError(f"{path} cannot be read as safetensors ({error}); {remedy}") from error


@dataclass(frozen=True)
class _Source:
    """The tensors of one array of this ``shape``."""

    files: TensorFiles
    weight: Weight
    layers: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        expected, inputs = self._one, self.weight.input_dims
        if self.weight.vector:
            expected = (prod(expected),)
        elif inputs:
            expected = (self.weight.rows or prod(expected[inputs:]), prod(expected[:inputs]))
        for name in self.weight.names(self.layers):
            found = self.files.shape(name)
            if found != expected:
                raise DataError(
                    f"{name} has shape {list(found)}; by config.json it should be {list(expected)}. "
                    "Take both files from the same model"
                )

    @property
    def _one(self) -> tuple[int, ...]:
        return self.shape[1:] if self.weight.stacked else self.shape

    def read(self, index: Any) -> np.ndarray:
        """Reads one device's part of the array; ``index`` has a slice for each dimension."""
        names = self.weight.names(self.layers)
        if not self.weight.stacked:
            return self._read(names[0], index)
        return np.stack([self._read(name, index[1:]) for name in names[index[0]]])

    def _read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of one layer's array: whole heads of its tensor, and then the slices within them."""
        inputs, shape = self.weight.input_dims, self._one
        if not (inputs or self.weight.vector):
            return self.files.read(name, index)
        rows = _flat(index[inputs:], shape[inputs:])
        if inputs:
            rows = slice(self.weight.first_row + rows.start, self.weight.first_row + rows.stop)
            part = self.files.read(name, (rows, _flat(index[:inputs], shape[:inputs]))).T
        else:
            part = self.files.read(name, (rows,))
        first, dims = {0, inputs}, range(len(shape))
        sizes = [len(range(shape[i])[index[i]]) if i in first else shape[i] for i in dims]
        return part.reshape(sizes)[tuple(slice(None) if i in first else index[i] for i in dims)]


def _flat(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
    """The slice of the flattened dimensions that the slice of the first dimension covers."""
    first, inner = range(shape[0])[index[0]], prod(shape[1:])
    return slice(first.start * inner, first.stop * inner)


def save_pretrained(
    model: Llama,
    path: str | Path,
    context: int | None = None,
    write_others: Callable[[Path], None] | None = None,
) -> None:
    """Saves a model as a folder that ``transformers`` opens: ``config.json`` and safetensors.

    The folder is replaced whole: a process killed at any moment leaves no mixture of two models. Every
    process of a job must call it; the first one writes. A process holds ``SHARD_BYTES`` at a time.

    Args:
      model: model on any mesh; weights are saved in their own dtype.
      path: folder, created if missing. Other files in it are kept.
      context: context that the model was made for; None is that of its configuration, else that of its
        rotary scaling, or 2048. Dynamic rotary scaling is written as the plain rotary positions that it is
        equal to for the context in use, because ``transformers`` would scale by the length of each text.
      write_others: writes further files that belong to the model into a folder, such as ``Tokenizer.save``.

    Raises:
      ArgumentError: the weights have several dtypes, or ``context`` is not the one that dynamic rotary
        scaling is set for.
      OSError: the disk is full, or cannot be written; ``path`` is unchanged.
    """
    config = model.config
    arrays = {place: leaf[...] for place, leaf in nnx.to_flat_state(nnx.split(model)[1])}
    dtypes = sorted({str(array.dtype) for array in arrays.values()})
    if len(dtypes) > 1:
        raise ArgumentError(f"the model's weights have several dtypes, {dtypes}; cast them to one")
    layers = config.transformer.layers
    parts: dict[str, list[tuple[Weight, int]]] = {}
    for weight in weights(config):
        for layer, name in enumerate(weight.names(layers)):
            parts.setdefault(name, []).append((weight, layer))
    sizes = {
        name: sum(arrays[weight.path].nbytes // len(weight.names(layers)) for weight, _ in each)
        for name, each in parts.items()
    }

    def fetch(name: str) -> np.ndarray:
        rows = [_fetched(weight, arrays[weight.path], layer) for weight, layer in parts[name]]
        return np.ascontiguousarray(rows[0] if len(rows) == 1 else np.concatenate(rows))

    fields = config_fields(config, context, dtypes[0])
    if jax.process_index() != 0:
        for name in parts:
            fetch(name)  # every process takes part in gathering it
        return
    shards, placed = _shards(sizes), {}
    with replacing_folder(Path(path), obsolete=_WEIGHT_FILES) as folder:
        for number, shard in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            placed |= dict.fromkeys(shard, file)
            _save_tensors({name: fetch(name) for name in shard}, folder / file)
        written = {"config.json": fields}
        if len(shards) > 1:
            written[INDEX] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": placed}
        for file, content in written.items():
            (folder / file).write_text(json.dumps(content, indent=2) + "\n")
        if write_others is not None:
            write_others(folder)


def _fetched(weight: Weight, array: jax.Array, layer: int) -> np.ndarray:
    part = array[layer] if weight.stacked else array
    addressable = part.is_fully_addressable
    values = np.asarray(part) if addressable else multihost_utils.process_allgather(part, tiled=True)
    if weight.vector:
        return values.reshape(-1)
    return values.reshape(prod(part.shape[: weight.input_dims]), -1).T if weight.input_dims else values


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    """Divides tensors of these sizes in order over files of at most ``SHARD_BYTES``."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _save_tensors(content: dict[str, np.ndarray], path: Path) -> None:
    try:
        save_file(content, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))  # the only sign of an error of the disk
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
