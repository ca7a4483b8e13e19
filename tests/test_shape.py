"""`.ci/shape.py` sees what each of its rules forbids, at the size that is one too much, and nothing below that."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

shape = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "shape.py")))


def found(**files: str) -> list[tuple[str, str]]:
    """Return rule and place of what is forbidden; `files`: text by path, with `__` for `/`."""
    return [
        (one.rule, one.where)
        for one in shape.check({path.replace("__", "/") + ".py": text for path, text in files.items()})
    ]


def function(lines: int = 2, parameters: str = "", indent: str = "", head: str = "def") -> str:
    body = [f"{indent}    pass"] * (lines - 1)
    return "\n".join([f"{indent}{head} f({parameters}):", *body, ""])


@pytest.mark.parametrize("head", ["def", "async def"])
def test_a_function_may_have_60_lines(head: str) -> None:
    assert found(a=function(60, head=head)) == []
    assert found(a=function(61, head=head)) == [("lines", "a.py::f")]


def test_methods_and_functions_inside_others_count_too() -> None:
    method = "class C:\n    if True:\n" + function(61, indent="        ")
    assert found(a=method) == [("lines", "a.py::C.f")]
    assert found(a="def outer():\n" + function(59, indent="    ")) == []
    assert found(a="def outer():\n" + function(61, indent="    ")) == [
        ("lines", "a.py::outer"),
        ("lines", "a.py::outer.f"),
    ]


@given(positional_only=st.integers(0, 5), plain=st.integers(0, 6), keyword_only=st.integers(0, 6), bound=st.booleans())
def test_a_function_may_have_8_parameters(positional_only: int, plain: int, keyword_only: int, bound: bool) -> None:
    names = [*(["self"] * bound), *(f"p{number}" for number in range(positional_only))]
    parts = [*names, *(["/"] if names else []), *(f"q{number}" for number in range(plain)), "*args"]
    parts += [*(f"k{number}=0" for number in range(keyword_only)), "**more"]
    too_many = positional_only + plain + keyword_only > 8
    assert found(a=function(parameters=", ".join(parts))) == [("parameters", "a.py::f")] * too_many


def test_a_folder_may_have_20_files_and_its_init() -> None:
    files = {"part____init__": "", **{f"part__file{number}": "" for number in range(20)}, "part__below__more": ""}
    assert found(**files) == []
    assert found(**files, part__one_more="") == [("folder", "part")]


@pytest.mark.parametrize("call", ["f(*(1, 2))", "f(0, *[a, b], c=1)", "C(*(1,)).g()", "class C(f(*(1, 2))): pass"])
def test_arguments_are_not_packed(call: str) -> None:
    assert found(a=call) == [("packed", "a.py")]


@pytest.mark.parametrize("text", ["f(*args)", "f(*(x for x in y))", "x = [*(1, 2)]", "f(*tuple(y))", "f((1, 2))"])
def test_unpacking_what_is_not_written_out_is_fine(text: str) -> None:
    assert found(a=text) == []


@pytest.mark.parametrize("comment", ["# fmt: skip", "# fmt: off", "#fmt:skip", "x = 1  # fmt: skip", "# yapf: disable"])
def test_the_formatter_stays_on(comment: str) -> None:
    assert found(a=comment + "\n") == [("format", "a.py")]
    assert found(a=f"x = {comment!r}\n") == []


CIRCLES = {
    "direct": {"router__a__x": "import router.b.y", "router__b__y": "from router.a import x"},
    "of three": {
        "router__a__x": "from router.b.y import z",
        "router__b__y": "def f():\n    from router.c import w",
        "router__c__w": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from router.a.x import z",
    },
    "of a folder and one below it": {
        "router__a__x": "from router.a.b import y",
        "router__a__b__y": "from router.a import z",
    },
    "of parts of folders": {
        "router__a__x": "import router.b.y",
        "router__b__y": "",
        "router__b__c__z": "from router.a.d import w",
        "router__a__d__w": "",
    },
    "relative": {"router__a__x": "from ..b import y", "router__b__y": "from ..a.x import z"},
}


@pytest.mark.parametrize("files", CIRCLES.values(), ids=CIRCLES)
def test_folders_do_not_import_each_other(files: dict[str, str]) -> None:
    everything = {"router__a____init__": "", "router__b____init__": "", "router__a__z": "", **files}
    rules = found(**everything)
    assert {rule for rule, _ in rules} == {"circle"}
    assert all("router/a" in where for _, where in rules)
    for one in files:  # without any one import of it the circle is open
        if files[one]:
            assert found(**{**everything, one: ""}) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_imports_that_go_one_way_are_no_circle(pairs: list[tuple[int, int]]) -> None:
    lines: dict[int, list[str]] = {number: [] for number in range(6)}
    for one, other in pairs:
        if one != other:
            lines[min(one, other)].append(f"import loadgen.p{max(one, other)}.m")
    assert found(**{f"loadgen__p{number}__m": "\n".join(lines[number]) for number in lines}) == []


def test_modules_of_one_folder_and_of_other_packages_may_import_each_other() -> None:
    assert found(router__a__x="import router.a.y", router__a__y="import router.a.x") == []
    assert found(tests__a__x="import tests.b.y", tests__b__y="import tests.a.x") == []


def test_an_exception_excuses_its_rule_at_its_place_alone() -> None:
    finding = shape.Finding("lines", "a/b.py::C.f", 3, "too long")
    assert shape.judge([finding], [shape.Excused("lines", "a/*::C.f", "why")]) == []
    others = [shape.Excused("parameters", "a/*::C.f", "why"), shape.Excused("lines", "b/*", "why")]
    assert shape.judge([finding], others) == [
        "a/b.py:3: too long",
        ".ci/shape.py: nothing needs the exception parameters a/*::C.f",
        ".ci/shape.py: nothing needs the exception lines b/*",
    ]


def test_every_exception_has_a_reason() -> None:
    assert all(entry.reason for entry in shape.EXCUSED)
