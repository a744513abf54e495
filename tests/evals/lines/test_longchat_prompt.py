import re

import pytest

from agentic_ring.errors import ArgumentError, ConfigError
from evals.lines.keys import KINDS
from evals.lines.longchat_prompt import line_text, longest_document, plan_documents, question_text

# From LongChat's longeval/evaluation/lines/testcases/700_lines.jsonl.
LONGCHAT_HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and "
    "contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, "
    "memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the "
    "corresponding <REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
)


def plan(kind="LRT-NL", seed=0, samples=10, per_document=10, name="4k"):
    return plan_documents(kind, name, seed, samples, per_document)[0]


def words(document: str, question: str) -> int:
    """A tokenizer of its own: words and signs."""
    return len(re.findall(r"\w+|[^\w\s]|\n", document + question))


def test_the_strings_are_longchats_to_the_letter():
    assert line_text("grass-nutmeg", 8907) == "line grass-nutmeg: REGISTER_CONTENT is <8907>\n"
    assert question_text("grass-nutmeg") == (
        "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line grass-nutmeg? "
        "I need the number."
    )
    document = plan("LRT").build(20)
    assert document.text.startswith(f"{LONGCHAT_HEADER}line 1: REGISTER_CONTENT is <")
    assert document.text.count("\n") == 22


@pytest.mark.parametrize("kind", KINDS)
def test_each_question_is_answered_by_the_line_at_its_position(kind):
    document = plan(kind).build(300)
    lines = document.text.removeprefix(LONGCHAT_HEADER).splitlines()
    assert len(lines) == document.num_lines == 300
    for question in document.questions:
        assert lines[question.position] == f"line {question.key}: REGISTER_CONTENT is <{question.expected}>"
        assert question.depth == question.position / 300
        assert f"in line {question.key}? I need" in question.text


@pytest.mark.parametrize(("samples", "per_document"), [(50, 50), (50, 25), (50, 1), (50, 7), (3, 10)])
def test_every_stratum_of_depth_is_asked_once_over_all_documents(samples, per_document):
    plans = plan_documents("LRT-NL", "4k", 0, samples, per_document)
    assert max(len(each.strata) for each in plans) <= per_document
    depths = sorted(question.depth for each in plans for question in each.build(1000).questions)
    assert [int(depth * samples) for depth in depths] == list(range(samples))


def test_each_document_is_asked_from_its_beginning_to_its_end():
    for each in plan_documents("LRT-NL", "4k", 0, 50, 10):
        depths = [question.depth for question in each.build(1000).questions]
        assert [int(depth * 10) for depth in depths] == list(range(10))


@pytest.mark.parametrize("samples", [25, 50, 1000])
def test_with_as_many_questions_as_lines_each_line_is_asked_for_once(samples):
    for each in plan_documents("LRT", "4k", 0, samples, 25)[:3]:
        positions = [question.position for question in each.build(25).questions]
        assert positions == list(range(25))
        with pytest.raises(ArgumentError, match="24 lines cannot be asked 25"):
            each.build(24)


def test_the_seed_and_the_name_decide_and_documents_of_a_set_differ():
    first, second = plan_documents("LRT-NL", "4k", 0, 4, 2)
    assert first.build(50) == plan(samples=4, per_document=2).build(50)
    texts = {each.build(50).text for each in (first, second, plan(seed=1), plan(name="8k"))}
    assert len(texts) == 4


def test_a_seed_gives_the_same_document_on_every_python_and_from_now_on():
    document = plan_documents("LRT-NL", "4k", 0, 50, 25)[0].build(169)
    assert document.text.split("\n")[2:5] == [
        "line excited-lumber: REGISTER_CONTENT is <7971>",
        "line healthy-slump: REGISTER_CONTENT is <42251>",
        "line precious-oncology: REGISTER_CONTENT is <19358>",
    ]
    assert [question.position for question in document.questions[:3]] == [1, 8, 14]


def test_one_more_line_leaves_the_others_as_they_are():
    assert plan().build(51).text.startswith(plan().build(50).text)


def test_values_are_between_1_and_50000_and_duplicates_are_counted():
    document = plan(samples=200, per_document=200).build(20_000)
    values = [int(value) for value in re.findall(r"<(\d+)>\n", document.text)]
    assert min(values) >= 1
    assert max(values) <= 50_000
    assert [q.value_duplicates for q in document.questions] == [
        values.count(q.expected) - 1 for q in document.questions
    ]
    assert any(question.value_duplicates for question in document.questions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("room", [700, 3996, 20_000])
def test_the_longest_document_fits_and_one_more_line_does_not(kind, room):
    each = plan(kind)
    document = longest_document(each, room, words)
    longest = max(words(document.text, question.text) for question in document.questions)
    more = each.build(document.num_lines + 1)
    assert longest <= room < max(words(more.text, question.text) for question in more.questions)


def test_the_search_is_right_where_every_number_of_lines_can_be_tried():
    each = plan(samples=2)
    tried = [each.build(lines) for lines in range(2, 60)]
    longest = {d.num_lines: max(words(d.text, q.text) for q in d.questions) for d in tried}
    for room in range(longest[2], longest[50], 9):
        found = longest_document(each, room, words).num_lines
        assert longest[found] <= room < longest[found + 1]


def test_half_a_million_tokens_are_counted_a_few_times_only():
    counted = []

    def count(document, question):
        counted.append(len(document))
        return words(document, question)

    document = longest_document(plan(), 2**19, count)
    assert document.num_lines > 20_000
    assert sum(length > 100_000 for length in counted) <= 6


def test_a_context_too_short_for_the_questions_is_refused_in_numbers():
    with pytest.raises(ConfigError, match=r"\d+ tokens are needed for 10 lines.*100 are left"):
        longest_document(plan(), 100, words)


def test_a_count_that_does_not_grow_is_an_error_instead_of_an_endless_search():
    with pytest.raises(ArgumentError, match="no more than 10 lines"):
        longest_document(plan(), 4096, lambda document, question: 512)


def test_a_few_lines_more_may_have_fewer_tokens():
    def count(document, question):
        return words(document, question) - 100 * (document.count("\n") % 2)

    least = plan().build(10)
    room = max(count(least.text, question.text) for question in least.questions) + 3
    document = longest_document(plan(), room, count)
    assert document.num_lines >= 10
    assert max(count(document.text, question.text) for question in document.questions) <= room


@pytest.mark.parametrize(("samples", "per_document"), [(0, 1), (1, 0), (-1, 5)])
def test_no_questions_are_refused(samples, per_document):
    with pytest.raises(ConfigError, match=f"num_samples is {samples}"):
        plan_documents("LRT", "4k", 0, samples, per_document)
