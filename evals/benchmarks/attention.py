"""Attention: our strategies and other libraries on one problem, relative to each other and to products.

Operations are those that the mask needs: 4 * T * T * N * H for a forward pass, half as many with a causal
mask, and 3.5 times as many for forward and backward. ``share_of_matmul`` is a contender's rate over that of a
product of two square matrices on one device, timed before it in each round. Simulated devices share one
processor, so for them the rate is that of all devices together; otherwise it is per device.

Other libraries: ``jax.nn.dot_product_attention`` on one device, whose XLA implementation materialises all
scores, and the package of the paper's authors, ``ringattention`` 0.1.2, its pure JAX path.
"""

import importlib
import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding, SingleDeviceSharding

from agentic_ring.attention import Layout, MaskSpec, Strategy, attention, order
from agentic_ring.attention.cache import CachedAttentionInputs, CachedLayer, cache_specs
from agentic_ring.attention.cache.cached_attention import attend_new_tokens
from agentic_ring.attention.cache.kv_cache import CacheDtype, Stored, empty, store_like
from agentic_ring.attention.kernels.registry import select_kernel
from agentic_ring.attention.ring.layout import imbalance, tile_counts
from agentic_ring.device_memory import DoesNotFitError, PlannedMemory, check_memory
from agentic_ring.errors import MeshError
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.results.timing import Spread, square_product, square_product_flops, time_interleaved
from evals.benchmarks.emulated_ring import EmulatedRing
from evals.benchmarks.rows import Line, UnsupportedError

