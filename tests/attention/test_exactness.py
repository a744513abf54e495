"""Ring attention against the float64 oracle: forward, gradients, empty rows, and that the test can fail."""

import jax
import numpy as np
import pytest

from agentic_ring.attention import attention, reference_attention
from agentic_ring.attention.kernels import registry
from agentic_ring.attention.kernels.interface import Saved
from agentic_ring.attention.kernels.xla import XlaKernel
from tests.attention.cases import (
    FACTORS,
    SCORES,
    Case,
    compute,
    pairwise_cases,
    problem,
    relative_errors,
    truth,
)

FORWARD, GRADIENT = 2e-6, 1e-5  # relative, float32
# bfloat16 keeps 8 bits, so rounding to it errs by up to 2**-9 = 0.002. An output is rounded once at
# the end and its probabilities once on the way; a gradient goes through up to three rounded factors
# (probabilities or scores' gradients, the saved output in delta, the result) that add up in sums.
TOLERANCES = {
    "float32": (FORWARD, GRADIENT),
    "bfloat16": (2 * 2**-8, 4 * 2**-8),
    "float64": (1e-13, 1e-12),
}

PAIRS = pairwise_cases()
OTHERS = [pytest.param(case, marks=pytest.mark.slow) for case in PAIRS if case not in PAIRS[::3]]


@pytest.mark.parametrize("case", PAIRS[::3] + OTHERS, ids=str)
def test_equals_the_oracle(case: Case):
    """Any two settings meet in some case, the slow ones included."""
    forward, gradient = TOLERANCES[case.dtype]
    result = compute(case)
    errors = relative_errors(result, case)
    assert max(errors.pop("output"), errors.pop("logsumexp", 0.0)) < forward
    assert max(errors.values()) < gradient, errors
    empty = problem(case.mask, case.heads, case.length, case.dtype).empty_rows
    for array in result[:4]:
        assert not array[empty].any(), "a row with nothing to attend to is not exactly 0"


def test_every_choice_is_in_a_case_that_is_not_slow():
    for name, values in FACTORS.items():
        assert {getattr(case, name) for case in PAIRS[::3]} == set(values)


class OwnOutputKernel(XlaKernel):
    """A plausible wrong backward: this hop's output in the place of the global one."""

    def backward(self, tile, saved):
        own = Saved.of(self.forward(tile).output, saved.logsumexp, saved.d_output)
        return super().backward(tile, own)


def test_a_backward_with_local_output_is_caught(monkeypatch: pytest.MonkeyPatch):
    """It leaves the forward and dv exact, so only comparing dq and dk catches it."""
    monkeypatch.setitem(registry._KERNELS, "own output", OwnOutputKernel)
    case = Case(4, "ring", "causal", "plain", (8, 2), "zigzag", 64, None, "own output", "float32")
    errors = relative_errors(compute(case), case)
    assert errors["output"] < FORWARD
    assert errors["dv"] < GRADIENT
    assert min(errors["dq"], errors["dk"]) > 1e-2


@pytest.mark.parametrize(
    ("mask", "scores"),
    [
        ("causal segments", "soft cap"),
        ("causal hidden", "sinks"),
        ("causal window prefix", "sinks"),
        ("causal hidden", "by head"),
        ("bidirectional hidden positions", "by head"),
    ],
)
def test_oracle_equals_a_loop_over_rows(mask: str, scores: str):
    """The oracle itself, against a softmax written row by row in NumPy."""
    (q, k, v, _), sinks, spec, labels, _ = problem(mask, (8, 2), 53, "float32")
    got, *_, totals = truth(mask, scores, (8, 2), 53, "float32")
    q, k, v, sinks = (np.asarray(x, np.float64) for x in (q, k, v, sinks))
    positions = np.asarray(labels.get("positions", np.tile(np.arange(53), (2, 1))))
    segments = np.asarray(labels.get("segment_ids", np.zeros((2, 53), int)))
    hidden = labels.get("hidden_rows", np.zeros((2, 53, 2), int))
    hidden = np.broadcast_to(hidden, (2, *hidden.shape[1:]))
    slopes, windows = np.zeros(8), [None] * 8
    if scores == "by head":
        slopes, windows = (np.asarray(x) for x in SCORES["by head"].values())
    for b, t, n in np.ndindex(2, 53, 8):
        keys = [
            s
            for s in range(53)
            if (
                positions[b, s] < spec.prefix
                or (
                    (not spec.causal or positions[b, s] <= positions[b, t])
                    and (spec.window is None or abs(positions[b, t] - positions[b, s]) < spec.window)
                )
            )
            and segments[b, s] == segments[b, t]
            and not any(first <= positions[b, t] < end for first, end in hidden[b, s].reshape(-1, 2))
            and (windows[n] is None or abs(positions[b, t] - positions[b, s]) < windows[n])
            and min(positions[b, s], segments[b, s], positions[b, t], segments[b, t]) >= 0
        ]
        products = k[b, keys, n // 4] @ q[b, t, n] / np.sqrt(8)
        if scores == "soft cap":
            products = 1.5 * np.tanh(products / 1.5)
        products -= slopes[n] * abs(positions[b, t] - positions[b, keys])
        weights = np.exp(products)
        total = weights.sum() + (np.exp(sinks[n]) if scores == "sinks" else 0.0)
        if scores == "sinks":
            np.testing.assert_allclose(totals[b, t, n], np.log(total), rtol=1e-12)
        want = weights @ v[b, keys, n // 4] / total if keys else np.zeros(5)
        np.testing.assert_allclose(got[b, t, n], want, rtol=1e-12, atol=1e-14)


def test_scores_far_from_zero():
    """Neither large nor very negative scores overflow: exp is only taken of differences."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 8)) * 1e3
    np.testing.assert_allclose(attention(q, k, v), reference_attention(q, k, v), rtol=2e-6, atol=2e-3)
