"""What clients may use is one list, at the HTTP port and through the picker: nothing else reaches an engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.requests import Endpoint
from router.reading.by_load import BY_LOAD, UPLOADS
from router.reading.client_paths import LISTED, MAX_PREFIX_SEGMENTS, Found, Kind, UnknownPath, find
from tests.router.picker.proxy import Talk, endpoint, request_body, request_headers, response_body, response_headers
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, running
from tests.router.stored.test_stored_responses import HI, Keeper

OURS = ("/metrics", "/reset_prefix_cache", "/drain", "/v1/pods", "/v1/route/explain", "/ui", "/ui/events", "/ui/state")
VLLM = (
    *("/load", "/ping", "/version", "/server_info", "/metrics", "/docs", "/openapi.json", "/redoc", "/tokenizer_info"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/sleep", "/wake_up", "/is_sleeping"),
    *("/pause", "/resume", "/is_paused", "/collective_rpc", "/abort_requests", "/start_profile", "/stop_profile"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/get_world_size", "/invocations", "/inference/v1/generate"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/realtime", "/generative_scoring"),
)
SGLANG = (
    *("/flush_cache", "/clear_hicache_storage_backend", "/hicache/storage-backend", "/freeze_gc", "/configure_logging"),
    *("/update_weights_from_disk", "/init_weights_update_group", "/destroy_weights_update_group"),
    *("/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc"),
    *("/update_weight_version", "/get_weights_by_name", "/weights_checker", "/send_weights_to_remote_instance"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/slow_down", "/set_internal_state", "/generate"),
    *("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter", "/open_session"),
    *("/close_session", "/abort_request", "/pause_generation", "/continue_generation", "/get_server_info", "/get_load"),
    *("/health_generate", "/get_model_info", "/model_info", "/v1/loads", "/generate_from_file", "/vertex_generate"),
    *("/start_expert_distribution_record", "/stop_expert_distribution_record", "/dump_expert_distribution_record"),
    *("/api/chat", "/api/generate", "/encode", "/dumper/configure"),
)
ADMINISTRATION = sorted({*OURS, *VLLM, *SGLANG})
FORMS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "query": lambda path: f"{path}?level=2",
    "trailing slash": lambda path: f"{path}/",
    "double slash": lambda path: f"/{path}",
    "below v1": lambda path: f"/v1/..{path}",
    "below a listed path": lambda path: f"/v1/completions/../..{path}",
    "below a response": lambda path: f"/v1/responses/resp_1/../../..{path}",
    "encoded dots": lambda path: f"/v1/%2e%2e{path}",
    "encoded slash": lambda path: f"/v1/..%2f{path[1:]}",
    "decoded twice": lambda path: f"/v1/%252e%252e{path}",
    "backslash": lambda path: f"/v1/..\\{path[1:]}",
    "case": str.upper,
    "encoded letter": lambda path: f"/%{ord(path[1]):02x}{path[2:]}",
    "parameter": lambda path: f"{path};x=1",
    "parameter of a listed path": lambda path: f"/v1/completions;/../..{path}",
    "absolute": lambda path: f"http://engine{path}",
    "fragment": lambda path: f"{path}#/v1/completions",
    "behind a listed path": lambda path: f"/v1/completions{path}",
    "a listed path behind it": lambda path: f"{path}/../v1/completions",
}
KEY, ENGINE_KEY = "client-key-0123456789", "engine-key-0123456789"
MARK = "x-of-a-client"


class Reached(NamedTuple):
    """A client's request, as an engine got it."""

    method: str
    target: str
    authorization: str | None


class Open(ScriptedEngine):
    """Answers every method and path with 200, and notes what clients sent."""

    def __init__(self, pod: str | None = "a") -> None:
        super().__init__(pod, answers(200))
        self.reached: list[Reached] = []

    def _more_routes(self, app: web.Application) -> None:
        app.middlewares.append(self._note)

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if MARK not in request.headers:  # the gateway asks for itself
            answer: web.StreamResponse = await handler(request)
            return answer
        self.reached.append(Reached(request.method, request.raw_path, request.headers.get("Authorization")))
        return web.json_response({"choices": []})


class Said(NamedTuple):
    """The answer that a client gets."""

    status: int
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = orjson.loads(self.body)["error"]
        return error


