"""Kernel times of a profile from this machine, and of synthetic profiles in the form of GPUs and TPUs."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from agentic_ring.errors import DataError
from evals.utilisation.kernel_times import KernelTime, kernel_times, trace


def saved(tmp_path, *events):
    folder = tmp_path / "plugins" / "profile" / "2026_01_01"
    folder.mkdir(parents=True)
    with gzip.open(folder / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": list(events)}, file)
    return tmp_path


def label(kind, name, **place):
    return {"ph": "M", "name": kind, "args": {"name": name}, **place}


def event(name, start, duration, tid=1, pid=1, **args):
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "pid": pid, "tid": tid, "args": args}


def test_a_profile_of_this_machine_lists_its_operations(tmp_path):
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ x), x))
    x = jnp.ones((64, 64))
    jax.block_until_ready(step(x))
    found = trace(tmp_path, lambda: step(x))
    assert sum(kernel.share for kernel in found) == pytest.approx(1)
    assert [kernel.seconds for kernel in found] == sorted((k.seconds for k in found), reverse=True)
    assert any("tanh" in kernel.name and kernel.runs == 3 for kernel in found)
    assert not any(kernel.name.startswith("while") for kernel in found)


def test_a_gpu_is_read_by_its_streams(tmp_path):
    folder = saved(
        tmp_path,
        label("process_name", "/device:GPU:0", pid=1),
        label("process_name", "/host:CPU", pid=2),
        label("thread_name", "Stream #13(Compute)", pid=1, tid=1),
        label("thread_name", "XLA Ops", pid=1, tid=2),
        event("gemm_kernel", 0, 6e6),
        event("softmax_fusion.3", 6e6, 1e6),
        event("softmax_fusion.4", 7e6, 1e6),
        event("gemm_fusion_dot", 0, 6e6, tid=2),
        event("PjitFunction", 0, 9e6, pid=2),
    )
    assert kernel_times(folder) == [
        KernelTime("gemm_kernel", 6.0, 1, 0.75),
        KernelTime("softmax_fusion", 2.0, 2, 0.25),
    ]


def test_a_tpu_is_read_by_operations_less_what_runs_within(tmp_path):
    folder = saved(
        tmp_path,
        label("process_name", "/device:TPU:0", pid=1),
        label("thread_name", "XLA Ops", pid=1, tid=1),
        label("thread_name", "XLA Modules", pid=1, tid=2),
        event("jit_step", 0, 10e6, tid=2),
        event("while.1", 0, 10e6),
        event("fusion.2", 1e6, 3e6),
        event("copy.1", 2e6, 1e6),
        event("fusion.2", 5e6, 1e6),
    )
    assert [(kernel.name, kernel.seconds, kernel.runs) for kernel in kernel_times(folder)] == [
        ("fusion", 3.0, 2),
        ("copy", 1.0, 1),
    ]


def test_profiles_that_are_missing_broken_or_empty_are_named(tmp_path):
    with pytest.raises(DataError, match="save a profile there first"):
        kernel_times(tmp_path)
    folder = saved(tmp_path, event("PjitFunction", 0, 1))
    with pytest.raises(DataError, match="shows no kernels"):
        kernel_times(folder)
    next(folder.glob("plugins/profile/*/*")).write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"is no profile of jax\.profiler"):
        kernel_times(folder)
