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
    attend = _ringattention(problem, mesh, sequence)
    return Implementation.of(name, attend, NamedSharding(mesh, sequence))


def _jax_nn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def _ringattention(problem: Problem, mesh: Mesh, sequence: PartitionSpec) -> Callable[..., jax.Array]:
    library = _ringattention_library()
    block = problem.tokens // mesh.shape["ring"]
    chunk = min(CHUNK, block)
    if problem.heads != problem.kv_heads:
        raise UnsupportedError(f"has no grouped heads, here {problem.heads} on {problem.kv_heads}")
    if block % chunk:
        raise UnsupportedError(f"blocks of {block} tokens do not divide into chunks of {chunk}")
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

    # Its loops start from arrays that are replicated, which the check of varying axes refuses.
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
        raise UnsupportedError(f"cannot be imported ({error}); pip install -e '.[peers]'") from error
    finally:
        if missing:
            delattr(jax.lib, "xla_bridge")
