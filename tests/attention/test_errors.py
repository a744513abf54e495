"""Mistakes give one message that names the argument and what it was."""

from functools import partial
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from agentic_ring.attention import MaskSpec, alibi_slopes, attention, attention_with_prefix, ring_attention
from agentic_ring.attention.kernels.interface import Tile
from agentic_ring.attention.kernels.registry import FirstThatServes
from agentic_ring.attention.kernels.xla import XlaKernel
from agentic_ring.attention.mask import HopMask, TokenLabels
from agentic_ring.attention.scores import Scores
from agentic_ring.errors import ArgumentError, MeshError, UnknownNameError
from agentic_ring.mesh import MeshShape, make_mesh

INTEGERS = jnp.zeros((2, 16), int)


def arrays(q=(2, 16, 4, 8), k=(2, 16, 2, 8), v=None, dtype="float32") -> list[jax.Array]:
    return [jnp.zeros(shape, dtype) for shape in (q, k, v or k)]


def on(**sizes: int) -> jax.sharding.Mesh:
    return make_mesh(MeshShape(**sizes))


THREE_HEADS = {"q": (1, 24, 3, 8), "k": (1, 24, 3, 8), "mesh": on(ring=8)}
PERMUTED = THREE_HEADS | {"layout": "zigzag", "permuted": True}


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"q": (2, 16, 8)}, ArgumentError, r"q has shape \(2, 16, 8\)"),
        ({"q": (2, 0, 4, 8)}, ArgumentError, r"q has shape \(2, 0, 4, 8\)"),
        ({"v": (2, 15, 2, 8)}, ArgumentError, r"v has \(2, 15, 2, 8\)"),
        ({"q": (3, 16, 4, 8)}, ArgumentError, r"q has shape \(3, 16, 4, 8\) but k"),
        ({"q": (2, 16, 4, 16)}, ArgumentError, r"q has shape \(2, 16, 4, 16\) but k"),
        ({"q": (2, 16, 3, 8)}, ArgumentError, "q has 3 heads and k has 2"),
        ({"dtype": "int32"}, ArgumentError, "q is int32"),
        ({"k": (2, 8, 2, 8), "positions": INTEGERS}, ArgumentError, "one array, but q has 16 tokens and k 8"),
        ({"mask": jnp.ones((16, 16))}, ArgumentError, "mask is a "),
        ({"positions": jnp.arange(16)}, ArgumentError, r"positions is int32 of shape \(16,\)"),
        ({"segment_ids": (INTEGERS, INTEGERS[:, 1:])}, ArgumentError, r"key part of .* \(2, 15\)"),
        ({"segment_ids": (INTEGERS,)}, ArgumentError, "segment_ids is 1 arrays"),
        ({"hidden_rows": jnp.zeros((2, 16, 3), int)}, ArgumentError, r"hidden_rows .* \(2, 16, 3\)"),
        ({"strategy": "rong"}, UnknownNameError, "strategy 'rong'"),
        ({"layout": "spiral"}, UnknownNameError, "layout 'spiral'"),
        ({"kernel": "flash"}, UnknownNameError, "kernel 'flash'"),
        ({"schedule": "triangular"}, UnknownNameError, "schedule 'triangular'"),
        ({"query_chunk": 0}, ArgumentError, "query_chunk is 0"),
        ({"kernel": "vanilla", "key_chunk": 8}, ArgumentError, "key_chunk is 8"),
        ({"kernel": "cudnn"}, ArgumentError, "'cudnn', which runs on gpu"),
        ({"soft_cap": 0.0}, ArgumentError, "soft_cap is 0.0"),
        ({"sinks": jnp.zeros(3)}, ArgumentError, r"sinks is float32 of shape \(3,\)"),
        ({"alibi_slopes": jnp.zeros(4, int)}, ArgumentError, "alibi_slopes is int32"),
        ({"head_windows": (1, 2)}, ArgumentError, r"head_windows is \(1, 2\); expected 4"),
        ({"head_windows": (1, None, 0, 2)}, ArgumentError, r"head_windows is \(1, None, 0, 2\)"),
        ({"dropout_rate": 1.0}, ArgumentError, "dropout_rate is 1.0"),
        ({"dropout_rate": 0.1}, ArgumentError, "no dropout_key"),
        ({"strategy": "ring"}, MeshError, "no axis 'ring'"),
        ({"mesh": "8 devices"}, ArgumentError, "mesh is a str"),
        ({"mesh": on(data=2, fsdp=2, ring=2)}, MeshError, "batch of q is 2, .* 4 devices"),
        ({"mesh": on(tensor=4)}, MeshError, "heads of k is 2, .* 4 devices"),
        ({"mesh": on(ring=8), "strategy": "ulysses"}, MeshError, "do not divide over 8"),
        (THREE_HEADS | {"strategy": "ulysses_ring"}, MeshError, "3 query and 3 key heads .* any part of 8"),
        (PERMUTED | {"strategy": "ring"}, ArgumentError, "24 tokens, .* pad them to 32"),
        # Would be taken for sequences in order.
        (PERMUTED | {"strategy": "local"}, ArgumentError, "over 8 devices, but each works on whole"),
        (PERMUTED | {"k": (1, 16, 3, 8)}, ArgumentError, "over 8 devices, but each works on whole"),
    ],
)
def test_bad_arguments(options, error, named):
    shapes = {name: options[name] for name in ("q", "k", "v", "dtype") if name in options}
    options = {name: value for name, value in options.items() if name not in shapes}
    with pytest.raises(error, match=named):
        attention(*arrays(**shapes), **options)


