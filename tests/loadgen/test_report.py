"""The report as a reader and as a program sees it."""

from __future__ import annotations

import io
from html.parser import HTMLParser

import orjson
import pytest
from rich.console import Console

from loadgen.metrics import DEFINITIONS
from loadgen.report import render_html, table, write_report

REQUIRED = [
    *("cached_token_rate", "mean_ttft_ms", "median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms"),
    *("request_throughput", "imbalance", "completed", "failed"),
]
VOID = {"meta", "link", "br"}


class Document(HTMLParser):
    """Collects attributes and text, and insists that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def comparison(make_record, make_comparison):
    def arm(factor: float, pods: int):
        return [
            make_record(i // 3, i % 3, (0.05 + i % 7 / 10) * factor, intended_s=i / 2, pod=f"pod-{i % pods}")
            for i in range(60)
        ]

    return make_comparison({"round_robin": arm(1, 4), "least_loaded": arm(0.9, 4), "predicted_ttft": arm(0.3, 2)})


def test_html_refers_to_nothing_outside_itself(comparison):
    document = Document(render_html(comparison, {}))
    for tag, name, value in document.attributes:
        if name in ("src", "href", "xlink:href", "data", "srcset", "action"):
            assert value.startswith(("#", "data:")), (tag, name, value)
        if name == "style":
            assert "url(" not in value.replace("url(#", "")
    assert "@import" not in render_html(comparison, {})
    assert not {"script", "iframe", "img"} & {tag for tag, _, _ in document.attributes}


def test_ids_are_unique_and_every_reference_inside_resolves(comparison):
    attributes = Document(render_html(comparison, {})).attributes
    ids = [value for _, name, value in attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 0
    for _, name, value in attributes:
        if name in ("href", "xlink:href") and value.startswith("#"):
            assert value[1:] in ids
        if "url(#" in value:
            assert value.split("url(#")[1].split(")")[0] in ids


def test_html_says_what_a_reader_needs(comparison):
    text = " ".join(Document(render_html(comparison, {"CPU cores": "2 <small>"})).words)
    for needed in ("predicted_ttft won", "2 <small>", "--session-rate", "Requests per pod", *DEFINITIONS.values()):
        assert needed in text
    assert "nan" not in text.lower().split()


def test_html_text_is_escaped(make_record, make_comparison):
    html = render_html(make_comparison({"<b>&": [make_record(failure="<i>")]}), {"<u>": "<s>"})
    assert not any(tag in html for tag in ("<b>", "<i>", "<u>", "<s>"))
    Document(html)


def test_result_json_has_the_promised_keys(comparison, tmp_path):
    paths = write_report(comparison, tmp_path / "deep" / "out", {"CPU cores": "2"})
    result = orjson.loads(paths.json.read_bytes())
    assert list(result["arms"]) == ["round_robin", "least_loaded", "predicted_ttft"]
    for arm in result["arms"].values():
        assert all(isinstance(arm[key], int | float) for key in REQUIRED)
        assert set(arm["pods"]) == {"pod-0", "pod-1", "pod-2", "pod-3"}
    assert result["arms"]["predicted_ttft"]["pods"]["pod-3"]["requests"] == 0
    assert result["configuration"]["url"] == "http://gateway:1"
    assert result["definitions"].keys() >= {"ttft", "imbalance"}
    assert [c["judgement"] for c in result["contrasts"]] == ["better", "better"]
    assert result["facts"] == {"CPU cores": "2"}
    assert paths.html.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_an_arm_in_which_everything_failed_still_makes_a_report(make_record, make_comparison, tmp_path):
    down = [make_record(i, 0, failure="http 503", first_token_s=None, pod="") for i in range(4)]
    comparison = make_comparison({"round_robin": [make_record()], "cache_aware": down})
    write_report(comparison, tmp_path, {})
    assert orjson.loads((tmp_path / "result.json").read_bytes())["arms"]["cache_aware"]["failures"] == {"http 503": 4}


def test_the_table_shows_every_arm_in_a_terminal_of_100_columns(comparison):
    out = io.StringIO()
    Console(file=out, width=100).print(table(comparison))
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert [line.split()[0] for line in lines[-3:]] == ["round_robin", "least_loaded", "predicted_ttft"]
    assert "…" not in out.getvalue()
