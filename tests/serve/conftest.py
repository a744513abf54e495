"""One tiny model, and one server, for all tests of the server."""

from pathlib import Path

import pytest

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.models.llama import load_pretrained
from agentic_ring.serve.prompts import PromptProcess
from tests.models.tiny_llama import write_tiny_model
from tests.serve.running_server import CHUNK, CONTEXT, HeldGenerator, serving


@pytest.fixture(scope="package")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), CONTEXT)


@pytest.fixture(scope="package")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="package")
def engine(folder) -> TextEngine:
    return TextEngine(load_pretrained(folder), chunk=CHUNK)


@pytest.fixture(scope="package")
def prompts(folder, tokenizer):
    with PromptProcess(folder, "tokenizer", CONTEXT, tokenizer.longest_token) as prompts:
        yield prompts


@pytest.fixture(scope="package")
def generator(engine, tokenizer):
    return HeldGenerator(engine, tokenizer, CONTEXT)


@pytest.fixture(scope="package")
def root(generator, prompts):
    with serving(generator, prompts, queue_size=16) as root:
        yield root
