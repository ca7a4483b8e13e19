"""Saving, and `warmroute-loadgen report` as users run it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.common.settings import ConfigError
from loadgen.commands.report import run
from loadgen.output.save import FORMATS, save, write_whole
from loadgen.output.settings import OutputSettings
from loadgen.result.files import read_result, to_json
from tests.loadgen.output import results

BENCH = results.named("bench")


def test_save_writes_every_format_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    paths = save(BENCH, folder, FORMATS)
    assert sorted(paths.all()) == sorted(folder.iterdir())
    assert {path.name for path in paths.all()} >= {"result.json", "report.html", "report.md", "result.csv"}
    assert {path.name for path in paths.pngs} >= {"plot-ttft-cdf.png", "plot-time-parts.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths.pngs)
    assert paths.json is not None
    assert read_result(paths.json) == BENCH
    assert paths.html is not None
    assert paths.html.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_save_writes_only_what_is_asked_for(tmp_path: Path) -> None:
    paths = save(BENCH, tmp_path, ["csv"])
    assert paths.all() == [tmp_path / "result.csv"] == list(tmp_path.iterdir())
    assert paths.html is paths.json is paths.markdown is None


def test_a_failed_write_keeps_the_old_file_and_no_scrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_whole(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_can_be_read_by_others(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "x", b"1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_report_draws_an_old_result_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(results.comparison(), tmp_path / "old", ["json"]).json
    assert run([str(source), "--out", str(tmp_path / "new"), "--formats", "html,md,csv"]) == 0
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert {"report.html", "report.md", "result.csv"} == names
    assert "result.json" not in names
    printed = capsys.readouterr().out
    assert "predicted_ttft won" in printed
    assert str(tmp_path / "new" / "report.html") in printed


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_reader_of_the_output_may_leave_early(tmp_path: Path, is_writable: bool) -> None:
    """With `| head -1`, rich alone would end the process after the first line, and lose an hour of measurements."""
    source = save(results.comparison(), tmp_path, ["json"]).json
    assert source is not None
    (tmp_path / "out").write_text("") if not is_writable else None
    program = """
import sys
from pathlib import Path
from loadgen.commands.finish import report
from loadgen.output.settings import OutputSettings
from loadgen.result.files import read_result
sys.exit(report(read_result(Path(sys.argv[1])), OutputSettings(out=sys.argv[2], formats=["json", "md"]), "prog"))
"""
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run(
        [sys.executable, "-c", program, source, tmp_path / "out"],
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writes)
    if is_writable:
        assert (ended.returncode, ended.stderr) == (0, "")
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"result.json", "report.md"}
    else:
        assert ended.returncode == 1
        assert "--out cannot be written" in ended.stderr


def test_report_goes_beside_the_result_unless_told_otherwise(tmp_path: Path) -> None:
    source = save(BENCH, tmp_path, ["json"]).json
    assert source is not None
    assert run([str(source), "--formats", "md"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "report.md"}


def test_the_format_png_adds_the_charts(tmp_path: Path) -> None:
    source = save(BENCH, tmp_path, ["json"]).json
    assert source is not None
    assert run([str(source), "--formats", "csv,png"]) == 0
    assert (tmp_path / "plot-ttft-cdf.png").exists()


def test_report_says_what_is_wrong_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(to_json(BENCH).replace(b"warmroute-result/1", b"warmroute-result/9"))
    assert run([str(path)]) == 1
    assert "field 'format' is 'warmroute-result/9'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]
    assert run([str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err


def test_report_says_when_the_folder_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(BENCH, tmp_path, ["json"]).json
    assert source is not None
    assert run([str(source), "--out", str(source / "below"), "--formats", "csv"]) == 1
    assert "--out cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["x.json", "--formats", "pdf"], ["x.json", "--fromats", "md"]])
def test_report_refuses_bad_flags(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err


def test_an_unknown_format_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'pdf' is not a format; allowed: json, html, md, csv, png"):
        OutputSettings.load(["--formats", "md,pdf"], prog="x", environ={})
    chosen = OutputSettings.load(["--formats", "md,md,png"], prog="x", environ={})
    assert chosen.chosen_formats() == ("md", "png")
