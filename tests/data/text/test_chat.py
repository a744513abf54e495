"""Chat templates: their exact strings, which parts are answers, and what is refused."""

from contextlib import nullcontext
from datetime import datetime
from types import SimpleNamespace

import pytest

from agentic_ring.data.text.chat import ChatTemplate, Piece, Turn, chat_template, check_special_tokens
from agentic_ring.errors import DataError, UnknownNameError
from tests.data.text.tokenizers_for_tests import byte_level

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions."
)
TURNS = [Turn("user", "Hi {you}"), Turn("assistant", "Hello"), Turn("user", "Why?"), Turn("assistant", "So.")]
CHAT_ML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_builtin_templates_are_written_to_the_letter():
    vicuna = chat_template("vicuna_v1.1", byte_level())
    questions = f"{SYSTEM} USER: Hi {{you}} ASSISTANT:", "USER: Why? ASSISTANT:"
    assert vicuna.prompt(TURNS[:1]) == questions[0]
    assert vicuna.prompt(TURNS[:3]) == f"{questions[0]} Hello</s>{questions[1]}"
    texts = questions[0], " Hello</s>", questions[1], " So.</s>"
    assert vicuna.pieces(TURNS) == [*map(Piece, texts, (False, True) * 2)]
    llama = chat_template("llama-3", byte_level())
    header = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    system, user, answer = map(header, ("system", "user", "assistant"))
    turns = [Turn("system", "Be brief."), Turn("user", " Hi\n"), Turn("assistant", "Hello")]
    expected = f"<|begin_of_text|>{system}Be brief.<|eot_id|>{user}Hi<|eot_id|>{answer}"
    assert llama.prompt(turns[:2]) == expected
    assert llama.pieces(turns) == [Piece(expected, False), Piece("Hello<|eot_id|>", True)]
    plain = chat_template("plain", byte_level())
    assert plain.prompt(TURNS[:1]) == "Hi {you}\n"
    assert plain.pieces(TURNS[:2]) == [Piece("Hi {you}\n", False), Piece("Hello</s>", True)]


@pytest.mark.parametrize("end", ["</s>", "<|eot_id|>"])
def test_what_follows_the_end_of_an_answer_is_no_part_of_it(end):
    """The end is the template's own, if the tokenizer names another one."""
    tokenizer = byte_level()
    template = ChatTemplate("tokenizer", CHAT_ML.replace("</s>", end), tokenizer)
    question = f"<|im_start|>user\n{{}}{end}\n<|im_start|>assistant\n"
    texts = question.format("Hi {you}"), f"Hello{end}", "\n" + question.format("Why?"), f"So.{end}"
    assert template.pieces(TURNS) == [*map(Piece, texts, (False, True) * 2)]
    assert template.prompt(TURNS[:3]) == "".join(texts[:3])
    ends = dict.fromkeys(("</s>", end))
    assert template.end_ids == template.tokenizer.eos_ids == (*map(tokenizer.token_id, ends),)
    assert ChatTemplate("tokenizer", CHAT_ML.replace("</s>", ""), tokenizer).end_ids == tokenizer.eos_ids


def test_a_template_may_ask_for_the_date_and_for_json(monkeypatch):
    source = "{{ strftime_now('%d %b %Y') }} {{ messages[0] | tojson }}"
    clock = SimpleNamespace(now=lambda: datetime(2024, 7, 26))
    monkeypatch.setattr("agentic_ring.data.text.chat.datetime", clock)
    template = ChatTemplate("tokenizer", source, byte_level())
    assert template.prompt([Turn("user", "<é>")]) == '26 Jul 2024 {"role": "user", "content": "<é>"}'


def test_a_template_that_rewrites_earlier_turns_cannot_be_trained_on_but_asked():
    forgetful = "{% for m in messages %}{{ m.content if loop.last else '...' }}|{% endfor %}"
    template = ChatTemplate("tokenizer", forgetful, byte_level())
    assert template.prompt(TURNS[:3]) == "...|...|Why?|"
    with pytest.raises(DataError, match="before number 2 differently"):
        template.pieces(TURNS)


CHAT_LLAMA_2 = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{% for m in rest %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.first and rest|length < messages|length %}<<SYS>>{{ messages[0].content }}{% endif %}"
    "{{ m.content | trim + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
