"""Token-id prompts share what the workload's pieces share, and pods reuse exactly that."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.measure.records import RequestRecord
from loadgen.simulate.fleet import Simulation
from loadgen.simulate.pods.routing import Offered
from loadgen.simulate.prompts import PromptMaker
from loadgen.workloads.base import ChatMessage, Piece, Session, Turn
from tests.loadgen.simulate.hand_made import Listed, Told, fleet, turn

PIECES = st.builds(Piece, st.sampled_from("abcd"), st.integers(1, 150), st.sampled_from(["prose", "code"]))
MESSAGES = st.lists(PIECES, min_size=1, max_size=4)


def session_of(*pieces: Piece) -> Session:
    return Session(0, "", (turn(*pieces),))


def shared_tokens(one: list[Piece], other: list[Piece]) -> int:
    """Count the tokens of equal leading pieces. If the next two differ only in length, add the shorter one's tokens."""
    shared = 0
    for left, right in zip(one, other, strict=False):
        if (left.key, left.style) != (right.key, right.style):
            break
        shared += min(left.tokens, right.tokens)
        if left.tokens != right.tokens:
            break
    return shared


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(MESSAGES, MESSAGES)
def test_prompts_share_tokens_as_pieces_do(one: list[Piece], other: list[Piece]) -> None:
    maker = PromptMaker(seed=7, stride_bytes=64)
    first = maker.prompt(session_of(*one), 0, {})
    second = maker.prompt(session_of(*other), 0, {})
    assert len(first.tokens) == sum(piece.tokens for piece in one)
    shared = common(first.tokens, second.tokens)
    assert shared == shared_tokens(one, other)
    assert common(first.keys, second.keys) == shared * 4 // 64


def test_the_first_user_message_is_where_a_hash_of_it_begins() -> None:
    system = ChatMessage("system", (Piece("s", 30),))
    asked = ChatMessage("user", (Piece("q", 20),))
    session = Session(0, "", (Turn((system, asked), 5), Turn((asked,), 5, after=0)))
    maker = PromptMaker(seed=7, stride_bytes=64)
    assert maker.prompt(session, 0, {}).user_start == 30
    following = maker.prompt(session, 1, {0: [9, 9, 9]})
    assert following.user_start == 30
    assert list(following.tokens[50:53]) == [9, 9, 9]
    assert len(following.tokens) == 73


@given(st.lists(MESSAGES, min_size=1, max_size=8), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_lone_pod_reuses_what_brute_force_finds(prompts: list[list[Piece]], output: int) -> None:
    sessions = tuple(Session(n, "", (turn(*pieces, output=output),)) for n, pieces in enumerate(prompts))
    cached: dict[int, int] = {}
    known: list[list[int]] = []
    expected: dict[int, int] = {}

    class Oracle(Told):
        """When asked for a pod, computes how much of the prompt an unlimited cache of whole blocks holds."""

        def choose(self, request: Offered, excluded: Sequence[str], now_s: float) -> str | None:
            tokens = list(request.tokens)
            longest = max((common(tokens, before) for before in known), default=0)
            expected[request.number] = min(longest, len(tokens) - 1) // 16 * 16
            return super().choose(request, excluded, now_s)

    simulation = Simulation(
        fleet(1),
        Listed(sessions),
        ArrivalSpec(ArrivalKind.CLOSED, concurrency=1),
        sessions=len(sessions),
        seed=1,
        on_record=lambda record: note(record),
    )
    maker = PromptMaker(seed=7, stride_bytes=64)

    def note(record: RequestRecord) -> None:
        cached[record.session] = record.cached_tokens
        known.append(list(maker.prompt(sessions[record.session], 0, {}).tokens))

    simulation.run([Oracle()])
    assert cached == expected
