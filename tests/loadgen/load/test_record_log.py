"""The log compared with a plain list of records, and merged parts compared with one log."""

from __future__ import annotations

import math
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import loadgen.measure.records as module
from loadgen.measure.gaps import GapHistogram
from loadgen.measure.records import MAX_NAME_CHARS, OTHERS, RecordLog, Records, RequestRecord
from tests.loadgen.measure.builders import records_of, request

NAMES = st.sampled_from(["", "a", "b", "pod-0", "größer"])
TIMES = st.floats(0, 1e5)
COUNTS = st.integers(0, 2**31 - 1)
RECORDS = st.builds(
    RequestRecord,
    session=st.integers(-1, 2**40),
    turn=st.integers(0, 1000),
    group=NAMES,
    intended_s=TIMES,
    sent_s=TIMES,
    finished_s=TIMES,
    first_token_s=st.none() | TIMES,
    gaps_s=st.lists(st.floats(0, 100), max_size=4).map(tuple),
    prompt_tokens=COUNTS,
    cached_tokens=COUNTS,
    output_tokens=COUNTS,
    has_usage=st.booleans(),
    pod=NAMES,
    policy=NAMES,
    failure=st.none() | st.sampled_from(["timeout", "http 429"]),
    detail=st.sampled_from(["", "said one thing", "said another"]),
    prompt_bytes=COUNTS,
    prompt_hash=st.integers(0, 2**64 - 1),
    prefix_keys=st.lists(st.integers(0, 2**64 - 1), max_size=4).map(tuple),
    queued_s=TIMES,
)


def check(found: Records, expected: list[RequestRecord], start_s: float, kept_keys: int, keep_gaps: bool) -> None:
    assert len(found) == len(expected)
    fields = ("session", "turn", "prompt_tokens", "cached_tokens", "output_tokens", "has_usage", "prompt_bytes")
    for name in (*fields, "prompt_hash", "queued_s"):
        assert list(getattr(found, name)) == [getattr(record, name) for record in expected], name
    for name in ("intended_s", "sent_s", "finished_s"):
        assert list(getattr(found, name)) == [getattr(record, name) - start_s for record in expected]
    firsts = [math.nan if r.first_token_s is None else r.first_token_s - start_s for r in expected]
    assert np.array_equal(found.first_token_s, np.array(firsts), equal_nan=True)
    for codes, table, name in (
        (found.group, found.groups, "group"),
        (found.pod, found.pods, "pod"),
        (found.policy, found.policies, "policy"),
        (found.failure, found.failures, "failure"),
    ):
        assert [table[code] for code in codes] == [getattr(record, name) or "" for record in expected]
    assert list(found.completed) == [record.failure is None for record in expected]
    for label, detail in zip(found.failures[1:], found.details[1:], strict=True):
        assert detail in [record.detail for record in expected if record.failure == label]
    gaps = [gap for record in expected if record.failure is None for gap in record.gaps_s]
    assert found.gaps.count == len(gaps)
    if gaps:
        assert found.gaps.mean == pytest.approx(np.mean(gaps))
        assert found.gaps.std == pytest.approx(np.std(gaps), abs=1e-9)
    check_details(found, expected, kept_keys, keep_gaps)


def check_details(found: Records, expected: list[RequestRecord], kept_keys: int, keep_gaps: bool) -> None:
    left = kept_keys
    for row, record in enumerate(expected):
        left = left - len(record.prefix_keys) if left >= len(record.prefix_keys) else -1
        assert found.keeps_keys(row) == (left >= 0)
        assert tuple(found.keys_of(row)) == (record.prefix_keys if left >= 0 else ())
        if keep_gaps:
            assert tuple(found.gaps_of(row)) == record.gaps_s
        else:
            with pytest.raises(ValueError, match="keep_gaps"):
                found.gaps_of(row)


class LogAgainstList(RuleBasedStateMachine):
    """Everything that is added comes back in order, also after saving and loading."""

    @initialize(start_s=TIMES, keep_gaps=st.booleans(), kept_keys=st.integers(0, 30))
    def begin(self, start_s: float, keep_gaps: bool, kept_keys: int) -> None:
        self.start_s, self.keep_gaps, self.kept_keys = start_s, keep_gaps, kept_keys
        self.log = RecordLog(start_s, keep_gaps=keep_gaps, kept_keys=kept_keys).__enter__()
        self.records: list[RequestRecord] = []
        self.found: Records | None = None

    @precondition(lambda self: self.found is None)
    @rule(record=RECORDS, times=st.sampled_from([1, 1, 1, 700]))
    def add(self, record: RequestRecord, times: int) -> None:
        for _ in range(times):
            self.log.add(record)
            self.records.append(record)

    @precondition(lambda self: self.found is None)
    @rule()
    def finish(self) -> None:
        self.found = self.log.finish()
        self.log.__exit__(None, None, None)
        check(self.found, self.records, self.start_s, self.kept_keys, self.keep_gaps)

    @precondition(lambda self: self.found is not None)
    @rule()
    def save_and_load(self) -> None:
        assert self.found is not None
        with tempfile.TemporaryDirectory() as folder:
            self.found.save(Path(folder))
            self.found = Records.load(Path(folder))
        check(self.found, self.records, self.start_s, self.kept_keys, self.keep_gaps)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.__exit__(None, None, None)


