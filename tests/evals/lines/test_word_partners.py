import pytest

from evals.lines.longchat_prompt import HEADER, DocumentPlan, line_text
from evals.lines.word_partners import count_word_partners

KEYS = [
    "old-cat",
    "old-dog",
    "new-dog",
    "older-dogs",
    "old-fashioned-dog",
    "new-e-mail",
    "old-e-mail",
    "x-ray",
]
RECORD = HEADER + "".join(line_text(key, 5) for key in KEYS)


@pytest.mark.parametrize(
    ("key", "partners"),
    [
        ("old-cat", 3),  # old-dog, old-e-mail, and old-fashioned-dog up to its hyphen
        ("new-dog", 3),
        ("older-dogs", 0),
        ("old-fashioned-dog", 2),
        ("new-e-mail", 2),
        ("x-ray", 0),
    ],
)
def test_lines_with_the_adjective_or_the_noun_are_counted(key, partners):
    assert count_word_partners(RECORD, key) == partners


def test_half_a_million_tokens_have_as_many_as_words_repeat():
    document = DocumentPlan("LRT-NL", "512k", 0, 0, (0, 1, 2), 3).build(104_869)
    for question in document.questions:
        assert 110 <= count_word_partners(document.text, str(question.key)) <= 150
