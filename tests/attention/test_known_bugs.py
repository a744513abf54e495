"""Bugs that users of ring attention met in other packages: this one does not have them.

Each docstring names the thread and the symptom. The cases are those of ``evals/known_bugs.py``, which tries
them on other packages too; docs/notebook.md says what each test reports where the bug is planted here.
"""

import pytest
from evals.attention_bugs.cases import KNOWN_BUGS
from evals.attention_bugs.implementations import ours


def check(request: pytest.FixtureRequest) -> None:
    """Measures the bug that the test is named after."""
    name = request.node.name.removeprefix("test_").replace("_", " ")
    (bug,) = (bug for bug in KNOWN_BUGS if bug.name == name)
    number = bug.measure(ours)
    assert number <= bug.bound, f"{bug.measured}: {number}"


def test_packing_ignored(request):
    """axolotl-ai-cloud/axolotl#3608: the ring of the batch API has no argument for the bounds of documents.

    Queries attended across them, and the loss of a row of five documents was 1.83 times too high from the
    first step; a row of one document was right to the last bit.
    """
    check(request)


def test_stale_keys_in_the_backward(request):
    """huggingface/diffusers#14265: keys and values went round the ring, the backward read the saved ones.

    Those were the device's own block at every hop. The output was right, the gradients were not, and nothing
    said so.
    """
    check(request)


def test_backward_without_the_global_logsumexp(request):
    """tenstorrent/tt-metal#53205: each hop's backward used that hop's own output and logsumexp.

    dQ was 9.6% and dK 14.2% off; the output and dV were exact, so only comparing dQ and dK shows it.
    """
    check(request)


def test_merge_overflows(request):
    """zhuzilin/ring-flash-attention#30, jzhang38/EasyContext#14: blocks were merged with log(1 + exp(x)).

    It is infinite in float32 once the logsumexps of two blocks lie 89 apart, and training gave NaN.
    """
    check(request)


def test_sinks_dropped(request):
    """PrimeIntellect-ai/prime-rl#3397: the attention that replaced the model's swallowed the sinks.

    GPT-OSS trained with context parallelism on wrong attention without an error. In pytorch/torchtitan#2211
    the sinks were merged by a wrong formula. Here on a ring, and where the heads are exchanged, so that a
    device needs the sinks of its heads.
    """
    check(request)


def test_window_ignored(request):
    """PrimeIntellect-ai/prime-rl#2828: the replaced attention read the window under another name.

    Layers with a sliding window attended to everything before them, on a ring and with exchanged heads.
    """
    check(request)


def test_error_grows_with_the_ring(request):
    """zhuzilin/ring-flash-attention#42, OpenRLHF/OpenRLHF#801: each hop rounds its result to bfloat16.

    The error grew with the ring; with many layers the gradients became useless while the loss looked right.
    """
    check(request)


def test_documents_must_divide_by_the_ring(request):
    """zhuzilin/ring-flash-attention#51: the length of every packed document had to be a multiple of the ring.

    Here four documents, one of a single token, and a row that does not divide either.
    """
    check(request)


def test_document_lengths_rounded_down(request):
    """NVIDIA/TransformerEngine#1930: with padding, lengths were rounded down to a multiple of the ring.

    Of 7 tokens on a ring of 2 the last was left out, and nothing said so.
    """
    check(request)


def test_odd_ring_sizes(request):
    """ByteDance-Seed/VeOmni#1085: sends and receives were paired by even and odd places in the ring.

    On a ring of odd size the first and the last device are both even, and the ring hangs.
    """
    check(request)


def test_decoding_on_a_ring(request):
    """erfanzar/EasyDeL#120: ring attention fails in generation, where there is one query per sequence."""
    check(request)


def test_reruns_differ(request):
    """SandAI-org/MagiAttention#65: sums in an order that changes from run to run.

    The same call on the same arrays gave other bits, forward and backward.
    """
    check(request)


def test_empty_rows_leak(request):
    """Found in `ringattention` 0.1.2: masks are a finite number, so a row without keys weighs all alike.

    Its output is a mean of values, of later tokens too. With a bias of -inf in its place, valid rows of the
    same device become NaN.
    """
    check(request)


def test_dropout_repeats_over_devices(request):
    """NVIDIA/Fuser#3123: shards need different random bits. In `ringattention` 0.1.2 devices drop alike."""
    check(request)


def test_dropout_of_the_backward_differs(request):
    """zhuzilin/ring-flash-attention#36: the backward did not get the random state of the forward."""
    check(request)


def test_every_known_bug_is_checked():
    assert {f"test_{bug.name.replace(' ', '_')}" for bug in KNOWN_BUGS} <= set(globals())
