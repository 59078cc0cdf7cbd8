"""Programs of other makers that serve HTTP, run for a test."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.live_server import until

START_SECONDS = 180.0


@contextmanager
def running_program(
    line: Sequence[str],
    folder: Path,
    *,
    ready: str,
    env: Mapping[str, str],
    port_variable: str | None = None,
) -> Iterator[str]:
    """Runs a command in `folder` until the block ends; gives its URL.

    It is told its port by `--port`, or by the environment's `port_variable`, and waited for until
    the path `ready` answers 200.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    if port_variable is None:
        line = [*line, "--port", str(port)]
    else:
        env = {**env, port_variable: str(port)}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            line,
            stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env}, cwd=folder,
        )  # fmt: skip

    def is_ready() -> bool:
        try:
            return httpx.get(url + ready, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(lambda: process.poll() is not None or is_ready(), START_SECONDS, log.read_text)
        assert process.poll() is None, log.read_text()
        yield url
    finally:
        process.terminate()
        process.wait(60)
