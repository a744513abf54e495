"""Text that describes the devices of this machine, a mesh, and how attention would run on it."""

from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.attention.cost_model import HARDWARE
from agentic_ring.attention.explain import Explanation
from agentic_ring.attention.inputs import LAYOUTS
from agentic_ring.attention.mask import MaskSpec
from agentic_ring.attention.ring.balance import imbalance, tile_counts
from agentic_ring.device_memory import bytes_limit
from agentic_ring.provenance import hardware, versions


def describe_devices() -> str:
    """The versions of JAX and Python, and every kind of device that JAX computes on."""
    found, package = hardware(), versions()
    lines = [f"Python {package['python']}, JAX {package['jax']}, jaxlib {package['jaxlib']}"]
    memory = [bytes_limit(device) for device in jax.local_devices()]
    simulated = ", simulated: they share one CPU" if found["simulated"] else ""
    lines.append(
        f"devices    {found['devices']} x {found['device_kind']}, platform {found['platform']}, "
        f"{found['processes']} process{'es' if found['processes'] > 1 else ''}{simulated}"
    )
    if any(memory):
        lines.append(f"memory     {min(size for size in memory if size) / 2**30:.1f} GiB per device")
    host = found["memory_gib"]
    lines.append(f"host       {found['cpu']}, {found['cores']} cores" + (f", {host} GiB" if host else ""))
    return "\n".join(lines)


def describe_mesh(mesh: Mesh) -> str:
    """The axes of the mesh and their sizes."""
    return "mesh       " + " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def describe_attention(explanation: Explanation) -> str:
    """The strategy and its reason, the estimates, the layout, the tiles and the kernels."""
    return "\n".join(_attention_lines(explanation))


def describe_balance(segment_ids: np.ndarray, ring: int, mask: MaskSpec) -> str:
    """How evenly each layout shares the work of packed rows among ``ring`` devices.

    Args:
      segment_ids: int [rows, tokens].
      ring: number of devices that share a row.
      mask: the static part of the mask.
    """
    rows, length = segment_ids.shape
    found = {layout: imbalance(tile_counts(layout, ring, length, mask, segment_ids)) for layout in LAYOUTS}
    values = ", ".join(f"{layout} {value:.2f}" for layout, value in found.items())
    return f"balance    slowest device over ideal, {rows} packed rows over {ring} devices: {values}"


def _attention_lines(explanation: Explanation) -> Iterator[str]:
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
