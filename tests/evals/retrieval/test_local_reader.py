"""A model on this machine as a reader: its batches, and models that cannot be used."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from agentic_ring.errors import ConfigError, DataError
from agentic_ring.files.model_path import find_model
from agentic_ring.inference.text_engine import Completion
from evals.retrieval.documents import plan_lines
from evals.retrieval.local_reader import EMBEDDED, open_reader

QUESTIONS = 12


@pytest.fixture
def changed(tmp_path):
    """Writes a copy of the embedded retriever whose file of this name has other fields."""

    def copy(name, change):
        folder = shutil.copytree(EMBEDDED, tmp_path / "changed")
        fields = json.loads((folder / name).read_text())
        change(fields)
        (folder / name).write_text(json.dumps(fields))
        return folder

    return copy


def test_questions_go_in_equal_batches_that_need_no_more_memory_than_the_document():
    batches = []

    def generate(prompts, new_tokens, document, stop_tokens):
        longest = max(map(len, prompts))
        assert stop_tokens == [reader.template.end_ids] * len(prompts)
        assert len(prompts) * longest <= 32
        assert len(prompts) * (longest + new_tokens) <= len(document)
        batches.append(len(prompts))
        return [Completion([*prompt]) for prompt in prompts]

    engine = SimpleNamespace(chunk=32, read=lambda tokens, advance: tokens, generate=generate)
    reader = replace(open_reader(None, [], None, allow_extrapolation=False), engine=engine)
    document = plan_lines("LRT-NL", "300", 0, QUESTIONS, QUESTIONS)[0].build(300)
    texts = [question.text for question in document.questions]
    answers = list(reader.answers(document.text, texts, 4))
    assert [number for number, _ in answers] == [*range(QUESTIONS)]
    for question, (_, answer) in zip(document.questions, answers, strict=True):
        assert str(question.key).split("-")[-1] in answer.text
        assert answer.prompt_tokens == reader.count_tokens(document.text, question.text)
    assert len(batches) > 1
    assert max(batches) - min(batches) <= 1


def test_a_context_beyond_what_it_was_made_for_must_be_allowed_and_fit_the_memory(
    changed, capsys, monkeypatch
):
    short = str(changed("config.json", lambda fields: fields.update(max_position_embeddings=1000)))
    with pytest.raises(ConfigError, match=r"2048 tokens .*1000"):
        open_reader(short, [1024, 2048], None, allow_extrapolation=False)
    monkeypatch.setattr("agentic_ring.device_memory.hardware", lambda: {"memory_gib": 0.005})
    with pytest.raises(ConfigError, match=r"reading 2,048 tokens takes .* weights .* cache .* available"):
        open_reader(short, [1024, 2048], None, allow_extrapolation=True)
    said = capsys.readouterr().err
    assert "warning: the model was made for 1000 tokens, and is used on up to 2048" in said


def test_a_tokenizer_of_another_model_is_refused(changed):
    other = changed("tokenizer.json", lambda fields: fields["model"]["vocab"].update(extra=100_000))
    with pytest.raises(DataError, match="100000"):
        open_reader(str(other), [], None, allow_extrapolation=False)


def test_a_model_that_is_not_there_says_what_to_do(monkeypatch, tmp_path):
    for name in ("./nowhere", "a/b/c", "/not/here"):
        with pytest.raises(DataError, match=name):
            find_model(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="hf download organisation/name --local-dir"):
        find_model("organisation/name")
    with pytest.raises(DataError, match="-name is no folder, and cannot be downloaded"):
        find_model("organisation/-name")
