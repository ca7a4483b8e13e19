"""Flags: every one belongs to a workload and changes it; those of another workload are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.common.settings import ConfigError
from loadgen.load.arrivals import ArrivalSettings
from loadgen.workloads.base import Workload
from loadgen.workloads.catalog import CONTROLS, NAMES, WorkloadSettings, build_workload
from loadgen.workloads.kinds import KINDS
from tests.loadgen.workloads.samples import SYNTHETIC, sample

GENERAL = {"workload", "seed", "cache_pressure", "cluster_kv_tokens"}
OTHER: dict[str, Any] = {
    "rag_order": "sorted",
    "zipf": 3.0,
    "regenerate_share": 0.6,
    "edit_share": 0.6,
    "random_range_ratio": 0.5,
    "think_s": 7.0,
    "batch_size": 10,
}
FLAGS = [(name, flag) for name in SYNTHETIC for flag in KINDS[name].flags]


def load(*flags: str) -> WorkloadSettings:
    return WorkloadSettings.load(flags, prog="loadgen", environ={})


def seen(workload: Workload) -> list[object]:
    count = 25 if workload.length is None else min(25, workload.length)
    return [workload.length, *map(workload.session, range(count))]


def test_every_flag_belongs_to_a_workload_and_every_workloads_flag_exists() -> None:
    of_workloads = {flag for kind in KINDS.values() for flag in kind.flags}
    assert of_workloads == set(WorkloadSettings.model_fields) - GENERAL
    assert set(CONTROLS) <= set(NAMES) == set(KINDS)


@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_every_flag_changes_the_workload_and_its_default_does_not(name: str, flag: str) -> None:
    defaults = KINDS[name].flags
    room = {"tenants": 5, "turns": "2-12", "regenerate_share": 0.4}  # otherwise a flag has nothing to act on
    base = {"workload": name, **{key: value for key, value in room.items() if key in defaults and key != flag}}
    plain = seen(build_workload(WorkloadSettings.model_validate(base)))
    assert seen(build_workload(WorkloadSettings.model_validate(base | {flag: defaults[flag]}))) == plain
    changed = {flag: OTHER[flag] if flag in OTHER else bigger(defaults[flag])}
    assert seen(build_workload(WorkloadSettings.model_validate(base | changed))) != plain


def bigger(value: Any) -> int:
    """Return twice the value, or the end of a range, and one more."""
    return int(str(value).rpartition("-")[2]) * 2 + 1


def test_help_has_every_workload_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--help-all")
    shown = "".join(capsys.readouterr().out.split())
    for name, about in NAMES.items():
        assert f"{name}: {about}".replace(" ", "") in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--workload rag --tenants 3", r"--tenants is a flag of .*tenants.*, not of --workload rag"),
        ("--gsp-num-groups 3", "--gsp-num-groups is a flag of gsp, not of --workload tenants"),
        ("--workload gsp --output-tokens 3", "--output-tokens is a flag of .*, not of --workload gsp"),
        ("--workload nonsense", "'nonsense' is unknown; workloads are .*rag"),
        ("--workload mooncake", "--workload mooncake needs --dataset-path"),
        ("--dataset-path x", "--dataset-path is a flag of sharegpt, .*, not of --workload tenants"),
        ("--system-tokens 3000-2000", "--system-tokens: got '3000-2000'; must begin with at least 1 and end with"),
        ("--system-tokens 0-5", "--system-tokens: got '0-5'; must begin with at least 1"),
        ("--turns 2.5", "--turns: got '2.5'; must be a whole number, or two with a hyphen"),
        ("--turns 2-", "--turns: got '2-'; must be a whole number"),
        ("--system-tokens 1-100000000000", "100000000000 is above 100,000,000"),
        ("--workload branching --edit-share 0.9", "--regenerate-share and --edit-share"),
        ("--cache-pressure 2", "--cache-pressure and --cluster-kv-tokens go together"),
        ("--cluster-kv-tokens 2", "--cache-pressure and --cluster-kv-tokens go together"),
        (
            "--workload diverse --cache-pressure 2 --cluster-kv-tokens 9",
            "cannot size --workload diverse; it can size .*rag",
        ),
        ("--tenants 2 --cache-pressure 2 --cluster-kv-tokens 9", "--cache-pressure decides --tenants"),
        ("--workload gsp --gsp-num-groups 2 --cache-pressure 2 --cluster-kv-tokens 9", "decides --gsp-num-groups"),
        ("--random-range-ratio 0.5", "--random-range-ratio is a flag of random"),
        ("--workload random --random-range-ratio 1", "--random-range-ratio: got '1'"),
        ("--think-s inf", "--think-s inf is above 100,000,000"),
        ("--think-s nan", "--think-s: got 'nan'|--think-s nan is above"),
        ("--workload random --random-input-len 1000000000000", "--random-input-len 1e.12 is above 100,000,000"),
        ("--cache-pressure inf --cluster-kv-tokens 9", "--cache-pressure: got 'inf'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*flags.split())


def test_other_tools_names_are_understood() -> None:
    assert load("--workload", "generated-shared-prefix").workload == "gsp"
    assert load("--workload", "prefix_repetition").workload == "prefix-repetition"


@pytest.mark.parametrize(
    ("name", "kv_tokens", "pressure", "unit"),
    [
        ("tenants", 400_000, 0.75, "tenants"),
        ("rag", 100_000, 4.0, "documents"),
        ("few-shot", 100_000, 1.5, "templates"),
        ("code", 60_000, 0.25, "repositories"),
        ("gsp", 600_000, 1.5, "gsp num groups"),
        ("prefix-repetition", 50_000, 4.0, "num prefixes"),
    ],
)
def test_cache_pressure_sizes_the_working_set(name: str, kv_tokens: int, pressure: float, unit: str) -> None:
    settings = load("--workload", name, "--cache-pressure", str(pressure), "--cluster-kv-tokens", str(kv_tokens))
    workload = build_workload(settings)
    about = workload.about()
    reached = float(about["cache pressure"].split()[0])
    assert reached == pytest.approx(pressure, rel=0.1)
    assert float(about["working set"].split()[0].replace(",", "")) == pytest.approx(pressure * kv_tokens, rel=0.1)
    assert int(about[unit]) > 1
    assert workload.session(3).number == 3
    assert workload.name == name


def test_cache_pressure_leaves_one_unit() -> None:
    workload = build_workload(load("--cache-pressure", "0.001", "--cluster-kv-tokens", "1000"))
    assert {workload.session(i).group for i in range(20)} == {"tenant 1"}
    assert workload.about()["cache pressure"].startswith("1.75 ")


def test_cache_pressure_has_a_bound() -> None:
    settings = load("--workload", "few-shot", "--cache-pressure", "9", "--cluster-kv-tokens", str(10**9))
    with pytest.raises(ConfigError, match=r"--cache-pressure 9 .* would take .* templates"):
        build_workload(settings)


def test_one_number_is_a_range_of_equal_ends(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("turns: 3\nsystem-tokens: 40-50\n")

    class Configured(WorkloadSettings):
        """Made like a command's settings."""

        config: str | None = None

    settings = Configured.load(["--config", str(tmp_path / "c.yaml")], prog="x", environ={})
    sessions = [build_workload(settings).session(i) for i in range(20)]
    assert {len(session.turns) for session in sessions} == {3}
    assert all(40 <= session.turns[0].messages[0].pieces[0].tokens <= 50 for session in sessions)


