"""What is imported, declared, pinned and shipped, and what ``make`` says where it cannot go on."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("agentic_ring", "data_prep", "evals", "experiments")

# A package may import from itself and from the lines above it. Packages of agentic_ring that are not named
# are the first line. The package's own __init__ gathers public names, and nothing inside imports from it.
LAYERS = (
    (),
    ("agentic_ring.mesh",),
    ("agentic_ring.attention",),
    ("agentic_ring.models",),
    ("agentic_ring.data",),
    ("agentic_ring.training", "agentic_ring.inference"),
    ("agentic_ring.run", "agentic_ring.rollouts", "agentic_ring.serve"),
    ("agentic_ring.policies",),
    ("agentic_ring.play", "agentic_ring.__main__"),
    ("agentic_ring",),
    ("data_prep", "evals"),  # neither knows the other
    ("experiments",),
)
# Scripts outside agentic_ring need the extra `scripts`. These packages need others, which they or the command
# that imports them name where they are missing.
EXTRAS = {"agentic_ring.serve": "serve", "evals.harness_model": "harness"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


DISTRIBUTIONS = dict(packages_distributions())
TREES: dict[str, ast.Module] = {}
for source in SOURCES:
    for path in sorted((ROOT / source).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        TREES[name] = ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of the modules that a source imports, inside functions as well.

    ``from a import b`` gives ``a.b`` where that is a module of ours, else ``a``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                yield full_name if full_name in TREES else str(node.module)


def ours(tree: ast.AST) -> list[str]:
    return [name for name in imported(tree) if name.split(".")[0] in SOURCES]


def layer(module: str) -> int:
    parts = module.split(".")
    package = ".".join(parts[: 2 if parts[0] == "agentic_ring" else 1])
    return next((index for index, line in enumerate(LAYERS) if package in line), 0)


def runs_backwards(module: str, name: str) -> bool:
    return layer(name) > layer(module) or {x.split(".")[0] for x in (module, name)} == {"data_prep", "evals"}


def test_no_import_runs_backwards():
    pairs = [(module, name) for module, tree in TREES.items() for name in ours(tree)]
    assert [f"{module} imports {name}" for module, name in pairs if runs_backwards(module, name)] == []


@pytest.mark.parametrize("source", SOURCES)
def test_no_packages_import_each_other(source):
    """Packages, or modules beside them, of a source."""
    graph: dict[str, set[str]] = {}
    for module, tree in TREES.items():
        if module.startswith(f"{source}."):
            package = module.split(".")[1]
            names = {name.split(".")[1] for name in ours(tree) if name.startswith(f"{source}.")}
            graph.setdefault(package, set()).update(names - {package})
    TopologicalSorter(graph).prepare()  # an error names the circle


@cache
def declared(*extras: str) -> set[str]:
    """Distributions of an installation with these extras, and with those that they name."""
    optional, found = PROJECT["optional-dependencies"], set()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in optional[extra])]
    for requirement in map(Requirement, lines):
        ours = requirement.name == "agentic_ring"
        found |= declared(*requirement.extras) if ours else {canonicalize_name(requirement.name)}
    return found


def needed(tree: ast.AST, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Each imported package with the extras that are named where it fails: ``with needs_extra(NAME)``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        inside = extras
        if isinstance(node, ast.With) and ast.unparse(node).startswith("with needs_extra("):
            inside = extras | {node.items[0].context_expr.args[0].value}
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((name.split(".")[0], extras) for name in imported(node))
        yield from needed(node, inside)


def undeclared_imports(module: str) -> Iterator[str]:
    """Third-party packages that a module imports and no extra that it names brings."""
    assumed = {extra for package, extra in EXTRAS.items() if f"{module}.".startswith(f"{package}.")}
    assumed |= set() if module.startswith("agentic_ring") else {"scripts"}
    parents = (parent for parent in TREES if module.startswith(f"{parent}."))
    # What the package of a module imports before it, as models imports flax.
    known = {name: extras for parent in parents for name, extras in needed(TREES[parent], frozenset())}
    for name, extras in needed(TREES[module], frozenset(assumed)):
        if name in sys.stdlib_module_names or name in SOURCES:
            continue
        # An extra that is not installed has no providers: its name is that of its package.
        providers = {canonicalize_name(distribution) for distribution in DISTRIBUTIONS.get(name, [name])}
        if not providers & declared(*sorted(extras | known.get(name, frozenset()))):
            yield f"{module} imports {name}: declare it, or import it inside `with needs_extra(NAME)`"


def test_third_party_imports_are_declared_dependencies():
    assert [line for module in TREES for line in undeclared_imports(module)] == []


def test_no_script_bears_the_name_of_what_it_may_import():
    # A script's folder comes first on its import path, where `statistics.py` would hide the standard one.
    taken = sys.stdlib_module_names | set(DISTRIBUTIONS) | set(SOURCES)
    scripts = [name for name in TREES if "." in name and not name.startswith("agentic_ring")]
    assert [name for name in scripts if name.split(".")[-1] in taken] == []


LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = [Requirement(line) for line in LINES if not line.startswith("#")]


def test_the_wheel_holds_agentic_ring_alone(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    information = f"agentic_ring-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"agentic_ring", information}
    assert {"agentic_ring/py.typed", f"{information}/licenses/LICENSE"} <= set(names)
    shipped = [*(ROOT / "agentic_ring").rglob("*.py"), *ROOT.glob("agentic_ring/policies/walker/*")]
    assert {str(path.relative_to(ROOT)) for path in shipped} <= set(names)


@pytest.mark.parametrize("python_version", ["3.11", "3.12"])
def test_constraints_pin_every_dependency_within_its_bounds(python_version):
    environment = {"python_version": python_version}
    pins = [pin for pin in PINS if pin.marker is None or pin.marker.evaluate(environment)]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert len(versions) == len(pins), "a package is pinned twice"
    extras = PROJECT["optional-dependencies"]
    in_constraints = ("models", "rl", "text", "serve", "scripts", "dev", "docs", "minari", "parquet")
    lines = [*PROJECT["dependencies"], *(line for name in in_constraints for line in extras[name])]
    for requirement in map(Requirement, lines):
        if requirement.name != "agentic_ring":
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])
    for pin in PINS:  # names and versions only
        assert pin.url is None
        assert [part.operator for part in pin.specifier] == ["=="]
        assert pin.marker is None or str(pin.marker).startswith("python_version")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        # An interpreter of another version fails the version check.
        ("exit 1", "make PYTHON=/path/to/python3.12 install"),
        (
            f'case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"',
            f"apt install python3.{sys.version_info.minor}-venv",
        ),
    ],
    ids=["no fitting Python", "no ensurepip"],
)
def test_make_says_what_it_lacks(tmp_path, body, said):
    """A shell script stands for some Python interpreter."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    # Without what an outer `make test` passes on, its own VENV and PYTHON among it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}"]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert finished.returncode != 0
    assert said in finished.stderr
    assert not (tmp_path / "venv").exists()
