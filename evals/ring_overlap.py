"""Overlap of ring attention's transfers with compute, read from the schedule of the compiled program.

    python evals/ring_overlap.py --hardware v5e --topology 4x4 --tokens 1048576

compiles attention, forward and backward, ahead of time for the hardware, and lists every
collective-permute with the work that the compiler has scheduled between its start and its done. Ring
attention costs nothing over attention where a hop's transfer is in flight during a hop's products
(arXiv 2310.01889, section 3) and takes less time than they do; the second is estimated from the
published rates of the hardware.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from agentic_ring.attention import MaskSpec, attention
from agentic_ring.device_memory import PlannedMemory
from agentic_ring.mesh import make_mesh, shape_with_ring
from agentic_ring.terminal import cli
from evals.compile.collective_schedule import exposed, parse, transfers
from evals.compile.compile_target import CompileTarget, compile_target
from evals.compile.hardware import HARDWARE, Hardware


@dataclass(frozen=True)
class AttentionProblem:
    """Self-attention over a ring; the flags of ``main`` describe the fields."""

    tokens: int
    ring: int
    batch: int = 1
    heads: int = 32
    key_heads: int = 32
    head_dim: int = 128
    causal: bool = True
    kernel: str = "auto"
    dtype: str = "bfloat16"

    def compile(self, target: CompileTarget) -> jax.stages.Compiled:
        """Compiles attention and its gradients; devices beyond the ring go to the data axis.

        Raises:
          DoesNotFitError: the program needs more memory than a device has.
        """
        mesh = make_mesh(shape_with_ring(self.ring, len(target.devices)), devices=target.devices)
        sharding = jax.NamedSharding(mesh, jax.P("data", "ring"))
        query, key = (
            jax.ShapeDtypeStruct(
                (self.batch, self.tokens, heads, self.head_dim), jnp.dtype(self.dtype), sharding=sharding
            )
            for heads in (self.heads, self.key_heads)
        )

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            mask = MaskSpec(causal=self.causal)
            return attention(q, k, v, mesh=mesh, mask=mask, kernel=self.kernel, strategy="ring")

        def both(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple:
            output, vjp = jax.vjp(attend, q, k, v)
            return output, vjp(d_output)

        return target.compile(jax.jit(both).lower(query, key, key, query))


def transfer_table(text: str, ring: int) -> Table:
    """Returns a table of all transfers of a compiled program, with the work that overlaps each."""
    entry = parse(text).entry
    table = Table("pass", "times", "sends", "MB", "kind", "products", "meanwhile", "in")
    for transfer in transfers(text):
        table.add_row(
            _direction(transfer.backward),
            str(transfer.times),
            transfer.array,
            f"{transfer.size / 1e6:.1f}",
            "hop" if transfer.cycle == ring else "exchange",
            str(transfer.matmuls) if transfer.hidden else "none",
            ", ".join(f"{count} {opcode}" for opcode, count in transfer.meanwhile.most_common()),
            "entry" if transfer.computation == entry else "loop",
        )
    return table


def _direction(backward: bool) -> str:
    return "backward" if backward else "forward"


def print_hop(problem: AttentionProblem, target: CompileTarget, temporary: int) -> None:
    """Prints the times of a hop's products and transfer at published rates, and the planned memory."""
    rates: Hardware = target.hardware
    sequences = problem.batch / (len(target.devices) // problem.ring)
    block, head_dim = problem.tokens / problem.ring, problem.head_dim
    products = 4 * sequences * problem.heads * head_dim * block**2 * (0.5 if problem.causal else 1)
    size = 2 * sequences * problem.key_heads * head_dim * block * jnp.dtype(problem.dtype).itemsize
    console = Console(width=200)
    console.print(
        f"one hop forward: products {1e3 * products / rates.flops:.3f} ms "
        f"at {rates.flops / 1e12:.0f} TFLOP/s, transfer {1e3 * size / rates.link_bandwidth:.3f} ms "
        f"at {rates.link_bandwidth / 1e9:.0f} GB/s"
    )
    console.print(
        f"temporary memory {temporary / 1e6:.0f} MB per device; "
        f"keys and values of one block take {size / 1e6:.0f} MB of it"
    )


def main(
    hardware: Literal[tuple(HARDWARE)],  # pyright: ignore[reportInvalidTypeForm]
    tokens: int,
    topology: str | None = None,
    devices: int | None = None,
    batch: int = 1,
    heads: int = 32,
    key_heads: int = 32,
    head_dim: int = 128,
    ring: int | None = None,
    causal: bool = True,
    kernel: str = "auto",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    compiler_options: dict[str, str] = {},  # noqa: B006 (never changed)
) -> None:
    """Prints every transfer of compiled ring attention and the work that overlaps it.

    Args:
      hardware: Hardware to compile for; it need not be present.
      tokens: Length of the whole sequence.
      topology: Arrangement of TPU chips, such as 4x4.
      devices: Number of GPUs.
      batch: Number of sequences.
      heads: Number of query heads.
      key_heads: Number of key and value heads.
      head_dim: Size of each head.
      ring: Devices of a ring; all of them if left out.
      causal: Whether tokens attend only to earlier tokens and themselves.
      kernel: Kernel that computes a hop.
      dtype: Type of queries, keys and values.
      compiler_options: XLA flags and their values, such as
        xla_gpu_experimental_parallel_collective_overlap_limit 2. Without it the GPU compiler keeps one
        transfer in flight at a time, and a hop of the backward pass waits for the gradients.
    """
    jax.config.update("jax_platforms", "cpu")  # where JAX keeps its constants while it compiles
    target = compile_target(hardware, topology, devices=devices)
    target = replace(target, compiler_options={**target.compiler_options, **compiler_options})
    ring = ring or len(target.devices)
    problem = AttentionProblem(tokens, ring, batch, heads, key_heads, head_dim, causal, kernel, dtype)
    compiled = problem.compile(target)
    text = compiled.as_text() or ""
    console = Console(width=200)
    console.print(transfer_table(text, ring))
    for transfer in exposed(text, ring):
        console.print(
            f"exposed: {transfer.name}, {transfer.size / 1e6:.1f} MB, {transfer.times} times, "
            f"{_direction(transfer.backward)}"
        )
    print_hop(problem, target, PlannedMemory.of(compiled).temporary)


if __name__ == "__main__":
    cli.run(main)
