"""`bench` against servers on real sockets: requests, files, exit status."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from engine.common.settings import ConfigError
from loadgen.commands import bench
from loadgen.commands.argv import joined
from loadgen.commands.bench import BenchSettings, plan
from loadgen.commands.server_settings import LISTS
from tests.loadgen.commands.servers import LimitedGateway
from tests.loadgen.experiment.scripted_arms import ArmGateway, in_thread

SMALL = [
    *("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "200", "--prefix-repetition-suffix-len"),
    *("50", "--prefix-repetition-num-prefixes", "3", "--prefix-repetition-output-len", "3", "--num-prompts", "12"),
]
FAST = ["--tokens-per-word", "2", "--disable-tqdm"]


@pytest.fixture
def gateway() -> Iterator[Any]:
    with in_thread(ArmGateway()) as serving:
        yield serving


def measured(gateway: ArmGateway) -> list[str]:
    """Return the prompts as sent, without the probes. Probes are short, and the prompts of `prefix_repetition` have
    hundreds of words."""
    prompts = [body["messages"][0]["content"] for body in gateway.bodies]
    return [prompt for prompt in prompts if len(prompt.split()) > 60]


def check(status: int, content: dict[str, Any]) -> None:
    """Check that the status matches the run's validity; a busy machine may make a run invalid without any bug."""
    assert status == (0 if content["warmroute"]["valid"] else 3)


