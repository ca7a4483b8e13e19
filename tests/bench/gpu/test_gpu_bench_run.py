"""The benchmark end to end on the CPU: a tiny model, the CUDA backend in Triton's interpreter, and transformers."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from engine.backend.cuda.kernels import activation, decode, norm, prefill, rope_store
from engine.backend.cuda.memory import CudaStartError
from engine.startup.settings import EngineSettings
from tests.bench.gpu import SECTIONS, sections
from tests.bench.gpu import __main__ as program
from tests.bench.gpu.arithmetic import decode_work
from tests.bench.gpu.checks import (
    PREFILL_SHARE,
    PROMOTION_RATIO,
    THROUGHPUT_RATIO,
    WARM_TTFT_S,
    Check,
    decode_bound,
    exit_status,
)
from tests.bench.gpu.models import TINY, Model
from tests.bench.gpu.parts import ceilings
from tests.bench.gpu.parts.engine_run import EngineShape
from tests.bench.gpu.parts.profiling import StepProfile, kernel_shares, kind_of
from tests.bench.gpu.parts.serving import ServedWorkload, WarmFigure
from tests.bench.gpu.parts.steps import DecodeFigure, PrefillFigure
from tests.bench.gpu.parts.tier_run import PromotionFigure
from tests.bench.gpu.parts.transformers_run import NO_TIE, TIE_BOUND, Agreement, Transformers, first_difference
from tests.bench.gpu.report import WORKLOADS, Comparison, Results, as_markdown, checks
from tests.bench.gpu.sections import run_sections
from tests.bench.gpu.sizes import FULL, QUICK
from tests.bench.gpu.workloads import Workload

ROOT = Path(__file__).parents[3]
NOT_NEEDED = (
    "orjson",
    "pydantic",
    "pydantic_settings",
    "redis",
    "prometheus_client",
    "uvloop",
    "aiohttp",
    "llguidance",
)
"""Packages of the server; a machine lent for its card has none of them."""
RUN = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))  # importing one of these fails
sys.argv = ["gpu-bench", "--tiny", "--device", "cpu", "--out", sys.argv[1]]
runpy.run_module("tests.bench.gpu", run_name="__main__")
"""
MODEL = Model(TINY, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Return the program's exit and its folder of results."""
    out = tmp_path_factory.mktemp("bench")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", RUN, str(out)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280), out


@pytest.mark.timeout(300)
def test_a_tiny_run_measures_everything(tiny: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, out = tiny
    report = json.loads((out / "report.json").read_text())
    verdicts = {check["what"]: check["verdict"] for check in report["checks"]}
    assert report["failures"] == {}, done.stderr
    assert "not measured" not in verdicts.values()
    assert done.returncode == ("missed" in verdicts.values()), done.stderr
    for what, verdict in verdicts.items():
        assert f"{verdict:12} {what}: " in done.stdout
    assert [check["what"] for check in report["checks"]] == list(verdicts)
    assert len(report["profiles"]) == 3
    assert all(profile["kernels"] for profile in report["profiles"])
    assert all(f"\n{section}\n" in f"\n{done.stderr}" for section in SECTIONS)
    assert done.stderr.index("\nprofile\n") > done.stderr.rindex(", transformers: "), "a profiler slows later work"


@pytest.mark.timeout(300)
def test_a_tiny_runs_answers_are_those_of_transformers(
    tiny: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    """Answers are greedy, over mixed steps, cached prefixes and two steps in flight; none of this depends on speed."""
    report = json.loads((tiny[1] / "report.json").read_text())
    verdicts = {check["what"]: check["verdict"] for check in report["checks"]}
    assert all(verdict == "kept" for what, verdict in verdicts.items() if "greedy" in what or "reused" in what)
    for comparison in report["comparisons"]:
        assert comparison["agreement"]["equal_tokens"] == comparison["agreement"]["tokens"] > 0
    shared = report["comparisons"][1]
    assert shared["ours_cached_tokens"] == 32, "one prompt of three begins like another"


@pytest.mark.timeout(300)
def test_a_tiny_runs_shares_are_of_its_own_ceilings(
    tiny: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    report = json.loads((tiny[1] / "report.json").read_text())
    ceilings = report["ceilings"]
    for figure in report["decode"]:
        middle = figure["context"] + 2  # warm-up steps add two tokens
        work = decode_work(MODEL.config, [middle] * figure["batch"], 4)
        seconds = work.seconds(ceilings["copy_bytes_per_s"], ceilings["matmul_flops_per_s"])
        assert figure["roofline_s"] == pytest.approx(seconds)
        assert figure["share"] == pytest.approx(seconds / figure["step_s"])
    text = (tiny[1] / "report.md").read_text()
    for title in ("Decode", "Prefill", "Time to first token", "Promotion from the host tier", "Against", "Bounds"):
        assert f"\n## {title}" in text
    assert text.count("| kernel | calls | ms | share |") == 3


@pytest.mark.parametrize("copies", [(3.0, 1.0), (1.0, 3.0)], ids=["kernel", "driver"])
def test_the_faster_way_to_copy_is_the_ceiling(copies: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The products come first, on a card that is still warm from computing."""
    matmul_s, up_s, down_s = 0.5, 8.0, 16.0
    times = iter((matmul_s, *copies, down_s, up_s))

    def timed_s(_device: torch.device, work: Any, _repeats: int) -> float:
        work()
        return next(times)

    monkeypatch.setattr(ceilings, "timed_s", timed_s)
    found = ceilings.measure_ceilings(torch.device("cpu"), torch.float32, copy_bytes=64, matmul_size=4)
    assert found == ceilings.Ceilings(2 * 64 / 1.0, 2 * 4**3 / matmul_s, 64 / up_s, 64 / down_s)


def just_kept(worse: str = "", by: float = 1.001) -> Results:
    """Return a full run whose figures are all better than their bounds by the factor `by`, but the figure named `worse`
    is worse by that factor."""

    def high(name: str, bound: float) -> float:
        return bound / by if name == worse else bound * by

    def low(name: str, bound: float) -> float:
        return bound * by if name == worse else bound / by

    comparisons = [
        Comparison(
            workload=workload,
            requests=8,
            input_tokens=8,
            output_tokens=8,
            ours_cached_tokens=0,
            ours_tokens_per_s=high(f"throughput {workload}", THROUGHPUT_RATIO),
            theirs_tokens_per_s=1.0,
            theirs_unanswered=0,
            theirs_attention="sdpa",
            agreement=Agreement(8, 7, 60, 64, low(f"gap {workload}", TIE_BOUND)),
        )
        for workload in WORKLOADS
    ]
    return Results(
        {},
        decode=[
            DecodeFigure(batch, context, 1.0, high(f"decode {batch} {context}", decode_bound(batch)), False)
            for context in FULL.contexts
            for batch in FULL.batches
        ],
        prefill=[PrefillFigure(n, 1.0, high(f"prefill {n}", PREFILL_SHARE), 1.0) for n in FULL.prefills],
        warm=WarmFigure(8000, 7887 if worse == "reused" else 7888, low("warm", WARM_TTFT_S), 1.0),
        promotion=PromotionFigure(8000, 1, low("promotion", PROMOTION_RATIO), 1.0, 1.0, 1.0, 1.0, 1.0),
        comparisons=comparisons,
    )


FIGURES = {
    **{f"decode {n} {c}": f"decode, batch {n}, context {c}:" for c in FULL.contexts for n in FULL.batches},
    **{f"prefill {n}": f"prefill of {n}:" for n in FULL.prefills},
    "reused": "tokens reused",
    "warm": "TTFT",
    "promotion": "promotion",
    **{f"{kind} {w}": f"{w}: {what}" for w in WORKLOADS for kind, what in (("throughput", "thr"), ("gap", "widest"))},
}


def test_a_run_that_is_just_good_enough_keeps_every_bound() -> None:
    found = checks(just_kept(), FULL)
    assert {check.verdict for check in found} == {"kept"}
    assert len(found) == len(FIGURES)
    assert {check.verdict for check in checks(Results({}), FULL)} == {"not measured"}


@pytest.mark.parametrize("worse", FIGURES)
def test_a_figure_that_is_just_too_bad_misses_its_own_bound_and_no_other(worse: str) -> None:
    missed = [check.what for check in checks(just_kept(worse), FULL) if check.verdict == "missed"]
    assert len(missed) == 1
    assert missed[0].startswith(FIGURES[worse])


def test_large_batches_have_a_bound_of_their_own() -> None:
    """The share lost between kernels grows with the number of sequences."""
    assert [decode_bound(batch) for batch in (1, 64, 65, 256)] == [0.8, 0.8, 0.7, 0.7]


def test_a_quick_run_says_what_it_left_out() -> None:
    results = Results({}, decode=[DecodeFigure(1, 1024, step_s=0.01, roofline_s=0.009, shared_blocks=False)])
    found = checks(results, QUICK)
    assert len(found) == len(checks(results, FULL))
    assert [check.verdict for check in found].count("kept") == 1
    assert "not measured decode, batch 256, context 8192" in as_markdown(results, QUICK)


@pytest.mark.parametrize(
    ("values", "status"), [((0.9, None), 0), ((0.9, 0.7), 1), ((None, None), 2), ((float("nan"), 0.9), 1), ((0.8,), 0)]
)
def test_the_exit_status_is_that_of_the_bounds(values: tuple[float | None, ...], status: int) -> None:
    assert exit_status([Check("x", value, 0.8, True) for value in values]) == status


def test_a_bound_may_be_the_most_a_value_may_be() -> None:
    assert [Check("x", value, 1.3, False).verdict for value in (1.2, 1.3, 1.31)] == ["kept", "kept", "missed"]
    assert str(Check("TTFT", 0.5, 0.012, False, " s")) == "missed       TTFT: 0.5 s (<= 0.012 s)"


async def test_a_section_that_fails_is_noted_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    results, ran = Results({}), []

    async def fails() -> None:
        raise ValueError("no room")

    async def works() -> None:
        ran.append(True)

    kept: list[int] = []
    await run_sections({"decode": fails, "prefill": works}, results, lambda: kept.append(len(ran)), math.inf)
    assert results.failures == {"decode": "ValueError: no room"}
    assert ran == [True]
    assert kept == [0, 1], "results are kept after each section"
    assert "in fails\n" in capsys.readouterr().err, "where it failed"
    assert "* failed: decode: ValueError: no room" in as_markdown(results, FULL)


async def test_no_section_begins_when_the_time_is_over() -> None:
    results, ran = Results({}), []

    async def runs() -> None:
        ran.append(True)

    await run_sections({"decode": runs}, results, lambda: None, time.monotonic())
    assert ran == []
    assert results.failures == {"decode": "TimeoutError: not begun: the time limit of the whole run has passed"}


@pytest.mark.parametrize(("share", "fails", "status"), [(0.9, False, 0), (0.9, True, 1), (0.5, False, 1)])
def test_the_programs_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float, fails: bool, status: int
) -> None:
    async def measure(self: Any, wanted: frozenset[str]) -> None:
        assert wanted == {"decode"}
        self._results.decode.append(DecodeFigure(1, 16, step_s=1.0, roofline_s=share, shared_blocks=False))
        if fails:
            self._results.failures["prefill"] = "no room"

    monkeypatch.setattr(sections.Bench, "measure", measure)
    options = ["--tiny", "--device", "cpu", "--sections", "decode", "--out", str(tmp_path / "new")]
    assert program.main(options) == status
    assert json.loads((tmp_path / "new" / "report.json").read_text())["decode"][0]["share"] == share


def test_a_run_that_is_killed_leaves_what_it_has_measured(tmp_path: Path) -> None:
    """The run is killed by the signal that cannot be caught, after the first figure of decode."""
    code = f"""
import os, signal
from tests.bench.gpu import __main__ as program
from tests.bench.gpu.parts import steps
first = steps.Steps.decode
async def once(self, *args):
    if self.__dict__.setdefault("measured", False):
        os.kill(os.getpid(), signal.SIGKILL)
    self.measured = True
    return steps.DecodeFigure(args[0], args[1], step_s=1.0, roofline_s=0.5, shared_blocks=False)
steps.Steps.decode = once
program.main(["--tiny", "--device", "cpu", "--sections", "decode", "--out", {str(tmp_path)!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [figure["share"] for figure in report["decode"]] == [0.5]
    assert report["ceilings"]["copy_bytes_per_s"] > 0
    assert "kept" not in {check["verdict"] for check in report["checks"]}
    assert "decode, batch 1, context 16: share of the roofline: 0.5" in (tmp_path / "report.md").read_text()


def test_a_start_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(*_: Any) -> Any:
        raise CudaStartError("too little memory")

    monkeypatch.setattr(sections, "start_backend", start)
    options = ["--tiny", "--device", "cpu", "--sections", "decode", "--out", str(tmp_path)]
    assert program.main(options) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == {"start": "CudaStartError: too little memory"}
    assert report["ceilings"]["matmul_flops_per_s"] > 0


@pytest.mark.parametrize(
    "options", [["--device", "tpu"], ["--sections", "decode,all"], ["--quick", "--tiny"], ["--device", "cpu"]]
)
def test_options_that_make_no_sense_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(options)
    assert ended.value.code == 2
    assert "usage: python -m tests.bench.gpu" in capsys.readouterr().err


def test_a_card_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--device", "cuda:99"]) == 2
    assert "torch sees no device cuda:99" in capsys.readouterr().err


def test_answers_are_compared_to_where_they_part() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


class Manager:
    """Replaces transformers' manager; never answers its sixth request."""

    def __init__(self) -> None:
        self.asked = 0
        self.open: list[str] = []
        self.stopped = False

    def add_request(self, ids: list[int], max_new_tokens: int) -> str:
        self.asked += 1
        self.open.append(f"r{self.asked}")
        return self.open[-1]

    def get_result(self, timeout: float) -> Any:
        if self.open in ([], ["r6"]):
            time.sleep(timeout)
            return None
        answered = self.open.pop(0)
        return SimpleNamespace(request_id=answered, generated_tokens=[7, 8], error=None, is_finished=lambda: True)

    def is_running(self) -> bool:
        return True

    def stop(self, *, block: bool, timeout: float, hard_stop: bool) -> None:
        assert block
        assert hard_stop
        self.stopped = True


def test_what_transformers_does_not_answer_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers that did come give an upper bound of the throughput."""
    theirs = Transformers(MODEL, small=True)
    workload = Workload("ShareGPT-like", [([5], 2), ([6], 2), ([7], 10)])

    @contextmanager
    def serving(**options: object) -> Iterator[Manager]:
        manager = Manager()
        yield manager
        assert manager.stopped, "otherwise it would answer everything first"

    monkeypatch.setattr(theirs.model, "continuous_batching_context_manager", serving)
    served = theirs.serve(workload, 0.1)
    assert 0.1 <= served.elapsed_s < 5
    assert (served.answers, served.unanswered) == ([[7, 8], [7, 8], []], 1)
    assert served.output_tokens_per_s == pytest.approx(14 / served.elapsed_s)
    agreement = theirs.agreement([[7, 8], [7, 8], [9] * 10], served)
    assert (agreement.requests, agreement.equal, agreement.tokens) == (2, 2, 4)
    verdicts = []
    for ours in (1.9, 2.1):
        figure = Comparison("ShareGPT-like", 3, 3, 14, ours, 0, 1.0, served.unanswered, "sdpa", agreement)
        found = checks(Results({}, comparisons=[figure]), FULL)
        verdicts.append(next(check.verdict for check in found if "throughput" in check.what))
        assert f"< 1 | > {ours:.2f} | 2/2" in as_markdown(Results({}, comparisons=[figure]), FULL)
    assert verdicts == ["not measured", "kept"], "a lower bound can keep the bound, but cannot miss it"


def test_a_wrong_token_is_no_tie() -> None:
    """The model's best token differs from its worst by several standard deviations, and from itself by none."""
    theirs = Transformers(MODEL, small=True)
    prompt = [5, 9, 2, 77]
    with torch.inference_mode():
        row = theirs.model(torch.tensor([prompt])).logits[0, -1]
    best, worst = int(row.argmax()), int(row.argmin())
    served = ServedWorkload(Workload("w", [(prompt, 1), (prompt, 1), (prompt, 2)]), [[best], [best], [best, 3]], 1.0)
    same = theirs.agreement([[best], [best], [best, 3]], served)
    assert (same.equal, same.equal_tokens, same.tokens, same.widest_gap) == (3, 4, 4, 0)
    wrong = theirs.agreement([[best], [worst], [best, 3]], served)
    assert (wrong.equal, wrong.equal_tokens) == (2, 3)
    assert wrong.widest_gap == pytest.approx(float((row[best] - row[worst]) / row.std()), rel=1e-4)
    assert wrong.widest_gap > 3
    assert theirs.agreement([[best], [best], [best]], served).widest_gap == NO_TIE, "an answer is too short"
    theirs.gap = lambda *_: math.nan  # type: ignore[method-assign]
    assert theirs.agreement([[best], [worst], [best, 3]], served).widest_gap == NO_TIE


def test_the_engine_that_is_measured_attends_as_the_one_that_serves() -> None:
    assert EngineShape(16, 64, 2, 64).attention == EngineSettings.model_fields["attention"].default


def test_the_attention_of_transformers_is_told_as_it_was_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers switches the implementation for its batching, and restores it at the end."""
    theirs = Transformers(MODEL, small=True)
    config = theirs.model.config

    @contextmanager
    def serving(**options: object) -> Iterator[None]:
        before, config._attn_implementation = config._attn_implementation, "paged|eager"
        yield
        config._attn_implementation = before

    monkeypatch.setattr(theirs.model, "continuous_batching_context_manager", serving)
    monkeypatch.setattr(theirs, "_answers", lambda *_: [[1]])
    before = config._attn_implementation
    assert theirs.serve(Workload("w", [([5], 1)]), 1.0).attention == "paged|eager"
    assert config._attn_implementation == before != "paged|eager"


def test_the_engine_and_transformers_have_the_same_weights() -> None:
    """Two query heads share a KV head, so another order of the heads would give other values."""
    made = replace(MODEL, fields=TINY | {"num_attention_heads": 4, "num_key_value_heads": 2})
    theirs, ours = made.transformers_model(), made.decoder()
    layer = theirs.model.layers[0]
    assert torch.equal(theirs.model.embed_tokens.weight, ours.weights.embedding)
    assert torch.equal(layer.input_layernorm.weight, ours.weights.layers[0].input_norm)
    x = torch.randn((3, 32))
    torch.testing.assert_close(layer.mlp.down_proj(x), ours.weights.layers[0].down(x))
    torch.testing.assert_close(layer.self_attn.v_proj(x), ours.weights.layers[0].qkv(x)[:, -16:])


def test_on_a_card_kernels_alone_are_counted() -> None:
    """Operations that launch kernels do not count. A kernel launched early counts from the previous kernel's end."""
    kinds = DeviceType

    def event(name: str, kind: Any, start: float, end: float) -> Any:
        return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event("nvjet_tst", kinds.CUDA, 3000, 9000),
        event("cudaLaunchKernel", kinds.CPU, 0, 9),
        event("_norm", kinds.CUDA, 1000, 2000),
        event("aten::mm", kinds.CPU, 0, 20_000),
        event("_norm", kinds.CUDA, 4000, 10_000),  # launched early
        event("memset", kinds.CUDA, 5000, 6000),  # entirely during other kernels
    ]
    shares = kernel_shares(events, 2)
    assert [(k.name, k.seconds, k.calls) for k in shares] == [("nvjet_tst", 0.003, 0.5), ("_norm", 0.001, 1)]
    profile = StepProfile("x", 0.01, shares)
    assert profile.by_kind() == [("matrix products", 0.003), ("norm", 0.001)]
    assert profile.lost == 0.5, "the matrix product of one of the two steps is missing"
    report = as_markdown(Results({}, profiles=[profile]), QUICK)
    assert "The profiler has lost 0.5 launches of a step or more" in report
    assert "has lost" not in as_markdown(Results({}, profiles=[replace(profile, kernels=shares[1:])]), QUICK)
    with pytest.raises(RuntimeError, match="the profiler saw no kernel"):
        kernel_shares(events[1:2], 2)


@pytest.mark.parametrize(
    ("module", "kernel", "kind"),
    [
        (prefill, "_prefill", "attention"),
        (prefill, "_add_tile_parts", "attention"),
        (decode, "_attend_parts", "attention"),
        (decode, "_add_parts", "attention"),
        (norm, "_norm", "norm"),
        (rope_store, "_rope_store", "rotation and KV store"),
        (activation, "_silu_mul", "activation"),
        (None, "nvjet_tst_64x8_64x16_4x1_v_bz_TNN", "matrix products"),
        (None, "Memcpy HtoD (Pinned -> Device)", "copies"),
        (None, "at::native::reduce_kernel<512, 1, ArgMaxOps>", "sampling and indexing"),
        (None, "something_else", "other"),
    ],
)
def test_kernels_are_told_apart(module: Any, kernel: str, kind: str) -> None:
    assert module is None or hasattr(module, kernel), "the kernel has been renamed"
    assert kind_of(kernel) == kind
