"""The folder of a policy: that of a run, with one file of weights in place of its checkpoints.

    config.json         the configuration of the run, see ``RunConfig``
    model.safetensors   float32 parameters by dotted name; the header has their step and digest
    README.md           model card
    results.json, evaluation.npz, metrics.jsonl   as in the folder of the run

Policies that come with the package are folders beside this file.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.errors import CheckpointError, DataError, UnknownNameError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing
from agentic_ring.files.run_folder import write_config
from agentic_ring.models.model import Model, Params
from agentic_ring.run import RunConfig

with needs_extra("models"):
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save
from typing import Literal

from agentic_ring.training.checkpoint import SavedCheckpoints
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import abstract_state

WEIGHTS = "model.safetensors"
SHIPPED = Path(__file__).parent


def shipped_policies() -> tuple[str, ...]:
    """Returns the names of the policies that come with the package: full names of their tasks."""
    return tuple(sorted(weights.parent.name for weights in SHIPPED.glob(f"*/{WEIGHTS}")))


def is_policy(folder: Path) -> bool:
    """Whether a folder is that of a policy, and not that of a run."""
    return (folder / WEIGHTS).exists()


def policy_folder(policy: str | Path) -> Path:
    """Returns the folder of a policy or of a run.

    Args:
      policy: name of a shipped policy, folder of a policy or of a run, or a policy's file of weights.

    Raises:
      UnknownNameError: it is neither a path that exists nor the name of a shipped policy.
    """
    path = Path(policy)
    if str(policy) in shipped_policies():
        return SHIPPED / policy
    if path.is_file() and path.name == WEIGHTS:
        return path.parent
    if path.is_dir():
        return path
    raise UnknownNameError(
        f"policy (neither the folder of a run, nor a {WEIGHTS}, nor a shipped policy)",
        str(policy),
        shipped_policies(),
    )


def write_policy(folder: Path, config: RunConfig, params: Params, step: int) -> None:
    """Writes ``config.json`` and the weights.

    Args:
      folder: folder of the policy; it is created if it does not exist.
      config: configuration of the run.
      params: parameters of a checkpoint, float32.
      step: number of updates after which the checkpoint was saved.
    """
    tensors = {name: np.asarray(value) for name, value in _by_name(params).items()}
    with replacing(folder / WEIGHTS) as beside:
        beside.write_bytes(save(tensors, {"step": str(step), "digest": _digest(tensors)}))
    write_config(folder, config)


def read_policy(folder: Path, model: Model, mesh: Mesh) -> tuple[Params, int]:
    """Reads the weights of a policy onto ``mesh``; also returns their step.

    Raises:
      DataError: the file is missing or damaged.
      CheckpointError: it belongs to another configuration.
    """
    path = folder / WEIGHTS
    damaged = "; export the policy again, or install the package again"
    try:
        with safe_open(path, framework="numpy") as file:
            notes = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read as safetensors: {error}{damaged}") from error
    if notes.get("digest") != _digest(tensors) or not notes.get("step", "").isdecimal():
        raise DataError(f"{path} was changed after it was written: its digest does not match{damaged}")
    expected = _by_name(model.abstract_params())
    for name in sorted(expected.keys() | tensors.keys()):
        found, wanted = tensors.get(name), expected.get(name)
        if found is None or wanted is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise CheckpointError(
                f"{path} does not fit {folder / 'config.json'}: {name} is {_described(found)}, "
                f"expected {_described(wanted)}. Keep both files of one export together"
            )
    shardings = model.param_shardings(mesh, model.config.transformer.rules)
    return jax.tree.map_with_path(
        lambda path, sharding: jax.device_put(tensors[_name(path)], sharding), shardings
    ), int(notes["step"])


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _by_name(params: Params) -> dict[str, jax.Array]:
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _described(array: np.ndarray | jax.Array | None) -> str:
    return "missing" if array is None else f"{array.dtype} {list(array.shape)}"


def checkpoint_step(run: Path, checkpoint: Literal["last", "best"]) -> int:
    """The step of a run's checkpoint.

    Raises:
      CheckpointError: the run has no checkpoint.
    """
    saved = SavedCheckpoints(run / "checkpoints")
    step = saved.last_step if checkpoint == "last" else saved.best_step
    if step is None:
        raise CheckpointError(f"{run} has no checkpoint; train it first")
    return step


def load_params(
    run: Path, config: RunConfig, mesh: Mesh, checkpoint: Literal["last", "best"] = "last"
) -> tuple[Params, int]:
    """Loads the parameters of a run's checkpoint, or of a policy, onto ``mesh``; also returns their step.

    Raises:
      CheckpointError: the run has no checkpoint, it is damaged, or it does not fit the configuration; or the
        best checkpoint of a policy is asked for, which has only one.
      DataError: the weights of a policy are damaged.
    """
    model = Model(config.model)
    if is_policy(run):
        if checkpoint == "best":
            raise CheckpointError(f"{run} is a policy with one set of weights; ask for its last checkpoint")
        return read_policy(run, model, mesh)
    step = checkpoint_step(run, checkpoint)
    optimizer = make_optimizer(config.training.optimizer, config.training.steps)
    with jax.set_mesh(mesh):
        like = abstract_state(model, optimizer, mesh, config.model.transformer.rules)
        state, _ = SavedCheckpoints(run / "checkpoints").restore(step, like)
    return state.params, step
