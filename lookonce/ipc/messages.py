"""Every message between an API process and the engine process, declared once.

Cache operations travel in the message that needs them, in a fixed order: drop, add, adopt. The
engine applies them on receipt, before it checks the request and also where it rejects it. A message
with another epoch than the engine's is discarded (its sender starts with an empty directory).
"""

from __future__ import annotations

import msgspec

from lookonce.errors import WireError
from lookonce.types.lora import LoRAInfo
from lookonce.types.media import Array, Expansion, MediaFeature, ProcessedItem, UuidBinding
from lookonce.types.model import ModelInfo
from lookonce.types.request import (
    EXTEND,
    ExtendOptions,
    GenerateRequest,
    SessionOptions,
    TokenDelta,
)


class KeyedItem(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    item: ProcessedItem


class CacheOps(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Changes to the sender's share of the store, as its directory has made them already."""

    drops: tuple[bytes, ...] = ()
    adds: tuple[KeyedItem, ...] = ()
    adopts: tuple[tuple[bytes, int], ...] = ()
    """`(key, nbytes)` of items another sender added (a hint) that this sender now lists too. Where
    the store has lost the item, the key is listed all the same and its next use is a resend."""


NO_OPS = CacheOps()


# --- API process → engine process -------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """First message of a sender, and again after the engine came back."""

    sender: str
    """Unique for one start of one process."""
    epoch: int = 0
    """The epoch the sender's directory belongs to; 0, or another than the engine's: it is empty."""


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    epoch: int
    seq: int
    """Counts this sender's messages; `Received` answers it."""
    ops: CacheOps
    request: GenerateRequest
    loose: tuple[KeyedItem, ...] = ()
    """Items that travel uncached: used by this request alone, never listed."""
    recoverable: bool = True
    """False when some reference has no source, so that its item cannot be resent. The request is
    then begun without an item only where its whole answer has room and it is never recomputed."""
    bindings: tuple[UuidBinding, ...] = ()
    """Newly bound by this sender, for the other senders."""


class OpenSession(msgspec.Struct, frozen=True, tag="open_session", array_like=True):
    """Begins a live session with a prompt. `Accepted` or `Rejected` answers it.

    It may be extended by `options.credits` tokens at once, and by as many more as
    `SessionUpdate.credits` gives back.
    """

    epoch: int
    seq: int
    ops: CacheOps
    request: GenerateRequest
    options: SessionOptions = SessionOptions()
    loose: tuple[KeyedItem, ...] = ()
    bindings: tuple[UuidBinding, ...] = ()


class ExtendSession(msgspec.Struct, frozen=True, tag="extend_session", array_like=True):
    """Appends to a live session. Its items are in `ops.adds`, in `loose`, or listed already: they
    are never asked for. A mistake, or more than the session has credits for, ends the session.

    A sender may send while its credits are above 0; the last extension may overdraw them.
    """

    epoch: int
    seq: int
    ops: CacheOps
    request_id: str
    number: int
    """1 for a session's first extension, then one more each time."""
    token_ids: Array
    """int32, shape [N]; N >= 1, or 0 with `frames`."""
    features: tuple[MediaFeature, ...] = ()
    """Offsets count from the first of `token_ids`."""
    options: ExtendOptions = EXTEND
    loose: tuple[KeyedItem, ...] = ()
    frames: Array | None = None
    """[n, *ModelInfo.frame_shape]: what extends a session with a token for each frame of sound;
    each costs a credit."""


class CloseSession(msgspec.Struct, frozen=True, tag="close_session", array_like=True):
    """Ends a live session; its last delta has the finish reason "abort"."""

    epoch: int
    request_id: str


class SupplyMedia(msgspec.Struct, frozen=True, tag="supply", array_like=True):
    """The answer to `ResendMedia`: `ops.adds` and `loose` together hold what was asked."""

    epoch: int
    seq: int
    ops: CacheOps
    request_id: str
    loose: tuple[KeyedItem, ...] = ()


class UpdateCache(msgspec.Struct, frozen=True, tag="update", array_like=True):
    """Cache operations without a request: for injection, and as the answer to `ClearCache`."""

    epoch: int
    seq: int
    ops: CacheOps
    cleared: int = 0
    """Not 0: the sender's share is emptied before `ops`. The number of the `ClearCache` that this
    answers; -1: the sender starts over unasked (one of its messages could not be sent)."""
    open_claims: tuple[int, ...] = ()
    """Where `cleared`: the sender's claims that are still open. Others have ended, by a message
    that may not have been read."""


class Claim(msgspec.Struct, frozen=True, tag="claim", array_like=True):
    """This sender wants to make the item of `key`. `Hints.granted` or `Hints.held` answers it, at
    once or when the sender that makes it now has added it or given up."""

    epoch: int
    number: int
    """Counts this sender's claims; a claim that is repeated keeps its number."""
    key: bytes


class Unclaim(msgspec.Struct, frozen=True, tag="unclaim", array_like=True):
    """This sender makes the item no more, or never will: the next one is granted. A claim also
    ends when its item is added, and with its sender."""

    epoch: int
    number: int


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    epoch: int
    request_ids: tuple[str, ...]
    index: int | None = None
    """Only this sample of the (single) request, e.g. after a stop string; None: all of it."""


class ResetCache(msgspec.Struct, frozen=True, tag="reset", array_like=True):
    """Empties a tier: "mm" (by asking every sender), "encoder" or "prefix"."""

    epoch: int
    tier: str


class GetStats(msgspec.Struct, frozen=True, tag="get_stats", array_like=True):
    nonce: int


class TakeProfile(msgspec.Struct, frozen=True, tag="profile", array_like=True):
    """Profile the engine's steps for so long, and put the Chrome trace at `path`."""

    seconds: float
    path: str


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", array_like=True):
    """Load a LoRA adapter; `AdapterAnswer` comes once every API process knows its name."""

    epoch: int
    nonce: int
    """0: loaded before an engine was restarted; nobody waits, and a name that is there stays."""
    name: str
    path: str
    """A folder that the API process has checked."""
    replace: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", array_like=True):
    """Forget a LoRA adapter's name; `AdapterAnswer` comes once every API process has."""

    epoch: int
    nonce: int
    name: str


class AdaptersKnown(msgspec.Struct, frozen=True, tag="adapters_known", array_like=True):
    """The sender knows the adapters of the `AdapterList` with this number."""

    epoch: int
    number: int


class LeaseSlabs(msgspec.Struct, frozen=True, tag="lease_slabs", array_like=True):
    """What a sender gives back, and what it asks for (`cache.slab_pool.SlabChanges`)."""

    epoch: int
    given_back: tuple[int, ...] = ()
    """Numbers of slabs that the sender does not use any more."""
    uses: tuple[tuple[int, int], ...] = ()
    """`(slab, last use)` of what was sent, after a message was lost."""
    wanted: tuple[tuple[int, int], ...] = ()
    """`(number of the want, bytes)`; `SlabsLeased` answers each."""


ClientMessage = (
    Hello
    | Submit
    | OpenSession
    | ExtendSession
    | CloseSession
    | SupplyMedia
    | UpdateCache
    | Claim
    | Unclaim
    | Abort
    | ResetCache
    | GetStats
    | TakeProfile
    | LeaseSlabs
    | LoadAdapter
    | UnloadAdapter
    | AdaptersKnown
)


# --- engine process → API process -------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    epoch: int
    model: ModelInfo
    num_senders: int
    """API processes the budget of the store is divided by."""
    ready: bool
    slab_bytes: int = 0
    """Shared memory that the engine leases to all API processes together; 0: none."""
    adapters: tuple[LoRAInfo, ...] = ()
    """LoRA adapters that are loaded."""


class AdapterList(msgspec.Struct, frozen=True, tag="adapters", array_like=True):
    """The LoRA adapters that are loaded from now on; `AdaptersKnown` answers it."""

    number: int
    adapters: tuple[LoRAInfo, ...]


class AdapterAnswer(msgspec.Struct, frozen=True, tag="adapter_answer", array_like=True):
    """What became of the sender's `LoadAdapter` or `UnloadAdapter`."""

    nonce: int
    error: WireError | None = None


class Received(msgspec.Struct, frozen=True, tag="received", array_like=True):
    """The engine has received this sender's messages up to `seq`: their bytes are not in flight."""

    seq: int


class Accepted(msgspec.Struct, frozen=True, tag="accepted", array_like=True):
    """The engine needs nothing more to compute the request."""

    request_id: str
    complete: bool = True
    """The engine holds all items of the request until its end: the client may drop their sources.
    False: cached K/V or encoder output stand for those it lacks, and it asks for them if that is
    lost."""


class ResendMedia(msgspec.Struct, frozen=True, tag="resend", array_like=True):
    """The request waits until these items arrive."""

    request_id: str
    keys: tuple[bytes, ...]


class Rejected(msgspec.Struct, frozen=True, tag="rejected", array_like=True):
    request_id: str
    error: WireError


class Deltas(msgspec.Struct, frozen=True, tag="deltas", array_like=True):
    """All new tokens of one step for the requests of one sender."""

    deltas: list[TokenDelta]


class Hint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An item another sender added to the store, and what a renderer must know of it."""

    key: bytes
    nbytes: int
    expansion: Expansion


class Hints(msgspec.Struct, frozen=True, tag="hints", array_like=True):
    """What other senders added: items to adopt (possibly gone again), and uuid bindings; and the
    answers to claims."""

    items: tuple[Hint, ...] = ()
    bindings: tuple[UuidBinding, ...] = ()
    """These replace the sender's own."""
    granted: tuple[int, ...] = ()
    """Claims: the sender makes the item."""
    held: tuple[int, ...] = ()
    """Claims that have ended: the store holds the item; it is among `items`, unless it has gone."""
    gone: tuple[bytes, ...] = ()
    """Keys of items that nobody lists any more: earlier hints at them are void."""


class ClearCache(msgspec.Struct, frozen=True, tag="clear", array_like=True):
    """Every sender empties its directory and answers with `UpdateCache.cleared`."""

    number: int


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", array_like=True):
    """Sent by the input thread twice a second; tells how the step loop is."""

    epoch: int
    ready: bool
    stalled_seconds: float
    """Seconds since the step loop last finished a step while it had work; 0 when idle."""


class Stats(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    nonce: int
    counters: dict[str, float]
    """Metric name (without prefix) → value; monotone counters and gauges alike."""


class SlabsLeased(msgspec.Struct, frozen=True, tag="slabs_leased", array_like=True):
    """The answers to `LeaseSlabs.wanted`; one descriptor per slab comes with the message."""

    slabs: tuple[tuple[int, int, int], ...]
    """`(number of the want, slab number, or 0: there is no room, bytes)`."""


class SlabsReleased(msgspec.Struct, frozen=True, tag="slabs_released", array_like=True):
    """The engine is done with what messages up to these uses have put into these slabs."""

    slabs: tuple[tuple[int, int], ...]
    """`(slab number, use)`."""


class ReclaimSlabs(msgspec.Struct, frozen=True, tag="reclaim_slabs", array_like=True):
    """The sender is to give back its free slabs, because there is no room for others."""

    ended: bool = False
    """All leases of the sender have ended (it was taken for dead): it is to forget its slabs."""


EngineMessage = (
    Welcome
    | Received
    | Accepted
    | ResendMedia
    | Rejected
    | Deltas
    | Hints
    | ClearCache
    | Heartbeat
    | Stats
    | SlabsLeased
    | SlabsReleased
    | ReclaimSlabs
    | AdapterList
    | AdapterAnswer
)
