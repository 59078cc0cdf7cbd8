"""A bounded pool of worker processes for decoding and processing, off the event loop.

    run ──▶ queue (bounded: 429) ──▶ one thread per worker ──▶ worker process
                                     blocks on its socket       decode + process

Threads only carry messages; the work itself holds no lock of this process. A worker that dies or
hangs fails its job alone and is replaced at the next one. Where none can be started (descriptors,
processes or memory are short) the job ends with 503, and the next one tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from lookonce.errors import (
    DrainingError,
    LookOnceError,
    ModelLoadError,
    QueueFullError,
    UnavailableError,
    UnprocessableMediaError,
    error_from_wire,
)
from lookonce.render.media.processing import MediaJob, Processed, ProcessingSettings
from lookonce.render.media.worker import (
    REPLIES,
    ConfigureWorker,
    JobDone,
    JobFailed,
    JobRequest,
    LinkClosedError,
    new_memory,
    processed_from,
    receive,
    send,
)
from lookonce.types.media import Modality

MAX_QUEUE = 256
"""Media items waiting for a worker beyond which more are refused with 429."""
START_TIMEOUT = 120.0
JOB_TIMEOUT = 60.0
"""Seconds after which a worker counts as hung; the limits on media keep honest jobs far below."""
STOP_TIMEOUT = 2.0
WORKER_COMMAND = (sys.executable, "-m", "lookonce.render.media.worker")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}

T = TypeVar("T")

logger = logging.getLogger(__name__)


class MediaPool:
    """`await run(job)`, from one event loop. Start it before use, close it after."""

    def __init__(
        self,
        settings: ProcessingSettings,
        *,
        num_workers: int | None = None,
        max_queue: int = MAX_QUEUE,
        job_timeout: float = JOB_TIMEOUT,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        """`max_queue` bounds the jobs waiting for a worker, beside those being worked on;
        `job_timeout` is in seconds; `command` starts a worker (its socket's descriptor is added).
        """
        self.num_workers = num_workers or min(4, os.cpu_count() or 1)
        self.completed: Counter[str] = Counter()
        """Jobs that gave an item, by modality."""
        self._max_pending = max_queue + self.num_workers
        self._pending = 0
        self._crew = _Crew(lambda: _Worker(command, settings, job_timeout))
        # A new thread starts its worker before it takes a job, so no job waits for a start while
        # another worker is free.
        self._threads = ThreadPoolExecutor(
            self.num_workers, thread_name_prefix="media", initializer=self._crew.join
        )

    @property
    def num_pending(self) -> int:
        """Jobs waiting or being worked on."""
        return self._pending

    async def start(self) -> None:
        """Start the first worker and warm it; others start when work waits. `ModelLoadError`."""
        await self._outcome(self._threads.submit(self._crew.prepare))

    def run(self, job: MediaJob) -> Coroutine[Any, Any, Processed]:
        """Take a place in the queue, now; what is awaited decodes and processes.

        Raises `QueueFullError` or `UnavailableError` at once; when awaited `UnavailableError`,
        `UnprocessableMediaError` or `TooLargeError`. None names a request part (see
        `media.for_part`).

        A cancelled call gives its place in the queue back; work that has begun is not interrupted.
        """
        if self._crew.is_closed():
            raise _draining()
        if self._pending >= self._max_pending:
            raise QueueFullError("too many media items are waiting to be processed")
        try:
            future = self._threads.submit(self._crew.work, job)
        except RuntimeError:  # no more threads; those there are may still do it, for nobody
            raise _short_of_workers() from None
        self._pending += 1
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda done: _call_soon(loop, self._finish, job.modality, done))
        return self._outcome(future)

    async def _outcome(self, future: Future[T]) -> T:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._crew.is_closed() and not (task and task.cancelling()):
                raise _draining() from None  # the pool gave up, not the caller
            raise

    async def aclose(self) -> None:
        """End the workers; jobs still waiting are cancelled, those begun fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._crew.close()
        await asyncio.to_thread(self._threads.shutdown)
        self._crew.reap()

    def _finish(self, modality: Modality, future: Future[Processed]) -> None:
        self._pending -= 1
        if not future.cancelled() and future.exception() is None:
            self.completed[modality] += 1


class _Crew:
    """The workers, one per thread of the pool; each is started by the thread that needs it."""

    def __init__(self, hire: Callable[[], _Worker]) -> None:
        self._hire = hire
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._closed = False

    def is_closed(self) -> bool:
        return self._closed

    def join(self) -> None:
        """A new thread's first act. A failure is told to those who need the worker.

        Whatever it is: an executor whose initializer raises takes no job ever again.
        """
        with contextlib.suppress(Exception):
            self._worker()

    def prepare(self) -> None:
        """Make sure that this thread has a living worker. Raises `ModelLoadError`."""
        self._worker()

    def work(self, job: MediaJob) -> Processed:
        worker = self._ready()
        try:
            return worker.call(job)
        except LookOnceError:
            raise
        except (LinkClosedError, TimeoutError) as error:
            self._dismiss(worker)
            if self.is_closed():
                raise _draining() from None
            raise _casualty(job, hung=isinstance(error, TimeoutError)) from None
        except OSError as error:
            self._dismiss(worker)
            logger.warning("a media item cannot be handed over: %s", error)
            raise _short_of_workers() from None
        except BaseException:
            self._dismiss(worker)
            raise

    def close(self) -> None:
        """Kill all workers; their threads see it and give up."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()

    def reap(self) -> None:
        """Once no thread uses them any more."""
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def _ready(self) -> _Worker:
        """This thread's worker, for a job. Raises `UnavailableError`; the next job tries again."""
        try:
            return self._worker()
        except UnavailableError:
            raise
        except Exception as error:
            if self.is_closed():
                raise _draining() from None
            logger.warning("no media worker can be started: %s", error)
            raise _short_of_workers() from error

    def _worker(self) -> _Worker:
        """This thread's worker, started if need be."""
        mine: _Worker | None = getattr(self._mine, "worker", None)
        if mine is not None and mine.alive:
            return mine
        if mine is not None:
            self._dismiss(mine)
        worker = self._hire()
        try:
            self._enrol(worker)
            worker.configure()
        except BaseException:
            self._dismiss(worker)
            raise
        self._mine.worker = worker
        return worker

    def _enrol(self, worker: _Worker) -> None:
        """From here on `close` kills it, also while it starts."""
        with self._lock:
            if self._closed:
                raise _draining()
            self._workers.add(worker)

    def _dismiss(self, worker: _Worker) -> None:
        self._mine.worker = None
        with self._lock:
            self._workers.discard(worker)
        worker.stop()


class _Worker:
    """One worker process, used by one thread."""

    def __init__(
        self, command: Sequence[str], settings: ProcessingSettings, job_timeout: float
    ) -> None:
        """Raises `ModelLoadError` when no process can be started. `configure` it before use."""
        self._settings = settings
        self._job_timeout = job_timeout
        try:
            self._link, self._process = _start(command)
        except OSError:
            raise ModelLoadError("a media worker process cannot be started") from None

    def configure(self) -> None:
        """Blocks for a second or two. Raises `ModelLoadError` when it cannot serve the model."""
        self._link.settimeout(START_TIMEOUT)
        try:
            send(self._link, ConfigureWorker(self._settings))
            reply, _ = receive(self._link, REPLIES)
        except (LinkClosedError, OSError):
            raise ModelLoadError("a media worker process did not start") from None
        if isinstance(reply, JobFailed):
            raise error_from_wire(*reply.error)
        self._link.settimeout(self._job_timeout)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, job: MediaJob) -> Processed:
        """Raises the job's error; `LinkClosedError` or `TimeoutError` when the worker is lost."""
        data = memoryview(job.data)
        memory = new_memory([(0, data)])
        try:
            send(self._link, JobRequest(job.modality, job.options, data.nbytes), memory)
        finally:
            os.close(memory)
        reply, fd = receive(self._link, REPLIES)
        if isinstance(reply, JobDone):
            return processed_from(reply, fd)
        if isinstance(reply, JobFailed):
            raise error_from_wire(*reply.error)
        raise LinkClosedError

    def kill(self) -> None:
        """End the process, from any thread; the one that waits for it sees the link close."""
        self._process.kill()

    def stop(self) -> None:
        """End the process and free everything. A process that the kernel does not let go yet is
        not waited for: Python collects it when it starts another.
        """
        self._process.kill()
        self._link.close()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            logger.warning("media worker %d was killed but has not ended", self._process.pid)


def _start(command: Sequence[str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A process and our end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return ours, subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ENVIRONMENT},
            )
        except BaseException:
            ours.close()
            raise


def _casualty(job: MediaJob, *, hung: bool) -> UnprocessableMediaError:
    what = "takes too long to decode" if hung else "cannot be decoded: its decoder crashed"
    return UnprocessableMediaError(f"the {job.modality} {what}")


def _short_of_workers() -> UnavailableError:
    return UnavailableError("media cannot be processed now: the server is short of resources")


def _draining() -> DrainingError:
    return DrainingError("the server is shutting down")


def _call_soon(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object
) -> None:
    # The loop may have closed before the job ended; then nobody counts any more.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
