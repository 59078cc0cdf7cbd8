"""What one response reports: usage, the reuse receipt, and what external KV tiers did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from lookonce.frontend.generation import PromptGeneration
from lookonce.frontend.responses import (
    ExternalCache,
    FilmFrames,
    KVTransferParams,
    PromptTokensDetails,
    ReceiptItem,
    ReuseReceipt,
    Usage,
)
from lookonce.types.kv import ExternalCacheStats, ExternalStatus
from lookonce.types.request import MAX_LISTED_ITEMS, PrefillStats


def usage(generations: Sequence[PromptGeneration]) -> Usage:
    """Tokens of all prompts and all samples of one response."""
    prompts = [generation.rendered for generation in generations]
    prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
    completion_tokens = sum(generation.completion_tokens for generation in generations)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(_cached(generation.reuse_stats) for generation in generations),
            image_tokens=sum(prompt.modality_tokens("image") for prompt in prompts),
            audio_tokens=sum(prompt.modality_tokens("audio") for prompt in prompts),
            video_tokens=sum(prompt.modality_tokens("video") for prompt in prompts) or UNSET,
        ),
    )


def reuse_receipt(generations: Sequence[PromptGeneration]) -> ReuseReceipt:
    """Which results were reused. At most `MAX_LISTED_ITEMS` items are listed; totals cover all."""
    reuse_stats = [
        generation.reuse_stats for generation in generations if generation.reuse_stats is not None
    ]
    items = [item for generation in generations for item in _items(generation)]
    return ReuseReceipt(
        prompt_tokens=sum(generation.rendered.num_tokens for generation in generations),
        prefix_cached_tokens=sum(fact.prefix_cached_tokens for fact in reuse_stats),
        external_cached_tokens=sum(fact.external_cached_tokens for fact in reuse_stats),
        items=items[:MAX_LISTED_ITEMS],
        film_frames=_film_frames(generations, items),
    )


def _film_frames(
    generations: Sequence[PromptGeneration], listed: Sequence[ReceiptItem]
) -> FilmFrames | UnsetType:
    of_films = [
        item
        for generation in generations
        for item in generation.rendered.items
        if item.num_frames is not None
    ]
    if not of_films:
        return UNSET
    return FilmFrames(
        total=sum(item.num_frames or 0 for item in of_films),
        processed=sum(
            item.num_frames or 0 for item in of_films if item.outcome in ("miss", "bypass")
        ),
        encoded=sum(
            0 if item.frames is UNSET else item.frames for item in listed if item.encoder == "miss"
        ),
    )


def kv_transfer_params(generations: Sequence[PromptGeneration]) -> KVTransferParams:
    """Sums over all prompts of one response."""
    reuse_stats = [_external(generation.reuse_stats) for generation in generations]
    by_tier: Counter[str] = Counter()
    for fact in reuse_stats:
        by_tier.update(dict(fact.by_tier))
    return KVTransferParams(
        num_lmcache_extra_cached_tokens=sum(fact.matched for fact in reuse_stats),
        num_external_cached_tokens=sum(fact.loaded for fact in reuse_stats),
        external_cache=ExternalCache(
            status=_status([fact.status for fact in reuse_stats]), by_tier=dict(by_tier)
        ),
    )


def _external(reuse_stats: PrefillStats | None) -> ExternalCacheStats:
    """A prompt without reuse_stats was aborted before its first token."""
    if reuse_stats is None:
        return ExternalCacheStats(status="aborted")
    return reuse_stats.external or ExternalCacheStats()


def _status(statuses: Sequence[ExternalStatus]) -> ExternalStatus:
    """The status of several prompts: "partial" if only some were loaded, else the worst."""
    if len(set(statuses)) == 1:
        return statuses[0]
    if {"loaded", "partial"} & set(statuses):
        return "partial"
    worst: tuple[ExternalStatus, ...] = ("failed", "aborted", "shadowed")
    return next((status for status in worst if status in statuses), "none")


def _cached(reuse_stats: PrefillStats | None) -> int:
    return (
        0
        if reuse_stats is None
        else reuse_stats.prefix_cached_tokens + reuse_stats.external_cached_tokens
    )


def _items(generation: PromptGeneration) -> list[ReceiptItem]:
    rendered, stats = generation.rendered, generation.reuse_stats
    if stats is None:
        return []
    # The engine reports on at most MAX_LISTED_ITEMS items, so the shortest list ends it.
    listed = zip(rendered.items, rendered.features, stats.encoder, stats.encode_ms, strict=False)
    tiers = dict(stats.encoder_tiers)
    return [
        ReceiptItem(
            modality=item.modality,
            hash=item.media_hash.hex()[:16],
            offset=feature.offset,
            length=feature.length,
            processor=item.outcome,
            encoder=encoder,
            decode_ms=round(item.decode_ms, 3),
            process_ms=round(item.process_ms, 3),
            encode_ms=round(encode_ms, 3),
            frames=UNSET if item.num_frames is None else item.num_frames,
            encoder_tier=tiers.get(number, UNSET),
        )
        for number, (item, feature, encoder, encode_ms) in enumerate(listed)
    ]
