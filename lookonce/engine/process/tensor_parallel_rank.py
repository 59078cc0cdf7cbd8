"""A rank of tensor parallelism other than 0, a process that the engine process starts.

It loads its part of the model, executes the plans that the engine process sends it, and ends with
the engine process. What it samples is what rank 0 tells; it has no scheduler and no client.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

import msgspec

from lookonce.core.block_pool import BlockPool
from lookonce.engine.process.tensor_parallel import joined_socket
from lookonce.engine.process_io import EngineSettings
from lookonce.engine.supervisor.child_process import EXIT_REFUSED
from lookonce.errors import ConfigError, ModelLoadError, ProtocolError
from lookonce.ipc.framing import MessageSocket
from lookonce.ipc.rank_messages import JoinGroup, rank_decoder, step_plan
from lookonce.ipc.worker_process import die_with_parent
from lookonce.types.logs import configure_logging
from lookonce.types.ports import ModelRunner
from lookonce.types.step import StepResult

logger = logging.getLogger(__name__)


def run(link: MessageSocket) -> None:
    """Join, load, and execute plans until the connection ends."""
    from lookonce.engine.process.load_engine import load_rank, make_runner  # torch: seconds

    decoder = rank_decoder()
    frames, _ = link.receive()
    join = decoder.decode(frames)
    if not isinstance(join, JoinGroup):
        raise ProtocolError("the first message to a rank tells what to join")
    settings = msgspec.json.decode(join.settings, type=EngineSettings)
    configure_logging(f"engine rank {join.rank}", settings.logs)
    fitted = load_rank(settings, join.rank, join.rendezvous)
    pool = BlockPool(fitted.num_blocks, fitted.block_size)
    execute_plans(link, make_runner(fitted.loaded, settings, fitted.backend, pool))


def execute_plans(link: MessageSocket, runner: ModelRunner) -> None:
    """Each step is waited for once the next one has begun, whose input tokens may be its own."""
    decoder = rank_decoder()
    under_way: Callable[[], StepResult] | None = None
    while True:
        frames, _ = link.receive()
        plan = step_plan(decoder.decode(frames))
        if under_way is not None and plan.extended:  # a sequence may lose tokens: all must be there
            under_way()
            under_way = None
        before, under_way = under_way, runner.begin(plan)
        if before is not None:
            before()


def _end_with(descriptor: int) -> None:
    """End this process when the other end of its connection has closed, whatever it does then."""
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    os._exit(0)


def main() -> None:
    die_with_parent()  # a rank that stands still, or is still importing torch, ends with rank 0
    for number in (signal.SIGINT, signal.SIGHUP):  # rank 0's parent gets them too, and decides
        signal.signal(number, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    configure_logging("engine rank")
    threading.Thread(target=_end_with, args=(descriptor,), name="watch", daemon=True).start()
    try:
        run(joined_socket(descriptor))
    except (ConfigError, ModelLoadError) as error:
        logger.error("%s", error.message)
        os._exit(EXIT_REFUSED)
    except Exception:
        logger.exception("this rank broke")
        os._exit(1)


if __name__ == "__main__":
    main()
