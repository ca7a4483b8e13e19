"""result.json and vLLM's names: writing, reading back, refusing bad files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.output.vllm_block import our_block, vllm_block
from loadgen.result.files import ResultUnreadable, read_result, to_json
from loadgen.result.model import Arm
from loadgen.result.vllm import Detailed, bench_json, flat_summary
from tests.loadgen.output import results

ALL_METRICS = ("ttft", "tpot", "itl", "e2el")
DEMO_NAMES = (
    *("cached_token_rate", "mean_ttft_ms", "median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms"),
    *("request_throughput", "imbalance", "completed", "failed"),
)
VLLM_NAMES = (
    *("date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "median", "std", "p99")),
    *("mean_client_queue_time_ms", "mean_e2el_including_client_queue_ms"),
)


@pytest.mark.parametrize("name", results.NAMES)
def test_result_read_back_is_equal(name: str, tmp_path: Path) -> None:
    result = results.named(name)
    path = tmp_path / "result.json"
    path.write_bytes(to_json(result))
    assert read_result(path) == result
    path.write_bytes(orjson.dumps(result.model_dump(mode="json")))
    assert read_result(path) == result


@settings(max_examples=15)
@given(
    st.text(max_size=20),
    st.dictionaries(
        st.text(max_size=8), st.none() | st.integers(-9, 9) | st.booleans() | st.floats(-1e9, 1e9), max_size=3
    ),
    st.lists(st.floats(0, 1e6), max_size=4),
)
def test_any_text_and_any_number_survives(
    tmp_path_factory: pytest.TempPathFactory, text: str, configuration: dict[str, Any], cdf: list[float]
) -> None:
    summary = results.summary(requests=20, pods=1)
    summary = summary.model_copy(update={"ttft": summary.ttft.model_copy(update={"cdf_ms": tuple(cdf)})})
    result = results.result(arms=(Arm(name=text, url=text, summary=summary),), configuration=configuration)
    path = tmp_path_factory.mktemp("any") / "result.json"
    path.write_bytes(to_json(result))
    assert read_result(path) == result


def test_arms_carry_the_names_that_other_programs_read() -> None:
    result = results.comparison()
    content = orjson.loads(to_json(result))
    assert list(content["arms"]) == [arm.name for arm in result.arms]
    for arm in result.arms:
        flat = content["arms"][arm.name]
        assert flat.keys() >= set(DEMO_NAMES)
        assert all(isinstance(flat[name], int | float) for name in DEMO_NAMES)
        assert flat["mean_ttft_ms"] == arm.summary.ttft.mean_ms
        assert flat["mean_ttft_from_send_ms"] == arm.summary.ttft_from_send.mean_ms
        assert flat["p99.9_ttft_ms"] == arm.summary.ttft.percentiles_ms["99.9"]
        assert flat["pods"].keys() == arm.summary.pods.keys()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "holds a JSON list"),
        (b"{}", "'result.format' is missing"),
        (b'{"completed": 3, "request_throughput": 1}', "--save-result"),
        (b'{"result": {"format": "warmroute-result/0"}}', "field 'format' is 'warmroute-result/0'"),
        (b'{"result": {"format": "warmroute-result/1"}}', "field 'command'"),
        (b'{"format": "warmroute-result/1", "arms": ' + b"[" * 300 + b"]" * 300 + b"}", "nested too deeply"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ResultUnreadable, match=re.escape(words)) as caught:
        read_result(path)
    assert str(path) in str(caught.value)


def test_a_wrong_value_deep_inside_is_named(tmp_path: Path) -> None:
    content = orjson.loads(to_json(results.bench()))
    content["result"]["arms"][0]["summary"]["completed"] = "many"
    content["result"]["arms_"] = 1
    path = tmp_path / "x.json"
    path.write_bytes(orjson.dumps(content))
    with pytest.raises(ResultUnreadable) as caught:
        read_result(path)
    assert "'arms.0.summary.completed'" in str(caught.value)
    assert "'many'" in str(caught.value)
    assert "did you mean 'arms'" in str(caught.value)


@pytest.mark.parametrize("missing", ["nowhere/x.json", "."])
def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ResultUnreadable, match=r"cannot be read|is a folder"):
        read_result(tmp_path / missing)


def test_bench_json_has_vllms_names_with_vllms_meaning() -> None:
    result = results.bench()
    s = result.arms[0].summary
    content = bench_json(result, result.arms[0], metadata={"tp": "2"})
    assert set(VLLM_NAMES) <= content.keys()
    assert content["tp"] == "2"
    assert content["date"] == "20260301-123000"
    assert content["request_rate"] == 8.0
    assert content["mean_ttft_ms"] == s.ttft_from_send.mean_ms
    assert content["mean_e2el_ms"] == s.e2e_from_send.mean_ms
    assert content["mean_e2el_including_client_queue_ms"] == s.e2e.mean_ms
    assert s.ttft.mean_ms is not None
    assert s.ttft_from_send.mean_ms is not None
    assert content["mean_client_queue_time_ms"] == pytest.approx(s.ttft.mean_ms - s.ttft_from_send.mean_ms)
    own = content["warmroute"]
    assert isinstance(own, dict)
    assert own["mean_ttft_ms"] == s.ttft.mean_ms
    assert "ttfts" not in content


def test_bench_json_without_rate_or_completions_still_has_numbers() -> None:
    result = results.nothing_completed()
    content = bench_json(result, result.arms[0])
    assert content["request_rate"] == "inf"
    assert content["max_concurrency"] is None
    assert content["mean_ttft_ms"] == content["p99_itl_ms"] == 0.0
    json.dumps(content, allow_nan=False)


def test_details_are_passed_through_and_must_fit_each_other() -> None:
    result = results.bench()
    detailed = Detailed([3, 4], [1, 2], [0.1, 0.0], [[], [0.2]], [0.0, 1.0], ["", "timeout"], ["a", "b"])
    content = bench_json(result, result.arms[0], detailed)
    assert content["itls"] == [[], [0.2]]
    assert content["errors"] == ["", "timeout"]
    with pytest.raises(ValueError, match="one entry for each request"):
        Detailed([3], [1, 2], [0.1], [[]], [0.0], [""])


def test_console_block_can_be_read_by_the_usual_expressions() -> None:
    result = results.bench()
    s = result.arms[0].summary
    block = vllm_block(result, s, ALL_METRICS)
    lines = block.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    for pattern, value in (
        (r"Successful requests:\s+(\d+)", s.completed),
        (r"Benchmark duration \(s\):\s+([\d.]+)", s.duration_s),
        (r"Total input tokens:\s+(\d+)", s.prompt_tokens),
        (r"Request throughput \(req/s\):\s+([\d.]+)", s.request_throughput),
        (r"Request goodput \(req/s\):\s+([\d.]+)", s.goodput and s.goodput.request_goodput),
        (r"Mean TTFT \(ms\):\s+([\d.]+)", s.ttft_from_send.mean_ms),
        (r"P99 TPOT \(ms\):\s+([\d.]+)", s.tpot.p99_ms),
        (r"Median ITL \(ms\):\s+([\d.]+)", s.itl.median_ms),
        (r"Mean E2EL \(ms\):\s+([\d.]+)", s.e2e_from_send.mean_ms),
    ):
        found = re.search(pattern, block)
        assert found
        assert float(found[1]) == pytest.approx(value, abs=0.005)
    assert "TPOT" not in vllm_block(result, s, ["ttft"])


@pytest.mark.parametrize("name", ["bench", "bench_failing", "many_pods", "nothing_completed", "odd_names"])
def test_blocks_fit_sixty_columns(name: str) -> None:
    result = results.named(name)
    for arm in result.arms:
        lines = f"{vllm_block(result, arm.summary, ALL_METRICS)}\n{our_block(arm.summary)}".splitlines()
        assert max(map(len, lines)) <= 60


def test_flat_summary_is_json_even_if_nothing_was_measured() -> None:
    flat = flat_summary(results.nothing_completed().arms[0].summary)
    assert flat["mean_ttft_ms"] is None
    json.dumps(flat, allow_nan=False)
