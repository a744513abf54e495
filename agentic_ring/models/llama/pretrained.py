"""LLaMA checkpoints: loaded into sharded arrays, from Hugging Face's format or GGUF, and saved in the first.

A folder holds ``config.json`` and ``*.safetensors``; a GGUF file holds all of it. Each device's part of each
array is read directly from the files: no host ever holds a whole model.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, SingleDeviceSharding

from agentic_ring.errors import ArgumentError, DataError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing_folder
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.llama.adapter import Adapter, open_adapter
from agentic_ring.models.llama.config_file import config_fields, read_config
from agentic_ring.models.llama.families import Weight, weights
from agentic_ring.models.llama.model import Llama, LlamaConfig
from agentic_ring.models.llama.tensor_files import (
    HEAD,
    INDEX,
    SINGLE,
    TensorFiles,
    open_tensors,
    save_tensors,
)
from agentic_ring.models.transformer_config import Dtype
from agentic_ring.terminal.progress import say

with needs_extra("models"):
    from flax import nnx

SHARD_BYTES = 4 * 2**30
"""Maximum size of a saved file, unless one tensor is larger, and of the host memory used while saving."""
_WEIGHT_FILES = r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"


def load_pretrained(
    path: str | Path,
    mesh: Mesh | None = None,
    dtype: Dtype | None = None,
    *,
    rules: ShardingRules = ShardingRules(),
    context: int | None = None,
    adapter: Adapter | str | Path | None = None,
) -> Llama:
    """Loads a model from a folder with ``config.json`` and ``*.safetensors``, or a GGUF file, over a mesh.

    Args:
      path: folder or file.
      mesh: devices of the weights; call the model under ``jax.set_mesh(mesh)``. None is one device.
      dtype: dtype of weights and computation; None is the stored one, or float32 if that is float16 or
        quantised.
      rules: mesh axes of each logical axis.
      context: context in use, in tokens; only "dynamic" rotary scaling needs it.
      adapter: a LoRA adapter to merge into the weights: one that is open, or its folder.

    Raises:
      DataError: a file is missing, damaged, pickled, or does not fit ``config.json``; or the adapter is
        another model's.
      UnknownNameError: the family is not supported.
    """
    path = Path(path)
    if isinstance(adapter, str | Path):
        adapter = open_adapter(adapter)
    config = read_stored_config(path, context, adapter)
    stack = replace(config.transformer, rules=rules, dtype=dtype or config.transformer.dtype)
    if adapter is not None:
        adapter.check_base(open_tensors(path))
    llama = load_weights(path, replace(config, transformer=stack), mesh, stack.dtype)
    return llama if adapter is None else adapter.merged(llama)


def read_stored_config(path: Path, context: int | None = None, adapter: Adapter | None = None) -> LlamaConfig:
    """Reads the configuration of stored weights: their head may differ from what config.json says.

    As with ``transformers``, a head that is stored and is not the embedding counts, with a warning.
    """
    config = read_config(path, context, adapter)
    if config.tied and open_tensors(path).differ(HEAD, "model.embed_tokens.weight"):
        say(f"warning: {path} has a head of its own, though by config.json it is the embedding; it is used")
        config = replace(config, tied=False)
    return config


def load_weights(path: Path, config: LlamaConfig, mesh: Mesh | None, dtype: Dtype) -> Llama:
    """Loads the weights of the model ``config`` from the folder or file ``path``, in ``dtype``."""
    layers, rules = config.transformer.layers, config.transformer.rules
    files, ours = open_tensors(path), weights(config)
    files.check_names({name for weight in ours for name in weight.names(layers)}, config.tied)
    graphdef, state = nnx.split(jax.eval_shape(lambda: config.build(jax.random.key(0))))
    parameters: dict[Any, Any] = dict(nnx.to_flat_state(state))
    one_device = SingleDeviceSharding(jax.devices()[0])
    for weight in ours:
        parameter = parameters[weight.path]
        shape, axes = parameter.get_value().shape, parameter.get_metadata()["logical_axes"]
        source = _Source(files, weight, layers, shape, jnp.dtype(dtype))
        sharding = one_device if mesh is None else rules.sharding(mesh, shape, axes)
        parameters[weight.path] = parameter.replace(
            jax.make_array_from_callback(shape, sharding, source.read)
        )
    return nnx.merge(graphdef, nnx.from_flat_state(parameters))


@dataclass(frozen=True)
class _Source:
    """The tensors of one array of this ``shape`` and ``dtype``."""

    files: TensorFiles
    weight: Weight
    layers: int
    shape: tuple[int, ...]
    dtype: np.dtype

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
                    f"{name} has shape {list(found)}; by the {self.files.config_name} of {self.files.path} "
                    f"it should be {list(expected)}. Take both from the same model"
                )

    @property
    def _one(self) -> tuple[int, ...]:
        return self.shape[1:] if self.weight.stacked else self.shape

    def read(self, index: Any) -> np.ndarray:
        """Reads one device's part of the array; ``index`` has a slice for each dimension."""
        names = self.weight.names(self.layers)
        if not self.weight.stacked:
            return self._read(names[0], index)
        sizes = [len(range(size)[part]) for size, part in zip(self.shape, index, strict=True)]
        whole = np.empty(sizes, self.dtype)
        for layer, name in enumerate(names[index[0]]):  # beside the array, the host holds one tensor
            whole[layer] = self._read(name, index[1:])
        return whole

    def _read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of one layer's array: whole heads of its tensor, and then the slices within them."""
        inputs, shape = self.weight.input_dims, self._one
        if not (inputs or self.weight.vector):
            return self.files.read(name, index).astype(self.dtype, copy=False)
        rows = _flat(index[inputs:], shape[inputs:])
        if inputs:
            rows = slice(self.weight.first_row + rows.start, self.weight.first_row + rows.stop)
            part = self.files.read(name, (rows, _flat(index[:inputs], shape[:inputs]))).T
        else:
            part = self.files.read(name, (rows,))
        first, dims = {0, inputs}, range(len(shape))
        sizes = [len(range(shape[i])[index[i]]) if i in first else shape[i] for i in dims]
        part = part.reshape(sizes)[tuple(slice(None) if i in first else index[i] for i in dims)]
        return part.astype(self.dtype, copy=False)


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
            save_tensors({name: fetch(name) for name in shard}, folder / file)
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
