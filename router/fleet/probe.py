"""Asks an engine who it is: `GET /v1/models`, which every OpenAI-compatible server answers."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import orjson

from engine.contract import headers
from engine.contract.bounded_json import loads
from engine.contract.errors import quoted
from router.fleet.lack import Lacks, lack_of
from router.views.types import PodId

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 4 * 2**20
MAX_MODELS = 1024
"""Models of one engine that are served: each is a time series. Those after them are passed over."""
SLEEP_TIMEOUT_S = 1.0
"""Seconds to wait for an engine to say whether it sleeps. A sleeping engine answers at once, and a computing engine
answers after its step. So no answer means that it is awake."""
MAX_SLEEPLESS = 2**14
"""Most engines that are remembered as having no `/is_sleeping`."""
MAX_WORD_BYTES = 2**12
_VLLM = b'"owned_by":"vllm"'
_ASLEEP = re.compile(rb'\s*\{\s*"is_sleeping"\s*:\s*true\s*\}\s*')
MAX_EPOCH_DIGITS = 20
_NAME = re.compile(r"[\x21-\x7e]{1,253}")
"""The name of a pod: safe in a header, a label and a line of the log."""
MAX_NAME_CHARS = 253
"""Longest name of a model. It may have blanks and letters of any script: it is no part of a header."""
NEW_IN_EVERY_ANSWER = frozenset(("created", "permission"))
"""Fields of a model's card that some engines fill anew: the time of the answer, and a random id with its own time."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a pod serves. `card` is its entry in the pod's `/v1/models`, compact JSON.

    Two are equal if their names and the lasting parts of their cards (all but `NEW_IN_EVERY_ANSWER`) are equal.
    """

    name: str
    card: bytes = field(compare=False)
    lasting: bytes = b""


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """The engine that answers at a URL. `epoch` is None if the engine does not report its restarts."""

    pod_id: PodId
    epoch: int | None
    models: tuple[ServedModel, ...]


def for_name(url: str) -> Mapping[str, str]:
    """Return headers that end the connection if the engine has a name: the next one goes where the name leads then. A
    kept connection would go on to a server that is no longer ours."""
    try:
        ipaddress.ip_address((urlsplit(url).hostname or "").partition("%")[0])
    except ValueError:
        return {"Connection": "close"}
    return {}


class ProbeFailed(Exception):
    """The engine gave no usable answer.

    `refused`: it answered that it takes no requests (503); `protected`: it answered, but needs a key (401, 403);
    `silent`: nothing came in time, not even a refused connection; `untried`: it was not asked, because this machine
    lacks a resource; `asleep`: it answered that it computes nothing until it is woken.
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
    """Looks at one engine."""

    async def identify(self, url: str) -> PodIdentity:
        """Return the identity of the engine at base URL `url`, within the probe's deadline. Raises ProbeFailed."""


