"""Tells systemd, or whatever else set NOTIFY_SOCKET, how far the server is (sd_notify(3))."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"
LOADING_SECONDS = 300
"""A service that loads weights may take so long until the next sign of it."""


class ServiceManager:
    """Sends states as datagrams; does nothing where no manager listens."""

    def __init__(self, address: str | None) -> None:
        """`address`: a socket's path; one that begins with @ has an abstract name."""
        self._socket: socket.socket | None = None
        self._address = ""
        if address is not None and address[:1] in ("/", "@"):
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """The variable is removed: no other process of the server shall speak for it."""
        return cls(environment.pop(VARIABLE, None))

    @property
    def listens(self) -> bool:
        return self._socket is not None

    def loading(self, done: int, total: int) -> None:
        """Weights loaded, of how many; puts off the manager's time limit of starts."""
        status = f"loading weights: {done} of {total}" if total else "loading"
        self._send(f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={LOADING_SECONDS * 1_000_000}")

    def ready(self, url: str) -> None:
        self._send("READY=1", f"STATUS=serving on {url}")

    def reloading(self) -> None:
        """`ready` follows. The clock's time lets systemd tell this reload from earlier ones."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=stopping: running requests may finish")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *states: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(states).encode(), self._address)
        except OSError as error:
            logger.warning("the service manager was not told %s: %s", states[0], error)
