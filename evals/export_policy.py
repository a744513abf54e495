"""Exports a run's checkpoint as a policy: safetensors, configuration and a model card.

    python evals/export_policy.py runs/walker_run-demo-seed0 --output policies/walker

A policy that trajectories tell its task keeps as many stored ones as a chain of training has.

``agentic_ring.load_policy("policies/walker")`` acts with it, ``evals/dmc_returns.py --run`` and
``evals/report.py`` read it as they do a run. The card's figures are those of the run's ``results.json``.
"""

import shutil
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import jax
import jinja2
import numpy as np
import tyro

from agentic_ring.data.spans import middle_decisions
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.files.atomic import replacing_folder
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model
from agentic_ring.policies.policy import SHIPPED, WEIGHTS, load_params, policy_trajectories, write_policy
from agentic_ring.results.results_file import read_results, short_number
from agentic_ring.rollouts.returns import FILE_NAME, read_record
from agentic_ring.run import RunConfig, ToldRunConfig, load_any_config
from agentic_ring.terminal import cli

CARD = Path(__file__).with_name("policy_card.jinja")
KEPT_FILES = ("results.json", "metrics.jsonl", FILE_NAME)
"""Files that the policy keeps as they are; a folder of ``dmc_returns.py --output`` has no metrics."""
FIGURES = {
    "return/n0": "nothing in context",
    "return/n128": "told by 128 relabelled trajectories",
    "control/zeroed": "rewards zeroed",
    "control/another_task": "rewards of another task",
    "own_trials/trial_4": "trial 4 with only its own trials in context",
    "return/random_policy": "random policy",
    "return/data_median": "training data, median",
    "return/data_p90": "training data, 90th percentile",
    "return/data_p95": "training data, 95th percentile",
    "return/data_best": "training data, best",
    "return/target": "target of every trial",
    "return/trial_1": "trial 1",
    "return/last_trial": "last trial, earlier ones in context",
    "return/best_of_trials": "best of the trials",
    "return/context_gain": "gain from the context",
}
"""Row of the card for each figure of a run."""


def main(
    run: Annotated[Path, tyro.conf.Positional],
    output: Path,
    checkpoint: Literal["last", "best"] = "last",
) -> None:
    """Exports a run's checkpoint as a policy: safetensors, configuration and a model card.

    Args:
      run: Folder of a finished run, such as runs/walker_run-demo-seed0.
      output: New folder of the policy.
      checkpoint: The last checkpoint, whose returns the run has measured, or the one with the lowest loss.
    """
    if output.exists():
        raise ConfigError(f"{output} exists; name a new folder, or remove that one")
    config, results = load_any_config(run), read_results(run / "results.json")
    if isinstance(config, RunConfig) and config.evaluation.prompt_trajectories:
        raise ConfigError(
            f"the trials of {run} come after a prompt of {config.evaluation.prompt_trajectories} stored "
            "trajectories, which a policy does not hold; export a run without a prompt"
        )
    record = read_record(run)
    if record is None:
        raise DataError(f"{run} holds no {FILE_NAME}; run its command again, which repeats the evaluation")
    params, step = load_params(run, config, make_mesh(MeshShape(), jax.devices()[:1]), checkpoint)
    name = output.name if output.parent.resolve() == SHIPPED else output.as_posix()
    named = {figure.name: figure for figure in results.figures}
    algorithms = Counter(record.data_algorithms.tolist()).most_common()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False)
    environment.filters["short"] = short_number
    card = environment.from_string(CARD.read_text(encoding="utf-8")).render(
        policy=name,
        config=config,
        told=isinstance(config, ToldRunConfig),
        results=results,
        step=step,
        checkpoint=checkpoint,
        parameters=Model(config.model).parameter_count(),
        store=Path(config.store).stem,
        data=f"{len(record.data_returns)} episodes ({', '.join(f'{n} of {kind}' for kind, n in algorithms)})",
        figures=[(label, named[figure]) for figure, label in FIGURES.items() if figure in named],
    )
    with replacing_folder(output) as beside:
        write_policy(beside, config, params, step)
        if isinstance(config, ToldRunConfig):
            kept = policy_trajectories(run, config)
            decisions, chains = kept.action.shape[1], config.chains
            best = chains.shown == "best"
            kept.write(beside, np.arange(decisions) if best else middle_decisions(decisions, chains.spans))
        for path in (run / name for name in KEPT_FILES if (run / name).exists()):
            shutil.copyfile(path, beside / path.name)
        (beside / "README.md").write_text(card, encoding="utf-8")
    size = sum(file.stat().st_size for file in output.iterdir()) / 1e6
    print(f"written to {output}: {WEIGHTS} of checkpoint {step}, {size:.1f} MB in all")


if __name__ == "__main__":
    cli.run(main)
