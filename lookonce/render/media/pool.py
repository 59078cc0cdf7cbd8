"""A bounded pool of worker processes for decoding and processing, off the event loop.

    run ──▶ MediaQueue (bounded: 429) ──▶ one thread per worker ──▶ worker process (sandboxed)
                                         blocks on its socket       decode + process
                  a guard thread kills workers: past the job's CPU deadline, client left

The threads only send and receive messages; decoding does not hold this process's GIL. When a worker
dies or is killed, only its job fails, and its thread starts a new worker, also where the old one
had no job; a job that its worker had not begun is given to the new one. When no worker can be
started (no descriptors, processes or memory left) the job fails with 503; the next job tries again.

With two or more workers one is always free of long jobs (`fair_queue.LONG_SECONDS`), whoever sent
them: a short one waits for short ones only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from lookonce.cache.slab_pool import LeasedSlab, SlabPool
from lookonce.cache.slabs import slab_capacity
from lookonce.errors import (
    DrainingError,
    LookOnceError,
    ModelLoadError,
    ProtocolError,
    UnavailableError,
    UnprocessableMediaError,
    error_from_wire,
)
from lookonce.ipc.codec import SlabReference
from lookonce.ipc.fork_server import ForkedProcess
from lookonce.ipc.framing import MessageSocket, close_fds
from lookonce.ipc.worker_process import fork_worker, how_it_ended, start_worker
from lookonce.render.media.cost import cpu_deadline
from lookonce.render.media.fair_queue import MediaQueue, QueuedJob
from lookonce.render.media.pdf import PagesJob, RenderedPages
from lookonce.render.media.processing import (
    MediaJob,
    Processed,
    ProcessingSettings,
    makes_item,
)
from lookonce.render.media.sandbox import SandboxReport
from lookonce.render.media.worker import (
    ConfigureWorker,
    DropSlabs,
    JobBegun,
    JobDone,
    JobFailed,
    JobRequest,
    LinkClosedError,
    MemoryTrimmed,
    PagesDone,
    PagesRequest,
    SlabGranted,
    SlabWanted,
    TrimMemory,
    WorkerReady,
    receive,
    reply_decoder,
    send,
)
from lookonce.types.counts import Counts
from lookonce.types.cpu import usable_cores
from lookonce.types.fair_queue import TenantWeights
from lookonce.types.logs import log_config
from lookonce.types.media import Array, ProcessedItem
from lookonce.types.ports import ClaimsItems
from lookonce.types.stack_samples import samples_folder

MAX_WORKERS = 4
"""Of all API processes of a server together, but at least one in each."""
MAX_QUEUE = 512
"""Media items that may wait for a worker; more are refused with 429."""
MAX_QUEUE_PER_TENANT = 256
"""Of one tenant; without keys all clients are one."""
START_TIMEOUT = 120.0
JOB_TIMEOUT = 60.0
"""Seconds after which a worker that sends nothing counts as hung. CPU deadlines are shorter."""
BEGIN_TIMEOUT = 10.0
"""Seconds after which a worker that has not even taken up its job counts as hung."""
ABANDONED_TIMEOUT = 1.0
"""Seconds that a job may go on after which nobody waits for it."""
GUARD_INTERVAL = 0.1
STOP_TIMEOUT = 2.0
END_TIMEOUT = 0.5
"""For a worker that has closed its link, to end."""
STARTS_PER_JOB = 3
"""Workers that are tried for a job when they are killed before they have begun it."""
LEAST_CHARGE = 0.25
IDLE_LOOK_SECONDS, MOST_IDLE_LOOK_SECONDS = 2.0, 120.0
"""How often a thread without a job looks whether its worker lives. Another one that starts only
with the next job would make that one wait. After each that ended, it looks half as often."""
START_COST = 2.0
"""CPU seconds that a new worker takes, charged to whose job ended the old one."""
ITEM_BASE_BYTES = 256 << 20
ITEM_BYTES_PER_PIXEL = 64
"""A worker may send an item of at most so many bytes, so that one that was taken over cannot fill
this process's memory. float32 takes 12 per pixel of the largest picture, 24 with doubled frames."""
MAX_HEAD_BYTES = 4 << 20
"""A worker's message without the arrays that travel beside it: what is decoded takes much more
memory than its bytes, and all other threads wait meanwhile."""
MAX_ARRAYS = 64
"""Of one item."""
MAX_SLABS_PER_JOB = 16
MAX_EXPANSION = 1 << 24
"""Prompt tokens of one item: more than any context, and few enough to be written out."""
MAX_MILLISECONDS = 24 * 3600 * 1000.0
"""That a job says it took."""
MOST_KEPT_BYTES = 256 << 20
"""Of a worker between two jobs, beyond what it had before its first one: decoders, PDFium most of
all, may keep what one hostile file made them allocate."""
WORKER = "lookonce.render.media.worker"
WORKER_COMMAND = (sys.executable, "-m", WORKER)
CPU_CLOCK = 2
"""With the complement of a process's number: its clock of CPU time (`clock_getcpuclockid`)."""
KillReason = Literal["cpu", "hung", "abandoned", "memory", "crashed"]
KILL_REASONS: tuple[KillReason, ...] = get_args(KillReason)

