"""Ask an engine who it is: `GET /v1/models`, which every OpenAI-compatible server answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import orjson

from engine.contract import headers
from engine.contract.errors import quoted
from router.fleet.lack import Lacks, lack_of
from router.routing.types import PodId

MAX_ANSWER_BYTES = 2**20
MAX_MODELS = 1024
"""Of one engine: each is a time series."""
SLEEP_TIMEOUT_S = 1.0
"""For an engine's word on whether it sleeps. One that computes says it after its step, one that sleeps at once: no word
means that it is awake."""
MAX_SLEEPLESS = 2**14
"""Engines of which is remembered that they have no such word."""
MAX_WORD_BYTES = 2**12
_VLLM = b'"owned_by":"vllm"'
_ASLEEP = re.compile(rb'\s*\{\s*"is_sleeping"\s*:\s*true\s*\}\s*')
MAX_EPOCH_DIGITS = 20
_NAME = re.compile(r"[\x21-\x7e]{1,253}")
"""Of a pod or a model: what a header, a label and a line of a log hold without being taken apart."""
NEW_IN_EVERY_ANSWER = frozenset(("created", "permission"))
"""Of a model's card, as some engines make it: the time of the answer, and a random id with its own time."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model a pod serves. `card` is its entry in the pod's `/v1/models`, compact JSON.

    Two are equal where the names are, and what of the cards lasts: without `NEW_IN_EVERY_ANSWER`.
    """

    name: str
    card: bytes = field(compare=False)
    lasting: bytes = b""


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """Who answers at a URL. `epoch` is None for an engine that does not tell its lives apart."""

    pod_id: PodId
    epoch: int | None
    models: tuple[ServedModel, ...]


class ProbeFailed(Exception):
    """The engine gave no usable answer.

    `refused`: it answered that it takes no requests (503); `protected`: it answered, but wants a key (401, 403);
    `silent`: nothing came in time, not even that the connection is refused; `untried`: it was not asked, for want of
    something of this machine; `asleep`: it answered that it computes nothing until it is woken.
    """

    def __init__(
        self,
        reason: str,
        *,
        refused: bool = False,
        protected: bool = False,
        silent: bool = False,
        untried: bool = False,
        asleep: bool = False,
    ) -> None:
        super().__init__(reason)
        self.untried = untried
        self.refused = refused or asleep
        self.asleep = asleep
        self.protected = protected
        self.silent = silent


class Probe(Protocol):
    """One look at one engine."""

    async def identify(self, url: str) -> PodIdentity:
        """The engine at base URL `url`, within the probe's deadline. Raises ProbeFailed."""


