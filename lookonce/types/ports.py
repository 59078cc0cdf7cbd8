"""Protocols between packages that do not import each other; tests have a fake of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from lookonce.types.kv import (
    ExternalCacheStats,
    KVLayout,
    LoadedOutput,
    Lookup,
    TransferReport,
)
from lookonce.types.media import Expansion, ProcessedItem
from lookonce.types.request import ProcessorOutcome
from lookonce.types.step import StepPlan, StepResult


class ModelRunner(Protocol):
    """Executes plans on a device. `model.runner.Runner` is the real one."""

    def execute(self, plan: StepPlan) -> StepResult:
        """`begin`, waited for."""

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Enqueue a step. What is returned waits for it and gives its result; it is called once,
        after at most one more step was begun. Input tokens that the step before samples are taken
        from it on the device."""


class ItemDirectory(Protocol):
    """What the renderer asks before it decodes anything.

    `lookup` returns the expansion of an item that the engine holds for this sender, and takes one
    pin; None means that the item must be fetched, decoded and processed, unless `known_expansion`,
    which neither pins nor changes recency, still has its expansion. Every answered lookup is given
    back once: by `unpin`, or by handing the pin on as `RenderedItem.pinned`. `held_as` says what
    kind of hit an answered lookup was. `count` is called once per media part when rendering
    resolves (never for resends or live sessions; see `RenderedItem.uncounted` for when later).
    """

    def lookup(self, key: bytes) -> Expansion | None: ...

    def unpin(self, key: bytes) -> None: ...

    def held_as(self, key: bytes) -> ProcessorOutcome: ...

    def known_expansion(self, key: bytes) -> Expansion | None: ...

    def count(self, outcome: ProcessorOutcome) -> None: ...


Publish = Callable[[ProcessedItem], Awaitable[None]]
"""Sends an item to the engine as soon as it is made, for other API processes that wait for it."""


class ClaimsItems(Protocol):
    """Lets one API process at a time make an item; `engine.client.item_claims` implements it.

    Inside the block the item may be made, and is then published; None means that it has been made
    elsewhere meanwhile: it is in the directory.
    """

    def claimed(self, key: bytes) -> AbstractAsyncContextManager[Publish | None]: ...


class Clock(Protocol):
    """Seconds, monotonic."""

    def __call__(self) -> float: ...


class KVPageCopier(Protocol):
    """Moves whole KV blocks between the device and host memory; called by transfer workers.

    A block's bytes are in the order of `layout`. `gather` reads blocks nobody writes meanwhile and
    `scatter` writes blocks nobody else uses: the scheduler sees to both by holding references.
    """

    @property
    def layout(self) -> KVLayout: ...

    def gather(self, block_ids: Sequence[int], out: memoryview) -> None:
        """Copy blocks to `out`, `len(block_ids) * layout.block_bytes` bytes."""

    def scatter(self, block_ids: Sequence[int], data: memoryview) -> None:
        """The inverse; when it returns the device sees the new contents."""


class StateCopier(Protocol):
    """Moves snapshots of states between the device and host memory; called by transfer workers.

    `gather` reads snapshots that nobody writes meanwhile, and `scatter` writes such that nobody
    else uses: the scheduler sees to both.
    """

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""

    def describe(self) -> bytes:
        """What the bytes of a state are, unambiguously, for digests."""

    def gather(self, snapshot: int, out: memoryview) -> None:
        """Copy a snapshot to `out`, `state_bytes` bytes."""

    def scatter(self, snapshot: int, data: memoryview) -> None:
        """The inverse; when it returns the device sees the new contents."""


