"""The folder of a trained policy, and how it is loaded.

The folder of a policy is that of a run, with one file of weights in place of its checkpoints:

    config.json         the configuration of the run, see ``agentic_ring.run``
    model.safetensors   parameters by dotted name, float32, or float16 where trajectories tell the task; the
                        header has their step and digest
    README.md           model card
    results.json, evaluation.npz, metrics.jsonl   as in the folder of the run
    trajectories.npz    those that tell it a reward, see ``data.told_decisions``
    tasks.json          its returns in all tasks of the domain, told by them

Policies that come with the package are folders beside this file.
"""

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.errors import CheckpointError, ConfigError, DataError, UnknownNameError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing
from agentic_ring.files.run_folder import write_config
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model, Params
from agentic_ring.policies.acting import Policy, TellablePolicy
from agentic_ring.run import RunConfig, ToldRunConfig, load_any_config
from agentic_ring.training.checkpoint import SavedCheckpoints
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import abstract_state

with needs_extra("models"):
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save

WEIGHTS = "model.safetensors"
TASKS = "tasks.json"
SHIPPED = Path(__file__).parent
_STORED = np.float16, np.float32


def load_policy(policy: str | Path, target: float | None = None) -> Policy | TellablePolicy:
    """Loads a trained Agentic Transformer for use, on JAX's first device.

    It is a ``TellablePolicy`` if trajectories tell the task in its run.

    Args:
      policy: name of a shipped policy such as ``walker_run``, folder of a run or of an exported policy, or
        a policy's ``model.safetensors``.
      target: return that every trial is conditioned on; None takes that of the run.

    Raises:
      UnknownNameError: there is no such policy; the message lists those that are shipped.
      DataError: the configuration or the weights are damaged.
      CheckpointError: the run has no checkpoint, or the weights do not fit the configuration.
      ConfigError: the policy acts after a prompt of stored trajectories; or there is a target, but
        trajectories tell the task.
    """
    folder = policy_folder(policy)
    config = load_any_config(folder)
    if isinstance(config, ToldRunConfig) and target is not None:
        raise ConfigError(
            f"target is {target}, but trajectories tell the policy of {folder} its task; leave the target "
            "out, and call the policy's method tell"
        )
    params, _ = load_params(folder, config, make_mesh(MeshShape(), jax.devices()[:1]))
    if isinstance(config, ToldRunConfig):
        return TellablePolicy(config, params, ToldDecisions.read(folder))
    return Policy(config, params, target)


def shipped_policies() -> tuple[str, ...]:
    """Returns the names of the policies that come with the package: their tasks' full names, or domains'."""
    return tuple(sorted(weights.parent.name for weights in SHIPPED.glob(f"*/{WEIGHTS}")))


def is_policy(folder: Path) -> bool:
    """Whether a folder is that of a policy, and not that of a run."""
    return (folder / WEIGHTS).exists()


def policy_folder(policy: str | Path) -> Path:
    """Returns the folder of a policy or a run, given as in ``load_policy``, or raises an UnknownNameError."""
    path = Path(policy)
    if str(policy) in shipped_policies():
        return SHIPPED / policy
    if path.is_file() and path.name == WEIGHTS:
        return path.parent
    if path.is_dir():
        return path
    kind = f"policy (neither the folder of a run, nor a {WEIGHTS}, nor a shipped policy)"
    raise UnknownNameError(kind, str(policy), shipped_policies())


def write_policy(folder: Path, config: RunConfig | ToldRunConfig, params: Params, step: int) -> None:
    """Writes ``config.json`` and the weights of the checkpoint of update ``step`` to a folder."""
    # What a policy in half precision returns is measured on the policy; others must act as their run did.
    dtype = np.float16 if isinstance(config, ToldRunConfig) else np.float32
    tensors = {name: np.asarray(value, dtype) for name, value in _by_name(params).items()}
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
        if found is None or wanted is None or found.shape != wanted.shape or found.dtype not in _STORED:
            raise CheckpointError(
                f"{path} does not fit {folder / 'config.json'}: {name} is {_described(found)}, "
                f"expected {_described(wanted)}. Keep both files of one export together"
            )
    shardings = model.param_shardings(mesh, model.config.transformer.rules)
    loaded = [
        jax.device_put(tensors[name].astype(np.float32), sharding)
        for name, sharding in _by_name(shardings).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(shardings), loaded), int(notes["step"])


def policy_trajectories(folder: Path, config: ToldRunConfig) -> ToldDecisions:
    """The trajectories that a policy keeps; for a run, as many of its store as its chains have."""
    kept, chains = ToldDecisions.read(folder), config.chains
    if kept is not None:
        return kept
    with TrajectoryStore.open(config.store) as store:
        told = np.arange(store.num_episodes)[-config.held_back :]
        drawn = np.random.default_rng(chains.seed).permutation(told)[: chains.trajectories]
        return ToldDecisions.of_store(store, config.scaling, chains.action_repeat, drawn)


def _by_name(tree: Params) -> dict[str, Any]:
    """The leaves of a tree of parameters by dotted name."""
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _described(array: np.ndarray | jax.Array | None) -> str:
    return "missing" if array is None else f"{array.dtype} {list(array.shape)}"


def checkpoint_step(run: Path, checkpoint: Literal["last", "best"]) -> int:
    """The step of a run's checkpoint; a ``CheckpointError`` if it has none."""
    saved = SavedCheckpoints(run / "checkpoints")
    step = saved.last_step if checkpoint == "last" else saved.best_step
    if step is None:
        raise CheckpointError(f"{run} has no checkpoint; train it first")
    return step


def load_params(
    run: Path, config: RunConfig | ToldRunConfig, mesh: Mesh, checkpoint: Literal["last", "best"] = "last"
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
