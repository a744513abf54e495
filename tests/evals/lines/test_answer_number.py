import pytest

from evals.lines.answer_number import UNPARSABLE, parsed_number


@pytest.mark.parametrize(
    ("answer", "last", "first"),
    [
        ("The <REGISTER_CONTENT> in line torpid-kid is <2416>.", 2416, 2416),
        ("line 17 is <4242>", 4242, 17),
        ("4242, as line 17 says", 17, 4242),
        ("<00042>", 42, 42),
        ("1,234", 234, 1),
        ("-5", 5, 5),
        ("3.14", 14, 3),
        ("12abc34", 34, 12),
        ("no number", UNPARSABLE, UNPARSABLE),
        ("", UNPARSABLE, UNPARSABLE),
        ("\n\n7\n", 7, 7),
    ],
)
def test_the_number_that_an_answer_is_taken_for(answer, last, first):
    assert parsed_number(answer, "last") == last
    assert parsed_number(answer, "first") == first


def test_an_endless_number_is_a_wrong_one_and_no_crash():
    assert parsed_number("9" * 10_000, "last") > 50_000
