"""Attention: our strategies and other libraries on one problem, relative to each other and to products.

Operations are those that the mask needs: 4 * T * T * N * H for a forward pass, two products over all pairs,
half as many with a causal mask, and 3.5 times as many for forward and backward (five more products, one of
which repeats the scores). Further operations of a contender, such as masked scores, do not count.

The reference is a product of two square matrices in the problem's dtype on one device, timed before
each contender in each round. ``share_of_matmul`` is a contender's rate over this rate: a share of what
the machine reaches under its present load. Simulated devices share one processor, so for them the rate
is that of all devices together; otherwise it is per device.

Other libraries: ``jax.nn.dot_product_attention`` on one device, whose XLA implementation materialises all
scores, and the package of the paper's authors, ``ringattention`` 0.1.2, its pure JAX path.
"""

import importlib
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding, SingleDeviceSharding

from agentic_ring.attention import Layout, MaskSpec, Strategy, attention, order
from agentic_ring.attention.ring.balance import imbalance, tile_counts
from agentic_ring.device_memory import DoesNotFitError, PlannedMemory, check_memory
from agentic_ring.errors import ArgumentError, MeshError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.results.timing import Spread, square_product, square_product_flops, time_interleaved
from evals.benchmarks.rows import Line, UnsupportedError

