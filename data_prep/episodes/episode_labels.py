"""The labels that ``data_prep.collect`` writes beside its episodes, one row of ``episodes.jsonl`` each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pydantic

from agentic_ring.errors import DataError
from agentic_ring.files.json_files import read_json_rows
from data_prep.folders import LABELS_FILE

_Count = Annotated[int, pydantic.Field(ge=0)]


@dataclass(frozen=True)
class EpisodeLabel:
    """Origin of one episode.

    Attributes:
      file: name of the file.
      index: place in the order of collection.
      job: name of the job that collected it.
      data: whose data these are.
      algorithm: who chose the actions.
      round: round of the job.
      action_repeat: control steps for which each action was held.
      task: full name of the task that was learned, if any.
      learner_seed, action_noise, skill: of the learner, if any.
    """

    file: str
    index: _Count
    job: str
    data: str
    algorithm: str
    round: _Count
    action_repeat: Annotated[int, pydantic.Field(ge=1)]
    task: str | None = None
    learner_seed: _Count | None = None
    action_noise: float | None = None
    skill: _Count | None = None


def read_labels(folder: Path) -> list[EpisodeLabel]:
    """Returns the labels of a collector's folder in order; none if it has no such file.

    Raises:
      DataError: the file is damaged, or labels are missing or of other files.
    """
    path = folder / LABELS_FILE
    if not path.exists():
        return []
    remedy = f"repair it, or remove {folder} and collect again"
    labels = read_json_rows(path, EpisodeLabel, remedy)
    for number, label in enumerate(labels):
        if label.index != number:
            raise DataError(f"{path}, line {number + 1} has index {label.index}, not {number}; {remedy}")
    return labels