class HttpProbe:
    """The probe over HTTP.

    `credentials` gives the headers that the engine at a URL wants to see at the moment, `pods` how many engines the
    gateway follows: engines of ours publish the less often for it.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        timeout_s: float,
        credentials: Callable[[str], Mapping[str, str]] = lambda url: {},
        lacks: Lacks | None = None,
        pods: Callable[[], int] = lambda: 1,
    ) -> None:
        self._lacks = lacks or Lacks()
        self._session = session
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._pods = pods
        self._sleepless: set[str] = set()
        """URLs of engines that do not know whether they sleep, and so never do."""

    async def identify(self, url: str) -> PodIdentity:
        """The engine at base URL `url`, within the probe's deadline. Raises ProbeFailed."""
        credentials = self._credentials(url)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.get(
                    f"{url}/v1/models",
                    headers={"Accept": "application/json", headers.PODS: str(self._pods()), **credentials},
                    allow_redirects=False,
                ) as response,
            ):
                if response.status in (401, 403):
                    why = "it refuses the key of" if credentials else "it wants a key, which is given with"
                    raise ProbeFailed(
                        f"GET /v1/models answered {response.status}: {why} --engine-api-key-file", protected=True
                    )
                if response.status != 200:
                    raise ProbeFailed(f"GET /v1/models answered {response.status}", refused=response.status == 503)
                body = await response.content.read(MAX_ANSWER_BYTES)
                while len(body) < MAX_ANSWER_BYTES and (more := await response.content.read(MAX_ANSWER_BYTES)):
                    body += more
                names = response.headers
        except TimeoutError:
            raise ProbeFailed(f"no answer to GET /v1/models within {self._timeout_s:g} s", silent=True) from None
        except (aiohttp.ClientError, OSError) as error:
            lack = lack_of(error)
            if lack is not None:
                self._lacks.note(lack)
                raise ProbeFailed(f"the gateway lacks what a connection needs ({lack})", untried=True) from None
            raise ProbeFailed(f"{type(error).__name__}: {error}") from None
        models = served_models(body)
        if url not in self._sleepless and any(_VLLM in model.card for model in models):
            await self._see_awake(url, credentials)
        epoch = names.get(headers.EPOCH, "")
        pod_id = _named(names.get(headers.POD) or urlsplit(url).netloc, "pod id")
        if "/" in pod_id:
            raise ProbeFailed(f"its pod id {quoted(pod_id)} has a slash, which stands before a data-parallel rank")
        return PodIdentity(
            pod_id=PodId(pod_id),
            epoch=int(epoch) if epoch.isdecimal() and len(epoch) <= MAX_EPOCH_DIGITS else None,
            models=models,
        )

    async def _see_awake(self, url: str, credentials: Mapping[str, str]) -> None:
        """vLLM in its development mode can be sent to sleep: it lists its models then, and requests hang.

        Raises ProbeFailed where it says that it sleeps, or that it shuts down.
        """
        try:
            async with (
                asyncio.timeout(min(SLEEP_TIMEOUT_S, self._timeout_s)),
                self._session.get(f"{url}/is_sleeping", headers=dict(credentials), allow_redirects=False) as response,
            ):
                status, body = response.status, await response.content.read(MAX_WORD_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError):
            return  # what is wrong the next probe shows
        if status in (404, 405):
            if len(self._sleepless) >= MAX_SLEEPLESS:
                self._sleepless.clear()
            self._sleepless.add(url)
        elif status == 200 and _ASLEEP.fullmatch(body):
            raise ProbeFailed("GET /is_sleeping says that it sleeps; POST /wake_up wakes it", asleep=True)
        elif status == 500 and b"shutting down" in body.lower():
            raise ProbeFailed("GET /is_sleeping says that it shuts down", refused=True)


def named_by_discovery(url: str, model: str) -> PodIdentity:
    """An engine that does not say who it is, of which discovery knows the one model it serves. Raises ProbeFailed."""
    _named(model, "model of discovery")
    card = orjson.dumps({"id": model, "object": "model", "created": 0, "owned_by": "unknown"})
    return PodIdentity(PodId(urlsplit(url).netloc), None, (ServedModel(model, card),))


def served_models(body: bytes) -> tuple[ServedModel, ...]:
    """The models in an OpenAI model list, each once. Raises ProbeFailed on anything else."""
    try:
        answer: Any = orjson.loads(body)
        models: dict[str, ServedModel] = {}
        for entry in answer["data"]:
            lasting = {name: value for name, value in entry.items() if name not in NEW_IN_EVERY_ANSWER}
            models.setdefault(entry["id"], ServedModel(entry["id"], orjson.dumps(entry), orjson.dumps(lasting)))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ProbeFailed("GET /v1/models answered something that is not an OpenAI model list") from None
    if not models:
        raise ProbeFailed("GET /v1/models lists no model")
    if len(models) > MAX_MODELS:
        raise ProbeFailed(f"GET /v1/models lists {len(models)} models, more than {MAX_MODELS}")
    for name in models:
        _named(name, "model")
    return tuple(models.values())


def _named(name: object, what: str) -> str:
    """`name`, where it is one. Raises ProbeFailed."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ProbeFailed(f"its {what} {quoted(str(name))} is no name: 1 to 253 visible ASCII characters are")
    return name
