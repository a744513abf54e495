"""Describes the devices, and how ``attention`` of given shapes would run on them and why.

python -m agentic_ring --tokens 1048576 --heads 32 --kv-heads 8 --ring 4 --window 4096
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.choose_strategy import HARDWARE
from agentic_ring.attention.explain import Explanation, explain
from agentic_ring.attention.inputs import LAYOUTS, Layout, Schedule, Strategy
from agentic_ring.attention.mask import MaskSpec
from agentic_ring.attention.ring.layout import imbalance, tile_counts
from agentic_ring.device_memory import bytes_limit
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, make_mesh, simulate_cpu_devices
from agentic_ring.provenance import hardware, versions
from agentic_ring.terminal import cli


def main(
    tokens: int = 32768,
    batch: int = 1,
    heads: int = 32,
    kv_heads: int | None = None,
    head_dim: int = 128,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    bidirectional: bool = False,
    window: int | None = None,
    prefix: int = 0,
    segments: bool = False,
    packing: Path | None = None,
    soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    strategy: Strategy | Literal["auto"] = "auto",
    schedule: Schedule = "unidirectional",
    layout: Layout | Literal["auto"] = "auto",
    data: int = 1,
    fsdp: int = 1,
    ring: int | None = None,
    tensor: int = 1,
    simulated_devices: int | None = None,
) -> None:
    """Prints the devices, the mesh, and the strategy, layout and kernels of one attention call.

    Nothing is computed, so a call of any size can be described.

    Args:
      tokens: Length of the sequence, in tokens.
      batch: Number of sequences.
      heads: Number of query heads.
      kv_heads: Number of key/value heads. Default: as many as query heads.
      head_dim: Dimension of a head.
      dtype: Data type of queries, keys and values.
      bidirectional: Tokens also attend to later tokens; by default the mask is causal.
      window: Size of a sliding window: tokens attend only to tokens nearer than this. Default: no window.
      prefix: Number of tokens at the start that every token attends to.
      segments: The call has segment ids.
      packing: File of packed rows, as data_prep.sharegpt writes it: the call has their length and segment
        ids, and how evenly each layout shares their work is printed too.
      soft_cap: Soft cap of the scores. Default: no cap.
      dropout_rate: Share of the attention probabilities that is dropped.
      strategy: Strategy by which devices share the sequence; "auto" follows the rule of attention.
      schedule: Directions in which key blocks travel round the ring.
      layout: Order of the sequence over the ring.
      data: Number of devices on the mesh axis data.
      fsdp: Number of devices on the mesh axis fsdp.
      ring: Number of devices on the mesh axis ring. Default: all that the other axes leave over.
      tensor: Number of devices on the mesh axis tensor.
      simulated_devices: Number of devices that one CPU simulates, where JAX finds no accelerator.
    """
    sizes = {"tokens": tokens, "batch": batch, "heads": heads, "kv-heads": kv_heads, "head-dim": head_dim}
    for name, size in {**sizes, "simulated-devices": simulated_devices}.items():
        if size is not None and size < 1:
            raise ArgumentError(f"--{name} is {size}; it must be at least 1")
    if simulated_devices is not None:
        simulate_cpu_devices(simulated_devices)
    mesh = make_mesh(MeshShape(data=data, fsdp=fsdp, ring=ring, tensor=tensor))
    mask, balance = MaskSpec(causal=not bidirectional, window=window, prefix=prefix), ()
    if packing is not None:
        from agentic_ring.data.text.packing import PackedRows  # needs h5py, which the rest does without

        with PackedRows.open(packing) as rows:
            # So many show the balance.
            packed = [rows[index] for index in range(min(len(rows), 16))]
        ids = np.stack([row.segment_ids for row in packed])
        hidden_from = np.stack([row.hidden_from() for row in packed])
        tokens, segments = ids.shape[1], True
        balance = (_balance(ids, hidden_from, mesh.shape["ring"], mask),)
    key_heads = heads if kv_heads is None else kv_heads
    q, k = (jax.ShapeDtypeStruct((batch, tokens, n, head_dim), jnp.dtype(dtype)) for n in (heads, key_heads))
    options = {"mask": mask, "soft_cap": soft_cap, "dropout_rate": dropout_rate}
    options |= {"strategy": strategy, "schedule": schedule, "layout": layout}
    explanation = explain(q, k, k, mesh=mesh, segments=segments, **options)
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(describe_devices(), f"mesh       {axes}", *_attention(explanation), *balance, sep="\n")


def describe_devices() -> str:
    """The versions of JAX and Python, and every kind of device that JAX computes on."""
    found, package = hardware(), versions()
    lines = [f"Python {package['python']}, JAX {package['jax']}, jaxlib {package['jaxlib']}"]
    memory = [size for device in jax.local_devices() if (size := bytes_limit(device))]
    simulated = ", simulated: they share one CPU" if found["simulated"] else ""
    lines.append(
        f"devices    {found['devices']} x {found['device_kind']}, platform {found['platform']}, "
        f"{found['processes']} process{'es' if found['processes'] > 1 else ''}{simulated}"
    )
    if memory:
        lines.append(f"memory     {min(memory) / 2**30:.1f} GiB per device")
    host = found["memory_gib"]
    lines.append(f"host       {found['cpu']}, {found['cores']} cores" + (f", {host} GiB" if host else ""))
    return "\n".join(lines)


def _balance(segment_ids: np.ndarray, hidden_from: np.ndarray, ring: int, mask: MaskSpec) -> str:
    """How evenly each layout shares the work of packed rows, int [rows, tokens], among ``ring`` devices."""
    rows, length = segment_ids.shape
    counted = {name: tile_counts(name, ring, length, mask, segment_ids, hidden_from) for name in LAYOUTS}
    values = ", ".join(f"{name} {imbalance(tiles):.2f}" for name, tiles in counted.items())
    return f"balance    slowest device over ideal, {rows} packed rows over {ring} devices: {values}"


def _attention(explanation: Explanation) -> Iterator[str]:
    """The strategy and its reason, the estimates, the layout, the tiles and the kernels."""
    decision = explanation.decision
    sharded, shapes = decision.plan.sharded, decision.shapes
    yield f"strategy   {decision.choice.strategy}: {decision.choice.reason}"
    for strategy, reason in explanation.others.items():
        yield f"    not {strategy}: {reason}"
    if explanation.estimates:
        yield f"estimates  for {HARDWARE[decision.platform].name}, forward and backward of one call"
    for strategy, estimate in explanation.estimates.items():
        yield f"    {strategy}: {estimate}"
    degree = f", heads exchanged among {sharded.ulysses} devices" if sharded.ulysses > 1 else ""
    yield f"layout     {sharded.layout}, {sharded.options.schedule} schedule{degree}"
    yield (
        f"per device {shapes.batch} x {explanation.tokens // shapes.ring} tokens of a sequence of "
        f"{explanation.tokens}, {shapes.heads} query and {shapes.key_heads} key heads of {shapes.head_dim}"
    )
    yield "tiles, and the kernel that takes them"
    for text in dict.fromkeys(map(str, explanation.calls)):  # forward and backward see the same tiles
        calls = (call for call in explanation.calls if str(call) == text)
        yield f"    {text}: {', '.join(f'{call.direction} {explanation.kernels[call]}' for call in calls)}"
    yield "kernels, regardless of memory"
    for name, refusals in explanation.refusals.items():
        if not refusals:
            yield f"    {name}: takes all tiles"
        for reason in dict.fromkeys(refusals.values()):
            refused = [f"{call.direction} of {call}" for call in refusals if refusals[call] == reason]
            which = "" if len(refused) == len(explanation.calls) else f" {'; '.join(refused)}"
            yield f"    {name}: refuses{which}: {reason}"


if __name__ == "__main__":
    cli.run(main, prog="python -m agentic_ring", description=__doc__)
