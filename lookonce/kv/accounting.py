"""What external tiers did for each prompt, to the token.

With P prompt tokens, L tokens found on the device, E leading tokens held by the tiers:

    usable  E' = min(E, P - 1) rounded down to whole blocks: at least one token is computed
    matched    = max(0, E' - L)
    loaded  X  = verified tokens beyond L that were loaded and used; 0 <= X <= matched
    cached     = L + X;  computed = P - cached

A record exists from the moment its request is added, so that whatever ends the request finds one,
and is frozen at the first admission: what happens after a preemption does not change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lookonce.types.kv import ExternalCacheStats, ExternalStatus


def usable_tokens(num_held: int, num_prompt_tokens: int, block_size: int) -> int:
    """E'."""
    return max(0, min(num_held, num_prompt_tokens - 1)) // block_size * block_size


def matched_tokens(num_held: int, num_local: int, num_prompt_tokens: int, block_size: int) -> int:
    return max(0, usable_tokens(num_held, num_prompt_tokens, block_size) - num_local)


class ExternalAccount:
    """One request's way through the tiers."""

    __slots__ = (
        "_attempted",
        "_block_size",
        "_failed",
        "_held",
        "_matched",
        "_stats",
        "num_prompt_tokens",
    )

    def __init__(self, num_prompt_tokens: int, block_size: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self._block_size = block_size
        self._held = 0
        self._matched = 0
        self._attempted = False
        self._failed = False
        self._stats: ExternalCacheStats | None = None

    @property
    def reuse_stats(self) -> ExternalCacheStats | None:
        """None until the request is admitted or has ended."""
        return self._stats

    def answered(self, num_held: int | None) -> None:
        """The lookup found `num_held` leading tokens (E); None: it failed."""
        self._held = num_held or 0
        self._failed |= num_held is None

    def weigh(self, num_local: int) -> int:
        """Matched tokens beyond `num_local` (L) local ones."""
        self._matched = matched_tokens(
            self._held, num_local, self.num_prompt_tokens, self._block_size
        )
        return self._matched

    def begin_load(self) -> None:
        self._attempted = True

    def end_load(self, *, failed: bool) -> None:
        self._failed |= failed

    def freeze(self, tiers: Sequence[str], num_local: int) -> ExternalCacheStats:
        """Admitted with one loaded block in use from each of `tiers`, and `num_local` tokens
        (L) that were on the device. Only the first call counts."""
        if self._stats is None:
            loaded = len(tiers) * self._block_size
            by_tier = Counter(tiers)
            self._stats = ExternalCacheStats(
                matched=self._matched,
                loaded=loaded,
                status=self._status(loaded, num_local),
                by_tier=tuple((name, n * self._block_size) for name, n in by_tier.items()),
            )
        return self._stats

    def abort(self) -> ExternalCacheStats:
        """The request ended; before its admission nothing was used."""
        if self._stats is None:
            self._stats = ExternalCacheStats(status="aborted")
        return self._stats

    def _status(self, loaded: int, num_local: int) -> ExternalStatus:
        if loaded:
            return "loaded" if loaded == self._matched else "partial"
        if self._failed:
            return "failed"
        covered = self._matched == 0 and num_local > 0
        return "shadowed" if covered or self._attempted else "none"
