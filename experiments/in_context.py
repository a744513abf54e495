"""Learning in context: each chain is of one of several tasks, and nothing but its rewards tells which.

    python experiments/in_context.py --domain cheetah
    python experiments/in_context.py --domain walker --tasks walk run_backward

finds or collects trajectories of the domain, trains on chains that draw a task each, rolls the model out
in every task, online and with controls, and prints whether it learned in context. Run the same command
again after an interruption: every stage goes on where it stopped.
"""

from pathlib import Path
from typing import Annotated, Literal

import jax
import rich
import tyro

from agentic_ring import cli
from agentic_ring.data.tasks import DOMAINS, domain_named
from agentic_ring.mesh import make_mesh, shape_with_ring
from agentic_ring.models.model import Model
from agentic_ring.run_folder import Stages, enter_directory
from data_prep.folders import data_root
from experiments.exorl.in_context_pipeline import hidden_returns, resolve_hidden, write_hidden_report
from experiments.exorl.in_context_presets import HIDDEN_PRESETS, HIDDEN_TASKS
from experiments.exorl.pipeline import train_on_store
from experiments.exorl.stores import prepare_store


def main(
    domain: Annotated[
        Literal[tuple(DOMAINS)],  # pyright: ignore[reportInvalidTypeForm]
        tyro.conf.arg(metavar="NAME"),
    ] = "cheetah",
    tasks: Annotated[tuple[str, ...], cli.optional_flag(metavar="NAME")] = (),
    preset: Annotated[Literal["demo", "small"] | None, cli.optional_flag()] = None,
    seed: int = 0,
    resume: bool = True,
    output: Annotated[Path | None, cli.optional_flag()] = None,
    data: Annotated[Path | None, cli.optional_flag()] = None,
    collector: Annotated[str | None, cli.optional_flag()] = None,
) -> None:
    """Trains on hidden tasks, rolls the model out with all controls and prints the verdict.

    Args:
      domain: Whose trajectories serve all tasks.
      tasks: At least two tasks of the domain. Default: those that lead to different places.
      preset: Size: demo (two cores, tens of minutes) or small (one accelerator). Default: demo on a CPU,
        small on anything else.
      seed: Decides the chains and the initial weights; all seeds share the data.
      resume: Go on with the run in the output folder; --no-resume moves it aside and starts anew.
      output: Folder of the run. Default: runs/DOMAIN-hidden-PRESET-seedSEED.
      data: Folder of the data. Default: $AGENTIC_RING_DATA, or else data.
      collector: ExoRL collector to read, such as rnd. Default: the one that is there; if there is none,
        data is collected here and now.
    """
    name = preset or ("demo" if jax.default_backend() == "cpu" else "small")
    chosen, parsed = HIDDEN_PRESETS[name], domain_named(domain)
    mesh = make_mesh(shape_with_ring(None, jax.device_count()))
    directory = output or Path("runs") / f"{domain}-hidden-{name}-seed{seed}"
    stages = Stages()
    with stages.stage("data"):
        hidden = tasks or HIDDEN_TASKS[domain]
        store = prepare_store(parsed, data or data_root(), collector, hidden)
        config = resolve_hidden(chosen, name, parsed, hidden, store, mesh, seed)
    enter_directory(directory, config, resume)
    stages.keep_in(directory)
    model = Model(config.model)
    with stages.stage("training"):
        state = train_on_store(config, model, mesh, directory, None)
    with stages.stage("evaluation"):
        report = hidden_returns(config, model, state.params, mesh, directory)
    write_hidden_report(config, report, stages, directory)
    rich.print(report.table(f"{domain}, hidden tasks, preset {name}, seed {seed}"))
    for task in report.tasks:
        print(f"{task}: {report.verdict(task)}\n")
    print(
        f"written to {directory}: config.json, metrics.jsonl, results.json, trials.csv, checkpoints and plots"
    )


if __name__ == "__main__":
    cli.run(main)
