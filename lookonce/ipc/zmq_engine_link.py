"""The engine process's end of the ZMQ link: a ROUTER (`zmq_client_link` is the other end)."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from contextlib import suppress

import zmq

from lookonce.types.media import Buffer

MAX_BATCH = 256
"""Messages that one `poll` returns at most, so that its owner gets to do other work."""

# Plain numbers: arithmetic on pyzmq's enumerations costs more than sending.
POLLIN = int(zmq.POLLIN)
LAST = int(zmq.DONTWAIT)
MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class ZmqEngineLink:
    """A ROUTER that one thread reads from and any thread may send on.

    A lock guards every use of the socket. The reader waits without the lock, for the socket's file
    descriptor or for the pipe through which other threads wake it. The descriptor is
    edge-triggered, and any use of the socket may consume the edge: after sending, a thread looks
    whether a message has come, and wakes the reader.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._lock = threading.Lock()
        self._closed = False
        self._poll = select.poll()
        self._poll.register(self._socket.FD, select.POLLIN)
        self._poll.register(self._wake_out, select.POLLIN)

    def poll(self, timeout: float) -> list[tuple[str, Sequence[Buffer]]]:
        ready = self._poll.poll(max(0, round(timeout * 1000)))
        if any(fd == self._wake_out for fd, _ in ready):
            with suppress(BlockingIOError):
                os.read(self._wake_out, 4096)
        received: list[tuple[str, Sequence[Buffer]]] = []
        with self._lock:
            while left := _has_message(self._socket):
                if len(received) == MAX_BATCH:
                    break
                identity, *frames = _receive(self._socket)
                received.append((bytes(identity).decode("latin-1"), frames))
        if left:
            self.wake()  # the descriptor will not announce the messages that are left
        return received

    def send(self, sender: str, frames: Sequence[Buffer]) -> bool:
        with self._lock:
            if self._closed:
                return False
            reached = _try_send(self._socket, sender.encode("latin-1"), frames)
            unread = _has_message(self._socket)
        if unread:
            self.wake()
        return reached

    def wake(self) -> None:
        # A full pipe has woken the thread already; a closed one has no reader.
        with suppress(BlockingIOError, OSError):
            os.write(self._wake_in, b"\0")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._socket.close()
        self._context.term()
        pipe, self._wake_in = self._wake_in, -1  # a late `wake` must not hit a reused number
        os.close(pipe)
        os.close(self._wake_out)


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether one can be received; quicker than asking for EVENTS or catching `zmq.Again`."""
    return bool(zmq.zmq_poll([(socket, POLLIN)], 0))


def _try_send(socket: zmq.Socket[bytes], identity: bytes, frames: Sequence[Buffer]) -> bool:
    """One message, never waiting. Bytes are heads and names, which are small: they are copied."""
    try:
        socket.send(identity, MORE)
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    *first, last = frames
    for frame in first:
        socket.send(frame, MORE, copy=isinstance(frame, bytes))
    socket.send(last, LAST, copy=isinstance(last, bytes))
    return True


def _receive(socket: zmq.Socket[bytes]) -> list[Buffer]:
    """One message: its small first frame copied, the others as views. Raises `zmq.Again`."""
    frame = socket.recv(zmq.DONTWAIT, copy=False)
    frames: list[Buffer] = [frame.bytes]
    while frame.more:  # a frame knows it; asking the socket takes longer than receiving
        frame = socket.recv(zmq.DONTWAIT, copy=False)
        frames.append(frame.buffer)
    return frames
