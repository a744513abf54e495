import dataclasses

import numpy as np
import pytest

from agentic_ring.data.tasks import DOMAINS, load_environment, task_named
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import ConfigError, DataError
from data_prep.collect import CollectConfig, collect
from data_prep.folders import collector_folder
from data_prep.state_coverage import (
    COORDINATES,
    Coordinate,
    CoverageConfig,
    cells_of,
    collector_cells,
    coverage,
    main,
)
from tests.data_prep.exploration import uniform_episodes


def episode_of(physics):
    nothing = np.zeros((len(physics), 1), np.float32)
    return Episode(nothing, nothing, nothing, nothing, np.array(physics, np.float64))


def test_cells_are_those_that_the_coordinates_fall_into():
    episode = episode_of([[0.05, 9, 0.1], [0.15, 9, 0.1], [0.19, 9, 0.1 + 4 * np.pi], [-0.01, 9, -0.1]])
    position, angle = Coordinate("physics", 0, 0.1), Coordinate("physics", 2, np.pi / 2, angle=True)
    assert cells_of(episode, [position]).tolist() == [[-1], [0], [1]]
    assert cells_of(episode, [position, angle]).tolist() == [[-1, 3], [0, 0], [1, 0]]


def test_cells_of_several_episodes_count_once():
    assert coverage([np.array([[0, 0], [0, 1]]), np.array([[0, 1], [2, 2]])]) == 3


@pytest.mark.parametrize("name", DOMAINS)
def test_coordinates_of_every_domain_tell_states_apart(name):
    """Random actions move along every one of them, in cells of a tenth."""
    domain = DOMAINS[name]
    (episode,) = uniform_episodes(domain, domain.tasks[:1], action_repeat=10)
    fine = [dataclasses.replace(coordinate, cell=coordinate.cell / 10) for coordinate in COORDINATES[name]]
    cells = cells_of(episode, fine)
    assert (np.ptp(cells, axis=0) > 0).all()


def test_jaco_coordinates_are_where_the_hand_is():
    environment = load_environment(task_named(DOMAINS["jaco"], "reach_top_left"), 0)
    observation = environment.reset().observation
    start = sum(np.size(entry) for entry in list(observation.values())[:5])
    assert list(observation)[5] == "jaco_arm/jaco_hand/pinch_site_pos"
    assert [coordinate.column for coordinate in COORDINATES["jaco"]] == [start, start + 1, start + 2]


def test_prints_all_cells_and_those_of_equally_many_episodes(tmp_path, capsys):
    for collector, episodes in (("random", 3), ("ou", 2)):
        collect(
            CollectConfig(
                "cartpole", collector, episodes=episodes, members=1, environments=1, output=tmp_path
            )
        )
    main(CoverageConfig("cartpole", data=tmp_path))
    header, noise, uniform = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["collector", "episodes", "cells", "of", "the", "first", "2"]
    assert noise[:2] == ["mini_ou", "2"]
    assert noise[2] == noise[3]
    cells = collector_cells(tmp_path, "cartpole", "mini_random")
    assert uniform == ["mini_random", "3", str(coverage(cells)), str(coverage(cells[:2]))]


def test_missing_and_damaged_episodes_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"walker holds no collector's folder"):
        main(CoverageConfig("walker", data=tmp_path))
    with pytest.raises(DataError, match=r"mini_icm.buffer holds no episodes"):
        main(CoverageConfig("walker", ("mini_icm",), tmp_path))
    buffer = collector_folder(tmp_path, "walker", "mini_icm") / "buffer"
    buffer.mkdir(parents=True)
    (buffer / "episode_000000_1000.npz").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"episode_000000_1000.npz: it is not a readable .npz"):
        main(CoverageConfig("walker", ("mini_icm",), tmp_path))


def collected_cells(domain, collector, episodes, root):
    size = {"episodes": episodes, "members": 1, "environments": 2}
    collect(CollectConfig(domain, collector, **size, output=root))
    return coverage(collector_cells(root, domain, f"mini_{collector}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("domain", "collector", "episodes"),
    [("point_mass_maze", "rnd", 24), ("cheetah", "icm", 20), ("cheetah", "icm_apt", 20)],
)
def test_explorers_reach_more_of_the_state_space_than_random_actions(domain, collector, episodes, tmp_path):
    """Of as many episodes, the first few of which are random themselves."""
    uniform = collected_cells(domain, "random", episodes, tmp_path)
    assert collected_cells(domain, collector, episodes, tmp_path) > 1.2 * uniform
