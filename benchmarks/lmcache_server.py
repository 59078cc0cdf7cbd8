"""A real LMCache multi-process server, which can be paused, killed and started again.

It comes with the optional extra `lookonce[lmcache]`, and takes some seconds to start.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lookonce.kv.lmcache_client import SHARED_MEMORY, library

START_SECONDS = 90.0


class LMCacheServer:
    """On a TCP port; keeps nothing on disk. Raises `ConfigError` where LMCache is not installed."""

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
        """The memory its objects lie in."""
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
        """What it leaves behind in shared memory is removed, as an operator would."""
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
        end = time.monotonic() + START_SECONDS
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
