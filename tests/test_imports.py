"""Imports run one way, and of other people's packages only the declared ones are used."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("agentic_ring", "data_prep", "evals", "experiments")

# Each line may import from itself and from the lines above it. The package's own __init__ comes after
# everything within the package: it gathers the public names and nothing inside imports from it.
LAYERS = (
    (
        "agentic_ring.jax_settings",
        "agentic_ring.jax_settings",
        "agentic_ring.device_memory",
        "agentic_ring.distributed",
        "agentic_ring.errors",
        "agentic_ring.extras",
        "agentic_ring.files",
        "agentic_ring.provenance",
        "agentic_ring.stopping",
        "agentic_ring.terminal",
        "agentic_ring.token_units",
        "agentic_ring.torus",
    ),
    ("agentic_ring.files.folder_lock", "agentic_ring.files.json_files", "agentic_ring.files.npz_files"),
    ("agentic_ring.files.run_folder",),
    ("agentic_ring.terminal.command",),
    ("agentic_ring.terminal.cli",),
    ("agentic_ring.mesh",),
    ("agentic_ring.attention",),
    ("agentic_ring.models",),
    ("agentic_ring.data",),
    ("agentic_ring.training", "agentic_ring.inference"),
    ("agentic_ring.run", "agentic_ring.doctor", "agentic_ring.serve"),
    ("agentic_ring.policies",),
    ("agentic_ring.play",),
    ("agentic_ring.__main__",),
    ("agentic_ring",),
    ("data_prep",),
    ("evals",),
    ("experiments",),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py"))}


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of the modules that a source imports, inside functions as well.

    ``from a import b`` gives ``a.b`` where that is a module of ours, else ``a``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                yield full_name if full_name in MODULES else str(node.module)


def layer(module: str) -> int:
    """Index in ``LAYERS`` of the longest prefix of the module's name."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        # `agentic_ring` itself names the package's __init__, not every module without a place.
        if prefix == "agentic_ring" and module != prefix:
            break
        for index, prefixes in enumerate(LAYERS):
            if prefix in prefixes:
                return index
    raise AssertionError(f"{module} has no place in LAYERS; give it one")


def backward_imports(module: str, source: str) -> list[str]:
    """What a module imports from a later layer."""
    ours = [name for name in imported(ast.parse(source)) if name.split(".")[0] in SOURCES]
    forbidden = {name for name in ours if layer(name) > layer(module)}
    if module.split(".")[0] == "evals":  # and data_prep stands above it: neither knows the other
        forbidden |= {name for name in ours if name.split(".")[0] == "data_prep"}
    return sorted(forbidden)


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", distribution)[0]).lower()


# Scripts outside the package need the extra `scripts`. These modules need others, which they or the command
# that imports them name where they are missing.
EXTRAS = {
    "agentic_ring.serve.app": "serve",
    "agentic_ring.serve.http_limits": "serve",
    "agentic_ring.serve.json_body": "serve",
    "agentic_ring.serve.metrics": "serve",
    "agentic_ring.serve.openai_requests": "serve",
    "data_prep.episodes.minari_datasets": "minari",
    "data_prep.episodes.parquet_files": "parquet",
    "evals.harness_model.model": "harness",
    "evals.speed.torch_llama": "hf",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def distributions() -> Mapping[str, list[str]]:
    """Distributions by what can be imported of them; each look takes a good part of a second."""
    return packages_distributions()


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


def needed(module: str, tree: ast.AST, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Each import of a module with the extras that are named where it fails: ``with needs_extra(NAME)``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        inside = extras
        if isinstance(node, ast.With) and ast.unparse(node).startswith("with needs_extra("):
            inside = extras | {node.items[0].context_expr.args[0].value}
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((name.split(".")[0], extras) for name in imported(node))
        yield from needed(module, node, inside)


def inherited(module: str) -> dict[str, frozenset[str]]:
    """Extras by package that the package of a module imports before it, as models imports flax."""
    parents = [MODULES[parent] for parent in MODULES if module.startswith(f"{parent}.")]
    return {
        name: extras
        for path in parents
        for name, extras in needed(module, ast.parse(path.read_text()), frozenset())
        if extras
    }


@pytest.mark.parametrize("module", MODULES)
def test_no_import_runs_backwards(module):
    assert backward_imports(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize("module", MODULES)
def test_third_party_imports_are_declared_dependencies(module):
    assumed = {EXTRAS[module]} if module in EXTRAS else set()
    if not module.startswith("agentic_ring"):
        # The extra that is named suffices: it brings those of all scripts.
        assert not assumed or declared("scripts") <= declared(*assumed)
        assumed.add("scripts")
    known = inherited(module)
    for name, extras in needed(module, ast.parse(MODULES[module].read_text()), frozenset(assumed)):
        if name in sys.stdlib_module_names or name in SOURCES:
            continue
        providers = {normalised(distribution) for distribution in distributions().get(name, [])}
        # An extra that is not installed has no providers: its name is that of its package.
        providers = providers or {normalised(name)}
        extras = extras | known.get(name, frozenset())
        assert providers & declared(*sorted(extras)), (
            f"{module} imports {name}, which no extra of {sorted(extras)} brings: declare it, or import it "
            "inside `with needs_extra(NAME)`"
        )


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("agentic_ring")])
def test_no_script_bears_the_name_of_what_it_may_import(module):
    # A script's folder comes first on its import path, where `statistics.py` would hide the standard one.
    name = module.split(".")[-1]
    taken = sys.stdlib_module_names | set(distributions()) | set(SOURCES)
    assert "." not in module or name not in taken


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        (
            "agentic_ring.attention.ring",
            "from agentic_ring.models import llama",
            ["agentic_ring.models.llama"],
        ),
        ("agentic_ring.mesh", "import agentic_ring.attention.api", ["agentic_ring.attention.api"]),
        ("agentic_ring.mesh", "from agentic_ring import errors", []),
        ("evals.common.rows", "from data_prep import folders", ["data_prep.folders"]),
        ("data_prep.sharegpt", "from evals.common import rows", ["evals.common.rows"]),
        ("agentic_ring.mesh", "from agentic_ring import attention", ["agentic_ring.attention"]),
        ("agentic_ring.mesh", "from agentic_ring import ring_attention", ["agentic_ring"]),
        (
            "agentic_ring.data.chain_loader",
            "def late():\n  import evals.rollouts.trials",
            ["evals.rollouts.trials"],
        ),
        (
            "evals.rollouts.trials",
            "import experiments.exorl.presets\nfrom agentic_ring.data import tasks",
            ["experiments.exorl.presets"],
        ),
        ("experiments.exorl.presets", "from evals import trials\nimport agentic_ring", []),
    ],
)
def test_the_walk_finds_backward_imports(module, source, expected):
    assert backward_imports(module, source) == expected


def test_a_module_without_a_place_is_an_error():
    with pytest.raises(AssertionError, match=r"agentic_ring\.helpers has no place"):
        layer("agentic_ring.helpers")
