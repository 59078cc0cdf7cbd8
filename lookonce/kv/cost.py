"""Whether loading a prefix is cheaper than computing it, from what both have cost so far."""

from __future__ import annotations

from collections.abc import Sequence

DECAY = 0.9
"""What an observation still weighs after the next one."""
PROBE_EVERY = 8
"""Of so many decisions against a tier one loads all the same, to see if it has become faster."""


class Rate:
    """Seconds per unit, weighted by size and recency; None before the first observation."""

    __slots__ = ("_seconds", "_units")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    def observe(self, units: float, seconds: float) -> None:
        self._seconds = DECAY * self._seconds + seconds
        self._units = DECAY * self._units + units

    @property
    def seconds_per_unit(self) -> float | None:
        return self._seconds / self._units if self._units else None


class CostModel:
    """Weighs blocks. What was never measured is taken to be free: loading is how it is measured.

    Computing grows faster than linearly with position, and spares encoder runs besides; both are
    left out, so a prefix near the break-even point may be computed though loading were cheaper.
    """

    def __init__(self, num_tiers: int, block_size: int) -> None:
        self._block_size = block_size
        self._prefill = Rate()
        self._loads = [Rate() for _ in range(num_tiers)]
        self._refusals = 0

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._prefill.observe(num_tokens / self._block_size, seconds)

    def observe_load(self, tier: int, num_blocks: int, seconds: float) -> None:
        self._loads[tier].observe(num_blocks, seconds)

    def worth_loading(self, sources: Sequence[int], num_local: int) -> int:
        """Up to which of the prompt's leading blocks to load; `num_local`: none of them.

        `sources` names the tier of each leading block, local ones included.
        """
        compute = self._prefill.seconds_per_unit
        if compute is None:
            return len(sources)
        best, best_gain, gain = num_local, 0.0, 0.0
        for index in range(num_local, len(sources)):
            gain += compute - (self._loads[sources[index]].seconds_per_unit or 0.0)
            if gain > best_gain:
                best, best_gain = index + 1, gain
        if best > num_local:
            return best
        self._refusals += 1
        return len(sources) if self._refusals % PROBE_EVERY == 0 else num_local