class ExternalPrefixCache(Protocol):
    """The scheduler's half of the external KV tiers. Nothing here waits for a tier or raises.

    A request is known from `on_request_added` to `on_request_finished`; unknown ids are ignored.

        on_request_added ─▶ lookup ─(pending: later again)─▶ on_allocated ─▶ LoadReport ─▶
        on_admitted ─▶ on_request_finished

    Blocks given to `on_allocated` and `try_store` stay referenced until their ticket has been
    acknowledged, whatever became of the request: a late write never lands in a reused block. The
    same holds for snapshots of states. A model with states can use a prefix only where the state
    after it is known: a hit ends at the newest state that a tier holds whole.
    """

    wake: Callable[[], None]
    """Called, from any thread, when there is something to `poll`."""

    def on_request_added(self, request_id: str, num_prompt_tokens: int) -> None: ...

    def lookup(
        self, request_id: str, hashes: Callable[[], Sequence[bytes]], num_local: int
    ) -> Lookup:
        """Begin the lookup of a prompt's leading blocks, or return its state; calls `hashes` once.

        `num_local` of the blocks are on the device. A hit ends where loading does not pay.
        """

    def on_allocated(
        self,
        request_id: str,
        block_ids: Sequence[int],
        num_local: int,
        *,
        num_resident: int | None = None,
        snapshot: int | None = None,
    ) -> int:
        """Load the prompt's leading blocks, from block `num_local` on, into `block_ids` (which
        begin with the local ones); the ticket that will be acknowledged.

        With states: the state after the last block is loaded into `snapshot`, or an earlier one
        where that fails. The K/V of the first `num_resident` blocks, `num_local` at least, are on
        the device already, though no state after them.
        """

    def on_admitted(
        self, request_id: str, num_cached: int, used: Container[int]
    ) -> ExternalCacheStats:
        """The request is admitted with `num_cached` cached blocks; `used`: their ids. Frozen."""

    def on_request_finished(self, request_id: str) -> None:
        """Idempotent; ends what is under way for the request, if anything is."""

    def try_store(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> int | None:
        """Keep full blocks in the tiers; a ticket, or None when the queue is full (counted)."""

    def try_store_state(self, block_hash: bytes, snapshot: int) -> int | None:
        """Keep the state after a block in the tiers; a ticket, or None as for `try_store`."""

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """What computing costs, for weighing it against loading."""

    def poll(self) -> TransferReport: ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class EncoderOutputCopier(Protocol):
    """Copies encoder outputs from the device to host memory.

    `pin` is called by the step thread after the step that encoded the output, and keeps its memory
    whatever the scheduler does with the key; `copy` by a transfer worker, later.
    """

    def pin(self, key: bytes) -> object | None:
        """The output on the device; None where it is not held."""

    def copy(self, pinned: object, out: memoryview) -> None:
        """Write the bytes [rows, width] of a pinned output, as many as `out` has."""


class ExternalEncoderCache(Protocol):
    """The scheduler's half of the encoder tiers. Nothing here waits for a tier or raises."""

    wake: Callable[[], None]
    """Called, from any thread, when there is something to `poll`."""

    def submit_load(self, outputs: Sequence[tuple[bytes, int]]) -> None:
        """Look for outputs (key, rows) and load those that are held.

        `poll` reports each once, at the latest after the deadline of a load. A key must not be
        submitted again before that.
        """

    def store(self, outputs: Sequence[tuple[bytes, int]]) -> None:
        """Keep outputs (key, rows) of the last step, as far as they are held; dropped where the
        queue is full."""

    def poll(self) -> Sequence[LoadedOutput]: ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class BlockEvents(Protocol):
    """Is told what the prefix cache gains and loses, in order, by the step thread."""

    @property
    def needs_content(self) -> bool:
        """Whether it has to be told what a block holds, not only its hash."""

    def stored(
        self,
        block_hash: bytes,
        parent: bytes | None,
        tokens: bytes,
        items: tuple[bytes, ...],
        adapter: bytes = b"",
    ) -> None:
        """A block was registered. `parent`: the hash of the block before it; None: it is a
        prompt's first. `tokens`: int32; `items`: keys of the media items that overlap it;
        `adapter`: digest of the LoRA adapter that it was computed with; empty: none."""

    def removed(self, block_hash: bytes) -> None: ...

    def cleared(self) -> None: ...

    def computed(
        self,
        request_id: str,
        num_tokens: int,
        block_hash: bytes | None,
        items: tuple[tuple[bytes, int], ...],
        earlier: tuple[tuple[bytes, int], ...],
    ) -> None:
        """A request's prompt of `num_tokens` is computed. `block_hash`: of its last full block, if
        there is one; `items`: key, as clients know it, and length, in tokens, of its first media
        items; `earlier`: some of its full blocks before the last, and the tokens up to the end of
        each, in order."""
