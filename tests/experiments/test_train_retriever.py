"""The embedded retriever's tokenizer and lessons."""

import re
from dataclasses import replace
from functools import partial

import numpy as np

from agentic_ring.data.text.tokenizer import Tokenizer
from evals.retrieval.documents import LinePlan, word_lists
from evals.retrieval.local_reader import EMBEDDED
from experiments.retriever.lessons import (
    ANSWER,
    CHAT_TEMPLATE,
    FARTHEST_POSITION,
    TOKENS_A_LINE,
    Lesson,
    Lessons,
    LessonStage,
    retriever_tokenizer,
    vocabulary,
)
from experiments.retriever.training import _crowd

TOKENIZER = retriever_tokenizer()
stage = partial(LessonStage, steps=2, learning_rate=1e-3, crowding=1.0)


def test_every_word_and_every_number_is_known_and_comes_back():
    shipped = Tokenizer.load(EMBEDDED)
    assert shipped.chat_template == TOKENIZER.chat_template == CHAT_TEMPLATE
    assert shipped.vocab_size == TOKENIZER.vocab_size
    adjectives, nouns = word_lists()
    unknown = TOKENIZER.token_id("<unknown>")
    keys = [f"{each}-{nouns[0]}" for each in adjectives] + [f"{adjectives[0]}-{each}" for each in nouns]
    lines = [f"line {key}: REGISTER_CONTENT is <{1 + 5 * number}>\n" for number, key in enumerate(keys)]
    text = "".join(lines)
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert len(ids) == TOKENS_A_LINE * len(lines) - sum(10 <= 1 + 5 * n < 100 for n in range(len(lines)))
    document = LinePlan("LRT-NL", "4k", 0, 0, (0,), 1).build(200)
    ids = TOKENIZER.encode(document.text + document.questions[0].text)
    assert unknown not in ids
    assert len(ids) <= 1 + TOKENS_A_LINE * 200 + 4


def test_a_lesson_asks_what_its_record_says():
    lesson = next(Lessons(stage(512, rows=12, questions=8), seed=3))
    adjectives, nouns = word_lists()
    for row in range(12):
        text = TOKENIZER.decode(lesson.tokens[row].tolist(), skip_special=False)
        record, *questions = re.split(r"\nNow the record is over", text)
        values = dict(re.findall(r"line (.+): REGISTER_CONTENT is <(\d+)>", record))
        fields = (lesson.weight[row] > 0, lesson.answer_places[row], lesson.answers[row])
        weight, answer_places, answers = (field.reshape(-1, ANSWER) for field in fields)
        assert weight[:, 0].sum() == len(questions) >= 2
        for question, counts, places, answer in zip(questions, weight, answer_places, answers, strict=False):
            (key,) = re.findall(r"in line (.+)\? I need", question)
            answered = TOKENIZER.decode(answer[counts].tolist(), skip_special=False)
            assert answered == f"{values[key]}>\n<end>"
            # Each token of the answer is what stands after its place.
            np.testing.assert_array_equal(lesson.tokens[row, places[counts] + 1], answer[counts])
        asked = lesson.word_places[row], lesson.adjectives[row], lesson.nouns[row]
        for place, adjective, noun in zip(*asked, strict=True):
            words = TOKENIZER.decode(lesson.tokens[row, max(place - 4, 0) : place + 1].tolist())
            assert f"line {adjectives[adjective]}-{nouns[noun]}" in words


def test_lessons_go_on_where_they_stopped_and_keep_to_their_seed():
    lessons = Lessons(stage(128, rows=2, questions=4), seed=0)
    first, second = next(lessons), next(lessons)
    again = Lessons(lessons.stage, seed=0)
    again.set_state({"drawn": 1})
    np.testing.assert_array_equal(next(again).tokens, second.tokens)
    assert (first.tokens != second.tokens).any()
    assert (next(replace(lessons, seed=1, drawn=0)).tokens != first.tokens).any()


def test_each_token_belongs_to_its_line_and_stands_for_those_that_were_removed():
    lesson, alone = (next(Lessons(stage(256, 64, 4, crowding=n), seed=0)) for n in (2.0, 0.0))
    asked_token, positions = vocabulary().signs[2], lesson.positions
    assert (alone.crowd == 0).all()
    assert (np.diff(positions, axis=1) >= 0).all()
    assert FARTHEST_POSITION / 2 < positions.max() < FARTHEST_POSITION
    assert (positions[:, -1] < 256).sum() >= 10  # rows as they are
    for row in range(64):
        tokens, lines, crowd = lesson.tokens[row], lesson.lines[row], lesson.crowd[row]
        asked = (tokens == asked_token).argmax()
        assert lines[0] == -1
        assert (np.diff(lines[1:asked]) >= 0).all()
        for start in np.flatnonzero(tokens == asked_token):
            first = (lines == lines[start]).argmax()
            np.testing.assert_array_equal(tokens[first : first + 2], tokens[start + 1 : start + 3])
        np.testing.assert_array_equal(crowd, [0, *[crowd[1]] * (asked - 1), *[0] * (256 - asked)])
        # Rows whose words are drawn from all: each token stands for an equal part of what was removed.
        removed = (positions[row, asked] - asked) / TOKENS_A_LINE
        most = 1 + 2 * removed / (lines[asked - 1] + 1)
        assert crowd[1] <= np.log(most) * (1 + 1e-5)
        assert (crowd[1] > 0) == (removed > 0)


def test_tokens_of_other_lines_compete_as_many_and_those_nearby_or_of_the_same_line_as_one():
    positions = np.array([[0, 1, 2, 500, 501, 502]])
    lines, record = np.array([[-1, 0, 1, 2, 3, 0]]), np.log(np.float32([[1, 9, 9, 9, 1, 1]]))
    unused = [np.zeros((1, 1))] * 6
    lesson = Lesson(np.zeros((1, 6)), positions, lines, record, *unused)
    expected = np.full((6, 6), -np.inf)
    expected[np.tril_indices(6)] = 0.0
    expected[[3, 3, 4, 4, 5], [1, 2, 1, 2, 2]] = np.log(9)
    np.testing.assert_allclose(_crowd(lesson)[0, 0], expected, rtol=1e-6)
