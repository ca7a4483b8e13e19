"""The reader process: `python -m router.reading.reader_program`, which the gateway starts.

Its standard input is a socket. The gateway sends the rules, then jobs, each with a body. This process runs one job at a
time. Meanwhile it asks what only the gateway knows: which model a name means, how many tokens a byte makes, and a
tenant's salt.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
import struct
from array import array
from collections.abc import Callable
from typing import Any, cast

from engine.contract.errors import ApiError
from router.reading.inbound import Inbound, Reader, Rules
from router.reading.jobs import Job
from router.reading.model_ratios import ModelEstimate
from router.tenants.tenant import Tenant

NICE = 10
"""The event loop goes first where processors are few: its requests are many and short."""
HEAD = struct.Struct("<QQ")
"""In front of each message: the bytes of its pickle, and of the body after that."""
ASKS, INBOUND, RESULT, FAILED = "asks", "inbound", "result", "failed"
"""A message's first value: a question, the job's result (an Inbound in parts, or another one), or its error."""
WANTS_WORDS = (b"wants words",)
"""The gateway's answer if the conversation's first words choose the model."""
ABANDONED = (b"abandoned",)
"""The gateway's answer if it has no use for the result. Like WANTS_WORDS it equals no other answer."""


class Abandoned(Exception):
    """The gateway wants no result of this job."""


def packed(inbound: Inbound, body: bytes) -> tuple[tuple[Inbound, bytes, bool], bytes]:
    """Return the parts of a request that was made of `body`: the request without its keys and its body, its keys as
    bytes, and whether its body is `body`. And its body, if it is not."""
    keys, is_same, new = array("Q", inbound.keys).tobytes(), inbound.body is body, inbound.body
    inbound.keys, inbound.body = (), b""
    return (inbound, keys, is_same), b"" if is_same else new


def unpacked(inbound: Inbound, keys: bytes, body: bytes) -> Inbound:
    """Return the request again."""
    inbound.keys, inbound.body = cast(Any, tuple(array("Q", keys))), body
    return inbound


class Gateway:
    """The other end of the socket. It answers like the parts of the gateway that a Reader asks."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rwb")
        self.has_secret = False
        """See Isolation."""

    def read(self) -> tuple[Any, bytes]:
        """Return the next message and its body. Raises EOFError once the gateway has left."""
        head = self._file.read(HEAD.size)
        if len(head) < HEAD.size:
            raise EOFError
        size, body = HEAD.unpack(head)
        return pickle.loads(self._file.read(size)), self._file.read(body)

    def send(self, value: object, body: bytes = b"") -> None:
        """Send a message."""
        data = pickle.dumps(value)
        self._file.write(HEAD.pack(len(data), len(body)))
        self._file.write(data)
        self._file.write(body)
        self._file.flush()

    def ask(self, name: str, *values: object) -> Any:
        """Return the gateway's answer. Raises Abandoned."""
        self.send((ASKS, (name, *values)))
        answer, _ = self.read()
        if answer == ABANDONED:
            raise Abandoned
        return answer

    def only_model(self, _: Tenant) -> str | None:
        """See Models. Forms alone need it, and they are not read here."""
        raise AssertionError

    def meant(self, asked: str | None, _: Tenant, words: Callable[[], bytes]) -> str | None:
        """See Models."""
        name = self.ask("meant", asked, None)
        return cast(str | None, self.ask("meant", asked, words()) if name == WANTS_WORDS else name)

    def find(self, name: str | None, _: Tenant) -> tuple[str, str]:
        """See Models."""
        return cast(tuple[str, str], self.ask("find", name))

    def of(self, model: str) -> ModelEstimate:
        """See Estimates."""
        return cast(ModelEstimate, self.ask("estimate", model))

    def salt(self, _: Tenant, own_salt: str) -> str:
        """See Isolation."""
        return cast(str, self.ask("salt", own_salt))


def run(gateway: Gateway) -> None:
    """Run jobs until the gateway leaves."""
    (rules, is_isolating), _ = gateway.read()
    reader = Reader(gateway, gateway, gateway if is_isolating else None, cast(Rules, rules))
    while True:
        (job, gateway.has_secret), body = gateway.read()
        result, new = None, b""
        try:
            result = cast(Job[Any], job).run(reader, body)
            if isinstance(result, Inbound):
                parts, new = packed(result, body)
                gateway.send((INBOUND, parts), new)
            else:
                gateway.send((RESULT, result))
        except Abandoned:
            pass
        except ApiError as error:
            gateway.send((FAILED, error))
        del job, body, result, new


def main() -> None:
    """Run until the gateway leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C the gateway hears too, and it lets requests finish
    gc.freeze()
    os.nice(NICE)
    with socket.socket(fileno=0) as connection, contextlib.suppress(EOFError, OSError):
        run(Gateway(connection))


if __name__ == "__main__":
    main()
