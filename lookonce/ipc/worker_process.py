"""Starts a process that works on what strangers send, joined to this one by a socket."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lookonce.errors import UnavailableError
from lookonce.ipc.fork_server import ForkedProcess, ForkRequest, start_forked

TELEMETRY = re.compile(r"^OTEL_|_PROXY$", re.I)
"""Names of what OpenTelemetry reads: keys of a collector and passwords of proxies are among it."""
SECRETS = re.compile(
    r"(KEYS?|TOKENS?|SECRETS?|PASSWORDS?|CREDENTIALS?)$|^AWS_|^LOOKONCE_|" + TELEMETRY.pattern, re.I
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
FORK_SECONDS = 10.0
"""How long a worker's start waits for a fork server that is being restarted."""
LINK_FD = 3
PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment such a process may have."""
    return {name: value for name, value in environment.items() if not SECRETS.search(name)}


def telemetry_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment OpenTelemetry reads; no worker has it."""
    return {name: value for name, value in environment.items() if TELEMETRY.search(name)}


def start_worker(
    command: Sequence[str], **options: Any
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """This process's end of the socket, and the new process.

    The descriptor of the worker's end is appended to `command`; `options` are `Popen`'s. Raises
    `OSError`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return ours, subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**without_secrets(os.environ), **ENVIRONMENT},
                **options,
            )
        except BaseException:
            ours.close()
            raise


def how_it_ended(returncode: int | None) -> str:
    """What happened to a worker, as the predicate of a sentence."""
    if returncode is None:
        return "did not answer as it should"
    if returncode == -signal.SIGKILL:
        return "was killed"
    if returncode < 0:
        return f"crashed (signal {-returncode})"
    return f"ended with status {returncode}"


def fork_worker(module: str, fork_server: Path) -> tuple[socket.socket, ForkedProcess] | None:
    """The same, by the fork server whose socket has this path: the new process is `module`'s
    `main()`, with its descriptor as the only argument, and ends with this process. None where the
    fork server does not answer. Raises `OSError`."""
    ours, theirs = socket.socketpair()
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    request = ForkRequest(module, (str(LINK_FD),), (0, 1, LINK_FD), os.getpgrp(), True)
    try:
        with suppress(UnavailableError):
            fds = (nowhere, nowhere, theirs.fileno())
            return ours, start_forked(fork_server, request, fds, FORK_SECONDS)
        ours.close()
        return None
    finally:
        theirs.close()
        os.close(nowhere)
