"""Small requests, items and schedulers for the tests of the core."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lookonce.config import SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.scheduler import Scheduler
from lookonce.core.scheduler_state import SchedulerState
from lookonce.core.state_snapshots import StateSnapshots
from lookonce.types.media import Array, Expansion, MediaFeature, Modality, ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.pooling import PoolingInfo
from lookonce.types.ports import Clock
from lookonce.types.request import ExtendOptions, GenerateRequest
from lookonce.types.sampling import SamplingParams

VOCAB = 1000
EOS = 2
PLACEHOLDER = 999
ROW_BYTES = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
INTERRUPT = ExtendOptions(interrupt=True)


def key(name: str) -> bytes:
    """A 32-byte key."""
    return hashlib.sha256(name.encode()).digest()


def feature(
    name: str,
    offset: int,
    length: int,
    *,
    modality: Modality = "image",
    is_embed: tuple[tuple[int, int], ...] | None = None,
) -> MediaFeature:
    rows = length if is_embed is None else sum(last - first for first, last in is_embed)
    return MediaFeature(key(name), modality, offset, length, rows, is_embed)


def item_for(at: MediaFeature) -> ProcessedItem:
    expansion = Expansion(runs=((PLACEHOLDER, at.num_embeds),), embed_token_id=PLACEHOLDER)
    return ProcessedItem(modality=at.modality, arrays={}, expansion=expansion)


def items_for(features: Iterable[MediaFeature]) -> dict[bytes, ProcessedItem]:
    return {at.key: item_for(at) for at in features}


def text(num_tokens: int, *, seed: int = 0) -> list[int]:
    """Ordinary token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(3, 900, num_tokens).tolist()


def prompt_with(tokens: Sequence[int], features: Sequence[MediaFeature]) -> list[int]:
    """The tokens with every embed position replaced by the placeholder."""
    prompt = list(tokens)
    for at in features:
        for first, last in at.is_embed or ((0, at.length),):
            prompt[at.offset + first : at.offset + last] = [PLACEHOLDER] * (last - first)
    return prompt


def request(
    name: str,
    tokens: Sequence[int],
    features: Sequence[MediaFeature] = (),
    *,
    sampling: SamplingParams = GREEDY,
    arrival: float = 0.0,
    scope: bytes = b"s" * 32,
) -> GenerateRequest:
    prompt = np.asarray(prompt_with(tokens, features), dtype="<i4")
    return GenerateRequest(
        request_id=name,
        scope=scope,
        prompt=Array("int32", prompt.shape, prompt.tobytes()),
        features=tuple(features),
        sampling=sampling,
        arrival=arrival,
    )


def model_info(
    *,
    max_model_len: int = 4096,
    eos_token_ids: tuple[int, ...] = (EOS,),
    unsplittable: tuple[Modality, ...] = (),
    largest_unsplittable: int = 0,
    pooling: PoolingInfo | None = None,
    encoder_only: bool = False,
    state_bytes: int = 0,
    longest_bidirectional_prompt: int = 0,
    causal_texts: bool = False,
) -> ModelInfo:
    return ModelInfo(
        name="fake",
        model_type="fake",
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        modalities=("image", "audio"),
        dtype="float32",
        encoder_row_bytes=ROW_BYTES,
        unsplittable=unsplittable,
        largest_unsplittable=largest_unsplittable,
        pooling=pooling,
        encoder_only=encoder_only,
        state_bytes=state_bytes,
        longest_bidirectional_prompt=longest_bidirectional_prompt,
        causal_texts=causal_texts,
    )


@dataclass(frozen=True)
class Limits:
    """What a scheduler of the tests, and the runner that checks it, may use."""

    num_blocks: int = 64
    block_size: int = 4
    encoder_rows: int = 64
    """Rows the encoder cache has room for."""
    host_rows: int = 0
    """Rows its host tier has room for."""
    encoder_prefetch: bool = True
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    max_encoder_tokens: int = 32
    max_queue: int = 1024
    prefix_caching: bool = True
    num_snapshots: int = 4
    """Of states, where the model keeps any."""
    model: ModelInfo = field(default_factory=model_info)


def make_scheduler(limits: Limits, clock: Clock = time.monotonic) -> Scheduler:
    state_bytes = limits.model.state_bytes
    return Scheduler(
        SchedulerState(
            BlockPool(limits.num_blocks, limits.block_size),
            EncoderCache(limits.encoder_rows * ROW_BYTES, ROW_BYTES, limits.host_rows * ROW_BYTES),
            prefix_caching=limits.prefix_caching,
            clock=clock,
            snapshots=StateSnapshots(limits.num_snapshots, state_bytes) if state_bytes else None,
        ),
        limits.model,
        SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_encoder_tokens=limits.max_encoder_tokens,
            max_queue=limits.max_queue,
            encoder_prefetch=limits.encoder_prefetch,
        ),
    )
