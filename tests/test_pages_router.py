"""The pages of the gateway agree with its code: folders, bands, commands, flags, headers, metrics, lists of fields."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import orjson
import pytest
import yaml

from engine.common.settings import flag_of
from engine.contract import headers
from router.continuing.chats import ChatApi
from router.continuing.messages import MessageApi
from router.continuing.responses import ResponseApi
from router.events import follow
from router.fleet import targets
from router.kubernetes import pods
from router.reading.inbound import BODY_FIELD, SESSION_FIELDS
from router.routing.terms import DELAY_TERMS, REPLICATION_TERMS, TTFT_TERMS
from router.routing.ties import RULES
from router.settings.gateway import GatewaySettings
from router.tenants import tenant_file
from tests.charts.monitoring.exported import gateway_text
from tests.test_pages import FLAG, MODULE, OTHERS_FLAGS, PAGES, ROOT, titled

ROUTER = ROOT / "router"
ROUTER_PAGES = [page for page in PAGES if ROUTER in page.parents]
CODE = re.compile(r"`([^`\n]+)`")
HEADER = re.compile(r"`(x-warmroute-[a-z-]*[a-z])`")
METRIC = re.compile(r"\bwarmroute_[a-z_]+[a-z]\b")
ALERT = re.compile(r"\bWarmroute[A-Z]\w+")
ANNOTATION = re.compile(r"warmroute\.io/[a-z-]+")


def text_of(page: str) -> str:
    return (ROUTER / page).read_text()


def section(text: str, title: str) -> str:
    """Return the part of a page below the heading `title`, up to the next heading of its level or above."""
    heading = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert heading, f"there is no heading {title}"
    return re.split(rf"^#{{1,{len(heading[1])}}} ", text[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of all tables in `text`, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {number - 1 for number, line in enumerate(lines) if re.match(r"\|[-: |]+\|$", line)}
    heads |= {number + 1 for number in heads}
    kept = [line for number, line in enumerate(lines) if number not in heads]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in kept]


@cache
def flags() -> frozenset[str]:
    """Return the gateway's flags, those of its commands `keys` and `top`, and those that are not of this tree."""
    names = {name for field in GatewaySettings.model_fields for name in (field, f"no_{field}")}
    own = {flag_of(name) for name in (*names, "config", "help")}
    return frozenset(own | arguments(ROUTER.rglob("*.py"))).union(*OTHERS_FLAGS.values())


def arguments(files: Iterable[Path]) -> set[str]:
    """Return the flags that these files give to argparse, and those of the settings that they define."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                found |= {each for each in texts if isinstance(each, str) and each.startswith("--")}
            elif isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Settings") for base in node.bases):
                fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                found |= {flag_of(field.id) for field in fields if isinstance(field, ast.Name)}
    return found


def is_beginning(name: str, text: str) -> bool:
    """Whether the page says only how the names of several metrics begin."""
    return re.search(rf"{name}_?(\*|\.\.\.)", text) is not None


def dict_with(*keys: str) -> set[str]:
    """Return the keys of the one dict literal in the gateway's code that has all of `keys`."""
    found = []
    for file in ROUTER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Dict):
                names = {key.value for key in node.keys if isinstance(key, ast.Constant)}
                if names >= set(keys):
                    found.append({str(name) for name in names})
    assert len(found) == 1, f"{len(found)} dict literals with {keys}"
    return found[0]


# What the pages say of files and folders.


def test_the_readme_has_each_folder_with_the_sentence_of_its_package() -> None:
    listed = {}
    for cells in rows(section(text_of("README.md"), "Folders")):
        (name,) = CODE.findall(cells[0])
        listed[name.rstrip("/")] = cells[1]
    sentences = {
        file.parent.name: ast.get_docstring(ast.parse(file.read_text())) for file in ROUTER.glob("*/__init__.py")
    }
    assert listed == sentences


