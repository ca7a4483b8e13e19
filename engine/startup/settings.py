"""Settings of the engine program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.common.log_lines import Format
from engine.common.settings import Settings, check_redis_url
from engine.contract.keys import DEFAULT_STRIDE_BYTES

DEVICE = r"cpu|sim|cuda(:\d{1,3})?"
"""What `device` may be."""
MOST = 2**60
"""Most bytes or tokens of a setting: libraries take sizes of 64 bits."""


class EngineSettings(Settings):
    """One engine: a model on a device behind an HTTP port.

    `warmroute-engine calibrate` measures a device for --sim-profile. The standard OTEL_* variables turn on traces
    (engine/common/otel/README.md). Exit status: 0 after a clean stop, 1 if a step did not end, 2 if the engine
    cannot start.
    """

    model: Path = Field(description="Folder of the Hugging Face checkpoint; device sim reads its config and tokenizer")
    served_model_name: str = Field("", description="Name clients use for the model; empty: the folder's name")
    device: str = Field(
        "cpu",
        description="Where steps are computed: cpu, cuda, cuda:N, or sim: a GPU's timing, no weights, made-up answers",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="Type of weights and KV; auto: the checkpoint's"
    )
    generation_config: bool = Field(
        True,
        description="Take sampling fields that a request does not give (temperature, top_p, top_k, min_p, "
        "repetition_penalty), and the longest answer, from the checkpoint's generation_config.json, as vLLM does; "
        "off: the API's defaults, for clients that rely on them",
    )
    host: str = Field("127.0.0.1", description="Address to listen on; empty: all, 0.0.0.0: all IPv4 addresses")
    port: int = Field(8000, ge=0, le=65535, description="TCP port to listen on; 0: any free one")
    api_key_file: Path | None = Field(
        None,
        description="File of API keys, one a line, # for comments, read again while running; clients and gateways must "
        "show one of them; none: every client that reaches the engine may use it",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Separate TCP port of /metrics, at --host; 0: any free one; none: on --admin-port, else on --port",
    )
    admin_host: str = Field(
        "127.0.0.1",
        description="Address of --admin-port, which asks for no key; empty: all, 0.0.0.0: all IPv4 addresses",
    )
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port for operators: /reset_prefix_cache, /debug and /metrics; 0: any free one; "
        "none: they are on --port",
    )
    redis_url: str | None = Field(
        None,
        description="redis://, rediss:// or unix:// URL of the prefix registry, or "
        "redis+sentinel://HOST:26379,HOST:26379/MASTER; none: publish nothing",
    )
    pod_id: str = Field("", description="Name of this engine in the registry, unique; empty: HOSTNAME:PORT")
    stride: int = Field(
        DEFAULT_STRIDE_BYTES, ge=16, le=65536, multiple_of=4, description="Bytes per prefix key; equal in all engines"
    )
    lease_s: float = Field(10.0, ge=1, le=3600, description="Seconds until the registry forgets a silent engine")
    block_size: int = Field(16, description="Tokens per KV block: 16, 32 or 64")
    kv_cache_bytes: int = Field(
        0,
        ge=0,
        le=MOST,
        description="Bytes for the KV pool on cpu and cuda; 0: 1 GiB on cpu, kv_memory_share of what is left on cuda",
    )
    kv_memory_share: float = Field(
        0.9, gt=0, le=1, description="KV pool's share of the GPU memory that weights, activations and CUDA graphs leave"
    )
    kv_pool_tokens: int = Field(
        0, ge=0, le=MOST, description="Tokens whose KV the pool holds, on any device; 0: as many as fit kv_cache_bytes"
    )
    prefix_cache: Literal["hash", "radix", "off"] = Field(
        "radix",
        description="How common prefixes of prompts are found, to reuse their KV. radix: to the token, by a tree; "
        "hash: whole blocks, by digest; off: no reuse",
    )
    eviction: Literal["lru", "lfu", "cost"] = Field(
        "lfu",
        description="Which unused KV block is evicted first. lru: the longest unused; lfu: the block shared by the "
        "fewest requests, so that prompts used once do not push out a shared prefix; cost: the same, weighted by the "
        "seconds to compute the block again",
    )
    pin_share: float = Field(
        0.25,
        ge=0,
        le=0.9,
        description="Share of the KV pool for prompts that clients ask to keep (cache_control, "
        "prompt_cache_retention); prompts beyond it are served and not kept; 0: no prompt is kept",
    )
    pin_min_tokens: int = Field(
        1024,
        ge=1,
        le=2**31,
        description="Tokens of the shortest prefix of a prompt that is kept, asked for or unasked",
    )
    keep_share: float = Field(
        0.0,
        ge=0,
        le=0.9,
        description="Share of the KV pool for conversations that are kept unasked: while a tool runs, as long as "
        "recent tools took, and in case an answer is regenerated; requests that need the room get it; 0: none is kept",
    )
    host_cache_bytes: int = Field(
        0,
        ge=0,
        le=MOST,
        description="Bytes of host memory for KV blocks below the pool: blocks that requests leave are copied there, "
        "and fetched if that is faster than computing them again; 0: none",
    )
    disk_cache_bytes: int = Field(
        0,
        ge=0,
        le=MOST,
        description="Bytes on disk for KV blocks below the host tier, found again after a restart; 0: none",
    )
    disk_cache_path: Path | None = Field(
        None,
        description="Folder of the disk tier, used by this engine only: files that engines of other models or versions "
        "left in it are removed",
    )
    shared_cache_path: Path | None = Field(
        None,
        description="Folder of the shared tier below these, on a file system that the engines of a model share: each "
        "engine, even one just started, may fetch what another has stored; none: no such tier",
    )
    shared_cache_bytes: int = Field(
        0,
        ge=0,
        le=MOST,
        description="Bytes that the whole folder may hold, for all models: give all engines the same number; the "
        "least recently used blocks are removed",
    )
    max_step_tokens: int = Field(2048, ge=1, le=2**20, description="Tokens computed in one step")
    max_running: int = Field(64, ge=1, le=4096, description="Requests that hold KV blocks at once")
    max_waiting: int = Field(1024, ge=1, le=2**20, description="Most requests that wait; further ones get 429")
    max_model_len: int = Field(
        0, ge=0, description="Most tokens of prompt and answer together; 0: as many as model and KV pool allow"
    )
    cuda_graphs: bool = Field(True, description="Launch decode steps on cuda as CUDA graphs, captured at start")
    attention: Literal["auto", "triton", "flashinfer", "flash_attn"] = Field(
        "triton", description="Attention on cuda; auto: a library that is installed and fits, else the engine's own"
    )
    exact: bool = Field(
        True,
        description="On cpu: give a request's logits the same bits with any cache and in any batch; costs "
        "time on the device (engine/backend/EXACT.md)",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Threads of a torch step on cpu; 0: torch's choice, one per core. Engines that share cores need "
        "fewer, because each step waits for its slowest thread",
    )
    text_threads: int = Field(2, ge=1, le=64, description="Threads that render and tokenize requests")
    token_cache_mib: int = Field(
        64,
        ge=0,
        le=2**20,
        description="MiB of memory for the tokens of messages that came before, so that what prompts have in common is "
        "tokenized once; 0: none",
    )
    sim_profile: str = Field(
        "h100-8b",
        description="Timing of device sim: h100-8b, a100-8b, l4-8b, h100-70b-tp4, or a .yaml that calibrate wrote",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the answers of device sim")
    step_deadline_s: float = Field(
        300.0, gt=0, le=86_400, description="Seconds a step may take; after that the device is lost and /health is 503"
    )
    drain_s: float = Field(30.0, ge=0, le=3600, description="Seconds running requests may take to end after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line written")
    log_format: Format = Field("text", description="Log lines: text, or json, one object per line")
    config: str | None = Field(None, description="YAML file with any of these settings")

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

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, url: str | None) -> str | None:
        return check_redis_url(url) if url else None

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
    def _fits(self) -> Self:
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"--max-step-tokens ({self.max_step_tokens}) must be at least --max-running ({self.max_running}): "
                "every running request may decode a token in one step"
            )
        if "admin_host" in self.model_fields_set and self.admin_port is None:
            raise ValueError("--admin-host needs --admin-port")
        if self.host_cache_bytes and self.prefix_cache == "off":
            raise ValueError("--host-cache-bytes needs --prefix-cache hash or radix: off reuses nothing")
        if self.disk_cache_bytes and not self.host_cache_bytes:
            raise ValueError("--disk-cache-bytes needs --host-cache-bytes: blocks pass through the host's memory")
        if bool(self.disk_cache_bytes) != bool(self.disk_cache_path) and self.device != "sim":
            raise ValueError("--disk-cache-bytes and --disk-cache-path need each other")
        self._check_shared_cache()
        if self.exact and "exact" in self.model_fields_set and self.device_kind != "cpu":
            raise ValueError(f"--exact works only on device cpu, not on {self.device}")
        if 0 < self.kv_pool_tokens < self.block_size:
            raise ValueError(f"--kv-pool-tokens ({self.kv_pool_tokens}) is less than one block of {self.block_size}")
        return self

    def _check_shared_cache(self) -> None:
        if bool(self.shared_cache_bytes) != bool(self.shared_cache_path):
            raise ValueError("--shared-cache-bytes and --shared-cache-path need each other")
        if not self.shared_cache_bytes:
            return
        if not self.host_cache_bytes:
            raise ValueError("--shared-cache-path needs --host-cache-bytes: blocks pass through the host's memory")
        if self.device == "sim":
            raise ValueError("--shared-cache-path does not work on device sim: there is no KV to share")