def test_meshes_that_cannot_be_used():
    ambient, spec = on(ring=8), jax.P(None, "ring")
    with jax.set_mesh(ambient), pytest.raises(MeshError, match="set_mesh has set"):
        attention(*arrays(), mesh=on(data=2))
    explicit = jax.make_mesh((8,), ("ring",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(MeshError, match="explicit axes"):
        attention(*arrays(), mesh=explicit)
    inside = partial(jax.shard_map, mesh=ambient, in_specs=spec, out_specs=spec)
    with pytest.raises(MeshError, match=r"shard_map over .*ring"):
        inside(attention)(*arrays())
    halves = partial(ring_attention, axis_name="ring", mask=MaskSpec(), schedule="bidirectional")
    with pytest.raises(ArgumentError, match="holds 2 tokens"):
        inside(halves)(*arrays())


def test_other_calls_check_their_arguments_too():
    q, k, v = arrays()
    with pytest.raises(ArgumentError, match=r"v is bfloat16; .* q is float32"):
        attention(q, k, v.astype(jnp.bfloat16))
    for options, named in (({"window": 0}, "window is 0"), ({"prefix": -1}, "prefix is -1")):
        with pytest.raises(ArgumentError, match=named):
            MaskSpec(**options)
    with pytest.raises(ArgumentError, match="mask is a bool"):
        ring_attention(q, k, v, axis_name=None, mask=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownNameError, match="layout 'auto'"):
        ring_attention(q, k, v, axis_name=None, mask=MaskSpec(), layout="auto")  # pyright: ignore[reportArgumentType]
    prefix = jnp.zeros((5, 2, 8))
    with pytest.raises(ArgumentError, match=r"prefix_k has shape \(5, 4, 4\)"):
        attention_with_prefix(q, k, v, prefix.reshape(5, 4, 4), prefix)
    with pytest.raises(ArgumentError, match="alibi_slopes was given"):
        attention_with_prefix(q, k, v, prefix, prefix, alibi_slopes=alibi_slopes(4))


def test_only_the_vanilla_kernel_has_a_second_derivative():
    """Such as a gradient penalty takes; also where it is the gradient of the output alone that varies."""
    q, k, v = (jax.random.normal(jax.random.key(n), x.shape) for n, x in enumerate(arrays()))

    def penalty(q: jax.Array, kernel: str) -> jax.Array:
        gradient = jax.grad(lambda q: (attention(q, k, v, kernel=kernel) ** 2).sum())(q)
        return (gradient**2).sum()

    def of_output(d_output: jax.Array) -> jax.Array:
        return jax.vjp(lambda q: attention(q, k, v), q)[1](d_output)[0].sum()

    check_grads(partial(penalty, kernel="vanilla"), (q,), order=1, modes=["rev"], rtol=1e-2)
    for twice in (partial(penalty, kernel="xla"), of_output):
        with pytest.raises(ArgumentError, match='a second derivative only with kernel="vanilla"'):
            jax.grad(twice)(q)


def test_auto_passes_a_refused_case_to_the_next_kernel_and_says_so(caplog: pytest.LogCaptureFixture):
    tile = Tile(*arrays(), HopMask(MaskSpec(causal=False), TokenLabels(), TokenLabels()), Scores(1.0))
    refuses: Any = Mock(forward=Mock(side_effect=NotImplementedError("head dimension 8")))
    choice = FirstThatServes((("other", refuses), ("xla", XlaKernel())))
    with caplog.at_level("INFO", logger="agentic_ring"):
        for _ in range(2):
            assert np.isfinite(choice.forward(tile).output).all()
    assert [record.message for record in caplog.records] == [
        "attention forward runs the xla kernel; not other: head dimension 8"
    ]
    with pytest.raises(NotImplementedError, match="other: head dimension 8"):
        FirstThatServes((("other", refuses),)).forward(tile)
