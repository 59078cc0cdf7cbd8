"""Grammars of structured outputs, compiled to masks of the tokens that may come next.

llguidance computes the masks lazily, token by token. It needs nothing but its 3 MB wheel, and reads
Hugging Face's fast tokenizers as they are.

    request ──▶ GrammarCompilerPool ──▶ GrammarCompiler ──────▶ worker process: tries it (limits)
                fair by tenant          a thread per worker     │ source, bytes
                cached by bytes         compiles it again ◀─────┘

Requests wait for their grammar here, in neither the input nor the step thread. What a grammar may
cost is in `grammar_worker.GrammarLimits`: a worker that exceeds it is killed and replaced, so a
refused grammar leaves nothing in the engine. Compiling a second time is needed since llguidance
cannot save what it has compiled; it happens in a thread of low priority, which does not hold the
interpreter's lock, for a grammar that is known to take at most `cpu_seconds` and `compiled_bytes`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import llguidance
import msgspec
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from lookonce.core.request import Request
from lookonce.engine.process.grammar_worker import (
    NICENESS,
    Answer,
    Configure,
    GrammarLimits,
    GrammarRefused,
    GrammarTried,
    Ready,
    TryGrammar,
    parser_limits,
    receive,
    refusal,
    send,
)
from lookonce.errors import (
    BadRequestError,
    LookOnceError,
    ProtocolError,
    QueueFullError,
    RequestFailedError,
    UnavailableError,
    error_from_wire,
)
from lookonce.ipc.framing import MessageSocket
from lookonce.ipc.worker_process import how_it_ended, start_worker
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.fair_queue import FairQueue
from lookonce.types.logs import current_request_id
from lookonce.types.memory import give_memory_back
from lookonce.types.request import client_request_id
from lookonce.types.sampling import CompiledGrammar, Grammar
from lookonce.types.stack_samples import samples_folder
from lookonce.types.tenant_lru import TenantLRU

logger = logging.getLogger(__name__)

WORKERS = 3
"""Threads, each with a process, started when they are needed. One tenant has at most two of them:
a grammar that takes long leaves one to the tenant's others, and one to the other tenants. Beside
them one spare process is kept started: it takes the place of one that was killed."""
MAX_WAITING = 64
"""Different grammars of one tenant that may wait or be compiled; more are refused with 429."""
CACHE_BYTES = 128 << 20
"""Compiled grammars kept for later requests."""
ENTRY_BYTES = 1024
"""What a cached entry takes beside its grammar."""
QUANTUM = 4096
"""Bytes of source that a tenant may have compiled before the next one's turn."""
BASE_COST = 512
"""Bytes of source that the smallest grammar counts as."""
START_SECONDS = 60.0
POLL_SECONDS = 0.05
"""How often a thread that waits for its worker looks whether anybody still wants the answer, and
how long a grammar is compiled with the priority of the engine."""
END_SECONDS = 2.0
MIN_SECONDS = 0.5
"""A grammar that nobody wants any more may take so long: a new worker takes longer to start."""
LARGE_BYTES = 4 << 20
"""After a grammar of so many bytes freed memory is given back to the system."""
WORKER_COMMAND = (sys.executable, "-m", "lookonce.engine.process.grammar_worker")

Abandoned = Callable[[], bool]
"""Whether nobody waits for a grammar any more; asked in any thread."""
Compile = Callable[[Grammar, Abandoned], CompiledGrammar]


class LLGuidanceState:
    """The state of one sequence in its grammar; implements `types.sampling.GrammarState`.

    All sequences wait while one finds its tokens, so a state that takes too much CPU time fails.
    """

    def __init__(self, matcher: LLMatcher, limits: GrammarLimits) -> None:
        self._matcher = matcher
        self._limits = limits
        self._num_tokens = 0
        self._seconds = 0.0

    @property
    def error(self) -> str | None:
        """Why no mask can be computed any more; None while one can."""
        if self._seconds > self._limits.mask_seconds_of(self._num_tokens):
            return "finding the tokens that may come next takes too long"
        if not self._matcher.is_error():
            return None
        return self._matcher.get_error().partition("\n")[0]  # below it: all that was generated

    def fill(self, allowed: NDArray[np.uint8]) -> None:
        started = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        self._seconds += time.thread_time() - started

    def accept(self, token_id: int) -> None:
        started = time.thread_time()
        self._matcher.consume_token(token_id)
        self._num_tokens += 1
        self._seconds += time.thread_time() - started


