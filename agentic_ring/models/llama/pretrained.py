"""LLaMA checkpoints in Hugging Face's format: loaded into sharded arrays, and saved.

A folder holds ``config.json`` and ``*.safetensors``. Each device's part of each array is read directly from
the files: no host ever holds a whole model.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, SingleDeviceSharding

from agentic_ring.errors import ArgumentError, DataError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing_folder
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.llama.config_file import config_fields, read_config
from agentic_ring.models.llama.model import Llama, LlamaConfig
from agentic_ring.models.llama.tensor_files import INDEX, SINGLE, TensorFiles
from agentic_ring.models.llama.weight_names import Weight, weights

with needs_extra("models"):
    from flax import nnx
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

Dtype = Literal["float32", "bfloat16"]

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
) -> Llama:
    """Loads a model from a folder, sharded over a mesh.

    Args:
      path: folder with ``config.json`` and ``*.safetensors``.
      mesh: devices of the weights; call the model under ``jax.set_mesh(mesh)``. None is one device.
      dtype: dtype of weights and computation; None is the stored one, or float32 if that is float16.
      rules: mesh axes of each logical axis.
      context: context in use, in tokens; only "dynamic" rotary scaling needs it.

    Raises:
      DataError: a file is missing, damaged, pickled, or does not fit ``config.json``.
      UnknownNameError: the architecture or the kind of rotary scaling is not supported.
    """
    path = Path(path)
    config = read_config(path, context)
    stack = replace(config.transformer, rules=rules, dtype=dtype or config.transformer.dtype)
    return load_weights(path, replace(config, transformer=stack), mesh, stack.dtype)


def load_weights(path: Path, config: LlamaConfig, mesh: Mesh | None, dtype: Dtype) -> Llama:
    """Loads the weights of the model ``config`` from the folder ``path``, in ``dtype``."""
    layers, rules = config.transformer.layers, config.transformer.rules
    files, ours = TensorFiles(path), weights(config)
    files.check_names({name for weight in ours for name in weight.names(layers)}, config.tied)
    graphdef, state = nnx.split(jax.eval_shape(lambda: config.build(jax.random.key(0))))
    parameters: dict[Any, Any] = dict(nnx.to_flat_state(state))
    for weight in ours:
        parameter = parameters[weight.path]
        shape = parameter.get_value().shape
        source = _Source(files, weight, layers, shape)
        source.check_shapes()
        if mesh is None:
            sharding = SingleDeviceSharding(jax.devices()[0])
        else:
            sharding = rules.sharding(mesh, shape, parameter.get_metadata()["logical_axes"])
        array = jax.make_array_from_callback(
            shape, sharding, lambda index, source=source: source.read(index).astype(jnp.dtype(dtype))
        )
        parameters[weight.path] = parameter.replace(array)
    return nnx.merge(graphdef, nnx.from_flat_state(parameters))


@dataclass(frozen=True)
class _Source:
    """The tensors of one array of this ``shape``."""

    files: TensorFiles
    weight: Weight
    layers: int
    shape: tuple[int, ...]

    @property
    def _matrix(self) -> tuple[int, ...]:
        """Shape of each tensor."""
        shape, inputs = self._one, self.weight.input_dims
        if not inputs:
            return (prod(shape),) if self.weight.vector else shape
        return (self.weight.rows or prod(shape[inputs:]), prod(shape[:inputs]))

    @property
    def _one(self) -> tuple[int, ...]:
        """Shape of the parameter of one layer."""
        return self.shape[1:] if self.weight.stacked else self.shape

    def check_shapes(self) -> None:
        """Raises a DataError if the shape of a tensor differs from the one in the configuration."""
        for name in self.weight.names(self.layers):
            found = self.files.shape(name)
            if found != self._matrix:
                raise DataError(
                    f"{name} has shape {list(found)}; by config.json it should be {list(self._matrix)}. "
                    "Take both files from the same model"
                )

    def read(self, index: Any) -> np.ndarray:
        """Reads one device's part of the array; ``index`` has a slice for each dimension."""
        names = self.weight.names(self.layers)
        if not self.weight.stacked:
            return self._read(names[0], index)
        return np.stack([self._read(name, index[1:]) for name in names[index[0]]])

    def _read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of one layer's array from the corresponding rows and columns of its tensor."""
        inputs = self.weight.input_dims
        shape = self._one
        if self.weight.vector:
            part = self.files.read(name, (_flat(index, shape),))
            return part.reshape(-1, *shape[1:])[(slice(None), *index[1:])]
        if not inputs:
            return self.files.read(name, index)
        rows, columns = _flat(index[inputs:], shape[inputs:]), _flat(index[:inputs], shape[:inputs])
        first = self.weight.first_row
        matrix = self.files.read(name, (slice(first + rows.start, first + rows.stop), columns)).T
        outer = [len(range(size)[part]) for part, size in zip(index, shape, strict=True)]
        # The slice of the matrix contains whole heads.
        for inner in (i for i in range(len(shape)) if i not in (0, inputs)):
            outer[inner] = shape[inner]
        whole_heads = tuple(part if i not in (0, inputs) else slice(None) for i, part in enumerate(index))
        return matrix.reshape(outer)[whole_heads]


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
    tensors = _joined(
        tensor
        for weight in weights(config)
        for tensor in _tensors(weight, arrays[weight.path], config.transformer.layers)
    )
    shards = _shards(tensors)
    fields = config_fields(config, context, dtypes[0])
    if jax.process_index() != 0:
        for tensor in tensors:
            tensor.fetch()  # every process takes part in gathering it
        return
    placed = {}
    with replacing_folder(Path(path), obsolete=_WEIGHT_FILES) as folder:
        for number, shard in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            content = {tensor.name: tensor.fetch() for tensor in shard}
            placed |= dict.fromkeys(content, file)
            _save_tensors(content, folder / file)
        if len(shards) > 1:
            total = sum(tensor.size for tensor in tensors)
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})
        _write_json(folder / "config.json", fields)
        if write_others is not None:
            write_others(folder)