Direction = Literal["forward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
CHUNK = 512
"""Tokens of a chunk of queries, or of keys, of ``ringattention``: those of its README."""
SHARDED: tuple[Strategy, ...] = ("ring", "all_gather", "ulysses", "ulysses_ring")


@dataclass(frozen=True)
class Problem:
    """One layer of self-attention, batch 1.

    Attributes:
      tokens: sequence length, T.
      heads: number of query heads, N.
      kv_heads: number of key and value heads.
      head_dim: size of a head, H.
      dtype: type of q, k, v and the output.
      causal: whether a query attends to its own and earlier keys only, or to all keys.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"
    causal: bool = True

    def flops(self, direction: Direction) -> float:
        """Returns the operations that the mask needs; see the module."""
        pairs = self.tokens**2 / (2 if self.causal else 1)
        forward = 4 * pairs * self.heads * self.head_dim
        return forward if direction == "forward" else 3.5 * forward

    def arrays(self, sharding: Sharding) -> tuple[jax.Array, ...]:
        """Returns standard normal (q, k, v, d_output) with this sharding."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)

        def make(key: jax.Array) -> tuple[jax.Array, ...]:
            keys = jax.random.split(key, len(heads))
            shapes = [(1, self.tokens, count, self.head_dim) for count in heads]
            return tuple(
                jax.random.normal(k, shape, self.dtype) for k, shape in zip(keys, shapes, strict=True)
            )

        return jax.jit(make, out_shardings=sharding)(jax.random.key(0))


def first_device() -> Sharding:
    """The sharding of arrays on one device."""
    return SingleDeviceSharding(jax.devices()[0])


@dataclass(frozen=True)
class Contender:
    """An implementation of attention.

    Attributes:
      name: its name in tables.
      forward: function of (q, k, v).
      both: function of (q, k, v, d_output) that returns the output and the three gradients.
      sharding: sharding of the arguments; one device by default.
    """

    name: str
    forward: Callable[..., Any]
    both: Callable[..., Any]
    sharding: Sharding = field(default_factory=first_device)

    @classmethod
    def of(cls, name: str, attend: Callable[..., jax.Array], sharding: Sharding | None = None) -> "Contender":
        """Makes a contender of a differentiable function of (q, k, v)."""

        def both(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
            output, transpose = jax.vjp(attend, q, k, v)
            return output, *transpose(d_output)

        return cls(name, attend, both, sharding or first_device())


@dataclass(frozen=True)
class _Program:
    """One contender in one direction, compiled."""

    contender: Contender
    direction: Direction
    run: Callable[[], Any]
    temp_bytes: int


def compare(
    problem: Problem, contenders: Sequence[Contender], references: Sequence[str], rounds: int, calls: int = 1
) -> list[Line]:
    """Times every contender that can compute the problem, forward and forward+backward.

    Args:
      problem: the problem to compute.
      contenders: those to time.
      references: names of the contenders with which all are compared.
      rounds: number of timed rounds.
      calls: calls of each contender per round; see ``time_interleaved``.

    Returns:
      Seconds per call. A contender that does not support the problem, or needs more memory than there is, is
      left out with the reason, before it runs.
    """
    programs: list[_Program] = []
    lines: list[Line] = []
    arrays = {sharding: problem.arrays(sharding) for sharding in {each.sharding for each in contenders}}
    for contender in contenders:
        for direction in DIRECTIONS:
            try:
                programs.append(_compile(contender, direction, arrays[contender.sharding]))
            except (UnsupportedError, MeshError, DoesNotFitError) as reason:
                lines.append(Line(direction, contender.name, None, left_out=str(reason)))
    multiply = square_product(problem.dtype)
    # The reference before each program, not once per round: the load may change within a round.
    functions = [function for program in programs for function in (multiply, program.run)]
    times = time_interleaved(rounds, *functions, calls=calls)
    measured = {
        (program.contender.name, program.direction): seconds
        for program, seconds in zip(programs, times[1::2], strict=True)
    }
    for program, products in zip(programs, times[::2], strict=True):
        name, direction = program.contender.name, program.direction
        seconds, flops = measured[name, direction], problem.flops(direction)
        devices = len(program.contender.sharding.device_set)
        processors = devices if jax.default_backend() != "cpu" else 1
        share = flops / (square_product_flops() * processors)
        details = {
            "devices": devices,
            "temp_bytes": program.temp_bytes,
            "tflops": flops / Spread.of(seconds).median / 1e12,
            "share_of_matmul": list(asdict(Spread.ratio([share * x for x in products], seconds)).values()),
        }
        others = {other: measured.get((other, direction)) for other in references if other != name}
        ratios = {other: Spread.ratio(seconds, known) for other, known in others.items() if known}
        lines.append(Line(direction, name, Spread.of(seconds), "s", ratios, details))
    return lines


def _compile(contender: Contender, direction: Direction, arrays: tuple[jax.Array, ...]) -> _Program:
    """Compiles one direction, and checks that it fits before anything runs."""
    function = contender.forward if direction == "forward" else contender.both
    arguments = arrays[:3] if direction == "forward" else arrays
    compiled = jax.jit(function).lower(*arguments).compile()
    memory, devices = PlannedMemory.of(compiled), len(contender.sharding.device_set)
    check_memory(memory.total * devices, devices)
    return _Program(contender, direction, partial(compiled, *arguments), memory.temporary)


def strategies(
    tokens: int, heads: int, kv_heads: int, head_dim: int, devices: int, rounds: int
) -> list[Line]:
    """Times our strategies over a ring and attention on one device beside jax.nn and ``ringattention``.

    Raises:
      ArgumentError: the tokens do not divide over the devices.
    """
    if tokens % devices:
        raise ArgumentError(
            f"tokens is {tokens}, which does not divide over {devices} devices; choose a multiple"
        )
    problem = Problem(tokens, heads, kv_heads, head_dim)
    mesh = make_mesh(MeshShape(ring=devices), jax.devices()[:devices])
    sequence = jax.NamedSharding(mesh, jax.P(None, "ring"))
    contenders = [
        Contender.of(name, partial(attention, mesh=mesh, strategy=name), sequence) for name in SHARDED
    ]
    peers = [
        Contender.of("one device", attention),
        Contender.of("jax.nn", jax_nn),
        Contender.of("ringattention", partial(ringattention, mesh=mesh), sequence),
    ]
    return compare(problem, [*contenders, *peers], [peer.name for peer in peers], rounds)


def packed(
    tokens: int,
    documents: Sequence[int],
    rings: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    rounds: int,
) -> list[Line]:
    """Times forward and backward of rows of packed documents, by median length of the documents and layout.

    The first row of each ring is one document as long as the sequence; "live" is the share of the causal
    pairs that lie in one document, and the critical path that of the slowest device's tiles over the ideal.
    """
    problem, lines = Problem(tokens, heads, kv_heads, head_dim), []
    for ring in rings:
        mesh = make_mesh(MeshShape(ring=ring), jax.devices()[:ring])
        sharding = jax.NamedSharding(mesh, jax.P(None, "ring"))
        arrays = problem.arrays(sharding)
        layouts: tuple[Layout, ...] = ("zigzag", "block_striped") if ring > 1 else ("contiguous",)
        programs: dict[tuple[int | None, str], Callable[[], Any]] = {}
        for median in (None, *documents):
            segments = packed_row(tokens, median)
            for layout in layouts:
                placed = jax.device_put(segments[:, order(layout, tokens, ring)], sharding)
                ours = partial(attention, mesh=mesh, layout=layout, permuted=ring > 1)
                programs[median, layout] = partial(_gradients(ours), placed, *arrays)
            peer = partial(_gradients(partial(ringattention, mesh=mesh)), jax.device_put(segments, sharding))
            try:
                jax.block_until_ready(peer(*arrays))
                programs[median, "ringattention"] = partial(peer, *arrays)
            except UnsupportedError as reason:
                lines.append(Line(_packing(ring, median), "ringattention", None, left_out=str(reason)))
        times = dict(zip(programs, time_interleaved(rounds, *programs.values()), strict=True))
        for (median, name), seconds in times.items():
            segments = packed_row(tokens, median)
            details = {"live": live_share(segments), "devices": ring}
            if name != "ringattention":
                tiles = tile_counts(name, ring, tokens, MaskSpec(), segments)
                details["critical_path"] = imbalance(tiles)
            others = {"one document": (None, name), "zigzag": (median, "zigzag")}
            ratios = {
                other: Spread.ratio(seconds, times[key])
                for other, key in others.items()
                if key in times and key != (median, name)
            }
            lines.append(Line(_packing(ring, median), name, Spread.of(seconds), "s", ratios, details))
    return lines


def _packing(ring: int, median: int | None) -> str:
    documents = "one document" if median is None else f"documents of {median}"
    return f"{documents}, {'one device' if ring == 1 else f'ring of {ring}'}"


def _gradients(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The compiled gradients of attention with segment ids, a function of (segment ids, q, k, v, d_output)."""

    def gradients(segments: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> Any:
        return jax.vjp(partial(attend, segment_ids=segments), q, k, v)[1](d_output)

    return jax.jit(gradients)


def packed_row(tokens: int, median: int | None) -> np.ndarray:
    """Segment ids [1, tokens] of documents of log-normal lengths about ``median``; None is one document."""
    if median is None:
        return np.zeros((1, tokens), np.int32)
    lengths = np.random.default_rng(median).lognormal(np.log(median), 1.0, size=10 + 10 * tokens // median)
    return np.repeat(np.arange(len(lengths)), lengths.astype(int) + 1)[None, :tokens].astype(np.int32)


def live_share(segment_ids: np.ndarray) -> float:
    """Share of the causal pairs of a row [1, T] whose tokens lie in one document."""
    lengths = np.bincount(segment_ids[0])
    return float((lengths * (lengths + 1)).sum() / (len(segment_ids[0]) * (len(segment_ids[0]) + 1)))


def jax_nn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of JAX itself on arrays [B, T, N or K, H]."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def ringattention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mesh: Mesh, segment_ids: jax.Array | None = None
) -> jax.Array:
    """Causal attention of the package `ringattention` to q, k, v [B, T, N, H] over the axis "ring" of a mesh.

    Its sequence is contiguous.

    Raises:
      UnsupportedError: the package is missing, or cannot compute this problem.
    """
    library = _ringattention_library()
    block = q.shape[1] // mesh.shape["ring"]
    chunk = min(CHUNK, block)
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(f"has no grouped heads, here {q.shape[2]} on {k.shape[2]}")
    if block % chunk:
        raise UnsupportedError(f"blocks of {block} tokens do not divide into chunks of {chunk}")
    options = {
        "causal_block_size": 1,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "query_chunk_size": chunk,
        "key_chunk_size": chunk,
        "dtype": q.dtype,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": True,
    }

    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        return library.ring_attention(q, k, v, None, segment_ids, None, "ring", True, options)

    sequence = PartitionSpec(None, "ring")
    # Its loops start from arrays that are replicated, which the check of varying axes refuses.
    sharded = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(sequence, sequence, sequence, PartitionSpec()),
        out_specs=sequence,
        check_vma=False,
    )
    return sharded(q, k, v, segment_ids)


def _ringattention_library() -> Any:
    """Imports the package, which asks ``jax.lib.xla_bridge``, gone from JAX, for the platform."""
    bridge = types.SimpleNamespace(get_backend=lambda: types.SimpleNamespace(platform=jax.default_backend()))
    missing = not hasattr(jax.lib, "xla_bridge")
    if missing:
        setattr(jax.lib, "xla_bridge", bridge)  # noqa: B010 (a type checker knows no such attribute)
    try:
        return importlib.import_module("ringattention.ringattention_jax")
    except ImportError as error:
        raise UnsupportedError(f"cannot be imported ({error}); pip install 'agentic_ring[peers]'") from error
    finally:
        if missing:
            delattr(jax.lib, "xla_bridge")
