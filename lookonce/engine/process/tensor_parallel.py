"""Tensor parallelism in the engine process, which is rank 0: the other ranks, and their plans.

    step loop ──plan──▶ ParallelRunner ──▶ own runner ─┐ collectives (gloo, NCCL)
                              └──plan──▶ rank 1, 2 ... ─┘

The ranks hold nothing that the engine process does not: when one of them ends, the engine process
ends too, and its supervisor starts it again with new ranks.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from lookonce.engine.process_io import EngineSettings
from lookonce.engine.supervisor.child_process import EXIT_REFUSED
from lookonce.errors import DeviceLostError
from lookonce.ipc.framing import MessageSocket
from lookonce.ipc.rank_messages import JoinGroup, RankEncoder, rank_plan
from lookonce.ipc.worker_process import how_it_ended, start_worker
from lookonce.types.ports import ModelRunner
from lookonce.types.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

RANK_COMMAND = (sys.executable, "-m", "lookonce.engine.process.tensor_parallel_rank")
REFUSAL_SECONDS = 30.0
"""How long this process may take to find what another rank has refused to start for."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


class Ranks:
    """The processes of the ranks 1 to `size - 1`."""

    def __init__(self, settings: EngineSettings, on_end: Callable[[str], NoReturn]) -> None:
        """Start them: they load their parts meanwhile. `on_end` is called, in a thread, with what
        became of one that has ended by itself."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # strangers cannot join
        folder = Path(settings.address).parent
        self.rendezvous = folder / f"ranks-{secrets.token_hex(8)}"
        self._encoder = RankEncoder()
        self._links: list[MessageSocket] = []
        self._on_end = on_end
        encoded = msgspec.json.encode(settings)
        for rank in range(1, settings.model.tensor_parallel_size):
            link, process = start_worker(RANK_COMMAND)
            self._links.append(MessageSocket(link))
            self._send(rank - 1, JoinGroup(encoded, rank, str(self.rendezvous)))
            threading.Thread(
                target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True
            ).start()

    def send(self, plan: StepPlan) -> None:
        """Raises `ConnectionError` when a rank has ended."""
        message = rank_plan(plan)
        for index in range(len(self._links)):
            self._send(index, message)

    def _send(self, index: int, message: msgspec.Struct) -> None:
        self._links[index].send(self._encoder.encode(message))

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if status == EXIT_REFUSED:  # so will this process, and says why
            threading.Event().wait(REFUSAL_SECONDS)
        self._on_end(f"rank {rank} of tensor parallelism {how_it_ended(status)}")


class ParallelRunner:
    """Implements `types.ports.ModelRunner` on all ranks.

    A step that raises on one rank leaves the others waiting, so it ends the engine.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    def execute(self, plan: StepPlan) -> StepResult:
        return self.begin(plan)()

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Raises `DeviceLostError` when a rank has ended, failed, or differs from this one."""
        try:
            self._ranks.send(plan)
            finish = self._runner.begin(plan)
        except DeviceLostError:
            raise  # it says what
        except Exception as error:
            raise DeviceLostError("a step failed on one of several ranks") from error

        def finished() -> StepResult:
            try:
                return finish()
            except Exception as error:
                raise DeviceLostError("a step failed on one of several ranks") from error

        return finished


def joined_socket(descriptor: int) -> MessageSocket:
    """A rank's end of the connection to rank 0; this process ends when rank 0 has."""
    return MessageSocket(socket.socket(fileno=descriptor))
