"""Exports a store to a Minari dataset, or imports one. Needs the extra ``minari``.

    python -m data_prep.minari_io export --store data/store/walker-rnd.h5 --dataset exorl/walker/rnd-v0
    python -m data_prep.minari_io import --dataset exorl/walker/rnd-v0 --store data/store/walker-rnd.h5

Datasets are stored below ``$MINARI_DATASETS_PATH``, as the package ``minari`` does;
``minari.load_dataset`` opens them and ``recover_environment`` gives the task. The infos of an episode of T
transitions hold the arrays that Minari has no field for, of T + 1 rows each::

    physics [P], discount, recorded_reward, task_rewards/{task}

Export followed by import restores every array and every label bit for bit.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import numpy as np
import tyro

from agentic_ring.data import gymnasium_environments  # noqa: F401  registers the tasks
from agentic_ring.data.domains import domain_named, task_named
from agentic_ring.data.store import StoredEpisode, StoreDescription, TrajectoryStore, write_store
from agentic_ring.data.trajectories import make_episode
from agentic_ring.errors import ConfigError, DataError, UnknownNameError
from agentic_ring.extras import needs_extra
from agentic_ring.terminal.cli import optional_flag, run
from agentic_ring.terminal.progress import Advance, progress
from data_prep.data_card import data_card

_ABOUT = "agentic_ring"
"""Key of the dataset's metadata that holds the store's own attributes."""
_LABELS = ("algorithm", "action_repeat", "source")


def export_store(path: Path, dataset: str, task: str | None = None) -> int:
    """Writes a new dataset atomically and returns its number of episodes; see ``Export``.

    Raises:
      ConfigError: the dataset exists, or its id does not have Minari's form.
      StoreError: the store cannot be read.
      UnknownNameError: the store has no rewards of the task.
      DataError: an episode's reset row has an action, for which Minari has no field.
    """
    minari, place = _minari(), _place(dataset)
    if place.exists():
        raise ConfigError(f"{place} exists; choose another version of {dataset}, or remove it")
    with TrajectoryStore.open(path) as store:
        store.verify()
        task = task or store.tasks[0]
        if task not in store.tasks:
            raise UnknownNameError(f"task in {store.path.name}", task, store.tasks)
        beside = place.with_name(f".{place.name}.partial")
        shutil.rmtree(beside, ignore_errors=True)
        (beside / "data").mkdir(parents=True)
        domain = store.domain
        storage = minari.dataset.minari_storage.MinariStorage.new(
            beside / "data",
            observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (domain.observation_dim,), np.float32),
            action_space=gymnasium.spaces.Box(-1, 1, (domain.action_dim,), np.float32),
            env_spec=gymnasium.spec(f"agentic_ring/{task_named(domain, task).full_name}-v0"),
        )
        about = {"domain": domain.name, "collector": store.collector, "tasks": store.tasks, "task": task}
        storage.update_metadata(
            {
                "dataset_id": dataset,
                "minari_version": minari.__version__,
                "algorithm_name": store.collector,
                "description": f"Episodes of {domain.name} explored by {store.collector}, rewarded for "
                f"{task}; with the simulator's states, and the rewards of each of the domain's tasks.",
                _ABOUT: about,
            }
        )
        with progress(f"exporting {dataset}", store.num_episodes) as advance:
            storage.update_episodes(_buffers(store, task, advance))
        storage.update_episode_metadata(
            dict(zip(_LABELS, labels, strict=True))
            for labels in zip(store.algorithms, store.action_repeats.tolist(), store.sources, strict=True)
        )
        (beside / "README.md").write_text(data_card(store), encoding="utf-8")
        namespace, *_ = minari.dataset.minari_dataset.parse_dataset_id(dataset)
        if namespace is not None and namespace not in minari.namespace.list_local_namespaces():
            minari.namespace.create_namespace(namespace)
        beside.replace(place)
        return store.num_episodes


def import_dataset(dataset: str, path: Path) -> int:
    """Writes the store at ``path``, or replaces it, and returns its number of episodes.

    Raises:
      DataError: there is no such dataset, or it lacks data that ``export_store`` writes and a store needs.
    """
    place = _place(dataset) / "data"
    if not place.exists():
        raise DataError(f"there is no dataset {dataset} in {place.parent}; `minari list local` shows all")
    storage = _minari().dataset.minari_storage.MinariStorage.read(place)
    try:
        about = storage.metadata[_ABOUT]
        description = StoreDescription(
            domain_named(about["domain"]), about["collector"], tuple(about["tasks"])
        )
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{dataset} does not say of which domain and collector it is ({error!r} is missing): only "
            "datasets that `export` wrote can be imported, as others lack the physics that rewards come from"
        ) from None
    return write_store(path, description, _stored_episodes(storage, description, about["task"]))


def _minari() -> Any:
    """The package, which is imported only when it is used: the help does without it."""
    with needs_extra("minari"):
        import minari.data_collector  # pyright: ignore[reportMissingImports]
        import minari.dataset.minari_storage  # pyright: ignore[reportMissingImports]
        import minari.namespace  # pyright: ignore[reportMissingImports]
        import minari.storage  # pyright: ignore[reportMissingImports]
    return minari


def _place(dataset: str) -> Path:
    minari = _minari()
    try:
        minari.dataset.minari_dataset.parse_dataset_id(dataset)
    except ValueError as error:
        raise ConfigError(f"{dataset!r} is not a dataset id ({error})") from None
    return minari.storage.get_dataset_path(dataset)


def _buffers(store: TrajectoryStore, task: str, advance: Advance) -> Iterator[Any]:
    """The episodes as Minari's ``EpisodeBuffer``."""
    for number, stored in enumerate(store.episodes()):
        episode = stored.episode
        if episode.action[0].any():
            raise DataError(f"{stored.source} has an action in its reset row; Minari has no field for it")
        terminations = episode.discount[1:, 0] == 0
        truncations = np.zeros(len(episode), bool)
        truncations[-1] = not terminations[-1]
        yield _minari().data_collector.EpisodeBuffer(
            id=number,
            observations=episode.observation,
            actions=episode.action[1:],
            rewards=stored.rewards[task][1:],
            terminations=terminations,
            truncations=truncations,
            infos={
                "physics": episode.physics,
                "discount": episode.discount[:, 0],
                "recorded_reward": episode.reward[:, 0],
                "task_rewards": stored.rewards,
            },
        )
        advance(number + 1, "")