class LLGuidanceGrammar:
    """A grammar that sequences can follow; implements `types.sampling.CompiledGrammar`."""

    def __init__(self, matcher: LLMatcher, nbytes: int, limits: GrammarLimits) -> None:
        self.nbytes = nbytes
        self._fresh = matcher
        self._limits = limits

    def start(self) -> LLGuidanceState:
        return LLGuidanceState(self._fresh.deep_copy(), self._limits)


class AbandonedError(Exception):
    """Nobody waits for this grammar any more."""


class GrammarCompiler:
    """Compiles for one tokenizer; may be used from several threads, each has its own worker."""

    def __init__(
        self,
        folder: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._limits = limits or GrammarLimits()
        self._lock = threading.Lock()
        self._loaded: _LoadedTokenizer | LookOnceError | None = None
        self._thread = threading.local()
        self._workers: set[GrammarWorker] = set()
        self._spare: Future[GrammarWorker] | None = None
        """Started beside the first worker: a tenant whose grammar comes while others' are compiled
        waits for no start of a process, nor the one after a worker that was killed."""
        self._closed = False

    def load_soon(self) -> None:
        """Load the tokenizer in a thread: of a large vocabulary that holds the interpreter's lock
        for a second, which is better over before requests come."""
        threading.Thread(target=self._try_load, name="grammar tokenizer", daemon=True).start()

    def compile(self, grammar: Grammar, abandoned: Abandoned = lambda: False) -> LLGuidanceGrammar:
        """Takes a while. Raises `BadRequestError` naming the grammar's field, `UnavailableError`
        where no worker can be had, and `AbandonedError`."""
        tokenizer = self._tokenizer()
        worker = self._worker(tokenizer)
        try:
            tried = worker.try_grammar(grammar, abandoned)
        finally:
            if worker.ended:
                self._discard(worker)
        if abandoned():
            raise AbandonedError
        build = partial(_built, tokenizer, tried)
        matcher = _at_low_priority(build) if worker.took_long else build()
        if matcher.is_error():
            raise refusal(grammar, matcher.get_error())
        if tried.nbytes > LARGE_BYTES:
            give_memory_back()
        return LLGuidanceGrammar(matcher, tried.nbytes, self._limits)

    def close(self) -> None:
        """Kill the workers; threads that wait for one get `UnavailableError`."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.kill()

    def _worker(self, tokenizer: _LoadedTokenizer) -> GrammarWorker:
        """This thread's worker, started if there is none."""
        worker: GrammarWorker | None = getattr(self._thread, "worker", None)
        if worker is not None and worker.alive:
            return worker
        if worker is not None:
            self._discard(worker)
        worker = self._taken_spare() or self._started(tokenizer)
        self._thread.worker = worker
        self._start_spare(tokenizer)
        return worker

    def _started(self, tokenizer: _LoadedTokenizer) -> GrammarWorker:
        worker = GrammarWorker(self._limits)
        with self._lock:
            closed = self._closed
            self._workers.add(worker)
        try:
            if closed:
                raise _no_worker()
            worker.configure(
                Configure(
                    tokenizer.text,
                    self._vocab_size,
                    self._eos_token_ids,
                    self._limits,
                    None if (folder := samples_folder()) is None else str(folder),
                )
            )
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _start_spare(self, tokenizer: _LoadedTokenizer) -> None:
        """Start the worker that the next thread without one takes, in a thread."""
        with self._lock:
            if self._closed or self._spare is not None:
                return
            thread = ThreadPoolExecutor(1, "grammar spare")
            with contextlib.suppress(RuntimeError):  # no thread can be had
                self._spare = thread.submit(self._started, tokenizer)
            thread.shutdown(wait=False)

    def _taken_spare(self) -> GrammarWorker | None:
        """The spare worker, which may still be starting; None where it ended or none was begun."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None or spare.exception() is not None:
            return None
        worker = spare.result()
        if worker.alive:
            return worker
        self._discard(worker)
        return None

    def _discard(self, worker: GrammarWorker) -> None:
        if getattr(self._thread, "worker", None) is worker:
            self._thread.worker = None
        with self._lock:
            self._workers.discard(worker)
        worker.stop()

    def _try_load(self) -> None:
        with contextlib.suppress(LookOnceError):  # told to the first request with a grammar
            self._tokenizer()

    def _tokenizer(self) -> _LoadedTokenizer:
        """Loaded once; another thread that needs it meanwhile waits."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            if isinstance(self._loaded, LookOnceError):
                raise self._loaded
            return self._loaded

    def _load(self) -> _LoadedTokenizer | LookOnceError:
        try:
            text = Tokenizer.load(self._folder).backend.to_str()
            return _LoadedTokenizer(text, self._vocab_size, self._eos_token_ids)
        except LookOnceError as error:
            return error
        except ValueError as error:  # a tokenizer of a kind that it does not know
            logger.warning(
                "grammars cannot be used: llguidance does not read the tokenizer: %s", error
            )
            return RequestFailedError("grammars cannot be used with this model's tokenizer")
        except Exception:
            logger.exception("grammars cannot be used: llguidance does not read the tokenizer")
            return RequestFailedError("grammars cannot be used with this model's tokenizer")


def _built(tokenizer: _LoadedTokenizer, tried: GrammarTried) -> LLMatcher:
    matcher = LLMatcher(
        tokenizer.matching, tried.source, log_level=0, limits=tokenizer.parser_limits
    )
    if not matcher.is_error():
        matcher.compute_bitmask()  # what is built lazily is so for the first token
    return matcher


def _at_low_priority(build: Callable[[], LLMatcher]) -> LLMatcher:
    """In a thread of its own, whose priority could not be raised again."""
    with ThreadPoolExecutor(1, "large grammar", initializer=_lower_priority) as thread:
        return thread.submit(build).result()


class _LoadedTokenizer:
    """A tokenizer as llguidance uses it, and as text for workers."""

    def __init__(self, text: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.text = text
        self.matching = llguidance.LLTokenizer(
            text, n_vocab=vocab_size, eos_token=eos_token_ids or None
        )
        self.parser_limits = parser_limits()


class GrammarWorker:
    """A worker process, used by one thread; it has ended after any failure."""

    def __init__(self, limits: GrammarLimits, command: Sequence[str] = WORKER_COMMAND) -> None:
        """Raises `UnavailableError` when no process can be started."""
        self._limits = limits
        self._answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        self.ended = False
        self.took_long = False
        """The last grammar took longer than most, and its thread has a low priority."""
        try:
            link, self._process = start_worker(command, stderr=subprocess.DEVNULL)
        except OSError as error:
            logger.warning("no grammar worker can be started: %s", error)
            raise _no_worker() from None
        self._link = MessageSocket(link)
        self._stop = weakref.finalize(self, _end, self._process, self._link)

    @property
    def alive(self) -> bool:
        return not self.ended and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def configure(self, configured: Configure) -> None:
        """Blocks until the worker has loaded the tokenizer. Raises `UnavailableError`."""
        self._link.settimeout(START_SECONDS)
        try:
            send(self._link, configured)
            if not isinstance(receive(self._link, self._answers), Ready):
                raise ProtocolError("the worker answers something else")
        except (OSError, ProtocolError, msgspec.MsgspecError):
            self.ended = True
            ended = how_it_ended(self._exit_status())
            logger.warning("a grammar worker did not start: it %s", ended)
            raise UnavailableError(
                f"grammars cannot be compiled now: the process for it {ended} while it started"
            ) from None
        self._link.settimeout(POLL_SECONDS)

    def try_grammar(self, grammar: Grammar, abandoned: Abandoned) -> GrammarTried:
        """Raises `BadRequestError`, `AbandonedError`, and `UnavailableError` where it took too long
        though it used little CPU time."""
        try:
            answer = self._exchange(grammar, abandoned)
        except BaseException:
            self.ended = True
            raise
        if isinstance(answer, Ready):
            self.ended = True
            raise _no_worker()
        self.ended = answer.worn
        if isinstance(answer, GrammarRefused):
            raise error_from_wire(*answer.error)
        return answer

    def _exchange(self, grammar: Grammar, abandoned: Abandoned) -> Answer:
        begun = time.monotonic()
        self.took_long = False
        try:
            self._link.settimeout(self._limits.wall_seconds)
            send(self._link, TryGrammar(grammar))
            self._link.settimeout(POLL_SECONDS)
            while True:
                try:
                    return receive(self._link, self._answers)
                except TimeoutError:
                    if not self.took_long:
                        self._lower_priority_of_thread()
                    now = time.monotonic()
                    if now > begun + MIN_SECONDS and abandoned():
                        raise AbandonedError from None
                    if now > begun + self._limits.wall_seconds:
                        raise
        except TimeoutError:
            raise UnavailableError(
                f"{grammar.param}: the server had no time to compile the grammar"
            ) from None
        except (OSError, ProtocolError, msgspec.MsgspecError):
            raise self._why_it_ended(grammar) from None

    def _lower_priority_of_thread(self) -> None:
        """That of whatever thread of the worker compiles, which is not its first one (Linux)."""
        self.took_long = True
        with contextlib.suppress(OSError):  # it has just ended, or there is no /proc
            for thread in map(int, os.listdir(f"/proc/{self.pid}/task")):
                if thread != self.pid:
                    os.setpriority(os.PRIO_PROCESS, thread, NICENESS)

    def _why_it_ended(self, grammar: Grammar) -> LookOnceError:
        match self._exit_status():
            case code if code == -signal.SIGPROF:
                seconds = self._limits.cpu_seconds
                why = f"too complex: it takes more than {seconds:g} s of CPU time to compile"
            case code if code == -signal.SIGABRT:
                megabytes = self._limits.memory_bytes >> 20
                why = f"too complex: it takes more than {megabytes} MiB of memory to compile"
            case None | -9:  # SIGKILL: by somebody else, such as the system, short of memory
                return UnavailableError(
                    f"{grammar.param}: the process that compiled the grammar was killed"
                )
            case _:
                why = "it cannot be compiled: the compiler crashed"
        logger.warning("a grammar worker ended (%s): %s", self._process.returncode, why)
        return refusal(grammar, why)

    def _exit_status(self) -> int | None:
        """Of the process, which is expected to end; None where it goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        return self._process.returncode

    def kill(self) -> None:
        """End the process, from any thread; the thread that waits for it sees the link close."""
        self._process.kill()

    def stop(self) -> None:
        """End the process and free its resources."""
        self.ended = True
        self._stop()


def _end(process: subprocess.Popen[bytes], link: MessageSocket) -> None:
    process.kill()
    link.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


def _no_worker() -> UnavailableError:
    return UnavailableError("grammars cannot be compiled now: the server is short of resources")


# --- cache ----------------------------------------------------------------------------------------

Key = tuple[str, bytes]
"""(tenant, digest of a grammar and its fields)."""


def grammar_key(tenant: str, grammar: Grammar) -> Key:
    """Each tenant has its own: no tenant learns from the time what others have asked for."""
    return tenant, hashlib.blake2b(msgspec.msgpack.encode(grammar), digest_size=32).digest()


class GrammarCache:
    """Compiled grammars, and refusals, within a budget of bytes that tenants share as `TenantLRU`
    says. One that is larger than the budget is not held, and drops nothing."""

    def __init__(self, capacity_bytes: int) -> None:
        self._held = TenantLRU[bytes, CompiledGrammar | LookOnceError](
            capacity_bytes, _cached_bytes
        )

    @property
    def nbytes(self) -> int:
        return self._held.cost

    def get(self, key: Key) -> CompiledGrammar | LookOnceError | None:
        return self._held.get(*key)

    def put(self, key: Key, value: CompiledGrammar | LookOnceError) -> None:
        """What is held already stays."""
        if self.get(key) is None:
            self._held.put(*key, value)


def _cached_bytes(value: CompiledGrammar | LookOnceError) -> int:
    return ENTRY_BYTES + (0 if isinstance(value, LookOnceError) else value.nbytes)


# --- pool -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompiledRequest:
    """A request whose grammar is compiled and set, or `error` where it could not be."""

    request: Request
    complete: bool
    """As given to `begin`."""
    error: LookOnceError | None = None


@dataclass(slots=True, eq=False)
class _Job:
    """One grammar that requests of one tenant wait for."""

    key: Key
    grammar: Grammar
    compile: Compile
    requests: dict[str, tuple[Request, bool]] = field(default_factory=dict)
    """Request id → the request, and `complete`."""

    def abandoned(self) -> bool:
        return not self.requests


class GrammarCompilerPool:
    """Compiles the grammars of requests in threads; all else happens in the calling thread.

    Requests of a tenant with the same grammar wait for one job. Tenants take turns by the bytes of
    their grammars (`FairQueue`), and none has all workers.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        *,
        num_workers: int = WORKERS,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """`wake` is called, from any thread, when `take` has something to return."""
        self._wake = wake
        self._num_workers = num_workers
        self._changed = threading.Condition()
        """Guards all below."""
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._queue: FairQueue[_Job] = FairQueue(QUANTUM)
        self._running: Counter[str] = Counter()
        """Jobs in the threads, by tenant."""
        self._jobs: dict[Key, _Job] = {}
        self._waiting: dict[str, Request] = {}
        """The requests that `take` has not returned."""
        self._job_of: dict[str, _Job] = {}
        """Request id → the job it waits for."""
        self._done: deque[CompiledRequest] = deque()
        self._cache = GrammarCache(cache_bytes)
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(
        self, request: Request, grammar: Grammar, compile: Compile, complete: bool, tenant: str = ""
    ) -> None:
        key = grammar_key(tenant, grammar)
        with self._changed:
            self._waiting[request.request_id] = request
            known = self._cache.get(key)
            if known is not None:
                self._settle(request, complete, known)
                return
            job = self._jobs.get(key)
            if job is None and self._num_jobs(tenant) >= MAX_WAITING:
                error = QueueFullError(
                    f"{MAX_WAITING} grammars are waiting to be compiled, the most that may"
                )
                self._settle(request, complete, error)
                return
            if job is None:
                if not self._has_thread_for_one_more():
                    self._settle(request, complete, _no_worker())
                    return
                job = self._jobs[key] = _Job(key, grammar, compile)
                self._queue.push(tenant, job, BASE_COST + grammar.nbytes, request.weight)
                self._changed.notify()
            job.requests[request.request_id] = request, complete
            self._job_of[request.request_id] = job

    def cancel(self, request_id: str) -> bool:
        """Forget a request; false where it is not waiting.

        A grammar that nobody else waits for is not compiled, or no longer.
        """
        with self._changed:
            job = self._job_of.pop(request_id, None)
            if job is not None:
                del job.requests[request_id]
                if not job.requests and self._jobs.get(job.key) is job:
                    del self._jobs[job.key]
                    self._queue.remove(job.key[0], job)
            return self._waiting.pop(request_id, None) is not None

    def take(self) -> list[CompiledRequest]:
        """The requests whose grammar is done since the last call, without the cancelled ones."""
        taken = []
        with self._changed:
            while self._done:
                finished = self._done.popleft()
                request_id = finished.request.request_id
                if self._waiting.get(request_id) is finished.request:
                    del self._waiting[request_id]
                    taken.append(finished)
        return taken

    def close(self) -> None:
        """End the threads once they have finished their job; waiting jobs are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _num_jobs(self, tenant: str) -> int:
        return sum(owner == tenant for owner, _ in self._jobs)

    def _has_thread_for_one_more(self) -> bool:
        """Start another thread if all are busy; False where there is none and none can be had."""
        if self._num_idle <= len(self._queue) and len(self._threads) < self._num_workers:
            name = f"grammar-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the input thread, which calls this, must not end with it
                logger.warning("no thread for compiling grammars can be started")
            else:
                self._threads.append(thread)
        return bool(self._threads)

    def _settle(
        self, request: Request, complete: bool, result: CompiledGrammar | LookOnceError
    ) -> None:
        error = result if isinstance(result, LookOnceError) else None
        if not isinstance(result, LookOnceError):
            request.grammar = result
        self._done.append(CompiledRequest(request, complete, error))

    # --- in the pool's threads ----------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next()) is not None:
            current_request_id.set(client_request_id(next(iter(job.requests), "")))
            result = _result_of(job)
            with self._changed:
                self._finish(job, result)
            self._wake()
            del job, result

    def _next(self) -> _Job | None:
        """Waits for a job that this thread may begin; None when the pool is closed."""
        with self._changed:
            while not self._closed:
                found = self._queue.pop(self._may_begin)
                if found is not None:
                    tenant, job = found
                    self._running[tenant] += 1
                    return job
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
            return None

    def _may_begin(self, tenant: str) -> bool:
        return self._running[tenant] < max(1, self._num_workers - 1)

    def _finish(self, job: _Job, result: CompiledGrammar | LookOnceError | None) -> None:
        tenant = job.key[0]
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._changed.notify_all()  # the tenant may begin another job, in any thread
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
        if result is None:
            return
        if not isinstance(result, LookOnceError) or isinstance(result, BadRequestError):
            self._cache.put(job.key, result)
        for request_id, (request, complete) in job.requests.items():
            del self._job_of[request_id]
            self._settle(request, complete, result)
        job.requests.clear()


def _result_of(job: _Job) -> CompiledGrammar | LookOnceError | None:
    """None for an abandoned job."""
    try:
        return job.compile(job.grammar, job.abandoned)
    except AbandonedError:
        return None
    except LookOnceError as error:
        return error.with_traceback(None)
    except Exception:
        logger.exception("a grammar could not be compiled")
        return RequestFailedError("the grammar could not be compiled")


def _lower_priority() -> None:
    """Let the calling thread run after the step thread where both want the same core (Linux)."""
    if Path("/proc/self/task").is_dir():
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
