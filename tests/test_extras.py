"""The attention library needs JAX and NumPy only; every other part names the extra that it lacks."""

import json
import subprocess
import sys

import pytest

from agentic_ring.errors import MissingExtraError
from agentic_ring.extras import needs_extra

# JAX's own dependencies, with JAX itself.
CORE = "jax,jaxlib,numpy,ml_dtypes,opt_einsum,scipy,agentic_ring"
# Every import of a package outside the standard library and CORE fails as if it were not installed.
ONLY_CORE = f"""
import importlib, importlib.abc, json, sys

class OnlyCore(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package not in sys.stdlib_module_names and package not in set({CORE!r}.split(",")):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

import jax, numpy  # what JAX itself tries to import is not our concern
sys.meta_path.insert(0, OnlyCore())
"""
# Parts of the package, by the extra that brings an import of theirs.
PARTS = {
    "models": "models.transformer training.loop inference terminal.cli files.run_folder data.store",
    "rl": "data.gymnasium_environments data.own_tasks.walker data.hidden_tasks.environments",
    "text": "data.text.chat data.text.packing",
}
MODULES = {f"agentic_ring.{name}": extra for extra, names in PARTS.items() for name in names.split()}


def run_core(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ONLY_CORE + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_attention_needs_jax_and_numpy_only_and_other_parts_name_their_extra():
    code = """
before = set(sys.modules)
import agentic_ring.attention.cache, agentic_ring.mesh
from agentic_ring.attention import attention
new = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
query = jax.numpy.ones((1, 8, 2, 4))
assert attention(query, query, query).shape == query.shape

from agentic_ring.errors import MissingExtraError
found = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except MissingExtraError as error:
        found[name] = str(error)
print(json.dumps([sorted(new), found]))
"""
    ended = run_core(code, *MODULES)
    assert ended.returncode == 0, ended.stderr
    new, found = json.loads(ended.stdout)
    assert set(new) <= {"agentic_ring", "jax"}
    for name, extra in MODULES.items():
        assert f"pip install 'agentic_ring[{extra}]'" in found[name], name


def test_a_command_without_its_extra_prints_one_line():
    code = "import runpy; runpy.run_module('agentic_ring', run_name='__main__')"
    ended = run_core(code)
    assert ended.returncode == 1
    assert ended.stderr == "error: tyro is not installed; run: pip install 'agentic_ring[models]'\n"


def test_other_errors_pass():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'agentic_ring\."), needs_extra("rl"):
        import agentic_ring.nothing  # noqa: F401
    with pytest.raises(ImportError, match=r"^cannot import name"), needs_extra("rl"):
        from agentic_ring import nothing  # noqa: F401


def test_where_labmaze_has_no_wheels_the_pythons_are_named(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    monkeypatch.setitem(sys.modules, "dm_control", None)
    monkeypatch.setattr(sys, "excepthook", print)
    expected = r"Python 3\.11 or 3\.12, and this is 3\.13.*\[rl\]"
    with pytest.raises(MissingExtraError, match=expected), needs_extra("rl"):
        import dm_control  # noqa: F401
