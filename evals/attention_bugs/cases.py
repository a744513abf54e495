"""The known bugs: for each a number that the bug makes large, and the bound that it keeps without."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from evals.attention_bugs.problem import (
    PADDING,
    Arrays,
    Attend,
    Options,
    Result,
    allowed_pairs,
    exact,
    random_arrays,
)

EXACT = 1e-5
"""Bound of the largest error over the largest value, in float32."""


@dataclass(frozen=True)
class KnownBug:
    """A bug of some implementation of ring attention.

    Attributes:
      name: what goes wrong.
      threads: the public threads that report it, as owner/repository#number.
      measured: what the number is.
      measure: computes it with an implementation.
      bound: the largest number that an implementation without the bug gives.
    """

    name: str
    threads: tuple[str, ...]
    measured: str
    measure: Callable[[Attend], float]
    bound: float


def _relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference over the largest value; infinite where a value is not finite."""
    return float(np.abs(got - want).max() / np.abs(want).max()) if np.isfinite(got).all() else np.inf


def _errors(attend: Attend, options: Options, arrays: Arrays, documents: np.ndarray | None = None) -> Result:
    """The relative error of the output and of each gradient.

    Args:
      documents: int [T], ``PADDING`` for padding; the implementation gets them as segment ids.
    """
    if documents is not None:
        arrays = _with_segments(arrays, documents)
    got = attend(options, arrays)
    want = exact(arrays, allowed_pairs(options, arrays.q.shape[1], documents))
    return Result(*(None if b is None else _relative_error(a, b) for a, b in zip(got, want, strict=True)))


def _with_segments(arrays: Arrays, documents: np.ndarray) -> Arrays:
    return arrays._replace(segment_ids=documents[None].astype(np.int32))


def _largest(errors: Result) -> float:
    return max(error for error in errors if error is not None)


def _documents(*lengths: int) -> np.ndarray:
    return np.repeat(np.arange(len(lengths)), lengths)


_RING, _TILE = 4, 8
_CAUSAL = Options(_RING)
_LENGTH = 64


def _packing(attend: Attend) -> float:
    return _largest(_errors(attend, _CAUSAL, random_arrays(_LENGTH), _documents(7, 20, 5, 18, 14)))


def _stale_keys(attend: Attend) -> float:
    errors = _errors(attend, _CAUSAL, random_arrays(_LENGTH))
    return max(errors.dk, errors.dv)


def _local_logsumexp(attend: Attend) -> float:
    errors = _errors(attend, _CAUSAL, random_arrays(_LENGTH))
    return max(errors.dq, errors.dk)


