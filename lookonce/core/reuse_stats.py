"""What a request reused: gathered while its prompt is computed, sent with its first token."""

from __future__ import annotations

from lookonce.types.kv import ExternalFacts
from lookonce.types.request import MAX_LISTED_ITEMS, EncoderOutcome, PrefillFacts


class FactsRecord:
    """Collects what a request reused, from its first admission to its first token."""

    __slots__ = ("_encode_ms", "_external", "_outcomes", "prefix_cached_tokens")

    def __init__(self, num_features: int) -> None:
        listed = min(num_features, MAX_LISTED_ITEMS)
        self.prefix_cached_tokens: int | None = None
        """What the first admission found on the device; None before it."""
        self._external: ExternalFacts | None = None
        self._outcomes: list[EncoderOutcome] = ["skipped"] * listed
        self._encode_ms = [0.0] * listed

    @property
    def admitted(self) -> bool:
        return self.prefix_cached_tokens is not None

    def note_admission(self, num_cached: int, external: ExternalFacts | None = None) -> None:
        """Only the first admission counts; one after preemption finds the request's own blocks.

        Of `num_cached` tokens, external tiers loaded `external.loaded`.
        """
        if self.prefix_cached_tokens is None:
            self._external = external
            loaded = 0 if external is None else external.loaded
            self.prefix_cached_tokens = num_cached - loaded

    def listed(self, indices: range) -> range:
        """Those of the features that the receipt lists one by one."""
        return range(indices.start, min(indices.stop, len(self._outcomes)))

    def note(self, index: int, outcome: EncoderOutcome) -> None:
        """The first use of a feature's output decides its outcome."""
        if index < len(self._outcomes) and self._outcomes[index] == "skipped":
            self._outcomes[index] = outcome

    def note_encoding(self, index: int, seconds: float) -> None:
        if index < len(self._encode_ms):
            self._encode_ms[index] += 1000.0 * seconds

    def freeze(self) -> PrefillFacts:
        return PrefillFacts(
            prefix_cached_tokens=self.prefix_cached_tokens or 0,
            external_cached_tokens=0 if self._external is None else self._external.loaded,
            encoder=tuple(self._outcomes),
            encode_ms=tuple(self._encode_ms),
            external=self._external,
        )
