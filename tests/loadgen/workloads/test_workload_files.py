"""Data set files: each malformed record is reported with file, place and field; text is sent as it is."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.workloads.base import Session
from loadgen.workloads.datasets import load_custom, load_sharegpt
from loadgen.workloads.files import DatasetError, json_entries
from loadgen.workloads.render import Renderer
from loadgen.workloads.traces import load_azure, load_bailian, load_burstgpt, load_mooncake

MOONCAKE: dict[str, Any] = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
BAILIAN: dict[str, Any] = {
    "chat_id": 1,
    "parent_chat_id": -1,
    "timestamp": 0.5,
    "input_length": 20,
    "output_length": 5,
    "type": "text",
    "turn": 1,
    "hash_ids": [1, 2],
}
CHATS = [
    {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x" * 40}]},
    {
        "id": "b",
        "conversations": [
            {"from": "gpt", "value": "cut off before"},
            {"from": "system", "value": "Be kind."},
            {"from": "human", "value": "One?"},
            {"from": "human", "value": "I mean two?"},
            {"from": "gpt", "value": "y" * 80},
            {"from": "human", "value": "Three?"},
            {"from": "gpt", "value": "z"},
            {"from": "human", "value": "never answered"},
        ],
    },
    {"id": "c", "conversations": [{"from": "human", "value": "nobody answered"}]},
]


def broken_block() -> bytes:
    """A gzipped line, and then a compressed block of a type that does not exist."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(b'{"prompt": "x"}\n' * 500) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + packed + b"\x07" * 20


BROKEN_BLOCK = broken_block()


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def said(session: Session, turn: int) -> list[tuple[str, str]]:
    messages = Renderer(1.3).messages(session, turn, {i: f"live {i}" for i in range(turn)})
    return [(message["role"], message["content"]) for message in messages]


@pytest.mark.parametrize("form", ["array", "lines", "gzip"])
def test_sharegpt_conversations_go_on_from_live_answers(tmp_path: Path, form: str) -> None:
    path = tmp_path / "chats.json"
    if form == "array":
        path.write_text(json.dumps(CHATS, indent=2))
    elif form == "lines":
        lines(path, *CHATS)
    else:
        path.write_bytes(gzip.compress(json.dumps(CHATS).encode()))
    workload = load_sharegpt(path)
    assert workload.length == 2
    assert workload.about()["left out"].startswith("1 ")
    assert [turn.output_tokens for turn in workload.session(1).turns] == [20, 1]
    assert said(workload.session(1), 1) == [
        ("system", "Be kind."),
        ("user", "One?"),
        ("user", "I mean two?"),
        ("assistant", "live 0"),
        ("user", "Three?"),
    ]
    with pytest.raises(IndexError):
        workload.session(2)


def test_sharegpt_limits(tmp_path: Path) -> None:
    path = lines(tmp_path / "chats.jsonl", *CHATS)
    several = load_sharegpt(path, turns_min=2)
    assert several.length == 1
    assert several.about()["left out"].endswith(" conversations with fewer than 2 answered questions")
    short = load_sharegpt(path, turns_max=1, sharegpt_output_len=7)
    assert [[turn.output_tokens for turn in short.session(i).turns] for i in range(2)] == [[7], [7]]


def test_custom_prompts(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], "output_tokens": 9}
    workload = load_custom(lines(tmp_path / "p.jsonl", {"prompt": "one"}, chat, {"prompt": "one"}), output_tokens=4)
    assert [said(workload.session(i), 0) for i in range(2)] == [[("user", "one")], [("system", "S"), ("user", "U")]]
    assert [workload.session(i).turns[0].output_tokens for i in range(3)] == [4, 9, 4]
    assert workload.about()["equal first prompts"] == "1"