Job = MediaJob | PagesJob
Made = Processed | RenderedPages
CheckProcessed = Callable[[ProcessedItem], None]
"""Raises `LookOnceError` (`ProcessorFamily.check_processed`)."""
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShare:
    """What the media of one process have of the server around it; by default they are alone."""

    num_workers: int | None = None
    """Processes that decode; None: by cores."""
    wait_for_worker: bool = True
    """The first worker is ready before media are taken."""
    fork_server: Path | None = None
    """The socket of the process that workers are forked from; None: each starts on its own."""
    slabs: SlabPool | None = None
    """Where workers put large arrays; None: they are in messages."""
    shared_cache_bytes: int = 0
    """What of the engine's store lies in slabs: how much a worker may map follows from it."""
    claims: ClaimsItems | None = None
    """Asked before an item is made; None: nobody else makes items."""
    counts: Counts = field(default_factory=Counts)
    """Gets what is counted for metrics."""
    weights: TenantWeights = field(default_factory=TenantWeights)
    """Of tenants that take turns."""


@dataclass(eq=False, slots=True)
class _Work:
    """A job, and the future of what it makes."""

    job: Job
    future: Future[Any] = field(default_factory=Future)
    abandoned: bool = False
    """Nobody waits for the item any more."""


Queued = QueuedJob[_Work]


@dataclass(slots=True)
class _Running:
    """What the guard compares with a running job's limits; times are in seconds."""

    worker: _WorkerProcess
    started: float
    cpu_before: float
    killed: KillReason | None = None
    cpu_at_end: float | None = None
    """What the job took, once its worker is gone."""

    @property
    def cpu_used(self) -> float:
        if self.cpu_at_end is not None:
            return self.cpu_at_end
        return self.worker.cpu_seconds() - self.cpu_before


