"""Settings of the engine program."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.common.log_lines import Format
from engine.common.settings import (
    HasEffect,
    Settings,
    check_port_address,
    check_redis_url,
    group,
    port_address,
)
from engine.startup.removed import REMOVED

DEVICE = r"cpu|sim|cuda(:\d{1,3})?"
"""What `device` may be."""
MOST = 2**60
"""Most bytes or tokens of a setting: libraries take sizes of 64 bits."""


ON_CUDA = HasEffect(lambda given: given.device_kind == "cuda", "it works only on device cuda")
ON_CPU = HasEffect(lambda given: given.device_kind == "cpu", "it works only on device cpu")
ON_SIM = HasEffect(lambda given: given.device_kind == "sim", "it works only on device sim")
HAS_KV = HasEffect(
    lambda given: given.device_kind != "sim",
    "device sim computes no KV; --kv-pool-tokens sets the size of its pool",
)
REUSES = HasEffect(lambda given: given.prefix_cache != "off", "--prefix-cache off keeps no KV between requests")


@group("Model", common=("model", "served_model_name", "device", "max_model_len"))
class ModelSettings(Settings):
    """What is computed, and where."""

    model: Path = Field(description="folder of the Hugging Face checkpoint; device sim reads its config and tokenizer")
    served_model_name: str = Field("", description="name that clients use for the model; empty: the folder's name")
    device: str = Field(
        "cpu", description="cpu, cuda, cuda:N, or sim: a GPU's timing with made-up answers, to try a fleet without GPUs"
    )
    dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16"], HAS_KV] = Field(
        "auto", description="type of weights and KV, to save memory or to compare; auto: the checkpoint's"
    )
    max_model_len: int = Field(
        0,
        ge=0,
        description="most tokens of prompt and answer together, for shorter limits than the model's; 0: as many as "
        "model and KV pool allow",
    )
    tool_call_parser: Literal[
        "auto", "openai", "deepseek", "qwen3_coder", "hermes", "mistral", "pythonic", "llama3_json"
    ] = Field(
        "auto",
        description="format in which the model writes tool calls, if its chat template does not show it; auto: as the "
        "template shows",
    )
    generation_config: bool = Field(
        True,
        description="take sampling fields that a request does not give, and the longest answer, from the checkpoint's "
        "generation_config.json, as vLLM does; off for clients that rely on the API's defaults",
    )
    attention: Annotated[Literal["auto", "triton", "flashinfer", "flash_attn"], ON_CUDA] = Field(
        "triton",
        description="attention on cuda, if a library is faster on your card; auto: an installed one that fits",
    )
    cuda_graphs: Annotated[bool, ON_CUDA] = Field(
        True, description="launch decode steps on cuda as CUDA graphs; off for a faster start or to find a fault"
    )
    exact: bool = Field(
        True,
        description="on cpu: a request's logits have the same bits with any cache and in any batch; off for speed "
        "(engine/backend/README.md)",
    )
    threads: Annotated[int, ON_CPU] = Field(
        0,
        ge=0,
        le=1024,
        description="threads of a step on cpu; fewer for engines that share cores; 0: torch's choice, one per core",
    )
    sim_profile: Annotated[str, ON_SIM] = Field(
        "h100-8b",
        description="timing of device sim: h100-8b, a100-8b, l4-8b, h100-70b-tp4, or a .yaml that calibrate wrote",
    )

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model.resolve().name

    @field_validator("device")
    @classmethod
    def _is_device(cls, value: str) -> str:
        if not re.fullmatch(DEVICE, value):
            raise ValueError("must be cpu, cuda, cuda:N or sim")
        return value

    @property
    def device_kind(self) -> str:
        """cpu, cuda or sim."""
        return self.device.partition(":")[0]

    @model_validator(mode="after")
    def _check_exact(self) -> Self:
        if self.exact and "exact" in self.model_fields_set and self.device_kind != "cpu":
            raise ValueError(f"--exact works only on device cpu, not on {self.device}")
        return self


@group("Clients and keys", common=("host", "port", "api_key_file"))
class PortSettings(Settings):
    """Where the engine listens, and who may use it."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: every IPv4 address; empty: every one")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    api_key_file: Path | None = Field(
        None,
        description="API keys, one a line, of which clients and gateways must show one; read again when it changes; "
        "none: no key needed",
    )


