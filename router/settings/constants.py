"""Numbers of the gateway that no operator has a reason to set, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.keys import DEFAULT_STRIDE_BYTES

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The numbers are fields, not module constants, so that a test can run a gateway with shorter times."""

    stride_bytes: int = DEFAULT_STRIDE_BYTES
    """Bytes per prefix key. Engines and gateways must agree on it, so nobody can choose."""

    lease_s: float = 15.0
    """Seconds of silence after which what a pod published is dropped. Pods publish every second, and a pod that is away
    for less, such as one that pauses while it loads an adapter, comes back with its cache."""
    warm_timeout_s: float = 5.0
    """Seconds that readiness waits for the registry and for what other gateways know. A snapshot of a large fleet takes
    less than one; without Redis a gateway still has to become ready."""
    speculation_ttl_s: float = 10.0
    """Seconds that a routed prefix counts as held by a pod that publishes to the registry: the pod's own report comes
    within a second of the end of the prompt, which takes some seconds on a busy pod."""
    foreign_ttl_s: float = 600.0
    """Seconds that a routed prefix counts as held by a pod that publishes nothing and does not report its KV capacity.
    With the capacity, which vLLM and SGLang report, the gateway estimates what the pod evicts."""
    dns_max_ttl_s: float = 5.0
    """Seconds after which a name is resolved again, if its TTL is longer: so long a pod that is gone gets no probe."""

    probe_interval_s: float = 2.0
    """Seconds between two probes of an engine, plus or minus 20 % at random."""
    probe_timeout_s: float = 2.0
    """Seconds an engine has to answer a probe. A longer wait would keep a dead engine longer in service."""
    eject_after: int = 3
    """Consecutive failures after which an engine gets no requests: one or two happen at every restart of a network
    element."""
    connect_timeout_s: float = 2.0
    """Seconds to connect to an engine: one lost SYN is repeated after one second."""
    retries: int = 2
    """Further pods to try while nothing was sent to the client. RetryBudget bounds what all requests together retry, so
    a third one hardly ever runs."""

    queue_requests: int = 1024
    """Requests of one model that may wait for room. At one request a second and pod, that is minutes of work, which
    `--queue-timeout-s` refuses long before."""
    queue_mib: int = 64
    """MiB of the bodies of one model's requests that may wait: half of the bodies in flight by default."""
    max_in_flight_answer_mib: int = 128
    """MiB of answers that are kept until they are whole, so that another pod can replace a pod that dies. Answers that
    do not fit are passed on as they come."""

    head_timeout_s: float = 10.0
    """Seconds from the first byte of a request to the end of its headers. It is for clients that hold connections on
    purpose: an honest client sends its headers in one piece."""
    body_timeout_s: float = 60.0
    """Seconds in which a request's body must arrive: 16 MiB at 2.3 Mbit/s."""
    body_min_rate: int = 4096
    """Least bytes/s of a request's body, on average over each 5 s: a client that is slower holds a place on purpose."""
    max_upload_mib: int = 512
    """MiB of a form with a recording, which is sent to an engine as it comes and held nowhere. Engines refuse what is
    too long for them; five hours of speech at 16 kHz have this size."""
    max_connections: int = 8192
    """Connections of clients, if the process may have two file descriptors for each: twice `--max-in-flight`, since
    clients keep connections without a request."""

    named_cache_mib: int = 64
    """MiB of contents that a tenant's named caches may have together; with Redis also the MiB of all tenants' contents
    that this gateway keeps in memory. 64 MiB are some 16 million tokens."""
    named_cache_max_ttl_s: float = 604_800.0
    """Longest time to live of a named cache: a week, far beyond the time that any engine keeps the KV."""


CONSTANTS = Constants()
