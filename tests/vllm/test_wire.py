"""A real vLLM's cache events have the forms that the gateway reads, and report what the cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import StartServers
from tests.vllm.frames import SMALL_POOL, Batch, complete, decoded, read, replayed, scenario, subscribed, write
from tests.vllm.servers import BLOCK_TOKENS, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def small_server(start_servers: StartServers) -> Iterator[VllmServer]:
    """One server with room for a few prompts."""
    with start_servers(SMALL_POOL) as (server,):
        yield server


def played(server: VllmServer) -> list[Batch]:
    """The messages that the server publishes during the scenario."""
    with subscribed(server) as subscription:
        scenario(server)
        return [decoded(frames) for frames in subscription.until_quiet()]


def test_batches_are_arrays_of_events_that_are_maps(small_server: VllmServer) -> None:
    batches = played(small_server)
    assert [batch.sequence for batch in batches] == list(range(batches[0].sequence, batches[0].sequence + len(batches)))
    for batch in batches:
        sent_s, events, *rank = batch.value
        assert isinstance(sent_s, float)
        assert rank in ([], [None], [0])
        assert all(isinstance(event, dict) for event in events)
    kinds = {event["type"] for batch in batches for event in batch.events}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_stored_blocks_name_their_session_parent_and_tokens(small_server: VllmServer) -> None:
    small_server.reset_cache()
    text = "Dora keeps the ledger of the harbour office, page by page. " * 9
    with subscribed(small_server) as subscription:
        first = complete(small_server, text + "Who signs?", "dora-1")
        second = complete(small_server, text + "Since when?", "dora-2")
        batches = [decoded(frames) for frames in subscription.until_quiet()]
    stored = [event for batch in batches for event in batch.events if event["type"] == "BlockStored"]
    by_session = {name: [event for event in stored if event["session_id"] == name] for name in ("dora-1", "dora-2")}
    tokens = {
        "dora-1": small_server.tokenize(text + "Who signs?"),
        "dora-2": small_server.tokenize(text + "Since when?"),
    }
    chain = {None: 0}
    """Hash of a block -> tokens up to its end."""
    for name, events in by_session.items():
        for event in events:
            start = chain[event.get("parent_block_hash")]
            assert event["block_size"] == BLOCK_TOKENS
            assert len(event["token_ids"]) == BLOCK_TOKENS * len(event["block_hashes"])
            known = tokens[name][start : start + len(event["token_ids"])]
            assert event["token_ids"][: len(known)] == known
            assert event.get("medium") in (None, "GPU")
            for number, block in enumerate(event["block_hashes"], start=1):
                chain[block] = start + number * BLOCK_TOKENS
    assert (
        sum(len(event["block_hashes"]) for event in by_session["dora-1"])
        == (first["usage"]["total_tokens"] - 1) // BLOCK_TOKENS
    )
    reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused > 0
    assert chain[by_session["dora-2"][0]["parent_block_hash"]] == reused, (
        "reused blocks are not reported, but the last one is the parent"
    )


def test_a_replay_repeats_what_was_missed(small_server: VllmServer) -> None:
    with subscribed(small_server) as subscription:
        complete(small_server, "Emil keeps the other ledger of the harbour office. " * 9, "emil")
        live = subscription.until_quiet()
    first = decoded(live[0]).sequence
    answers = replayed(small_server, first)
    assert [answer[-1] for answer in answers[:-1]] == [payload for _, _, payload in live]
    assert all(answer[0] == b"" for answer in answers)


def test_the_recording_that_other_tests_use_is_of_this_form(small_server: VllmServer, tmp_path: Path) -> None:
    batches = played(small_server)
    recorded = [decoded(frames) for frames in read(RECORDING)]
    assert shapes(recorded) == shapes(batches)
    write(tmp_path / "again", read(RECORDING))
    assert (tmp_path / "again").read_bytes() == RECORDING.read_bytes()


RECORDING = Path(__file__).with_name("frames_vllm_0_32.bin")


def shapes(batches: list[Batch]) -> set[tuple[tuple[str, str], ...]]:
    """Return the kinds of events: their fields, with the types of the values."""
    return {
        tuple(sorted((name, type(value).__name__) for name, value in event.items()))
        for batch in batches
        for event in batch.events
    }
