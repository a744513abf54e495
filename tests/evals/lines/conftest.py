import pytest

from tests.evals.lines.line_server import LineServer


@pytest.fixture
def server():
    with LineServer() as running:
        yield running
