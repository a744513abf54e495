"""Wrong flags of the scripts of Tables 3 to 5 end in one message, before anything is computed."""

import pytest

from experiments import table3_max_context, table4_mfu, table5_exorl
from tests.commands import exit_status

CELL = "--hardware 8xA100 --model 7B --method ring"
MISTAKES = {
    table3_max_context: {
        "--hardware 9xB200": "9xB200",
        "--model 9B": "9B",
        "--method flash": "flash",
        "--check 2048k": "--check",
        f"{CELL} --check 2g": "2g",
        f"{CELL} --check 100": "100 tokens; ring attention on 8 devices takes a multiple of 16",
        "--workers 0": "workers is 0",
    },
    table4_mfu: {
        "--hardware 9xH900": "'9xH900'",
        "--model 9B": "9B",
        "--block 15": "block is 15",
        "--rates nowhere.csv": "nowhere.csv",
        "--turns 0": "turns is 0",
        "--simulated-devices 0": "simulated_devices is 0",
    },
    table5_exorl: {
        "--tasks walker_jump": "walker_jump",
        "--methods ppo": "ppo",
        "--tasks": "no task was given",
        "--workers 0": "workers is 0",
        "--hardware 8xB300": "8xB300",
        "--cell cartpole_swingup bc 0": "config.json",
        "--fit bc 8xA100": "bc",
    },
}


@pytest.mark.parametrize("script", MISTAKES)
def test_mistakes_are_named(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AGENTIC_RING_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(table4_mfu, "simulate_cpu_devices", lambda devices: None)  # there are eight already
    for flags, named in MISTAKES[script].items():
        assert exit_status(script.main, *flags.split(), "--output", tmp_path / "run") == 1
        printed = capsys.readouterr().err
        assert printed.startswith("error: ")
        assert named in printed
        assert printed.count("\n") == 1
    assert not (tmp_path / "data").exists()
