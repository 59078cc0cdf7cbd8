"""Grammars of structured outputs, compiled to masks of the tokens that may come next.

llguidance computes the masks lazily, token by token: compiling takes milliseconds, and every later
step is bounded by the library's own limits. It needs nothing but its 3 MB wheel, and reads Hugging
Face's fast tokenizers as they are.

Requests wait for their grammar in `GrammarCompilerPool`, in neither the input nor the step thread.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from lookonce.core.request import Request
from lookonce.errors import BadRequestError, LookOnceError, RequestFailedError
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.sampling import JSON_SPACES, CompiledGrammar, Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


logger = logging.getLogger(__name__)

WORKERS = 2
"""Two, so that a grammar that takes long leaves a thread to the others."""
Compile = Callable[[Grammar], CompiledGrammar]
MAX_KEPT = 128
"""Compiled grammars kept for later requests, least recently used first out."""
MAX_GRAMMAR = 100_000
MAX_MESSAGE = 400
"""Characters of the library's explanation that an error message holds."""
NOTHING_CONFORMS = "NoExtensionBias"
"""How llguidance begins its error for a grammar that no text conforms to."""


class LLGuidanceState:
    """The state of one sequence in its grammar; implements `types.sampling.GrammarState`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str | None:
        """Why no mask can be computed any more; None while one can."""
        if not self._matcher.is_error():
            return None
        return self._matcher.get_error().partition("\n")[0]  # below it: all that was generated

    def fill(self, allowed: NDArray[np.uint8]) -> None:
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class LLGuidanceGrammar:
    """A grammar that sequences can follow; implements `types.sampling.CompiledGrammar`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._fresh = matcher

    def start(self) -> LLGuidanceState:
        return LLGuidanceState(self._fresh.deep_copy())


class GrammarCompiler:
    """Compiles for one tokenizer; may be used from several threads."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], LLGuidanceGrammar] = OrderedDict()

    def compile(self, grammar: Grammar) -> LLGuidanceGrammar:
        """Takes a while. Raises `BadRequestError` naming the grammar's field."""
        name = grammar.kind, grammar.source
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        compiled = self._compile(grammar)
        with self._lock:
            self._kept[name] = compiled
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> LLGuidanceGrammar:
        try:
            return self._compile_whole(grammar)
        except BadRequestError:
            for part in grammar.parts:
                self._compile_whole(part)
            raise

    def _compile_whole(self, grammar: Grammar) -> LLGuidanceGrammar:
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0)
        except ValueError as error:
            raise _refusal(grammar, str(error)) from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is built lazily is so for the first token
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        return LLGuidanceGrammar(matcher)

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        """Loaded with the first grammar: most servers see none."""
        backend = Tokenizer.load(self._folder).backend
        return llguidance.LLTokenizer(
            backend.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
        )


@dataclass(frozen=True, slots=True)
class CompiledRequest:
    """A request whose grammar is compiled and set, or `error` where it could not be."""

    request: Request
    complete: bool
    """As given to `begin`."""
    error: LookOnceError | None = None


class GrammarCompilerPool:
    """Compiles the grammars of requests in threads; all else happens in the calling thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when `take` has something to return."""
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
        """Forget a request; false where it is not waiting."""
        return self._waiting.pop(request_id, None) is not None

    def take(self) -> list[CompiledRequest]:
        """The requests whose grammar is done since the last call, without the cancelled ones."""
        taken = []
        while self._done:
            finished = self._done.popleft()
            request_id = finished.request.request_id
            if self._waiting.get(request_id) is finished.request:
                del self._waiting[request_id]
                taken.append(finished)
        return taken

    def _finish(self, request: Request, complete: bool, work: Future[CompiledGrammar]) -> None:
        """Called in a worker's thread."""
        error = work.exception()
        if error is None:
            request.grammar = work.result()
        self._done.append(CompiledRequest(request, complete, _known(error)))
        self._wake()


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            overrides: JsonCompileOptions = {"whitespace_pattern": JSON_SPACES}
            return LLMatcher.grammar_from_json_schema(grammar.source, overrides=overrides)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            choices = json.loads(grammar.source)
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, choices))}")
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark_of(grammar))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)


def _lark_of(grammar: Grammar) -> str:
    """A client's grammar, in Lark or GBNF, as Lark."""
    if len(grammar.source) > MAX_GRAMMAR:
        raise _refusal(grammar, f"a grammar has at most {MAX_GRAMMAR} characters")
    try:
        return any_to_lark(grammar.source)
    except Exception as error:  # noqa: BLE001 - the library raises `Exception` itself
        raise _refusal(grammar, str(error)) from None


def _refusal(grammar: Grammar, reason: str) -> BadRequestError:
    """The library's explanation in one line: it may print all of a long grammar, and its state."""
    if reason.startswith(NOTHING_CONFORMS):
        reason = "nothing can conform to it"
    reason, _, _ = reason.partition("<state>")
    if grammar.kind == "lark":
        reason, _, _ = reason.partition("\n")  # below it: what the client never wrote
    words = " ".join(reason.split())
    if len(words) > MAX_MESSAGE:
        half = MAX_MESSAGE // 2
        words = f"{words[:half]} … {words[-half:]}"
    return BadRequestError(f"{grammar.param}: {words}", param=grammar.param, code="invalid_grammar")


def _known(error: BaseException | None) -> LookOnceError | None:
    if error is None or isinstance(error, LookOnceError):
        return error
    logger.error("a grammar could not be compiled", exc_info=error)
    return RequestFailedError("the grammar could not be compiled")
