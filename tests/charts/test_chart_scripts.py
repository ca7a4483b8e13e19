"""The two scripts in the chart, run as a pod runs them, against a scripted gateway."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from tests.charts.chart import CHART, Helm, container, of_kind
from tests.conftest import wait_until

DEADLINE_S = 60
KEY = "sk-test"


@dataclass(slots=True)
class Gateway:
    """Its n-th answer names the n-th of `pods`, and its usage the n-th of `cached` tokens (None: not named)."""

    pods: list[str | None]
    cached: list[int | None]
    ends: bool = True
    served: list[str] = field(default_factory=lambda: ["m"])
    seen: list[str] = field(default_factory=list)
    admitted: int = 0

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models"""
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(status=401)
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.served]})

    async def health(self, request: web.Request) -> web.Response:
        """GET /health"""
        return web.Response()

    async def ready(self, request: web.Request) -> web.Response:
        """GET /ready: one more engine each time."""
        self.admitted += 1
        return web.json_response({"pods": {"admitted": self.admitted}}, status=200 if self.admitted > 1 else 503)

    async def chat(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions"""
        body = await request.json()
        assert body["stream"] is True
        n = len(self.seen)
        self.seen.append(body["messages"][0]["content"])
        details = {} if self.cached[n] is None else {"prompt_tokens_details": {"cached_tokens": self.cached[n]}}
        events = [
            json.dumps({"choices": [{"delta": {"content": "a"}}]}),
            json.dumps({"choices": [], "usage": {"prompt_tokens": 900, **details}}),
            *(["[DONE]"] if self.ends else []),
        ]
        pod = self.pods[n]
        text = "".join(f"data: {event}\n\n" for event in events)
        return web.Response(text=text, headers={"x-warmroute-pod": pod} if pod else {})


@asynccontextmanager
async def serving(gateway: Gateway, port: int = 0) -> AsyncIterator[str]:
    """Return the URL of the gateway."""
    app = web.Application()
    app.router.add_get("/health", gateway.health)
    app.router.add_get("/v1/models", gateway.models)
    app.router.add_get("/ready", gateway.ready)
    app.router.add_post("/v1/chat/completions", gateway.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def run_script(name: str, *arguments: str, **environ: str) -> tuple[int, str]:
    """Return the exit status and the output of a script given with `python -c`, as in the chart."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        (CHART / "files" / name).read_text(),
        *arguments,
        env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def completion(gateway: Gateway, **environ: str) -> tuple[int, str]:
    """Run the script of `helm test` against the gateway."""
    async with serving(gateway) as url:
        return await run_script(
            "test_completion.py",
            **{"GATEWAY_URL": url, "TIMEOUT_S": "30", "API_KEYS": f"# ours\n\n{KEY}\nother\n", **environ},
        )


async def test_a_second_request_with_the_same_prefix_hits() -> None:
    gateway = Gateway(pods=["a", "a"], cached=[0, 880])
    status, output = await completion(gateway)
    assert (status, len(gateway.seen)) == (0, 2), output
    assert "880 of 900 tokens cached" in output
    first, second = gateway.seen
    assert first[:2000] == second[:2000]
    assert first != second


async def test_it_may_take_another_try_beside_other_traffic() -> None:
    gateway = Gateway(pods=["a", "b", "b"], cached=[0, 0, 880])
    status, output = await completion(gateway)
    assert (status, len(gateway.seen)) == (0, 3), output


async def test_engines_that_do_not_tell_of_their_cache_must_be_the_same() -> None:
    status, output = await completion(
        Gateway(pods=["a", "a"], cached=[None, None], served=["m", "other"]), MODEL="other"
    )
    assert status == 0, output
    assert "other:" in output


@pytest.mark.parametrize(
    ("gateway", "reason"),
    [
        (Gateway(pods=["a"] * 5, cached=[0] * 5), "none found the cache"),
        (Gateway(pods=["a", "b", "c", "d", "e"], cached=[880] * 5), "none found the cache"),
        (Gateway(pods=[None], cached=[0]), "no header x-warmroute-pod"),
        (Gateway(pods=["a"], cached=[0], ends=False), r"did not end with \[DONE\]"),
    ],
    ids=["never cached", "never the same pod", "no pod", "cut off"],
)
async def test_it_fails_with_the_reason(gateway: Gateway, reason: str) -> None:
    status, output = await completion(gateway)
    assert status != 0
    assert re.search(reason, output), output


async def test_a_key_that_is_not_accepted_is_named() -> None:
    status, output = await completion(Gateway(pods=[], cached=[]), API_KEYS="wrong")
    assert status != 0
    assert "401: the API key is not accepted" in output


@pytest.mark.parametrize(("model", "reason"), [("", "no engine serves a model"), ("large", "no engine serves large")])
async def test_engines_that_do_not_come_are_the_reason(model: str, reason: str) -> None:
    gateway = Gateway(pods=[], cached=[], served=["small"] if model else [])
    status, output = await completion(gateway, MODEL=model, TIMEOUT_S="1.5")
    assert (status, gateway.seen) == (1, []), output
    assert f"waiting: {reason}; the gateway lists: {'small' if model else 'nothing'}\ngave up after 1.5 s" in output
    assert "Traceback" not in output


async def test_a_gateway_that_is_not_there_is_the_reason() -> None:
    status, output = await run_script("test_completion.py", GATEWAY_URL="http://127.0.0.1:1", TIMEOUT_S="1.5")
    assert (status, "Traceback" in output) == (1, False), output
    assert "waiting: the gateway does not answer: Cannot connect" in output


async def test_the_comparison_waits_for_its_engines() -> None:
    gateway = Gateway(pods=[], cached=[])
    async with serving(gateway) as url:
        status, output = await run_script("wait_engines.py", url, "3", "30", url)
    assert (status, gateway.admitted) == (0, 3), output


async def test_the_comparison_waits_for_the_operators_port() -> None:
    gateway, operators = Gateway(pods=[], cached=[]), Gateway(pods=[], cached=[])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with serving(gateway) as url:
        waiting = asyncio.create_task(run_script("wait_engines.py", url, "3", "60", f"http://127.0.0.1:{port}"))
        await wait_until(lambda: gateway.admitted >= 4, 60)  # the script asks again, although the engines are there
        assert not waiting.done()
        async with serving(operators, port):
            status, output = await waiting
    assert status == 0, output


async def test_a_port_of_operators_that_nobody_opens_is_the_reason() -> None:
    async with serving(Gateway(pods=[], cached=[], admitted=9)) as url:
        status, output = await run_script("wait_engines.py", url, "3", "3", "http://127.0.0.1:9")
    assert status != 0
    assert "http://127.0.0.1:9/health: <urlopen error [Errno 111]" in output


async def test_the_comparison_gives_up_with_the_reason() -> None:
    gateway = Gateway(pods=[], cached=[])
    async with serving(gateway) as url:
        status, output = await run_script("wait_engines.py", url, "99", "3", url)
    assert status != 0
    assert "of 99 engines take requests" in output


@pytest.mark.parametrize(("status", "writes", "ends"), [(0, True, 0), (3, True, 0), (1, False, 1)])
async def test_the_job_sends_a_key_and_ends_as_the_comparison_did_and_prints_what_there_is(
    any_helm: Helm, tmp_path: Path, status: int, writes: bool, ends: int
) -> None:
    """If a run is not reliable (status 3), its result says so, and the Job succeeds."""
    (job,) = of_kind(any_helm.render(CHART / "ci" / "loadgen-values.yaml"), "Job")
    fake = tmp_path / "bin" / "warmroute-loadgen"
    fake.parent.mkdir()
    result = tmp_path / "result.json"
    fake.write_text(
        "#!/bin/sh\necho the table: $* key=$WARMROUTE_API_KEY\n"
        f"{f'echo {{}} > {result}' if writes else ''}\nexit {status}\n"
    )
    fake.chmod(0o755)
    ended = []
    for name in ("compare", "result"):
        one = container(job["spec"]["template"], name)
        command = [word.replace("/results/", f"{tmp_path}/") for word in one["command"]]
        done = await asyncio.to_thread(
            subprocess.run,
            [*command, *one.get("args", [])],
            env={
                **os.environ,
                "PATH": f"{fake.parent}:{os.environ['PATH']}",
                "API_KEYS": "# clients\n\n  sk-first\nsk-second\n",
            },
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        ended.append((done.returncode, done.stdout))
    (_, table), (exit_status, printed) = ended
    admin = "--admin-url=http://rel-warmroute-gateway-admin.ns.svc:8081"
    assert f"the table: compare --url=http://rel-warmroute-gateway.ns:80 {admin} --out=/results" in table
    assert "--policies=round_robin,predicted_ttft --sessions=10 --seed=7 key=sk-first\n" in table
    assert exit_status == ends
    assert printed == ("{}\n" if writes else "")
