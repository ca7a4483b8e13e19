"""`analyze` as users run it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.analyze.model import Analysis
from loadgen.commands import analyze
from tests.loadgen.analyze.prompts import chat, text, write_lines


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rows = [chat(f"It is 2026-05-01T10:00:{i:02d}Z. {text('s', 300)}", f"{i} {text(i, 10)}") for i in range(40)]
    return write_lines(tmp_path / "log.jsonl", rows)


def test_the_text_names_the_break_and_ends_with_the_advice(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze.run([str(log), "--pods", "2"]) == 0
    shown = capsys.readouterr()
    flat = " ".join(shown.out.split())  # where lines break depends on the file's name
    assert "40 requests" in flat
    assert "2 pods, perfect affinity" in flat
    assert "A timestamp at byte 6 of the system message (messages[0]) costs 100% of the possible hits" in flat
    assert "reading prompts" in shown.err


def test_json_and_files_hold_the_same_analysis(log: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        analyze.run([str(log), "--format", "json", "--out", str(tmp_path / "out"), "--cache-tokens", "1000,2000"]) == 0
    )
    printed = Analysis.model_validate_json(capsys.readouterr().out)
    assert printed == Analysis.model_validate_json((tmp_path / "out" / "analysis.json").read_text())
    assert [cache.cache_tokens for cache in printed.caches] == [1000, 2000, None]
    assert "What breaks reuse" in (tmp_path / "out" / "analysis.txt").read_text()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_reader_of_the_output_may_leave_early(log: Path, tmp_path: Path, form: str) -> None:
    flags = ["analyze", str(log), "--format", form, "--out", str(tmp_path / "out")]
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run(
        [sys.executable, "-m", "loadgen", *flags],
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writes)
    assert ended.returncode == 0
    assert "roken" not in ended.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"analysis.json", "analysis.txt"}


def test_text_from_prompts_is_never_taken_for_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [chat(f"[/bold] {text('s', 100)}", f"[red]{i}") for i in range(5)]
    assert analyze.run([str(write_lines(tmp_path / "log.jsonl", rows))]) == 0
    assert "[/bold]" in capsys.readouterr().out


def test_text_from_prompts_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {
            "messages": [
                {"role": "\x1b[31mred", "content": f"\x1b]0;owned {text('s', 100)} \x1b[2J{i}{i} {text('t', 100)}"},
                {"role": "user", "content": text(i, 20)},
            ]
        }
        for i in range(40)
    ]
    assert analyze.run([str(write_lines(tmp_path / "log.jsonl", rows)), "--out", str(tmp_path / "out")]) == 0
    for shown in (capsys.readouterr().out, (tmp_path / "out" / "analysis.txt").read_text()):
        assert "]0;owned" in shown
        assert "[31mred message" in " ".join(shown.split())
        assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "FILE"),
        (["x", "--bytes-per-token", "3.5"], "--bytes-per-token was removed in 0.2.0"),
        (["x", "--pods", "0"], "--pods"),
        (["x", "--cache-tokens", "0"], "--cache-tokens"),
        (["x", "--cash-tokens", "5"], "did you mean '--cache-tokens'"),
    ],
)
def test_bad_flags_are_named(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        analyze.run(flags)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_file_without_prompts_fails_and_says_what_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "log.jsonl", [{"status": 200}])
    assert analyze.run([str(path), "--out", str(tmp_path / "out")]) == 1
    assert "no prompt in 1 lines" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a" * 300, "file/out"])
def test_a_folder_that_cannot_be_made_is_refused_before_the_analysis(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "file").touch()
    assert analyze.run([str(log), "--out", str(tmp_path / name)]) == 1
    shown = capsys.readouterr()
    assert "cannot be written" in shown.err
    assert (shown.out, "reading prompts" in shown.err) == ("", False)


def test_a_full_disk_loses_the_files_and_not_the_analysis(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert analyze.run([str(log), "--format", "json", "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr()
    assert Analysis.model_validate_json(shown.out).requests == 40
    assert "--out cannot be written: [Errno 28] No space left on device" in shown.err
    assert not list((tmp_path / "out").iterdir())


def test_ctrl_c_leaves_nothing(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(analyze, "analyze", interrupted)
    assert analyze.run([str(log), "--out", str(tmp_path / "out")]) == 130
    assert "stopped" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_gives_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        analyze.run(["--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "cache sizes of a pod to simulate, tokens" in shown
    assert "(default: 16,32,64)" in shown


def test_settings_come_from_the_environment_too(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMROUTE_BLOCK_TOKENS", "32")
    assert analyze.run([str(log), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["block_tokens"] == 32
