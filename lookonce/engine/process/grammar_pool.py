"""Where requests wait for their grammar: compiled beside both threads, so that neither waits."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from lookonce.core.request import Request
from lookonce.errors import LookOnceError, RequestFailedError
from lookonce.types.grammar import CompiledGrammar, Grammar

logger = logging.getLogger(__name__)

WORKERS = 2
"""A grammar that takes long leaves a worker to the others."""

Compile = Callable[[Grammar], CompiledGrammar]


@dataclass(frozen=True, slots=True)
class CompiledRequest:
    """A request that waits no longer: with its grammar in it, or with what is wrong with it."""

    request: Request
    complete: bool
    """As it was given to `begin`."""
    error: LookOnceError | None = None


class GrammarCompilerPool:
    """All but the compiling happens in the thread that calls."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when there is something to `take`."""
        self._wake = wake
        self._workers: ThreadPoolExecutor | None = None
        self._waiting: dict[str, Request] = {}
        self._done: deque[CompiledRequest] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, request: Request, grammar: Grammar, compile: Compile, complete: bool) -> None:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(WORKERS, "grammar")
        self._waiting[request.request_id] = request
        work = self._workers.submit(compile, grammar)
        work.add_done_callback(lambda work: self._finish(request, complete, work))

    def cancel(self, request_id: str) -> bool:
        """Forget a request; whether it was here."""
        return self._waiting.pop(request_id, None) is not None

    def take(self) -> list[CompiledRequest]:
        """Those whose wait has ended, but not the cancelled ones."""
        taken = []
        while self._done:
            finished = self._done.popleft()
            request_id = finished.request.request_id
            if self._waiting.get(request_id) is finished.request:
                del self._waiting[request_id]
                taken.append(finished)
        return taken

    def _finish(self, request: Request, complete: bool, work: Future[CompiledGrammar]) -> None:
        """In a worker's thread."""
        error = work.exception()
        if error is None:
            request.grammar = work.result()
        self._done.append(CompiledRequest(request, complete, _known(error)))
        self._wake()


def _known(error: BaseException | None) -> LookOnceError | None:
    if error is None or isinstance(error, LookOnceError):
        return error
    logger.error("a grammar could not be compiled", exc_info=error)
    return RequestFailedError("the grammar could not be compiled")
