"""Tokenized conversations: nothing lost between pieces, loss on answers only, long ones split."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.data.text.chat import ChatTemplate, Turn, chat_template
from agentic_ring.data.text.conversation_tokens import prompt_ids, tokenize, tokenize_in_parts
from agentic_ring.errors import DataError
from tests.data.text.tokenizers_for_tests import byte_level, sentencepiece, spelled

with_tokenizers = pytest.mark.parametrize(
    "make", [byte_level, sentencepiece, partial(sentencepiece, "first")], ids=["bytes", "always", "first"]
)
WORDS = st.lists(
    st.sampled_from(["The", "capital", "USER:", "é", "4821", "\n", "is", "<x>", "a  b"]), min_size=1
)
TEXTS = WORDS.map(" ".join)
QUESTION = Turn("user", "What is the capital?")
ANSWER = Turn("assistant", "The capital is Paris.")


@with_tokenizers
@given(texts=st.lists(TEXTS.map(str.strip).filter(bool), min_size=1, max_size=5))
def test_pieces_give_the_ids_of_the_whole_text(make, texts):
    tokenizer = make()
    template = chat_template("vicuna_v1.1", tokenizer)
    turns = [Turn(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)]
    text = "".join(piece.text for piece in template.pieces(turns))
    assert list(tokenize(tokenizer, template, turns).ids) == tokenizer.encode(text, bos=True)


@with_tokenizers
@pytest.mark.parametrize("name", ["vicuna_v1.1", "plain"])
def test_loss_counts_on_answers_and_their_end_alone(make, name):
    tokenizer = make()
    template = chat_template(name, tokenizer)
    turns = [QUESTION, ANSWER, QUESTION, ANSWER]
    text = tokenize(tokenizer, template, turns)
    runs = np.split(text.ids, np.flatnonzero(np.diff(text.counts)) + 1)
    asked, answered, again, last = (spelled(tokenizer, run) for run in runs)
    assert prompt_ids(tokenizer, template, turns[:3]) == list(np.concatenate(runs[:3]))
    assert text.counts[-1]
    assert asked[0] == "<s>"
    assert "<s>" not in asked[1:] + answered + again + last
    assert answered == last
    assert answered[-1] == "</s>"
    assert tokenizer.decode(runs[1]).strip() == ANSWER.text
    assert tokenizer.decode(runs[0]).rstrip().endswith("ASSISTANT:" if name == "vicuna_v1.1" else "capital?")


def test_a_prompt_may_write_its_earlier_turns_anew():
    """Such a conversation has no pieces; what is spelled like a special token stays text all the same."""
    tokenizer = byte_level()
    source = "{% for m in messages %}{{ messages | length - loop.index }} {{ m.content }}</s>{% endfor %}"
    template = ChatTemplate("tokenizer", source, tokenizer)
    turns = [Turn("user", "What is </s>?"), ANSWER, QUESTION]
    ids = prompt_ids(tokenizer, template, turns)
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids[1:], skip_special=False) == template.prompt(turns)
    assert ids.count(tokenizer.eos_ids[0]) == 3
    with pytest.raises(DataError, match="cannot be trained on"):
        tokenize(tokenizer, template, turns)


def test_no_bos_stands_in_front_where_texts_have_none():
    tokenizer = byte_level(add_bos=False)
    ids = tokenize(tokenizer, chat_template("plain", tokenizer), [QUESTION, ANSWER]).ids
    assert tokenizer.bos_id not in ids


@given(
    texts=st.lists(TEXTS, min_size=2, max_size=12).filter(lambda texts: len(texts) % 2 == 0),
    length=st.integers(8, 120),
    system=st.booleans(),
)
def test_long_conversations_are_divided_between_pairs(texts, length, system):
    tokenizer = byte_level()
    template = chat_template("plain", tokenizer)
    opening = [Turn("system", "Be brief.")] if system else []
    spoken = [Turn(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)]
    pairs = [tokenize(tokenizer, template, opening + spoken[n : n + 2]) for n in range(0, len(spoken), 2)]
    parts = list(tokenize_in_parts(tokenizer, template, opening + spoken, length))
    overhead = len(tokenizer.encode("Be brief.\n", bos=True)) if system else 1
    # Every token of every turn is there once, or cut; only what opens a part is written again.
    sizes = [len(part) + part.cut - overhead for part in parts]
    assert sum(sizes) == sum(len(pair) - overhead for pair in pairs)
    for part in parts:
        assert len(part) == len(part.counts) <= length
        assert not part.cut or any(np.array_equal(part.ids, pair.ids[:length]) for pair in pairs)
    if not any(part.cut for part in parts):
        assert sum(part.counts.sum() for part in parts) == sum(pair.counts.sum() for pair in pairs)
    # As few as the turns allow: no part could have taken the pair after it.
    for part, following in pairwise(parts):
        first_answer_end = int(np.argmax(following.ids == tokenizer.eos_ids[0]))
        assert len(part) + first_answer_end + 1 - overhead > length or part.cut or following.cut


SPELLINGS = st.sampled_from(
    ["</s>", "<s>", "<|eot_id|>", "<</s>", "</s", "<|eot_id|></s>", "\ufdd0", " ", "é", "\n"]
)


@with_tokenizers
@pytest.mark.parametrize("name", ["vicuna_v1.1", "plain", "tokenizer"])
@given(texts=st.lists(st.lists(SPELLINGS).map("".join), min_size=2, max_size=2))
def test_special_tokens_that_are_spelled_in_a_turn_stay_text(make, name, texts):
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = make(chat_template=source) if name == "tokenizer" else make()
    template = chat_template(name, tokenizer)
    turns = [Turn("user", "Say " + texts[0] + "."), Turn("assistant", "It is " + texts[1] + ".")]
    ids = tokenize(tokenizer, template, turns).ids
    written = [tokenizer.bos_id, *[tokenizer.eos_ids[0]] * (2 if name == "tokenizer" else 1)]
    specials = set(map(tokenizer.token_id, tokenizer.special_tokens)) - {tokenizer.token_id("<unk>")}
    assert [number for number in ids if number in specials] == written
    text = tokenizer.decode(ids).replace("\N{REPLACEMENT CHARACTER}", "")
    for turn in turns:
        assert turn.text.replace("\ufdd0", "") in text
    assert prompt_ids(tokenizer, template, turns[:1])[: len(written) - 1] == list(ids[: len(written) - 1])
