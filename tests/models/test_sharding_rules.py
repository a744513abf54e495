"""Models on meshes of any axis names: the sharding rules decide, and no device holds all logits."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from agentic_ring.errors import MeshError
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.mesh import ShardingRules, make_mesh
from agentic_ring.models.llama import load_pretrained
from tests.models.llama_cases import LENGTH, ROWS, VOCAB, logits, tokens, write_model


def mesh_of(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


CASES = {
    "renamed": (
        {"rows": 2, "sp": 4},
        ShardingRules(("rows",), ("sp",), embed=("rows", "sp"), heads=(), ffn=(), vocab=()),
    ),
    "double ring": (
        {"data": 1, "fsdp": 1, "outer": 2, "inner": 2, "tensor": 2},
        ShardingRules(("data", "fsdp"), ("outer", "inner"), embed=("fsdp", "outer", "inner")),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_whatever_the_axes_are_called(case, folder):
    mesh, rules = mesh_of(**CASES[case][0]), CASES[case][1]
    model = load_pretrained(folder, mesh, rules=rules)
    with jax.default_matmul_precision("highest"), jax.set_mesh(mesh):
        found = jax.jit(lambda model, tokens: model(tokens))(model, tokens())
    np.testing.assert_allclose(np.asarray(found), logits("two_key_heads"), atol=1e-4)


def test_a_mesh_without_the_axes_of_the_rules_is_refused(folder):
    model, mesh = load_pretrained(folder), mesh_of(sp=4)
    with jax.set_mesh(mesh), pytest.raises(MeshError, match=r"'ring'.*the mesh has 'sp'"):
        model(tokens())
    with pytest.raises(MeshError, match=r"'tensor'.*the mesh has 'sp'"):
        TextEngine(model, mesh)


@pytest.mark.parametrize("length", [LENGTH, LENGTH - 1])
def test_no_device_holds_the_logits_of_the_whole_sequence(length, folder):
    mesh = make_mesh()
    model = load_pretrained(folder, mesh)
    with jax.set_mesh(mesh):
        program = jax.jit(lambda model, tokens: model(tokens)).lower(model, tokens()[:, :length]).compile()
    whole = ROWS * length * VOCAB
    assert program.memory_analysis().output_size_in_bytes == 4 * whole // mesh.size
    shapes = re.findall(r"f32\[([\d,]+)\]", program.as_text())
    assert all(np.prod([int(size) for size in shape.split(",")]) < whole for shape in shapes)