@group("KV cache", common=("kv_cache_bytes", "kv_memory_share", "host_cache_bytes"))
class CacheSettings(Settings):
    """The memory for KV, and what is kept in it."""

    kv_cache_bytes: Annotated[
        int, HAS_KV, HasEffect(lambda given: not given.kv_pool_tokens, "--kv-pool-tokens sets the size of the KV pool")
    ] = Field(
        0,
        ge=0,
        le=MOST,
        description="size of the KV pool on cpu and cuda; 0: 1 GiB on cpu, --kv-memory-share of what is left on cuda",
    )
    kv_memory_share: Annotated[
        float,
        ON_CUDA,
        HasEffect(lambda given: not given.kv_pool_tokens, "--kv-pool-tokens sets the size of the KV pool"),
        HasEffect(lambda given: not given.kv_cache_bytes, "--kv-cache-bytes sets the size of the KV pool"),
    ] = Field(
        0.9,
        gt=0,
        le=1,
        description="KV pool's share of the GPU memory that is left; less if other programs use the card",
    )
    kv_pool_tokens: int = Field(
        0, ge=0, le=MOST, description="size of the KV pool in tokens, on any device; 0: as many as fit"
    )
    block_size: int = Field(16, description="tokens per KV block: 16, 32 or 64; larger for libraries that need it")
    prefix_cache: Literal["hash", "radix", "off"] = Field(
        "radix",
        description="how common prefixes are found; radix: to the token; hash: whole blocks; off, to measure without: "
        "no reuse",
    )
    keep_share: Annotated[float, REUSES] = Field(
        0.0,
        ge=0,
        le=0.9,
        description="for agents: share of the pool for conversations that are kept unasked while a tool runs, and in "
        "case an answer is regenerated; 0: none",
    )
    host_cache_bytes: int = Field(
        0,
        ge=0,
        le=MOST,
        description="host memory for KV that the pool has no room for; fetched if that beats computing; 0: none",
    )
    disk_cache_bytes: int = Field(
        0, ge=0, le=MOST, description="disk for KV below that, found again after a restart; 0: none"
    )
    disk_cache_path: Annotated[
        Path | None,
        HasEffect(lambda given: given.device_kind != "sim", "device sim only emulates the time that a disk takes"),
    ] = Field(
        None,
        description="folder of the disk tier, this engine's alone; files of other models or versions in it are removed",
    )
    shared_cache_bytes: int = Field(
        0, ge=0, le=MOST, description="size of the whole shared folder, for all models and the same on all engines"
    )
    shared_cache_path: Path | None = Field(
        None,
        description="folder below these that the engines of a model share, so that a new engine starts warm; none: no "
        "such tier",
    )

    @field_validator("prefix_cache", mode="before")
    @classmethod
    def _is_index(cls, value: object) -> object:
        """YAML reads `off` as false; earlier versions had true and false here."""
        return {"false": "off", "true": "radix"}.get(str(value).lower(), value)

    @field_validator("block_size")
    @classmethod
    def _is_block_size(cls, value: int) -> int:
        if value not in (16, 32, 64):
            raise ValueError("must be 16, 32 or 64")
        return value

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        is_sim = getattr(self, "device", "") == "sim"
        if self.host_cache_bytes and self.prefix_cache == "off":
            raise ValueError("--host-cache-bytes needs --prefix-cache hash or radix: off reuses nothing")
        if self.disk_cache_bytes and not self.host_cache_bytes:
            raise ValueError("--disk-cache-bytes needs --host-cache-bytes: blocks pass through the host's memory")
        if bool(self.disk_cache_bytes) != bool(self.disk_cache_path) and not is_sim:
            raise ValueError("--disk-cache-bytes and --disk-cache-path need each other")
        if bool(self.shared_cache_bytes) != bool(self.shared_cache_path):
            raise ValueError("--shared-cache-bytes and --shared-cache-path need each other")
        if self.shared_cache_bytes and not self.host_cache_bytes:
            raise ValueError("--shared-cache-path needs --host-cache-bytes: blocks pass through the host's memory")
        if self.shared_cache_bytes and is_sim:
            raise ValueError("--shared-cache-path does not work on device sim: there is no KV to share")
        if 0 < self.kv_pool_tokens < self.block_size:
            raise ValueError(f"--kv-pool-tokens ({self.kv_pool_tokens}) is less than one block of {self.block_size}")
        return self


@group("Batching", common=("max_running", "max_step_tokens"))
class BatchSettings(Settings):
    """How much is computed at once."""

    max_running: int = Field(
        0,
        ge=0,
        le=4096,
        description="requests that hold KV blocks at once; fewer for faster tokens to each; 0: by the pool, from 256",
    )
    max_step_tokens: int = Field(
        2048,
        ge=1,
        le=2**20,
        description="tokens computed in one step; more for throughput, fewer for even gaps between tokens",
    )

    @model_validator(mode="after")
    def _check_step(self) -> Self:
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"--max-step-tokens ({self.max_step_tokens}) must be at least --max-running ({self.max_running}): "
                "every running request may decode a token in one step"
            )
        return self


@group("Redis", common=("redis_url",))
class RegistrySettings(Settings):
    """What gateways learn of the cache."""

    redis_url: str | None = Field(
        None,
        description="the Redis through which gateways learn what this engine holds: redis://, rediss://, unix:// or "
        "redis+sentinel://HOST:26379,HOST:26379/MASTER; none: publish nothing",
    )
    pod_id: str = Field("", description="name of this engine for gateways, unique; empty: HOSTNAME:PORT")

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, url: str | None) -> str | None:
        return check_redis_url(url) if url else None


@group("Operating", common=("config", "metrics_port", "admin_port", "drain_s"))
class OperatingSettings(Settings):
    """What operators see, and how an engine ends."""

    config: str | None = Field(None, description="YAML file with any of these settings")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="separate port of /metrics, at --host, for Prometheus; 0: any free one; none: on --admin-port, "
        "else on --port",
    )
    admin_port: str | None = Field(
        None,
        coerce_numbers_to_str=True,
        description="port for operators, PORT on loopback or HOST:PORT; it has /reset_prefix_cache, /debug and "
        "/metrics and asks for no key; none: they are on --port",
    )
    log_format: Format = Field("text", description="form of log lines on stderr, for a collector of logs: json")
    drain_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="after SIGTERM: running requests may take so long; below the supervisor's grace period",
    )

    @field_validator("admin_port")
    @classmethod
    def _check_admin_port(cls, address: str | None) -> str | None:
        return None if address is None else check_port_address(address)

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Host and port for operators."""
        return None if self.admin_port is None else port_address(self.admin_port)


class EngineSettings(OperatingSettings, RegistrySettings, BatchSettings, CacheSettings, PortSettings, ModelSettings):
    """Serves a model behind an OpenAI-compatible port, and tells gateways what its KV cache holds.

    `warmroute-engine calibrate` measures a device for --sim-profile. The standard OTEL_* variables turn on traces
    (engine/common/otel/README.md). Exit status: 0 after a clean stop, 1 if a step did not end, 2 if the engine cannot
    start.
    """

    removed = REMOVED
    removed_in = MappingProxyType({"log_level": "0.3.0"})
