"""Masks as ranges of rows that each key is hidden from: O(T) numbers for any of these.

    attention(q, k, v, mask=MaskSpec(causal), hidden_rows=hidden_outside(first, end)[None])

with key s, at position s, visible to the rows from first[s] to before end[s]:

    mask                          causal    first[s]                 end[s]
    packed documents              yes       0                        end of the document
    packed documents,             no        start of the document    end of the document
      each a prefix-LM                        in its prefix, else s
    one question, many answers    yes       0                        T in the question,
                                                                       else end of the answer
    tree in depth-first order     yes       0                        end of the subtree
    window and global tokens      yes       0                        T for a global token,
                                                                       else s + window

FlashMask (arXiv 2410.01359) describes masks by the ranges that are hidden, as ``attention`` takes them.
"""

import jax
import jax.numpy as jnp


def hidden_outside(first: jax.Array, end: jax.Array) -> jax.Array:
    """The ``hidden_rows`` of keys that are visible to the rows from ``first`` to before ``end``.

    Args:
      first, end: int, one number for each key in any shape [...].

    Returns:
      int32 [..., 4]: two ranges, before ``first`` and from ``end`` on.
    """
    first, end = jnp.broadcast_arrays(jnp.asarray(first, jnp.int32), jnp.asarray(end, jnp.int32))
    last = jnp.full_like(end, jnp.iinfo(jnp.int32).max)
    return jnp.stack((jnp.zeros_like(first), first, end, last), axis=-1)