def test_about_says_ranges_and_values() -> None:
    about = sample("tenants").about()
    assert about["system tokens"] == "200 to 300"
    assert about["tenants"] == "3"
    assert sample("gsp").about()["gsp range ratio"] == "1"


def test_a_file_and_its_flags(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    path.write_text("\n".join(json.dumps(row | {"timestamp": ms}) for ms in (0, 0, 4000)))
    base = ("--workload", "mooncake", "--dataset-path", str(path))
    assert [build_workload(load(*base, "--speedup", "2")).session(i).start_s for i in range(3)] == [0, 0, 2]
    jittered = [build_workload(load(*base, "--jitter-bucket")).session(i).start_s for i in range(3)]
    assert len(set(jittered)) == 3
    again = build_workload(load(*base, "--jitter-bucket", "--seed", "2"))
    assert [again.session(i).start_s for i in range(3)] != jittered


def test_a_command_takes_traffic_and_arrivals_together() -> None:
    class Both(WorkloadSettings, ArrivalSettings):
        """Made like a command's settings."""

    settings = Both.load(["--workload", "rag", "--burstiness", "0.5"], prog="x", environ={"WARMROUTE_DOCUMENTS": "7"})
    assert build_workload(settings).about()["documents"] == "7"
    assert settings.arrivals().burstiness == 0.5
