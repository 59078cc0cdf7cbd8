"""A worker process that tries grammars out before the engine compiles them.

    python -m lookonce.engine.process.grammar_worker FD

A client's grammar may take any time and memory to compile, and llguidance cannot be interrupted. So
each grammar is first compiled here, under limits of CPU time and memory that end the process, and a
few tokens are drawn from it. What the engine gets back is text: the source in llguidance's own
form, and what the compiled grammar weighs. llguidance can neither save nor load compiled grammars,
so the engine compiles the source again, in a thread, knowing what it costs.

A message is a 4-byte length and msgpack, on a unix socket. The worker ends when the engine closes
its end.

Each grammar is tried in a thread of its own, which begins with the priority of the engine; the
engine lowers that of a thread that takes longer than most. A thread's priority cannot be raised
again, so the next grammar gets another thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import llguidance
import msgspec
import numpy as np
from llguidance import LLMatcher
from llguidance._lib import LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from lookonce.errors import BadRequestError, ProtocolError, WireError, error_to_wire
from lookonce.ipc.framing import MessageSocket
from lookonce.types.memory import (
    address_space_bytes,
    allocated_bytes,
    give_memory_back,
    resident_bytes,
    use_one_arena,
)
from lookonce.types.sampling import JSON_SPACES, Grammar
from lookonce.types.stack_samples import listen_for_samples

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

NICENESS = 10
"""Of grammars that take long: the engine and the API processes share the cores."""
MAX_REASON = 400
"""Characters of the library's explanation that an error message holds."""
NOTHING_CONFORMS = "NoExtensionBias"
"""How llguidance begins its error for a grammar that no text conforms to."""
TRIAL_TOKENS = 48
KEPT_BYTES = 32 << 20
"""Memory a worker may keep after a job, for lack of a way to free it; with more it is replaced."""
M = TypeVar("M")
T = TypeVar("T")


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one grammar may cost. The step thread computes masks, so its limits are the tightest."""

    cpu_seconds: float = 4.0
    """Of compiling and trying out."""
    wall_seconds: float = 30.0
    """The same on a machine that has too much to do."""
    memory_bytes: int = 512 << 20
    """Address space that a worker may take while it compiles."""
    compiled_bytes: int = 32 << 20
    """Memory of the compiled grammar."""
    mask_seconds: float = 0.25
    """CPU time that a sequence's masks may take beyond `mask_seconds_per_token`."""
    mask_seconds_per_token: float = 0.005

    def mask_seconds_of(self, num_tokens: int) -> float:
        """Most CPU time of the masks of the first `num_tokens` tokens of a sequence."""
        return self.mask_seconds + num_tokens * self.mask_seconds_per_token


class Configure(msgspec.Struct, frozen=True, tag="configure", array_like=True):
    """The first message to a worker; it answers `Ready`."""

    tokenizer: str
    """As `tokenizer.json`."""
    vocab_size: int
    eos_token_ids: list[int]
    limits: GrammarLimits
    samples_folder: str | None = None
    """Where the worker listens for those who profile it."""


class TryGrammar(msgspec.Struct, frozen=True, tag="try", array_like=True):
    """One grammar; answered by `GrammarTried` or `GrammarRefused`."""

    grammar: Grammar


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The worker takes grammars."""


class GrammarTried(msgspec.Struct, frozen=True, tag="tried", array_like=True):
    source: str
    """What `LLMatcher` compiles."""
    nbytes: int
    """Memory of the compiled grammar."""
    worn: bool = False
    """The worker holds more memory than it should: replace it."""


class GrammarRefused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    error: WireError
    """`errors.error_to_wire`."""
    worn: bool = False


Job = Configure | TryGrammar
Answer = Ready | GrammarTried | GrammarRefused


def send(link: MessageSocket, message: msgspec.Struct) -> None:
    """Raises `OSError` when the other side has ended."""
    link.send([msgspec.msgpack.encode(message)])


def receive(link: MessageSocket, decoder: msgspec.msgpack.Decoder[M]) -> M:
    """Raises `OSError` or `ProtocolError` when the other side has ended or sends something else.

    After a `TimeoutError` it may be called again.
    """
    (head, *_), _ = link.receive()
    return decoder.decode(head)


# --- compiling ------------------------------------------------------------------------------------


def parser_limits() -> LLParserLimits:
    """llguidance's own limits, for the worker and the engine alike.

    The defaults allow 250,000 lexer states of 1 to 2 kB for each sequence.
    """
    return LLParserLimits(step_lexer_fuel=100_000, step_max_items=50_000, max_lexer_states=20_000)


def llguidance_source(grammar: Grammar) -> str:
    """What `LLMatcher` takes. Raises `BadRequestError`."""
    source = _answer_source(grammar)
    if not grammar.before:
        return source
    answer = {"lark_grammar": source}  # of Lark the library's own form is the Lark itself
    if grammar.kind in ("json_schema", "regex"):
        (answer,) = json.loads(source)["grammars"]
    parts = [{"lark_grammar": grammar.before}, {**answer, "name": "answer"}]
    return json.dumps({"grammars": parts})


def _answer_source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            overrides: JsonCompileOptions = {"whitespace_pattern": JSON_SPACES}
            return LLMatcher.grammar_from_json_schema(grammar.source, overrides=overrides)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            # One terminal: as alternatives of a rule, more than 2,000 exceed a limit of the parser.
            choices = " | ".join(map(json.dumps, json.loads(grammar.source)))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark_of(grammar))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)


def _lark_of(grammar: Grammar) -> str:
    """A client's grammar, in Lark or GBNF, as Lark."""
    try:
        return any_to_lark(grammar.source)
    except Exception as error:  # noqa: BLE001 - the library raises `Exception` itself
        raise refusal(grammar, str(error)) from None


