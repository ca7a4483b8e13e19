"""Composition root of the engine. Only this module names concrete classes; it also sets the order of start and stop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import uvloop
from aiohttp import web
from prometheus_client import Metric

from engine.backend.base import Backend
from engine.backend.profile_file import load_profile
from engine.backend.sim import SimBackend
from engine.common.api_keys import parse_keys
from engine.common.audit import configure_audit
from engine.common.collector import quiet_collector
from engine.common.files import FollowedFile, UnusableFile
from engine.common.log_lines import configure
from engine.common.otel.running import metrics_sent, tracing
from engine.common.settings import ConfigError
from engine.grammar.vocabulary import Vocabulary
from engine.loop.metrics import EngineMetrics
from engine.model.config import ModelConfig
from engine.model.errors import ModelError
from engine.model.generation import Generation
from engine.server.http.keys import ApiKeys
from engine.server.requests import ModelText
from engine.server.routes import make_admin_app, make_app, make_metrics_app, take_stock
from engine.server.service import ServerState
from engine.startup.background import background
from engine.startup.constants import CONSTANTS, Constants
from engine.startup.descriptors import want_descriptors
from engine.startup.loaded import LoadedModel, StartError
from engine.startup.settings import EngineSettings
from engine.startup.tasks import BackendStuck, engine_tasks, most_running
from engine.startup.tier_settings import real_stores
from engine.startup.unread import say_unread
from engine.text.calls.formats import AnswerFormat
from engine.text.chat import ChatTemplate
from engine.text.rendering import ChatRenderer
from engine.text.token_cache import TokenCache
from engine.text.token_files import TokenizerError
from engine.text.tokenizer import Tokenizer
from engine.tiers.stores.store import Store, TierError

if TYPE_CHECKING:
    from engine.backend.cuda.backend import CudaBackend
    from engine.backend.torch_backend import TorchBackend

log = logging.getLogger(__name__)
T = TypeVar("T")
CPU_KV_BYTES = 2**30
"""Bytes of the KV pool on the CPU by default."""
_LOADING = "load"
"""Name of the thread that loads the model."""
CLOSE_S = 1.0
"""Seconds to close the connections after the drain."""


def run(settings: EngineSettings) -> int:
    """Serve until a signal. Return the program's exit status."""
    configure("info", settings.log_format)
    configure_audit()
    for words in settings.without_effect():
        log.warning("%s", words)
    want_descriptors((settings.max_running or CONSTANTS.most_running) + CONSTANTS.max_waiting)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except (ModelError, TokenizerError, StartError, TierError, UnusableFile, ConfigError) as error:
        print(f"warmroute-engine: {error}", file=sys.stderr)
        return 2
    if any(thread.name == _LOADING for thread in threading.enumerate()):
        _leave(0)  # a thread inside torch would abort the process when the interpreter ends
    return 0


async def serve(settings: EngineSettings) -> None:
    """Open the ports, load, serve, drain. Raises ModelError, TokenizerError, StartError, TierError, UnusableFile,
    ConfigError if the engine cannot start.

    Ends the process if a step never ends.
    """
    stop, force = asyncio.Event(), asyncio.Event()
    _on_signals(lambda: (force if stop.is_set() else stop).set())
    state, metrics = ServerState(), EngineMetrics(settings.model_name)

    def families() -> list[Metric]:
        take_stock(state, metrics)
        return metrics.families()

    async with (
        tracing("warmroute-engine", instance=settings.pod_id) as state.tracer,
        metrics_sent("warmroute-engine", families, instance=settings.pod_id),
        listening(settings, state, metrics) as ports,
    ):
        loaded = await _unless(stop, _in_daemon_thread(lambda: load(settings)))
        if loaded is None:
            return
        try:
            async with (
                engine_tasks(settings, state, metrics, loaded, ports.clients, force) as stop_publishing,
                quiet_collector(lambda: state.is_idle),
            ):
                print(*ports.lines(settings), sep="\n", flush=True)
                await stop.wait()
                log.info("draining: new requests are refused, running ones may take %g s", settings.drain_s)
                state.is_draining = True
                stop_publishing()
                with suppress(TimeoutError):
                    async with asyncio.timeout(settings.drain_s):
                        await _unless(force, asyncio.ensure_future(state.wait_idle()))
        except BackendStuck as error:
            log.critical("ending without closing the backend: %s", error)
            _leave(1)  # the interpreter would also wait for the step's thread