def share_of_workers(num_processes: int = 1) -> int:
    """Workers of each of so many API processes: one for each core that they may use, `MAX_WORKERS`
    at most, for all of them together."""
    return max(1, min(MAX_WORKERS, usable_cores()) // num_processes)


class MediaPool:
    """`await run(job)` from one event loop. Call `start` before, `aclose` after."""

    def __init__(
        self,
        settings: ProcessingSettings,
        *,
        share: ServerShare | None = None,
        max_queue: int = MAX_QUEUE,
        max_queue_per_tenant: int | None = None,
        job_timeout: float = JOB_TIMEOUT,
        command: Sequence[str] = WORKER_COMMAND,
        check_processed: CheckProcessed | None = None,
    ) -> None:
        """`max_queue` bounds the jobs that wait for a worker, not counting those being processed,
        and `max_queue_per_tenant` those of one tenant; `job_timeout` is in seconds; `command`
        starts a worker (the descriptor of its socket is appended) where no fork server does;
        `check_processed` refuses items that the model's processor cannot have made.
        """
        share = ServerShare() if share is None else share
        self.num_workers = share.num_workers or share_of_workers()
        counts = share.counts
        self.completed: Counter[str] = Counter()
        """Jobs that succeeded, by modality."""
        self.killed = counts.by_label("media_workers_lost_total")
        """Workers that ended before their job, by the reason."""
        for reason in KILL_REASONS:
            self.killed[reason] += 0
        self._waiting = counts.count("media_waiting", gauge=True)
        self._queue: MediaQueue[_Work] = MediaQueue(
            max_waiting=max_queue,
            max_waiting_per_tenant=max_queue_per_tenant or max_queue,
            weights=share.weights,
        )
        self._running: dict[Queued, _Running | None] = {}
        """Jobs taken by a thread; None until its worker is ready."""
        self._changed = threading.Condition()
        """Guards everything here that threads share, and says when it has changed."""
        self._busy, self._stopping = threading.Event(), threading.Event()
        """A job is with a worker; the pool closes. The guard waits for them."""
        self._closed = False
        self._num_idle = 0
        self._threads: list[threading.Thread] = []
        self._guard: threading.Thread | None = None
        self._workers = _Workers(
            lambda: _WorkerProcess(command, settings, job_timeout, share, check_processed)
        )

    @property
    def num_pending(self) -> int:
        """Jobs waiting or being processed."""
        return len(self._queue) + len(self._running)

    @property
    def num_idle(self) -> int:
        """Threads that wait for a job."""
        return self._num_idle

    @property
    def num_waiting(self) -> int:
        """Jobs that no worker has taken yet."""
        return len(self._queue)

    async def start(self) -> None:
        """Start and warm one worker; others start with the first jobs. Raises `ModelLoadError`."""
        ready: Future[None] = Future()
        with self._changed:
            self._guard = threading.Thread(target=self._guard_workers, name="media-guard")
            self._guard.start()
            self._add_thread(ready)
        await self._outcome(ready)

    def start_beside(self) -> None:
        """Begin to start one worker, unless that was done; a failure is reported by the jobs that
        need it."""
        with self._changed:
            if self._guard is not None or self._closed:
                return
            self._guard = threading.Thread(target=self._guard_workers, name="media-guard")
            self._guard.start()
            self._add_thread()

    def run(self, job: MediaJob) -> Coroutine[Any, Any, Processed]:
        """Put the job into the queue now; await the result for the processed item.

        Raises `QueueFullError` or `UnavailableError` at once; when awaited `UnavailableError`,
        `UnprocessableMediaError` or `TooLargeError`. No error names a request part (see
        `loader.for_part`). A cancelled job leaves the queue; one that has begun is given up if it
        takes longer than `ABANDONED_TIMEOUT`.
        """
        return self._submit(job)

    def render(self, job: PagesJob) -> Coroutine[Any, Any, RenderedPages]:
        """The same for pages of a PDF file."""
        return self._submit(job)

    def _submit(self, job: Job) -> Coroutine[Any, Any, Any]:
        queued: Queued = QueuedJob(_Work(job), job.tenant, job.seconds)
        with self._changed:
            if self._closed:
                raise _draining()
            spare = self.num_workers - len(self._running)
            self._queue.check_room(job.tenant, spare)
            self._add_threads()
            self._queue.push(queued, spare)
            self._waiting.set(len(self._queue))
            self._changed.notify()
        return self._awaited(queued)

    async def _awaited(self, queued: Queued) -> Made:
        try:
            made: Made = await self._outcome(queued.job.future)
        except asyncio.CancelledError:
            self._abandon(queued)
            raise
        self.completed[queued.job.job.modality] += 1
        return made

    async def _outcome(self, future: Future[T]) -> T:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise _draining() from None  # the pool was closed; the caller was not cancelled
            raise

    def _abandon(self, queued: Queued) -> None:
        with self._changed:
            self._queue.remove(queued)
            self._waiting.set(len(self._queue))
            queued.job.abandoned = True

    async def aclose(self) -> None:
        """End the workers; waiting jobs are cancelled, running jobs fail."""
        with self._changed:
            self._closed = True
            waiting = self._queue.drain()
            self._waiting.set(0)
            self._changed.notify_all()
            self._stopping.set()
            self._busy.set()
        for queued in waiting:
            queued.job.future.cancel()
        self._workers.close()
        await asyncio.to_thread(self._join_threads)
        self._workers.reap()

    def _join_threads(self) -> None:
        for thread in [*self._threads, self._guard]:
            if thread is not None:
                thread.join()

    def _add_threads(self) -> None:
        """Start another worker if all are busy. The second one starts with the first job: a short
        job must not wait for its start while the first worker does a long one."""
        wanted = min(2, self.num_workers)
        if self._num_idle <= len(self._queue):
            wanted = min(len(self._threads) + 1, self.num_workers)
        while len(self._threads) < wanted:
            self._add_thread()

    # --- threads of workers -------------------------------------------------------------------

    def _add_thread(self, ready: Future[None] | None = None) -> None:
        """Raises `UnavailableError` when the system starts no thread."""
        number = len(self._threads)
        thread = threading.Thread(target=self._work, args=(ready,), name=f"media-{number}")
        try:
            thread.start()
        except RuntimeError:
            raise _out_of_resources() from None
        self._threads.append(thread)

    def _work(self, ready: Future[None] | None) -> None:
        """Start a worker, then give it jobs until the pool closes.

        The worker starts before a job is taken, so no job waits for a start while another worker is
        free. A failure is reported by the jobs that need the worker.
        """
        if ready is not None and not ready.set_running_or_notify_cancel():
            ready = None
        try:
            self._workers.ensure_worker()
        except Exception as error:  # noqa: BLE001  see above
            if ready is not None:
                ready.set_exception(_draining() if self._closed else error)
                ready = None
        if ready is not None:
            ready.set_result(None)
        idle_look = IDLE_LOOK_SECONDS
        while not self._closed:
            queued = self._next(idle_look)
            if queued is not None:
                idle_look = IDLE_LOOK_SECONDS
                self._process(queued)
                if not self._closed:
                    self._discard_if_large(queued)
            elif not self._closed and self._workers.own_has_ended():
                idle_look = min(2 * idle_look, MOST_IDLE_LOOK_SECONDS)
            else:
                continue
            del queued  # its item must not be kept while this thread waits
            if not self._closed:
                with contextlib.suppress(Exception):
                    self._workers.ensure_worker()

    def _discard_if_large(self, queued: Queued) -> None:
        """End the worker if this job has left it with more memory than it should; its tenant pays
        for the next one."""
        worker = self._workers.large_one()
        if worker is None:
            return
        with self._changed:
            self._queue.settle(queued.tenant, START_COST)
        logger.info(
            "a media worker is replaced: an item has left much memory in use",
            extra=_log_fields(queued.job.job),
        )
        self._workers.discard(worker)

    def _next(self, seconds: float) -> Queued | None:
        """Wait for a job and take it; None when none has come for so long, or the pool is
        closed."""
        woken = True
        with self._changed:
            while woken and not self._closed:
                queued = self._queue.pop(long=self._takes_long())
                if queued is not None:
                    self._waiting.set(len(self._queue))
                    self._running[queued] = None
                    self._busy.set()
                    return queued
                self._num_idle += 1
                woken = self._changed.wait(seconds)
                self._num_idle -= 1
        return None

    def _takes_long(self) -> bool:
        """Whether one more long job leaves a worker for short ones."""
        num_long = sum(queued.is_long for queued in self._running)
        return self.num_workers == 1 or num_long < self.num_workers - 1

    def _process(self, queued: Queued) -> None:
        """Give the job to this thread's worker; its outcome goes to the future."""
        future = queued.job.future
        try:
            made = self._make(queued)
        except BaseException as error:  # noqa: BLE001  the thread serves the next job
            self._finish(queued)
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            self._finish(queued)
            if future.set_running_or_notify_cancel():
                future.set_result(made)

    def _finish(self, queued: Queued) -> None:
        with self._changed:
            del self._running[queued]
            self._changed.notify()

    def _make(self, queued: Queued) -> Made:
        """The item or the pages; its tenant is charged once, for all attempts together."""
        used: list[float] = []
        try:
            return self._attempt(queued, used)
        finally:
            self._settle(queued, sum(used))

    def _attempt(self, queued: Queued, used: list[float]) -> Made:
        """A job that its worker had not begun when it died is given to another one. `used` gets the
        CPU seconds of each attempt."""
        for starts_left in reversed(range(STARTS_PER_JOB)):
            worker = self._ready_worker()
            running = self._begin(queued, worker)
            try:
                return worker.call(queued.job.job)
            except LookOnceError:
                if worker.out_of_memory:
                    reason = self._lost(worker, running, hung=False)
                    self._count_lost(reason, queued.job.job)
                raise
            except (LinkClosedError, TimeoutError) as error:
                if self._closed:
                    raise _draining() from None
                reason = self._lost(worker, running, hung=isinstance(error, TimeoutError))
                if starts_left and not worker.has_begun and reason in ("crashed", "hung"):
                    continue
                self._count_lost(reason, queued.job.job)
                raise _lost_worker(queued.job.job, reason) from None
            except OSError as error:
                self._workers.discard(worker)
                logger.warning("a media item cannot be handed over: %s", error)
                raise _out_of_resources() from None
            except BaseException:
                self._workers.discard(worker)
                raise
            finally:
                used.append(running.cpu_used)
        raise AssertionError("unreachable")

    def _ready_worker(self) -> _WorkerProcess:
        """This thread's worker. Raises `UnavailableError`; the next job tries again."""
        try:
            return self._workers.ensure_worker()
        except UnavailableError:
            raise
        except Exception as error:
            if self._closed:
                raise _draining() from None
            logger.warning("no media worker can be started: %s", error)
            if isinstance(error, _WorkerEndedError):
                raise UnavailableError(f"media cannot be processed now: {error.message}") from error
            raise _out_of_resources() from error

    def _begin(self, queued: Queued, worker: _WorkerProcess) -> _Running:
        """Let the guard watch the job. Raises `UnavailableError` if its client has left."""
        worker.limit_cpu(cpu_deadline(queued.seconds))
        running = _Running(worker, time.monotonic(), worker.cpu_seconds())
        with self._changed:
            if queued.job.abandoned:
                raise UnavailableError("the client has left")
            self._running[queued] = running
        return running

    def _lost(self, worker: _WorkerProcess, running: _Running, *, hung: bool) -> KillReason:
        """Discard a worker that ended before its job, and tell why it ended."""
        running.cpu_at_end = running.cpu_used + START_COST
        ended_by = self._workers.discard(worker)
        if running.killed is not None:
            return running.killed
        if worker.out_of_memory:
            return "memory"
        if ended_by == signal.SIGXCPU:
            return "cpu"
        return "hung" if hung else "crashed"

    def _count_lost(self, reason: KillReason, job: Job) -> None:
        with self._changed:
            self.killed[reason] += 1
        logger.warning(
            "a media worker ended before its item was done",
            extra={"reason": reason, **_log_fields(job)},
        )

    def _settle(self, queued: Queued, used: float) -> None:
        """Charge the tenant what the job really took; a part of its estimate at least, so that
        others have their turn after a known number of jobs."""
        charged = max(used, LEAST_CHARGE * queued.seconds)
        with self._changed:
            self._queue.settle(queued.tenant, charged - queued.seconds)

    # --- the guard ----------------------------------------------------------------------------

    def _guard_workers(self) -> None:
        """Kill workers that pass their limits, until the pool closes."""
        while not self._closed:
            self._busy.wait()
            with self._changed:
                self._kill_those_past_limits()
                if not self._running and not self._closed:
                    self._busy.clear()
            self._stopping.wait(GUARD_INTERVAL)

    def _kill_those_past_limits(self) -> None:
        for queued, running in self._running.items():
            if running is not None and running.killed is None:
                running.killed = _reason_to_kill(queued, running)
                if running.killed is not None:
                    running.worker.kill()


def _reason_to_kill(queued: Queued, running: _Running) -> KillReason | None:
    if running.cpu_used > cpu_deadline(queued.seconds):
        return "cpu"
    if queued.job.abandoned and time.monotonic() - running.started > ABANDONED_TIMEOUT:
        return "abandoned"
    return None


class _WorkerEndedError(ModelLoadError):
    """A worker ended before it was ready; the message says how."""


class _Workers:
    """One worker process per thread of the pool; each thread starts its own."""

    def __init__(self, start_worker: Callable[[], _WorkerProcess]) -> None:
        self._start_worker = start_worker
        self._thread = threading.local()
        self._lock = threading.Lock()
        self.processes: set[_WorkerProcess] = set()
        self._closed = False
        self._sandbox: SandboxReport | None = None

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

    def ensure_worker(self) -> _WorkerProcess:
        """This thread's worker, started if there is none or it has ended. `ModelLoadError`."""
        worker: _WorkerProcess | None = getattr(self._thread, "worker", None)
        if worker is not None and worker.alive:
            return worker
        if worker is not None:
            self.discard(worker)
        for starts_left in reversed(range(STARTS_PER_JOB)):
            worker = self._start_worker()
            try:
                self._register(worker)
                self._log_sandbox(worker.configure())
            except BaseException as error:
                was_killed = self.discard(worker) == signal.SIGKILL and not self._closed
                if starts_left and was_killed and isinstance(error, ModelLoadError):
                    continue
                raise
            self._thread.worker = worker
            return worker
        raise AssertionError("unreachable")

    def _register(self, worker: _WorkerProcess) -> None:
        """Let `close` kill the worker, even while it starts."""
        with self._lock:
            if self._closed:
                raise _draining()
            self.processes.add(worker)

    def _log_sandbox(self, report: SandboxReport) -> None:
        """Once: all workers of one kernel have the same guards."""
        with self._lock:
            if self._sandbox is not None:
                return
            self._sandbox = report
        if report.active:
            logger.info("media workers are confined by %s", ", ".join(report.active))
        for name, problem in report.refused.items():
            logger.warning("media workers run without %s: %s", name, problem)

    def own_has_ended(self) -> bool:
        """Whether this thread's worker has ended without a job. What could not be started is not
        tried again before the next job."""
        worker: _WorkerProcess | None = getattr(self._thread, "worker", None)
        if worker is None or worker.alive:
            return False
        logger.warning("a media worker %s while it had nothing to do", worker.how_it_ended)
        return True

    def large_one(self) -> _WorkerProcess | None:
        """This thread's worker, if its last job has left more memory behind than it should."""
        worker: _WorkerProcess | None = getattr(self._thread, "worker", None)
        return worker if worker is not None and worker.is_large() else None

    def discard(self, worker: _WorkerProcess) -> int | None:
        """End the worker; the signal that it had ended by before, if any."""
        self._thread.worker = None
        with self._lock:
            self.processes.discard(worker)
        return worker.stop()


class _WorkerProcess:
    """One worker process, used by one thread. Others may only `kill` it, and between jobs tell it
    which slabs to unmap."""

    def __init__(
        self,
        command: Sequence[str],
        settings: ProcessingSettings,
        job_timeout: float,
        share: ServerShare,
        check_processed: CheckProcessed | None = None,
    ) -> None:
        """Raises `ModelLoadError` when no process can be started. `configure` it before use."""
        slabs = share.slabs
        self._settings = settings
        self._slab_bytes = slab_capacity(share.shared_cache_bytes)
        self._busy = threading.Lock()
        """Held by whoever uses the link."""
        self._check_processed = check_processed
        self._slab_pool = slabs
        self._slabs = None if slabs is None else slabs.writer(self._tell_dropped)
        self._job_timeout = job_timeout
        self._replies = reply_decoder()
        try:
            link, self._process = _started(command, share.fork_server)
        except OSError:
            raise ModelLoadError("a media worker process cannot be started") from None
        most = ITEM_BASE_BYTES + ITEM_BYTES_PER_PIXEL * settings.max_image_pixels
        self._link = MessageSocket(link, max_message_bytes=most)
        self._cpu_seconds = 0.0
        self._own_bytes_at_start = 0
        self.has_begun = False
        """The worker has taken up the last job given to it."""
        self.out_of_memory = False

    def configure(self) -> SandboxReport:
        """Blocks for a second or two. Raises `ModelLoadError` when it cannot serve the model."""
        self._link.settimeout(START_TIMEOUT)
        try:
            logs, folder = log_config(), samples_folder()
            send(
                self._link,
                ConfigureWorker(
                    self._settings,
                    self._slab_bytes,
                    logs.format,
                    logs.level,
                    None if folder is None else str(folder),
                ),
            )
            reply, _ = receive(self._link, self._replies)
        except (LinkClosedError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT)
            ended = how_it_ended(self._process.returncode)
            raise _WorkerEndedError(f"a media worker process {ended} while it started") from None
        if isinstance(reply, JobFailed):
            raise error_from_wire(*reply.error)
        if not isinstance(reply, WorkerReady):
            raise ModelLoadError("a media worker process did not start")
        self._link.settimeout(self._job_timeout)
        self._own_bytes_at_start = self._own_bytes()
        return reply.sandbox

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def how_it_ended(self) -> str:
        return how_it_ended(self._process.returncode)

    def call(self, job: Job) -> Made:
        """Raises the job's error; `LinkClosedError` or `TimeoutError` when the worker is lost."""
        granted: dict[int, LeasedSlab] = {}
        self.has_begun = False
        try:
            with self._busy:
                self._send_dropped()
                if isinstance(job, PagesJob):
                    return self._render(job)
                return self._work(job, granted)
        finally:
            if self._slabs is not None:
                self._slabs.finish(granted.values())
                self._tell_dropped()

    def _work(self, job: MediaJob, granted: dict[int, LeasedSlab]) -> Processed:
        uses_slabs = self._slab_pool is not None and self._slab_pool.is_open
        ahead = self._slabs.grant_ahead() if uses_slabs and self._slabs is not None else None
        if ahead is not None:
            granted[ahead.number] = ahead
        number = 0 if ahead is None else ahead.number
        self._expect_beginning()
        send(
            self._link,
            JobRequest(
                job.modality, job.options, _encoded(job.data), uses_slabs, job.request_id, number
            ),
        )
        read_slab = partial(_array_in, granted)
        num_asked = 0
        while True:
            reply, _ = receive(self._link, self._replies, read_slab, MAX_HEAD_BYTES)
            match reply:
                case JobBegun() if not self.has_begun:
                    self._begun()
                case SlabWanted(num_bytes, declined) if num_asked < MAX_ARRAYS:
                    num_asked += 1
                    if declined:
                        self._take_back(ahead, granted)
                    self._grant(num_bytes, granted)
                case JobDone(processed):
                    _check_item(processed, job)
                    if self._check_processed is not None and makes_item(job):
                        self._require_possible(processed.item)
                    return processed
                case JobFailed(error, out_of_memory):
                    self.out_of_memory = out_of_memory
                    raise error_from_wire(*error)
                case _:
                    raise LinkClosedError

    def _expect_beginning(self) -> None:
        """A worker that is stopped is found out soon, and its job goes to another one."""
        self._link.settimeout(min(BEGIN_TIMEOUT, self._job_timeout))

    def _begun(self) -> None:
        self.has_begun = True
        self._link.settimeout(self._job_timeout)

    def _require_possible(self, item: ProcessedItem) -> None:
        """Raises `LinkClosedError` for arrays that the model's processor cannot have made."""
        assert self._check_processed is not None
        try:
            self._check_processed(item)
        except LookOnceError as error:
            logger.warning("a media worker's item is refused: %.200s", error.message)
            raise LinkClosedError from None

    def _render(self, job: PagesJob) -> RenderedPages:
        request = PagesRequest(
            _encoded(job.data), job.first, job.count, job.pictures, job.request_id
        )
        self._expect_beginning()
        send(self._link, request)
        while True:
            reply, _ = receive(self._link, self._replies)
            match reply:
                case JobBegun() if not self.has_begun:
                    self._begun()
                case PagesDone(rendered):
                    _check_pages(rendered, job, self._settings.max_document_pages)
                    return rendered
                case JobFailed(error, out_of_memory):
                    self.out_of_memory = out_of_memory
                    raise error_from_wire(*error)
                case _:
                    raise LinkClosedError

    def _take_back(self, ahead: LeasedSlab | None, granted: dict[int, LeasedSlab]) -> None:
        """The worker has no use for the slab that came with the job."""
        if self._slabs is not None and ahead is not None and ahead.number in granted:
            del granted[ahead.number]
            self._slabs.finish([ahead])

    def _grant(self, num_bytes: int, granted: dict[int, LeasedSlab]) -> None:
        """Answer a worker that asks for a slab."""
        if self._slabs is None or num_bytes < 1 or len(granted) == MAX_SLABS_PER_JOB:
            raise LinkClosedError
        grant = self._slabs.grant(num_bytes)
        if grant is None:
            send(self._link, SlabGranted(0, 0))
            return
        granted[grant.slab.number] = grant.slab
        fds = () if grant.fd is None else (grant.fd,)
        try:
            send(self._link, SlabGranted(grant.slab.number, grant.slab.nbytes), fds)
        finally:
            close_fds(fds)

    def _tell_dropped(self) -> None:
        """Tell the worker which slabs to unmap; one that is busy is told after its job.

        Called on the event loop too, which waits for no worker that does not read.
        """
        if self._busy.acquire(blocking=False):
            try:
                self._send_dropped(wait=False)
            except (LinkClosedError, OSError):
                pass  # the worker has ended, and its mappings with it
            finally:
                self._busy.release()

    def _send_dropped(self, *, wait: bool = True) -> None:
        dropped = () if self._slabs is None else self._slabs.take_dropped()
        if dropped:
            send(self._link, DropSlabs(dropped), wait=wait)

    def cpu_seconds(self) -> float:
        """CPU time of the process so far; where the system does not tell, the time of a clock."""
        if sys.platform != "linux":
            return time.monotonic()
        with contextlib.suppress(OSError):  # it has ended, and was waited for
            self._cpu_seconds = time.clock_gettime(~self._process.pid << 3 | CPU_CLOCK)
        return self._cpu_seconds

    def is_large(self) -> bool:
        """Whether the process has come to have more than `MOST_KEPT_BYTES` of its own since it was
        started, without what it has freed since; False where the system does not tell."""
        if not self._keeps_much():
            return False
        try:
            self._trim()
        except (LinkClosedError, OSError):
            return True
        return self._keeps_much()

    def _keeps_much(self) -> bool:
        return self._own_bytes() - self._own_bytes_at_start > MOST_KEPT_BYTES

    def _trim(self) -> None:
        """Just after its answer a worker still has the item that it has sent, and what its job has
        freed. Raises `LinkClosedError`, `TimeoutError` or `OSError`."""
        with self._busy:
            self._link.settimeout(min(BEGIN_TIMEOUT, self._job_timeout))
            send(self._link, TrimMemory())
            reply, _ = receive(self._link, self._replies, None, MAX_HEAD_BYTES)
        if not isinstance(reply, MemoryTrimmed):
            raise LinkClosedError

    def _own_bytes(self) -> int:
        """Resident, and neither files nor shared memory; 0 where the system does not tell."""
        try:
            pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        except OSError:  # no Linux, or the process has ended
            return 0
        return (int(pages[1]) - int(pages[2])) * resource.getpagesize()

    def limit_cpu(self, seconds: float) -> None:
        """Let the kernel end the process if it takes more CPU time, should this one be gone."""
        if sys.platform == "linux":
            limit = math.ceil(self.cpu_seconds() + seconds) + 1
            with contextlib.suppress(OSError):  # it has just ended
                resource.prlimit(
                    self._process.pid, resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY)
                )

    def kill(self) -> None:
        """End the process, from any thread; the thread that waits for it sees the link close."""
        self._process.kill()

    def stop(self) -> int | None:
        """End the process and free its resources; the signal that it had ended by, if any.

        If it has not ended after `STOP_TIMEOUT` it is left to Python, which collects it when it
        starts another.
        """
        before = self._process.poll()
        self._process.kill()
        with self._busy:  # another thread may be telling it what to unmap
            self._link.close()
        status = None
        try:
            status = self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            logger.warning("media worker %d was killed but has not ended", self._process.pid)
        if self._slabs is not None:
            self._slabs.close()
        if before is None and status == -signal.SIGKILL:
            return None  # by the line above
        return -status if status is not None and status < 0 else None