def refusal(grammar: Grammar, reason: str) -> BadRequestError:
    """The library's explanation in one line: it may print all of a long grammar, and its state."""
    if reason.startswith(NOTHING_CONFORMS):
        reason = "nothing can conform to it"
    reason, _, _ = reason.partition("<state>")
    if grammar.kind == "lark":
        reason, _, _ = reason.partition("\n")  # below it: what the client never wrote
    words = " ".join(reason.split())
    if len(words) > MAX_REASON:
        half = MAX_REASON // 2
        words = f"{words[:half]} … {words[-half:]}"
    return BadRequestError(f"{grammar.param}: {words}", param=grammar.param, code="invalid_grammar")


class GrammarTrial:
    """Compiles grammars for one tokenizer, weighs them, and draws tokens from them."""

    def __init__(self, configured: Configure) -> None:
        self._limits = configured.limits
        self._vocab_size = configured.vocab_size
        self._eos_token_ids = configured.eos_token_ids
        self._tokenizer = llguidance.LLTokenizer(
            configured.tokenizer,
            n_vocab=configured.vocab_size,
            eos_token=configured.eos_token_ids or None,
        )
        self._parser_limits = parser_limits()

    def run(self, grammar: Grammar) -> GrammarTried:
        """Raises `BadRequestError` naming the grammar's field, or that of the part at fault."""
        if grammar.before:
            # What comes before would hide how slow it is, and be in the library's explanation.
            self.run(msgspec.structs.replace(grammar, before=""))
        try:
            return self._run_whole(grammar)
        except BadRequestError:
            for part in grammar.parts:
                self._run_whole(part)
            raise

    def _run_whole(self, grammar: Grammar) -> GrammarTried:
        try:
            source = llguidance_source(grammar)
        except ValueError as error:
            raise refusal(grammar, str(error)) from None
        before = allocated_bytes()
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._parser_limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is built lazily is so for the first token
        if matcher.is_error():
            raise refusal(grammar, matcher.get_error())
        nbytes = max(len(source), allocated_bytes() - before)
        if nbytes > self._limits.compiled_bytes:
            raise refusal(
                grammar,
                f"too large: compiled it takes {nbytes >> 20} MiB of memory, "
                f"{self._limits.compiled_bytes >> 20} are allowed",
            )
        self._draw(grammar, matcher.deep_copy())
        return GrammarTried(source, nbytes)

    def _draw(self, grammar: Grammar, matcher: LLMatcher) -> None:
        """Follow the masks for a few tokens: what is slow in the engine's steps mostly is so here.

        Only the time counts. A grammar that fails on the way fails in the engine, if ever, as the
        error of the request that got there.
        """
        draw = random.Random(0)
        started = time.thread_time()
        for number in range(TRIAL_TOKENS):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if time.thread_time() - started > self._limits.mask_seconds_of(number):
                raise refusal(
                    grammar, "too complex: finding the tokens that may come next takes too long"
                )
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self._vocab_size])
            allowed = allowed[~np.isin(allowed, self._eos_token_ids)]
            if not len(allowed) or not matcher.consume_token(int(draw.choice(allowed))):
                return


# --- memory ---------------------------------------------------------------------------------------


def _limit_memory(more: int) -> None:
    """Let this process take so many bytes of address space beyond what it has."""
    size = address_space_bytes()
    if size:
        resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))


# --- the process ----------------------------------------------------------------------------------


def serve(link: MessageSocket) -> None:
    """Answer until the engine closes its end."""
    jobs = msgspec.msgpack.Decoder(Job)
    configured = receive(link, jobs)
    if not isinstance(configured, Configure):
        raise ProtocolError("the first message is no configuration")
    if configured.samples_folder is not None:
        listen_for_samples(Path(configured.samples_folder), "grammar worker")
    trial = GrammarTrial(configured)
    base = resident_bytes()
    use_one_arena()
    _limit_memory(configured.limits.memory_bytes)
    send(link, Ready())
    while True:
        job = receive(link, jobs)
        if isinstance(job, TryGrammar):
            answer = _in_own_thread(partial(_answer, trial, job.grammar, configured.limits))
            del job
            give_memory_back()
            worn = resident_bytes() > base + KEPT_BYTES
            send(link, msgspec.structs.replace(answer, worn=worn))


def _in_own_thread(work: Callable[[], T]) -> T:
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  it is the caller's
            result.set_exception(error)

    thread = threading.Thread(target=run, name="grammar")
    thread.start()
    thread.join()
    return result.result()


def _answer(
    trial: GrammarTrial, grammar: Grammar, limits: GrammarLimits
) -> GrammarTried | GrammarRefused:
    """SIGPROF ends the process when the CPU time is used up; nothing else can stop llguidance."""
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    try:
        return trial.run(grammar)
    except BadRequestError as error:
        return GrammarRefused(error_to_wire(error))
    except MemoryError:
        os.abort()  # as Rust does
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ProtocolError):
        serve(MessageSocket(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
