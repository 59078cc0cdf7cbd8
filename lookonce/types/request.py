"""A request on its way to the engine and the tokens on their way back."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.errors import BadRequestError, WireError
from lookonce.types.kv import ExternalCacheStats
from lookonce.types.lora import LoRAIdentity
from lookonce.types.media import Array, Expansion, MediaFeature, Modality, ProcessedItem
from lookonce.types.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
ProcessorOutcome = Literal["hit", "miss", "injected", "shared", "bypass", "not_needed"]
EncoderOutcome = Literal["hit", "miss", "skipped"]

MAX_LISTED_ITEMS = 1000
"""Media items a receipt lists one by one; totals always cover all."""


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the engine computes from: token ids with placeholders expanded, and where media sits."""

    request_id: str
    """Unique among all requests of all senders."""
    scope: bytes
    """32 bytes, H(tenant, cache_salt); the root of every block hash of this request."""
    prompt: Array
    """int32, shape [P], P >= 1."""
    features: tuple[MediaFeature, ...]
    """Sorted by offset, not overlapping."""
    sampling: SamplingParams
    arrival: float
    """`time.monotonic()` when the server received it (one clock for all processes of a machine)."""
    tenant: str = ""
    """Whose request it is: tenants take turns where something is short."""
    frames: Array | None = None
    """[n, *ModelInfo.frame_shape] in the model's dtype: the frames of sound that a live session
    begins with."""
    weight: float = 1.0
    """How many times another one's share the tenant gets."""
    lora_name: str = ""
    """The LoRA adapter that it asks for; empty: none."""
    adapter: LoRAIdentity | None = None
    """The contents of that adapter, which the engine sets on receipt."""


Overflow = Literal["end", "compact"]
"""What a live session does whose context is full: it ends, or drops its middle."""
AnswerEnd = Literal["stop", "length", "interrupted"]
"""Why one answer of a live session ended; the session goes on."""
SESSION_CREDITS = 1024
"""Tokens that a session's client may have sent beyond what is computed; the engine allows no more.
"""