def test_the_result_file_has_vllms_names_and_the_console_its_block(
    gateway: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = bench.run(
        [
            *("--base-url", gateway.url, *SMALL, *FAST, "--request-rate", "100", "--save-result", "--save-detailed"),
            *("--result-dir", str(tmp_path / "deep"), "--metadata", "gpu=none", "run=7", "--label", "mine"),
            *("--goodput", "ttft:60000", "tpot:60000", "--metric-percentiles", "50,99.9", "--max-concurrency", "5"),
        ]
    )
    (path,) = (tmp_path / "deep").iterdir()
    assert path.name.startswith("mine-100qps-concurrency5-scripted-")
    content = json.loads(path.read_text())
    check(status, content)
    assert {"gpu": "none", "run": "7", "label": "mine", "model_id": "scripted"}.items() <= content.items()
    assert (content["num_prompts"], content["completed"], content["failed"]) == (12, 12, 0)
    assert content["request_rate"] == 100
    assert content["max_concurrency"] == 5
    assert content["request_goodput"] == pytest.approx(content["request_throughput"])
    assert content["total_output_tokens"] == sum(content["output_lens"]) == 12 * 3
    assert len(content["ttfts"]) == len(content["itls"]) == len(content["errors"]) == 12
    assert all(len(gaps) == 2 for gaps in content["itls"]), "between three words; the role and the end are no tokens"
    assert content["start_times"] == sorted(content["start_times"])
    assert content["p50_ttft_ms"] <= content["p99.9_ttft_ms"]
    shown = capsys.readouterr()
    assert "Serving Benchmark Result" in shown.out
    assert shown.err == ""


def test_what_is_sent_follows_the_flags(gateway: Any, tmp_path: Path) -> None:
    bench.run(["--base-url", gateway.url, *SMALL, *FAST, "--seed", "5", "--header", "x-user=me", "--no-ignore-eos"])
    prompts = measured(gateway)
    assert len(prompts) == len(set(prompts)) == 12
    assert len({prompt[:300] for prompt in prompts}) == 3
    assert all("ignore_eos" not in body for body in gateway.bodies)
    first = list(prompts)
    gateway.bodies.clear()
    bench.run(["--base-url", gateway.url, *SMALL, *FAST, "--seed", "5", "--workers", "2"])
    assert sorted(measured(gateway)) == sorted(first)
    assert all(body["ignore_eos"] is True for body in gateway.bodies)


def test_results_are_appended_and_metrics_left_out(gateway: Any, tmp_path: Path) -> None:
    flags = [
        "--base-url",
        gateway.url,
        *SMALL,
        *FAST,
        "--save-result",
        "--append-result",
        "--result-dir",
        str(tmp_path),
    ]
    for _ in range(2):
        bench.run([*flags, "--result-filename", "all.jsonl", "--percentile-metrics", "ttft"])
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    latencies = {key.split("_", 1)[1] for line in lines for key in line if key.endswith("_ms")}
    assert latencies == {"ttft_ms", "ttft_from_intended_ms", "client_queue_time_ms"}


def test_a_files_name_may_have_folders(gateway: Any, tmp_path: Path) -> None:
    flags = ["--base-url", gateway.url, *SMALL, *FAST, "--save-result", "--result-dir", str(tmp_path)]
    assert bench.run([*flags, "--result-filename", "new/a.json"]) in (0, 3)
    assert bench.run([*flags, "--label", "meta/llama"]) in (0, 3)
    assert (tmp_path / "new" / "a.json").is_file()
    assert len(list((tmp_path / "meta").glob("llama-*.json"))) == 1


@pytest.mark.parametrize(
    "model", ["owner/a\x00b\x1b]0;c", "x" * 300, "\U0001f98a" * 100], ids=["control", "long", "wide"]
)
def test_any_model_has_a_result_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(ArmGateway(model=model)) as serving:
        flags = ["--base-url", serving.url, *SMALL, *FAST, "--save-result", "--result-dir", str(tmp_path)]
        assert bench.run(flags) in (0, 3)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["model_id"] == model
    assert path.name in capsys.readouterr().out
    assert path.name.isprintable()


def test_pods_are_counted_and_caches_emptied_if_asked(gateway: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status = bench.run(
        ["--base-url", gateway.url, *SMALL, *FAST, "--flush-cache", "--out", str(out), "--formats", "json"]
    )
    result = json.loads((out / "result.json").read_text())["result"]
    summary = result["arms"][0]["summary"]
    assert status == (0 if summary["validity"]["valid"] else 3)
    assert set(summary["pods"]) == {f"pod-{i}" for i in range(4)}
    assert summary["reuse"]["counters_agree"] is True
    assert result["isolation"].startswith("The prefix caches of all pods were emptied")
    assert gateway.log.index(("reset", "")) < len(gateway.log) - 12


def test_caches_that_cannot_be_emptied_end_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(ArmGateway(allows_reset=False)) as gateway:
        assert bench.run(["--base-url", gateway.url, *SMALL, *FAST, "--flush-cache"]) == 1
    assert "--flush-cache: the caches cannot be emptied" in capsys.readouterr().err


def test_nobody_there_is_said_with_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["--port", "9", *SMALL, *FAST]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err


def test_what_the_server_says_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    class Rude(ArmGateway):
        async def _models(self, request: web.Request) -> web.Response:
            return web.Response(status=500, text="\x1b]0;refused")

    with in_thread(ArmGateway(model="\x1b]0;served")) as serving:
        assert bench.run(["--base-url", serving.url, *SMALL, *FAST[:2]]) in (0, 3)
    with in_thread(Rude()) as refusing:
        assert bench.run(["--base-url", refusing.url, *SMALL, *FAST]) == 1
    shown = capsys.readouterr()
    assert "]0;served" in shown.err
    assert "]0;refused" in shown.err
    assert "\x1b" not in shown.out + shown.err


def test_records_that_cannot_be_kept_end_it_in_one_line(
    gateway: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert bench.run(["--base-url", gateway.url, *SMALL, *FAST]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warmroute-loadgen bench: this machine cannot go on measuring: [Errno 2]")


def test_servers_without_usage_need_a_word_size(capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(ArmGateway(has_usage=False)) as gateway:
        assert bench.run(["--base-url", gateway.url, *SMALL, "--disable-tqdm"]) == 1
    assert "give --tokens-per-word" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--dataset-name", "nonsense"], "'nonsense' is unknown"),
        (["--dataset-name", "random", "--workload", "gsp"], "--dataset-name and --workload exclude each other"),
        (["--base-url", "localhost:8000"], "must begin with http"),
        (["--base-url", "http://a", "--port", "80"], "--base-url excludes --host and --port"),
        (["--backend", "openai", "--endpoint", "/v1/chat/completions"], "is not that of --backend openai"),
        (["--goodput", "ttfb:3"], "objective 'ttfb:3'"),
        (["--header", "x-user"], "--header 'x-user' must be NAME=VALUE"),
        (["--save-detailed"], "--save-detailed needs --save-result"),
        (["--metric-percentiles", "100"], "above 0 and below 100"),
        (["--percentile-metrics", "p99"], "--percentile-metrics"),
        (["--policy", "caf\u00e9"], "'policy' cannot be sent in an HTTP header"),
        (["--burstyness", "1"], "did you mean '--burstiness'"),
        (["--base-url", "http://me:pw@gateway"], "must not name a user or password"),
        (["--admin-url", "http://"], "must be http://host:port"),
        (["--admin-url", "http://gateway:99999"], "Port out of range"),
    ],
)
def test_bad_flags_are_named(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.run(flags)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def settings(*flags: str) -> BenchSettings:
    return BenchSettings.load(joined(flags, LISTS), prog="bench", environ={})


@pytest.mark.parametrize(
    ("flags", "endpoint"),
    [
        ([], "chat"),
        (["--backend", "openai"], "completions"),
        (["--backend", "vllm"], "completions"),
        (["--endpoint", "/v1/completions"], "completions"),
    ],
)
def test_backend_and_endpoint_choose_the_api(flags: list[str], endpoint: Any) -> None:
    given = settings(*flags)
    assert given.target(given.arm()).endpoint == endpoint


def test_defaults_are_vllms() -> None:
    given = settings()
    _, spec, planned = plan(given)
    assert (given.workload, given.url, planned) == ("random", "http://127.0.0.1:8000", 1000)
    assert spec.arrivals.rate == float("inf")


def test_prompts_are_requests_and_sessions_are_played_whole() -> None:
    workload, spec, planned = plan(settings("--workload", "multi-turn", "--num-prompts", "23"))
    assert spec.sessions is not None
    turns = [len(workload.session(i).turns) for i in range(spec.sessions)]
    assert sum(turns) == planned >= 23 > planned - turns[-1]


def test_a_trace_follows_the_rate_unless_its_own_times_are_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": i * 1000, "input_length": 600, "output_length": 2, "hash_ids": [1, i]} for i in range(5)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--workload", "mooncake", "--dataset-path", str(trace)]
    assert plan(settings(*flags, "--request-rate", "5"))[0].session(3).start_s is None
    assert plan(settings(*flags, "--arrival", "trace"))[0].session(3).start_s == 3
    with pytest.raises(ConfigError, match="needs a workload with times of its own"):
        plan(settings("--arrival", "trace"))


def test_passwords_in_urls_of_pods_stay_out_of_every_file(
    gateway: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = gateway.url.removeprefix("http://")
    pods = [f"http://user:hunter2@{host}/pod/0/metrics", f"http://user:hunter2@{host}/nowhere/metrics"]
    flags = ["--base-url", gateway.url, *SMALL, *FAST[:2], "--metrics-urls", *pods, "--out", str(tmp_path)]
    assert bench.run(flags) in (0, 3)
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert f"{host}/nowhere" in texts[0]
    assert not any("hunter2" in text for text in (*texts, *capsys.readouterr()))


def test_secrets_stay_out_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    given = settings("--header", "authorization=sk-flag", "--api-key", "sk-key")
    assert "sk-" not in json.dumps(given.configuration())
    assert given.target(given.arm()).api_key == "sk-key"
    assert settings().target(settings().arm()).api_key == "sk-environment"


def test_ctrl_c_leaves_neither_process_nor_file(tmp_path: Path) -> None:
    # The first request, which checks the server, is answered immediately; the requests of the load are not.
    held = LimitedGateway(known=("slow",), limits={"slow": 1000}, service_s=120.0, quick=1)
    with in_thread(held) as gateway:
        program = "import sys; from loadgen.commands.bench import run; sys.exit(run(sys.argv[1:]))"
        flags = ["--base-url", gateway.url, *SMALL, "--tokens-per-word", "2", "--workers", "2", "--policy", "slow"]
        out = ["--out", str(tmp_path / "out"), "--save-result", "--result-dir", str(tmp_path / "results")]
        process = subprocess.Popen(
            [sys.executable, "-c", program, *flags, *out], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            deadline = time.monotonic() + 60
            while gateway.under_way.get("slow", 0) < 12:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, "the load did not begin"
                time.sleep(0.02)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 130
    assert "stopped; nothing was written" in errors
    assert list(tmp_path.iterdir()) == []
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def test_further_fields_and_certificates_are_given_by_flags(tmp_path: Path) -> None:
    given = settings("--extra-body", '{"top_k": 5, "temperature": 0.5}', "--base-url", "https://h", "--insecure")
    target = given.target(given.arm())
    assert target.extra == {"ignore_eos": True, "top_k": 5, "temperature": 0.5}
    assert not target.tls_verify
    for flags, words in (
        (["--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--extra-body", "{"], "--extra-body must be a JSON object"),
        (["--ca-file", str(tmp_path / "none.pem")], "cannot be used"),
        (["--ca-file", "x", "--insecure"], "exclude each other"),
    ):
        with pytest.raises(ConfigError, match=words):
            settings(*flags)


def test_fewer_prompts_than_asked_are_said(gateway: Any, tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"prompt": "one two three", "output_len": 2}\n' * 3)
    flags = ["--base-url", gateway.url, "--dataset-name", "custom", "--dataset-path", str(path), *FAST]
    bench.run([*flags, "--num-prompts", "9", "--out", str(tmp_path / "out")])
    result = json.loads((tmp_path / "out" / "result.json").read_text())["result"]
    assert any("3 of the 9 requests that --num-prompts asks for" in line for line in result["cautions"])
    assert [body["max_tokens"] for body in gateway.bodies[-3:]] == [2, 2, 2]