def _merge_overflow(attend: Attend) -> float:
    """Scores of the four blocks lie 250 to 750 apart: exp of their differences is infinite in float32."""
    arrays = random_arrays(_LENGTH)
    levels = np.repeat(np.array([0, 250, -250, 500], np.float32), _LENGTH // _RING)[:, None, None]
    q, k = np.full_like(arrays.q, 8**-0.25), arrays.k + levels * 8**-0.25
    return _errors(attend, _CAUSAL, arrays._replace(q=q, k=k)).output


def _sinks(attend: Attend) -> float:
    arrays = random_arrays(_LENGTH, heads=4)._replace(sinks=np.array([1, -1, 0.5, 2], np.float32))
    strategies = "ring", "ulysses"
    return max(_largest(_errors(attend, replace(_CAUSAL, strategy=name), arrays)) for name in strategies)


def _window(attend: Attend) -> float:
    arrays, options = random_arrays(_LENGTH, heads=4), replace(_CAUSAL, window=9)
    strategies = "ring", "ulysses"
    return max(_largest(_errors(attend, replace(options, strategy=name), arrays)) for name in strategies)


def _growth_with_the_ring(attend: Attend) -> float:
    """Root mean square error in bfloat16 on a ring of 8 over that on one device; the worst array."""
    arrays = Arrays(*(x.astype(jnp.bfloat16) for x in random_arrays(_LENGTH)[:4]))
    want = exact(arrays, allowed_pairs(_CAUSAL, _LENGTH))[:4]

    def errors(ring: int) -> np.ndarray:
        got = attend(replace(_CAUSAL, ring=ring), arrays)[:4]
        return np.array([np.sqrt(np.mean((a - b) ** 2)) for a, b in zip(got, want, strict=True)])

    return float((errors(8) / errors(1)).max())


def _indivisible_documents(attend: Attend) -> float:
    return _largest(_errors(attend, _CAUSAL, random_arrays(53), _documents(13, 1, 22, 17)))


def _lengths_rounded_down(attend: Attend) -> float:
    """Documents of 4 and 3 tokens and 3 of padding on a ring of 2, as in the thread."""
    documents = np.array([0] * 4 + [1] * 3 + [PADDING] * 3)
    arrays = random_arrays(10)
    arrays.d_output[:, 7:] = 0  # whatever the rows of padding are, they count nowhere
    arrays = _with_segments(arrays, documents)
    options = replace(_CAUSAL, ring=2)
    got, want = attend(options, arrays), exact(arrays, allowed_pairs(options, 10, documents))
    pairs = [(got.output[:, :7], want.output[:, :7]), *zip(got[1:4], want[1:4], strict=True)]
    return max(_relative_error(a, b) for a, b in pairs)


def _decoding(attend: Attend) -> float:
    """One query, that of the last token, and the keys of the whole sequence."""
    arrays = random_arrays(_LENGTH)
    last = arrays._replace(q=arrays.q[:, -1:], d_output=arrays.d_output[:, -1:])
    return _relative_error(attend(_CAUSAL, last).output, exact(last, np.ones((1, _LENGTH), bool)).output)


def _odd_rings(attend: Attend) -> float:
    arrays = random_arrays(60)
    return max(_largest(_errors(attend, replace(_CAUSAL, ring=ring), arrays)) for ring in (3, 5))


def _reruns(attend: Attend) -> float:
    runs = [attend(_CAUSAL, random_arrays(_LENGTH)) for _ in range(3)]
    return sum(
        int((a != b).sum())
        for again in runs[1:]
        for a, b in zip(runs[0], again, strict=True)
        if a is not None and b is not None
    )


def _empty_rows(attend: Attend) -> float:
    """The first 11 tokens are padding: the largest output of their rows, which have nothing to attend to."""
    documents = np.where(np.arange(_LENGTH) < 11, PADDING, 0)
    arrays = _with_segments(random_arrays(_LENGTH), documents)
    return float(np.abs(attend(_CAUSAL, arrays).output[0, :11]).max())


def _kept_by_dropout(attend: Attend) -> tuple[np.ndarray, np.ndarray]:
    """Bool [T, T]: which probabilities were kept, in the forward and in the backward.

    Queries are 0, and values and gradients unit vectors: row t of the output and column t of dv are what
    dropout left of the equal probabilities of query t.
    """
    tokens = _RING * _TILE
    zeros = np.zeros((1, tokens, 1, tokens), np.float32)
    unit = np.eye(tokens, dtype=np.float32)[None, :, None]
    result = attend(Options(_RING, causal=False, dropout_rate=0.5), Arrays(zeros, zeros, unit, unit))
    return result.output[0, :, 0] > 0, result.dv[0, :, 0].T > 0


def _repeated_dropout(attend: Attend) -> float:
    """Blocks of queries by blocks of keys that drop the same as another pair of blocks."""
    kept, _ = _kept_by_dropout(attend)
    tiles = kept.reshape(_RING, _TILE, _RING, _TILE).swapaxes(1, 2).reshape(_RING**2, -1)
    return _RING**2 - len(np.unique(tiles, axis=0))


def _dropout_of_the_backward(attend: Attend) -> float:
    forward, backward = _kept_by_dropout(attend)
    return int((forward != backward).sum())


_ERROR = "relative error of output and gradients"
KNOWN_BUGS = (
    KnownBug("packing ignored", ("axolotl-ai-cloud/axolotl#3608",), _ERROR, _packing, EXACT),
    KnownBug(
        "stale keys in the backward",
        ("huggingface/diffusers#14265",),
        "relative error of dk, dv",
        _stale_keys,
        EXACT,
    ),
    KnownBug(
        "backward without the global logsumexp",
        ("tenstorrent/tt-metal#53205",),
        "relative error of dq, dk",
        _local_logsumexp,
        EXACT,
    ),
    KnownBug(
        "merge overflows",
        ("zhuzilin/ring-flash-attention#30", "jzhang38/EasyContext#14"),
        "relative error of the output",
        _merge_overflow,
        1e-4,  # scores up to 500 are themselves rounded to 3e-5
    ),
    KnownBug(
        "sinks dropped", ("PrimeIntellect-ai/prime-rl#3397", "pytorch/torchtitan#2211"), _ERROR, _sinks, EXACT
    ),
    KnownBug("window ignored", ("PrimeIntellect-ai/prime-rl#2828",), _ERROR, _window, EXACT),
    KnownBug(
        "error grows with the ring",
        ("zhuzilin/ring-flash-attention#42", "OpenRLHF/OpenRLHF#801"),
        "bfloat16 error on a ring of 8 over that on one device",
        _growth_with_the_ring,
        1.1,
    ),
    KnownBug(
        "documents must divide by the ring",
        ("zhuzilin/ring-flash-attention#51",),
        _ERROR,
        _indivisible_documents,
        EXACT,
    ),
    KnownBug(
        "document lengths rounded down",
        ("NVIDIA/TransformerEngine#1930",),
        _ERROR,
        _lengths_rounded_down,
        EXACT,
    ),
    KnownBug(
        "odd ring sizes",
        ("ByteDance-Seed/VeOmni#1085",),
        _ERROR,
        _odd_rings,
        EXACT,
    ),
    KnownBug(
        "decoding on a ring", ("erfanzar/EasyDeL#120",), "relative error of the output", _decoding, EXACT
    ),
    KnownBug("reruns differ", ("SandAI-org/MagiAttention#65",), "numbers that differ", _reruns, 0),
    KnownBug("empty rows leak", (), "largest output of a row that attends to nothing", _empty_rows, 0),
    KnownBug(
        "dropout repeats over devices",
        ("NVIDIA/Fuser#3123",),
        "pairs of blocks of 16 that drop the same as another",
        _repeated_dropout,
        0,
    ),
    KnownBug(
        "dropout of the backward differs",
        ("zhuzilin/ring-flash-attention#36",),
        "probabilities of 1024 dropped in one direction only",
        _dropout_of_the_backward,
        0,
    ),
)
