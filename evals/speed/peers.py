"""Attention implementations of other libraries, called as their documentation says.

jax.nn          ``jax.nn.dot_product_attention`` in plain XLA, on one device. It keeps all T x T scores
                of a head, which limits the sequence length.
ringattention   the package of the paper's authors, release 0.1.2, its pure JAX path, with the chunks of
                512 tokens of its README: ``pip install -e '.[peers]'``. It needs as many key heads as
                query heads, uses the contiguous layout, and its chunks must divide a block.
"""

import importlib
import types
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from evals.speed.attention_benchmark import Implementation, Problem, UnsupportedError

Peer = Literal["jax.nn", "ringattention"]
PEERS: tuple[Peer, ...] = get_args(Peer)

CHUNK = 512
"""Tokens of a chunk of queries or keys."""


def peer(name: Peer, problem: Problem, mesh: Mesh) -> Implementation:
    """Returns the implementation of this name.

    Args:
      name: one of ``PEERS``.
      problem: the problem that it is to compute.
      mesh: devices for implementations that shard the sequence, over its axis "ring".

    Raises:
      UnsupportedError: the package is missing, or cannot compute this problem.
    """
    if name == "jax.nn":
        return Implementation.of(name, _jax_nn)
    sequence = PartitionSpec(None, "ring")
    return Implementation.of(name, _ringattention(problem, mesh), NamedSharding(mesh, sequence))


def _jax_nn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def _ringattention(problem: Problem, mesh: Mesh) -> Callable[..., jax.Array]:
    block = problem.tokens // mesh.shape["ring"]
    chunk = min(CHUNK, block)
    if problem.heads != problem.kv_heads:
        raise UnsupportedError(f"has no grouped heads, here {problem.heads} on {problem.kv_heads}")
    if block % chunk:
        raise UnsupportedError(f"blocks of {block} tokens do not divide into chunks of {chunk}")
    return ringattention(mesh, jnp.dtype(problem.dtype), chunk=chunk)


def ringattention(
    mesh: Mesh,
    dtype: jnp.dtype,
    *,
    chunk: int,
    causal: bool = True,
    float32_logits: bool = True,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> Callable[..., jax.Array]:
    """Returns attention of the package `ringattention` over the axis "ring" of a mesh.

    Args:
      dtype: dtype of q, k, v.
      chunk: queries, and keys, that it works on at a time; must divide the tokens of a device.
      causal: whether a query attends to no later key.
      float32_logits: whether scores and sums are in float32.
      dropout_rate, dropout_key: its arguments `attn_pdrop` and `dropout_rng`.

    Returns:
      A function of q, k, v [B, T, N, H], and optionally of a bias [B, 1, 1, T] of the keys and segment ids
      int32 [B, T].

    Raises:
      UnsupportedError: the package is missing.
    """
    library = _ringattention_library()
    options = {
        "causal_block_size": 1 if causal else None,
        "deterministic": dropout_rate == 0,
        "dropout_rng": dropout_key,
        "attn_pdrop": dropout_rate,
        "query_chunk_size": chunk,
        "key_chunk_size": chunk,
        "dtype": dtype,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": True,
    }

    def on_device(
        q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, segment_ids: jax.Array | None
    ) -> jax.Array:
        return library.ring_attention(q, k, v, bias, segment_ids, None, "ring", float32_logits, options)

    sequence, whole = PartitionSpec(None, "ring"), PartitionSpec()
    # Its loops start from arrays that are replicated, which the check of varying axes refuses.
    sharded = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(sequence,) * 3 + (whole,) * 2,
        out_specs=sequence,
        check_vma=False,
    )
    return lambda q, k, v, bias=None, segment_ids=None: sharded(q, k, v, bias, segment_ids)


def _ringattention_library() -> Any:
    """Imports the package, which asks ``jax.lib.xla_bridge``, gone from JAX, for the platform."""
    bridge = types.SimpleNamespace(get_backend=lambda: types.SimpleNamespace(platform=jax.default_backend()))
    missing = not hasattr(jax.lib, "xla_bridge")
    if missing:
        setattr(jax.lib, "xla_bridge", bridge)  # noqa: B010 (a type checker knows no such attribute)
    try:
        return importlib.import_module("ringattention.ringattention_jax")
    except ImportError as error:
        raise UnsupportedError(f"cannot be imported ({error}); pip install -e '.[peers]'") from error
    finally:
        if missing:
            delattr(jax.lib, "xla_bridge")
