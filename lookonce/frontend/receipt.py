"""What one response reports: usage, the reuse receipt, and what external KV tiers did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lookonce.frontend.generation import PromptGeneration
from lookonce.frontend.responses import (
    ExternalCache,
    KVTransferParams,
    PromptTokensDetails,
    ReceiptItem,
    ReuseReceipt,
    Usage,
)
from lookonce.types.kv import ExternalFacts, ExternalStatus
from lookonce.types.request import MAX_LISTED_ITEMS, PrefillFacts


def usage(generations: Sequence[PromptGeneration]) -> Usage:
    """Tokens of all prompts and all samples of one response."""
    prompts = [generation.rendered for generation in generations]
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    completion_tokens = sum(generation.completion_tokens for generation in generations)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(_cached(generation.facts) for generation in generations),
            image_tokens=sum(prompt.modality_tokens("image") for prompt in prompts),
            audio_tokens=sum(prompt.modality_tokens("audio") for prompt in prompts),
        ),
    )


def reuse_receipt(generations: Sequence[PromptGeneration]) -> ReuseReceipt:
    """Which results were reused. At most `MAX_LISTED_ITEMS` items are listed; totals cover all."""
    facts = [generation.facts for generation in generations if generation.facts is not None]
    items = [item for generation in generations for item in _items(generation)]
    return ReuseReceipt(
        prompt_tokens=sum(len(generation.rendered.token_ids) for generation in generations),
        prefix_cached_tokens=sum(fact.prefix_cached_tokens for fact in facts),
        external_cached_tokens=sum(fact.external_cached_tokens for fact in facts),
        items=items[:MAX_LISTED_ITEMS],
    )


def kv_transfer_params(generations: Sequence[PromptGeneration]) -> KVTransferParams:
    """Sums over all prompts of one response."""
    facts = [_external(generation.facts) for generation in generations]
    by_tier: Counter[str] = Counter()
    for fact in facts:
        by_tier.update(dict(fact.by_tier))
    return KVTransferParams(
        num_lmcache_extra_cached_tokens=sum(fact.matched for fact in facts),
        num_external_cached_tokens=sum(fact.loaded for fact in facts),
        external_cache=ExternalCache(
            status=_status([fact.status for fact in facts]), by_tier=dict(by_tier)
        ),
    )


def _external(facts: PrefillFacts | None) -> ExternalFacts:
    """A prompt without facts was aborted before its first token."""
    if facts is None:
        return ExternalFacts(status="aborted")
    return facts.external or ExternalFacts()


def _status(statuses: Sequence[ExternalStatus]) -> ExternalStatus:
    """The status of several prompts: "partial" if only some were loaded, else the worst."""
    if len(set(statuses)) == 1:
        return statuses[0]
    if {"loaded", "partial"} & set(statuses):
        return "partial"
    worst: tuple[ExternalStatus, ...] = ("failed", "aborted", "shadowed")
    return next((status for status in worst if status in statuses), "none")


def _cached(facts: PrefillFacts | None) -> int:
    return 0 if facts is None else facts.prefix_cached_tokens + facts.external_cached_tokens


def _items(generation: PromptGeneration) -> list[ReceiptItem]:
    if generation.facts is None:
        return []
    rendered = generation.rendered
    listed = zip(  # the engine reports on at most MAX_LISTED_ITEMS, so the shortest ends it
        rendered.items, rendered.features, generation.facts.encoder, generation.facts.encode_ms,
        strict=False,
    )  # fmt: skip
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
        )
        for item, feature, encoder, encode_ms in listed
    ]
