"""Ring attention on one device's shards: exact, over a sequence of any length (arXiv 2310.01889).

Every device keeps its queries; blocks of keys and values come to it (``transport``), each is attended
to as it arrives (``hop``), and what the hops find is merged in float32 (``softmax``). The backward goes
round once more, recomputing scores from the global logsumexp (``attend``).
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from agentic_ring.attention.arguments import Pair, check_arrays, check_mask, check_scores, pair_of_labels
from agentic_ring.attention.axis import RingAxis
from agentic_ring.attention.kernels import select_kernel
from agentic_ring.attention.layout import LAYOUTS, Layout
from agentic_ring.attention.mask import MaskSpec, TokenLabels
from agentic_ring.attention.scores import Dropout, Scores
from agentic_ring.attention.strategies import Sharded
from agentic_ring.attention.transport import SCHEDULES, Schedule
from agentic_ring.errors import UnknownNameError


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str | Iterable[str] | None,
    mask: MaskSpec,
    positions: Pair = None,
    segment_ids: Pair = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    layout: Layout = "contiguous",
    schedule: Schedule = "unidirectional",
    kernel: str = "auto",
    query_chunk: int | None = None,
    key_chunk: int | None = None,
) -> jax.Array:
    """Attention of this device's queries to the whole sequence, for use inside ``jax.shard_map``.

    Args:
      q: this device's queries [B, T, N, H].
      k: this device's keys [B, S, K, H], N a multiple of K.
      v: this device's values [B, S, K, H].
      axis_name: mesh axis that the sequence is sharded over; None where it is not. A pair
        (outer, inner) makes a double ring: blocks go round the inner axis, on fast links, for each
        hop on the outer one.
      mask: static part of the mask.
      positions: of this device's tokens in the whole sequence, int [B, T] or [1, T], or a
        (query, key) pair. Where absent they follow from ``layout``, and hops need no mask.
      segment_ids: of this device's tokens; likewise. A negative id is padding.
      scale: of the scores; 1 / sqrt(H) where absent.
      soft_cap: see ``attention``.
      sinks: of this device's query heads, float [N]; see ``attention``.
      dropout_rate: see ``attention``.
      dropout_key: the same on every device of the ring. Where devices hold different rows of a batch
        or different heads, fold their place in those into it.
      layout: the order in which the devices hold the sequence.
      schedule: "bidirectional" sends half of each block each way round the ring.
      kernel: one of ``agentic_ring.attention.KERNELS``.
      query_chunk: queries that the kernel works on at a time; chosen by the kernel where absent.
      key_chunk: keys that the kernel works on at a time; likewise.

    Returns:
      [B, T, N, H] in q's dtype; exactly 0 where a query has nothing to attend to.

    Raises:
      ArgumentError: shapes, dtypes or sizes that do not fit.
      UnknownNameError: an unknown layout, schedule or kernel.
    """
    check_arrays(q, k, v)
    check_mask(mask)
    check_scores(q, soft_cap, sinks, dropout_rate, dropout_key)
    for kind, name, known in (("layout", layout, LAYOUTS), ("schedule", schedule, SCHEDULES)):
        if name not in known:
            raise UnknownNameError(kind, name, known)
    axis = RingAxis.over(axis_name)
    labels = pair_of_labels("positions", positions, q, k), pair_of_labels("segment_ids", segment_ids, q, k)
    query, key = (TokenLabels(*pair) for pair in zip(*labels, strict=True))
    sharded = Sharded(
        mask=mask,
        kernel=select_kernel(kernel, query_chunk, key_chunk),
        given=layout,
        layout=layout,
        inner=jax.lax.axis_size(axis.names[-1]) if len(axis.names) > 1 else 1,
        schedule=schedule,
    )
    scores = Scores(
        q.shape[3] ** -0.5 if scale is None else float(scale),
        soft_cap,
        Dropout.of(dropout_rate, dropout_key, jnp.int32(0), jnp.int32(0)),
    )
    return sharded.attend(axis, q, k, v, sinks, query, key, scores)
