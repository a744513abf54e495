"""Measures the rates that one device reaches in each part of a training step.

The parts are those of ``projection``: a layer without its attention, logits with their loss, the
attention kernel on a block and on the tiles of other hops, a pass over memory; with several devices
also one hop's transfer and a gather of weights. A product of square matrices gives the peak of devices
whose specification is unknown.

Simulated devices all compute a part at the same time, as they do in a step, and the rate is that of the
processor that they share: one device by itself would leave cores idle. Gathers of weights are copies
there, and part of the rates of layer and head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.attention import MaskSpec, attention
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.llama import Llama, LlamaConfig, TokenBatch
from agentic_ring.models.transformer import Block
from agentic_ring.results.timing import square_product, square_product_flops
from evals.utilisation.flops import BACKWARD, attention_forward, head_products, layer_products, layer_weights
from evals.utilisation.projection import ATTENTION_BACKWARD, forwards, hop_bytes
from evals.utilisation.rates import Rates

MEMORY_BYTES = 2**28
"""Bytes of the array that the pass over memory reads and writes: more than any cache."""

_INFINITE = float("inf")
"""Rate of links that do not exist."""


@dataclass(frozen=True)
class Probe:
    """A part of a step that can be timed.

    Attributes:
      make: compiles it, makes its arrays and returns a function that runs it once.
      work: operations or bytes per run.
    """

    make: Callable[[], Callable[[], Any]]
    work: float


def probes(config: LlamaConfig, block: int, mesh: Mesh) -> dict[str, Probe]:
    """Returns the probes by name whose seconds ``rates`` needs.

    Args:
      config: the model whose parts are timed.
      block: tokens of a sequence per device; even.
      mesh: all devices along its ring; transfers are timed where there are several.
    """
    stack, dtype = config.transformer, jnp.dtype(config.transformer.dtype)
    devices = list(mesh.devices.flat) if simulated() else [mesh.devices.flat[0]]
    parts = _Parts(config, block, make_mesh(MeshShape(fsdp=len(devices), ring=1), devices))
    tokens, pairs = parts.rows * block, attention_forward(stack, parts.rows * block**2 / 2)
    found = {
        "matmul": Probe(partial(square_product, dtype), square_product_flops()),
        "layer": Probe(parts.layer, (forwards(stack) + BACKWARD) * tokens * layer_products(stack)),
        "head": Probe(parts.head, (1 + BACKWARD) * tokens * head_products(stack, config.vocab_size)),
        "memory": Probe(parts.memory, 2 * MEMORY_BYTES),
    }
    for name, kernel in (
        ("causal", _Attention(parts, 1, block, MaskSpec(causal=True))),
        ("full", _Attention(parts, 2, block // 2, MaskSpec(causal=False))),
    ):
        found[f"{name}_forward"] = Probe(kernel.forward, pairs)
        found[f"{name}_backward"] = Probe(kernel.backward, ATTENTION_BACKWARD * pairs)
    if mesh.size > 1:
        sent = hop_bytes(stack, block, dtype.itemsize)
        found["link"] = Probe(partial(_hop, mesh, int(sent), dtype), sent)
    if mesh.size > 1 and not simulated():
        weights = layer_weights(stack) // mesh.size * mesh.size
        received = weights * dtype.itemsize * (mesh.size - 1) / mesh.size
        found["collective"] = Probe(partial(_gather, mesh, weights, dtype), received)
    return found


def simulated() -> bool:
    """Whether devices share one processor."""
    return jax.default_backend() == "cpu"


def rates(probes: Mapping[str, Probe], seconds: Mapping[str, float], peak: float | None) -> Rates:
    """Returns the rates, from the seconds per run of each probe.

    Args:
      probes: result of ``probes``.
      seconds: seconds by the same names.
      peak: operations per second of which a utilisation is a share; by default the matrix product's.
    """
    reached = {name: probe.work / seconds[name] for name, probe in probes.items()}
    links = {"link": _INFINITE, "collective": _INFINITE}
    matmul, products = reached.pop("matmul"), reached.pop("layer")
    return Rates(products=products, peak=peak or matmul, **(links | reached))


@dataclass(frozen=True)
class _Parts:
    """Parts of a step with one sequence per device.

    Attributes:
      config: configuration of the model.
      block: tokens per sequence.
      mesh: one device, or all simulated ones.
    """

    config: LlamaConfig
    block: int
    mesh: Mesh

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self.mesh.size

    def compiled(self, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """Compiles a function and returns a call of it with these arguments."""
        with jax.set_mesh(self.mesh):
            return partial(jax.jit(function).lower(*arguments).compile(), *arguments)

    def rows_of(self, make: Callable[[], Any]) -> Any:
        """Returns the result of ``make``, sharded by rows."""
        return jax.jit(make, out_shardings=NamedSharding(self.mesh, PartitionSpec("fsdp")))()

    def layer(self) -> Callable[[], Any]:
        """Computes the gradients of a layer without its attention."""
        stack = self.config.transformer
        graph, params = self._module(lambda: Block(jax.random.key(0), stack))
        groups = stack.heads // stack.key_value_heads

        def layer(params: Any, x: jax.Array) -> jax.Array:
            parts: Block = nnx.merge(graph, params)
            query, key, value = parts.attention.project(x, jnp.arange(self.block)[None])
            # Keys and values must not be optimised away.
            heads = query + jnp.repeat(key + value, groups, axis=2)
            return parts.feedforward(x + parts.attention.combine(heads))

        kept = layer if stack.remat == "none" else jax.checkpoint(layer)
        gradients = jax.grad(lambda params, x: kept(params, x).astype(jnp.float32).sum(), argnums=(0, 1))
        x = self.rows_of(lambda: jnp.ones((self.rows, self.block, stack.width), stack.dtype))
        return self.compiled(gradients, params, x)

    def head(self) -> Callable[[], Any]:
        """Computes the gradients of a model without layers: embedding, logits and loss."""
        bare = replace(self.config, transformer=replace(self.config.transformer, layers=0))
        graph, params = self._module(lambda: Llama(jax.random.key(0), bare))

        def loss(params: Any, batch: TokenBatch) -> jax.Array:
            model: Llama = nnx.merge(graph, params)
            return model.cross_entropy(batch).sum()

        ones = self.rows_of(lambda: jnp.ones((self.rows, self.block), jnp.int32))
        weight = self.rows_of(lambda: jnp.ones((self.rows, self.block)))
        return self.compiled(jax.grad(loss), params, TokenBatch(ones, ones, weight, ones, None, None))

    def memory(self) -> Callable[[], Any]:
        """Reads and writes an array, as an update does with its donated state."""
        array = self.rows_of(lambda: jnp.ones(MEMORY_BYTES // 4))
        add = jax.jit(lambda x: x + 1, donate_argnums=0)

        def run() -> Any:
            nonlocal array
            array = add(array)
            return array

        return run

    def _module(self, build: Callable[[], nnx.Module]) -> tuple[Any, Any]:
        """Returns a module's structure, and its parameters with the sharding of a step."""
        graph, abstract = nnx.split(jax.eval_shape(build))
        rules = self.config.transformer.rules
        shardings = jax.tree.map(
            lambda p: rules.sharding(self.mesh, p.shape, p.get_metadata()["logical_axes"]),
            abstract,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
        make = jax.jit(
            lambda: nnx.to_pure_dict(nnx.split(build())[1]), out_shardings=nnx.to_pure_dict(shardings)
        )
        return graph, make()


@dataclass(frozen=True)
class _Attention:
    """The attention kernel: ``rows`` of ``tokens`` queries and as many keys for each sequence."""

    parts: _Parts
    rows: int
    tokens: int
    mask: MaskSpec

    def forward(self) -> Callable[[], Any]:
        """Runs the forward pass."""
        return self.parts.compiled(self._attend, *self._arrays())

    def backward(self) -> Callable[[], Any]:
        """Runs the backward pass of a stored forward pass."""
        output, transpose = self.parts.compiled(partial(jax.vjp, self._attend), *self._arrays())()
        return self.parts.compiled(lambda transpose, d_output: transpose(d_output), transpose, output)

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, mask=self.mask, kernel=self.parts.config.transformer.attention_kernel)

    def _arrays(self) -> list[jax.Array]:
        stack, rows = self.parts.config.transformer, self.rows * self.parts.rows

        def make(heads: int) -> jax.Array:
            shape = (rows, self.tokens, heads, stack.head_dim)
            # Values of many sizes; random ones would take longer to compile than a kernel.
            return jnp.sin(jnp.arange(prod(shape), dtype=jnp.float32)).reshape(shape).astype(stack.dtype)

        heads = (stack.heads, stack.key_value_heads, stack.key_value_heads)
        return [self.parts.rows_of(partial(make, count)) for count in heads]


def _hop(mesh: Mesh, sent: int, dtype: jnp.dtype) -> Callable[[], Any]:
    """Sends ``sent`` bytes from every device to the next."""
    pairs = [(device, (device + 1) % mesh.size) for device in range(mesh.size)]
    spec = PartitionSpec("ring")
    shift = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "ring", pairs), mesh=mesh, in_specs=spec, out_specs=spec
    )
    return partial(jax.jit(shift), _spread(mesh, mesh.size * (sent // dtype.itemsize), dtype))


def _gather(mesh: Mesh, numbers: int, dtype: jnp.dtype) -> Callable[[], Any]:
    """Gathers an array that all devices hold a part of."""
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return partial(gather, _spread(mesh, numbers, dtype))


def _spread(mesh: Mesh, numbers: int, dtype: jnp.dtype) -> jax.Array:
    make = jax.jit(lambda: jnp.ones(numbers, dtype), out_shardings=NamedSharding(mesh, PartitionSpec("ring")))
    return make()
