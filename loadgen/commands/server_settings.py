"""Flags of the commands that load one server at a time: which server, how requests are made, how many."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import Any, Literal, Self

import orjson
from pydantic import Field, field_validator, model_validator

from engine.common.settings import Settings, group
from loadgen.commands.storable import storable
from loadgen.experiment.arms import ArmSpec
from loadgen.load.target import Target
from loadgen.measure.goodput import parse_objectives
from loadgen.single.arm import LoadSpec

LISTS = ("--goodput", "--metadata", "--header", "--metrics-urls", "--policies", "--rates", "--concurrencies")
"""Flags that take several words, as in vLLM."""
_SECRETS = ("api_key", "header")
_COMPLETIONS = ("openai", "vllm")


@group("Requests", common=("config", "model", "goodput", "max_concurrency", "workers"))
class RequestSettings(Settings):
    """Mixin: what every request carries, how many processes send requests, when a run is cut off."""

    config: str | None = Field(None, description="YAML file with any of these settings")
    model: str = Field("", description="model to name in requests; empty: the first of /v1/models")
    api_key: str = Field("", description="sent as 'authorization: Bearer ...'; empty: OPENAI_API_KEY, else not sent")
    header: list[str] = Field([], description="NAME=VALUE, a further header field of each request; repeatable")
    ca_file: str = Field(
        "",
        description="PEM file of the authority that signed an https server's certificate; empty: the system's "
        "authorities, which know no private one",
    )
    insecure: bool = Field(
        False, description="do not verify an https server's certificate, as for a test server that signed its own"
    )
    extra_body: str = Field(
        "",
        description="JSON object of further body fields of each request, as in vLLM; they override this program's own, "
        "such as temperature",
    )
    ignore_eos: bool = Field(True, description="ask for answers of exact length; off for servers that refuse the field")
    request_timeout_s: float = Field(600.0, gt=0, description="seconds a request may take as a whole")
    tokens_per_word: float = Field(0.0, ge=0, le=100, description="tokens per word of the model; 0: measured at start")
    max_concurrency: int | None = Field(
        None, ge=1, description="most requests in flight; others wait, which adds to their latency; none: no limit"
    )
    workers: int = Field(1, ge=1, le=256, description="processes that send")
    time_limit_s: float = Field(3600.0, gt=0, description="seconds after which the load is cut off")
    goodput: list[str] = Field(
        [], description="objectives in ms, any of ttft:500 tpot:50 e2el:5000; goodput is over all requests offered"
    )

    def target_of(self, arm: ArmSpec, endpoint: Literal["chat", "completions"]) -> Target:
        """Return how an arm is reached. Raises ValueError."""
        return Target(
            url=arm.url,
            endpoint=endpoint,
            model=self.model,
            policy=arm.policy,
            api_key=self.api_key or os.environ.get("OPENAI_API_KEY", ""),
            headers=words_of(self.header, "--header"),
            extra=({"ignore_eos": True} if self.ignore_eos else {}) | object_of(self.extra_body, "--extra-body"),
            tls_ca_file=self.ca_file,
            tls_verify=not self.insecure,
            admin_url=arm.admin_url,
            timeout_s=self.request_timeout_s,
        )

    @model_validator(mode="after")
    def _check_requests(self) -> Self:
        object_of(self.extra_body, "--extra-body")
        if self.ca_file and self.insecure:
            raise ValueError("--ca-file and --insecure exclude each other: give one of them")
        if self.ca_file:
            try:
                ssl.create_default_context(cafile=self.ca_file)
            except OSError as error:
                raise ValueError(f"--ca-file {self.ca_file} cannot be used: {error.strerror or error}") from None
        return self

    def configuration(self) -> dict[str, Any]:
        """Return every setting that has a value, with secrets replaced."""
        given = {name: value for name, value in self.model_dump().items() if value is not None and name != "config"}
        hidden = {name: "(given)" for name in _SECRETS if given[name]}
        return {name: storable(value) for name, value in (given | hidden).items()}


@group("Server", common=("base_url", "backend", "admin_url"))
class ServerSettings(RequestSettings):
    """Mixin: the server and its preparation; names as in `vllm bench serve`."""

    base_url: str = Field("", description="address of the server or gateway; empty: http://--host:--port")
    host: str = Field("127.0.0.1", description="host of the server, without --base-url")
    port: int = Field(8000, ge=1, le=65_535, description="port of the server, without --base-url")
    backend: Literal["openai", "vllm", "openai-chat"] = Field(
        "openai-chat", description="openai and vllm: /v1/completions; openai-chat: /v1/chat/completions"
    )
    endpoint: Literal["/v1/completions", "/v1/chat/completions"] | None = Field(
        None, description="path of the API; none: as --backend says"
    )
    metrics_urls: list[str] = Field(
        [],
        description="a pod's address, to read its counters and reset its cache; repeatable; none: the gateway's pods",
    )
    admin_url: str = Field(
        "",
        description="address of the gateway's --admin-port: it lists the pods and resets their caches; "
        "empty: the address of requests",
    )
    num_warmups: int = Field(0, ge=0, le=1000, description="short requests beforehand, all at once, not counted")

    @field_validator("base_url", "admin_url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        parse_objectives(self.goodput)
        words_of(self.header, "--header")
        if {"base_url", "host"} <= self.model_fields_set or {"base_url", "port"} <= self.model_fields_set:
            raise ValueError("--base-url excludes --host and --port: give one of them")
        wanted = "/v1/completions" if self.backend in _COMPLETIONS else "/v1/chat/completions"
        if self.endpoint and "backend" in self.model_fields_set and self.endpoint != wanted:
            raise ValueError(f"--endpoint {self.endpoint} is not that of --backend {self.backend}: give one of them")
        self.target(self.arm())  # raises if no header can hold a value
        return self

    @property
    def url(self) -> str:
        """Return the server's URL."""
        return self.base_url or f"http://{self.host}:{self.port}"

    def arm(self, name: str = "server", policy: str = "") -> ArmSpec:
        """Return the server as an arm with this name."""
        return ArmSpec(name, self.url, policy, tuple(self.metrics_urls), self.admin_url)

    def target(self, arm: ArmSpec) -> Target:
        """Return how an arm is reached. Raises ValueError."""
        is_chat = self.endpoint != "/v1/completions" if self.endpoint else self.backend not in _COMPLETIONS
        return self.target_of(arm, "chat" if is_chat else "completions")

    def load_spec(self, seed: int, settle_s: float = 0.0) -> LoadSpec:
        """Return how the load is made, after so many seconds of rest since the preparations."""
        return LoadSpec(
            seed=seed,
            workers=self.workers,
            warmups=self.num_warmups,
            settle_s=settle_s,
            tokens_per_word=self.tokens_per_word,
            objectives_ms=parse_objectives(self.goodput),
        )


@group("Server", common=("policy",))
class OneArmSettings(ServerSettings):
    """Mixin: the server of a command that sends one load to it, under one policy."""

    flush_cache: bool = Field(False, description="empty the prefix caches of all pods before the load")
    policy: str = Field("", description="routing policy to request from a warmroute gateway; empty: none")

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        self.target(self.arm(policy=self.policy))  # raises if no header can hold it
        return self


def object_of(text: str, flag: str) -> dict[str, Any]:
    """Return the JSON object in a flag's text, empty for an empty text. Raises ValueError, which names the flag."""
    if not text:
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{flag} must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{flag} must be a JSON object, got {text[:80]!r}")
    return value


def words_of(texts: list[str], flag: str) -> Mapping[str, str]:
    """Return the values of `NAME=VALUE` texts by name. Raises ValueError, which names the flag."""
    pairs = [text.partition("=") for text in texts]
    if bad := [text for text, (name, sign, _) in zip(texts, pairs, strict=True) if not (name and sign)]:
        raise ValueError(f"{flag} {bad[0]!r} must be NAME=VALUE")
    return {name: value for name, _, value in pairs}
