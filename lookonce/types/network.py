"""Whether an address takes a connection, within a time that also bounds looking up its name."""

from __future__ import annotations

import socket
import threading


def connection_error(host: str, port: int, seconds: float) -> str | None:
    """Why no connection can be made; None where one can. Nothing is sent."""
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), seconds).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(error.strerror or str(error) or type(error).__name__)

    # A resolver may take half a minute, and cannot be interrupted.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(1.2 * seconds)
    return outcome[0] if outcome else f"no answer in {seconds:g} seconds"