def _save_tensors(content: dict[str, np.ndarray], path: Path) -> None:
    try:
        save_file(content, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))  # the only sign of an error of the disk
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


@dataclass(frozen=True)
class _Tensor:
    """A tensor to write: its name, its size in bytes, and a function that fetches it to this host."""

    name: str
    size: int
    fetch: Callable[[], np.ndarray]


def _tensors(weight: Weight, array: jax.Array, layers: int) -> list[_Tensor]:
    def fetch(layer: int | None) -> np.ndarray:
        part = array if layer is None else array[layer]
        values = (
            np.asarray(part)
            if part.is_fully_addressable
            else multihost_utils.process_allgather(part, tiled=True)
        )
        if weight.input_dims:
            values = values.reshape(prod(part.shape[: weight.input_dims]), -1).T
        if weight.vector:
            values = values.reshape(-1)
        return np.ascontiguousarray(values)

    names = weight.names(layers)
    size = array.nbytes // len(names)
    if not weight.stacked:
        return [_Tensor(names[0], size, lambda: fetch(None))]
    return [_Tensor(name, size, lambda layer=layer: fetch(layer)) for layer, name in enumerate(names)]


def _joined(tensors: Iterable[_Tensor]) -> list[_Tensor]:
    """Tensors of one name as one, with their rows below each other."""
    by_name: dict[str, list[_Tensor]] = {}
    for tensor in tensors:
        by_name.setdefault(tensor.name, []).append(tensor)

    def join(name: str, parts: list[_Tensor]) -> _Tensor:
        size = sum(part.size for part in parts)
        return _Tensor(name, size, lambda: np.concatenate([part.fetch() for part in parts]))

    return [parts[0] if len(parts) == 1 else join(name, parts) for name, parts in by_name.items()]


def _shards(tensors: list[_Tensor]) -> list[list[_Tensor]]:
    """Divides the tensors in order over files of at most ``SHARD_BYTES``."""
    shards: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(held.size for held in shards[-1]) + tensor.size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
