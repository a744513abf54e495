"""A trained Agentic Transformer that acts, trial after trial, in one or many environments; and its folder.

The folder of a policy is that of a run, with one file of weights in place of its checkpoints:

    config.json         the configuration of the run, see ``RunConfig``
    model.safetensors   float32 parameters by dotted name; the header has their step and digest
    README.md           model card
    results.json, evaluation.npz, metrics.jsonl   as in the folder of the run

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
from numpy.typing import ArrayLike

from agentic_ring.data.domains import parse_task
from agentic_ring.errors import ArgumentError, CheckpointError, ConfigError, DataError, UnknownNameError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing
from agentic_ring.files.run_folder import write_config
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model, Params
from agentic_ring.run import RunConfig, load_config
from agentic_ring.training.checkpoint import SavedCheckpoints
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import abstract_state

with needs_extra("models"):
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save

WEIGHTS = "model.safetensors"
SHIPPED = Path(__file__).parent


class Policy:
    """Acts in E environments that step together; every trial stays in context until ``reset``.

    An action is held for ``action_repeat`` control steps, as in training: ``act`` is called at every control
    step and returns the same action until the decision is over.

    Raises:
      ConfigError: the run's trials come after a prompt of stored trajectories.
      ArgumentError: the target is not finite.

    Attributes:
      task: full name of the task, such as ``walker_run``.
      action_repeat: control steps for which an action is held.
      trials: number of episodes in a row that the policy takes after a reset, as in its run.
      target: return that every trial is conditioned on; by default that of the run.
    """

    def __init__(self, config: RunConfig, params: Params, target: float | None = None):
        if config.evaluation.prompt_trajectories:
            raise ConfigError(
                f"the policy acts after a prompt of {config.evaluation.prompt_trajectories} stored "
                "trajectories, which are not part of it; roll its run out with evals/dmc_returns.py --run"
            )
        self.task = config.task
        self.action_repeat = config.chains.action_repeat
        self.trials = config.evaluation.trials
        self.target = config.target if target is None else float(target)
        if not np.isfinite(self.target):
            raise ArgumentError(f"target is {self.target}; give a finite return, such as {config.target:.1f}")
        self._episode_steps = parse_task(config.task).domain.episode_steps
        self._config = config
        self._params = params
        self._mesh = make_mesh(MeshShape(), jax.devices()[:1])
        self._in_context: InContextPolicy | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets all trials; the next ``act`` starts the first one, in any number of environments."""
        self._rows: tuple[int, ...] | None = None
        self._trial = self._decision = self._held = 0
        self._awaits_reward = False

    def act(self, observation: ArrayLike) -> np.ndarray:
        """Returns actions float32 [E, A] in [-1, 1], or [A] for one environment.

        Args:
          observation: flat observations of the task [E, O], or [O]; E stays the same until a reset.

        Raises:
          ArgumentError: the shape is wrong or a value is not finite; the reward of the last action was not
            received; or all trials have ended, or the steps of an episode are over.
        """
        observed = self._checked_observation(observation)
        if self._held == 0:
            rows = np.atleast_2d(observed)
            policy = self._policy_for(len(rows))
            if self._decision == 0:
                policy.begin_trial()
            self._action = np.asarray(policy.act(rows)).reshape(*observed.shape[:-1], -1)
            self._reward = np.zeros(len(rows))
        self._rows, self._awaits_reward = observed.shape[:-1], True
        return self._action.copy()

    def receive(self, reward: ArrayLike, done: ArrayLike) -> None:
        """Receives the rewards [E] of the last actions, or one reward for one environment.

        Args:
          reward: rewards of one control step.
          done: whether the episodes ended with this step, terminated or truncated: bool or bool [E].

        Raises:
          ArgumentError: no action was asked for; the shape is wrong or a value is not finite; or only some
            of the environments ended.
        """
        if not self._awaits_reward or self._in_context is None:
            raise ArgumentError("a reward was given before an action; call act first")
        earned, ended = np.asarray(reward, np.float64), np.asarray(done, bool)
        if earned.shape != self._rows or not np.isfinite(earned).all():
            raise ArgumentError(f"reward is {_brief(earned)}; expected finite numbers of shape {self._rows}")
        if ended.shape not in ((), self._rows) or ended.any() != ended.all():
            raise ArgumentError(
                f"done is {_brief(ended)}; expected one value, or {self._rows} equal ones: environments in "
                "which a policy acts together end together, as those of one task do"
            )
        self._awaits_reward = False
        self._reward += np.atleast_1d(earned)
        self._held += 1
        last = bool(ended.all())
        if last or self._held == self.action_repeat:
            self._in_context.receive(self._reward.astype(np.float32), last)
            self._held, self._decision = 0, self._decision + 1
        if last:
            self._trial, self._decision = self._trial + 1, 0

    def _policy_for(self, environments: int) -> InContextPolicy:
        """The policy of the current trials; a new one, or one without trials, for the first action."""
        if self._in_context is None or self._in_context.num_environments != environments:
            model, scaling = Model(self._config.model), self._config.scaling
            sizes = environments, self._config.decisions * self.trials
            self._in_context = InContextPolicy(model, self._params, self._mesh, scaling, self.target, *sizes)
        elif self._rows is None:
            self._in_context.discard_trials()
        return self._in_context

    def _checked_observation(self, observation: ArrayLike) -> np.ndarray:
        if self._awaits_reward:
            raise ArgumentError("the reward of the last action is missing; call receive after every action")
        if self._trial == self.trials:
            raise ArgumentError(f"all {self.trials} trials have ended; call reset to forget them")
        if self._decision * self.action_repeat + self._held == self._episode_steps:
            raise ArgumentError(
                f"an episode of {self.task} ends after {self._episode_steps} steps, but none of them was "
                "done; give `terminated | truncated` to receive, and let vector environments reset in the "
                f"same step, as gymnasium.make_vec('agentic_ring/{self.task}-v0', E) does"
            )
        observed = np.asarray(observation, np.float32)
        width = self._config.model.observation_dim
        fits = observed.ndim in (1, 2) and observed.size > 0 and observed.shape[-1] == width
        if not fits or observed.shape[:-1] != (self._rows if self._rows is not None else observed.shape[:-1]):
            expected = f"[{width}] or [E, {width}]" if self._rows is None else str([*self._rows, width])
            raise ArgumentError(
                f"observation is {_brief(observed)}; {self.task} needs shape {expected}, flat as "
                f"agentic_ring/{self.task}-v0 gives them"
            )
        if not np.isfinite(observed).all():
            raise ArgumentError("observation has values that are not finite; reset the environment")
        return observed


