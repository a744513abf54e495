"""Generated text and scores equal those of the whole model for any division of the work."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.errors import ArgumentError, ConfigError, MeshError
from agentic_ring.inference.cached_model import unstack_layers
from agentic_ring.inference.sampling import Sampling, sample_next_token
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from agentic_ring.models.llama import Llama, LlamaConfig, load_pretrained
from agentic_ring.models.transformer import Block
from agentic_ring.models.transformer_config import TransformerConfig
from tests.models import llama_cases
from tests.models.llama_cases import ANSWER, FAMILIES, PROMPT, VOCAB, write_model

RANDOM = np.random.default_rng(0)
TEXT = RANDOM.integers(0, VOCAB, 75).tolist()
PROMPTS = [RANDOM.integers(0, VOCAB, length).tolist() for length in (5, 1, 40)]
NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder) -> Llama:
    return load_pretrained(folder)


@pytest.fixture(scope="module")
def engine(model) -> TextEngine:
    """One engine for most tests, so that they share its programs."""
    return TextEngine(model, chunk=20)


@pytest.fixture(scope="module")
def whole(model):
    """The model on whole texts, [T] -> log probabilities [T, V]."""
    compute = jax.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)))

    def log_probabilities(tokens: list[int]) -> np.ndarray:
        # One length for all, so that one program suffices; later tokens change nothing.
        padded = np.array([[*tokens, *[0] * (128 - len(tokens))]], np.int32)
        return np.asarray(compute(model, padded))[0, : len(tokens)]

    return log_probabilities


@pytest.fixture(scope="module")
def greedy(whole):
    """Greedy answers with log probabilities, encoding the whole text again for each token."""

    def write(prompt: list[int]) -> tuple[list[int], list[float]]:
        tokens, values = list(prompt), []
        for _ in range(NEW):
            last = whole(tokens)[-1]
            tokens.append(int(last.argmax()))
            values.append(float(last.max()))
        return tokens[len(prompt) :], values

    return write


def engine_on(folder, shape: MeshShape, chunk: int) -> TextEngine:
    mesh = mesh_on_first_devices(shape)
    return TextEngine(load_pretrained(folder, mesh), mesh, chunk)


def assert_greedy(answers, texts, greedy, tolerance=2e-4):
    for text, answer in zip(texts, answers, strict=True):
        tokens, values = greedy(text)
        assert (answer.tokens, answer.ended) == (tokens, "length")
        np.testing.assert_allclose(answer.log_probabilities, values, atol=tolerance)


def assert_scores(scores, pairs, before, whole):
    """``before`` is the text before every pair."""
    for (context, continuation), score in zip(pairs, scores, strict=True):
        predicted = whole([*before, *context, *continuation])[-len(continuation) - 1 : -1]
        expected = predicted[np.arange(len(continuation)), continuation]
        np.testing.assert_allclose(score.log_probabilities, expected, atol=2e-4)
        assert score.likeliest == predicted.argmax(axis=-1).tolist()
        np.testing.assert_allclose(score.likeliest_log_probabilities, predicted.max(axis=-1), atol=2e-4)
        assert score.total == pytest.approx(sum(score.log_probabilities))


PAIRS = [(PROMPTS[0], PROMPTS[2]), (PROMPTS[2], PROMPTS[1]), (PROMPTS[1], PROMPTS[0])]


def test_answers_and_scores_on_one_device(engine, greedy, whole):
    assert_greedy(engine.generate(PROMPTS, NEW), PROMPTS, greedy)
    answer = greedy(PROMPTS[2])[0]
    wrong = ([answer[0], (answer[1] + 1) % VOCAB, *answer[2:]], [(answer[0] + 1) % VOCAB, *answer[1:]])
    pairs = [*PAIRS, *((PROMPTS[2], each) for each in (*wrong, answer))]
    scores = engine.score(pairs)
    assert_scores(scores, pairs, [], whole)
    assert [score.greedy for score in scores] == [False] * 5 + [True]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [MeshShape(fsdp=2, ring=2, tensor=2), MeshShape(ring=8)], ids=str)
def test_answers_after_a_document_are_those_of_the_whole_model(shape, folder, engine, greedy, whole):
    reader = engine_on(folder, shape, 40)  # two chunks, whose cache has the size of one of ``engine``
    document = reader.read(TEXT)
    assert document.length == len(TEXT)
    texts, adopted = [TEXT + prompt for prompt in PROMPTS], engine.adopt(document)
    for _ in range(2):  # the document is only read
        assert_greedy(reader.generate(PROMPTS, NEW, document=document), texts, greedy)
        assert_greedy(engine.generate(PROMPTS, NEW, document=adopted), texts, greedy)
    # The logits after the document moved with it: what follows can be scored with nothing before it.
    pairs = [*PAIRS, ([], PROMPTS[0])]
    assert_scores(engine.score(pairs, document=adopted), pairs, TEXT, whole)
    if shape.ring == 8:
        assert_greedy(reader.generate(PROMPTS, NEW), PROMPTS, greedy)
        assert_scores(reader.score(pairs, document=document), pairs, TEXT, whole)


@pytest.mark.parametrize(
    "shape", [MeshShape(ring=1), pytest.param(MeshShape(fsdp=2, ring=2, tensor=2), marks=pytest.mark.slow)]
)
def test_layers_with_programs_of_their_own_share_them(shape, folder, greedy, whole, monkeypatch):
    monkeypatch.setattr("agentic_ring.inference.llama_programs.SHALLOW", 1)
    engine = engine_on(folder, shape, 40)
    needed, document = engine.document_bytes(len(TEXT)), engine.read(TEXT)
    assert_greedy(
        engine.generate(PROMPTS, NEW, document=document), [TEXT + prompt for prompt in PROMPTS], greedy
    )
    assert_scores(engine.score(PAIRS, document=document), PAIRS, TEXT, whole)
    layers = engine.programs.layers
    assert layers is not None
    assert len(layers.weights) == 2
    sizes = {method: layers._program(method, 0)._cache_size() for method in ("store_chunk", "extend")}
    assert sizes == {"store_chunk": 1, "extend": 1}
    assert needed.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(engine.model))
    assert needed.activations > 40 * 4 * engine.model.config.transformer.width


def test_an_answer_ends_at_a_stop_token_and_where_the_caller_ends_it(engine, greedy):
    tokens, _ = greedy(PROMPTS[0])
    stopped = engine.generate(PROMPTS, NEW, stop_tokens=[[tokens[3]], [], []], sampling=[Sampling()] * 3)[0]
    assert (stopped.tokens, stopped.ended) == (tokens[: tokens.index(tokens[3])], "stop")
    seen = []
    stopped = engine.generate(
        PROMPTS, NEW, on_token=lambda row, token: seen.append((row, token)) or (row, len(seen)) == (0, 7)
    )[0]
    assert (stopped.tokens, stopped.ended, len(stopped.log_probabilities)) == (tokens[:3], "stop", 3)
    # Tokens are passed on as they are generated.
    assert [token for row, token in seen if row == 1] == greedy(PROMPTS[1])[0]
    assert [row for row, _ in seen] == [0, 1, 2] * 3 + [1, 2] * (NEW - 3)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        *((1.0, 1.0, 0, 0.0), (0.5, 1.0, 0, 0.0), (1.0, 0.75, 0, 0.0), (2.0, 0.5, 0, 0.0)),
        *((1.0, 1.0, 3, 0.0), (1.0, 0.6, 2, 0.0), (2.0, 1.0, 9, 0.6), (1.0, 0.9, 1, 1.0)),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(temperature, top_p, top_k, min_p):
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    draws = 4000
    logits = jnp.broadcast_to(jnp.log(probabilities), (draws, 4))
    values = Sampling(temperature, top_p, top_k, min_p).values
    tokens, likelihoods = sample_next_token(logits, values, jnp.arange(draws), jnp.int32(0))
    tempered = probabilities ** (1 / temperature)
    share = tempered / tempered.max()
    tempered[top_k or 4 :] = 0
    tempered /= tempered.sum()
    kept = np.where((np.cumsum(tempered) - tempered < top_p) & (share >= min_p), tempered, 0)
    found = np.bincount(tokens, minlength=4) / draws
    np.testing.assert_allclose(found, kept / kept.sum(), atol=0.03)
    assert (found[kept == 0] == 0).all()
    np.testing.assert_allclose(likelihoods, np.log(probabilities)[np.asarray(tokens)], rtol=1e-5)


def test_a_temperature_close_to_0_takes_the_most_likely_token():
    logits = 30 * jax.random.normal(jax.random.key(0), (64, VOCAB))
    sample = jax.jit(sample_next_token)
    for temperature, top_p in itertools.product([1e-50, 1e-45, 1e-38, 2e-38, 1e-30, 1e-6], [1.0, 0.9]):
        values = Sampling(temperature, top_p).values
        tokens, likelihoods = sample(logits, values, jnp.arange(64), jnp.int32(0))
        np.testing.assert_array_equal(tokens, logits.argmax(axis=-1))
        np.testing.assert_array_equal(likelihoods, jax.nn.log_softmax(logits).max(axis=-1))


def test_sampling_settings_numbers_of_prompts_and_documents_of_one_bucket_share_their_programs(engine):
    def compiled(number: int) -> list[int]:
        how = {"sampling": Sampling(number / 2, 0.9, seed=-(2**40) * number), "least_rows": 3}
        engine.generate(PROMPTS[number:], 2, document=engine.read(TEXT[: 65 + 5 * number]), **how)
        programs = engine.programs
        return [each._cache_size() for each in (programs.encode, programs.sample, programs.next_token)]

    assert compiled(0) == compiled(1) == compiled(2)


def test_the_beginning_of_a_document_stands_for_the_shorter_text(engine, greedy):
    document = engine.read(TEXT)
    for length in (1, 60):
        answers = engine.generate(PROMPTS, NEW, document=document.beginning(length))
        assert_greedy(answers, [TEXT[:length] + prompt for prompt in PROMPTS], greedy)
    assert document.beginning(len(TEXT)) is document
    # What came after a beginning was not kept.
    with pytest.raises(ArgumentError, match="nothing before it"):
        engine.score([([], [1])], document=document.beginning(33))
    for wrong in (0, len(TEXT) + 1):
        with pytest.raises(ArgumentError, match=f"a beginning of {wrong} tokens; the document has 75"):
            document.beginning(wrong)


def test_keys_in_few_bits_change_little(model, engine, greedy):
    reader = TextEngine(model, chunk=80, cache_dtype="int8")
    answers = engine.generate(PROMPTS[:1], NEW, document=engine.adopt(reader.read(TEXT)))
    assert_greedy(answers, [TEXT + PROMPTS[0]], greedy, 0.2)
    error = np.abs(np.subtract(answers[0].log_probabilities, greedy(TEXT + PROMPTS[0])[1]))
    assert error.max() > 1e-4


def test_only_the_last_chunk_of_a_document_takes_the_attention_of_the_last_layer(engine):
    programs, tokens = engine.programs, np.zeros((1, 16), np.int32)
    place, last, cache = np.zeros(1, np.int32), programs.nothing_read(1), programs.empty(1, 1 << 16)
    chunk = programs.weights, tokens, tokens
    lowered = programs.store.lower(*chunk, cache), programs.encode.lower(*chunk, place, last, cache, None)
    operations = [each.compile().cost_analysis()["flops"] for each in lowered]
    assert operations[0] == pytest.approx(operations[1] / 2, rel=0.02)  # one layer of two attends to a cache


def test_memory_of_a_document_is_known_before_it_is_read(model):
    engine = TextEngine(model, chunk=64)
    small, large = engine.document_bytes(1024), engine.document_bytes(4096)
    assert small.weights == large.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    # Two layers of keys and values, 2 heads of 8 numbers of 4 bytes; and a position.
    assert large.cache == pytest.approx(4096 * (2 * 2 * 2 * 8 * 4 + 4), rel=0.01)
    assert small.cache == pytest.approx(large.cache / 4, rel=0.01)
    assert large.activations < 2 * small.activations
    assert large.total == large.weights + large.cache + large.activations


def test_invalid_calls_and_settings_are_errors(engine, folder):
    ring_of_3 = engine_on(folder, MeshShape(ring=3), 48)
    for call, message in (
        (lambda: engine.read([]), "empty"),
        (lambda: engine.read([1, VOCAB]), f"token {VOCAB}"),
        (lambda: engine.read([-1]), "token -1"),
        (lambda: engine.generate([], 4), "no text"),
        (lambda: engine.generate([[1], []], 4), "empty"),
        (lambda: engine.generate([[1]], 0), "max_new_tokens is 0"),
        (lambda: engine.generate([[1], [2]], [4]), "1 max_new_tokens for 2"),
        (lambda: engine.generate([[1]], 4, sampling=[Sampling()] * 2), "2 sampling for 1"),
        (lambda: engine.score([([], [1])]), "nothing before it"),
        (lambda: engine.score([([1], [])]), "continuation"),
        (lambda: ring_of_3.adopt(engine.read(TEXT)), "80 slots, which do not divide over a ring of 3"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
    with pytest.raises(MeshError, match=r"the number of key heads is 2, .* over the 4 devices .* tensor"):
        engine_on(folder, MeshShape(tensor=4), 12)
    with pytest.raises(ConfigError, match="chunk 12 is not a positive multiple of the ring of 8"):
        engine_on(folder, MeshShape(ring=8), 12)
    for temperature, top_p in ((-1, 1), (float("nan"), 1), (float("inf"), 1), (0, 0), (0, 1.5)):
        with pytest.raises(ConfigError, match="temperature must be at least 0"):
            Sampling(temperature, top_p)
    for changes in ({"top_k": -1}, {"min_p": 1.5}):
        with pytest.raises(ConfigError, match="top_k must be at least 0"):
            Sampling(1.0, **changes)


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[:-1]), FAMILIES[-1]]
)
def test_greedy_answers_of_families_are_those_of_transformers(family: str, tmp_path, monkeypatch):
    """By programs of single layers, of which some families have two kinds."""
    monkeypatch.setattr("agentic_ring.inference.llama_programs.SHALLOW", 1)
    engine = engine_on(write_model(tmp_path, family), MeshShape(ring=2 if family == "mistral" else 1), 8)
    prompt = llama_cases.tokens()[0, :PROMPT].tolist()
    with jax.default_matmul_precision("highest"):
        (completion,) = engine.generate([prompt[-5:]], ANSWER, document=engine.read(prompt[:-5]))
    assert completion.tokens == llama_cases.answer(family)


def test_unstacked_matrices_are_not_copied_and_stay_when_the_stack_goes():
    config = LlamaConfig(TransformerConfig(width=64, layers=3, heads=2, ffn_width=128), vocab_size=64)
    model = config.build(jax.random.key(0))
    own = unstack_layers(model)
    blocks = model.transformer.blocks
    assert isinstance(blocks, Block)
    stack, last = blocks.feedforward.up[...], own.transformer.block(2).feedforward.up[...]
    assert last.unsafe_buffer_pointer() - stack.unsafe_buffer_pointer() == 2 * last.nbytes
    assert not last.committed
    expected = np.array(stack[2])
    del model, blocks, stack
    np.testing.assert_array_equal(last, expected)
