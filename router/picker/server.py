"""The picker's port: gRPC, with external processing and health checks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from router.picker.call import Call
from router.picker.health import Health
from router.picker.parts import NoPort, PickerParts
from router.picker.protocol import ProtocolError
from router.picker.wire import picker_pb2 as wire

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
FORCED_STOP_S = 0.5
"""Seconds for calls that still run when the gateway has drained."""
MAX_HEADERS_BYTES = 2**20
"""Bytes of headers that one message may have besides a body."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the picker listens. Without certificate files it speaks plain HTTP/2."""

    host: str
    port: int
    max_calls: int
    """Requests at a time; one more is refused with RESOURCE_EXHAUSTED."""
    tls_cert_file: str | None = None
    tls_key_file: str | None = None


@contextlib.asynccontextmanager
async def serving(parts: PickerParts, lacks: Callable[[], list[str]], listen: Listen) -> AsyncIterator[int]:
    """Serve while the block lasts. Yields the port. Raises NoPort.

    `lacks` returns what is missing before decisions can be made, for the health checks.
    """
    server = grpc.aio.server(
        maximum_concurrent_rpcs=listen.max_calls,
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", parts.limits.max_body_bytes + MAX_HEADERS_BYTES),
            ("grpc.max_metadata_size", 2**16),
        ),
    )
    server.add_generic_rpc_handlers((_external_processor(parts), Health(lacks).handler()))
    address = f"{f'[{listen.host}]' if ':' in listen.host else listen.host or '[::]'}:{listen.port}"
    try:
        if listen.tls_cert_file is not None and listen.tls_key_file is not None:
            port = server.add_secure_port(address, _credentials(listen.tls_cert_file, listen.tls_key_file))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError:
        why = "the port is taken, or this host has no such address"
        raise NoPort(f"cannot listen on {address} for --ext-proc-port: {why}") from None
    await server.start()
    try:
        yield port
    finally:
        await server.stop(FORCED_STOP_S)


def _external_processor(parts: PickerParts) -> grpc.GenericRpcHandler:
    async def process(_: object, context: Any) -> None:
        await converse(parts, context)

    handler = grpc.stream_stream_rpc_method_handler(
        process, wire.ProcessingRequest.FromString, wire.ProcessingResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Process": handler})


async def converse(parts: PickerParts, context: Any) -> None:
    """Handle one stream, which is one request of a client. If the proxy resets the stream, this is cancelled."""
    call = Call(parts)
    try:
        async with asyncio.timeout_at(call.deadline_s) as call.timeout:
            while not call.is_over:
                message = await context.read()
                if message is grpc.aio.EOF:
                    return
                for response in await call.answer(message):
                    await context.write(response)
    except TimeoutError:
        last = call.late()
        if not last:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request took too long")
        async with asyncio.timeout(FORCED_STOP_S):
            for response in last:
                await context.write(response)
    except ProtocolError as error:
        log.warning("endpoint picker: %s", error)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    finally:
        await call.close()


def _credentials(cert_file: str, key_file: str) -> grpc.ServerCredentials:
    """Return credentials that are read again for each new connection, because the files may have been renewed. If a
    file cannot be read, nothing changes."""

    def read() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(Path(key_file).read_bytes(), Path(cert_file).read_bytes())])

    def read_again() -> grpc.ServerCertificateConfiguration | None:
        try:
            return read()
        except OSError:
            return None

    return grpc.dynamic_ssl_server_credentials(read(), read_again)
