"""A bounded pool of worker processes for decoding and processing, off the event loop.

    run ──▶ queue (bounded: 429) ──▶ one thread per worker ──▶ worker process
                                     blocks on its socket       decode + process

The threads only send and receive messages; decoding does not hold this process's GIL. When a worker
dies or hangs, only its job fails, and the next job starts a new worker. When no worker can be
started (no descriptors, processes or memory left) the job fails with 503; the next job tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
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
from lookonce.ipc.framing import MessageSocket
from lookonce.render.media.processing import MediaJob, Processed, ProcessingSettings
from lookonce.render.media.worker import (
    ConfigureWorker,
    JobDone,
    JobFailed,
    JobRequest,
    LinkClosedError,
    MessageLostError,
    receive,
    reply_decoder,
    send,
)
from lookonce.types.media import Array, Modality

MAX_WORKERS = 4
"""Of all API processes of a server together, but at least one in each."""
MAX_QUEUE = 256
"""Media items that may wait for a worker; more are refused with 429."""
START_TIMEOUT = 120.0
JOB_TIMEOUT = 60.0
"""Seconds after which a worker counts as hung. The limits on media keep normal jobs far below."""
STOP_TIMEOUT = 2.0
STARTS_PER_JOB = 3
"""Workers that are tried for a job when they are killed before they have read it."""
WORKER_COMMAND = (sys.executable, "-m", "lookonce.render.media.worker")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}

T = TypeVar("T")

logger = logging.getLogger(__name__)


def share_of_workers(num_processes: int = 1) -> int:
    """Workers of each of so many API processes: one for each core that they may use, `MAX_WORKERS`
    at most, for all of them together."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MAX_WORKERS, cores or 1) // num_processes)


class MediaPool:
    """`await run(job)` from one event loop. Call `start` or `start_beside` before, `aclose`
    after."""

    def __init__(
        self,
        settings: ProcessingSettings,
        *,
        num_workers: int | None = None,
        max_queue: int = MAX_QUEUE,
        job_timeout: float = JOB_TIMEOUT,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        """`max_queue` bounds the jobs that wait for a worker, not counting those being processed;
        `job_timeout` is in seconds; `command` starts a worker (the descriptor of its socket is
        appended).
        """
        self.num_workers = num_workers or share_of_workers()
        self.completed: Counter[str] = Counter()
        """Jobs that succeeded, by modality."""
        self._max_pending = max_queue + self.num_workers
        self._pending = 0
        self._workers = _Workers(lambda: _WorkerProcess(command, settings, job_timeout))
        # A new thread starts its worker before it takes a job, so no job waits for a start while
        # another worker is free.
        self._threads = ThreadPoolExecutor(
            self.num_workers, thread_name_prefix="media", initializer=self._workers.init_thread
        )

    @property
    def num_pending(self) -> int:
        """Jobs waiting or being processed."""
        return self._pending

    async def start(self) -> None:
        """Start and warm one worker; others start when jobs wait. Raises `ModelLoadError`."""
        await self._outcome(self._threads.submit(self._workers.ensure_worker))

    def start_beside(self) -> None:
        """Begin to start one worker; a failure is reported by the jobs that need it."""
        self._threads.submit(lambda: None)  # each thread starts its worker first

    def run(self, job: MediaJob) -> Coroutine[Any, Any, Processed]:
        """Put the job into the queue now; await the result for the processed item.

        Raises `QueueFullError` or `UnavailableError` at once; when awaited `UnavailableError`,
        `UnprocessableMediaError` or `TooLargeError`. No error names a request part (see
        `loader.for_part`). A cancelled job leaves the queue; a job that has begun is finished.
        """
        if self._workers.is_closed():
            raise _draining()
        if self._pending >= self._max_pending:
            raise QueueFullError("too many media items are waiting to be processed")
        try:
            future = self._threads.submit(self._workers.work, job)
        except RuntimeError:  # no new thread can be started; an old one may still run the job
            raise _out_of_resources() from None
        self._pending += 1
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda done: _call_on_loop(loop, self._finish, job.modality, done))
        return self._outcome(future)

    async def _outcome(self, future: Future[T]) -> T:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._workers.is_closed() and not (task and task.cancelling()):
                raise _draining() from None  # the pool was closed; the caller was not cancelled
            raise

    async def aclose(self) -> None:
        """End the workers; waiting jobs are cancelled, running jobs fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._workers.close()
        await asyncio.to_thread(self._threads.shutdown)
        self._workers.reap()

    def _finish(self, modality: Modality, future: Future[Processed]) -> None:
        self._pending -= 1
        if not future.cancelled() and future.exception() is None:
            self.completed[modality] += 1


class _Workers:
    """One worker process per thread of the pool; each thread starts its own."""

    def __init__(self, start_worker: Callable[[], _WorkerProcess]) -> None:
        self._start_worker = start_worker
        self._thread = threading.local()
        self._lock = threading.Lock()
        self.processes: set[_WorkerProcess] = set()
        self._closed = False

    def is_closed(self) -> bool:
        return self._closed

    def init_thread(self) -> None:
        """Start the worker of a new thread. A failure is reported by the jobs that need the worker.

        Every exception is suppressed: an executor whose initializer raises takes no more jobs.
        """
        with contextlib.suppress(Exception):
            self.ensure_worker()

    def work(self, job: MediaJob) -> Processed:
        """A job that a worker has not read, because it was killed, goes to another one."""
        for _ in range(STARTS_PER_JOB - 1):
            try:
                return self._work_once(job)
            except MessageLostError:
                logger.warning("a media worker has ended")
        try:
            return self._work_once(job)
        except MessageLostError:
            raise _out_of_resources() from None

    def _work_once(self, job: MediaJob) -> Processed:
        worker = self._ready()
        try:
            return worker.call(job)
        except LookOnceError:
            raise
        except (LinkClosedError, TimeoutError) as error:
            self._discard(worker)
            if self.is_closed():
                raise _draining() from None
            if isinstance(error, MessageLostError):
                raise
            raise _lost_worker(job, hung=isinstance(error, TimeoutError)) from None
        except OSError as error:
            self._discard(worker)
            logger.warning("a media item cannot be handed over: %s", error)
            raise _out_of_resources() from None
        except BaseException:
            self._discard(worker)
            raise

    def close(self) -> None:
        """Kill all workers; their threads see the closed links and end."""
        with self._lock:
            self._closed = True
            workers = list(self.processes)
        for worker in workers:
            worker.kill()

    def reap(self) -> None:
        """Free the killed workers. Call it when no thread uses them any more."""
        for worker in self.processes:
            worker.stop()
        self.processes.clear()

    def _ready(self) -> _WorkerProcess:
        """This thread's worker. Raises `UnavailableError`; the next job tries again."""
        try:
            return self.ensure_worker()
        except UnavailableError:
            raise
        except Exception as error:
            if self.is_closed():
                raise _draining() from None
            logger.warning("no media worker can be started: %s", error)
            raise _out_of_resources() from error

    def ensure_worker(self) -> _WorkerProcess:
        """This thread's worker, started if there is none or it has ended. `ModelLoadError`."""
        worker: _WorkerProcess | None = getattr(self._thread, "worker", None)
        if worker is not None and worker.alive:
            return worker
        if worker is not None:
            self._discard(worker)
        for _ in range(STARTS_PER_JOB):
            worker = self._start_worker()
            try:
                self._register(worker)
                worker.configure()
            except MessageLostError:
                self._discard(worker)
            except BaseException:
                self._discard(worker)
                raise
            else:
                self._thread.worker = worker
                return worker
        raise _did_not_start()

    def _register(self, worker: _WorkerProcess) -> None:
        """Let `close` kill the worker, even while it starts."""
        with self._lock:
            if self._closed:
                raise _draining()
            self.processes.add(worker)

    def _discard(self, worker: _WorkerProcess) -> None:
        self._thread.worker = None
        with self._lock:
            self.processes.discard(worker)
        worker.stop()


