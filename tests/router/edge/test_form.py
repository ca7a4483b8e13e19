"""Forms are read and written anew: nothing is lost, whatever a form holds and however it arrives."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from unittest import mock

import pytest
from aiohttp import StreamReader
from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.errors import BadRequest
from router.edge.body import BodyLimits
from router.edge.errors import TooLarge
from router.edge.form import MAX_NAME_BYTES, MAX_PARTS, Form
from router.reading.upload import KEPT_BYTES, Upload
from tests.router.rig.forms import TYPE, Part, read, written

LIMITS = BodyLimits(10.0, 0)
MIB = 2**20
NAMES = st.text("abcXYZ019_-.[]$ ", min_size=1, max_size=12).filter(lambda name: name.strip() == name != "model")
VALUES = st.binary(max_size=300) | st.sampled_from([b"", b"\r\n", b"--", b"\r\n--", b"\r\n--a-boundary-of-the-tests"])
PARTS = st.builds(
    Part,
    NAMES,
    VALUES,
    st.none() | st.sampled_from(["a.wav", "ü.mp3", "a b.flac"]),
    st.none() | st.sampled_from(["audio/wav", "text/plain; charset=utf-8"]),
)


class Held:
    """Counts the bytes held."""

    def __init__(self) -> None:
        self.bytes = self.most = 0

    def hold(self, body_bytes: int) -> None:
        self.bytes = max(self.bytes, body_bytes)
        self.most = max(self.most, self.bytes)

    def forget_body(self) -> None:
        self.bytes = 0


def form_of(body: bytes, cut: int = 2**16, max_bytes: int = 64 * MIB, kind: bytes = TYPE) -> Form:
    """Return a form that arrives in pieces of `cut` bytes."""
    loop = asyncio.get_running_loop()
    content = StreamReader(mock.Mock(_reading_paused=False), 2**16, loop=loop)
    request = make_mocked_request("POST", "/", headers={"Content-Type": kind.decode()}, payload=content)

    async def feed() -> None:
        for at in range(0, len(body), cut):
            content.feed_data(body[at : at + cut])
            await asyncio.sleep(0)
        content.feed_eof()

    feeding = loop.create_task(feed())
    form = Form(request, LIMITS, loop.time() + 60, max_bytes)
    form._feeding = feeding  # type: ignore[attr-defined]  # kept for as long as the form is
    return form


async def read_form(body: bytes, cut: int = 2**16, **more: Any) -> tuple[Form, list[Part]]:
    form = form_of(body, cut, **more)
    made = b"".join([piece async for piece in form.pieces()])
    return form, read(form.content_type.decode(), form.model_part("m") + made)


@settings(max_examples=60, deadline=None)
@given(st.lists(PARTS, max_size=5), st.none() | st.text(max_size=20), st.integers(0, 5), st.integers(1, 400))
def test_what_an_engine_reads_is_what_the_client_wrote(
    parts: list[Part], model: str | None, place: int, cut: int
) -> None:
    if model is not None and ("\r" in model or "\n" in model):
        return
    sent = list(parts)
    if model is not None:
        sent.insert(place, Part("model", model.encode()))
    form, got = asyncio.run(read_form(written(sent), cut))
    assert form.model == model
    assert got == [Part("model", b"m"), *parts]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (written([Part("file", b"x" * 100, "a")], end=b""), "no valid field name"),
        (written([Part("file", b"x" * 100, "a")])[:60], "no valid field name"),
        (b"hello", "not a valid form"),
        (b"", "not a valid form"),
        (b"--a-boundary-of-the-tests-9f2c\r\nno header\r\n\r\nx", "not a valid form"),
        (written([Part("model", b"a"), Part("model", b"b")]), "twice"),
        (written([Part("model", b"a" * (MAX_NAME_BYTES + 1))]), f"{MAX_NAME_BYTES} bytes"),
        (written([Part("model", b"\xff\xfe")]), "UTF-8"),
        (written([Part("model", b"a\r\nb")]), "line break"),
        (written([Part('a"b', b"")]), "no valid field name"),
        (written([Part("mod\\el", b"a"), Part("model", b"b")]), "twice"),  # some parsers drop the backslash
        (written([Part("a", b"x", None, "multipart/mixed; boundary=x")]), "no field may contain others"),
        (written([Part(f"n{i}", b"") for i in range(MAX_PARTS + 1)]), f"at most {MAX_PARTS}"),
    ],
)
async def test_a_broken_form_is_the_clients_fault(body: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        await read_form(body)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.binary(max_size=8), st.integers(1, 60))
def test_whatever_is_cut_or_overwritten_fails_well_or_is_read(at: int, other: bytes, cut: int) -> None:
    body = written([Part("model", b"m"), Part("file", b"\r\n--" * 20, "a.wav"), Part("language", b"en")])

    async def run(broken: bytes) -> None:
        form = form_of(broken, cut)
        with contextlib.suppress(BadRequest):
            async for _ in form.pieces():
                pass

    asyncio.run(run(body[:at] + other + body[at + len(other) :]))
    asyncio.run(run(body[:at]))


async def test_a_form_beyond_its_bound_is_refused_as_it_comes() -> None:
    form = form_of(written([Part("file", bytes(4 * MIB), "a")]), max_bytes=MIB)
    got: list[int] = []

    async def take() -> None:
        got.extend([len(piece) async for piece in form.pieces()])

    with pytest.raises(TooLarge, match=str(MIB)):
        await take()
    assert sum(got) <= 2 * MIB


@pytest.mark.parametrize("kind", [b"application/json", b"multipart/form-data", b"multipart/mixed; boundary=x"])
async def test_a_body_that_is_not_a_form_is_refused(kind: bytes) -> None:
    with pytest.raises(BadRequest, match="form"):
        form_of(b"{}", kind=kind)


async def test_a_form_is_kept_for_a_further_attempt_until_it_is_large() -> None:
    small = [Part("model", b"m"), Part("file", bytes(KEPT_BYTES // 2), "a")]
    holds = Held()
    upload = Upload(form_of(written(small)), holds)
    await upload.hold(MIB, None)
    assert upload.model == "m"
    upload.begin("engine-name", lambda late: None)
    first = b"".join([piece async for piece in upload.pieces()])
    assert upload.is_replayable
    assert b"".join([piece async for piece in upload.pieces()]) == first
    assert KEPT_BYTES // 2 < holds.bytes <= KEPT_BYTES

    upload = Upload(form_of(written([*small[:1], Part("file", bytes(8 * MIB), "a")])), holds := Held())
    await upload.hold(MIB, None)
    upload.begin("engine-name", lambda late: None)
    sent = sum([len(piece) async for piece in upload.pieces()])
    assert sent > 8 * MIB
    assert not upload.is_replayable
    assert holds.most <= KEPT_BYTES
    assert holds.bytes == upload.held == 0


async def test_an_attempt_that_is_given_up_loses_nothing_for_the_next_one() -> None:
    body = written([Part("model", b"m"), Part("file", bytes(range(256)) * 2000, "a"), Part("language", b"en")])
    form = form_of(body, cut=1000)
    upload = Upload(form, Held())
    await upload.hold(MIB, None)
    upload.begin("n", lambda late: None)

    async def take() -> None:
        async for _ in upload.pieces():
            pass

    for turns in range(1, 6):
        attempt = asyncio.create_task(take())
        for _ in range(turns):
            await asyncio.sleep(0)
        attempt.cancel()
        await asyncio.wait((attempt,))
        assert attempt.cancelled()
    got = read(form.content_type.decode(), b"".join([piece async for piece in upload.pieces()]))
    assert [(part.name, part.value) for part in got] == [
        ("model", b"n"),
        ("file", bytes(range(256)) * 2000),
        ("language", b"en"),
    ]


async def test_a_model_that_comes_late_is_waited_for_within_a_bound() -> None:
    late = written([Part("file", bytes(MIB), "a"), Part("model", b"m")])
    upload = Upload(form_of(late), Held())
    await upload.hold(2 * MIB, None)
    assert upload.model == "m"
    with pytest.raises(BadRequest, match="model before file") as refused:
        await Upload(form_of(late), Held()).hold(MIB // 2, None)
    assert refused.value.param == "model"
    at_once = Upload(form_of(late), Held())
    await at_once.hold(MIB // 2, "m")
    assert at_once.model is None
    seen: list[str] = []
    at_once.begin("m", seen.append)
    assert len(b"".join([piece async for piece in at_once.pieces()])) > MIB
    assert seen == ["m"]
