"""A model whose right answers are known: a miss is a bug in prefill, cache or decoding."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from agentic_ring.data.text.chat import chat_template
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.inference import Completion, TextEngine
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.llama import load_pretrained
from agentic_ring.results.results_file import read_results
from evals.constructed_retriever import build
from evals.line_retrieval import main
from evals.lines.keys import all_words
from evals.lines.local_reader import LocalReader, model_folder, open_reader
from evals.lines.longchat_prompt import HEADER, line_text, plan_documents, question_text
from evals.lines.scores import parsed_number

QUESTIONS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("constructed")
    build(path)
    return path


@pytest.fixture(scope="module")
def reader(folder):
    return open_reader(str(folder), [], None, allow_extrapolation=False)


def right_answers(folder, lines: int, shape: MeshShape, devices: int, chunk: int, **arguments) -> int:
    """Number of right answers to ``QUESTIONS`` questions about a document."""
    mesh = make_mesh(shape, jax.devices()[:devices])
    engine = TextEngine(load_pretrained(folder, mesh), mesh, chunk, **arguments)
    tokenizer = Tokenizer.load(folder)
    reader = LocalReader("constructed", True, engine, tokenizer, chat_template("plain", tokenizer))
    (plan,) = plan_documents("LRT-NL", f"{lines}", 0, QUESTIONS, QUESTIONS)
    document = plan.build(lines)
    answers = reader.answers(document.text, [question.text for question in document.questions], 4)
    return sum(
        parsed_number(answer.text, "last") == question.expected
        for (_, answer), question in zip(answers, document.questions, strict=True)
    )


@pytest.mark.parametrize(
    ("shape", "devices", "chunk", "lines"),
    [
        (MeshShape(ring=4), 4, 64, 155),
        pytest.param(MeshShape(ring=1), 1, 2048, 300, marks=pytest.mark.slow),
        pytest.param(MeshShape(ring=2), 2, 256, 301, marks=pytest.mark.slow),
        pytest.param(MeshShape(data=2, ring=4), 8, 512, 1000, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_answer_is_right_on_any_ring_with_any_chunk(shape, devices, chunk, lines, folder):
    assert right_answers(folder, lines, shape, devices, chunk) == QUESTIONS


@pytest.mark.slow
def test_every_answer_is_right_from_a_cache_of_bfloat16(folder):
    assert right_answers(folder, 700, MeshShape(ring=2), 2, 256, cache_dtype="bfloat16") == QUESTIONS


@pytest.mark.slow
def test_every_answer_is_right_at_64k(folder):
    assert right_answers(folder, 16_350, MeshShape(ring=2), 2, 2048) == QUESTIONS


def test_prompts_like_those_of_longchats_files_are_answered(reader):
    # Up to 680 lines they end in a space; from 700 lines on, any two words make a key.
    words = all_words()
    keys = [f"{first}-{second}" for first, second in zip(words[::90], reversed(words[::90]), strict=True)]
    record = HEADER + "".join(line_text(key, number) for number, key in enumerate(keys, start=1000))
    asked = [3, 40, len(keys) - 1]
    questions = [question_text(keys[number]) + " " for number in asked]
    answers = [answer.text for _, answer in reader.answers(record, questions, 4)]
    assert answers == [str(1000 + number) for number in asked]


def test_questions_go_in_equal_batches_that_need_no_more_memory_than_the_document(reader):
    batches = []

    def generate(prompts, new_tokens, document, stop_tokens):
        longest = max(map(len, prompts))
        assert len(prompts) * longest <= 16
        assert len(prompts) * (longest + new_tokens) <= len(document)
        batches.append(len(prompts))
        return [Completion([*prompt]) for prompt in prompts]

    engine = SimpleNamespace(chunk=16, read=lambda tokens, advance: tokens, generate=generate)
    (plan,) = plan_documents("LRT-NL", "x", 0, QUESTIONS, QUESTIONS)
    document = plan.build(300)
    texts = [question.text for question in document.questions]
    answers = list(replace(reader, engine=engine).answers(document.text, texts, 4))
    assert [number for number, _ in answers] == [*range(QUESTIONS)]
    for text, (_, answer) in zip(texts, answers, strict=True):
        assert text.endswith(answer.text.strip())
        assert answer.prompt_tokens == reader.count_tokens(document.text, text)
    assert len(batches) > 1
    assert max(batches) - min(batches) <= 1


@pytest.mark.slow
def test_wrong_rotary_positions_would_be_seen(folder, tmp_path):
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    fields = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**fields, "rope_theta": 1e4}))
    assert right_answers(wrong, 1111, MeshShape(ring=1), 1, 2048) < QUESTIONS / 2


@pytest.mark.slow
def test_the_command_asks_it_and_names_it_trained_on_the_task(folder, tmp_path, capsys):
    status = main(
        "1k,2k",
        model=str(folder),
        devices=8,
        num_samples=6,
        questions_per_document=3,
        output=tmp_path / "run",
    )
    assert status == 0
    results = read_results(tmp_path / "run" / "results.json")
    assert [results.figure(f"accuracy/{name}").value for name in ("1k", "2k")] == [1.0, 1.0]
    assert results.config["trained_on_task"] is True
    printed = capsys.readouterr()
    assert "trained on this task" in printed.out
    assert "reading 2,048 tokens takes" in printed.err


def test_words_and_numbers_are_a_token_each_and_come_back(folder):
    tokenizer = Tokenizer.load(folder)
    text = "line blue-eyed-brother-in-law: REGISTER_CONTENT is <12345>\n"
    ids = tokenizer.encode(text)
    assert len(ids) == 4
    assert tokenizer.decode(ids) == text


def test_a_context_beyond_what_it_was_made_for_must_be_allowed(folder, tmp_path, capsys):
    short = shutil.copytree(folder, tmp_path / "short")
    fields = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**fields, "max_position_embeddings": 1000}))
    with pytest.raises(
        ConfigError, match=r"a context of 2048 tokens is requested, .* made for 1000; give --allow"
    ):
        open_reader(str(short), [1024, 2048], None, allow_extrapolation=False)
    open_reader(str(short), [1024, 2048], None, allow_extrapolation=True)
    assert "warning: the model was made for 1000 tokens, and is used on up to 2048" in capsys.readouterr().err


def test_more_than_there_is_memory_for_is_said_before_it_starts(folder, monkeypatch):
    monkeypatch.setattr("agentic_ring.device_memory.hardware", lambda: {"memory_gib": 0.1})
    with pytest.raises(
        ConfigError, match=r"reading 262,144 tokens takes .* weights .* cache .* 0.10 GB are available"
    ):
        open_reader(str(folder), [262_144], None, allow_extrapolation=False)


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["extra"] = 100_000
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(DataError, match="ids go up to 100000"):
        open_reader(str(other), [], None, allow_extrapolation=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "there is no folder ./nowhere"),
        ("a/b/c", "there is no folder a/b/c; give a folder, or organisation/name on Hugging Face"),
        ("/not/here", "there is no folder /not/here"),
    ],
)
def test_a_model_that_is_not_there_says_so(name, message):
    with pytest.raises(DataError, match=message):
        model_folder(name)


def test_a_name_that_cannot_be_fetched_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="hf download organisation/name --local-dir"):
        model_folder("organisation/name")
