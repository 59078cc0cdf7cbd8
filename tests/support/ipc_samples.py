"""Messages, and strategies that draw them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from lookonce.ipc.messages import (
    Abort,
    Accepted,
    AdapterAnswer,
    AdapterList,
    AdaptersKnown,
    CacheOps,
    ClearCache,
    ClientMessage,
    CloseSession,
    Deltas,
    EngineMessage,
    ExtendSession,
    GetStats,
    Heartbeat,
    Hello,
    Hint,
    Hints,
    KeyedItem,
    LoadAdapter,
    OpenSession,
    Received,
    Rejected,
    ResendMedia,
    ResetCache,
    Stats,
    Submit,
    SupplyMedia,
    UnloadAdapter,
    UpdateCache,
    Welcome,
)
from lookonce.types.lora import LoRAIdentity, LoRAInfo
from lookonce.types.media import (
    ITEM_SIZE,
    Array,
    Expansion,
    MediaFeature,
    ProcessedItem,
    UuidBinding,
)
from lookonce.types.model import ModelInfo
from lookonce.types.request import (
    ExtendOptions,
    GenerateRequest,
    PrefillStats,
    SessionOptions,
    SessionUpdate,
    TokenDelta,
    TokenLogprob,
)
from lookonce.types.sampling import SamplingParams

MODEL = ModelInfo("m", "fake", 100, 64, (2,), ("image",), "bfloat16", 16)


def array(nbytes: int, dtype: str = "uint8") -> Array:
    """Read-only, as everything received is."""
    data = np.random.default_rng(nbytes).bytes(nbytes)
    return Array(dtype, (nbytes // ITEM_SIZE[dtype],), memoryview(data).toreadonly())


def item(*sizes: int, dtype: str = "uint8") -> ProcessedItem:
    arrays = {f"array{number}": array(size, dtype) for number, size in enumerate(sizes)}
    return ProcessedItem("image", arrays, Expansion(((7, 1), (9, 4)), 9, (1, 2, 2)))


def request(name: str = "r") -> GenerateRequest:
    feature = MediaFeature(b"k" * 32, "image", 1, 4, 3, ((0, 2), (3, 4)), (1, 2, 2))
    return GenerateRequest(name, b"s" * 32, array(24, "int32"), (feature,), SamplingParams(), 1.5)


def update(seq: int, *sizes: int) -> UpdateCache:
    return UpdateCache(epoch=1, seq=seq, ops=CacheOps(adds=(KeyedItem(b"k" * 32, item(*sizes)),)))


dimensions = st.lists(st.integers(0, 20), max_size=3).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Every dtype; empty, scalar, inline and out of band."""
    dtype = draw(st.sampled_from(sorted(ITEM_SIZE)))
    shape = draw(dimensions)
    nbytes = ITEM_SIZE[dtype] * int(np.prod(shape, dtype=np.int64))
    data = draw(st.binary(min_size=1, max_size=8))
    return Array(dtype, shape, (data * (nbytes // len(data) + 1))[:nbytes])


keys = st.binary(min_size=32, max_size=32)
expansions = st.builds(
    Expansion,
    runs=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3).map(tuple),
    embed_token_id=st.integers(0, 9),
)
items = st.builds(
    ProcessedItem,
    modality=st.sampled_from(["image", "audio"]),
    arrays=st.dictionaries(st.text(max_size=5), arrays(), max_size=3),
    expansion=expansions,
)
keyed_items = st.lists(st.builds(KeyedItem, keys, items), max_size=3).map(tuple)
cache_ops = st.builds(
    CacheOps,
    drops=st.lists(keys, max_size=3).map(tuple),
    adds=keyed_items,
    adopts=st.lists(st.tuples(keys, st.integers(0, 9)), max_size=2).map(tuple),
)
requests = st.builds(
    GenerateRequest,
    request_id=st.text(max_size=9),
    scope=keys,
    prompt=arrays(),
    features=st.just(()),
    sampling=st.builds(
        SamplingParams,
        stop=st.lists(st.text(min_size=1, max_size=5), max_size=2).map(tuple),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-100, 100)),
    ),
    arrival=st.floats(0, 1e9),
    lora_name=st.text(max_size=9),
)
seqs = st.integers(1, 2**40)
session_options = st.builds(
    SessionOptions,
    answer=st.booleans(),
    overflow=st.sampled_from(["end", "compact"]),
    keep_tokens=st.none() | st.integers(0, 99),
    credits=st.integers(0, 99),
)
client_messages: st.SearchStrategy[ClientMessage] = st.one_of(
    st.builds(Submit, st.integers(1), seqs, cache_ops, requests, keyed_items, st.booleans())
    .filter(lambda message: message.epoch < 2**62),
    st.builds(OpenSession, seqs, seqs, cache_ops, requests, session_options, keyed_items),
    st.builds(
        ExtendSession, seqs, seqs, cache_ops, st.text(max_size=9), seqs, arrays(),
        options=st.builds(
            ExtendOptions, st.booleans(), st.booleans(), st.none() | seqs, st.booleans()
        ),
        loose=keyed_items,
    ),
    st.builds(CloseSession, seqs, st.text(max_size=9)),
    st.builds(SupplyMedia, seqs, seqs, cache_ops, st.text(max_size=9), keyed_items),
    st.builds(UpdateCache, seqs, seqs, cache_ops, st.integers(-1, 9)),
    st.builds(Abort, seqs, st.lists(st.text(max_size=9)).map(tuple), st.none() | seqs),
    st.builds(ResetCache, seqs, st.sampled_from(["mm", "encoder", "prefix"])),
    st.builds(Hello, st.text(max_size=9), seqs),
    st.builds(GetStats, seqs),
    st.builds(LoadAdapter, seqs, seqs, st.text(max_size=9), st.text(max_size=9), st.booleans()),
    st.builds(UnloadAdapter, seqs, seqs, st.text(max_size=9)),
    st.builds(AdaptersKnown, seqs, seqs),
)  # fmt: skip

engine_messages: tuple[EngineMessage, ...] = (
    Welcome(5, MODEL, 2, True),
    Received(3),
    Accepted("r"),
    ResendMedia("r", (b"k" * 32,)),
    Rejected("r", ("QueueFullError", "full", None, "queue_full")),
    Deltas(
        [
            TokenDelta("r", 0, [1], logprobs=[TokenLogprob(-0.5, ((1, -0.5),))]),
            TokenDelta("r", 1, [2], "stop", 2, reuse_stats=PrefillStats(16, 0, ("hit",), (1.5,))),
            TokenDelta("s", 0, [3], session=SessionUpdate(2, "length", 5, 16)),
            TokenDelta("q", 0, [], "error", error=("BadRequestError", "broke", "top_k", "odd")),
        ]
    ),
    Hints((Hint(b"k" * 32, 9, Expansion(((9, 1),), 9)),), (UuidBinding(b"n", b"d", "t"),)),
    ClearCache(1),
    Heartbeat(5, True, 0.25),
    Stats(1, {"num_requests_running": 2.0}),
    Welcome(5, MODEL, 2, True, 0, (LoRAInfo("a", LoRAIdentity(b"d" * 32), 8, "/a"),)),
    AdapterList(1, (LoRAInfo("b", LoRAIdentity(b"d" * 32, b"e" * 32), 8),)),
    AdapterAnswer(1, ("BadRequestError", "broken", "lora_path", "bad_request")),
)
