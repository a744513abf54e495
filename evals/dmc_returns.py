"""Returns of a trained Agentic Transformer in dm_control: trials one after another, all in context.

    python evals/dmc_returns.py --run walker_run
    python evals/dmc_returns.py --run runs/walker_run-demo-seed0 --first-seed 20000

rolls out a shipped policy or a run's last checkpoint again, for example in other environments, and prints
the returns of every trial, with all earlier trials in context and with an empty context.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import rich

from agentic_ring.data.domains import parse_task
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import Stages
from agentic_ring.mesh import mesh_on_first_devices, simulate_cpu_devices
from agentic_ring.models.model import Model
from agentic_ring.policies.policy import load_params, policy_folder, write_policy
from agentic_ring.results.results_file import Results, figure_table, write_results
from agentic_ring.rollouts.returns import EvaluationRecord, evaluate_returns, read_record, write_record
from agentic_ring.run import RunConfig, load_config
from agentic_ring.terminal import cli


def training_data(folder: Path, config: RunConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns and algorithms of the training trajectories, from the record of a run or from its store."""
    if record := read_record(folder):
        return record.data_returns, record.data_algorithms
    with TrajectoryStore.open(config.store) as store:
        return store.returns(parse_task(config.task).name), np.array(store.algorithms)


def main(
    run: str | Path,
    environments: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    first_seed: Annotated[int | None, cli.optional_flag(metavar="SEED")] = None,
    checkpoint: Literal["last", "best"] = "last",
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
) -> None:
    """Rolls out a trained policy again and prints the returns of every trial.

    Args:
      run: Name of a shipped policy, such as walker_run, or folder of a run or of an exported policy.
      environments: Number of environments that run at once. Default: as in the run.
      first_seed: Seed of the first environment; the others have the next ones. Default: as in the run.
      checkpoint: The last checkpoint, or the one with the lowest training loss.
      output: New folder for the returns, one environment's trials and the policy, which evals/report.py
        reads. Default: nothing is written.
    """
    folder = policy_folder(run)
    if output is not None and output.exists() and output.samefile(folder):
        raise ConfigError(f"--output {output} is the folder of the policy; name another one")
    if output is not None and (output / "metrics.jsonl").exists():
        raise ConfigError(f"--output {output} holds a trained run or its policy; name another folder")
    config = load_config(folder)
    chosen = {"environments": environments, "first_seed": first_seed}
    changes = {name: value for name, value in chosen.items() if value is not None}
    config = replace(config, evaluation=replace(config.evaluation, **changes))
    simulate_cpu_devices()
    mesh = mesh_on_first_devices(config.mesh)
    params, step = load_params(folder, config, mesh, checkpoint)
    stages, (data, algorithms) = Stages(), training_data(folder, config)
    with stages.stage("evaluation"):
        report = evaluate_returns(config, Model(config.model), params, mesh, data)
    rich.print(figure_table(report.figures(), f"{config.task}, checkpoint {step}"))
    print(report.verdict())
    if output is not None:
        write_policy(output, config, params, step)
        results = Results.of_this_process(asdict(config), stages.seconds, report.figures())
        write_results(output / "results.json", results)
        write_record(output, EvaluationRecord(data, algorithms, report.rollout))
        print(f"written to {output}; python evals/report.py {output} makes a page of it")


if __name__ == "__main__":
    cli.run(main)
