"""Links, anchors, paths and names in the documentation exist, and pages keep their limits."""

import importlib
import re
import tomllib

import pytest

from tests.docs.pages import NOTEBOOKS, PAGES, ROOT, anchors, inline_code, links, prose, text

OUR_PATH = re.compile(r"(?:agentic_ring|data_prep|evals|experiments|tests|docs|\.ci)/[\w./-]+")
OUR_NAME = re.compile(r"(?:agentic_ring|data_prep|evals|experiments|tests)(?:\.\w+)+")


def resolve(name: str) -> object:
    """The module or attribute of a dotted name."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS])
def test_links_lead_to_files_and_headings(page):
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.resolve().is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(str(target.resolve().relative_to(ROOT))), link


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_paths_and_names_exist(page):
    for code in inline_code(page):
        if OUR_PATH.fullmatch(code):
            assert (ROOT / code).exists(), code
        elif OUR_NAME.fullmatch(code) and not (ROOT / code).exists():
            resolve(code)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/api/")])
def test_documented_names_exist(page):
    documented = re.findall(
        r"^::: ([\w.]+)(?:\n    options:\n      members: \[(.*)\])?", text(page), re.MULTILINE
    )
    assert len(documented) == text(page).count(":::")
    for name, members in documented:
        for member in filter(None, members.split(", ")):
            assert hasattr(resolve(name), member), f"{name}.{member}"
        resolve(name)


def test_the_site_has_every_page_once():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    wanted = [page for page in PAGES if page.startswith("docs/") or "/" not in page]
    converted = [notebook.replace(".ipynb", ".md") for notebook in NOTEBOOKS]
    assert sorted(listed) == sorted([*wanted, *converted])


def test_readme_and_contributing_are_short():
    assert text("README.md").count("\n") <= 150
    assert len(text("README.md").encode()) <= 12_288
    assert text("CONTRIBUTING.md").count("\n") <= 60


def test_prose_has_no_commits():
    for page in PAGES:
        if page not in ("docs/notebook.md", "CHANGELOG.md"):
            assert not re.findall(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b", prose(page)), page


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = (ROOT / "CITATION.cff").read_text()
    cited = re.search(r"^version: (\S+)\ndate-released: (\S+)$", citation, re.MULTILINE)
    assert cited is not None
    assert cited[1] == version
    assert f"## [{version}] - {cited[2]}" in text("CHANGELOG.md")
