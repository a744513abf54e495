"""``python -m agentic_ring`` says what there is and what attention would do."""

import os
import re
from pathlib import Path

from agentic_ring.__main__ import main
from agentic_ring.attention import plan
from tests.commands import exit_status, run_python
from tests.data.text.test_packing import numbered, packed, write


def test_the_balance_of_packed_rows(capsys, tmp_path):
    """Two long documents in a row: the devices that hold their ends have most to do, unless in stripes."""
    path = write(tmp_path / "rows.h5", packed(numbered([1000, 900, 148]), 2048), 2048)
    assert exit_status(main, "--packing", path, "--ring", 4, "--data", 2, "--batch", 2) == 0
    printed = capsys.readouterr().out
    assert "1 x 512 tokens of a sequence of 2048" in printed
    (found,) = re.findall(r"1 packed rows.*: contiguous (.*), striped.*, block_striped (.*), z", printed)
    assert 1.0 <= float(found[1]) < float(found[0])


def test_a_kernel_that_refuses_some_tiles_says_which(capsys, monkeypatch):
    monkeypatch.setattr(plan, "mesh_platform", lambda mesh: "tpu")
    # Halves of 192 tokens are no multiple of the 128 lanes of a TPU's registers; blocks of 384 are.
    assert exit_status(main, "--tokens", "3072", "--strategy", "ring") == 0
    printed = capsys.readouterr().out
    assert "32 and 32 heads, causal: forward splash, backward splash" in printed
    assert "32 and 32 heads, no mask: forward xla, backward xla" in printed
    assert "splash: refuses forward of 1 row of 192 queries x 192 keys" in printed


def test_one_message_for_a_bad_value(capsys):
    for arguments, named in (
        ("--ring 3", "3 devices"),
        ("--heads 6 --kv-heads 4", "6 heads and k has 4"),
        ("--tokens -4", "--tokens is -4"),
        ("--window 0", "window is 0"),
    ):
        assert exit_status(main, *arguments.split()) == 1
        printed = capsys.readouterr()
        assert re.fullmatch(f"error: .*{named}.*\n", printed.err)
        assert not printed.out


def test_as_a_program_with_simulated_devices():
    flags = ["--simulated-devices", "4", "--tokens", "4096"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "JAX_PLATFORMS": "cpu"}
    finished = run_python("-m", "agentic_ring", *flags, env=environment)
    assert "mesh       stage 1 x data 1 x fsdp 1 x ring 4 x tensor 1" in finished.stdout
    assert finished.stderr == ""
