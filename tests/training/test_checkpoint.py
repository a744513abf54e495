"""Checkpoints: damage never goes unnoticed, readers change nothing, and a deleted one is missed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
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
from tests.commands import exit_status
from tests.data.synthetic import random_store


def state_of(step: int) -> TrainState:
    weights = jnp.arange(512.0).reshape(8, 64) + step
    return TrainState(jnp.int32(step), {"weights": weights, "scale": jnp.float32(step)}, (weights * 2,))


LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))


def save(folder: Path, losses: dict[int, float]) -> None:
    checkpoints = Checkpoints(folder / "checkpoints")
    for step, loss in losses.items():
        checkpoints.save(step, state_of(step), {"batch": step}, loss)
    checkpoints.close()


def reader(folder: Path) -> SavedCheckpoints:
    return SavedCheckpoints(folder / "checkpoints")


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def assert_restores(checkpoints: SavedCheckpoints, step: int) -> None:
    state, data = checkpoints.restore(step, LIKE)
    jax.tree.map(np.testing.assert_array_equal, state, state_of(step))
    assert data == {"batch": step}


def snapshot(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder, {2: 0.5, 4: 0.1, 6: 0.3, 8: 0.2})
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(saved, tmp_path / "run")


def test_the_last_and_the_best_are_kept(saved):
    assert steps(saved) == ["4", "8"]
    checkpoints = reader(saved)
    assert (checkpoints.last_step, checkpoints.best_step) == (8, 4)
    for step in (4, 8):
        assert_restores(checkpoints, step)


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


def damage(file: Path, draw: random.Random) -> str:
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content) or 1)
    kind = draw.choice(["flip", "truncate", "delete", "append", "zero"]) if content else "append"
    match kind:
        case "flip":
            content[place] ^= 1 << draw.randrange(8)
        case "truncate":
            del content[place:]
        case "append":
            content += draw.randbytes(draw.randrange(1, 9))
        case "zero":
            content[place : place + 16] = bytes(len(content[place : place + 16]))
    file.unlink() if kind == "delete" else file.write_bytes(content)
    return f"{kind} {file}"


def test_damage_is_refused_or_changes_nothing(saved, tmp_path):
    count = 40
    draw = random.Random(count)
    pristine = sorted(path for path in saved.rglob("*") if path.is_file() and "/4/" not in str(path))
    refused = 0
    for number in range(count):
        folder = shutil.copytree(saved, tmp_path / str(number))
        file = folder / pristine[number % len(pristine)].relative_to(saved)
        what, message = damage(file, draw), ""
        try:
            last = reader(folder).last_step
            assert last == 8, what
            assert_restores(reader(folder), last)
        except CheckpointError as error:
            message = str(error)
            refused += 1
        assert not message or file.name in message or "SHA256SUMS" in message, what
        shutil.rmtree(folder)
    assert refused > 0.8 * count


def test_a_damaged_loss_chooses_no_other_checkpoint(run):
    (run / "checkpoints" / "8" / "loss.json").write_text('{"loss": 0.0}\n')
    with pytest.raises(CheckpointError, match=r"8/loss\.json is damaged"):
        _ = reader(run).best_step


@pytest.mark.parametrize("deleted", ["checkpoints", "checkpoints/8"])
def test_a_deleted_checkpoint_is_missed(run, deleted):
    shutil.rmtree(run / deleted)
    for kind in (SavedCheckpoints, Checkpoints):
        with pytest.raises(CheckpointError, match=r"has saved checkpoint 8, but .* holds (none|\[4\])"):
            _ = kind(run / "checkpoints").last_step
    (run / "last_checkpoint").unlink()
    assert reader(run).last_step == (4 if deleted == "checkpoints/8" else None)


def test_a_checkpoint_without_digests_is_refused(run):
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


def test_a_reader_changes_nothing_and_needs_no_checkpoint(saved, tmp_path):
    unfinished = saved / "checkpoints" / "checkpoint.10.partial"
    unfinished.mkdir()
    before = snapshot(saved)
    assert_restores(reader(saved), 8)
    assert reader(saved).best_step == 4
    assert snapshot(saved) == before
    unfinished.rmdir()
    assert reader(tmp_path / "none").last_step is None
    assert list(tmp_path.iterdir()) == []


def needs_mount(folder: Path) -> None:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    if shutil.which("unshare") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk in a namespace")


def test_a_full_disk_is_one_error_and_the_run_goes_on_once_there_is_room(tmp_path):
    sizes = (77, 300)
    needs_mount(tmp_path)
    script = [sys.executable, "-m", "tests.training.full_disk", str(tmp_path), *map(str, sizes)]
    ended = subprocess.run(["unshare", "-rm", *script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
    assert len(ended.stdout.splitlines()) == len(sizes)


LATE_WRITE = """
import asyncio
import sys
from pathlib import Path
import tensorstore
from agentic_ring.training.checkpoint import Checkpoints

class Faulty:
    def __del__(self):
        raise RuntimeError("an error of its own")

async def write(done):
    await done

Checkpoints(Path(sys.argv[1]))
promise, done = tensorstore.Promise.new()
loop = asyncio.new_event_loop()
task = loop.create_task(write(done))
loop.run_until_complete(asyncio.sleep(0))
loop.close()
promise.set_result(None)
Faulty()
"""


def test_a_write_that_ends_after_another_has_failed_prints_nothing(tmp_path):
    """Its thread finds the event loop closed."""
    script = [sys.executable, "-c", LATE_WRITE, str(tmp_path)]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stderr
    assert "loop is closed" not in printed
    assert "an error of its own" in printed


@pytest.mark.slow
def test_a_script_on_a_full_disk_prints_one_message(tmp_path):
    needs_mount(tmp_path)
    store = random_store(tmp_path / "store.h5", [12] * 6)
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = f"--store {store} --directory {disk}/run --steps 12 --devices 1"
    train = f"{sys.executable} -m tests.training.worker {flags}"
    script = f"""
        mount -t tmpfs -o size=500k tmpfs {disk}
        {train} 2>{tmp_path}/first; echo $?
        mount -o remount,size=64m {disk}
        {train}; echo $?
    """
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True)
    assert ended.stdout.split() == ["1", "0"], ended.stderr
    assert "resuming from step" in ended.stderr
    messages = [line for line in (tmp_path / "first").read_text().splitlines() if "training" not in line]
    assert len(messages) == 1, messages
    assert messages[0].startswith(f"error: no space left on the disk while writing {disk}/run/checkpoints")