LogAgainstList.TestCase.settings = settings(max_examples=25, stateful_step_count=12)
test_log_against_list = LogAgainstList.TestCase


@settings(max_examples=50)
@given(records=st.lists(RECORDS, max_size=12), parts=st.integers(1, 4), owner=st.randoms(use_true_random=False))
def test_merged_parts_are_one_log(records: list[RequestRecord], parts: int, owner: Random) -> None:
    records = [replace(record, finished_s=float(number)) for number, record in enumerate(records)]
    owners = [owner.randrange(parts) for _ in records]
    pieces = [records_of([r for r, o in zip(records, owners, strict=True) if o == part], 0.5) for part in range(parts)]
    check(Records.merge(pieces), records, 0.5, 10**6, True)


def test_nothing_at_all() -> None:
    for empty in (records_of([]), Records.merge([]), Records.merge([records_of([]), records_of([])])):
        assert len(empty) == 0
        assert empty.failures == empty.groups == ("",)
        assert math.isnan(empty.gaps.mean)
        assert empty.lag_s.size == 0


def test_lag_is_what_the_cap_did_not_ask_for() -> None:
    record = RequestRecord(0, 0, "", intended_s=1.0, sent_s=3.5, finished_s=4.0, queued_s=2.0)
    assert records_of([record]).lag_s == pytest.approx([0.5])


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 4)
    make = [RequestRecord(i, 0, f"g{i % 10}", 0, 0, i, failure=f"f{i % 10}", detail=f"d{i % 10}") for i in range(30)]
    found = records_of(make)
    assert found.groups == ("", "g0", "g1", "g2", OTHERS)
    assert found.failures == ("", "f0", "f1", "f2", OTHERS)
    assert found.details == ("", "d0", "d1", "d2", "d3")
    assert int((found.group == 4).sum()) == 21
    merged = Records.merge([records_of(make[:15]), records_of(make[15:])])
    assert len(merged.groups) == 5
    names = [merged.groups[code] for code in merged.group]
    assert all(name in (record.group, OTHERS) for name, record in zip(names, make, strict=True))
    assert 0 < names.count(OTHERS) < 30


def test_a_finished_log_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = records_of([RequestRecord(7, 0, "", 0, 0, 0)] * 3000)
    assert list(tmp_path.iterdir()) == []
    assert list(found.session) == [7] * 3000


def test_a_long_name_is_cut() -> None:
    """Each answer may name another pod, in a header of 64 KiB."""
    records = [request(number, pod=f"{number}-{'x' * 60_000}") for number in range(20)]
    found = records_of(records)
    assert Records.merge([found, records_of(records)]).pods == found.pods
    assert sum(map(len, found.pods)) == 20 * MAX_NAME_CHARS
    assert [found.pods[code] for code in found.pod] == [record.pod[:MAX_NAME_CHARS] for record in records]


# -- gaps ------------------------------------------------------------------------------------------------------------

GAPS = st.lists(st.floats(0, 0) | st.floats(1e-5, 1000), min_size=1, max_size=300)


@given(gaps=GAPS, q=st.floats(0, 1))
def test_quantiles_are_within_half_a_bucket(gaps: list[float], q: float) -> None:
    histogram = GapHistogram()
    histogram.add(gaps)
    exact = sorted(gaps)[max(math.ceil(q * len(gaps)), 1) - 1]
    assert histogram.quantile(q) == pytest.approx(exact, rel=0.0051)
    assert histogram.quantile(0) == min(gaps)
    assert histogram.quantile(1) == max(gaps)


@given(gaps=GAPS, at=st.integers(0, 300))
def test_merged_histograms_are_one(gaps: list[float], at: int) -> None:
    whole, first, second = GapHistogram(), GapHistogram(), GapHistogram()
    whole.add(gaps)
    first.add(gaps[:at])
    second.add(np.array(gaps[at:]))
    first.merge(pickle.loads(pickle.dumps(second)))
    assert (first.counts == whole.counts).all()
    assert first.count == len(gaps)
    assert first.mean == pytest.approx(np.mean(gaps))
    assert first.std == pytest.approx(np.std(gaps), abs=1e-9)
    assert first.quantile(0.5) == whole.quantile(0.5)


def test_beyond_the_ends() -> None:
    histogram = GapHistogram()
    histogram.add([1e-9, 5e4, 6e4])
    assert histogram.counts[0] == 1
    assert histogram.counts[-1] == 2
    assert histogram.quantile(1) == 6e4