@pytest.mark.parametrize("name", ["output_tokens", "output_len", "max_tokens"])
def test_a_custom_lines_own_length_is_honoured(tmp_path: Path, name: str) -> None:
    records = ({"prompt": "one", name: 7}, {"prompt": "two", name: None}, {"prompt": "three", name: 3, "max_tokens": 3})
    workload = load_custom(lines(tmp_path / "p.jsonl", *records), output_tokens=4)
    assert [workload.session(i).turns[0].output_tokens for i in range(3)] == [7, 4, 3]
    with pytest.raises(DatasetError, match="must be equal to"):
        load_custom(lines(tmp_path / "q.jsonl", {"prompt": "x", "output_tokens": 1, "output_len": 2}))


@pytest.mark.parametrize(
    ("load", "record", "where", "field"),
    [
        (load_mooncake, MOONCAKE | {"input_length": 0}, ":2", "input_length"),
        (load_mooncake, MOONCAKE | {"input_length": 10**30}, ":2", "input_length"),
        (load_mooncake, MOONCAKE | {"input_length": 10**12}, ":2", "input_length"),
        (load_mooncake, MOONCAKE | {"output_length": 10**12}, ":2", "output_length"),
        (load_mooncake, MOONCAKE | {"output_length": "many"}, ":2", "output_length"),
        (load_mooncake, MOONCAKE | {"timestamp": None}, ":2", "timestamp"),
        (load_mooncake, MOONCAKE | {"hash_ids": [1, "2"]}, ":2", "hash_ids"),
        (load_mooncake, MOONCAKE | {"hash_ids": [1, 2, 3]}, ":2", "hash_ids"),
        (load_mooncake, MOONCAKE | {"hash_ids": [2**63]}, ":2", "hash_ids"),
        (load_mooncake, {k: v for k, v in MOONCAKE.items() if k != "hash_ids"}, ":2", "hash_ids"),
        (load_bailian, BAILIAN | {"chat_id": -1}, ":2", "chat_id"),
        (load_bailian, BAILIAN | {"chat_id": 2**70}, ":2", "chat_id"),
        (load_bailian, BAILIAN | {"parent_chat_id": True}, ":2", "parent_chat_id"),
        (load_custom, {"prompt": ""}, ":2", "prompt"),
        (load_custom, {"prompt": "x", "output_tokens": 0}, ":2", "output_tokens"),
        (load_custom, {"messages": []}, ":2", "messages"),
        (load_custom, {"messages": [{"role": "nobody", "content": "x"}]}, ":2", "messages[0]"),
        (load_sharegpt, {"id": "x"}, ", entry 2|:2", "conversations"),
        (load_sharegpt, {"conversations": [{"from": "human"}]}, ":2", "conversations[0]"),
    ],
)
def test_a_malformed_record_is_named_with_file_line_and_field(
    tmp_path: Path, load: Callable[..., Any], record: dict[str, Any], where: str, field: str
) -> None:
    good = {load_mooncake: MOONCAKE, load_bailian: BAILIAN, load_custom: {"prompt": "x"}, load_sharegpt: CHATS[0]}[load]
    path = lines(tmp_path / "data.jsonl", good, record)
    with pytest.raises(DatasetError, match=f"{re.escape(str(path))}({where}): field '{re.escape(field)}' must"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "x"}\n{"prompt": \n', ":2: not JSON"),
        (b'{"prompt": "x"}\n{"prompt": "y\n', ":2: not JSON: unexpected end of data"),
        (b'{"prompt": "x"}\n[1]\n', ":2: must be a JSON object"),
        (b"", "holds nothing to send"),
        (b'{"prompt": "\xff"}\n', "cannot be read"),
        (b"\x1f\x8bnot gzip", "cannot be read"),
        (BROKEN_BLOCK, "cannot be read: .*invalid block type"),
    ],
)
def test_a_file_that_is_no_json_lines_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=message) as caught:
        load_custom(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        *('[{"conversations": []}, {"conv', '[{"a": 1}, nonsense]', "[1]"),
        '[{"a": ' + "1" * 5000 + "}]",
        '[{"a": ' + "[" * 5000 + "]" * 5000 + "}]",
    ],
)
def test_a_broken_array_is_refused_with_the_entry(tmp_path: Path, content: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(content)
    with pytest.raises(DatasetError, match=f"{re.escape(str(path))}, entry [12]"):
        load_sharegpt(path)


@pytest.mark.parametrize(("field", "wanted"), [("messages", r"messages\[0\]"), ("prompt", "prompt")])
def test_a_value_that_python_cannot_write_is_refused(tmp_path: Path, field: str, wanted: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"{field}": ' + "[" * 1000 + "]" * 1000 + "}")
    with pytest.raises(DatasetError, match=f"field '{wanted}' must .*nested too deeply"):
        load_custom(path)


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    said_by = [{"from": "human", "value": "hi \ud83d"}, {"from": "gpt", "value": "ok"}]
    path.write_text(json.dumps([{"conversations": said_by}]))
    assert said(load_sharegpt(path).session(0), 0) == [("user", "hi ?")]


def test_a_missing_file_is_named() -> None:
    with pytest.raises(DatasetError, match=r"--dataset-path nowhere/at/all cannot be read: .*No such file"):
        load_mooncake(Path("nowhere/at/all"))


@settings(max_examples=30)
@given(
    items=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=50), max_size=3), min_size=1, max_size=20),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
)
def test_an_array_is_read_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, items: list[dict[str, str]], chunk: int, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("array") / "data.json"
    path.write_text("[" + ", ".join(json.dumps(item, indent=indent) for item in items) + "\n]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loadgen.workloads.files._CHUNK_CHARACTERS", chunk)
        assert [dict(entry.fields) for entry in json_entries(path)] == items


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "data"
    path.write_bytes(pack(b"\xef\xbb\xbf" + json.dumps(MOONCAKE).encode() + b"\r\n"))
    assert load_mooncake(path).length == 1
    path.write_bytes(pack(b"\xef\xbb\xbf" + json.dumps(CHATS).encode()))
    assert load_sharegpt(path).length == 2
    path.write_bytes(pack(b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46,3,4\r\n"))
    assert load_azure(path).length == 1


def test_times_that_cannot_be_seconds_are_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "data.jsonl", MOONCAKE, MOONCAKE | {"timestamp": 1e300})
    with pytest.raises(DatasetError, match=f"{re.escape(str(path))}: times from 0 to 1e\\+297 s"):
        load_mooncake(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_traces(tmp_path: Path, end: str) -> None:
    azure = tmp_path / "azure.csv"
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:50.9951690,396,109",
        "2023-11-16 18:15:46.6805900,374,44",
        "2024-05-10 00:00:00.009930+00:00,10,0",
    ]
    azure.write_bytes(end.join(rows).encode())
    trace = load_azure(azure, speedup=2.0)
    assert [trace.input_tokens[row] for row in (0, 1, 2)] == [396, 374, 10]
    assert [trace.session(i).turns[0].output_tokens for i in range(3)] == [44, 109, 1]
    assert trace.session(1).start_s == pytest.approx(4.314579 / 2, abs=1e-5)
    assert trace.session(0).group == ""

    burst = tmp_path / "burst.csv"
    rows = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "5,ChatGPT,472,18,490,API log"]
    burst.write_bytes(end.join([*rows, "45,ChatGPT,1087,0,1087,API log", "118,GPT-4,417,276,693,API log"]).encode())
    trace = load_burstgpt(burst)
    assert [trace.session(i).start_s for i in range(2)] == [0.0, 113.0]
    assert trace.length == 2
    assert trace.about()["left out"].startswith("1 ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", ":1: column 'GeneratedTokens' is missing"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", ":2: field 'TIMESTAMP' must be a time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", ":2: field 'GeneratedTokens'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-4,1\n", ":2: field 'ContextTokens'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("", ":1: column 'TIMESTAMP' is missing"),
    ],
)
def test_a_malformed_csv_is_named_with_line_and_column(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(content)
    with pytest.raises(DatasetError, match=message) as caught:
        load_azure(path)
    assert str(caught.value).startswith(str(path))
