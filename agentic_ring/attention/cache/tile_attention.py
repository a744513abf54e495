"""Attention of many queries to a block of keys of any positions, by the platform's own kernels if they serve.

Those kernels take static masks, but which token stands where in a cache is known only at run time. In prefill
nearly every block is one of two simple ones, which need no positions:

    earlier keys        x x x x - -        the chunk's own     x . . .
                        x x x x - -                            x x . .
      all queries come  x x x x - -          the same tokens,  x x x .
      after all keys                         in order          x x x x

"-" is a slot without a token; each row has its own number of them. At run time the positions say whether a
block is simple. Where one is not (tokens out of order, empty slots between others), where the mask has a
window or a prefix, and where no other kernel serves the shapes, the XLA kernel attends by positions.
"""

import jax
import jax.numpy as jnp

from agentic_ring.attention.kernels.interface import Tile
from agentic_ring.attention.kernels.registry import hardware_kernels, log_once, select_kernel
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.ring.collectives import vary_alike
from agentic_ring.attention.softmax import SoftmaxState, only_rows

_CAUSAL = MaskSpec(causal=True)


def attend_to_earlier_keys(tile: Tile, kernel: str) -> SoftmaxState:
    """Attention of queries to keys that are, in all likelihood, all before or all after each of them.

    Args:
      tile: its labels are positions, negative for padding; right for any.
      kernel: the name of a kernel to try, or "auto".
    """
    query, key = tile.mask.query.positions, tile.mask.key.positions
    assert query is not None, "queries of a cache have positions"
    assert key is not None, "keys of a cache have positions"
    bounds = tile.mask.key.bounds()
    assert bounds.position_low is not None
    assert bounds.position_high is not None
    after, before = query >= bounds.position_high[:, None], query < bounds.position_low[:, None]
    lengths = (key >= 0).sum(-1)
    at_the_end = (key >= 0) == (jnp.arange(key.shape[1]) < lengths[:, None])
    mask = HopMask(MaskSpec(causal=False), TokenLabels(), TokenLabels(), key_lengths=lengths)
    return _attend_by_place_or_position(tile, kernel, mask, after, (after | before).all() & at_the_end.all())


def attend_to_own_keys(tile: Tile, kernel: str) -> SoftmaxState:
    """Attention of queries to keys of the same tokens, which in all likelihood stand in order.

    Args:
      tile: its labels are positions, negative for padding; right for any.
      kernel: the name of a kernel to try, or "auto".
    """
    positions = tile.mask.query.positions
    assert positions is not None, "tokens of a chunk have positions"
    this, following = positions[:, :-1], positions[:, 1:]
    in_order = (following < 0) | ((this >= 0) & (this < following))
    mask = HopMask(_CAUSAL, TokenLabels(), TokenLabels())
    return _attend_by_place_or_position(tile, kernel, mask, positions >= 0, in_order.all())


def _attend_by_place_or_position(
    tile: Tile, kernel: str, simple: HopMask, attends: jax.Array, is_simple: jax.Array
) -> SoftmaxState:
    """Attention by the tile's own mask.

    Args:
      simple: a mask without positions, to be used instead where ``is_simple``.
      attends: bool [B, T], the queries that then attend to anything.
    """
    hardware = hardware_kernels(kernel)

    def by_positions() -> SoftmaxState:
        return vary_alike(select_kernel("xla").forward(tile), like=tile)

    def by_places() -> SoftmaxState:
        state = hardware.forward(tile._replace(mask=simple))
        return vary_alike(only_rows(state, attends), like=tile)

    if tile.mask.spec != _CAUSAL or not hardware.candidates:
        return by_positions()
    try:
        return jax.lax.cond(is_simple, by_places, by_positions)
    except NotImplementedError as refusal:
        log_once(f"attention to a cache runs the xla kernel: {refusal}")
        return by_positions()