NUMBERED = "{% for m in messages %}{{ loop.index }}. {{ m.content }}|{% endfor %}"


@pytest.mark.parametrize("source", [CHAT_ML, CHAT_LLAMA_2, NUMBERED])
@pytest.mark.parametrize("system", [True, False])
def test_long_conversations_have_the_pieces_of_their_beginnings(source, system):
    """Also where a turn's text depends on its number (NUMBERED), so that neighbours do not suffice."""
    template = ChatTemplate("tokenizer", source, byte_level())
    spoken = [Turn(("user", "assistant")[n % 2], f" text {n}\n" * (n % 3)) for n in range(33)]
    turns = [Turn("system", "Be brief."), *spoken] if system else spoken
    pieces = template.pieces(turns)
    for count in (len(turns) - 1, 12):  # ends with an answer where there is no system, or with a question
        assert template.pieces(turns[:count]) == pieces[: count - system]
    assert "".join(piece.text for piece in pieces) == template.prompt(turns)
    assert [piece.is_answer for piece in pieces] == [False, True] * 16 + [False]
    assert pieces == template._pieces_from_beginnings(turns)


def test_the_pieces_of_a_long_conversation_take_time_linear_in_it():
    template = ChatTemplate("tokenizer", CHAT_ML, byte_level())
    rendered = []
    render = template._render
    template._render = lambda turns, prompt: rendered.append(len(turns)) or render(turns, prompt)
    turns = [Turn(("user", "assistant")[n % 2], "a") for n in range(4001)]
    assert len(template.pieces(turns)) == 4001
    assert sum(rendered) < 10 * 4001


def test_templates_that_fail_are_named():
    for source, message in (
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ messages[9].role.upper() }}", "chat template fails"),
        ("{{ messages.append(1) }}", "chat template fails"),  # the sandbox keeps its hands off our lists
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template fails"),
        ("{% if %}", "is not valid Jinja"),
    ):
        with pytest.raises(DataError, match=message):
            ChatTemplate("tokenizer", source, byte_level()).prompt(TURNS[:1])


def test_turns_out_of_order_are_refused():
    template = chat_template("plain", byte_level())
    for roles in ("", "system", "assistant", "user user", "user system", "user assistant assistant"):
        turns = [Turn(role, "x") for role in roles.split()]
        for write in (template.pieces, template.prompt):
            with pytest.raises(DataError, match="expected user and assistant in turn"):
                write(turns)
    with pytest.raises(DataError, match="must end with a turn of the user"):
        template.prompt(TURNS)


def test_templates_that_do_not_fit_the_tokenizer_are_refused():
    with pytest.raises(DataError, match=r"llama-3 writes <\|begin_of_text\|>.*plain fits any"):
        chat_template("llama-3", byte_level(special=("<s>", "</s>")))
    with pytest.raises(DataError, match="has no chat template"):
        chat_template("tokenizer", byte_level())
    with pytest.raises(DataError, match="names no token that ends an answer"):
        chat_template("plain", byte_level(eos=[]))
    with pytest.raises(UnknownNameError, match="choose one of: vicuna"):
        chat_template("alpaca", byte_level())


def test_a_folders_template_needs_the_special_tokens_that_it_writes():
    for source, settings, message in (
        (CHAT_ML, {}, r"the template tokenizer writes <\|im_start\|>, which .* not have as one token"),
        ("{{ bos_token }}{{ messages[0].content }}", {"bos": None}, "writes bos_token, which .* do not name"),
        ("{{ bos_token + messages[0].content }}", {"bos": None}, "writes bos_token"),
        ("{{ messages[0].content + eos_token }}", {"eos": []}, "writes eos_token"),
        (CHAT_ML, {"special": ("<s>", "</s>", "<|im_start|>")}, None),
        ("{% if bos_token %}{{ bos_token }}{% endif %}{{ messages[0].content }}", {"bos": None}, None),
        ("{{ tools }}{% if tools %}<|tool|>{% endif %}{{ messages[0].content }}", {}, None),
        ("{{ raise_exception('begin with a system turn') }}", {}, None),
    ):
        tokenizer = byte_level(chat_template=source, **settings)
        template = chat_template("tokenizer", tokenizer)
        with pytest.raises(DataError, match=message) if message else nullcontext():
            check_special_tokens(template, tokenizer)
