"""Returns of a trained Agentic Transformer in dm_control: trials one after another, all in context.

    python evals/dmc_returns.py --run runs/walker_run-demo-seed0

rolls out a run's last checkpoint again, for example in other environments (``--first-seed``), and prints
the returns of every trial, with all earlier trials in context and with an empty context.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import rich

from agentic_ring import cli
from agentic_ring.mesh import mesh_on_first_devices, simulate_cpu_devices
from agentic_ring.models.model import Model
from agentic_ring.run import load_config
from evals.common.results import figure_table
from evals.rollouts.policies import load_params
from evals.rollouts.returns import evaluate_returns


def main(
    run: Path,
    environments: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    first_seed: Annotated[int | None, cli.optional_flag(metavar="SEED")] = None,
    checkpoint: Literal["last", "best"] = "last",
) -> None:
    """Rolls out a trained run again and prints the returns of every trial.

    Args:
      run: Folder of the run, such as runs/walker_run-demo-seed0.
      environments: Number of environments that run at once. Default: as in the run.
      first_seed: Seed of the first environment; the others have the next ones. Default: as in the run.
      checkpoint: The last checkpoint, or the one with the lowest training loss.
    """
    config = load_config(run)
    changes = {"environments": environments, "first_seed": first_seed}
    changes = {name: value for name, value in changes.items() if value is not None}
    config = replace(config, evaluation=replace(config.evaluation, **changes))
    simulate_cpu_devices(8)
    mesh = mesh_on_first_devices(config.mesh)
    params, step = load_params(run, config, mesh, checkpoint)
    report = evaluate_returns(config, Model(config.model), params, mesh)
    rich.print(figure_table(report.figures(), f"{config.task}, checkpoint {step}"))
    print(report.verdict())


if __name__ == "__main__":
    cli.run(main)
