"""TPUs: the "splash" attention kernels that ship with JAX, on one tile of static mask.

The kernels are private to JAX, because its public entry point gives either the logsumexp or a
gradient; everything that depends on them is in this file. Three things are corrected here:

* Of bfloat16 inputs the library would return bfloat16 results, and a ring sums them over hops. Each
  kernel writes what it returns in the dtype of one of its inputs, so that input is handed over in
  float32, and the others stay small. Products keep JAX's default precision.
* The library gives a row that attends to nothing the mean of the values, or NaN.
* It finds the blocks that a mask leaves empty by evaluating the mask of every token pair, seconds to
  minutes for a long tile. All masks here are bands of the score matrix, so that the corners of a
  block tell.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.kernels.interface import Gradients, Saved, SoftmaxState, Tile, refuse
from agentic_ring.attention.mask import HopMask, MaskSpec
from agentic_ring.attention.ring.collectives import vary_alike
from agentic_ring.mesh import mesh_device

LANES = 128
"""Tokens that a vector register of a TPU holds side by side; blocks are multiples of it."""

MAX_QUERY_BLOCK = 512
MAX_KEY_BLOCK = 1024
KEY_STEP = 512
"""Keys of a block that are worked on at a time, where a kernel can."""

MAX_HEAD_DIM = 512
"""Beyond, one block of each array does not fit."""

PART_BYTES = 2**24
"""Largest logsumexp of one call of a kernel. For 8192 tokens and 32 heads of 128, compiled for v5e, it
takes what a backward needs beside its results from 5.0 times a float32 dq to 2.0 times."""

MAX_TABLE = 2**16
"""Block pairs of a masked tile: their table lies in the small scalar memory of a TPU core. Tiles of
180224 tokens, just below it, were compiled for v4 and v5e."""

_LOWEST = -0.7 * float(np.finfo(np.float32).max)
"""The score of a masked pair within the kernels: finite, so that the difference of two is not NaN."""


@dataclass(frozen=True)
class SplashKernel:
    """See ``Kernel``; serves tiles whose mask is static but for segment ids.

    Blocks are the largest power of two times 128 that divides the length, at most 512 queries by
    1024 keys (less where the head dimension is above 128): then scores, probabilities and their
    gradients fit the 16 MiB of fast memory that a kernel gets on every TPU since v4. TPU v3 has not
    the matrix products that the kernels are made of.
    """

    interpret: bool = False
    """Run in Pallas' interpreter, on any platform and slowly."""

    def forward(self, tile: Tile) -> SoftmaxState:
        q, k, v, mask, scores = tile
        library, band = _library(), _band_tile(tile)
        mask = mask.with_segments(q.shape[1], k.shape[1])
        run = functools.partial(
            _checked(library._splash_attention_forward),
            band.table(library, for_keys=False),
            sinks=None,
            mask_value=_LOWEST,
            is_mqa=False,
            block_sizes=library.BlockSizes(
                block_q=band.query_block, block_kv=band.key_block, block_kv_compute=band.key_step
            ),
            residual_checkpoint_name=None,
            save_residuals=True,
            mask_function=band.mask_function,
            attn_logits_soft_cap=scores.soft_cap,
            interpret=self.interpret,
        )

        def one_sequence(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any) -> tuple:
            output, (logsumexp,) = run(q.astype(jnp.float32) * scores.scale, k, v, segments)
            # Where all keys are masked the largest score is _LOWEST, and without any block to visit the
            # sum of the weights is 0: its logarithm is -inf and the output NaN.
            empty = ~(logsumexp > _LOWEST / 2)
            return jnp.where(empty[..., None], 0.0, output), jnp.where(empty, -jnp.inf, logsumexp)

        arrays = _heads_first(q, k, v)
        output, logsumexp = _over_heads(one_sequence, arrays, _segments(library, mask, q.shape[0]))
        return SoftmaxState(*_heads_first(output, logsumexp))

    def backward(self, tile: Tile, saved: Saved) -> Gradients:
        q, k, v, mask, scores = tile
        library, band = _library(), _band_tile(tile)
        mask = mask.with_segments(q.shape[1], k.shape[1])
        shared = {
            "bq": band.query_block,
            "bkv": band.key_block,
            "is_mqa": False,
            "mask_value": _LOWEST,
            "attn_logits_soft_cap": scores.soft_cap,
            **dict.fromkeys(("q_layout", "k_layout", "v_layout"), library.QKVLayout.HEAD_DIM_MINOR),
            "mask_function": band.mask_function,
            "interpret": self.interpret,
        }
        for_queries = functools.partial(
            _checked(library._splash_attention_bwd_dq),
            mask_info=band.table(library, for_keys=False),
            **shared,
        )
        for_keys = functools.partial(
            _checked(library._splash_attention_bwd_dkv),
            bkv_compute=band.key_step,
            mask_info=band.table(library, for_keys=True),
            use_fused_bwd_kernel=False,
            **shared,
        )

        def one_sequence(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> tuple:
            d_output, total, delta, segments = rest
            q, rows = q.astype(jnp.float32) * scores.scale, (segments, None, total, d_output, delta)
            dq = for_queries(q, k, v, *rows)
            _, dk, dv = for_keys(q, k.astype(jnp.float32), v.astype(jnp.float32), *rows)
            return dq * scores.scale, dk, dv

        arrays = _heads_first(q, k, v, saved.d_output.astype(q.dtype), saved.total, saved.delta)
        gradients = _over_heads(one_sequence, arrays, _segments(library, mask, q.shape[0]))
        return Gradients(*_heads_first(*gradients))


def _library() -> Any:
    try:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
    except ImportError as error:
        raise NotImplementedError(f"jax {jax.__version__} has no splash attention: {error}") from error
    return splash_attention_kernel


def _checked(function: Callable) -> Callable:
    """The private function, refusing where this version of JAX takes other arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise NotImplementedError(
                f"jax {jax.__version__} has another {function.__name__}: {error}"
            ) from error
        return function(*args, **kwargs)

    return call


class _BandTile(NamedTuple):
    """The static mask of a tile: query t attends to key s iff low <= t - s <= high for ``band`` (low, high).

    The band is None where every pair is within.
    """

    queries: int
    keys: int
    head_dim: int
    band: tuple[int, int] | None

    @property
    def query_block(self) -> int:
        return _block(self.queries, MAX_QUERY_BLOCK, self.head_dim)

    @property
    def key_block(self) -> int:
        return _block(self.keys, MAX_KEY_BLOCK, self.head_dim)

    @property
    def key_step(self) -> int:
        return min(self.key_block, KEY_STEP)

    @property
    def mask_function(self) -> Callable | None:
        """Whether pairs of query and key numbers are in the band, for use within the kernels."""
        return None if self.band is None else functools.partial(_in_band, *self.band)

    def visited(self, band: tuple[int, int]) -> np.ndarray:
        """Whether any pair of a block is in the band, bool [query blocks, key blocks]."""
        low, high = band
        first_query = np.arange(0, self.queries, self.query_block)[:, None]
        first_key = np.arange(0, self.keys, self.key_block)[None]
        last_query, last_key = first_query + self.query_block - 1, first_key + self.key_block - 1
        return (last_query - first_key >= low) & (first_query - last_key <= high)

    def table(self, library: Any, *, for_keys: bool) -> Any:
        """The library's MaskInfo: lists of the query blocks of each key block, or the other way round."""
        info = library.mask_info_lib.MaskInfo
        if self.band is None:
            return info(None, None, None, None, None)
        visited = self.visited(self.band)
        if for_keys:
            visited = visited.T
        longest = visited.sum(axis=1).max()
        # The blocks of a row first, in order; then others, which are fetched and not worked on. The last
        # of the row stands for them, so that none is fetched.
        order = np.argsort(~visited, axis=1, kind="stable")[:, :longest]
        work = np.take_along_axis(visited, order, axis=1)
        last = np.take_along_axis(order, np.maximum(work.sum(axis=1) - 1, 0)[:, None], axis=1)
        order = np.where(work, order, last)
        work, order = (x.T if for_keys else x for x in (work, order))
        return info(
            data_next=jnp.asarray(order[None], jnp.int16 if max(visited.shape) < 2**15 else jnp.int32),
            mask_next=None,
            block_mask=jnp.asarray(work[None], jnp.int8),
            partial_mask_blocks=None,
            q_sequence=jnp.arange(self.queries, dtype=jnp.int32),
        )


def _band_tile(tile: Tile) -> _BandTile:
    """Describes the tile to the kernels, and refuses what they cannot do."""
    q, k, v, mask, scores = tile
    (_, queries, _, head_dim), keys, kind = q.shape, k.shape[1], mesh_device().device_kind
    dtypes = {jnp.dtype(x.dtype).name for x in (q, k, v)}
    refuse(
        (kind in ("TPU v2", "TPU v3"), f"{kind} has no bfloat16 products for Pallas"),
        (mask.query.positions is not None, "tokens have positions of their own"),
        (mask.spec.prefix > 0, "the mask has a prefix"),
        (scores.dropout is not None, "dropout"),
        (
            dtypes not in ({"float32"}, {"bfloat16"}),
            f"dtype {'/'.join(dtypes)}; takes float32 or bfloat16",
        ),
        (head_dim != v.shape[3], f"keys of {head_dim} numbers and values of {v.shape[3]}"),
        (head_dim > MAX_HEAD_DIM, f"head dimension {head_dim} is above {MAX_HEAD_DIM}"),
        *((length % LANES != 0, f"length {length} is no multiple of {LANES}") for length in (queries, keys)),
    )
    band = _BandTile(queries, keys, head_dim, _band(mask.spec, mask.offset, queries, keys))
    if band.band is not None:
        blocks = (queries // band.query_block) * (keys // band.key_block)
        refuse((blocks > MAX_TABLE, f"a masked tile of {queries} x {keys} tokens has too many blocks"))
        refuse((not band.visited(band.band).any(), "no query of the tile attends to any key"))
    return band


def _band(spec: MaskSpec, offset: int, queries: int, keys: int) -> tuple[int, int] | None:
    """The lowest and highest t - s of a pair that the spec admits; None if that is every pair."""
    if not spec.by_position:
        return None
    lowest, highest = 1 - keys, queries - 1
    low, high = lowest, highest
    if spec.window is not None:
        low, high = 1 - spec.window - offset, spec.window - 1 - offset
    if spec.causal:
        low = -offset
    return None if low <= lowest and high >= highest else (low, high)


def _in_band(low: int, high: int, query: jax.Array, key: jax.Array) -> jax.Array:
    return (query - key >= low) & (query - key <= high)


def _block(length: int, largest: int, head_dim: int) -> int:
    block = largest
    while block > LANES and (length % block or block * head_dim > largest * LANES):
        block //= 2
    return block


def _heads_first(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, T, N, ...] -> [B, N, T, ...], and back."""
    return tuple(x.swapaxes(1, 2) for x in arrays)


def _segments(library: Any, mask: HopMask, batch: int) -> Any:
    """The library's segment ids [B, T] and [B, S]; padding of queries and of keys never match."""
    if mask.query.segment_ids is None or mask.key.segment_ids is None:
        return None

    def ids(segment_ids: jax.Array, padding: int) -> jax.Array:
        segment_ids = jnp.broadcast_to(segment_ids, (batch, segment_ids.shape[1]))
        return jnp.where(segment_ids < 0, padding, segment_ids).astype(jnp.int32)

    return library.SegmentIds(q=ids(mask.query.segment_ids, -1), kv=ids(mask.key.segment_ids, -2))


def _over_heads(function: Callable, arrays: tuple[jax.Array, ...], segments: Any) -> tuple[jax.Array, ...]:
    """``function`` of each sequence, some heads at a time.

    The library's kernels do not say over which mesh axes their results vary, which ``jax.shard_map``
    asks of them, so its check is off while they are traced. They are traced as the body of a loop, be it of
    one round: ``jax.checkpoint`` goes through everything else once more, with the check on.

    The function takes q [N, T, H], k [K, S, H], further arrays [N, T, ...] and segment ids, of any N and K;
    ``arrays`` are the same with a batch before.
    """
    (batch, heads, queries, _), key_heads = arrays[0].shape, arrays[1].shape[1]
    parts = _parts(batch * queries, heads, key_heads)
    batched = jax.vmap(function)

    with _no_varying_check():
        some = tuple(x.reshape(batch, parts, -1, *x.shape[2:]).swapaxes(0, 1) for x in arrays)
        results = jax.lax.map(lambda part: batched(*part, segments), some)
        joined = tuple(x.swapaxes(0, 1).reshape(batch, -1, *x.shape[3:]) for x in results)
    return vary_alike(joined, like=(arrays, segments))


def _parts(rows: int, heads: int, key_heads: int) -> int:
    """In how many parts the heads are worked on one after the other.

    The kernels write the logsumexp ``LANES`` times over and want copies in float32: as much memory as
    the output, of all heads at once. One head is work enough for a core, but v4 and v5p have two.
    """
    choices = [parts for parts in range(1, key_heads + 1) if key_heads % parts == 0]
    small = (parts for parts in choices if rows * heads // parts * LANES * 4 <= PART_BYTES)
    return next(small, max(parts for parts in choices if heads // parts > 1 or parts == 1))


@contextlib.contextmanager
def _no_varying_check() -> Iterator[None]:
    try:
        from jax._src.config import _check_vma
    except ImportError as error:
        raise NotImplementedError(f"jax {jax.__version__} checks varying axes otherwise: {error}") from error
    with _check_vma(False):
        yield
