"""The API process: `python -m lookonce.server.process`, started by `launch`."""

from __future__ import annotations

import msgspec

from lookonce.config import Config


class ApiStart(msgspec.Struct, frozen=True, kw_only=True):
    """What the API process reads from stdin: one line of JSON."""

    config: Config
    listen_fd: int
    """A bound socket the process inherits and listens on."""
    index: int = 0
    """0-based number of this API process among `config.server.api_processes`."""
