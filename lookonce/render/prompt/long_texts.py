"""Long texts: refused where they certainly have too many tokens, and tokenized in turn by tenant.

Tokenizing does 1 to 5 MB a second. It runs in threads of low priority that do not hold the
interpreter's lock (`Tokenizer.encode`); one tenant never has all of them. What does hold the lock
there, large chats and bodies, has a share of the time while another tenant asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from lookonce.errors import QueueFullError
from lookonce.render.prompt.tokenizer import BYTE_ALPHABET, Tokenizer
from lookonce.types.fair_queue import FairQueue, TenantWeights
from lookonce.types.last_asked import LastAsked
from lookonce.types.scheduling import run_behind_others

THREADS = 2
MAX_WAITING = 64
"""Long texts and large bodies of one tenant that may wait; more are refused with 429."""
QUANTUM = 64 * 1024
"""Characters that a tenant may have tokenized before the next one's turn."""
NICENESS = 5
LOCK_SHARE = 0.1
"""Of the time: what a tenant's large chats and bodies may compute while another tenant asks. Each
millisecond that they hold the interpreter's lock is one that everybody else waits."""
LOCK_BURST_SECONDS = 0.05
"""They may compute so long beyond their share."""
LOOK_SECONDS = 0.25
"""How often who rests looks whether anybody else still asks."""
MOST_CHARGED_SECONDS = 0.2
"""For one part of a request: the next one waits for seconds at most."""
MAX_DEBTS = 1024
"""Tenants of which it is known how long they computed."""
SLICE_BYTES = 64 * 1024
ASCII = 128
WHITESPACE = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"
KEEPING_NORMALIZERS = frozenset({"Prepend", "NFC", "NFD", "NFKC", "NFKD"})
"""They leave an ASCII character that stands before another one as it is."""
KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace"})
"""They divide a text and drop nothing of it."""
T = TypeVar("T")


