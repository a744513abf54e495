"""Links, paths and names in the documentation exist, pages keep their limits, and a table its sources."""

import pkgutil
import re
import tomllib

from agentic_ring.results.rows import read_rows
from tests.docs.pages import NOTEBOOKS, PAGES, ROOT, anchors, inline_code, links, prose, text

OUR_PATH = re.compile(r"(?:agentic_ring|data_prep|evals|experiments|tests|docs|\.ci)/[\w./-]+")
OUR_NAME = re.compile(r"(?:agentic_ring|data_prep|evals|experiments|tests)(?:\.\w+)+")


def is_dead(page: str, link: str) -> bool:
    """Whether a link leads to a file or heading that does not exist."""
    path, _, anchor = link.partition("#")
    target = ((ROOT / page).parent / path if path else ROOT / page).resolve()
    if not target.is_relative_to(ROOT) or not target.exists():
        return True
    return bool(anchor) and anchor not in anchors(str(target.relative_to(ROOT)))


def test_links_lead_to_files_and_headings():
    found = [(page, link) for page in (*PAGES, *NOTEBOOKS) for link in links(page)]
    assert [each for each in found if not re.match(r"https?://", each[1]) and is_dead(*each)] == []


def is_missing(code: str) -> bool:
    """Whether inline code is a path or a name of ours that does not exist."""
    if OUR_PATH.fullmatch(code):
        return not (ROOT / code).exists()
    if not OUR_NAME.fullmatch(code) or (ROOT / code).exists():
        return False
    try:
        pkgutil.resolve_name(code)
    except (ModuleNotFoundError, AttributeError):
        return True
    return False


def test_paths_and_names_exist():
    pages = [page for page in PAGES if page != "CHANGELOG.md"]
    assert [(page, code) for page in pages for code in inline_code(page) if is_missing(code)] == []


def test_documented_names_exist():
    for page in (page for page in PAGES if page.startswith("docs/api/")):
        options = r"(?:\n    options:\n      members: \[(.*)\])?"
        documented = re.findall(rf"^::: ([\w.]+){options}", text(page), re.MULTILINE)
        assert len(documented) == text(page).count(":::")
        for name, members in documented:
            documented_object = pkgutil.resolve_name(name)
            for member in filter(None, members.split(", ")):
                assert hasattr(documented_object, member), f"{name}.{member}"


def test_the_site_has_every_page_once():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    wanted = [page for page in PAGES if page.startswith("docs/") or "/" not in page]
    assert sorted(listed) == sorted([*wanted, *(name.replace(".ipynb", ".md") for name in NOTEBOOKS)])


def test_pages_keep_their_limits():
    assert text("README.md").count("\n") <= 150
    assert len(text("README.md").encode()) <= 12_288
    assert text("CONTRIBUTING.md").count("\n") <= 60
    for page in PAGES:  # prose names no commits
        if page not in ("docs/notebook.md", "CHANGELOG.md"):
            assert not re.findall(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b", prose(page)), page


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = (ROOT / "CITATION.cff").read_text()
    cited = re.search(rf"^version: {re.escape(version)}\ndate-released: (\S+)$", citation, re.MULTILINE)
    assert cited is not None
    assert f"## [{version}] - {cited[1]}" in text("CHANGELOG.md")


def tables(first_column: str) -> list[dict[str, str]]:
    """The rows of all tables of the comparison whose first column has this heading, every cell as text."""
    found, page = [], text("docs/attention-comparison.md")
    for lines in re.findall(rf"^\| {first_column} \|.*?(?=\n\n|\Z)", page, re.MULTILINE | re.DOTALL):
        rows = lines.strip().splitlines()
        header, _, *body = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
        found += [dict(zip(header, row, strict=True)) for row in body]
    assert found, first_column
    return found


def test_known_bugs_are_the_measured_rows():
    measured = read_rows(ROOT / "experiments/results/attention_known_bugs.csv")
    for shown, row in zip(tables("bug"), measured, strict=True):
        shown |= {"measured": shown["number"], "ringattention": shown["`ringattention`"]}
        for name in ("bug", "measured", "bound", "this library", "ringattention"):
            assert shown[name] == row[name]
        for thread in row["thread"].split():
            assert f"](https://github.com/{thread.replace('#', '/issues/')})" in shown["thread"]


def test_what_this_library_has_is_held_by_a_test_that_exists():
    features = {row["feature"]: row["this library"] for row in tables("feature")}
    tests = {row["feature of this library"]: row["tests"] for row in tables("feature of this library")}
    assert set(tests) == {name for name, cell in features.items() if cell != "N"}
    for names in tests.values():
        for path, function in re.findall(r"`(\S+\.py)::(test_\w+)`", names):
            assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE), function
        assert "`" in names
