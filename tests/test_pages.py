"""What pages name exists: files, links, flags, modules. Pages are short, commands paste, figures have a source."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from engine.common.settings import Settings
from tests.charts.existing.foreign import SGLANG_FLAGS, VLLM_FLAGS

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`((?:router|engine|loadgen|tests|charts|manifests)/[\w./-]*)`")
LINKED = re.compile(r"\]\(([^)#:\s]*)(?:#([\w-]*))?\)")
GENERATED = re.compile(r"<!-- generated -->.*?<!-- end of generated -->", re.DOTALL)
CODE = re.compile(r"^```[\s\S]*?^```$|^ {4}.*$", re.MULTILINE)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
RUN = re.compile(r"`[^`]*(?:python -m |make |warmroute-|tests/|pytest|curl |docker )[^`]*`|\b[Bb]y hand\b")
"""Matches a command that a reader can run again, or "by hand", which says that the tree has no command for it."""
README_WORDS = 600
ALL_WORDS = 55_000
"""Words of all pages, as `wc -w` counts them: what a user and a maintainer need fits, and no history does."""
TABLE_COLUMNS = 140
TOPS = ("router", "engine", "loadgen", "tests", "charts", "manifests")
FILE = re.compile(r"`([\w./-]+\.(?:py|sh|tpl|proto|jinja|css))`")
PAGE = re.compile(r"(?<![\w./-])[\w./-]*\b[A-Z][A-Z_]+\.md\b")
MODULE = re.compile(r"\bpython -m ([\w.]+\w)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])")
ARGUMENT = re.compile(r"""add_argument\(\s*"(--[a-z0-9-]+)""")
COMMAND = re.compile(
    r"^ {4}(?:\w+=\S+ )*(?:make|python|warmroute-|helm|kubectl|curl|docker|pip|\.venv/).*$", re.MULTILINE
)
QUOTED = re.compile(r"""'[^']*'|"[^"]*"|\$\([^)]*\)""")
OTHERS_FLAGS = {
    "docker": {"--gpus", "--read-only", "--rm", "--tmpfs"},
    "endpoint picker of the Gateway API": {"--endpoint-picker-disable-tls"},
    "helm": {"--logs", "--reset-then-reuse-values", "--set", "--timeout", "--wait"},
    "kubectl": {"--for", "--from-literal", "--tail", "--timeout"},
    "mypy": {"--strict"},
    "pip": {"--extra-index-url"},
    "pytest": {"--durations"},
    "redis-server": {"--save"},
    "sglang": SGLANG_FLAGS,
    "vllm": {*VLLM_FLAGS, "--no-enable-prefix-caching"},
    "warmroute 0.1.0": {"--enable-admin"},
}
"""The flags on pages that are not of this tree, by the program that has them."""
WITH_SETTINGS = (
    "engine.startup.settings",
    "engine.startup.calibrate",
    "router.settings.gateway",
    "loadgen.demo.run",
    "loadgen.demo.fleet",
    "tests.bench.policy_table.__main__",
)
OTHERS_MODULES = ("pytest", "sglang.launch_server")
PAGES = sorted(
    page
    for top in (ROOT, *(ROOT / name for name in TOPS))
    for page in (top.glob("*.md") if top == ROOT else top.rglob("*.md"))
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


@cache
def files() -> frozenset[str]:
    """Return each file of the tree by every end of its path: `a/b.py` and `b.py`."""
    paths = chain.from_iterable((ROOT / top).rglob("*.*") for top in TOPS)
    parts = [path.relative_to(ROOT).parts for path in paths if "__pycache__" not in path.parts]
    return frozenset("/".join(path[start:]) for path in parts for start in range(len(path)))


def misnamed(text: str, folder: Path, *, is_readme: bool) -> list[str]:
    """Return the files that a page names and that do not exist.

    The first column of a README's tables lists files of its own folder, or of the tree from the root.
    """
    listed = [row.split("|")[1] for row in text.splitlines() if row.startswith("|")] if is_readme else []
    own = [name for cell in listed for name in FILE.findall(cell)]
    missing = [name for name in own if not (folder / name).exists() and not (ROOT / name).exists()]
    return missing + [name for name in FILE.findall(text) if name not in files()]


def settings() -> Iterator[type[Settings]]:
    """Yield the settings classes of all programs, commands, and scripts that have one."""
    commands = importlib.import_module("loadgen.commands")
    for name in (
        *WITH_SETTINGS,
        *(f"loadgen.commands.{each.name}" for each in pkgutil.iter_modules(commands.__path__)),
    ):
        found = vars(importlib.import_module(name)).values()
        yield from (each for each in found if isinstance(each, type) and issubclass(each, Settings))


@cache
def flags() -> frozenset[str]:
    """Return the flags of the three programs, of the tree's scripts, and of the other programs that pages name."""
    names = {name.replace("_", "-") for each in settings() for name in each.model_fields}
    scripts = chain.from_iterable((ROOT / top).rglob("*.py") for top in TOPS)
    arguments = chain.from_iterable(ARGUMENT.findall(path.read_text()) for path in scripts)
    ours = {f"--{on}{name}" for name in names for on in ("", "no-")}
    return frozenset(chain(ours, arguments, ("--help", "--help-all", "--version", "--config"), *OTHERS_FLAGS.values()))


def removed_flags() -> frozenset[str]:
    """Return the flags of the release before, which the page about upgrades names."""
    names = {name.replace("_", "-") for each in settings() for name in each.removed}
    return frozenset(f"--{on}{name}" for name in names for on in ("", "no-"))


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def unpasteable(text: str) -> list[str]:
    """Return the command lines that bash and zsh read in another way: with a comment behind, or an unquoted pattern."""
    commands = [(line, QUOTED.sub("", line)) for line in COMMAND.findall(text)]
    return [line.strip() for line, bare in commands if re.search(r"\s#|[\[\]?*]", bare)]


def test_there_are_pages() -> None:
    assert len(PAGES) > 40
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


@pytest.mark.parametrize("page", PAGES, ids=titled)
def test_the_files_flags_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    assert not misnamed(text, page.parent, is_readme=page.name == "README.md")
    known = flags() | removed_flags() if page.name == "CHANGELOG.md" else flags()
    assert not set(FLAG.findall(text)) - known
    assert not [name for name in MODULE.findall(text) if not is_module(name) and name not in OTHERS_MODULES]


@pytest.mark.parametrize("top", [top for top in TOPS if top != "tests"])
def test_the_pages_that_code_and_help_texts_name_exist(top: str) -> None:
    chart = ROOT / "charts" / "warmroute"
    suffixes = (".py", ".yaml", ".tpl", ".txt", ".json")
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / top).rglob("*.*")
        if path.suffix in suffixes and ".md" in (text := path.read_text())
        for name in PAGE.findall(text)
        if not any((folder / name).exists() for folder in (*path.parents, chart))
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=titled)
def test_commands_paste_in_bash_and_zsh(page: Path) -> None:
    assert not unpasteable(page.read_text())


def test_the_pages_together_are_short() -> None:
    assert sum(len(page.read_text().split()) for page in PAGES) <= ALL_WORDS


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
    table = "| file | |\n|---|---|\n| `here.py` | |\n| `test_pages.py` | as `nowhere.py` |\n"
    assert misnamed(table, ROOT / "tests", is_readme=True) == ["here.py", "here.py", "nowhere.py"]
    assert misnamed("as `tests/test_pages.py`, `test_pages.py`", ROOT, is_readme=False) == []
    assert {"--port", "--no-exact", "--policies"} < flags()
    assert "--prot" not in flags()
    assert [is_module(name) for name in ("router", "tests.test_pages", "router.nowhere")] == [True, True, False]
    commands = "    make demo  # four\n    helm a --set b[0]=1\n    helm a --set 'b[0]=1' -d '#'\n"
    assert unpasteable(commands) == ["make demo  # four", "helm a --set b[0]=1"]
