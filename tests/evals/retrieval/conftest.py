import pytest

from tests.evals.retrieval.line_server import LineServer


@pytest.fixture
def server():
    with LineServer() as running:
        yield running


@pytest.fixture
def unplotted(monkeypatch):
    """Leaves empty files in place of plots, which take most of a run's time."""
    monkeypatch.setattr("evals.retrieval.reports.save", lambda canvas, path: path.touch())
