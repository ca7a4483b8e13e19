"""The report page, from the point of view of a browser and of a reader."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.output.columns import shown_columns
from loadgen.output.html import render_html
from loadgen.output.plots.catalog import plots_of
from loadgen.output.style import theme
from loadgen.output.style.units import interval, metric_label, ratio
from loadgen.result.model import Arm
from tests.loadgen.output import results
from tests.loadgen.output.documents import Document

REFERENCES = ("src", "href", "xlink:href", "data", "srcset", "action", "poster", "cite", "xmlns", "xmlns:xlink")


@cache
def page_of(name: str) -> str:
    return render_html(results.named(name))


@pytest.mark.parametrize("name", results.NAMES)
def test_page_is_well_formed_and_refers_to_nothing_outside(name: str) -> None:
    document = Document(page_of(name))
    for tag, attribute, value in document.attributes:
        if attribute in REFERENCES:
            assert value.startswith(("#", "data:")), (tag, attribute, value)
        assert "url(" not in value.replace("url(#", "")
    style = page_of(name).split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "//" not in style
    assert not document.tags & {"script", "iframe", "img", "object", "embed", "base", "form"}


@pytest.mark.parametrize("name", results.NAMES)
def test_ids_are_unique_and_references_inside_resolve(name: str) -> None:
    attributes = Document(page_of(name)).attributes
    ids = [value for _, attribute, value in attributes if attribute == "id"]
    assert len(ids) == len(set(ids))
    for _, attribute, value in attributes:
        if attribute == "href" and value.startswith("#"):
            assert value[1:] in ids
        for target in re.findall(r"url\(#([^)]*)\)", value):
            assert target in ids


@pytest.mark.parametrize("name", results.NAMES)
def test_table_has_every_arm_with_the_numbers_of_its_summary(name: str) -> None:
    result = results.named(name)
    rows = Document(page_of(name)).rows
    columns = shown_columns([arm.summary for arm in result.arms])
    for arm in result.arms:
        heading = arm.name if arm.summary.validity.valid else f"{arm.name} not valid"
        assert [heading, *(column.cell(arm.summary) for column in columns)] in rows
    for c in result.contrasts:
        row = next(row for row in rows if row[0] == f"{metric_label(c.metric)}: {c.arm}")
        assert row[1:] == [interval(c.metric, c.difference), ratio(c.ratio), c.better, str(c.pairs), c.judgement]


@pytest.mark.parametrize("name", results.NAMES)
def test_page_says_what_a_reader_needs(name: str) -> None:
    result = results.named(name)
    text = " ".join(Document(page_of(name)).words)
    for needed in (*result.verdict, *result.cautions, *result.definitions.values(), *result.workload.values()):
        assert needed in text
    for arm in result.arms:
        for example in arm.summary.failure_details.values():
            assert example in text
    assert not {"nan", "inf", "none"} & set(text.lower().split())


@pytest.mark.parametrize("name", results.NAMES)
def test_every_chart_says_in_words_what_it_shows(name: str) -> None:
    alts = [value for tag, attribute, value in Document(page_of(name)).attributes if attribute == "aria-label"]
    plots = plots_of(results.named(name))
    assert alts == [plot.alt for plot in plots]
    for plot in plots:
        assert len(plot.alt) > len(plot.title)
        assert any(letter.isdigit() for letter in plot.alt)


def test_page_is_small_enough_to_mail() -> None:
    assert len(page_of("comparison").encode()) < 2_000_000
    assert len(page_of("many_pods").encode()) < 2_000_000


@pytest.mark.parametrize("name", results.NAMES)
def test_charts_have_only_colours_that_a_dark_page_changes(name: str) -> None:
    svgs = re.findall(r"<svg.*?</svg>", page_of(name), flags=re.DOTALL)
    assert len(svgs) == len(plots_of(results.named(name)))
    for svg in svgs:
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {"#000000"}  # matplotlib writes it for "inherit"


def test_colours_belong_to_arms_and_the_baseline_is_grey() -> None:
    slots = theme.slots(results.named("comparison"))
    assert slots["round_robin"] == 0
    assert sorted(slots.values()) == [0, 1, 2, 3]
    many = theme.slots(results.named("many_arms"))
    looks = [(theme.colour(slot), theme.dash(slot)) for slot in many.values()]
    assert len(set(looks)) == len(looks) == 10


names = st.text(min_size=1, max_size=40)


@settings(max_examples=5)
@given(st.lists(names, min_size=1, max_size=3, unique=True), st.text(max_size=60))
def test_any_name_and_any_text_is_shown_as_text(found: list[str], words: str) -> None:
    summaries = [results.summary(pods=2, failed=9, requests=60) for _ in found]
    arms = tuple(
        Arm(name=name, url=words, summary=s.model_copy(update={"failure_details": {"timeout": words}}), policy=words)
        for name, s in zip(found, summaries, strict=True)
    )
    page = render_html(
        results.result(arms=arms, baseline=found[0], verdict=(words,), model=words, facts={words: words})
    )
    document = Document(page)
    assert document.tags <= Document(page_of("comparison")).tags | {"strong", "q", "ul", "li", "em"}
    shown = " ".join("".join(document.words).split())
    for text in (*found, words):
        # A parser changes NUL and lone carriage returns, and folds blanks.
        if text.isprintable():
            assert " ".join(text.split()) in shown


def test_nothing_is_drawn_and_no_matplotlib_imported_unless_a_page_is_wanted() -> None:
    code = (
        "import sys, loadgen.output.save, loadgen.output.terminal, loadgen.output.live, loadgen.commands.report;"
        "sys.exit('matplotlib' in sys.modules or 'jinja2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
