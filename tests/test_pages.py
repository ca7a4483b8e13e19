"""Everything that pages name exists, READMEs are short, figures have a command and a date, and reasons have a date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`((?:router|engine|loadgen|tests|charts|manifests)/[\w./-]*)`")
LINKED = re.compile(r"\]\(([^)#:\s]*)(?:#([\w-]*))?\)")
GENERATED = re.compile(r"<!-- generated -->.*?<!-- end of generated -->", re.DOTALL)
CODE = re.compile(r"^```[\s\S]*?^```$|^ {4}.*$", re.MULTILINE)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
RUN = re.compile(r"`[^`]*(?:python -m |make |warmroute-|tests/|pytest|curl |docker )[^`]*`|\b[Bb]y hand\b")
"""Matches a command that a reader can run again, or "by hand", which says that the tree has no command for it."""
README_WORDS = 600
TABLE_COLUMNS = 140
PAGES = sorted(
    page
    for top in (ROOT, *(ROOT / name for name in ("router", "engine", "loadgen", "tests", "charts", "manifests")))
    for page in (top.glob("*.md") if top == ROOT else top.rglob("*.md"))
    if page.name != "README.head.md"  # a part of another page, in another folder
)


def titled(page: Path) -> str:
    return str(page.relative_to(ROOT))


def called(name: str) -> list[Path]:
    return [page for page in PAGES if page.name == name]


def words(text: str) -> int:
    """Return the number of words of a page, including its tables, without generated parts."""
    return sum(any(letter.isalnum() for letter in word) for word in GENERATED.sub("", text).split())


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    titles = re.findall(r"^#+ (.*)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def undated(text: str) -> list[str]:
    """Return the paragraphs of a page of decisions, after its introduction, that do not begin with a date."""
    paragraphs = [each for each in re.split(r"\n{2,}", text.strip()) if not each.startswith("#")]
    return [each for each in paragraphs[1:] if not re.match(r"\*\*20\d\d-\d\d-\d\d\.", each)]


def unsourced(text: str) -> list[str]:
    """Return the sections of a page of figures that lack a date or a command."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return [each.partition("\n")[0] for each in sections if not (DATE.search(each) and RUN.search(each))]


def test_there_are_pages() -> None:
    assert len(PAGES) > 60
    for name in ("DECISIONS.md", "MEASURED.md"):
        assert {page.parent.name for page in called(name)} >= {"router", "engine", "loadgen"}
    named = NAMED.findall((ROOT / "router" / "ARCHITECTURE.md").read_text())
    assert len(set(named)) > 40


@pytest.mark.parametrize("page", PAGES, ids=titled)
def test_what_a_page_names_and_links_is_there(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in NAMED.findall(text) if not any((top / name).exists() for top in (ROOT, page.parent))]
    for link, anchor in LINKED.findall(text):
        target = page.parent / link if link else page
        if not target.exists():
            missing.append(link)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            missing.append(f"{link}#{anchor}")
    assert not missing


@pytest.mark.parametrize("page", called("README.md"), ids=titled)
def test_a_readme_orients_in_few_words(page: Path) -> None:
    assert words(page.read_text()) <= README_WORDS


@pytest.mark.parametrize("page", PAGES, ids=titled)
def test_tables_fit_a_screen(page: Path) -> None:
    rows = [line for line in GENERATED.sub("", page.read_text()).splitlines() if line.lstrip().startswith("|")]
    assert not [row for row in rows if len(row) > TABLE_COLUMNS]


@pytest.mark.parametrize("page", called("DECISIONS.md"), ids=titled)
def test_each_decision_has_a_date(page: Path) -> None:
    assert not undated(page.read_text())


@pytest.mark.parametrize("page", called("MEASURED.md"), ids=titled)
def test_each_figure_has_a_command_and_a_date(page: Path) -> None:
    assert not unsourced(page.read_text())


def test_the_rules_see_what_they_forbid() -> None:
    assert words("a | b `c` --- 1\n<!-- generated -->\nmany more\n<!-- end of generated -->\n") == 4
    assert undated("# x\n\nWhy.\n\n**2026-11-23. A.** b\n\n**B.** c\n") == ["**B.** c"]
    figures = "# x\n\n## a\n\n`make bench`, 2026-11-23: 1\n\n## b\n\n`make bench`: 1\n\n## c\n\n2026-11-23: 1\n"
    assert unsourced(figures) == ["b", "c"]
    assert anchors("# `/v1/x`: a, b\n\n    # no heading\n\n## C d\n") == {"v1x-a-b", "c-d"}