class TokenCountBound:
    """How many tokens a text has at least, without tokenizing it.

    Wherever two neighbouring bytes of the text occur side by side in no token of the vocabulary, a
    token ends: `A` and a space, say. Counting those places gives a bound that is exact for the
    texts that tokenize worst, and about three quarters of the truth for prose. It holds for
    tokenizers that drop nothing of a text (`is_known`), by whatever way they merge.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def at_least(self, text: str, enough: int) -> int:
        """A number of tokens that the text has for certain; counting stops at `enough`."""
        if not self.is_known:
            return 0
        data = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        count = 1 if len(data) else 0
        for start in range(0, len(data), SLICE_BYTES):
            count += self._num_ends(data[start : start + SLICE_BYTES + 2])
            if count >= enough:
                break
        return count

    def _num_ends(self, part: NDArray[np.uint8]) -> int:
        """Ends of tokens after the first `SLICE_BYTES` bytes of a part with two more bytes, or
        fewer at the end of the text."""
        pairs = (part[:-1].astype(np.uint16) << 8) | part[1:]
        ends = self._ends[pairs]
        if self._normalizes:  # a character may combine with what comes after it
            alone = np.ones(len(ends), bool)
            alone[:-1] = part[2:] < ASCII
            ends &= alone & (part[:-1] < ASCII) & (part[1:] < ASCII)
        return int(np.count_nonzero(ends[:SLICE_BYTES]))

    @cached_property
    def is_known(self) -> bool:
        """Whether every token stands for the characters that it is written with."""
        backend = self._tokenizer.backend
        model = backend.model
        affixes = ("continuing_subword_prefix", "end_of_word_suffix")
        return bool(
            type(model).__name__ in ("BPE", "Unigram")
            and not any(getattr(model, name, None) for name in affixes)
            and all(map(_keeps_characters, _stages(backend.normalizer)))
            and all(map(_keeps_pieces, _stages(backend.pre_tokenizer)))
        )

    @cached_property
    def _normalizes(self) -> bool:
        kinds = {stage["type"] for stage in _stages(self._tokenizer.backend.normalizer)}
        return bool(kinds & {"NFC", "NFD", "NFKC", "NFKD"})

    @cached_property
    def _ends(self) -> NDArray[np.bool_]:
        """[65536]: whether a token ends between two bytes, `first << 8 | second`."""
        backend = self._tokenizer.backend
        byte_level = any(s["type"] == "ByteLevel" for s in _stages(backend.pre_tokenizer))
        inside = np.zeros((256, 256), bool)
        alone = np.zeros(256, bool)
        added = self._tokenizer.added_tokens
        learned = [
            token
            for token, number in backend.get_vocab(with_added_tokens=True).items()
            if number not in added
        ]
        _note_tokens(learned, inside, alone, byte_level=byte_level)
        _note_tokens(list(added.values()), inside, np.zeros(256, bool), byte_level=False)
        self._note_stripped(inside)
        if not byte_level:
            alone[ASCII:] = False  # unknown characters may become one token together
        ends: NDArray[np.bool_] = alone[:, None] & alone[None, :] & ~inside
        return ends.reshape(-1)

    def _note_stripped(self, inside: NDArray[np.bool_]) -> None:
        """Added tokens may take in the white space beside them."""
        space = np.zeros(256, bool)
        space[list(WHITESPACE)] = True
        space[ASCII:] = True
        for token in self._tokenizer.backend.get_added_tokens_decoder().values():
            content = token.content.encode()
            if content and (token.lstrip or token.rstrip):
                inside |= space[:, None] & space[None, :]
                inside[space, content[0]] = True
                inside[content[-1], space] = True


def _stages(component: Any) -> list[dict[str, Any]]:
    """The stages of a normalizer or pre-tokenizer as they are written in tokenizer.json."""
    if component is None:
        return []
    return _flat(json.loads(component.__getstate__()))


def _flat(stage: dict[str, Any]) -> list[dict[str, Any]]:
    inner = stage.get("normalizers") or stage.get("pretokenizers")
    if stage["type"] != "Sequence":
        return [stage]
    return [each for part in inner or () for each in _flat(part)]


def _keeps_characters(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        written = (normalizer["pattern"], normalizer["content"])
        return written == ({"String": " "}, "▁")
    return normalizer["type"] in KEEPING_NORMALIZERS


def _keeps_pieces(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in KEEPING_PRE_TOKENIZERS


def _note_tokens(
    tokens: list[str], inside: NDArray[np.bool_], alone: NDArray[np.bool_], *, byte_level: bool
) -> None:
    """Note which bytes are tokens alone, and which stand side by side in a token."""
    if byte_level:
        codes = np.full(0x110000, 256, np.uint16)  # 256: no byte
        for character, byte in BYTE_ALPHABET.items():
            codes[ord(character)] = byte
        written = np.frombuffer("\n".join(["", *tokens, ""]).encode("utf-32-le"), np.uint32)
        data = codes[written]
    else:
        # NUL divides tokens; side by side with one in a text, nothing is counted.
        text = "\0".join(["", *tokens, ""]).replace("▁", " ")
        data = np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint16)
        inside[0, :] = inside[:, 0] = True
        data[data == 0] = 256
    first, second = data[:-1], data[1:]
    both = (first < 256) & (second < 256)
    inside[first[both], second[both]] = True
    single = (data[1:-1] < 256) & (data[:-2] == 256) & (data[2:] == 256)
    alone[data[1:-1][single]] = True


# --- turns ----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Turn(Generic[T]):
    work: Callable[[], T]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[T]
    holds_lock: bool
    seconds: float = 0.0
    """CPU time that it took."""

    def run(self) -> T:
        began = time.thread_time()
        try:
            return self.work()
        finally:
            self.seconds = time.thread_time() - began


class LongTextThreads:
    """Threads for long texts, and for large chats and bodies; used on an event loop.

    What holds the interpreter's lock is accounted by tenant in a token bucket: it fills by
    `LOCK_SHARE` of the time, up to `LOCK_BURST_SECONDS`. While it is empty and another tenant asks
    for something small, no large chat or body of the tenant begins; those that have begun go on.
    """

    def __init__(
        self,
        num_threads: int = THREADS,
        max_waiting: int = MAX_WAITING,
        weights: TenantWeights | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._beginning: FairQueue[_Turn[Any]] = FairQueue(QUANTUM, weights)
        """First parts of large chats and bodies."""
        self._going_on: FairQueue[_Turn[Any]] = FairQueue(QUANTUM, weights)
        """All else."""
        self._queues = [self._beginning, self._going_on]
        """The one whose turn it is first."""
        self._waiting: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._last_asked: LastAsked[str] = LastAsked()
        self._debts: dict[str, tuple[float, float]] = {}
        """By tenant: CPU seconds with the lock that its share has not paid yet, and as of when."""
        self._resting: set[str] = set()
        """Tenants of which nothing large may begin."""
        self._threads = ThreadPoolExecutor(
            num_threads, thread_name_prefix="long text", initializer=_lower_priority
        )

    def note_asked(self, tenant: str) -> None:
        """The tenant has asked for something that is not large."""
        self._last_asked.note(tenant, self._clock())

    async def run(
        self,
        work: Callable[[], T],
        tenant: str,
        num_characters: int,
        *,
        holds_lock: bool = False,
        begins: bool = False,
    ) -> T:
        """The result of `work`, when it is this tenant's turn. Raises `QueueFullError`.

        `holds_lock`: while it computes, no other thread of this process runs Python. `begins`: it
        is the first part of what a request makes of something large. A caller that is cancelled
        leaves the queue; work that has begun is finished.
        """
        if self._waiting[tenant] >= self._max_waiting:
            raise QueueFullError(
                f"{self._waiting[tenant]} of your long texts and large bodies are waiting, the "
                "most that may"
            )
        loop = asyncio.get_running_loop()
        queue = self._beginning if begins else self._going_on
        turn = _Turn(work, loop, loop.create_future(), holds_lock)
        queue.push(tenant, turn, num_characters)
        self._waiting[tenant] += 1
        self._begin()
        try:
            return cast(T, await turn.result)
        except asyncio.CancelledError:
            if queue.remove(tenant, turn):
                self._waiting[tenant] -= 1
            raise

    def _begin(self) -> None:
        while self._running.total() < self._num_threads:
            found = self._next()
            if found is None:
                return
            tenant, turn = found
            self._waiting[tenant] -= 1
            self._running[tenant] += 1
            self._threads.submit(turn.run).add_done_callback(self._reporter(tenant, turn))

    def _next(self) -> tuple[str, _Turn[Any]] | None:
        """Of both queues in turn, as far as they have what may begin."""
        for queue in self._queues:
            found = queue.pop(self._may_begin if queue is self._beginning else self._may_run)
            if found is not None:
                self._queues.reverse()
                return found
        return None

    def _may_begin(self, tenant: str) -> bool:
        return tenant not in self._resting and self._may_run(tenant)

    def _may_run(self, tenant: str) -> bool:
        return self._running[tenant] < max(1, self._num_threads - 1)

    def _reporter(self, tenant: str, turn: _Turn[T]) -> Callable[[Future[T]], None]:
        def report(done: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
                turn.loop.call_soon_threadsafe(self._finish, tenant, turn, done)

        return report

    def _finish(self, tenant: str, turn: _Turn[T], done: Future[T]) -> None:
        self._running[tenant] -= 1
        if turn.holds_lock:
            self._account(tenant, turn)
        if not turn.result.done():
            error = done.exception()
            if error is None:
                turn.result.set_result(done.result())
            else:
                turn.result.set_exception(error)
        self._begin()

    def _account(self, tenant: str, turn: _Turn[Any]) -> None:
        now = self._clock()
        owed, since = self._debts.pop(tenant, (0.0, now))
        owed = max(0.0, owed - LOCK_SHARE * (now - since))
        # What was computed while nobody else asked is not paid for later.
        owed = min(owed, LOCK_BURST_SECONDS) + min(turn.seconds, MOST_CHARGED_SECONDS)
        self._debts[tenant] = owed, now
        if len(self._debts) > MAX_DEBTS:
            del self._debts[next(iter(self._debts))]  # the one that computed longest ago
        if tenant not in self._resting and self._rest_seconds(tenant) > 0:
            self._resting.add(tenant)
            self._go_on_resting(turn.loop, tenant)

    def _rest_seconds(self, tenant: str) -> float:
        """Until the tenant's share has paid for what it computed; 0 where nobody else asks."""
        now = self._clock()
        if not self._last_asked.others(tenant, now):
            return 0.0
        owed, since = self._debts.get(tenant, (0.0, now))
        return max(0.0, (owed - LOCK_BURST_SECONDS) / LOCK_SHARE - (now - since))

    def _go_on_resting(self, loop: asyncio.AbstractEventLoop, tenant: str) -> None:
        seconds = self._rest_seconds(tenant)
        if seconds > 0:
            loop.call_later(min(seconds, LOOK_SECONDS), self._go_on_resting, loop, tenant)
        else:
            self._resting.discard(tenant)
            self._begin()


def _lower_priority() -> None:
    """Let the calling thread run after the event loop where both want the same core (Linux)."""
    if Path("/proc/self/task").is_dir():
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            run_behind_others()
