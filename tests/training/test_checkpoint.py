"""Checkpoints: damage never goes unnoticed, readers change nothing, and a deleted one is missed."""

import errno
import os
import shutil
import signal
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.errors import EXIT_STOPPED, CheckpointError
from agentic_ring.training import checkpoint
from agentic_ring.training.checkpoint import Checkpoints, SavedCheckpoints
from agentic_ring.training.train_step import TrainState
from tests.commands import exit_status, run_on_small_disk
from tests.trust.mutations import damage


def state_of(step: int) -> TrainState:
    weights = jnp.arange(512.0).reshape(8, 64) + step
    return TrainState(jnp.int32(step), {"weights": weights, "scale": jnp.float32(step)}, (weights * 2,))


LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


def save(folder: Path, losses: dict[int, float]) -> None:
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, state_of(step), {"batch": step}, loss)


def reader(folder: Path) -> SavedCheckpoints:
    return SavedCheckpoints(folder / "checkpoints")


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def assert_restores(checkpoints: SavedCheckpoints, step: int) -> None:
    state, data = checkpoints.restore(step, LIKE)
    jax.tree.map(np.testing.assert_array_equal, state, state_of(step))
    assert data == {"batch": step}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder, {2: 0.5, 4: 0.1, 6: 0.3, 8: 0.2})
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def test_a_writer_removes_what_a_killed_one_left(run, tmp_path):
    save(tmp_path / "other", {6: 0.3})
    shutil.copytree(tmp_path / "other/checkpoints/6", run / "checkpoints/6")  # superseded
    unfinished = "checkpoint.10.partial"
    for name in (unfinished, f"{unfinished}.orbax-checkpoint-tmp-1", "removed.2.partial"):
        (run / "checkpoints" / name / "state").mkdir(parents=True)
    assert reader(run).last_step == 8
    Checkpoints(run / "checkpoints").close()
    assert steps(run) == ["4", "8"]
    save(run, {10: 0.4})
    assert steps(run) == ["10", "4"]
    assert_restores(reader(run), 4)


def test_damage_is_refused_or_changes_nothing(saved, tmp_path):
    count, refused = 40, 0
    pristine = sorted(path for path in saved.rglob("*") if path.is_file() and "/4/" not in str(path))
    for number in range(count):
        folder = shutil.copytree(saved, tmp_path / str(number))
        file = folder / pristine[number % len(pristine)].relative_to(saved)
        what = damage(file, np.random.default_rng(number)) if number % 5 else file.unlink()
        message = ""
        try:
            assert reader(folder).last_step == 8, what
            assert_restores(reader(folder), 8)
        except CheckpointError as error:
            message = str(error)
            refused += 1
        assert not message or file.name in message or "SHA256SUMS" in message, what
        shutil.rmtree(folder)
    assert refused > 0.8 * count


@pytest.mark.parametrize("deleted", ["checkpoints", "checkpoints/8"])
def test_a_deleted_checkpoint_is_missed(run, deleted):
    shutil.rmtree(run / deleted)
    for kind in (SavedCheckpoints, Checkpoints):
        with pytest.raises(CheckpointError, match=r"has saved checkpoint 8, but .* holds (none|\[4\])"):
            _ = kind(run / "checkpoints").last_step
    (run / "last_checkpoint").unlink()
    assert reader(run).last_step == (4 if deleted == "checkpoints/8" else None)


def test_a_damaged_loss_and_a_checkpoint_without_digests_are_refused(run):
    (run / "checkpoints" / "8" / "loss.json").write_text('{"loss": 0.0}\n')
    with pytest.raises(CheckpointError, match=r"8/loss\.json is damaged"):
        _ = reader(run).best_step
    (run / "checkpoints" / "8" / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match=r"SHA256SUMS does not exist: .* release 0\.2\.0 or older"):
        reader(run).restore(8, LIKE)


def test_another_models_checkpoint_is_refused_in_a_few_lines(saved):
    other = replace(LIKE, params={f"weights{number}": LIKE.params["weights"] for number in range(200)})
    with pytest.raises(CheckpointError, match=r"checkpoint 8 .* this configuration: .* --output") as raised:
        reader(saved).restore(8, other)
    assert len(str(raised.value)) < 800


def test_a_request_to_stop_waits_until_a_checkpoint_is_restored(saved, monkeypatch, capfd):
    load, loaded = checkpoint.ocp.load_checkpointables, []

    def load_after_a_signal(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        loaded.append(load(*arguments))
        return loaded[0]

    def main() -> None:
        reader(saved).restore(8, LIKE)
        time.sleep(60)

    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", load_after_a_signal)
    assert exit_status(main) == EXIT_STOPPED
    assert loaded
    assert capfd.readouterr().err == "stopped by SIGTERM; run the same command again to continue\n"


def test_a_reader_changes_nothing_and_needs_no_checkpoint(run, tmp_path):
    (run / "checkpoints" / "checkpoint.10.partial").mkdir()
    before = shutil.copytree(run, tmp_path / "before")
    assert_restores(reader(run), 8)
    assert reader(run).best_step == 4
    assert subprocess.run(["diff", "-r", before, run]).returncode == 0
    assert reader(tmp_path / "none").last_step is None
    assert not (tmp_path / "none").exists()


def fill(disk: Path, kib: int) -> None:
    """Saves checkpoints on a new disk until it is full, then makes room and goes on."""
    mount = ["mount", "-t", "tmpfs", "tmpfs", disk, "-o"]
    subprocess.run([*mount, f"size={kib}k"], check=True)
    run, saved = disk / "run", 0
    with (
        pytest.raises(OSError, match="No space left on device") as full,
        closing(Checkpoints(run / "checkpoints")) as checkpoints,
    ):
        for step in range(1, 50):
            checkpoints.save(step, state_of(step), {"batch": step}, 1.0 / step)
            saved = checkpoints.last_step or 0
            (run / f"ballast-{step}").write_bytes(bytes(20_000))
    assert full.value.errno == errno.ENOSPC
    subprocess.run([*mount, f"remount,size={1 << 16}k"], check=True)
    assert not list(run.rglob("*.partial*")), "leftovers"
    with closing(Checkpoints(run / "checkpoints")) as checkpoints:
        last = checkpoints.last_step or 0
        assert last - saved in (0, 1), "the disk may be full just after a checkpoint is whole"
        if last:
            assert_restores(checkpoints, last)
        checkpoints.save(last + 1, state_of(last + 1), {"batch": last + 1}, 1.0)
        checkpoints.wait()
        assert_restores(checkpoints, last + 1)
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_one_error_and_the_run_goes_on_once_there_is_room(tmp_path):
    ended = run_on_small_disk(tmp_path, "1m", __name__, "for kib in (77, 300): test.fill(disk, kib)")
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
