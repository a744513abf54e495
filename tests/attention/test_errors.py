"""Mistakes give one message that names the argument, what it was, and what was expected."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import MaskSpec, attention, ring_attention
from agentic_ring.attention.kernels.interface import Tile
from agentic_ring.attention.kernels.registry import FirstThatServes
from agentic_ring.attention.kernels.xla import XlaKernel
from agentic_ring.attention.mask import HopMask, TokenLabels
from agentic_ring.attention.scores import Scores
from agentic_ring.errors import ArgumentError, MeshError, UnknownNameError
from agentic_ring.mesh import MeshShape, make_mesh


def arrays(q=(2, 16, 4, 8), k=(2, 16, 2, 8), v=(2, 16, 2, 8)) -> list[jax.Array]:
    return [jnp.zeros(shape) for shape in (q, k, v)]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (2, 16, 8)}, r"q has shape \(2, 16, 8\); expected four axes \[B, T, N, H\]"),
        ({"k": (16, 2, 8)}, r"k has shape \(16, 2, 8\); expected four axes \[B, S, K, H\]"),
        ({"v": (2, 15, 2, 8)}, r"k has shape .* but v has \(2, 15, 2, 8\)"),
        ({"q": (3, 16, 4, 8)}, r"q has batch 3 but k and v have 2"),
        ({"q": (2, 16, 4, 16)}, r"q has head dimension 16 but k and v have 8"),
        ({"q": (2, 16, 3, 8)}, r"q has 3 heads and k has 2; q's must be a multiple"),
        ({"q": (2, 0, 4, 8)}, r"q has shape \(2, 0, 4, 8\); no axis may be empty"),
    ],
)
def test_shapes(shapes, message):
    with pytest.raises(ArgumentError, match=message):
        attention(*arrays(**shapes))


def test_dtypes():
    q, k, v = arrays()
    with pytest.raises(ArgumentError, match="q has dtype int32; expected a floating-point dtype"):
        attention(q.astype(int), k, v)
    with pytest.raises(ArgumentError, match="v has dtype bfloat16 but q has float32"):
        attention(q, k, v.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": jnp.ones((16, 16))}, ArgumentError, r"expected MaskSpec.*takes no mask array"),
        ({"positions": jnp.arange(16)}, ArgumentError, r"positions has shape \(16,\); expected .* \(2, 16\)"),
        ({"positions": jnp.zeros((2, 16))}, ArgumentError, "positions has dtype float32; expected integers"),
        (
            {"segment_ids": (jnp.zeros((2, 16), int), jnp.zeros((2, 15), int))},
            ArgumentError,
            r"key part of segment_ids has shape \(2, 15\); expected",
        ),
        ({"segment_ids": (jnp.zeros((2, 16), int),)}, ArgumentError, "segment_ids has 1 parts; expected"),
        ({"strategy": "rong"}, UnknownNameError, "unknown strategy 'rong'; choose one of: auto, local, ring"),
        ({"layout": "spiral"}, UnknownNameError, "unknown layout 'spiral'; choose one of: auto, contiguous"),
        ({"kernel": "flash"}, UnknownNameError, "unknown kernel 'flash'; choose one of: auto, xla, vanilla"),
        ({"query_chunk": 0}, ArgumentError, "query_chunk is 0; it must be at least 1"),
        (
            {"kernel": "vanilla", "key_chunk": 8},
            ArgumentError,
            "key_chunk is 8, but the vanilla kernel has no",
        ),
        (
            {"kernel": "cudnn"},
            ArgumentError,
            "'cudnn', which runs on gpu devices, but these are cpu",
        ),
        ({"schedule": "triangular"}, UnknownNameError, "unknown schedule 'triangular'; choose one of: uni"),
        ({"soft_cap": 0.0}, ArgumentError, "soft_cap is 0.0; it must be above 0"),
        (
            {"sinks": jnp.zeros(3)},
            ArgumentError,
            r"shape \(3,\); expected one number per query head, \(4,\)",
        ),
        ({"sinks": jnp.zeros(4, int)}, ArgumentError, "sinks has dtype int32"),
        ({"dropout_rate": 1.0}, ArgumentError, "dropout_rate is 1.0; it must be at least 0 and below 1"),
        ({"dropout_rate": 0.1}, ArgumentError, "there is no dropout_key; pass jax.random.key"),
        ({"strategy": "ulysses"}, MeshError, "the mesh has no axis 'ring'"),
        ({"strategy": "ring"}, MeshError, "the mesh has no axis 'ring'"),
        ({"mesh": "8 devices"}, ArgumentError, "mesh is a str; expected a jax.sharding.Mesh"),
    ],
)
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        attention(*arrays(), **options)


def test_one_label_array_for_two_lengths():
    q, k, v = arrays(k=(2, 8, 2, 8), v=(2, 8, 2, 8))
    with pytest.raises(ArgumentError, match=r"positions is one array, but q has 16 tokens and k 8"):
        attention(q, k, v, positions=jnp.zeros((2, 16), int))


def test_sizes_that_do_not_divide_over_the_mesh():
    with pytest.raises(MeshError, match=r"batch of q is 2, .* 4 devices of the mesh axes data x fsdp"):
        attention(*arrays(), mesh=make_mesh(MeshShape(data=2, fsdp=2)))
    with pytest.raises(MeshError, match=r"heads of k is 2, .* 4 devices of the mesh axes tensor"):
        attention(*arrays(), mesh=make_mesh(MeshShape(tensor=4)))


def test_masks_that_admit_nothing():
    with pytest.raises(ArgumentError, match="window is 0; it must be at least 1, the token itself"):
        MaskSpec(window=0)
    with pytest.raises(ArgumentError, match="prefix is -1; it must be at least 0"):
        MaskSpec(prefix=-1)


def test_heads_that_do_not_divide_for_ulysses():
    q = k = v = jnp.zeros((1, 16, 3, 8))
    with pytest.raises(MeshError, match=r'"ulysses" but 3 query and 3 key heads .* do not divide over 8'):
        attention(q, k, v, mesh=make_mesh(MeshShape(ring=8)), strategy="ulysses")
    with pytest.raises(
        MeshError, match='"ulysses_ring" but 3 query and 3 key heads per device do not divide'
    ):
        attention(q, k, v, mesh=make_mesh(MeshShape(ring=8)), strategy="ulysses_ring")


def test_a_permuted_sequence_that_does_not_spread():
    q = k = v = jnp.zeros((1, 24, 3, 8))
    with pytest.raises(ArgumentError, match=r"24 tokens, .* in zigzag order; pad them to 32"):
        attention(q, k, v, mesh=make_mesh(MeshShape(ring=8)), strategy="ring", layout="zigzag", permuted=True)


def test_a_permuted_sequence_that_nobody_shares():
    """It would be taken for a sequence in order."""
    q = k = v = jnp.zeros((1, 32, 3, 8))
    options = {"mesh": make_mesh(MeshShape(ring=8)), "layout": "zigzag", "permuted": True}
    with pytest.raises(ArgumentError, match="zigzag order over 8 devices, but each works on whole sequences"):
        attention(q, k, v, strategy="local", **options)
    with pytest.raises(ArgumentError, match="zigzag order over 8 devices, but each works on whole sequences"):
        attention(q[:, :16], k, v, **options)


def test_halves_of_blocks_that_have_none():
    q = k = v = jnp.zeros((1, 16, 2, 8))
    mesh, spec = make_mesh(MeshShape(ring=8)), jax.P(None, "ring")
    run = partial(ring_attention, axis_name="ring", mask=MaskSpec(), schedule="bidirectional")
    with pytest.raises(ArgumentError, match="a device holds 2 tokens; make it a multiple of 4"):
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)(q, k, v)


def test_a_mesh_that_is_not_the_ambient_one():
    ambient, other = make_mesh(MeshShape(ring=8)), make_mesh(MeshShape(data=2))
    with jax.set_mesh(ambient), pytest.raises(MeshError, match="leave mesh out or use one mesh"):
        attention(*arrays(), mesh=other)


def test_explicit_axes_need_the_ambient_mesh():
    mesh = jax.make_mesh((8,), ("ring",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(MeshError, match=r"only inside jax.set_mesh\(mesh\)"):
        attention(*arrays(), mesh=mesh)


def test_global_attention_within_shard_map():
    mesh = make_mesh(MeshShape(ring=8))
    inside = jax.shard_map(attention, mesh=mesh, in_specs=jax.P(None, "ring"), out_specs=jax.P(None, "ring"))
    with pytest.raises(MeshError, match=r"inside jax.shard_map over .*ring.* call ring_attention"):
        inside(*arrays())


def test_ring_attention_checks_its_arguments_too():
    with pytest.raises(ArgumentError, match="expected MaskSpec"):
        ring_attention(*arrays(), axis_name=None, mask=True)  # pyright: ignore[reportArgumentType]


class Refuses:
    """A kernel for another machine."""

    def forward(self, *args, **kwargs):
        raise NotImplementedError("head dimension 8 is no multiple of 16")

    backward = forward


def test_auto_passes_a_refused_case_to_the_next_kernel_and_says_so(caplog: pytest.LogCaptureFixture):
    q, k, v = arrays()
    mask = HopMask(MaskSpec(causal=False), TokenLabels(), TokenLabels())
    tile = Tile(q, k, v, mask, Scores(1.0))
    choice = FirstThatServes((("other", Refuses()), ("xla", XlaKernel())))
    with caplog.at_level("INFO", logger="agentic_ring"):
        for _ in range(2):
            assert np.isfinite(choice.forward(tile).output).all()
    assert [record.message for record in caplog.records] == [
        "attention forward runs the xla kernel; not other: head dimension 8 is no multiple of 16"
    ]
    with pytest.raises(NotImplementedError, match="no kernel serves this case; other: head dimension 8"):
        FirstThatServes((("other", Refuses()),)).forward(tile)
