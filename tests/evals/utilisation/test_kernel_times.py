"""Kernel times of a profile from this machine, and of synthetic profiles in the form of GPUs and TPUs."""

from itertools import count

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from agentic_ring.errors import DataError
from evals.utilisation.kernel_times import kernel_times, trace


def saved(tmp_path, **planes):
    """Saves a profile: by plane its lines, by line its events (name, start, duration) in seconds."""
    text, ids = "", count(1)
    for plane, lines in planes.items():
        text += f'planes {{ name: "/{plane.replace("_", ":")}"\n'
        for line, named in lines.items():
            events = ""
            for id, (name, start, duration) in zip(ids, named, strict=False):
                text += f'event_metadata {{ key: {id} value {{ id: {id} name: "{name}" }} }}\n'
                times = f"offset_ps: {int(start * 1e12)} duration_ps: {int(duration * 1e12)}"
                events += f"events {{ metadata_id: {id} {times} }}\n"
            text += f'lines {{ name: "{line}"\n{events}}}\n'
        text += "}\n"
    path = tmp_path / "plugins" / "profile" / "2026_01_01" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return tmp_path


def test_a_profile_of_this_machine_lists_its_operations(tmp_path):
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ x), x))
    x = jnp.ones((64, 64))
    jax.block_until_ready(step(x))
    found = trace(tmp_path, lambda: step(x))
    assert sum(kernel.share for kernel in found) == pytest.approx(1)
    assert any("tanh" in kernel.name and kernel.runs == 3 for kernel in found)
    assert not any(kernel.name.startswith("while") for kernel in found)


def test_a_gpu_is_read_by_its_streams_and_a_tpu_by_operations_less_what_runs_within(tmp_path):
    stream = [("gemm_kernel", 0, 6), ("softmax_fusion.3", 6, 1), ("softmax_fusion.4", 7, 1)]
    lines = {"Stream #13(Compute)": stream, "XLA Ops": [("gemm_fusion_dot", 0, 6)]}
    gpu = saved(tmp_path / "gpu", device_GPU_0=lines, host_CPU={"python": [("PjitFunction", 0, 9)]})
    assert kernel_times(gpu) == [("gemm_kernel", 6.0, 1, 0.75), ("softmax_fusion", 2.0, 2, 0.25)]
    loop = ("%while.1 = (f32[8]) while(f32[8] %x)", 0, 10)
    operations = [loop, ("fusion.2", 1, 3), ("copy.1", 2, 1), ("fusion.2", 5, 1)]
    lines = {"XLA Ops": operations, "XLA Modules": [("jit_step", 0, 10)]}
    found = kernel_times(saved(tmp_path / "tpu", device_TPU_0=lines))
    assert [kernel[:3] for kernel in found] == [("fusion", 3.0, 2), ("copy", 1.0, 1)]


def test_profiles_that_are_missing_or_empty_are_named(tmp_path):
    with pytest.raises(DataError, match=str(tmp_path)):
        kernel_times(tmp_path)
    folder = saved(tmp_path, host_CPU={"python": [("PjitFunction", 0, 1)]})
    with pytest.raises(DataError, match=r"xplane\.pb shows no kernels"):
        kernel_times(folder)
