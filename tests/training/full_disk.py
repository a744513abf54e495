"""Saves checkpoints on disks of several sizes until each is full; started in a mount namespace of its own.

python -m tests.training.full_disk DISK KIB...
"""

import errno
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agentic_ring.training.checkpoint import Checkpoints
from tests.training.test_checkpoint import assert_restores, state_of


def fill(disk: Path, kib: int) -> str:
    """Fills a disk, then makes room and goes on; returns what happened."""
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
    return f"{kib} KiB: full after checkpoint {saved}, while writing {full.value.filename}"


if __name__ == "__main__":
    for size in sys.argv[2:]:
        print(fill(Path(sys.argv[1]), int(size)), flush=True)
