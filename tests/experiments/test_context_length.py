import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from agentic_ring import device_memory
from agentic_ring.device_memory import DoesNotFitError
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.files.run_folder import read_config, write_config
from agentic_ring.results.results_file import read_results
from agentic_ring.results.rows import read_rows
from experiments import context_length
from experiments.context_length import TrainedRun


@pytest.mark.slow
def test_points_are_measured_once_and_say_where_they_extrapolate(small_run, tmp_path, capsys):
    folder, output = small_run.directory, tmp_path / "curve"

    def measure(*counts: int) -> str:
        context_length.main((folder,), counts, environments=2, prompt_chunk=50, output=output)
        return "".join(capsys.readouterr())

    assert "EXTRAPOLATION" not in measure(1)
    point = output / "points" / f"{folder.name}-1.json"
    first = point.stat().st_mtime_ns
    printed = measure(6, 1)
    assert point.stat().st_mtime_ns == first
    assert "6 trajectories: 480 tokens" in printed
    assert "EXTRAPOLATION: the model was trained on chains of 5" in printed
    results = read_results(output / "results.json")
    rows = read_rows(output / "context_length.csv")
    keys = [(row["trajectories"], row["environment_seed"]) for row in rows]
    assert keys == list(product(("1", "6"), ("20000", "20001")))
    means = [np.mean([float(row["return"]) for row in rows[i : i + 2]]) for i in (0, 2)]
    np.testing.assert_allclose(means, [figure.value for figure in results.figures])
    assert means[0] != means[1]  # the prompt matters
    planned = TrainedRun(folder, 2, 20_000).context_bytes(6)
    taken = {name: int(rows[2][f"{name}_bytes"]) for name in ("prompt", "environments")}
    assert taken == vars(planned)
    assert (output / "context_length.png").read_bytes().startswith(b"\x89PNG")

    with pytest.raises(ConfigError, match=r"other settings \(first_seed"):
        context_length.main((folder,), (1,), environments=2, first_seed=1, output=output)
    another = tmp_path / folder.name  # under the same name, but trained otherwise
    shutil.copytree(folder, another)
    write_config(another, replace(small_run.config, target=1.0))
    with pytest.raises(ConfigError, match="models"):
        context_length.main((another,), (1,), environments=2, output=output)
    point.write_text("{}")
    with pytest.raises(DataError, match="has no run; delete it to measure it again"):
        measure(1)


@pytest.mark.slow
def test_bytes_and_settings_are_checked_before_anything_is_allocated(
    small_run, tmp_path, monkeypatch, capsys
):
    config = read_config(small_run.directory, type(small_run.config))
    write_config(tmp_path / "run", replace(config, chains=replace(config.chains, action_repeat=1)))
    output = tmp_path / "curve"
    context_length.main((tmp_path / "run",), (128,), output=output, dry_run=True)
    assert "128 trajectories: 512,000 tokens, cache" in capsys.readouterr().err
    monkeypatch.setattr(device_memory, "HOST_SHARE", 1e-9)
    with pytest.raises(DoesNotFitError, match="needs"):
        context_length.main((small_run.directory,), (4,), environments=2, output=output)
    for runs, counts, message in ((1, (0, 4), "trajectories is"), (2, (4,), "by name")):
        with pytest.raises(ConfigError, match=message):
            context_length.main((small_run.directory,) * runs, counts, output=output)
    assert not output.exists()
