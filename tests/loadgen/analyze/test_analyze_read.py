"""Every kind of file with prompts is read; for other files, the error says what is missing."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engine.contract.errors import BadRequest
from engine.contract.keys import canonical_chat
from loadgen.analyze.place import place
from loadgen.analyze.read import LoggedPrompt, Source, UnusableLog, prompt_of
from tests.loadgen.analyze.prompts import analysed, chat, text, write_lines
from tests.loadgen.workloads.test_workload_files import BROKEN_BLOCK

BODY = chat("Be brief.", "Why?")
CANONICAL = canonical_chat(BODY["messages"])


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "hello"}, b"hello"),
        ({"text": "hello"}, b"hello"),
        (BODY, CANONICAL),
        ({"model": "m", "stream": True, **BODY}, CANONICAL),
        ({"custom_id": "7", "method": "POST", "url": "/v1/chat/completions", "body": BODY}, CANONICAL),
        ({"time": "2026-05-01T10:00:00Z", "status": 200, "request_body": json.dumps(BODY)}, CANONICAL),
        ({"request": "hello"}, b"hello"),
        ({"prompt": ["hello"]}, b"hello"),
        ({"prompt": [1, -1]}, b"\x01\x00\x00\x00\xff\xff\xff\xff"),
        ({"input": [{"role": "user", "content": "Why?"}]}, canonical_chat([{"role": "user", "content": "Why?"}])),
    ],
)
def test_prompts_are_found_where_logs_keep_them(row: dict[str, Any], text: bytes) -> None:
    assert prompt_of(row).text == text


def test_a_named_field_is_read_through_objects_lists_and_json_in_strings() -> None:
    row = {"log": {"calls": [{"sent": json.dumps({"q": BODY})}]}}
    assert prompt_of(row, "log.calls.0.sent.q").text == CANONICAL
    with pytest.raises(ValueError, match="there is no field"):
        prompt_of(row, "log.answer")


def test_tools_come_first_and_are_told_apart() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    prompt = prompt_of({"tools": tools, **BODY})
    assert prompt.text == canonical_chat(BODY["messages"], tools)
    assert json.loads(prompt.text[: prompt.tools_bytes]) == tools
    assert str(place(prompt, 3)) == "byte 3 of the tools"
    assert str(place(prompt, prompt.text.index(b"brief"))) == "byte 3 of the system message (messages[0])"
    assert str(place(prompt, prompt.text.index(b"Why"))) == "byte 0 of the user message (messages[1])"
    assert str(place(LoggedPrompt(b"hello"), 2)) == "byte 2 of the prompt"


@pytest.mark.parametrize(
    ("given", "at_s"),
    [
        ({"timestamp": 1_760_000_000}, 1.76e9),
        ({"ts": 1_760_000_000_000}, 1.76e9),
        ({"ts": 1_760_000_000_000_000}, 1.76e9),
        ({"time": 1_760_000_000_000_000_000}, 1.76e9),
        ({"time": -1.7e308, "ts": 5}, 5.0),
        ({"time": "1970-01-01T00:01:00Z"}, 60.0),
    ],
)
def test_times_are_epochs_of_any_unit_or_iso(given: dict[str, Any], at_s: float) -> None:
    assert prompt_of({"prompt": "a", **given}).at_s == at_s


def test_tools_nested_too_deeply_are_refused_by_name() -> None:
    tools: list[object] = []
    for _ in range(300):
        tools = [tools]
    with pytest.raises(BadRequest, match="tools"):
        prompt_of({**BODY, "tools": tools})


def test_times_give_the_rate_and_how_long_prefixes_must_last(tmp_path: Path) -> None:
    system = text("s", 100)
    rows = [{"timestamp": 100 + 2 * i, **chat(system, f"{i}")} for i in range(11)]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows))
    assert found.span_s == 20
    assert found.is_in_order
    assert found.reuse_gap is not None
    assert found.reuse_gap.median_s == 2
    assert not analysed(write_lines(tmp_path / "back.jsonl", rows[::-1])).is_in_order


def test_numbers_too_large_for_times_are_none(tmp_path: Path) -> None:
    rows = [{"timestamp": sign * 1.79e308, **chat(text("s", 100), "a")} for sign in (-1, 1, -1, 1)]
    found = analysed(write_lines(tmp_path / "log.jsonl", rows))
    assert (found.requests, found.span_s, found.reuse_gap) == (4, None, None)


def test_lines_without_a_prompt_are_counted_and_a_json_array_or_gzip_is_read(tmp_path: Path) -> None:
    rows = [BODY, {"prompt": ""}, BODY]
    (tmp_path / "log.jsonl").write_text("started\n" + "".join(json.dumps(row) + "\n" for row in rows))
    found = analysed(tmp_path / "log.jsonl")
    assert (found.requests, found.skipped_lines, found.first_skipped) == (2, 2, "line 1: not JSON")
    (tmp_path / "log.json").write_text(json.dumps(rows))
    assert analysed(tmp_path / "log.json").requests == 2
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress((tmp_path / "log.jsonl").read_bytes()))
    assert analysed(tmp_path / "log.jsonl.gz").requests == 2


def test_the_first_line_may_be_a_list_of_token_ids(tmp_path: Path) -> None:
    ids = [7] * 40
    (tmp_path / "log.jsonl").write_text(f"{ids}\n\n{ids}\n{json.dumps(BODY)}\n")
    found = analysed(tmp_path / "log.jsonl")
    assert (found.requests, found.skipped_lines) == (3, 0)


@pytest.mark.parametrize("name", ["log.jsonl", "log.json", "log.jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(name: str, tmp_path: Path) -> None:
    rows = [BODY, BODY]
    text = json.dumps(rows) if name == "log.json" else "".join(json.dumps(row) + "\n" for row in rows)
    content = b"\xef\xbb\xbf" + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    found = analysed(tmp_path / name)
    assert (found.requests, found.skipped_lines) == (2, 0)


def test_our_gateways_log_has_no_prompts_and_that_is_said_with_what_it_has(tmp_path: Path) -> None:
    # These are the fields of a gateway's log line. The load generator may not import the gateway's code.
    line = {
        "request_id": "r",
        "path": "/v1/chat/completions",
        "pod": "a",
        "prompt_tokens_estimated": 100,
        "cached_tokens": 40,
    }
    with pytest.raises(UnusableLog) as caught:
        analysed(write_lines(tmp_path / "gateway.jsonl", [line] * 5))
    assert "40.0% of 500 prompt tokens were cached" in str(caught.value)
    assert "'messages', 'prompt' or 'text'" in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n\n", '127.0.0.1 - - "POST /v1/completions HTTP/1.1" 200\n' * 300])
def test_files_with_nothing_in_them_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(content)
    with pytest.raises(
        UnusableLog, match="is empty" if not content.strip() else "no prompt in 200 lines .line 1: not JSON"
    ):
        analysed(tmp_path / "log")


@pytest.mark.parametrize("length", [-1, 2**31 + 1, 1e308, "5", None])
def test_a_trace_line_without_a_possible_length_is_skipped(length: object, tmp_path: Path) -> None:
    lines = [{"hash_ids": [1], "input_length": 16}, *[{"hash_ids": [1], "input_length": length}] * 2]
    found = analysed(write_lines(tmp_path / "log", lines))
    assert (found.requests, found.skipped_lines, found.prompt_tokens) == (1, 2, 16)
    assert "'input_length', a number of tokens" in found.first_skipped


def test_an_array_may_hold_what_cannot_be_written_again(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text('[{"prompt": "hello", "more": ' + "[" * 600 + "]" * 600 + '}, {"prompt": "hello"}]')
    assert analysed(path).requests == 2


def test_a_broken_gzip_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.gz").write_bytes(BROKEN_BLOCK)
    with pytest.raises(UnusableLog, match=r"cannot be read: .*invalid block type"):
        analysed(tmp_path / "log.gz")


def test_files_that_cannot_be_read_several_times_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableLog, match="cannot be read"):
        analysed(tmp_path / "none.jsonl")
    with pytest.raises(UnusableLog, match="regular file"):
        analysed(tmp_path)


def trace(block: int) -> list[dict[str, Any]]:
    """Every request has the same first two blocks, then a unique block and a part of another."""
    return [
        {"timestamp": 1000 * i, "input_length": 3 * block + 1, "output_length": 5, "hash_ids": [1, 2, 10 + i, 1000 + i]}
        for i in range(10)
    ]


@pytest.mark.parametrize("block", [16, 512])
def test_traces_of_block_ids_give_rates_and_their_block_size_is_worked_out(block: int, tmp_path: Path) -> None:
    found = analysed(write_lines(tmp_path / "trace.jsonl", trace(block)))
    assert found.block_tokens == block
    assert found.hit_rate == pytest.approx(9 * 2 * block / (10 * (3 * block + 1)))
    assert found.span_s == 9
    assert found.hit_rate_exact is None
    assert found.findings == ()
    assert found.duplicate_requests == 0


def test_an_empty_prompt_of_a_trace_repeats_none(tmp_path: Path) -> None:
    rows = [{"input_length": 0, "hash_ids": []}, *trace(16), *trace(16)[:3]]
    assert analysed(write_lines(tmp_path / "trace.jsonl", rows)).duplicate_requests == 3


def test_reading_stops_when_memory_is_used_up(tmp_path: Path) -> None:
    rows = [{"prompt": text(i, 400)} for i in range(50)]
    path = write_lines(tmp_path / "log.jsonl", rows)
    found = analysed(path, memory_bytes=60 * 400)
    assert found.is_truncated
    assert 0 < found.requests < 50
    assert found.requests == analysed(path, memory_bytes=60 * 400).requests


def test_a_source_can_be_read_again(tmp_path: Path) -> None:
    source = Source(write_lines(tmp_path / "log.jsonl", [BODY, BODY]))
    assert [asdict(p) for p, _ in source.prompts()] == [asdict(p) for p, _ in source.prompts()]
