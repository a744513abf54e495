"""Answers the ladder's questions from the text of a record, by reading it as a person would."""

import json
import re
from collections import defaultdict

from evals.retrieval.answers import Answer
from evals.retrieval.documents import HEADER
from evals.retrieval.ladder_documents import CHAIN_START, JSON_HEADER, JSON_KEY, LIST_START


class RecordOracle:
    """A ``Reader`` that answers in the forms that the questions ask for."""

    name = "oracle"
    trained_on_task = False

    def __init__(self):
        self.documents = 0
        self.asked: list[str] = []

    def count_tokens(self, document, question):
        return len(document + question) // 4

    def answers(self, document, questions, max_new_tokens):
        self.documents += 1
        for number, question in enumerate(questions):
            self.asked.append(question)
            yield number, Answer(answer(document, question), self.count_tokens(document, question), 0.1)


def answer(document: str, question: str) -> str:
    """The answer to a question of any task; every way to it is tried, and there must be one."""
    if document.startswith(JSON_HEADER):
        pairs = json.loads(document.removeprefix(JSON_HEADER), object_pairs_hook=list)
        key = question.removeprefix(JSON_KEY).split('"')[0]
        (value,) = [value for each, value in pairs if each == key]
        return value
    lines = re.findall(r"line (.+): REGISTER_CONTENT is <(.+)>\n", document.removeprefix(HEADER))
    contents, keys = defaultdict(list), defaultdict(list)
    for key, content in lines:
        contents[key].append(content)
        keys[content].append(key)
    if question.startswith(LIST_START):
        asked = re.findall(r"\nline (.+)", question)
        return "\n".join(f"line {key}: {only(contents[key])}" for key in asked)
    if question.startswith(CHAIN_START):
        written, key = [], re.findall(r"in line (.+)\? I need", question)[0]
        while key is not None:
            written.append(only(contents[key]))
            key = written[-1].removeprefix("line ") if written[-1].startswith("line ") else None
        return "\n".join(written)
    if found := re.search(r"begin with line (.+)\. Tell .* in number (\d)", question):
        assert len(contents[found[1]]) == 4
        return contents[found[1]][int(found[2]) - 1]
    if found := re.search(r"lines whose <REGISTER_CONTENT> is <(\d+)>", question):
        return ", ".join(f"line {only_key(contents, key)}" for key in keys[found[1]])
    if found := re.search(r"In how many lines is the <REGISTER_CONTENT> <(\d+)>", question):
        return str(len(keys[found[1]]))
    return only(contents[re.findall(r"in line (.+)\? I need", question)[0]])


def only(values: list[str]) -> str:
    (value,) = values
    return value


def only_key(contents: dict[str, list[str]], key: str) -> str:
    only(contents[key])
    return key
