"""The search for faster settings, on the CPU: candidates do the same work, and changed settings are restored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from triton.runtime.errors import OutOfResources, PTXASError

from engine.backend.cuda.kernels import decode, linear, prefill
from tests.bench.gpu import tune
from tests.bench.gpu.tune import KERNELS, Candidate, Shape, Tried, Tuner, as_markdown, best, decode_candidates, main

SMALL = Shape(
    heads=2, kv_heads=1, dim=16, hidden=32, inner=64, layers=1, decodes=((1, 320),), prefills=((2, 1100),), rows=(2,)
)
MODULES: tuple[Any, ...] = (decode, linear, prefill)


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each call once: kernels take seconds in the interpreter, and their times mean nothing."""

    def timed_s(_device: torch.device, work: Callable[[], object], _repeats: int) -> float:
        work()
        return 1e-3

    monkeypatch.setattr(tune, "timed_s", timed_s)


def settings() -> list[object]:
    return [
        getattr(module, name, None)
        for module in MODULES
        for name in ("launch_for", "INTERPRETED", "PART_TOKENS", "LINES_AHEAD")
    ]


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_candidates_are_measured_and_put_back(kernel: str) -> None:
    before, kept = settings(), []
    tuner = Tuner(SMALL, torch.device("cpu"), keep=lambda: kept.append(1), until_s=math.inf)
    candidates = KERNELS[kernel]()[::6]
    getattr(tuner, kernel)(candidates)
    assert settings() == before
    sizes = {one.what for one in tuner.tried}
    assert len(kept) == len(sizes)
    expected = [(what, name) for what in sizes for name in ("in use", *(c.name for c in candidates))]
    assert sorted((one.what, one.settings) for one in tuner.tried) == sorted(expected)
    assert all(0 < one.seconds < math.inf and one.ratio > 0 for one in tuner.tried)
    work = {"decode": 2 * 320 * 16 * 2, "prefill": 4 * 2 * 16 * (1101 + 1102)}
    assert {one.work for one in tuner.tried} >= ({work[kernel]} if kernel in work else {2 * 64 * 32 * 2})


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_every_candidate_has_a_name_and_settings_of_its_own(kernel: str) -> None:
    candidates = KERNELS[kernel]()
    assert len({candidate.name for candidate in candidates}) == len(candidates)
    before = settings()
    for candidate in candidates:
        with candidate.in_use():
            assert settings() != before
    assert settings() == before


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_every_candidate_computes_the_same(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results agree up to rounding, because other tiles add in another order."""
    found: list[torch.Tensor] = []

    def measured(self: Tuner, candidate: Candidate, work: Callable[[], None]) -> float:
        out = cast(Any, work).__defaults__[1]
        out.fill_(torch.nan)
        with candidate.in_use():
            work()
        found.append(out.float().clone())
        return 1.0

    monkeypatch.setattr(Tuner, "_measured", measured)
    candidates = KERNELS[kernel]()[::4]
    getattr(Tuner(SMALL, torch.device("cpu"), keep=lambda: None, until_s=math.inf), kernel)(candidates)
    for at in range(0, len(found), len(candidates) + 1):
        in_use, *others = found[at : at + len(candidates) + 1]
        assert in_use.isfinite().all()
        assert all((other - in_use).norm() < 0.05 * in_use.norm() for other in others)


@pytest.mark.parametrize(
    "error",
    [OutOfResources(245_760, 232_448, "shared memory"), PTXASError("too many registers"), RuntimeError("CUDA error")],
    ids=lambda error: type(error).__name__,
)
def test_a_size_that_does_not_fit_is_reported_and_skipped(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    tuner = Tuner(SMALL, torch.device("cpu"), keep=lambda: None, until_s=math.inf)
    tuner.prefill([Candidate("too large", prefill, {"early": refuse})])
    assert [one.seconds == math.inf for one in tuner.tried] == [False, True]
    assert "too large: does not fit" in capsys.readouterr().err
    assert [json.loads(json.dumps(one.as_json(), allow_nan=False))["seconds"] for one in tuner.tried] == [1e-3, None]


def test_no_candidate_begins_when_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    tuner = Tuner(SMALL, torch.device("cpu"), keep=lambda: None, until_s=-math.inf)
    tuner.decode(decode_candidates())
    assert [one.settings for one in tuner.tried] == ["in use"]
    assert "the time is over" in capsys.readouterr().err


def test_the_best_is_good_for_all_sizes() -> None:
    tried = [
        Tried("decode", size, name, 1 / ratio, ratio)
        for size, ratios in (("a", (1, 2, 0.25, 3)), ("b", (1, 1, 2, 0)))
        for name, ratio in zip(("in use", "steady", "uneven", "does not fit"), ratios, strict=True)
        if ratio
    ]
    (found,) = best(tried)
    assert found == pytest.approx(("decode", "steady", math.sqrt(2)))
    assert "| decode | steady | 1.414 |" in as_markdown(tried)


def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--kernels", "decode,flash"])
    with pytest.raises(SystemExit):
        main(["--device", "gpu"])
