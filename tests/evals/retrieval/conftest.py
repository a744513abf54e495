import pytest

from tests.evals.retrieval.line_server import LineServer


@pytest.fixture
def server():
    with LineServer() as running:
        yield running
