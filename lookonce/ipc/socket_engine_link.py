"""The engine process's end of the link: a listening socket (`socket_client_link` is the other end).

One thread polls. Any thread sends: it writes to the sender's socket itself, and only what the
socket does not take at once is left to the polling thread.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lookonce.errors import ProtocolError
from lookonce.ipc.framing import (
    DONTWAIT,
    SLICE_BYTES,
    FrameReader,
    Message,
    SendQueue,
    greeting,
    message_pieces,
)
from lookonce.ipc.peer import peer_uid, require_same_user
from lookonce.types.media import Buffer

logger = logging.getLogger(__name__)

BACKLOG = 128
LINGER_SECONDS = 0.2
"""How long `close` goes on writing what was sent."""
ACCEPT_PAUSE_SECONDS = 1.0
"""How long no connection is taken after one could not be."""


class SocketEngineLink:
    """Listens on a unix socket. A sender that connects again takes its name over."""

    def __init__(
        self,
        path: str,
        *,
        peer_uid: Callable[[socket.socket], int | None] = peer_uid,
    ) -> None:
        """A socket that an earlier engine has left at `path` is replaced."""
        self._peer_uid = peer_uid
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(path).unlink(missing_ok=True)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._accept_again: float | None = None
        """When the listening socket is polled again; None while it is."""
        self._connections: set[_Connection] = set()
        self._senders: dict[str, _Connection] = {}

    def poll(self, timeout: float) -> list[tuple[str, Sequence[Buffer]]]:
        deadline = time.monotonic() + timeout
        received: list[tuple[str, Sequence[Buffer]]] = []
        done = False
        while not done:
            left = max(0.0, deadline - time.monotonic())
            if self._accept_again is not None:
                left = min(left, self._resume_accepting())
            for key, events in self._selector.select(left):
                connection: _Connection | None = key.data
                if connection is not None:
                    if connection not in self._connections:
                        continue  # its name was taken over a moment ago
                    done = self._serve(connection, events, received) or done
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    done = True
                    with suppress(BlockingIOError):
                        os.read(self._wake_out, 4096)
            done = done or bool(received) or time.monotonic() >= deadline
        return received

    def send(self, sender: str, frames: Sequence[Buffer], fds: Sequence[int] = ()) -> bool:
        connection = self._senders.get(sender)
        return connection is not None and connection.send(message_pieces(frames, len(fds)), fds)

    def wake(self) -> None:
        # A full pipe has woken the thread already; a closed one has no reader.
        with suppress(BlockingIOError, OSError):
            os.write(self._wake_in, b"\0")

    def close(self) -> None:
        self._linger()
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        pipe, self._wake_in = self._wake_in, -1  # a late `wake` must not hit a reused number
        os.close(pipe)
        os.close(self._wake_out)

    # --- the polling thread -------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # too many descriptors: the socket would stay readable
            logger.error("an API process cannot be connected now: %s", error.strerror)
            self._selector.unregister(self._listener)
            self._accept_again = time.monotonic() + ACCEPT_PAUSE_SECONDS
            return
        try:
            require_same_user(self._peer_uid(link))
        except ProtocolError as error:
            logger.error("refused a connection: %s", error.message)
            link.close()
            return
        self._connections.add(_Connection(link, self._selector))

    def _resume_accepting(self) -> float:
        """Seconds until the listening socket is polled again."""
        assert self._accept_again is not None
        left = self._accept_again - time.monotonic()
        if left <= 0:
            self._accept_again = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        return max(0.0, left)

    def _serve(
        self,
        connection: _Connection,
        events: int,
        received: list[tuple[str, Sequence[Buffer]]],
    ) -> bool:
        """Read and write one slice of a connection. True when a sender has come or gone."""
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if not events & selectors.EVENT_READ:
            return False
        try:
            messages = connection.receive()
        except BlockingIOError:
            return False
        except (OSError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                logger.error("sender %.40r is cut off: %s", connection.sender, error.message)
            elif not isinstance(error, ConnectionError):
                logger.error("sender %.40r is cut off: %s", connection.sender, error)
            self._drop(connection)
            return True
        received.extend((connection.sender, frames) for frames, _ in messages)
        return self._has_come(connection)

    def _has_come(self, connection: _Connection) -> bool:
        """Whether this is a new sender; its earlier connection is closed then."""
        earlier = self._senders.get(connection.sender)
        if not connection.sender or earlier is connection:
            return False
        with connection.greeting_first():
            self._senders[connection.sender] = connection
        if earlier is not None:
            self._drop(earlier)
        return True

    def _drop(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if self._senders.get(connection.sender) is connection:
            del self._senders[connection.sender]
        connection.close()

    def _linger(self) -> None:
        """Write what is left, as long as the readers take it."""
        deadline = time.monotonic() + LINGER_SECONDS
        while any(c.writing for c in self._connections) and time.monotonic() < deadline:
            for key, events in self._selector.select(LINGER_SECONDS / 10):
                if key.data is not None and events & selectors.EVENT_WRITE:
                    key.data.flush()


class _Connection:
    """One connection. The polling thread receives and closes; any thread sends, under a lock."""

    def __init__(self, link: socket.socket, selector: selectors.BaseSelector) -> None:
        self.sender = ""
        """Empty until the greeting has come."""
        self.writing = False
        """The socket has not taken everything: the polling thread writes the rest."""
        self._link = link
        self._selector = selector
        self._reader = FrameReader()
        self._unsent = SendQueue()
        self._lock = threading.Lock()
        self._gone = False
        """Closed, or the peer does not receive any more."""
        selector.register(link, selectors.EVENT_READ, self)

    def receive(self) -> list[Message]:
        """One slice. Raises `BlockingIOError`, `ProtocolError`, or `OSError` at the end."""
        messages = self._reader.receive(self._link, SLICE_BYTES, DONTWAIT)
        if not self.sender and self._reader.peer is not None:
            self.sender = self._reader.peer
            if not self.sender:
                raise ProtocolError("a sender without a name")
        return messages

    @contextmanager
    def greeting_first(self) -> Iterator[None]:
        """Send the greeting; a message of another thread that finds the sender meanwhile waits."""
        with self._lock:
            yield
            self._unsent.put([greeting()])
            self._write()

    def send(self, pieces: Sequence[Buffer], fds: Sequence[int] = ()) -> bool:
        """Write what the socket takes now. False when the peer is gone."""
        with self._lock:
            if self._gone:
                return False
            if self.writing:
                self._unsent.put(pieces, fds)
                return True
            if len(pieces) == 1 and not fds and len(pieces[0]) <= SLICE_BYTES:
                try:
                    sent = self._link.send(pieces[0], DONTWAIT)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    self._shut()
                    return False
                if sent == len(pieces[0]):
                    return True
                pieces = (memoryview(pieces[0])[sent:],)
            self._unsent.put(pieces, fds)
            self._write()
            return not self._gone

    def flush(self) -> None:
        """Write one slice of what is left."""
        with self._lock:
            if not self._gone:
                self._write()

    def close(self) -> None:
        with self._lock:
            self._gone = True
            self._selector.unregister(self._link)
            self._link.close()
            self._unsent.close()
            self._reader.close()

    def _write(self) -> None:
        try:
            if self._unsent:
                self._unsent.write(self._link)
        except BlockingIOError:
            pass
        except OSError:
            self._shut()
            return
        if bool(self._unsent) != self.writing:
            self.writing = not self.writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.writing else 0)
            self._selector.modify(self._link, events, self)

    def _shut(self) -> None:
        """The peer does not receive: let the polling thread find the connection's end."""
        self._gone = True
        self._unsent.close()
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
