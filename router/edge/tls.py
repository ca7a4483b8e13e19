"""TLS towards engines, and towards clients with a certificate that may be renewed while it is in use."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

from engine.common.files import UnusableFile

log = logging.getLogger(__name__)

REREAD_S = 5.0


class TlsFileError(UnusableFile):
    """A file with a certificate or key cannot be used. The message names the file and has no part of a key."""


class _NamedContext(ssl.SSLContext):
    """Expects the certificate of one name from every server, whatever its address."""

    server_name: str

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """See ssl.SSLContext. Event loops call it for each connection."""
        return super().wrap_bio(*args, **{**kwargs, "server_hostname": self.server_name})


def engine_context(ca_file: str | None, server_name: str | None) -> ssl.SSLContext:
    """Return a context for connections to engines. Raises TlsFileError.

    `ca_file`: authorities that signed the engines' certificates; None: the system's. `server_name`: the name in the
    certificates; None: the engine's address.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if server_name is not None:
        context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
        context.server_name = server_name
    if ca_file is None:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise TlsFileError(f"--engine-tls-ca-file {ca_file} cannot be used: {_why(error)}") from None
    return context


def client_context() -> ssl.SSLContext:
    """Return a context for clients' connections."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


class Certificate:
    """The certificate and key that `context` presents. The pair can be replaced while it is in use."""

    def __init__(self, context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
        """Load the pair into `context`. Raises TlsFileError."""
        self._files = (cert_file, key_file)
        self.context = context
        self._contents = self._read()
        _load(self.context, *self._files)

    def _read(self) -> tuple[bytes, ...]:
        try:
            return tuple(Path(file).read_bytes() for file in self._files)
        except OSError as error:
            raise TlsFileError(f"{error.filename} cannot be read: {_why(error)}") from None

    def renew(self) -> bool:
        """Read the files again. Return whether there is a new pair, which new connections use. Raises TlsFileError."""
        contents = self._read()
        if contents == self._contents:
            return False
        # Load the pair into another context first: a mismatched pair would break the one in use.
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._files)
        _load(self.context, *self._files)
        self._contents = contents
        return True

    async def follow(self) -> None:
        """Renew the pair periodically, until cancelled. While the files cannot be used, the last pair stays."""
        told = ""
        while True:
            await asyncio.sleep(REREAD_S)
            try:
                if await asyncio.to_thread(self.renew):
                    log.info("tls: a new certificate is in use")
                told = ""
            except TlsFileError as error:
                if str(error) != told:
                    log.error("tls: %s; the last certificate stays in use", error)
                told = str(error)


def _load(context: ssl.SSLContext, cert_file: str, key_file: str | None) -> None:
    try:
        context.load_cert_chain(cert_file, key_file, password=lambda: b"")  # never prompt at a terminal
    except (OSError, ssl.SSLError, ValueError) as error:
        raise TlsFileError(f"{cert_file} and {key_file} cannot be used: {_why(error)}") from None


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
