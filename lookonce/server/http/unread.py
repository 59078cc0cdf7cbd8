"""Answers that clients leave unread: since when, how much, and who is closed where all of them
together are too much."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from lookonce.config import ConnectionConfig

UNREAD_SECONDS = 3.0
"""Who leaves an answer unread for so long gives way to a new connection where there is no room."""
UNREAD_KEPT = 0.75
"""Of `max_unread_bytes`, once these were exceeded."""


class ConnectionTable(Protocol):
    """What a connection's protocol uses of the table that it is in
    (`http.connections.Connections`)."""

    unread: UnreadAnswers

    @property
    def limits(self) -> ConnectionConfig: ...

    @property
    def now(self) -> float: ...

    def remove(self, connection: Any) -> None: ...

    def count_refused(self, reason: str) -> None: ...


class UnreadProtocol(asyncio.Protocol):
    """The part of a connection's protocol that knows whether its client reads. It comes before
    uvicorn's among the bases."""

    transport: Any
    _table: ConnectionTable
    unread_since = math.inf
    """When the client stopped reading its answer."""

    def pause_writing(self) -> None:
        self.unread_since = self._table.now
        super().pause_writing()
        self._table.unread.hold(self)

    def resume_writing(self) -> None:
        self.unread_since = math.inf
        self._table.unread.release(self)
        super().resume_writing()

    @property
    def num_unread(self) -> int:
        """Bytes that were written and that the client has not taken."""
        if self.transport is None:  # it is being connected
            return 0
        num_bytes: int = self.transport.get_write_buffer_size()
        return num_bytes

    def give_up_unread(self) -> None:
        """Close the connection: all of them together hold too much that is not read."""
        self._table.count_refused("too_much_unread")
        self._abort()

    def _abort(self) -> None:
        self.transport.abort()


class UnreadAnswers:
    """How much is unread of all connections together.

    It is known at once of a connection that may write no more, which is what a large answer leaves;
    of all others once a second, since to count what each of them writes would cost every token.
    """

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        """`most`: bytes that may be unread; `now`: the time of the connections' table."""
        self._most = most
        self._now = now
        self._held: dict[UnreadProtocol, int] = {}
        """Bytes that are unread of those that have any, as far as is known."""
        self._total = 0
        """The sum of these."""
        self._turn: asyncio.Handle | None = None

    def hold(self, connection: UnreadProtocol) -> None:
        """Its client does not read: what was written to it counts."""
        self.release(connection)
        self._held[connection] = connection.num_unread
        self._total += self._held[connection]
        self._check()

    def count(self, connections: Iterable[object]) -> None:
        """Look at all connections, whether they may write or not."""
        own = [each for each in connections if isinstance(each, UnreadProtocol)]
        self._held = {each: unread for each in own if (unread := each.num_unread)}
        self._total = sum(self._held.values())
        self._check()

    def _check(self) -> None:
        if self._total > self._most and self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._shorten)

    def release(self, connection: object) -> None:
        """It is read again, or is closed; or was read all the time."""
        if isinstance(connection, UnreadProtocol):
            self._total -= self._held.pop(connection, 0)

    def _shorten(self) -> None:
        """Where more is unread than may be, close those that have most of it until a quarter of the
        room is free: to look at thousands of connections for each of them would take long. Those
        come first that have not read for `UNREAD_SECONDS`: a large answer that is being read has
        much unread for a moment."""
        self._turn = None
        self._held = {each: each.num_unread for each in self._held}
        self._total = sum(self._held.values())
        if self._total <= self._most:
            return
        now = self._now()

        def order(each: UnreadProtocol) -> tuple[bool, int]:
            return now - each.unread_since < UNREAD_SECONDS, -self._held[each]

        for each in sorted(self._held, key=order):
            if self._total <= self._most * UNREAD_KEPT:
                return
            self.release(each)
            each.give_up_unread()
