"""How an engine lives in a process of its own, whatever engine it is.

stdin   one line of JSON (`EngineSettings`), then nothing; its end means the parent is gone
stdout  JSON lines (`engine.progress`)
stderr  the log, and one line when the engine cannot start (exit status 2)

main thread    load the model, then the step loop
input thread   the channel and the store (`InputThread`)
watch thread   waits for the end of stdin
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import msgspec

from lookonce.engine.process.engine_core import EngineCore, RequestPreprocessor
from lookonce.engine.process.input_thread import InputThread
from lookonce.engine.process.receiver_cache import ReceiverCache
from lookonce.engine.process.step_loop import StepLoop, Stop
from lookonce.engine.process_io import Alive, EngineSettings, Failed, Loading, ProgressPipe, Serving
from lookonce.engine.supervisor.child_process import EXIT_REFUSED
from lookonce.errors import ConfigError, LookOnceError, ModelLoadError, error_to_wire
from lookonce.ipc.channel import EngineChannel
from lookonce.ipc.zmq_engine_link import ZmqEngineLink

logger = logging.getLogger(__name__)

EXIT_BROKEN = 1


Build = Callable[
    [EngineSettings, Callable[[int, int], None]], tuple[EngineCore, RequestPreprocessor]
]
"""Makes a warm engine from its settings; is told how to report weights loaded, and in all."""


def host_engine(build: Build) -> NoReturn:
    """The whole life of the process."""
    started = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which decides
    progress = ProgressPipe(_private_stdout())
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s engine: %(message)s",
        stream=sys.stderr,
    )
    try:
        settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSettings)
        logger.info("loading %s", settings.model.folder)
        threading.Thread(target=_watch_parent, name="watch", daemon=True).start()
        serve(settings, build, progress, started)
    except (ConfigError, ModelLoadError, msgspec.MsgspecError) as error:
        _refuse(progress, error)
    except Exception:
        logger.exception("the engine broke")
        _leave(EXIT_BROKEN)
    _leave(0)


def serve(settings: EngineSettings, build: Build, progress: ProgressPipe, started: float) -> None:
    """Answer on the channel at once, load the model meanwhile, then step until SIGTERM."""
    reception = open_reception(settings)
    receiving = threading.Thread(
        target=_receive, args=(reception, progress), name="input", daemon=True
    )
    receiving.start()
    progress.tell(Loading(0, 0))
    core, judge = build(settings, progress.loading)
    _stop_on_sigterm(reception)
    reception.open_doors(judge)
    progress.tell(Serving(time.monotonic() - started))
    StepLoop(core, reception.exchange).run()
    reception.stop()
    receiving.join(timeout=1.0)


def open_reception(settings: EngineSettings) -> InputThread:
    """Bind the address; a fresh epoch tells this engine from every earlier one."""
    channel = EngineChannel(ZmqEngineLink(settings.address))
    return InputThread(
        channel,
        ReceiverCache(epoch=secrets.randbits(62) + 1),
        num_senders=settings.num_senders,
        max_queue=settings.scheduler.max_queue,
    )


def _receive(reception: InputThread, progress: ProgressPipe) -> None:
    """The input thread. Without it nobody hears the engine: it takes the process along."""
    try:
        reception.run(on_beat=lambda stalled: progress.tell(Alive(stalled)))
    except BaseException:
        logger.exception("the input thread broke")
        _leave(EXIT_BROKEN)


def _stop_on_sigterm(reception: InputThread) -> None:
    """The step in progress is finished first; before this is called SIGTERM kills at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        reception.exchange.command(Stop())

    signal.signal(signal.SIGTERM, stop)


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    logger.error("the parent process is gone: the engine ends")
    _leave(0)


def _private_stdout() -> int:
    """Keeps stdout for progress: whatever else prints goes to stderr."""
    private = os.dup(1)
    os.dup2(2, 1)
    return private


def _refuse(progress: ProgressPipe, error: Exception) -> NoReturn:
    known = error if isinstance(error, LookOnceError) else ConfigError(f"engine settings: {error}")
    progress.tell(Failed(error_to_wire(known)))
    _leave(EXIT_REFUSED)


def _leave(status: int) -> NoReturn:
    """Ends the process though other threads still run."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)
