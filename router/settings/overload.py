"""Settings of what the gateway refuses, lets wait, and ends."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from engine.common.settings import Settings, group


@group("Overload", common=("queue_timeout_s", "max_in_flight", "max_body_bytes"))
class OverloadSettings(Settings):
    """Requests that may run and wait."""

    queue_timeout_s: float = Field(
        10.0,
        ge=0,
        description="longest wait while every engine of a model is saturated, below your clients' patience; a request "
        "that would wait longer is answered 429 at once; 0: never wait, engines queue",
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
    def max_in_flight_body_bytes(self) -> int:
        """`max_in_flight_body_mib` in bytes."""
        return self.max_in_flight_body_mib * 2**20

    @model_validator(mode="after")
    def _check_room(self) -> Self:
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
        description="an engine that has sent no byte of its answer by then is given up; more for long prompts",
    )
    idle_timeout_s: float = Field(60.0, gt=0, description="a started answer that is silent for so long is given up")
    total_timeout_s: float = Field(
        900.0, gt=0, description="a whole request, waiting and retries included; more for very long answers"
    )
    keepalive_timeout_s: float = Field(
        75.0,
        gt=0,
        description="a client's connection without a request; more than the idle timeout of a load balancer in front",
    )