def _stored_episodes(storage: Any, description: StoreDescription, task: str) -> Iterator[StoredEpisode]:
    numbers = range(storage.total_episodes)
    episodes = zip(storage.get_episodes(numbers), storage.get_episode_metadata(numbers), strict=True)
    with progress(f"importing {storage.metadata['dataset_id']}", len(numbers)) as advance:
        for number, (episode, labels) in enumerate(episodes):
            try:
                yield _stored_episode(episode, labels, description, task)
            except (DataError, KeyError, TypeError) as error:
                missing = "it lacks " if isinstance(error, KeyError) else ""
                raise DataError(f"episode {number}: {missing}{error}; nothing was imported") from error
            advance(number + 1, "")


def _stored_episode(
    episode: Mapping[str, Any], labels: Mapping[str, Any], description: StoreDescription, task: str
) -> StoredEpisode:
    infos = episode["infos"]
    arrays = {
        "observation": episode["observations"],
        "action": np.concatenate([np.zeros_like(episode["actions"][:1]), episode["actions"]]),
        "reward": infos["recorded_reward"][:, None],
        "discount": infos["discount"][:, None],
        "physics": infos["physics"],
    }
    checked = make_episode(arrays, description.domain)
    rewards = {name: infos["task_rewards"][name] for name in description.tasks}
    for name, reward in rewards.items():
        if reward.shape != (len(checked) + 1,) or reward.dtype != np.float32 or not np.isfinite(reward).all():
            raise DataError(
                f"task_rewards/{name} is {reward.dtype} {reward.shape}, expected a finite float32 a row"
            )
    if not np.array_equal(episode["rewards"], rewards[task][1:]):
        raise DataError(
            f"rewards differ from task_rewards/{task}: the dataset was changed since it was exported"
        )
    algorithm, action_repeat, source = (labels[name] for name in _LABELS)
    return StoredEpisode(checked, rewards, str(algorithm), int(action_repeat), str(source))


@dataclass(frozen=True)
class Export:
    """Writes a store's episodes to a new Minari dataset.

    Attributes:
      store: HDF5 store to export.
      dataset: Id of the new dataset, such as exorl/walker/rnd-v0.
      task: Task whose rewards become the dataset's rewards. Default: the store's first.
    """

    store: Path
    dataset: str
    task: Annotated[str | None, optional_flag()] = None


@dataclass(frozen=True)
class Import:
    """Writes a Minari dataset that was exported from a store to a store again.

    Attributes:
      dataset: Id of the dataset.
      store: HDF5 store to write; an existing one is replaced.
    """

    dataset: str
    store: Path


def main(
    config: tyro.conf.OmitArgPrefixes[
        Annotated[Export, tyro.conf.subcommand("export")] | Annotated[Import, tyro.conf.subcommand("import")]
    ],
) -> None:
    """Exports a trajectory store to a Minari dataset, or imports such a dataset into a store."""
    if isinstance(config, Export):
        print(f"{config.dataset}: {export_store(config.store, config.dataset, config.task)} episodes")
    else:
        print(f"{config.store}: {import_dataset(config.dataset, config.store)} episodes")


if __name__ == "__main__":
    run(main)