def load(settings: EngineSettings, constants: Constants = CONSTANTS) -> LoadedModel:
    """Read tokenizer, template and weights. Blocks. Raises ModelError, TokenizerError, StartError, TierError."""
    config = ModelConfig.from_path(settings.model)
    tokenizer = Tokenizer.from_path(settings.model)
    template = ChatTemplate.from_path(settings.model)
    answers = AnswerFormat.of("" if template is None else template.sources, settings.tool_call_parser)
    generation = Generation.from_path(settings.model) if settings.generation_config else Generation()
    say_unread(settings.model, tokenizer, generation)
    backend: Backend
    stores: tuple[Store, ...] = ()
    if settings.device == "sim":
        backend, blocks = _sim_backend(settings, min(config.vocab_size, tokenizer.vocab_size), tokenizer)
    else:
        backend, blocks = model_backend(settings)
        stores = real_stores(settings, backend.pool)
    max_model_len = min(config.max_position, blocks * settings.block_size)
    if settings.max_model_len > max_model_len:
        raise StartError(
            f"--max-model-len {settings.max_model_len} is more than the model's {config.max_position} or the KV pool's "
            f"{blocks * settings.block_size} tokens"
        )
    text = ModelText(
        name=settings.model_name,
        tokenizer=tokenizer,
        template=None if template is None else ChatRenderer(template),
        vocab_size=config.vocab_size,
        max_model_len=settings.max_model_len or max_model_len,
        eos_token_ids=config.eos_token_ids | tokenizer.eos_token_ids,
        sampling=generation.sampling,
        max_new_tokens=generation.max_new_tokens,
        answers=answers,
        stride=constants.stride_bytes,
        token_cache=TokenCache(tokenizer, constants.token_cache_mib * 2**20),
        least_kept_tokens=constants.pin_min_tokens,
    )
    vocabulary = Vocabulary(tokenizer.to_json(), text.vocab_size, tokenizer.special_tokens, text.eos_token_ids)
    return LoadedModel(text, backend, blocks, vocabulary, stores)


def _sim_backend(settings: EngineSettings, vocab_size: int, tokenizer: Tokenizer) -> tuple[Backend, int]:
    try:
        profile = load_profile(settings.sim_profile)
    except ValueError as error:
        raise StartError(f"--sim-profile: {error}") from None
    blocks = (settings.kv_pool_tokens or profile.kv_tokens) // settings.block_size
    return SimBackend(profile, vocab_size, token_bytes=tokenizer.token_bytes), blocks


def model_backend(settings: EngineSettings) -> tuple[TorchBackend | CudaBackend, int]:
    """Return the model on its device and the number of blocks in its pool. Blocks. Raises ModelError, StartError."""
    return _cuda_backend(settings) if settings.device_kind == "cuda" else _torch_backend(settings)


def _cuda_backend(settings: EngineSettings) -> tuple[CudaBackend, int]:
    if find_spec("triton") is None:
        raise StartError(f"--device {settings.device} needs the package triton: pip install 'triton>=3.6'")
    from engine.backend.cuda.memory import CudaStartError
    from engine.backend.cuda.start import start_cuda

    try:
        # Graphs and buffers are made for so many requests, before the size of the pool is known.
        return start_cuda(settings.model_copy(update={"max_running": most_running(settings, CONSTANTS, 0)}))
    except CudaStartError as error:
        raise StartError(str(error)) from None


