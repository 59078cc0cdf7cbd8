"""A fork server for tests, and processes of one that say what they are."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any


def preloaded(settings: Mapping[str, Any]) -> Callable[[], None]:
    return partial(main, settings["answer"])


def main(answer: str = "none") -> None:
    how, *_ = sys.argv[1:]
    if how == "die":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "refuse":
        raise SystemExit(2)
    with os.fdopen(int(how), "w") as file:
        told = {
            "answer": answer,
            "arguments": sys.argv,
            "command": open("/proc/self/cmdline").read().rstrip("\0").split("\0"),  # noqa: SIM115
            "group": os.getpgrp(),
            "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in _open()),
            "threads": threading.active_count(),
            "has_torch": sys.modules.get("torch") is not None,
            "environment": dict(os.environ),
        }
        file.write(json.dumps(told) + "\n")
        file.flush()
        time.sleep(60)


def _open() -> list[int]:
    """All but standard error."""
    return [fd for fd in range(100) if fd != 2 and os.path.exists(f"/proc/self/fd/{fd}")]


@contextmanager
def fork_server_of(module: str) -> Iterator[Path]:
    """The socket of a fork server that has imported this module: a process of it starts in
    milliseconds."""
    with (
        tempfile.TemporaryDirectory(prefix="lo-", dir="/tmp") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        path = Path(folder, "fork.sock")
        listener.bind(str(path))
        listener.listen(8)
        fd = listener.fileno()
        command = [sys.executable, "-m", "lookonce.ipc.fork_server", str(fd)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[fd]
        ) as server:
            assert server.stdin is not None
            server.stdin.write(json.dumps({"modules": [module], "settings": {}}).encode() + b"\n")
            server.stdin.flush()
            yield path
            server.stdin.close()  # it ends with its standard input
