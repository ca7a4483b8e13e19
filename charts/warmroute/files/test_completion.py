"""`helm test`: every model streams an answer, and a second request with the same prefix finds the first one's cache.

Environment: GATEWAY_URL, TIMEOUT_S, MODEL (empty: all that the gateway lists), API_KEYS (one key a line; empty: none).
"""

import asyncio
import json
import os
import uuid
from typing import Any

import aiohttp

ATTEMPTS = 5
"""Tries for each model. With other traffic, the policy may have good reason to send a request to a pod without the
prefix."""
PAUSE_S = 0.5
"""Seconds between two tries, so that the engine can publish what its cache holds."""


async def main() -> None:
    lines = map(str.strip, os.environ.get("API_KEYS", "").splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    seconds = float(os.environ["TIMEOUT_S"])
    try:
        async with (
            asyncio.timeout(seconds),
            aiohttp.ClientSession(os.environ["GATEWAY_URL"], headers=headers) as session,
        ):
            for model in await wait_models(session, os.environ.get("MODEL", "")):
                print(f"{model}: asking", flush=True)
                await check(session, model)
    except TimeoutError:
        raise SystemExit(f"gave up after {seconds:g} s; the line above says where") from None


async def wait_models(session: aiohttp.ClientSession, wanted: str) -> list[str]:
    said = ""
    while True:
        models = []
        try:
            async with session.get("/v1/models") as response:
                if response.status in (401, 403):
                    raise SystemExit(f"GET /v1/models answered {response.status}: the API key is not accepted")
                if response.status == 200:
                    models = [card["id"] for card in (await response.json())["data"]]
                state = f"no engine serves {wanted or 'a model'}; the gateway lists: {', '.join(models) or 'nothing'}"
        except aiohttp.ClientError as error:
            state = f"the gateway does not answer: {error}"
        if wanted in models or (models and not wanted):
            return [wanted] if wanted else models
        if state != said:
            print(f"waiting: {state}", flush=True)
            said = state
        await asyncio.sleep(1)


async def check(session: aiohttp.ClientSession, model: str) -> None:
    prefix = f"{uuid.uuid4()} " + "The quick brown fox jumps over the lazy dog. " * 100
    pods = set()
    for attempt in range(ATTEMPTS):
        pod, events, usage = await complete(session, model, f"{prefix} Question {attempt}?")
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        print(f"{model}: {events} events from {pod}, {cached} of {usage['prompt_tokens']} tokens cached", flush=True)
        if pod in pods and (cached is None or cached > 0):
            return
        pods.add(pod)
        await asyncio.sleep(PAUSE_S)
    raise SystemExit(f"{model}: {ATTEMPTS} requests with one prefix, and none found the cache of an earlier one")


async def complete(session: aiohttp.ClientSession, model: str, prompt: str) -> tuple[str, int, dict[str, Any]]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{model}: status {response.status}: {(await response.text())[:500]}")
        pod = response.headers.get("x-warmroute-pod")
        if not pod:
            raise SystemExit(f"{model}: the answer has no header x-warmroute-pod")
        data = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
    if not data or data[-1] != b"[DONE]":
        raise SystemExit(f"{model}: the stream from {pod} did not end with [DONE]")
    events = [json.loads(event) for event in data[:-1]]
    usage = next((event["usage"] for event in reversed(events) if event.get("usage")), None)
    if usage is None or not any(event["choices"] for event in events):
        raise SystemExit(f"{model}: the stream from {pod} has no text or no usage")
    return pod, len(events), usage


asyncio.run(main())
