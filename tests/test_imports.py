"""Imports run one way and in no circle, and of other people's packages only the declared ones are used."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
    ("data_prep", "evals"),
    ("experiments",),
)
STRANGERS = ({"data_prep", "evals"},)
"""Of one line, but neither knows the other."""

# Scripts outside agentic_ring need the extra `scripts`. These packages need others, which they or the command
# that imports them name where they are missing.
EXTRAS = {
    "agentic_ring.serve": "serve",
    "evals.harness_model": "harness",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py"))}
DISTRIBUTIONS = dict(packages_distributions())
TREES = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


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
                yield full_name if full_name in MODULES else str(node.module)


def ours(tree: ast.AST) -> list[str]:
    return [name for name in imported(tree) if name.split(".")[0] in SOURCES]


def layer(module: str) -> int:
    parts = module.split(".")
    package = module if len(parts) == 1 or parts[0] != "agentic_ring" else ".".join(parts[:2])
    package = package if package.startswith("agentic_ring") else parts[0]
    return next((index for index, line in enumerate(LAYERS) if package in line), 0)


def backward_imports(module: str, tree: ast.AST) -> list[str]:
    """What a module imports from a later line."""
    source = module.split(".")[0]
    strangers = {name for pair in STRANGERS if source in pair for name in pair - {source}}
    found = (name for name in ours(tree) if layer(name) > layer(module) or name.split(".")[0] in strangers)
    return [f"{module} imports {name}" for name in found]


def package_imports(source: str) -> dict[str, set[str]]:
    """What each package (or module beside the packages) of a source imports of the source's others."""
    found: dict[str, set[str]] = {}
    for module, tree in TREES.items():
        if module.startswith(f"{source}."):
            package = module.split(".")[1]
            names = {name.split(".")[1] for name in ours(tree) if name.startswith(f"{source}.")}
            found.setdefault(package, set()).update(names - {package})
    return found


def circles(graph: dict[str, set[str]]) -> set[str]:
    """Names from which imports lead back to them."""

    def reached(names: set[str]) -> set[str]:
        more = names.union(*(graph.get(name, set()) for name in names))
        return names if more == names else reached(more)

    return {name for name in graph if name in reached(graph[name])}


def test_no_import_runs_backwards():
    assert [line for module, tree in TREES.items() for line in backward_imports(module, tree)] == []


@pytest.mark.parametrize("source", SOURCES)
def test_no_packages_import_each_other(source):
    assert circles(package_imports(source)) == set()


@pytest.mark.parametrize(
    ("module", "source", "is_backward"),
    [
        ("agentic_ring.attention.ring", "from agentic_ring.models import llama", True),
        ("agentic_ring.mesh", "from agentic_ring import ring_attention", True),
        ("agentic_ring.mesh", "from agentic_ring import errors", False),
        ("evals.report", "from data_prep import folders", True),
        ("agentic_ring.data.chain_loader", "def late():\n  import evals.report", True),
        ("evals.report", "from agentic_ring.data import domains\nimport agentic_ring", False),
        ("experiments.exorl.presets", "from evals import report", False),
    ],
)
def test_the_walk_finds_backward_imports(module, source, is_backward):
    assert bool(backward_imports(module, ast.parse(source))) == is_backward
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", distribution)[0]).lower()


@cache
def declared(*extras: str) -> set[str]:
    """Distributions of an installation with these extras, and with those that they name."""
    found = {normalised(requirement) for requirement in PROJECT["dependencies"]}
    for extra in extras:
        for line in PROJECT["optional-dependencies"][extra]:
            requirement = Requirement(line)
            ours = requirement.name == "agentic_ring"
            found |= declared(*requirement.extras) if ours else {normalised(line)}
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
    parents = (parent for parent in MODULES if module.startswith(f"{parent}."))
    # What the package of a module imports before it, as models imports flax.
    known = {name: extras for parent in parents for name, extras in needed(TREES[parent], frozenset())}
    for name, extras in needed(TREES[module], frozenset(assumed)):
        if name in sys.stdlib_module_names or name in SOURCES:
            continue
        # An extra that is not installed has no providers: its name is that of its package.
        providers = {normalised(distribution) for distribution in DISTRIBUTIONS.get(name, [name])}
        if not providers & declared(*sorted(extras | known.get(name, frozenset()))):
            yield f"{module} imports {name}: declare it, or import it inside `with needs_extra(NAME)`"


def test_third_party_imports_are_declared_dependencies():
    assert [line for module in MODULES for line in undeclared_imports(module)] == []


def test_no_script_bears_the_name_of_what_it_may_import():
    # A script's folder comes first on its import path, where `statistics.py` would hide the standard one.
    taken = sys.stdlib_module_names | set(DISTRIBUTIONS) | set(SOURCES)
    scripts = [name for name in MODULES if "." in name and not name.startswith("agentic_ring")]
    assert [name for name in scripts if name.split(".")[-1] in taken] == []