class HttpProbe:
    """The probe over HTTP.

    `credentials` gives the headers that the engine at a URL needs now. `pods` returns how many engines the gateway
    follows: with more engines, our own engines publish less often.
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
        self._unfit: dict[str, tuple[str, ...]] = {}
        """URL of an engine -> the names of its models that are passed over."""
        self._sleepless: set[str] = set()
        """URLs of engines without `/is_sleeping`, which therefore never sleep."""

    async def identify(self, url: str) -> PodIdentity:
        """Return the identity of the engine at base URL `url`, within the probe's deadline. Raises ProbeFailed."""
        credentials, own = self._credentials(url), for_name(url)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.get(
                    f"{url}/v1/models",
                    headers={"Accept": "application/json", headers.PODS: str(self._pods()), **own, **credentials},
                    allow_redirects=False,
                ) as response,
            ):
                if response.status in (401, 403):
                    why = "it refuses the key of" if credentials else "it needs a key, which is given with"
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
        except (aiohttp.ClientError, OSError, UnicodeError) as error:  # the last if no host can have that name
            lack = lack_of(error)
            if lack is not None:
                self._lacks.note(lack)
                raise ProbeFailed(f"the gateway cannot open a connection ({lack})", untried=True) from None
            raise ProbeFailed(f"{type(error).__name__}: {error}") from None
        models, unfit = served_models(body)
        self._say_unfit(url, unfit)
        if url not in self._sleepless and any(_VLLM in model.card for model in models):
            await self._see_awake(url, credentials)
        epoch = names.get(headers.EPOCH, "")
        pod_id = _named(names.get(headers.POD) or urlsplit(url).netloc, "pod id")
        if "/" in pod_id:
            raise ProbeFailed(f"its pod id {quoted(pod_id)} has a slash, which may only precede a data-parallel rank")
        return PodIdentity(
            pod_id=PodId(pod_id),
            epoch=int(epoch) if epoch.isdecimal() and len(epoch) <= MAX_EPOCH_DIGITS else None,
            models=models,
        )

    def _say_unfit(self, url: str, unfit: tuple[str, ...]) -> None:
        """Log once which models of an engine are passed over."""
        if unfit == self._unfit.get(url, ()):
            return
        if len(self._unfit) >= MAX_SLEEPLESS:
            self._unfit.clear()
        self._unfit[url] = unfit
        if unfit:
            log.warning(
                "fleet: %d models of the engine at %s are not served, %s among them: a name has 1 to %d printable "
                "characters, and an engine %d models at most",
                len(unfit),
                url,
                unfit[0],
                MAX_NAME_CHARS,
                MAX_MODELS,
            )

    async def _see_awake(self, url: str, credentials: Mapping[str, str]) -> None:
        """Check that the engine is awake. vLLM in development mode can sleep: it still lists its models, but requests
        hang.

        Raises ProbeFailed if it says that it sleeps, or that it shuts down.
        """
        try:
            async with (
                asyncio.timeout(min(SLEEP_TIMEOUT_S, self._timeout_s)),
                self._session.get(
                    f"{url}/is_sleeping", headers={**for_name(url), **credentials}, allow_redirects=False
                ) as response,
            ):
                status, body = response.status, await response.content.read(MAX_WORD_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError):
            return  # the next probe shows the fault
        if status in (404, 405):
            if len(self._sleepless) >= MAX_SLEEPLESS:
                self._sleepless.clear()
            self._sleepless.add(url)
        elif status == 200 and _ASLEEP.fullmatch(body):
            raise ProbeFailed("GET /is_sleeping says that it sleeps; POST /wake_up wakes it", asleep=True)
        elif status == 500 and b"shutting down" in body.lower():
            raise ProbeFailed("GET /is_sleeping says that it shuts down", refused=True)


def named_by_discovery(url: str, model: str) -> PodIdentity:
    """Return the identity of an engine that does not give it, from the one model that discovery names. Raises
    ProbeFailed."""
    if not _is_fit(model):
        what = f"1 to {MAX_NAME_CHARS} printable characters"
        raise ProbeFailed(f"its model of discovery {quoted(model)} is not valid: it must be {what}")
    card = orjson.dumps({"id": model, "object": "model", "created": 0, "owned_by": "unknown"})
    return PodIdentity(PodId(urlsplit(url).netloc), None, (ServedModel(model, card),))


def restricted(identity: PodIdentity, model: str | None) -> PodIdentity:
    """Return `identity` limited to the one model that discovery names, if it names one. Raises ProbeFailed."""
    if model is None:
        return identity
    chosen = tuple(served for served in identity.models if served.name == model)
    if not chosen:
        listed = ", ".join(served.name for served in identity.models)
        raise ProbeFailed(f"discovery says that it serves {model}, but GET /v1/models lists {listed}")
    return replace(identity, models=chosen)


def served_models(body: bytes) -> tuple[tuple[ServedModel, ...], tuple[str, ...]]:
    """Return the models in an OpenAI model list, each once, and the names of those that are passed over, quoted.

    Raises ProbeFailed on anything else, and if no model is left.
    """
    try:
        answer: Any = loads(body)
        models: dict[str, ServedModel] = {}
        unfit: list[str] = []
        for entry in answer["data"]:
            lasting = {name: value for name, value in entry.items() if name not in NEW_IN_EVERY_ANSWER}
            name = entry["id"]
            if not _is_fit(name) or (len(models) == MAX_MODELS and name not in models):
                unfit.append(quoted(str(name)))
            elif name not in models:
                models[name] = ServedModel(name, orjson.dumps(entry), orjson.dumps(lasting))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise ProbeFailed("GET /v1/models answered something that is not an OpenAI model list") from None
    if not models:
        why = f"with a name that can be served; {unfit[0]} cannot" if unfit else ""
        raise ProbeFailed(f"GET /v1/models lists no model {why}".rstrip())
    return tuple(models.values()), tuple(unfit)


def _is_fit(name: object) -> bool:
    return isinstance(name, str) and 1 <= len(name) <= MAX_NAME_CHARS and name.isprintable() and bool(name.strip())


def _named(name: object, what: str) -> str:
    """Return `name` if it is a valid name. Raises ProbeFailed."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ProbeFailed(f"its {what} {quoted(str(name))} is not valid: it must be 1 to 253 visible ASCII characters")
    return name
