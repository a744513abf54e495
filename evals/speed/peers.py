"""Attention of other people, called as their documentation says, to be compared with ours.

jax.nn          ``jax.nn.dot_product_attention`` in plain XLA, on one device. It keeps all T x T scores
                of a head, which sets the longest sequence that fits.
ringattention   the package of the paper's authors, release 0.1.2, its pure JAX path, with the chunks of
                512 that its README shows: ``pip install -e '.[peers]'``. It has as many key heads as
                query heads, consecutive blocks, and chunks that must divide a block.
"""

import importlib
import types
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from evals.speed.attention_benchmark import Contender, LeftOutError, Problem

Peer = Literal["jax.nn", "ringattention"]
PEERS: tuple[Peer, ...] = get_args(Peer)

CHUNK = 512
"""Queries and keys at a time."""


def peer(name: Peer, problem: Problem, mesh: Mesh) -> Contender:
    """The contender of this name.

    Args:
      name: one of ``PEERS``.
      problem: what it is to compute.
      mesh: for those that share a sequence; its axis is "ring".

    Raises:
      LeftOutError: the package is missing, or cannot compute this.
    """
    if name == "jax.nn":
        return Contender.of(name, _jax_nn)
    sequence = PartitionSpec(None, "ring")
    attend = _ringattention(problem, mesh, sequence)
    return Contender.of(name, attend, NamedSharding(mesh, sequence))


def _jax_nn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def _ringattention(problem: Problem, mesh: Mesh, sequence: PartitionSpec) -> Callable[..., jax.Array]:
    library = _ringattention_library()
    block = problem.tokens // mesh.shape["ring"]
    chunk = min(CHUNK, block)
    if problem.heads != problem.kv_heads:
        raise LeftOutError(f"has no grouped heads, here {problem.heads} on {problem.kv_heads}")
    if block % chunk:
        raise LeftOutError(f"blocks of {block} tokens do not divide into chunks of {chunk}")
    options = {
        "causal_block_size": 1,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "query_chunk_size": chunk,
        "key_chunk_size": chunk,
        "dtype": jnp.dtype(problem.dtype),
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": True,
    }

    def on_device(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # No bias, segments or cache; logits in float32.
        return library.ring_attention(q, k, v, None, None, None, "ring", True, options)

    # Its loops start from arrays that are the same on every device, which the check would refuse.
    return jax.shard_map(on_device, mesh=mesh, in_specs=(sequence,) * 3, out_specs=sequence, check_vma=False)


def _ringattention_library() -> Any:
    """Imports the package, which asks ``jax.lib.xla_bridge``, gone from JAX, for the platform."""
    bridge = types.SimpleNamespace(get_backend=lambda: types.SimpleNamespace(platform=jax.default_backend()))
    missing = not hasattr(jax.lib, "xla_bridge")
    if missing:
        setattr(jax.lib, "xla_bridge", bridge)  # noqa: B010 (a type checker knows no such attribute)
    try:
        return importlib.import_module("ringattention.ringattention_jax")
    except ImportError as error:
        raise LeftOutError(f"cannot be imported ({error}); pip install -e '.[peers]'") from error
    finally:
        if missing:
            delattr(jax.lib, "xla_bridge")
