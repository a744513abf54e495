"""Measures how much of the state space the episodes of each collector cover.

    python -m data_prep.state_coverage --domain point_mass_maze
    python -m data_prep.state_coverage --domain walker --collectors mini_random mini_icm

A few coordinates of the state are divided into cells, and the visited cells are counted: over all episodes,
and over as many first episodes as the smallest collection has, since only equal numbers can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from agentic_ring.data.store_folder import data_root
from agentic_ring.data.tasks import domain_named
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.terminal.cli import optional_flag, run
from data_prep.episodes.episode_files import episode_file, read_episode
from data_prep.folders import collector_folder


@dataclass(frozen=True)
class Coordinate:
    """One coordinate of the state, divided into cells.

    Attributes:
      array: array of an episode, ``physics`` or ``observation``.
      column: column of the array.
      cell: width of a cell, in the coordinate's own unit.
      angle: whether the coordinate is an angle in radians, taken modulo a full turn.
    """

    array: str
    column: int
    cell: float
    angle: bool = False


_TWELFTH_OF_A_TURN = np.pi / 6
COORDINATES = {
    # Height, pitch and forward speed of a planar body's torso: columns of qpos (9) followed by qvel.
    "walker": (
        Coordinate("physics", 0, 0.1),
        Coordinate("physics", 2, _TWELFTH_OF_A_TURN, angle=True),
        Coordinate("physics", 10, 0.5),
    ),
    "cheetah": (
        Coordinate("physics", 1, 0.1),
        Coordinate("physics", 2, _TWELFTH_OF_A_TURN, angle=True),
        Coordinate("physics", 9, 0.5),
    ),
    "cartpole": (  # cart position, pole angle, pole angular velocity
        Coordinate("physics", 0, 0.2),
        Coordinate("physics", 1, _TWELFTH_OF_A_TURN, angle=True),
        Coordinate("physics", 3, 1.0),
    ),
    "quadruped": tuple(Coordinate("physics", axis, 0.25) for axis in range(3)),  # position of the torso
    "point_mass_maze": tuple(Coordinate("physics", axis, 0.02) for axis in range(2)),
    # Point between the fingers.
    "jaco": tuple(Coordinate("observation", 30 + axis, 0.05) for axis in range(3)),
}


def cells_of(episode: Episode, coordinates: Sequence[Coordinate]) -> np.ndarray:
    """The distinct cells that an episode visits: int [C, len(coordinates)], in lexical order."""
    columns = []
    for coordinate in coordinates:
        values = getattr(episode, coordinate.array)[:, coordinate.column]
        turned = np.mod(values, 2 * np.pi) if coordinate.angle else values
        columns.append(np.floor(turned / coordinate.cell))
    return np.unique(np.stack(columns, -1).astype(np.int64), axis=0)


def coverage(episodes: Sequence[np.ndarray]) -> int:
    """The number of distinct cells that several episodes visit, given ``cells_of`` each of them."""
    return len(np.unique(np.concatenate(episodes), axis=0))


@dataclass(frozen=True)
class CoverageConfig:
    """Settings of the coverage table.

    Attributes:
      domain: Domain of the episodes: walker, cheetah, cartpole, quadruped, point_mass_maze or jaco.
      collectors: Collector folders to compare. Default: all of the domain.
      data: Data folder. Default: $AGENTIC_RING_DATA or ./data.
    """

    domain: str
    collectors: Annotated[tuple[str, ...], optional_flag()] = ()
    data: Annotated[Path | None, optional_flag()] = None

    def __post_init__(self) -> None:
        domain_named(self.domain)


def collector_cells(root: Path, domain_name: str, collector: str) -> list[np.ndarray]:
    """``cells_of`` each episode of a collector, in the order of collection.

    Raises:
      DataError: there are no episodes, or one is not valid.
    """
    domain = domain_named(domain_name)
    buffer = collector_folder(root, domain_name, collector) / "buffer"
    cells = {}
    for path in buffer.glob("*.npz"):
        try:
            file = episode_file(path)
            cells[file.index] = cells_of(read_episode(file, domain), COORDINATES[domain_name])
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    if not cells:
        raise DataError(f"{buffer} holds no episodes; collect or download some first")
    return [cells[index] for index in sorted(cells)]


def main(config: Annotated[CoverageConfig, tyro.conf.arg(name="")]) -> None:
    """Counts the cells of the state space that the episodes of each collector visit."""
    root = config.data or data_root()
    domain_folder = collector_folder(root, config.domain, "")
    present = sorted(buffer.parent.name for buffer in domain_folder.glob("*/buffer"))
    collectors = config.collectors or present
    if not collectors:
        raise ConfigError(
            f"{domain_folder} holds no collector's folder; collect episodes first, or give --data"
        )
    cells = {collector: collector_cells(root, config.domain, collector) for collector in collectors}
    fewest = min(map(len, cells.values()))
    print(f"{'collector':<20} {'episodes':>8} {'cells':>7} {f'of the first {fewest}':>20}")
    for collector, episodes in cells.items():
        first = coverage(episodes[:fewest])
        print(f"{collector:<20} {len(episodes):>8} {coverage(episodes):>7} {first:>20}")


if __name__ == "__main__":
    run(main)
