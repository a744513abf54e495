import jax
import numpy as np
import pytest

from agentic_ring.models.llama import load_pretrained
from agentic_ring.results.results_file import read_results
from evals import perplexity
from tests.commands import exit_status
from tests.models.tiny_llama import tiny_tokenizer, write_tiny_model

TEXT = "the user and the assistant, and the other one: line 17 is 4242.\n" * 6


def test_it_is_the_mean_loss_of_the_windows_and_its_exponential(tmp_path, capsys):
    folder, text = write_tiny_model(tmp_path / "model", context=64), tmp_path / "text.txt"
    text.write_text(TEXT)
    perplexity.main(folder, text=(text,), length="48", output=tmp_path / "run")
    results = read_results(tmp_path / "run" / "results.json")
    ids = tiny_tokenizer().encode(TEXT)
    windows = np.array(ids[: len(ids) // 48 * 48]).reshape(-1, 48)
    logits = jax.jit(lambda model: model(windows))(load_pretrained(folder))
    scores = jax.nn.log_softmax(logits[:, :-1])
    expected = -np.take_along_axis(np.asarray(scores), windows[:, 1:, None], axis=2).mean()
    loss = results.figure("loss")
    assert loss.value == pytest.approx(expected, abs=1e-4)
    assert loss.n == len(windows) >= 4
    assert results.figure("perplexity").value == pytest.approx(np.exp(expected), rel=1e-4)
    assert "windows of 48 tokens" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(tmp_path, capsys):
    folder, binary = write_tiny_model(tmp_path / "model", context=64), tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    for flags, message in (
        (("--length", "1"), "a window needs at least 2 tokens"),
        (("--length", "64", "--text", binary), "cannot be read as text"),
        (("--length", "64", "--text", tmp_path / "absent"), "cannot be read as text"),
        (("--length", "65"), "made for 64"),
        (("--adapter", "absent"), "there is no adapter absent"),
    ):
        assert exit_status(perplexity.main, "--model", folder, *flags) == 1
        assert message in capsys.readouterr().err
