"""How frames cross from one process to the other: two small protocols, over ZMQ a unix socket.

    API process                         engine process
    ClientLink (DEALER, asyncio)  ───▶  EngineLink (ROUTER)
                                  ◀───

A link moves lists of frames and knows nothing of messages. Order per sender is kept; nothing is
dropped while a connection lives (no high-water marks), and nothing blocks: how much may be under
way is the business of the channel's credits. What several threads send keeps the order in which
their calls to `send` returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lookonce.types.media import Buffer


class LinkEvents(Protocol):
    """What a client link tells its owner, always from within the event loop."""

    def link_up(self) -> None: ...

    def link_frames(self, frames: Sequence[Buffer]) -> None: ...

    def link_down(self) -> None: ...


class ClientLink(Protocol):
    """The API process's end."""

    def open(self, events: LinkEvents) -> None:
        """Start connecting, and connect again whenever the other end comes back."""

    def send(self, frames: Sequence[Buffer]) -> None:
        """Enqueue; returns at once. Frames must not be written afterwards."""

    def close(self) -> None: ...


class EngineLink(Protocol):
    """The engine process's end, owned by one thread; `send` and `wake` may be called from any."""

    def poll(self, timeout: float) -> list[tuple[str, Sequence[Buffer]]]:
        """All `(sender, frames)` that have come; waits up to `timeout` seconds for the first.

        Returns early, possibly empty, after `wake` or when a connection changes.
        """

    def send(self, sender: str, frames: Sequence[Buffer]) -> bool:
        """Enqueue; False when that sender is no longer connected, or this end is closed."""

    def wake(self) -> None: ...

    def close(self) -> None: ...