def _started(
    command: Sequence[str], fork_server: Path | None
) -> tuple[socket.socket, subprocess.Popen[bytes] | ForkedProcess]:
    """Raises `OSError`."""
    forked = None if fork_server is None else fork_worker(WORKER, fork_server)
    return start_worker(command) if forked is None else forked


def _array_in(
    granted: Mapping[int, LeasedSlab],
    dtype: str,
    shape: tuple[int, ...],
    nbytes: int,
    reference: SlabReference,
) -> Array:
    """The array that a worker says it has put into a slab. Raises `ProtocolError` where it names
    one that it was not granted for this job, or another place or dtype than it may."""
    number, offset, _ = reference
    if number not in granted:
        raise ProtocolError("a worker names a slab that it was not granted")
    return granted[number].array(dtype, shape, offset, nbytes)


def _check_item(processed: Processed, job: MediaJob) -> None:
    """Raises `LinkClosedError` for an expansion that no prompt can have, another modality, more
    arrays than any item, or times that are none: this process writes out as many tokens as the
    worker says, the engine computes the positions of whole batches from the grid, and times are
    added up."""
    item, times = processed.item, (processed.decode_ms, processed.process_ms)
    tokens, counts = zip(*item.expansion.runs, strict=True) if item.expansion.runs else ((), ())
    possible = (
        item.modality == job.modality
        and len(item.arrays) <= MAX_ARRAYS
        and all(0 <= number <= MAX_EXPANSION for number in item.expansion.grid or ())
        and item.expansion.num_embeds > 0
        and all(0 <= token < 1 << 31 for token in tokens)
        and all(count > 0 for count in counts)
        and sum(counts) <= MAX_EXPANSION
        and all(0 <= milliseconds < MAX_MILLISECONDS for milliseconds in times)
    )
    if not possible:
        raise LinkClosedError


def _check_pages(rendered: RenderedPages, job: PagesJob, max_pages: int) -> None:
    """Raises `LinkClosedError` for pages that are not those of the job, and for a number of pages
    that no worker renders: this process asks for as many."""
    last = min(job.first + job.count, rendered.num_pages)
    right = (
        0 < rendered.num_pages <= max_pages
        and len(rendered.pages) == max(0, last - job.first)
        and all((page.picture is not None) == job.pictures for page in rendered.pages)
    )
    if not right:
        raise LinkClosedError


def _encoded(data: bytes | memoryview) -> Array:
    return Array("uint8", (memoryview(data).nbytes,), data)


def _log_fields(job: Job) -> dict[str, str]:
    return {"modality": job.modality, "tenant": job.tenant, "request_id": job.request_id}


def _lost_worker(job: Job, reason: KillReason) -> UnprocessableMediaError:
    crashed = "cannot be decoded: its decoder crashed"
    what = crashed if reason == "crashed" else "takes too long to decode"
    return UnprocessableMediaError(f"the {job.modality} {what}")


def _out_of_resources() -> UnavailableError:
    return UnavailableError("media cannot be processed now: the server is short of resources")


def _draining() -> DrainingError:
    return DrainingError("the server is shutting down")
