"""`replay` of small traces against a server on a real socket."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from engine.common.settings import ConfigError
from loadgen.commands import replay
from loadgen.commands.argv import joined
from loadgen.commands.replay import ReplaySettings, plan
from loadgen.commands.server_settings import LISTS
from loadgen.commands.trace_format import format_of
from tests.loadgen.experiment.scripted_arms import ArmGateway, in_thread

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{10 + i}.0000000,{100 + i},3\n" for i in range(6)
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{5 + i},ChatGPT,{50 + i},4,54,Conversation log\n" for i in range(6)
)
MOONCAKE = "".join(
    json.dumps({"timestamp": i * 1000, "input_length": 700, "output_length": 2, "hash_ids": [i % 2, 10 + i]}) + "\n"
    for i in range(8)
)
BAILIAN = (
    json.dumps(
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0, "input_length": 20, "output_length": 2, "hash_ids": [1, 2]}
    )
    + "\n"
)


def written(folder: Path, content: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def settings(*flags: str) -> ReplaySettings:
    return ReplaySettings.load(joined(flags, LISTS), prog="replay", environ={})


@pytest.mark.parametrize(
    ("content", "name"), [(AZURE, "azure"), (BURST, "burstgpt"), (MOONCAKE, "mooncake"), (BAILIAN, "bailian")]
)
def test_the_format_is_told_from_the_first_line_plain_or_gzipped(content: str, name: str, tmp_path: Path) -> None:
    assert format_of(written(tmp_path, content)) == name
    (tmp_path / "trace.gz").write_bytes(gzip.compress(content.encode()))
    assert format_of(tmp_path / "trace.gz") == name
    assert settings(str(tmp_path / "trace")).workload == name


def starts_s(given: ReplaySettings) -> list[float]:
    workload, spec, count = plan(given)
    assert spec.sessions == count
    return [workload.session(spec.first_session + i).start_s or 0.0 for i in range(count)]


def test_speed_and_offsets_choose_and_squeeze_the_schedule(tmp_path: Path) -> None:
    trace = str(written(tmp_path, MOONCAKE))
    assert starts_s(settings(trace)) == list(range(8))
    assert starts_s(settings(trace, "--speedup", "4")) == [i / 4 for i in range(8)]
    # Offsets are times of the trace, whatever the speed.
    window = ["--start-offset-s", "2", "--end-offset-s", "5"]
    assert starts_s(settings(trace, *window)) == [2, 3, 4]
    assert starts_s(settings(trace, *window, "--speedup", "2")) == [1, 1.5, 2]
    assert starts_s(settings(trace, "--num-prompts", "2", "--start-offset-s", "6")) == [6, 7]
    with pytest.raises(ConfigError, match="no request between"):
        plan(settings(trace, "--start-offset-s", "100"))


def test_jitter_spreads_requests_of_one_time(tmp_path: Path) -> None:
    rows = [json.loads(line) | {"timestamp": 3000 * (i // 4)} for i, line in enumerate(MOONCAKE.splitlines())]
    trace = str(written(tmp_path, "".join(json.dumps(row) + "\n" for row in rows)))
    assert len(set(starts_s(settings(trace)))) == 2
    jittered = starts_s(settings(trace, "--jitter-bucket"))
    assert len(set(jittered)) == 8
    assert all(3 * (i // 4) <= at < 3 * (i // 4 + 1) for i, at in enumerate(jittered))


def test_a_trace_can_be_played_at_another_rate(tmp_path: Path) -> None:
    trace = str(written(tmp_path, MOONCAKE))
    workload, spec, _ = plan(settings(trace, "--no-fixed-schedule", "--request-rate", "7"))
    assert workload.session(3).start_s is None
    assert spec.arrivals.rate == 7
    assert workload.about()["times"] == "not those of the file"


def test_requests_are_sent_in_the_traces_time_with_its_sharing(tmp_path: Path) -> None:
    trace = written(tmp_path, MOONCAKE)
    out = tmp_path / "out"
    with in_thread(ArmGateway()) as gateway:
        status = replay.run(
            [
                *(str(trace), "--base-url", gateway.url, "--speedup", "20", "--tokens-per-word", "2"),
                *("--out", str(out), "--formats", "json"),
            ]
        )
        prompts = [body["messages"][0]["content"] for body in gateway.bodies[1:]]
    result = json.loads((out / "result.json").read_text())["result"]
    summary = result["arms"][0]["summary"]
    assert status == (0 if summary["validity"]["valid"] else 3)
    assert (result["command"], summary["planned"], summary["completed"]) == ("replay", 8, 8)
    assert result["workload"]["name"] == "mooncake"
    assert result["facts"]["arrivals"] == "at the trace's own times"
    # The last request is due after 7 s at 20 times the speed.
    assert summary["duration_s"] >= 0.35
    assert len(prompts) == 8
    assert len({prompt[:800] for prompt in prompts}) == 2


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--request-rate", "4"], "--request-rate needs --no-fixed-schedule"),
        (["--no-fixed-schedule", "--speedup", "2"], "--speedup needs --fixed-schedule"),
        (["--start-offset-s", "5", "--end-offset-s", "4"], "--end-offset-s 4 must be above --start-offset-s 5"),
        (["--workload", "gsp"], "gsp"),
        (["--dataset-path", "elsewhere"], "--dataset-path is no flag: give DATASET_PATH as a word"),
        (["--tenants", "3"], "--tenants is a flag of"),
    ],
)
def test_bad_flags_are_named(
    flags: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        replay.run([str(written(tmp_path, MOONCAKE)), *flags])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"), [("hello\n", "is not a known trace"), ('{"hash_ids": 3}\n', "hash_ids")]
)
def test_files_that_are_no_trace_are_refused(
    content: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status: object
    try:
        status = replay.run([str(written(tmp_path, content))])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert complaint in capsys.readouterr().err