def test_the_bands_are_the_layers_that_are_enforced() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["name"] == "router layers"]
    bands = [" | ".join(sorted(CODE.findall(cells[1]))) for cells in rows(section(text_of("ARCHITECTURE.md"), "Bands"))]
    assert bands == [" | ".join(sorted(re.split(r" [|:] ", layer))) for layer in layers if layer != "__main__"]


@pytest.mark.parametrize(
    ("title", "count"), [("A request, in ten steps", 10), ("A change in a cache, in six steps", 6)]
)
def test_each_step_of_a_life_names_its_files(title: str, count: int) -> None:
    steps = re.split(r"^\d+\. ", section(text_of("ARCHITECTURE.md"), title), flags=re.MULTILINE)[1:]
    assert len(steps) == count
    assert all(re.search(r"`[\w/]+\.py`", step.partition("\n\n")[0]) for step in steps)


def test_changing_names_a_place_in_each_package() -> None:
    text = (ROOT / "CHANGING.md").read_text()
    packages = [file.parent for top in ("router", "engine", "loadgen") for file in (ROOT / top).glob("*/__init__.py")]
    assert len(packages) > 40
    assert not [titled(package) for package in packages if f"`{titled(package)}/" not in text]


# What the pages say of commands and flags.


@pytest.mark.parametrize("page", PAGES, ids=titled)
def test_targets_of_make_that_a_page_names_are_there(page: Path) -> None:
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not set(re.findall(r"(?:`|^    )make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)) - made


@pytest.mark.parametrize("page", ROUTER_PAGES, ids=titled)
def test_flags_that_a_page_of_the_gateway_names_are_there(page: Path) -> None:
    text = page.read_text()
    allowed = {*flags(), "--exact"}  # the last is the engine's
    for module in MODULE.findall(text):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None and module.startswith("tests."):
            file = Path(spec.origin)
            allowed |= arguments(file.parent.rglob("*.py") if file.name == "__init__.py" else [file])
    assert not set(FLAG.findall(text)) - allowed


# What the pages say of names that clients and operators see.


def test_headers_are_those_of_the_contract() -> None:
    known = {value for name, value in vars(headers).items() if name.isupper()}
    named = {header for page in ROUTER_PAGES for header in HEADER.findall(page.read_text())}
    assert not {header for header in named if header not in known and not header.startswith("x-warmroute-shadow")}
    every = " ".join(page.read_text().lower() for page in PAGES)
    assert not {header for header in known if header not in every}


@pytest.mark.parametrize("page", ROUTER_PAGES, ids=titled)
def test_metrics_alerts_and_annotations_are_there(page: Path) -> None:
    text = page.read_text()
    exported = set(re.findall(r"^(?:# TYPE )?(warmroute_[a-z_]+)", gateway_text(), re.MULTILINE))
    assert not {name for name in METRIC.findall(text) if name not in exported and not is_beginning(name, text)}
    alerts = "\n".join(file.read_text() for file in (ROOT / "charts" / "warmroute").rglob("*.yaml"))
    assert not {name for name in ALERT.findall(text) if name not in alerts}
    annotations = {value for value in vars(pods).values() if isinstance(value, str) and ANNOTATION.fullmatch(value)}
    assert not set(ANNOTATION.findall(text)) - annotations


def test_every_annotation_and_field_of_a_target_is_described() -> None:
    text = text_of("kubernetes/README.md")
    annotations = {value for value in vars(pods).values() if isinstance(value, str) and ANNOTATION.fullmatch(value)}
    assert annotations == set(ANNOTATION.findall(text))
    fields = set(targets._Entry.model_fields)
    assert fields == {name for name in re.findall(r"\w+", " ".join(CODE.findall(text))) if name in fields}


def test_names_of_sessions() -> None:
    text = section(text_of("ENDPOINTS.md"), "Sessions").partition("\n\n*")[0]
    assert set(CODE.findall(text)) == {str(field).lower() for field in SESSION_FIELDS} | {BODY_FIELD}


def test_states_of_kv_events() -> None:
    table = next(part for part in text_of("events/README.md").split("\n\n") if part.startswith("| `kv_events.state`"))
    code = ast.parse(inspect.getsource(follow))
    (state,) = [node for node in ast.walk(code) if isinstance(node, ast.FunctionDef) and node.name == "state"]
    answers = [each for node in ast.walk(state) if isinstance(node, ast.Return) for each in ast.walk(node)]
    states = {each.value for each in answers if isinstance(each, ast.Constant)}
    assert {cells[0].strip("`") for cells in rows(table)} == states


def test_terms_and_rules_of_the_default_policy() -> None:
    text = section(text_of("routing/POLICIES.md"), "`predicted_ttft` (default)")
    names = [cells[0].strip("`") for cells in rows(text)]
    terms = (*TTFT_TERMS, *DELAY_TERMS, *REPLICATION_TERMS)
    assert names == [each.__name__ for each in (*terms, *RULES)]


# What the pages say of fields.


def test_the_tenants_file_on_the_page_is_valid_and_has_every_field(tmp_path: Path) -> None:
    example = re.findall(r"^    tenants:\n(?:(?:    .*)?\n)+", text_of("tenants/THE_FILE.md"), re.MULTILINE)[0]
    content = yaml.safe_load(example.replace("7d65...", "7d65" + 48 * "0"))
    (entry,) = content["tenants"]
    assert set(entry) == set(tenant_file._Entry.model_fields)
    assert set(entry["keys"][0]) == set(tenant_file._Key.model_fields)
    tenant_file._File.model_validate(content)


def test_a_line_of_the_usage_log() -> None:
    text = section(text_of("tenants/THE_FILE.md"), "What is counted")
    line = orjson.loads("".join(re.findall(r'^    (.*"time"[\s\S]*?\})$', text, re.MULTILINE)))
    assert set(line) == {"time"} | dict_with("request_id", "estimated", "completion_tokens")


def test_fields_of_an_explanation() -> None:
    table = next(part for part in text_of("OPERATING.md").split("\n\n") if part.startswith("| field of explain"))
    named = {name for cells in rows(table) for name in CODE.findall(cells[0])}
    assert named == dict_with("prompt_tokens_estimated", "prefix_keys")


@pytest.mark.parametrize(("name", "api"), [("chats", ChatApi), ("messages", MessageApi), ("responses", ResponseApi)])
def test_fields_with_which_a_stream_is_resumed(
    name: str, api: type[ChatApi] | type[MessageApi] | type[ResponseApi]
) -> None:
    table, api_of_row = {}, ""
    for cells in rows(text_of("RESUMED_STREAMS.md")):
        if found := re.search(r"router/continuing/(\w+)\.py", cells[0]):
            api_of_row = found[1]
        if api_of_row == name:
            for field, values in re.findall(r"`(\w+)` (.*?)(?=, `|$)", cells[1]):
                table[field] = tuple(orjson.loads(value) for value in values.split(" or "))
    assert table == dict(api.only)


def test_what_becomes_of_a_broken_stream() -> None:
    text = section(text_of("RESUMED_STREAMS.md"), "When no pod is asked for the rest")
    table = next(part for part in text.split("\n\n") if part.startswith("| `then`"))
    named = {cells[0].strip("`") for cells in rows(table)}
    counted = re.findall(r'^warmroute_gateway_broken_attempts_total\{then="(\w+)"\}', gateway_text(), re.MULTILINE)
    assert named == set(counted)


# The rules see what they forbid.


def test_the_readers_of_pages() -> None:
    text = "# a\n\n## b\n\n| h | i |\n|---|--:|\n| `x` | 1 |\n\n### c\n\n## d\n\n| h | i |\n|---|---|\n| y | `p` |\n"
    assert rows(text) == [["`x`", "1"], ["y", "`p`"]]
    assert section(text, "b").count("###") == 1
    assert "`p`" not in section(text, "b")
    assert FLAG.findall("`--a-b c`, -- d, e--f, `--no-g`") == ["--a-b", "--no-g"]
    assert {"--policy", "--no-resume-streams", "--expires", "--once"} <= flags()
    assert "--session-rate" not in flags()