def _torch_backend(settings: EngineSettings) -> tuple[TorchBackend, int]:
    # Imported here: an emulated pod needs no torch, which takes seconds and hundreds of megabytes.
    from engine.backend.torch_backend import TorchBackend
    from engine.backend.torch_kv import blocks_for_budget
    from engine.model.decoder import load_decoder
    from engine.model.exact import NotExact

    model = load_decoder(settings.model, dtype=settings.dtype, device=settings.device)
    size = settings.block_size
    budget = settings.kv_cache_bytes or CPU_KV_BYTES
    try:
        blocks = settings.kv_pool_tokens // size or blocks_for_budget(
            model.config, budget, block_size=size, dtype=model.dtype
        )
    except ValueError as error:
        raise StartError(f"--kv-cache-bytes {budget}: {error}") from None
    try:
        backend = TorchBackend(
            model, block_count=blocks, block_size=size, threads=settings.threads or None, exact=settings.exact
        )
    except NotExact as error:
        if "exact" in settings.model_fields_set:
            raise StartError(f"--exact cannot be kept on this machine: {error}; start with --no-exact") from None
        log.warning("computing is not exact, because this machine's libraries sum in changing orders: %s", error)
        backend = TorchBackend(model, block_count=blocks, block_size=size, threads=settings.threads or None)
    except (MemoryError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise StartError(f"the KV pool of {blocks} blocks of {size} tokens does not fit the device: {reason}") from None
    return backend, blocks


@dataclass(frozen=True, slots=True)
class Ports:
    """The numbers of the open ports. None: the settings ask for no such port."""

    clients: int
    metrics: int | None = None
    admin: int | None = None

    def lines(self, settings: EngineSettings) -> list[str]:
        """Return the lines that the engine prints when it serves."""
        host = _in_url(settings.host)
        lines = [f"listening on http://{host}:{self.clients}"]
        if self.metrics is not None:
            lines.append(f"metrics on http://{host}:{self.metrics}/metrics")
        if self.admin is not None and settings.admin_address is not None:
            lines.append(f"administration on http://{_in_url(settings.admin_address[0])}:{self.admin}")
        return lines


@asynccontextmanager
async def listening(settings: EngineSettings, state: ServerState, metrics: EngineMetrics) -> AsyncIterator[Ports]:
    """Open the HTTP ports. The exit cancels handlers that still run. Raises StartError, UnusableFile."""
    keys: ApiKeys | None = None
    has_metrics, has_admin = settings.metrics_port is not None, settings.admin_port is not None
    async with AsyncExitStack() as stack:
        if settings.api_key_file is not None:
            keys = ApiKeys()
            file = FollowedFile("API keys", settings.api_key_file, parse_keys, keys.use)
            await file.load()
            await stack.enter_async_context(background(file.follow(), "reader of API keys"))
        app = make_app(state, metrics, keys, has_metrics=not (has_metrics or has_admin), has_admin=not has_admin)
        ports = Ports(await stack.enter_async_context(_open(app, settings.host, settings.port)))
        if settings.metrics_port is not None:
            app = make_metrics_app(state, metrics)
            ports = replace(
                ports, metrics=await stack.enter_async_context(_open(app, settings.host, settings.metrics_port))
            )
        if settings.admin_address is not None:
            app = make_admin_app(state, metrics)
            ports = replace(ports, admin=await stack.enter_async_context(_open(app, *settings.admin_address)))
        yield ports


@asynccontextmanager
async def _open(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Serve `app` on a port. Yields the port's number. Raises StartError."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _on_signals(call: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, call)


def _leave(status: int) -> NoReturn:
    """End the process and all its threads, wherever they are."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _in_daemon_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Return the call's future result. The call's thread, unlike an executor's, does not delay the process's end."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # raised again where the future is awaited
            outcome.set_exception(error)

    threading.Thread(target=work, name=_LOADING, daemon=True).start()
    return asyncio.wrap_future(outcome)


async def _unless(event: asyncio.Event, future: asyncio.Future[T]) -> T | None:
    """Return the future's result, or None if the event comes first."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        either: list[asyncio.Future[Any]] = [waiting, future]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return future.result() if future.done() else None
    finally:
        waiting.cancel()
        future.cancel()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host or "0.0.0.0"  # empty: every address of both families
