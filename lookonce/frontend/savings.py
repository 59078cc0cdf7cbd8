"""What reuse saved today, by tenant: work that was not done again, and the seconds of it.

Work is counted exactly. Seconds are an estimate from below, made of what the same work takes here:
a picture that is found counts as much as the mean picture that had to be processed, a token that
is found as much as one computed at the fastest rate seen. What was never done here counts nothing.
A day is a day of UTC; the first request of the next one begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import msgspec

from lookonce.types.request import PrefillStats, RenderedItem, RenderedPrompt

MAX_TENANTS = 1_000
"""Further tenants of a day are not counted."""
LEAST_COMPUTED = 16
"""Tokens that a prompt must have computed to tell a rate: below, a step costs what it costs."""
NOT_PROCESSED = ("hit", "shared", "not_needed")
"""Outcomes of a processor that did not work for this item; `injected` was worked on elsewhere."""


class Saved(msgspec.Struct, kw_only=True):
    """Of one tenant and day."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of those, tokens that were not computed."""
    media: int = 0
    """Pictures, films, sounds and pages in prompts."""
    media_reused: int = 0
    """Of those, items that were not decoded and processed."""
    encodings_reused: int = 0
    """Of those, items that were not run through the encoder."""
    media_seconds: float = 0.0
    encoder_seconds: float = 0.0
    prefill_seconds: float = 0.0

    def add(self, other: Saved) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Savings:
    """Counts the prompts of one process; `today` names the day."""

    def __init__(self, today: Callable[[], str] | None = None) -> None:
        self._today = _utc_day if today is None else today
        self._day = self._today()
        self._by_tenant: dict[str, Saved] = {}
        self._item_costs: dict[str, _Mean] = {}
        """Seconds to decode and process an item, by modality."""
        self._encoder_costs: dict[str, _Mean] = {}
        """Seconds to encode one of an item's tokens, by modality."""
        self._prefill_cost = 0.0
        """Seconds to compute a token, at the fastest rate seen; 0: none was seen."""

    def count(self, tenant: str, prompt: RenderedPrompt, stats: PrefillStats) -> None:
        """Count a prompt whose first token is there."""
        self._learn(prompt, stats)
        saved = self._of(tenant)
        if saved is not None:
            saved.add(self._saved(prompt, stats))

    def today(self) -> tuple[str, dict[str, Saved]]:
        """The day, and what was saved by tenant."""
        self._turn()
        return self._day, self._by_tenant

    def _of(self, tenant: str) -> Saved | None:
        self._turn()
        if tenant not in self._by_tenant and len(self._by_tenant) >= MAX_TENANTS:
            return None
        return self._by_tenant.setdefault(tenant, Saved())

    def _turn(self) -> None:
        day = self._today()
        if day != self._day:
            self._day, self._by_tenant = day, {}

    def _learn(self, prompt: RenderedPrompt, stats: PrefillStats) -> None:
        for item in prompt.items:
            if item.outcome in ("miss", "bypass"):
                seconds = (item.decode_ms + item.process_ms) / 1e3
                self._item_costs.setdefault(item.modality, _Mean()).add(seconds, 1)
        for item, length, encoder, encode_ms in _encoded(prompt, stats):
            if encoder == "miss":
                self._encoder_costs.setdefault(item.modality, _Mean()).add(encode_ms / 1e3, length)
        computed = prompt.num_tokens - _cached(stats)
        if stats.times is not None and computed >= LEAST_COMPUTED:
            times = stats.times
            encoding = times.encode_ended - times.encode_begun
            each = max(times.computed - times.admitted - encoding, 0.0) / computed
            self._prefill_cost = min(self._prefill_cost or each, each)

    def _saved(self, prompt: RenderedPrompt, stats: PrefillStats) -> Saved:
        reused = [item for item in prompt.items if item.outcome in NOT_PROCESSED]
        encodings = [
            (item, length)
            for item, length, encoder, _ in _encoded(prompt, stats)
            if encoder != "miss"
        ]
        cached = _cached(stats)
        return Saved(
            prompt_tokens=prompt.num_tokens,
            cached_tokens=cached,
            media=len(prompt.items),
            media_reused=len(reused),
            encodings_reused=len(encodings),
            media_seconds=sum(_cost(self._item_costs, item) for item in reused),
            encoder_seconds=sum(
                _cost(self._encoder_costs, item) * length for item, length in encodings
            ),
            prefill_seconds=self._prefill_cost * cached,
        )


class _Mean:
    """Seconds of so much work."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._work = 0

    def add(self, seconds: float, work: int) -> None:
        self._seconds += seconds
        self._work += work

    @property
    def value(self) -> float:
        return self._seconds / self._work if self._work else 0.0


def _cost(costs: dict[str, _Mean], item: RenderedItem) -> float:
    known = costs.get(item.modality)
    return 0.0 if known is None else known.value


def _encoded(
    prompt: RenderedPrompt, stats: PrefillStats
) -> Iterable[tuple[RenderedItem, int, str, float]]:
    """Item, tokens, outcome and milliseconds of each item that the engine reports on."""
    lengths = (feature.length for feature in prompt.features)
    return zip(prompt.items, lengths, stats.encoder, stats.encode_ms, strict=False)


def _cached(stats: PrefillStats) -> int:
    return stats.prefix_cached_tokens + stats.external_cached_tokens


def _utc_day() -> str:
    return datetime.now(UTC).date().isoformat()