Direction = Literal["forward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(frozen=True)
class Problem:
    """One layer of self-attention of T ``tokens``, with N ``heads`` of size H, ``head_dim``; batch 1."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"
    mask: MaskSpec = MaskSpec(causal=True)  # noqa: RUF009 (frozen)

    def flops(self, direction: Direction) -> float:
        """Returns the operations that the mask needs; see the module."""
        pairs = self.tokens**2 / (2 if self.mask.causal else 1)
        forward = 4 * pairs * self.heads * self.head_dim
        return forward if direction == "forward" else 3.5 * forward

    def arrays(self, sharding: Sharding) -> tuple[jax.Array, ...]:
        """Returns standard normal (q, k, v, d_output) with this sharding."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)

        def make(key: jax.Array) -> tuple[jax.Array, ...]:
            shapes = [(1, self.tokens, count, self.head_dim) for count in heads]
            keys = zip(jax.random.split(key, len(heads)), shapes, strict=True)
            return tuple(jax.random.normal(key, shape, self.dtype) for key, shape in keys)

        return jax.jit(make, out_shardings=sharding)(jax.random.key(0))


@dataclass(frozen=True)
class Contender:
    """An implementation of attention."""

    name: str
    forward: Callable[..., Any]
    """Function of (q, k, v)."""
    both: Callable[..., Any]
    """Function of (q, k, v, d_output) that returns the output and the three gradients."""
    sharding: Sharding = field(default_factory=lambda: SingleDeviceSharding(jax.devices()[0]))
    """Sharding of the arguments; one device by default."""
    others: tuple[Any, ...] = ()
    """Further arguments of both functions."""

    @classmethod
    def of(cls, name: str, attend: Callable[..., jax.Array], *placing: Any) -> "Contender":
        """Makes a contender of a differentiable function; ``placing`` are ``sharding`` and ``others``."""

        def both(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array, *others: Any) -> tuple:
            output, transpose = jax.vjp(lambda q, k, v: attend(q, k, v, *others), q, k, v)
            return output, *transpose(d_output)

        return cls(name, attend, both, *placing)

    def compiled(self, direction: Direction, arrays: Sequence[jax.Array]) -> tuple[Callable[[], Any], int]:
        """Returns a program with its arguments, and its temporary bytes per device, if it fits."""
        function, count = (self.forward, 3) if direction == "forward" else (self.both, 4)
        arguments = *arrays[:count], *self.others
        compiled = jax.jit(function).lower(*arguments).compile()
        memory, devices = PlannedMemory.of(compiled), len(self.sharding.device_set)
        check_memory(memory.total * devices, devices)
        return partial(compiled, *arguments), memory.temporary


def compare(
    problem: Problem,
    contenders: Sequence[Contender],
    references: Sequence[str],
    rounds: int,
    calls: int = 1,
    directions: Sequence[Direction] = DIRECTIONS,
) -> list[Line]:
    """Times every contender that can compute the problem.

    One that does not support the problem, or needs more memory than there is, is left out with the reason,
    before it runs. All are compared with the ``references``; ``rounds`` and ``calls`` are those of
    ``time_interleaved``.
    """
    programs: list[tuple[Contender, Direction, Callable[[], Any], int]] = []
    lines: list[Line] = []
    arrays = {sharding: problem.arrays(sharding) for sharding in {each.sharding for each in contenders}}
    for contender, direction in itertools.product(contenders, directions):
        try:
            compiled = contender.compiled(direction, arrays[contender.sharding])
            programs.append((contender, direction, *compiled))
        except (UnsupportedError, MeshError, DoesNotFitError) as reason:
            lines.append(Line(direction, contender.name, None, left_out=str(reason)))
    multiply = square_product(problem.dtype)
    # The reference before each program, not once per round: the load may change within a round.
    functions = [function for *_, run, _ in programs for function in (multiply, run)]
    times = time_interleaved(rounds, *functions, calls=calls)
    names = [(contender.name, direction) for contender, direction, *_ in programs]
    measured = dict(zip(names, times[1::2], strict=True))
    for (contender, direction, _, temp_bytes), products in zip(programs, times[::2], strict=True):
        name, flops = contender.name, problem.flops(direction)
        seconds = measured[name, direction]
        devices = len(contender.sharding.device_set)
        processors = devices if jax.default_backend() != "cpu" else 1
        share = flops / (square_product_flops() * processors)
        details = {"devices": devices, "temp_bytes": temp_bytes}
        details |= {"tflops": flops / Spread.of(seconds).median / 1e12}
        details |= Spread.ratio([share * x for x in products], seconds).cells("share_of_matmul")
        others = {other: measured.get((other, direction)) for other in references if other != name}
        ratios = {other: Spread.ratio(seconds, known) for other, known in others.items() if known}
        lines.append(Line(direction, name, Spread.of(seconds), "s", ratios, details))
    return lines


def plain(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    contenders: Sequence[str],
    rounds: int,
    calls: int = 1,
    devices: int = 1,
    dtype: str = "float32",
    kernel: str = "auto",
    jax_nn: str = "xla",
) -> list[Line]:
    """Times our strategies over a ring of ``devices`` beside attention on one device and other libraries.

    Args:
      contenders: our strategies; "one device", "emulated ring of 8", "jax.nn", "ringattention".
      kernel: kernel of our own contenders.
      jax_nn: implementation of ``jax.nn.dot_product_attention``.
    """
    mesh, sequence = _ring(devices)
    emulated = EmulatedRing(select_kernel(kernel), 8, MaskSpec(causal=True))
    dot_product_attention: Any = jax.nn.dot_product_attention
    ours = [
        Contender.of(name, partial(attention, mesh=mesh, strategy=name, kernel=kernel), sequence)
        for name in get_args(Strategy)
    ]
    references = [
        Contender.of("one device", partial(attention, kernel=kernel)),
        Contender("emulated ring of 8", emulated.forward, emulated.both),
        Contender.of("jax.nn", partial(dot_product_attention, is_causal=True, implementation=jax_nn)),
        Contender.of("ringattention", partial(ringattention, mesh=mesh), sequence),
    ]
    known = {each.name: each for each in [*ours, *references]}
    problem = Problem(tokens, heads, kv_heads, head_dim, dtype)
    names = [each.name for each in references]
    return compare(problem, [known[name] for name in contenders], names, rounds, calls)


def _ring(devices: int) -> tuple[Mesh, Sharding]:
    """A mesh whose axis "ring" has so many devices, and the sharding of a sequence over it."""
    mesh = make_mesh(MeshShape(ring=devices), jax.devices()[:devices])
    return mesh, jax.NamedSharding(mesh, jax.P(None, "ring"))


def packed(
    tokens: int,
    documents: Sequence[int],
    rings: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    rounds: int,
) -> list[Line]:
    """Times rows of packed documents, by median length of the documents and by layout.

    The first row of each ring is one document as long as the sequence; "live" is the share of the causal
    pairs that lie in one document, and the critical path that of the slowest device's tiles over the ideal.
    """
    problem, lines = Problem(tokens, heads, kv_heads, head_dim), []
    for ring in rings:
        mesh, sharding = _ring(ring)
        layouts: tuple[Layout, ...] = ("zigzag", "block_striped") if ring > 1 else ("contiguous",)
        contenders, details = [], {}
        for median in (None, *documents):
            segments = packed_row(tokens, median)
            lengths = np.bincount(segments[0])
            live = float((lengths * (lengths + 1)).sum() / (tokens * (tokens + 1)))
            packing = "one document" if median is None else f"documents of {median}"
            for layout in layouts:
                name = f"{packing}, {layout}, ring of {ring}"
                placed = jax.device_put(segments[:, order(layout, tokens, ring)], sharding)
                ours = partial(attention, mesh=mesh, layout=layout, permuted=ring > 1)
                attend = partial(lambda ours, q, k, v, ids: ours(q, k, v, segment_ids=ids), ours)
                contenders.append(Contender.of(name, attend, sharding, (placed,)))
                tiles = tile_counts(layout, ring, tokens, problem.mask, segments)
                details[name] = {"live": live, "critical_path": imbalance(tiles)}
            name, peer = f"{packing}, ringattention, ring of {ring}", partial(ringattention, mesh=mesh)
            contenders.append(Contender.of(name, peer, sharding, (jax.device_put(segments, sharding),)))
        names = [each.name for each in contenders]
        for line in compare(problem, contenders, names, rounds, directions=("forward+backward",)):
            packing, layout, _ = line.contender.split(", ")
            references = (f"{packing}, zigzag, ", f"one document, {layout}, ")
            ratios = {name: x for name, x in line.ratios.items() if name.startswith(references)}
            more = details.get(line.contender, {})
            lines.append(replace(line, ratios=ratios, details={**line.details, **more}))
    return lines


def packed_row(tokens: int, median: int | None) -> np.ndarray:
    """Segment ids [1, tokens] of documents of log-normal lengths about ``median``; None is one document."""
    if median is None:
        return np.zeros((1, tokens), np.int32)
    lengths = np.random.default_rng(median).lognormal(np.log(median), 1.0, size=10 + 10 * tokens // median)
    return np.repeat(np.arange(len(lengths)), lengths.astype(int) + 1)[None, :tokens].astype(np.int32)


def ringattention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None = None, *, mesh: Mesh
) -> jax.Array:
    """Causal attention of the package `ringattention` to q, k, v [B, T, N, H] over the axis "ring" of a mesh.

    Its sequence is contiguous. What it cannot compute is an UnsupportedError.
    """
    library = _ringattention_library()
    block = q.shape[1] // mesh.shape["ring"]
    chunk = min(512, block)  # as in its README
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(f"has no grouped heads, here {q.shape[2]} on {k.shape[2]}")
    if block % chunk:
        raise UnsupportedError(f"blocks of {block} tokens do not divide into chunks of {chunk}")
    options: dict[str, Any] = {"causal_block_size": 1, "query_chunk_size": chunk, "key_chunk_size": chunk}
    options |= {"deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0, "dtype": q.dtype}
    options |= {"policy": jax.checkpoint_policies.nothing_saveable, "precision": None, "prevent_cse": True}

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


def decode(
    cached: int,
    dtypes: Sequence[CacheDtype],
    query_dtypes: Sequence[str],
    heads: int,
    kv_heads: int,
    head_dim: int,
    rounds: int,
    calls: int,
) -> list[Line]:
    """Times one layer's attention of one new token to ``cached`` tokens, batch 1, on one device.

    A step computes little and reads every key and value, so memory bandwidth limits its speed. It is measured
    interleaved with the steps, by summing a float32 array of as many bytes as the cache has. ``dtypes`` are
    those of the cache, ``query_dtypes`` of the new token's query, key and value.

    Returns bytes of the cache that a step reads per second, and its time over that of reading them once.
    """
    rules, (mesh, _) = ShardingRules(), _ring(1)
    lines = []
    for dtype in dtypes:
        with jax.set_mesh(mesh):
            specs = cache_specs(rules, dtype, layers=1).layer(0)
            shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
            shape = (1, kv_heads, cached, head_dim)
            like = jax.eval_shape(partial(empty, shape, dtype))
            past = jax.jit(partial(_filled, shape, like), out_shardings=shardings)(jax.random.key(0))
            cache_bytes = sum(x.nbytes for x in jax.tree.leaves((past.keys, past.values)))
            # As many bytes as the cache has, but more than any processor's cache holds.
            numbers = jnp.ones(max(cache_bytes, 1 << 28) // 4)

            def attend(past: CachedLayer, query: jax.Array, new: jax.Array) -> jax.Array:
                position = jnp.full((1, 1), cached, jnp.int32)
                return attend_new_tokens(CachedAttentionInputs(query, new, new, position, past), rules)

            steps = []
            for query_dtype in query_dtypes:
                query, new = (jnp.ones((1, 1, count, head_dim), query_dtype) for count in (heads, kv_heads))
                steps.append(partial(jax.jit(attend), past, query, new))
            read = partial(jax.jit(jnp.sum), numbers)
            reading, *times = time_interleaved(rounds, read, *steps, calls=calls)
        once = [seconds * cache_bytes / numbers.nbytes for seconds in reading]
        for query_dtype, seconds in zip(query_dtypes, times, strict=True):
            rate = Spread.of(cache_bytes / x / 1e9 for x in seconds)
            ratios = {"reading the cache": Spread.ratio(seconds, once)}
            details = {"cache_bytes": cache_bytes, "seconds": Spread.of(seconds).median}
            details |= {"read_gigabytes_per_second": cache_bytes / Spread.of(once).median / 1e9}
            lines.append(Line(f"{query_dtype} query", f"{dtype} cache", rate, "GB/s", ratios, details))
    return lines


def _filled(shape: tuple[int, ...], like: Stored, key: jax.Array) -> CachedLayer:
    keys, values = (store_like(jax.random.normal(k, shape), like) for k in jax.random.split(key))
    return CachedLayer(keys, values, jnp.arange(shape[2], dtype=jnp.int32)[None])
