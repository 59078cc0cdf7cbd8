"""Keeps a fork server running, from which other processes are started (`ipc/fork_server.py`)."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import msgspec

from lookonce.engine.supervisor.child_process import ChildProcess, SupervisedProcess
from lookonce.errors import EngineDeadError
from lookonce.ipc.fork_server import Preload, fork_server_command
from lookonce.ipc.worker_process import ENVIRONMENT, without_secrets

logger = logging.getLogger(__name__)

BACKLOG = 128
ARENAS = {"MALLOC_ARENA_MAX": "1"}
"""glibc gives threads heaps of their own, which are never empty again: 10 MB of an API process."""
STOP_SECONDS = 2.0


class ForkSupervisor:
    """Starts a fork server, and starts it again when it dies.

    Its socket `path` stays: requests wait there while it starts. Once it is given up, they are
    refused at once.
    """

    def __init__(self, folder: Path, preload: Preload) -> None:
        """The socket is in `folder`, which is private to this user. Raises `OSError`."""
        self.path = folder / "fork"
        self._preload = preload
        self._process = SupervisedProcess("the fork server", self._start, self._follow)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen(BACKLOG)

    async def run(self) -> None:
        """Keep it running until `stop`."""
        try:
            await self._process.run()
        except EngineDeadError as error:
            logger.error("%s: from now on processes start without it, more slowly", error)
        finally:
            self._listener.close()

    async def stop(self) -> None:
        await self._process.stop(STOP_SECONDS)

    def kill(self) -> None:
        self._process.kill()

    async def _start(self) -> ChildProcess:
        fd = self._listener.fileno()
        return await ChildProcess.start(
            self._process.name,
            fork_server_command(fd),
            msgspec.json.encode(self._preload),
            pass_fds=[fd],
            read_output=True,
            environment={**without_secrets(os.environ), **ENVIRONMENT, **ARENAS},
        )

    async def _follow(self, child: ChildProcess) -> None:
        while await child.read_line():
            self._process.serving()
