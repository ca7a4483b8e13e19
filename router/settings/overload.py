"""Settings of what the gateway refuses, lets wait, and ends."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from engine.common.settings import Settings, group
from router.overload.standing import Goals

_SECONDS = re.compile(r"[0-9]{1,4}(\.[0-9]{1,3})?")


@group("Overload", common=("queue_timeout_s", "max_in_flight", "max_body_bytes"))
class OverloadSettings(Settings):
    """Requests that may run and wait."""

    queue_timeout_s: float = Field(
        10.0,
        ge=0,
        description="longest wait while every engine of a model is saturated, below your clients' patience; a request "
        "that would wait longer is answered 429 at once; 0: never wait, engines queue",
    )
    ttft_goals: list[str] = Field(
        [],
        description="SECONDS or MODEL=SECONDS: while more comes than the engines can do, requests whose first token "
        "would come later are answered 429, so that the others are in time; 0: keep them all, for batch jobs; default: "
        "1 s plus 4 times what the prompt takes on an idle engine",
    )
    max_in_flight: int = Field(4096, ge=1, description="requests in flight; one more is answered 429")
    max_pod_requests: int = Field(
        0,
        ge=0,
        description="requests that one engine gets at a time, for faster answers to fewer clients; needs "
        "--queue-timeout-s; 0: as many as the engine turns out to run at once",
    )
    activation_timeout_s: float = Field(
        0.0,
        ge=0,
        description="with engines that scale to zero: longest wait until an engine serves a known model; 0: answered "
        "503 at once",
    )
    max_body_bytes: int = Field(
        16 * 2**20, ge=1024, description="largest body of a request, e.g. with images; more is answered 413"
    )
    max_in_flight_body_mib: int = Field(
        128,
        ge=1,
        description="request bodies in flight together; four times as much is the memory they take; one that does not "
        "fit is answered 429",
    )

    @property
    def goals(self) -> Goals:
        """Return the goals of first tokens. Raises ValueError, which names the entry."""
        gateway_s: float | None = None
        by_model_s: dict[str, float] = {}
        for text in self.ttft_goals:
            model, equals, seconds = (part.strip() for part in text.rpartition("="))
            if not _SECONDS.fullmatch(seconds) or bool(equals) != bool(model):
                raise ValueError(
                    f"--ttft-goals has {text!r}; it must be SECONDS or MODEL=SECONDS, as in 2,qwen3-8b=1.5"
                )
            if model in by_model_s or (not model and gateway_s is not None):
                raise ValueError(f"--ttft-goals has {text!r}, and another goal for the same: one is enough")
            if model:
                by_model_s[model] = float(seconds)
            else:
                gateway_s = float(seconds)
        return Goals(gateway_s, by_model_s)

    @property
    def max_in_flight_body_bytes(self) -> int:
        """`max_in_flight_body_mib` in bytes."""
        return self.max_in_flight_body_mib * 2**20

    @model_validator(mode="after")
    def _check_room(self) -> Self:
        if self.goals != Goals() and not self.queue_timeout_s:
            raise ValueError("--ttft-goals needs --queue-timeout-s: without a queue no request is held")
        if self.max_pod_requests and not self.queue_timeout_s:
            raise ValueError("--max-pod-requests needs --queue-timeout-s: requests beyond it have to wait")
        if self.max_in_flight_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"--max-in-flight-body-mib {self.max_in_flight_body_mib} has no room for one body of --max-body-bytes "
                f"{self.max_body_bytes}"
            )
        return self


@group("Deadlines", common=("first_byte_timeout_s", "total_timeout_s"))
class DeadlineSettings(Settings):
    """When an answer is given up."""

    first_byte_timeout_s: float = Field(
        120.0,
        gt=0,
        description="an engine that has sent no token of a stream by then is given up, unless it is only full; more "
        "for long prompts",
    )
    idle_timeout_s: float = Field(
        60.0,
        gt=0,
        description="a started answer without a token for so long is given up, unless its engine still makes tokens",
    )
    total_timeout_s: float = Field(
        900.0, gt=0, description="a whole request, waiting and retries included; more for very long answers"
    )
    keepalive_timeout_s: float = Field(
        75.0,
        gt=0,
        description="a client's connection without a request; more than the idle timeout of a load balancer in front",
    )