def load_policy(policy: str | Path, target: float | None = None) -> Policy:
    """Loads a trained Agentic Transformer for use, on JAX's first device.

    Args:
      policy: name of a shipped policy such as ``walker_run``, folder of a run or of an exported policy, or
        a policy's ``model.safetensors``.
      target: return that every trial is conditioned on; None takes that of the run.

    Raises:
      UnknownNameError: there is no such policy; the message lists those that are shipped.
      DataError: the configuration or the weights are damaged.
      CheckpointError: the run has no checkpoint, or the weights do not fit the configuration.
      ConfigError: the policy acts after a prompt of stored trajectories.
    """
    folder = policy_folder(policy)
    config = load_config(folder)
    params, _ = load_params(folder, config, make_mesh(MeshShape(), jax.devices()[:1]))
    return Policy(config, params, target)


def _brief(array: np.ndarray) -> str:
    """A scalar, or the shape of an array and its first values."""
    return str(array) if array.ndim == 0 else f"{list(array.shape)}: {array.ravel()[:4].tolist()}..."


def shipped_policies() -> tuple[str, ...]:
    """Returns the names of the policies that come with the package: full names of their tasks."""
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


def write_policy(folder: Path, config: RunConfig, params: Params, step: int) -> None:
    """Writes ``config.json`` and the float32 weights of the checkpoint of update ``step`` to a folder."""
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
    loaded = [jax.device_put(tensors[name], sharding) for name, sharding in _by_name(shardings).items()]
    return jax.tree.unflatten(jax.tree.structure(shardings), loaded), int(notes["step"])


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
