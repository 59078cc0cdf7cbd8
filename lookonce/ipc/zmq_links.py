"""The links over ZMQ: DEALER in the API process, ROUTER in the engine process."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from lookonce.ipc.links import LinkEvents
from lookonce.types.media import Buffer

RECONNECT_MS = 50
MAX_BATCH = 256
"""Messages one `poll` takes before its owner gets to do other work."""

_monitor_numbers = itertools.count()


class ZmqClientLink:
    """A DEALER driven by the event loop's readiness, without a task switch per message.

    When the engine goes away the socket is replaced: nothing meant for the dead engine can
    reach its successor, and its memory is freed at once.
    """

    def __init__(self, address: str, sender: str) -> None:
        self._address = address
        self._identity = sender.encode("latin-1")
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def open(self, events: LinkEvents) -> None:
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._connect()

    def send(self, frames: Sequence[Buffer]) -> None:
        if self._socket is None:
            return
        _send(self._socket, frames)
        # Sending may swallow the readiness edge of a message that came meanwhile.
        if int(self._socket.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def close(self) -> None:
        self._disconnect()
        self._context.term()

    def _connect(self) -> None:
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set_hwm(0)
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED,
            f"inproc://lookonce-monitor-{next(_monitor_numbers)}",
        )
        self._loop.add_reader(socket.FD, self._read)
        self._loop.add_reader(self._monitor.FD, self._watch)
        socket.connect(self._address)
        self._loop.call_soon(self._watch)

    def _disconnect(self) -> None:
        if self._socket is None or self._monitor is None:
            return
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._socket = self._monitor = None

    def _read(self) -> None:
        """Take everything that has come: the readiness of a ZMQ socket is an edge, not a level."""
        try:
            while self._socket is not None:
                self._events.link_frames(_receive(self._socket))
        except zmq.Again:
            return
        except Exception:
            self._loop.call_soon(self._read)  # what is left would wait for an edge that has been
            raise

    def _watch(self) -> None:
        while self._monitor is not None:
            try:
                parts = self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            event = parse_monitor_message(parts)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._events.link_up()
            elif event == zmq.EVENT_DISCONNECTED:
                self._read()
                self._disconnect()
                self._events.link_down()
                self._connect()


class ZmqEngineLink:
    """A ROUTER owned by one thread; a pipe lets other threads end its wait."""

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
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_out, zmq.POLLIN)

    def poll(self, timeout: float) -> list[tuple[str, Sequence[Buffer]]]:
        ready = dict(self._poller.poll(max(0, round(timeout * 1000))))
        if self._wake_out in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_out, 4096)
        received: list[tuple[str, Sequence[Buffer]]] = []
        while self._socket in ready and len(received) < MAX_BATCH:
            try:
                identity, *frames = _receive(self._socket)
            except zmq.Again:
                break
            received.append((bytes(identity).decode("latin-1"), frames))
        return received

    def send(self, sender: str, frames: Sequence[Buffer]) -> bool:
        try:
            _send(self._socket, [sender.encode("latin-1"), *frames])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def wake(self) -> None:
        # A full pipe has woken the thread already; a closed one has nobody to wake.
        with suppress(BlockingIOError, OSError):
            os.write(self._wake_in, b"\0")

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        pipe, self._wake_in = self._wake_in, -1  # a late `wake` must not hit a reused number
        os.close(pipe)
        os.close(self._wake_out)


def _send(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """One message, never waiting. Bytes are heads and names, which are small: they are copied."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = zmq.DONTWAIT if index == last else zmq.DONTWAIT | zmq.SNDMORE
        socket.send(frame, flags, copy=isinstance(frame, bytes))


def _receive(socket: zmq.Socket[bytes]) -> list[Buffer]:
    """One message: its small first frame copied, the others as views. Raises `zmq.Again`."""
    frames: list[Buffer] = [socket.recv(zmq.DONTWAIT)]
    while socket.RCVMORE:
        frames.append(socket.recv(zmq.DONTWAIT, copy=False).buffer)
    return frames
