"""How evenly a layout shares the work of a mask among the devices of a ring, and which layout to take.

The work of a device in a hop is the number of tiles (a chunk of queries by one of keys) that its kernel
computes, of those that the mask does not leave empty. A hop lasts as long as its slowest device, so the
critical path is the sum over hops of the largest number; the ideal is that of all tiles over the devices.
"""

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.inputs import Layout
from agentic_ring.attention.kernels.chunks import default_chunk
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.ring.layout import chunk_run, padded_length, shard_order


def balanced_layout(mask: MaskSpec, labels: bool, ring: int, block: int, platform: str) -> Layout:
    """The layout that gives the devices of a ring the most even shares of the work.

    Args:
      mask: the static part of the mask.
      labels: whether tokens have segment ids, or keys are hidden from ranges of rows.
      ring: number of devices.
      block: tokens of a device.
      platform: "cpu", "gpu" or "tpu".
    """
    if mask.window is not None and not mask.prefix:
        reach = -(-(mask.window - 1) // block) * (1 if mask.causal else 2)
        if reach < ring - 1:
            return "contiguous"  # a device exchanges with few others, and all have nearly the same work
    uneven = labels or mask.window is not None or (mask.causal and mask.prefix > 0)
    if uneven and platform != "tpu":  # whose fast kernel takes no tokens with positions of their own
        return "block_striped"
    plain_causal = mask.causal and mask.window is None and not mask.prefix
    return "zigzag" if plain_causal else "contiguous"


def tile_counts(
    layout: Layout, ring: int, length: int, mask: MaskSpec, segment_ids: np.ndarray | None = None
) -> np.ndarray:
    """Tiles that each device computes in each hop, int [hops, devices], for one head and all rows.

    Args:
      layout: the order of the sequence over the ring.
      ring: number of devices.
      length: tokens of the sequence; padded as ``padded_length`` says.
      mask: the static part of the mask.
      segment_ids: int [B, length], negative for padding; None is one segment.
    """
    padded = padded_length(length, ring, layout)
    segments = np.zeros((1, length), np.int32) if segment_ids is None else segment_ids
    labels = TokenLabels(jnp.arange(length)[None], jnp.asarray(segments, jnp.int32)).pad(padded - length)
    block = padded // ring
    run = chunk_run(layout, block, ring)
    chunk = default_chunk(run or block, halves=run is None)

    def bounds(device: int):
        places = shard_order(layout, padded, ring, device)
        mine = labels.map(lambda x: x[:, places]).pad(-block % chunk)
        return mine.map(lambda x: x.reshape(x.shape[0], -1, chunk)).bounds()

    shards = [bounds(device) for device in range(ring)]

    def tiles(device: int, hop: int) -> int:
        query = jax.tree.map(lambda x: x[:, :, None], shards[device])
        key = jax.tree.map(lambda x: x[:, None], shards[(device - hop) % ring])
        return int(HopMask(mask, labels, labels).reachable(query, key).sum())

    return np.array([[tiles(device, hop) for device in range(ring)] for hop in range(ring)])


def imbalance(tiles: np.ndarray) -> float:
    """The critical path over the ideal, from tiles [hops, devices]; 1 is a perfect balance."""
    return float(tiles.max(axis=1).sum() / tiles.mean(axis=1).sum())