class SessionOptions(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """How a live session behaves beside its sampling parameters."""

    answer: bool = True
    """The opening prompt is answered, too."""
    overflow: Overflow = "end"
    """Only for models some of whose layers attend to everything: others never overflow."""
    keep_tokens: int | None = None
    """Leading tokens that compaction keeps, rounded up to whole KV blocks; None: the opening
    prompt, but at most a quarter of the context."""
    credits: int = 0
    """Tokens of extensions that may be on their way or wait; the last extension may exceed them.
    0: any number, which clients may not ask for."""


class ExtendOptions(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What an extension does to a live session, beside what it appends."""

    interrupt: bool = False
    """It ends an answer that is being generated; otherwise it waits for its end."""
    answer: bool = True
    """False: nothing is generated after it."""
    max_tokens: int | None = None
    """Most tokens of the answer; None: as many as the session was opened with."""
    joins: bool = False
    """Its first token, which ends an answer, is left out where the answer has ended with it."""


EXTEND = ExtendOptions()


class SessionUpdate(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a delta says of a live session, beside its tokens."""

    extension: int = 0
    """The newest extension that the session has taken in; 0: the opening prompt alone."""
    ended: AnswerEnd | None = None
    """The answer to that extension has ended; after "interrupted" a later one has come."""
    credits: int = 0
    """Tokens of extensions that are computed: as many more may be sent."""
    compacted: int = 0
    """Tokens that the session has dropped to make room."""


def engine_request_id(unique: str, client_id: str) -> str:
    """The engine's id of a request: `unique`, which has one dash, and the client's id, for logs."""
    return f"{unique}-{client_id}" if client_id else unique


def client_request_id(engine_id: str) -> str:
    """The client's id in an `engine_request_id`; empty where there is none."""
    return engine_id.split("-", 2)[2] if engine_id.count("-") > 1 else ""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probability of the sampled token and of the best alternatives, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) pairs."""


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The same of a prompt's token, given those before it."""

    logprob: float
    """Minus infinity for a placeholder id that the vocabulary lacks."""
    rank: int
    """1 for the likeliest of the vocabulary; equals share the better rank."""
    top: tuple[tuple[int, float], ...] = ()


class PrefillTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When the engine did what for a prompt; `time.monotonic()`, one clock for all processes."""

    received: float
    """The scheduler took the request in: it waits from now on."""
    admitted: float
    """It got its KV blocks, the first time."""
    computed: float
    """Its first token was there."""
    encode_begun: float = 0.0
    encode_ended: float = 0.0
    """Of the steps that ran the encoder for it; 0 where none did."""


class PrefillStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was reused for a prompt, frozen at its first admission; sent with its first token."""

    prefix_cached_tokens: int
    external_cached_tokens: int = 0
    encoder: tuple[EncoderOutcome, ...] = ()
    """One per feature, at most `MAX_LISTED_ITEMS`."""
    encode_ms: tuple[float, ...] = ()
    """One per listed feature; 0.0 where nothing was encoded."""
    external: ExternalCacheStats | None = None
    """None where no external tier is configured; `external.loaded` is `external_cached_tokens`."""
    times: PrefillTimes | None = None
    encoder_tiers: tuple[tuple[int, str], ...] = ()
    """(index of a listed feature, external tier that gave its encoder output)."""


class TokenDelta(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one sample of one request; the last one carries `finish_reason`."""

    request_id: str
    index: int
    """Which of the request's `n` samples."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The entry of `stop_token_ids` that ended it, if one did."""
    logprobs: list[TokenLogprob] | None = None
    reuse_stats: PrefillStats | None = None
    """With the first delta of sample 0."""
    prompt_logprobs: list[PromptLogprob] | None = None
    """Of the prompt's tokens from the second on, where asked for; with the first delta of sample 0.
    """
    alignment: list[int] | None = None
    """The input position of each aligned token, where asked for; with the first delta of sample 0.
    """
    error: WireError | None = None
    """`errors.error_to_wire` of what broke this request, with finish_reason "error"."""
    session: SessionUpdate | None = None
    """In live sessions only."""
    pooled: bytes | None = None
    """The result of a model that pools, before it is normalized: little-endian float32, one vector
    of `PoolingInfo.width` numbers, or one of each token. With the only delta of the request."""


@dataclass(slots=True, weakref_slot=True)
class RenderedItem:
    """One media part of a rendered prompt: its identity, and how to get its bytes if asked."""

    key: bytes
    media_hash: bytes
    modality: Modality
    expansion: Expansion
    item: ProcessedItem | None
    """None when the engine is expected to hold it already."""
    recover: Callable[[], Awaitable[ProcessedItem]] | None = None
    """Decodes and processes again from the source; None when no bytes stand behind a reference."""
    outcome: ProcessorOutcome = "miss"
    decode_ms: float = 0.0
    process_ms: float = 0.0
    fetched: tuple[float, float] | None = None
    """From when to when its bytes were fetched or read; `time.monotonic()`."""
    made: tuple[float, float] | None = None
    """From when to when it waited for a worker and was made, there or elsewhere."""
    pinned: bool = False
    """This part owns one pin of the directory (a `lookup` that answered), handed to the sender:
    it gives the pin back when the prompt is sent or cancelled, and clears this flag."""
    uncounted: bool = False
    """A reference sent ahead: whether it was a hit is known, and counted once, when the engine has
    accepted or asked, or the prompt has ended."""
    encoded: bytes | bytearray | None = None
    """The media as it came, for an answer that carries it on; None where a name alone came."""
    given_back: Callable[[], None] | None = None
    """Called when the bytes that were fetched for it are dropped before the request ends."""
    num_frames: int | None = None
    """Of an item of a film: how many of its frames it has."""
    param: str = ""
    """The part of the request that it came in, for errors."""


def as_ids(token_ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """[T] int32: an array as it is, other sequences copied.

    Raises `BadRequestError` for ids that no vocabulary has.
    """
    if isinstance(token_ids, np.ndarray):
        return token_ids
    try:
        return np.frombuffer(array("i", list(token_ids)), np.int32)
    except OverflowError:
        raise BadRequestError("a token id is out of range", param="prompt") from None


class RenderedPrompt:
    """Everything the API process knows about one prompt once rendering has resolved.

    Token ids are one int32 buffer from the tokenizer to the engine: a list of 100,000 Python
    integers takes milliseconds to make, and again to turn back.
    """

    __slots__ = (
        *("features", "frames", "ids", "items", "lora_name", "scope", "tenant", "text", "weight"),
    )

    def __init__(
        self,
        token_ids: Sequence[int] | NDArray[np.int32],
        features: tuple[MediaFeature, ...] = (),
        items: Iterable[RenderedItem] = (),
        scope: bytes = b"",
        text: str | None = None,
        tenant: str = "",
        frames: Array | None = None,
    ) -> None:
        """Raises `BadRequestError` for ids that no vocabulary has."""
        self.ids = as_ids(token_ids)
        """[P] int32, contiguous; nobody writes it."""
        self.features = features
        self.items = list(items)
        """One per feature, in the order of `features`."""
        self.scope = scope
        self.text = text
        self.tenant = tenant
        self.frames = frames
        """[n, *frame shape], where a live session adds a frame of sound to each token."""
        self.weight = 1.0
        """How many times another one's share the tenant gets."""
        self.lora_name = ""
        """The LoRA adapter that it asks for; empty: none."""

    @property
    def cost(self) -> int:
        """Credits that it takes to extend a session by this: one for each token, or frame."""
        return len(self.ids) if self.frames is None else self.frames.shape[0]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def token_ids(self) -> list[int]:
        """`ids` as a list, made anew: for answers that show them."""
        token_ids: list[int] = self.ids.tolist()
        return token_ids

    def modality_tokens(self, modality: Modality) -> int:
        """Embed tokens of one modality, for usage."""
        return sum(f.num_embeds for f in self.features if f.modality == modality)
