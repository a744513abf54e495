"""Texts of the ladder's questions: what follows a record of lines, or of JSON."""

from collections.abc import Sequence

from evals.lines.longchat_prompt import QUESTION_START, question_text

LIST_START = f"{QUESTION_START} Tell me what is the <REGISTER_CONTENT> in each of these lines:"
LIST_END = "\nI need the numbers in this order, each as 'line <line index>: <REGISTER_CONTENT>'."

CHAIN_START = (
    f"{QUESTION_START} Some lines contain another line in place of a number. Write the <REGISTER_CONTENT> of "
    "the line that I ask for, then that of the line it leads to, and so on, one below the other, until it is "
    "a number."
)
JSON_HEADER = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
JSON_KEY, JSON_VALUE = '\n\nKey: "', '"\nCorresponding value:'


def several_text(keys: Sequence[str | int]) -> str:
    """Asks for the numbers of several lines."""
    return LIST_START + "".join(f"\nline {key}" for key in keys) + LIST_END


def chain_text(key: str | int) -> str:
    """Asks for the number at the end of the chain that begins at a line."""
    return CHAIN_START + question_text(key).removeprefix(QUESTION_START)


def occurrence_text(key: str | int, occurrence: int) -> str:
    """Asks for the number in one of the lines with the same key, counted from 1."""
    return (
        f"{QUESTION_START} Several lines begin with line {key}. Tell me what is the <REGISTER_CONTENT> in "
        f"number {occurrence} of them, in the order of the record? I need the number."
    )


def lines_with_value_text(value: int) -> str:
    """Asks for the keys of all lines with one value."""
    return (
        f"{QUESTION_START} Tell me all lines whose <REGISTER_CONTENT> is <{value}>. I need their line "
        "indices, each as 'line <line index>'."
    )


def count_text(value: int) -> str:
    """Asks how many lines have one value."""
    return f"{QUESTION_START} In how many lines is the <REGISTER_CONTENT> <{value}>? I need the number."


def json_text(key: str | int) -> str:
    """Asks for the value of a key of a JSON object."""
    return f"{JSON_KEY}{key}{JSON_VALUE}"
