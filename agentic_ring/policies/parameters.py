"""Parameters of a run's checkpoint, or of a policy that was exported from one."""

from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh

from agentic_ring.errors import CheckpointError
from agentic_ring.models.model import Model, Params
from agentic_ring.policies.policy_folder import is_policy, read_policy
from agentic_ring.run import RunConfig
from agentic_ring.training.checkpoint import SavedCheckpoints
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import abstract_state


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