async def raw(url: str, method: str, target: str, fields: dict[str, str], body: bytes) -> Said:
    """Send a request whose target no client library corrects."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    answer = await reader.read()
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        rest = b"".join(re.findall(rb"[0-9a-f]+\r\n(.*?)\r\n", rest, re.DOTALL))
    return Said(int(head.split()[1]), rest)


Door = Callable[[Gateway, str, str, Any], Awaitable[Said]]


async def by_http(gateway: Gateway, method: str, target: str, body: Any) -> Said:
    text = b"" if body is None else orjson.dumps(body)
    return await raw(gateway.url, method, target, {MARK: "1", "Authorization": f"Bearer {KEY}"}, text)


async def by_picker(gateway: Gateway, method: str, target: str, body: Any) -> Said:
    """Ask the picker, and if it names an engine, send the request there unchanged as a proxy does."""
    async with Talk(gateway) as talk:
        fields: Any = {MARK: "1", "authorization": f"Bearer {KEY}"}
        await talk.tell(request_headers(target, method=method, is_end=body is None, **fields))
        if body is not None and not talk.call.is_over:
            await talk.tell(request_body(body))
        if talk.call.is_over:
            (told,) = [one.immediate_response for one in talk.said if one.HasField("immediate_response")]
            return Said(told.status.code, told.body)
        fields |= {name.lower(): value for name, value in talk.fields.items()}
        said = await raw(f"http://{talk.picked[0]}", method, target, fields, talk.body if body is not None else b"")
        await talk.tell(response_headers(said.status), response_body(said.body, is_end=True))
        return said


DOORS: dict[str, Door] = {"http": by_http, "picker": by_picker}
BODY = {"model": "m", "prompt": "x", "lora_name": "a", "level": 2}


def with_keys(folder: Path) -> dict[str, Any]:
    (folder / "clients").write_text(KEY)
    (folder / "engines").write_text(ENGINE_KEY)
    return {"api_keys_file": str(folder / "clients"), "engine_api_key_file": str(folder / "engines")}


async def unknown(gateway: Gateway, door: str) -> float:
    page = (await gateway.get("/metrics")).body.decode()
    (count,) = re.findall(rf'warmroute_gateway_unknown_paths_total{{port="{door}"}} (\S+)', page)
    return float(count)


@pytest.mark.parametrize("passes_through", [False, True])
@pytest.mark.parametrize("door", DOORS)
async def test_no_form_of_an_administrative_path_reaches_an_engine(
    tmp_path: Path, door: str, passes_through: bool
) -> None:
    engine = Open()
    async with running(engine, pass_through=passes_through, **with_keys(tmp_path)) as gateway:
        before, asked = await unknown(gateway, door), 0
        for path in ADMINISTRATION:
            for name, form in FORMS.items():
                if passes_through and (path.startswith("/v1/") or name == "behind a listed path"):
                    continue  # the next test is about paths below /v1/
                for method, body in (("POST", BODY), ("GET", None)):
                    said = await DOORS[door](gateway, method, form(path), body)
                    assert said.status in (400, 404, 405), (method, form(path))
                    assert not engine.reached, (method, form(path))
                    asked += said.status != 400
                    if said.status != 400:  # what is no HTTP at all is refused by the server itself
                        assert said.error["type"] == "invalid_request_error"
        assert await unknown(gateway, door) - before == asked


@pytest.mark.parametrize("door", DOORS)
async def test_passing_through_opens_no_adapters_and_none_of_the_gateways_names(tmp_path: Path, door: str) -> None:
    engine = Open()
    closed = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/Unload_LoRA_Adapter", "/v1/responses/resp_1")
    others = ("/v1/responses/resp_1/anything", "/v1/caches/x/y", "/v1/models/load", "/v1/moderations/../sleep")
    async with running(engine, pass_through=True, **with_keys(tmp_path)) as gateway:
        for path in (*closed, *others):
            assert (await DOORS[door](gateway, "POST", path, BODY)).status in (404, 405), path
        assert not engine.reached
        assert (await DOORS[door](gateway, "POST", "/v1/moderations", BODY)).status == 200
        assert (await DOORS[door](gateway, "POST", "/v1/moderations", {})).status == 400
        assert engine.reached == [Reached("POST", "/v1/moderations", f"Bearer {ENGINE_KEY}")]


@pytest.mark.parametrize("door", DOORS)
async def test_what_is_listed_is_served(tmp_path: Path, door: str) -> None:
    engine = Open()
    async with running(engine, **with_keys(tmp_path)) as gateway:
        ask, body = DOORS[door], {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
        for path in (*Endpoint, *BY_LOAD):
            fields = {**body, "input": "x", "max_tokens": 1}
            if path in (Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.COUNT_TOKENS):
                del fields["prompt"]
            assert (await ask(gateway, "POST", path, fields)).status == 200, path
            assert engine.reached[-1] == Reached("POST", path, f"Bearer {ENGINE_KEY}")
        count = len(engine.reached)
        for path in ("/v1/models", "/v1/models/m", "/health", "/ready"):
            assert (await ask(gateway, "GET", path, None)).status == 200, path
        listed = orjson.loads((await ask(gateway, "GET", "/v1/models", None)).body)["data"]
        assert [card["id"] for card in listed] == ["m"]
        assert len(engine.reached) == count, "the gateway answers these itself"
        for path in (*Endpoint, *BY_LOAD, *UPLOADS):
            for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
                assert (await ask(gateway, method, path, None)).status == 405, (method, path)
        assert len(engine.reached) == count


@pytest.mark.parametrize("door", DOORS)
async def test_another_tenants_response_is_out_of_reach(tmp_path: Path, door: str) -> None:
    pods, other = [Keeper(pod) for pod in "ab"], "another-key-0123456789"
    entries = (("one", KEY), ("two", other))
    keys = [f"  - name: {name}\n    keys: [{{sha256: {sha256(key.encode()).hexdigest()}}}]" for name, key in entries]
    (tmp_path / "tenants").write_text("\n".join(["tenants:", *keys, ""]))
    async with running(*pods, tenants_file=str(tmp_path / "tenants")) as gateway:
        made = await gateway.post(HI, path="/v1/responses", authorization=f"Bearer {other}")
        mine = await gateway.post(HI, path="/v1/responses", authorization=f"Bearer {KEY}")
        paths = [(listed.method, listed.pattern) for listed in LISTED if listed.kind is Kind.STORED]
        for name, is_mine in ((made.json["id"], False), (mine.json["id"], True), ("resp_nobodys", False)):
            asked = [list(pod.asked) for pod in pods]
            for method, pattern in sorted(paths, key=lambda one: one[0] == "DELETE"):
                body: Any = {} if method == "POST" else None
                said = await DOORS[door](gateway, method, pattern.replace("{id}", name), body)
                assert (said.status == 404) is not is_mine, (method, pattern)
                if not is_mine:
                    assert said.error["code"] == "response_not_found"
            if not is_mine:
                assert asked == [pod.asked for pod in pods], "a pod was asked"
        again = await DOORS[door](gateway, "GET", f"/v1/responses/{mine.json['id']}", None)
        assert again.status == 404, "it was deleted"


async def test_a_response_goes_to_its_pod_or_nowhere_if_the_proxy_does_not_allow_that_pod() -> None:
    pods = [Keeper(pod) for pod in "ab"]
    async with running(*pods) as gateway:
        made = await gateway.post(HI, path="/v1/responses")
        (has,), (lacks,) = [p for p in pods if p.kept], [p for p in pods if not p.kept]
        for allowed, status in (([endpoint(has), endpoint(lacks)], None), ([endpoint(lacks)], 503)):
            async with Talk(gateway) as talk:
                path = f"/v1/responses/{made.json['id']}"
                await talk.tell(request_headers(path, method="GET", is_end=True, subset=allowed))
                if status is None:
                    assert talk.picked == [endpoint(has)]
                else:
                    assert talk.refusal[0] == status


KNOWN = ["v1", "completions", "responses", "resp_1", "cancel", "chat", "models", "m", "sleep", "metrics", "rerank"]
ODD = ["..", ".", "", "%2e%2e", "%2E.", "%2f", "..%2fsleep", "%252e%252e", "\\..", ";x", "m;x", "a#b", "%00", "%76%31"]
SEGMENTS = st.sampled_from([*KNOWN, "health", *ODD])


@given(
    st.sampled_from(["GET", "POST", "DELETE"]),
    st.lists(SEGMENTS, max_size=7).map("/".join),
    st.sampled_from(["/", "", "//", "http://engine/"]),
    st.booleans(),
)
def test_a_path_that_servers_may_read_in_two_ways_is_not_found(
    method: str, rest: str, start: str, passes_through: bool
) -> None:
    target = start + rest
    try:
        found = find(method, target, passes_through=passes_through)
    except UnknownPath:
        return
    if found.kind is not Kind.OWN:  # the gateway answers those itself
        assert readings(target) == {found.path}


def readings(target: str) -> set[str]:
    """Return the paths that a server may read in a target: each of the corrections that servers are known to make."""
    found = {target.partition("?")[0]}
    corrections: list[Callable[[str], str]] = [
        unquote,
        lambda path: path.partition("#")[0],
        lambda path: path.replace("\\", "/"),
        lambda path: re.sub("/{2,}", "/", path),
        lambda path: re.sub(r";[^/]*", "", path),
        lambda path: path if len(path) < 2 else path.rstrip("/"),
        resolved,
    ]
    while True:
        more = {correct(path) for path in found for correct in corrections} - found
        if not more:
            break
        found |= more
    return {path for path in found if "%" not in path}


def resolved(path: str) -> str:
    """Return the path without `.` and `..`."""
    out: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            out = out[:-1]
        elif segment != ".":
            out.append(segment)
    return "/".join(out)


def test_a_proxys_prefix_is_left_out_and_is_bounded() -> None:
    prefix = "/a" * MAX_PREFIX_SEGMENTS
    for path in ("/v1/completions", f"{prefix}/v1/completions"):
        assert find("POST", path, passes_through=False, has_prefix=True) == Found(
            Kind.PREFIX, "/v1/completions", "/v1/completions"
        )
    for path in (f"{prefix}/a/v1/completions", "/a//v1/completions", "/a/../v1/completions", "/a/v1/completions/x"):
        with pytest.raises(UnknownPath):
            find("POST", path, passes_through=False, has_prefix=True)
    with pytest.raises(UnknownPath):
        find("POST", "/a/v1/completions", passes_through=False)
