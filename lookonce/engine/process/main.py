"""The life of the engine process, from its settings on stdin to its exit status.

stdin   one line of JSON (`EngineSettings`), then nothing; its end means the parent is gone: the
        engine ends once the API processes have, which drain
stdout  JSON lines (`process_io.ProgressEvent`)
stderr  the log, and one line when the engine cannot start (exit status 2)

main thread    loads the model, then runs the step loop
input thread   owns the channel and the store (`InputThread`)
watch thread   waits for the end of stdin
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from lookonce.cache.slabs import slab_capacity, why_no_slabs
from lookonce.engine.process.build import EngineThreads
from lookonce.engine.process.cache_events import EventPublisher
from lookonce.engine.process.engine_core import EngineCore, RequestPreprocessor
from lookonce.engine.process_io import (
    EngineAlive,
    EngineLoading,
    EngineSettings,
    ProgressPipe,
    Serving,
    StartFailed,
)
from lookonce.engine.supervisor.child_process import EXIT_REFUSED
from lookonce.engine.supervisor.socket_folder import joined_socket_folder, remove_if_abandoned
from lookonce.errors import ConfigError, LookOnceError, ModelLoadError, error_to_wire
from lookonce.ipc.socket_engine_link import SocketEngineLink
from lookonce.types.logs import configure_logging
from lookonce.types.scheduling import run_when_woken
from lookonce.types.stack_samples import listen_for_samples

logger = logging.getLogger(__name__)

EXIT_BROKEN = 1
"""The exit status after a bug."""
ORPHAN_SECONDS = 40.0
"""How long the engine serves API processes whose parent is gone: longer than they drain."""


Load = Callable[
    [EngineSettings, Callable[[int, int], None]], tuple[EngineCore, RequestPreprocessor]
]
"""Makes a warm engine from its settings; calls its second argument with (weights loaded, weights
in all)."""


def run_engine(load: Load) -> NoReturn:
    """Read the settings, load the engine, serve until SIGTERM, and exit."""
    started = time.monotonic()
    run_when_woken()
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent gets them too, and decides
        signal.signal(number, signal.SIG_IGN)
    progress = ProgressPipe(_private_stdout())
    configure_logging("engine")
    try:
        settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSettings)
        configure_logging("engine", settings.logs)
        listen_for_samples(Path(settings.address).parent, "engine")
        logger.info("loading %s", settings.model.folder)
        watch = threading.Thread(
            target=_watch_parent, args=(settings.address,), name="watch", daemon=True
        )
        watch.start()
        serve(settings, load, progress, started)
    except (ConfigError, ModelLoadError, msgspec.MsgspecError) as error:
        _refuse(progress, error)
    except Exception:
        logger.exception("the engine broke")
        _exit(EXIT_BROKEN)
    _exit(0)


def serve(settings: EngineSettings, load: Load, progress: ProgressPipe, started: float) -> None:
    """Answer on the channel at once, load the model meanwhile, then step until SIGTERM."""
    publisher = None if settings.events is None else EventPublisher(settings.events)
    link = SocketEngineLink(settings.address)
    threads = EngineThreads(
        link,
        num_senders=settings.num_senders,
        max_queue=settings.scheduler.max_queue,
        max_sessions=settings.scheduler.max_sessions,
        max_tenant_sessions=settings.scheduler.max_tenant_sessions,
        slab_bytes=usable_slab_bytes(settings.media.shared_cache_bytes),
    )
    if publisher is not None:
        threads.receiver_cache.store.on_change = publisher.item_changed
    threads.start_input(
        on_beat=lambda stalled: progress.tell(EngineAlive(stalled)),
        on_broken=lambda: _exit(EXIT_BROKEN),
    )
    progress.tell(EngineLoading(0, 0))
    core, preprocessor = load(settings, progress.loading)
    if publisher is not None:
        core.publish(publisher)
    # The step in progress is finished first. Until here SIGTERM kills at once.
    signal.signal(signal.SIGTERM, lambda number, frame: threads.stop())
    threads.open(preprocessor)
    progress.tell(Serving(time.monotonic() - started))
    threads.run_steps(core)
    if publisher is not None:
        publisher.close()


def usable_slab_bytes(cache_bytes: int) -> int:
    """What may be leased for a cache of so many bytes; 0 where this process gets no shared
    memory, and items travel in messages."""
    problem = why_no_slabs() if cache_bytes else None
    if problem is not None:
        logger.warning(
            "no shared memory for media: %s; the cache works as with --mm-processor-cache-type lru",
            problem,
        )
        return 0
    return slab_capacity(cache_bytes)


def _watch_parent(address: str) -> None:
    """End this process after its parent's end.

    API processes have until `ORPHAN_SECONDS` to finish what runs; they use the socket folder
    meanwhile. This process removes it where it is the last.
    """
    with joined_socket_folder(address) as folder:
        while os.read(0, 4096):
            pass
    logger.error("the parent process is gone: the engine ends with the API processes")
    deadline = time.monotonic() + ORPHAN_SECONDS
    while not remove_if_abandoned(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    _exit(0)


def _private_stdout() -> int:
    """A duplicate of stdout for progress events; whatever libraries print goes to stderr."""
    private = os.dup(1)
    os.dup2(2, 1)
    return private


def _refuse(progress: ProgressPipe, error: Exception) -> NoReturn:
    known = error if isinstance(error, LookOnceError) else ConfigError(f"engine settings: {error}")
    progress.tell(StartFailed(error_to_wire(known)))
    _exit(EXIT_REFUSED)


def _exit(status: int) -> NoReturn:
    """End the process, whatever other threads do."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)
