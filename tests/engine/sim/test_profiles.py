"""Built-in profiles and profile files."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.profile_file import load_profile, profile_text
from engine.backend.profiles import PROFILES, SimProfile

POSITIVE = st.floats(1e-12, 1e4)


@given(st.lists(POSITIVE, min_size=6, max_size=6), st.integers(1, 10**8))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, constants: list[float], kv_tokens: int
) -> None:
    profile = SimProfile("mine", *cast(Any, [*constants, kv_tokens]))
    path = tmp_path_factory.mktemp("profile") / "any.yaml"
    path.write_text(profile_text(profile, "two\n\nlines"))
    assert load_profile(str(path)) == profile


def test_names_are_built_in_profiles_and_a_file_without_a_name_is_called_after_itself(tmp_path: Path) -> None:
    assert load_profile("l4-8b") is PROFILES["l4-8b"]
    content = {f.name: getattr(PROFILES["h100-8b"], f.name) for f in fields(SimProfile) if f.name != "name"}
    (tmp_path / "mine.yml").write_text(yaml.safe_dump(content))
    assert load_profile(str(tmp_path / "mine.yml")) == replace(PROFILES["h100-8b"], name="mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w0_ms": None}, "w0_ms: Input should be a valid number"),
        ({"c2_ms": -1}, "c2_ms: Input should be greater than or equal to 0"),
        ({"c3_ms": float("nan")}, "c3_ms"),
        ({"kv_tokens": 0}, "kv_tokens: Input should be greater"),
        ({"host_gbps": 20}, "host_gbps: Extra inputs"),
        ({"w0_ms": 0, "a_ms": 0}, "w0_ms or a_ms must be above 0"),
    ],
)
def test_a_bad_field_is_named_with_the_file(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "bad.yaml"
    content = {f.name: getattr(PROFILES["h100-8b"], f.name) for f in fields(SimProfile)}
    path.write_text(yaml.safe_dump({**content, **change}))
    with pytest.raises(ValueError, match=rf"bad\.yaml: .*{message}"):
        load_profile(str(path))


@pytest.mark.parametrize("text", [None, "", "- 1", "a: [", "w0_ms: 1"])
def test_a_file_that_is_no_profile_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.yaml"):
        load_profile(str(path))


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'b200'; there are: h100-8b, .*\.yaml"):
        load_profile("b200")


def test_70b_on_four_gpus_scales_from_8b_as_documented() -> None:
    small, large = PROFILES["h100-8b"], PROFILES["h100-70b-tp4"]
    assert large.c2_ms / small.c2_ms == pytest.approx(80 * 64 / (32 * 32) / 4, rel=0.01)
    assert large.c3_ms / small.c3_ms == pytest.approx(320 / 128 / 4, rel=0.01)
    assert large.kv_tokens == pytest.approx((0.9 * 320e9 - 141e9 - 8e9) / (320 * 1024), rel=0.01)