class _WorkerProcess:
    """One worker process, used by one thread."""

    def __init__(
        self, command: Sequence[str], settings: ProcessingSettings, job_timeout: float
    ) -> None:
        """Raises `ModelLoadError` when no process can be started. `configure` it before use."""
        self._settings = settings
        self._job_timeout = job_timeout
        self._replies = reply_decoder()
        try:
            link, self._process = _start(command)
        except OSError:
            raise ModelLoadError("a media worker process cannot be started") from None
        self._link = MessageSocket(link)

    def configure(self) -> None:
        """Blocks for a second or two. Raises `ModelLoadError` when it cannot serve the model, and
        `MessageLostError` when it was killed meanwhile."""
        self._link.settimeout(START_TIMEOUT)
        try:
            send(self._link, ConfigureWorker(self._settings))
            reply, _ = receive(self._link, self._replies)
        except (LinkClosedError, OSError):
            if self._was_killed():
                raise MessageLostError from None
            raise _did_not_start() from None
        if isinstance(reply, JobFailed):
            raise error_from_wire(*reply.error)
        self._link.settimeout(self._job_timeout)

    def _was_killed(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(STOP_TIMEOUT) == -signal.SIGKILL
        return False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, job: MediaJob) -> Processed:
        """Raises the job's error; `LinkClosedError` or `TimeoutError` when the worker is lost."""
        data = Array("uint8", (memoryview(job.data).nbytes,), job.data)
        send(self._link, JobRequest(job.modality, job.options, data))
        reply, _ = receive(self._link, self._replies)
        if isinstance(reply, JobDone):
            return reply.processed
        if isinstance(reply, JobFailed):
            raise error_from_wire(*reply.error)
        raise LinkClosedError

    def kill(self) -> None:
        """End the process, from any thread; the thread that waits for it sees the link close."""
        self._process.kill()

    def stop(self) -> None:
        """End the process and free its resources. If the process has not ended after
        `STOP_TIMEOUT` it is left to Python, which collects it when it starts another.
        """
        self._process.kill()
        self._link.close()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            logger.warning("media worker %d was killed but has not ended", self._process.pid)


def _start(command: Sequence[str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """This process's end of the socket, and the new process."""
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


def _lost_worker(job: MediaJob, *, hung: bool) -> UnprocessableMediaError:
    what = "takes too long to decode" if hung else "cannot be decoded: its decoder crashed"
    return UnprocessableMediaError(f"the {job.modality} {what}")


def _did_not_start() -> ModelLoadError:
    return ModelLoadError("a media worker process did not start")


def _out_of_resources() -> UnavailableError:
    return UnavailableError("media cannot be processed now: the server is short of resources")


def _draining() -> DrainingError:
    return DrainingError("the server is shutting down")


def _call_on_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object
) -> None:
    # The loop may have closed before the job ended; then there is nothing left to count.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
