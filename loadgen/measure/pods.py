"""The pods' own counters: how many tokens were looked up in their prefix caches, and how many were found.

vLLM and this project's engine count tokens in `vllm:prefix_cache_queries_total` and `vllm:prefix_cache_hits_total`
(older vLLM: `vllm:gpu_prefix_cache_...`). One pod may have several series (engines, models), which are added.
"""

from __future__ import annotations

import asyncio
import math
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
SCRAPE_TIMEOUT_S = 5.0
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
MAX_PAGE_BYTES = 4 * 2**20
"""A larger page is not read to its end; vLLM's has about 100 KB."""
MAX_COUNT = 2**53
"""The largest count of which a float holds every token."""


@dataclass(frozen=True, slots=True)
class PodAddress:
    """A pod: `name` is its name in the answers' pod header, else host and port; `url` is the page to scrape."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class PodCount:
    """Tokens according to a pod's counters: since its start, or between two readings."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Reading:
    """All pods at one time; `problems` has a sentence for each pod that could not be read."""

    pods: Mapping[str, PodCount]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of a run. Falsy if a pod is missing, because a sum over some pods is not a hit rate."""

    pods: Mapping[str, PodCount]
    problems: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pods) and not self.problems


class CounterError(Exception):
    """Counters that cannot be read; the message says which pod and why."""


def parse_counters(text: str) -> PodCount:
    """Return the counters of a Prometheus exposition. Raises CounterError if they are absent."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise CounterError(f"it is not Prometheus text: {error}") from None
    queries, hits = (_values(samples, names) for names in (QUERIES, HITS))
    if not queries or not hits:
        raise CounterError(f"it has no {QUERIES[0]}: is its prefix cache switched on?")
    totals = sum(queries), sum(hits)
    if not all(math.isfinite(total) and 0 <= total <= MAX_COUNT for total in totals):
        raise CounterError("its counters are not numbers of tokens")
    return PodCount(*map(int, totals))


def _values(samples: Sequence[Sample], names: Sequence[str]) -> list[float]:
    """Return the values under the first of `names` that occurs: some vLLM count the same tokens under both."""
    found = ([sample.value for sample in samples if sample.name == name] for name in names)
    return next(filter(None, found), [])


def counted(before: Reading, after: Reading) -> Counted:
    """Return what the pods counted between two readings."""
    problems = dict.fromkeys((*before.problems, *after.problems))
    pods = {}
    for pod in before.pods.keys() ^ after.pods.keys():
        if not any(problem.startswith(f"{pod}:") for problem in problems):
            problems[f"{pod}: it was listed only {'before' if pod in before.pods else 'after'} the run"] = None
    for pod in before.pods.keys() & after.pods.keys():
        first, last = before.pods[pod], after.pods[pod]
        prompt, cached = last.prompt_tokens - first.prompt_tokens, last.cached_tokens - first.cached_tokens
        if prompt < 0 or cached < 0:
            problems[f"{pod}: its counters went back: it restarted during the run"] = None
        else:
            pods[pod] = PodCount(prompt, cached)
    return Counted(dict(sorted(pods.items())), tuple(problems))


class PodMetrics:
    """Reads the counters of a set of pods. Use as an async context manager."""

    def __init__(self, addresses: Sequence[PodAddress], tls: ssl.SSLContext | None = None) -> None:
        """`tls`: how https pods are verified; None: by the system's authorities."""
        self.addresses = tuple(addresses)
        self._tls = tls

    async def __aenter__(self) -> PodMetrics:
        connector = aiohttp.TCPConnector(ssl=self._tls or True)
        timeout = aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def read(self) -> Reading:
        """Return every pod's counters, read at the same time."""
        found = await asyncio.gather(*(self._read(address) for address in self.addresses))
        pods = {
            address.name: count
            for address, count in zip(self.addresses, found, strict=True)
            if not isinstance(count, str)
        }
        return Reading(pods, tuple(problem for problem in found if isinstance(problem, str)))

    async def _read(self, address: PodAddress) -> PodCount | str:
        url = address.url
        try:
            async with self._http.get(url) as response:
                if response.status != 200:
                    return without_password(f"{address.name}: {url} answered HTTP {response.status}")
                return parse_counters((await _page(response)).decode())
        except CounterError as error:
            return without_password(f"{address.name}: {url}: {error}")
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as error:
            return without_password(f"{address.name}: {url}: {type(error).__name__} {error}".strip())


async def _page(response: aiohttp.ClientResponse) -> bytes:
    """Return the body. Raises CounterError if it is larger than MAX_PAGE_BYTES."""
    page = bytearray()
    async for piece in response.content.iter_chunked(2**16):
        page += piece
        if len(page) > MAX_PAGE_BYTES:
            raise CounterError(f"its page is larger than {MAX_PAGE_BYTES >> 20} MiB")
    return bytes(page)


def address_of(url: str) -> PodAddress:
    """Return a pod known only by its address. The page to scrape is `url` if it has a path, else its /metrics."""
    parts = urlsplit(url)
    page = url if parts.path.strip("/") else f"{url.rstrip('/')}/metrics"
    name = without_password(page).removeprefix(f"{parts.scheme}://").removesuffix("/metrics")
    return PodAddress(name, page)


def without_password(text: str) -> str:
    """Return the text with its URLs as `http://host`, even if they are `http://user:password@host`."""
    return _USER.sub("", text)


def pods_of_gateway(listing: str) -> list[PodAddress]:
    """Return the pods that a gateway's `GET /v1/pods` lists with a name. Raises CounterError."""
    try:
        pods = orjson.loads(listing)["pods"]
        return [PodAddress(str(pod["pod"]), f"{pod['url']}/metrics") for pod in pods if pod["pod"] and pod["admitted"]]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise CounterError(f"/v1/pods is not a warmroute gateway's: {type(error).__name__} {error}") from None
