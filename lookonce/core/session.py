"""What a live session has beside other requests: its limits, its inbox, what it may let go."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lookonce.core.mm_features import Features
from lookonce.types.media import ProcessedItem


@dataclass(frozen=True, slots=True)
class Appendix:
    """What one `extend` brings; offsets count from its first token."""

    token_ids: NDArray[np.int32]
    """Of its own, so that whoever gave them may use the memory again."""
    features: Features
    items: Mapping[bytes, ProcessedItem]


@dataclass(slots=True)
class Session:
    """What a request has beside others when it is live."""

    limit: int
    """Tokens the session may have in all, given and generated."""
    turn_tokens: int | None
    """Tokens generated after each extension; None: up to a stop token."""
    block_size: int = 1
    """Positions that are hashed together, with the items among them, once all are computed."""
    inbox: deque[Appendix] = field(default_factory=deque)
    num_coming: int = 0
    """Tokens in the inbox."""
    num_passed: int = 0
    """Leading features whose K/V are computed."""
    unpassed: Counter[bytes] = field(default_factory=Counter)
    """Of each key, how many of the other features have it."""

    def put(self, appendix: Appendix) -> None:
        """Into the inbox."""
        self.inbox.append(appendix)
        self.num_coming += len(appendix.token_ids)

    def take(self) -> Appendix:
        """The oldest in the inbox. Raises `IndexError` where there is none."""
        appendix = self.inbox.popleft()
        self.num_coming -= len(appendix.token_ids)
        return appendix

    def turn_limit(self, num_tokens: int) -> int:
        """Where generation pauses that begins with `num_tokens` tokens."""
        wanted = self.limit if self.turn_tokens is None else num_tokens + self.turn_tokens
        return min(self.limit, wanted)

    def let_go(self, features: Features, items: dict[bytes, ProcessedItem], computed: int) -> None:
        """Drop the arrays of items whose positions are all computed; O(1) for each, once.

        Their places too, but for those in the block that will be hashed once it is full.
        """
        while self.num_passed < len(features) and features[self.num_passed].end <= computed:
            key = features[self.num_passed].key
            self.num_passed += 1
            self.unpassed[key] -= 1
            if not self.unpassed[key]:
                del self.unpassed[key]
                items.pop(key, None)
        features.forget_before(computed - computed % self.block_size)
