"""One WebSocket of `/v1/realtime`: its messages to the session, and the session's events to it.

The client's events are taken one after the other: the next one is read when what the last one
asked of voice detection is known, when the engine has taken its sound (where the model hears live),
when few transcripts wait, and when the client has read most of what was sent. So nothing grows for
a client that sends or does not read: its own socket fills.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from lookonce.errors import LookOnceError, UnauthorizedError
from lookonce.render.media.vad import VoiceDetector, VoiceDetectors
from lookonce.server.http.responses import encode
from lookonce.server.routes.realtime.events import ErrorDetail, ErrorEvent, ServerEvent
from lookonce.server.routes.realtime.session import RealtimeSession
from lookonce.server.routes.realtime.work import SessionTasks
from lookonce.server.services import Drain

MAX_UNSENT_BYTES = 1 << 20
"""Of events that wait for the client to read; one event may go beyond."""
MAX_WAITING_TRANSCRIPTS = 8
NORMAL, GOING_AWAY, POLICY = 1000, 1001, 1008
"""Codes that a WebSocket is closed with."""

GONE = (WebSocketDisconnect, RuntimeError, OSError)
"""What Starlette and uvicorn raise where the client is gone."""

Close: TypeAlias = tuple[int, str]


class Outbox:
    """Events on their way to the client, encoded."""

    def __init__(self, max_bytes: int = MAX_UNSENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting: deque[bytes] = deque()
        self.nbytes = 0
        self._something = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, event: ServerEvent) -> None:
        data = encode(event)
        self._waiting.append(data)
        self.nbytes += len(data)
        self._something.set()
        self._empty.clear()
        if self.nbytes > self._max_bytes:
            self._room.clear()

    async def room(self) -> None:
        """Returns once less than `max_bytes` wait."""
        await self._room.wait()

    async def next(self) -> bytes:
        while not self._waiting:
            self._something.clear()
            await self._something.wait()
        return self._waiting[0]

    def sent(self) -> None:
        """The event that `next` gave is with the client's socket."""
        self.nbytes -= len(self._waiting.popleft())
        if self.nbytes <= self._max_bytes:
            self._room.set()
        if not self._waiting:
            self._empty.set()

    async def wait_empty(self) -> None:
        await self._empty.wait()


class RealtimeConnection:
    """Serves a session on an accepted WebSocket, until one of both ends it."""

    def __init__(
        self,
        websocket: WebSocket,
        session: RealtimeSession,
        work: SessionTasks,
        outbox: Outbox,
        *,
        detectors: VoiceDetectors,
        drain: Drain,
        idle_timeout: float,
        wait_refused: Callable[[], Awaitable[None]],
    ) -> None:
        """`wait_refused` returns once the client's key is not accepted any more."""
        self._websocket = websocket
        self._session = session
        self._work = work
        self._outbox = outbox
        self._detectors = detectors
        self._detector: VoiceDetector | None = None
        self._drain = drain
        self._idle_timeout = idle_timeout
        self._wait_refused = wait_refused

    async def run(self) -> None:
        """Never raises for what the client does."""
        self._session.begin()
        writer = asyncio.create_task(self._write())
        reader = asyncio.create_task(self._read())
        drainer = asyncio.create_task(self._drained())
        refusal = asyncio.create_task(self._refused())
        tasks = {writer, reader, drainer, refusal}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            close = next(
                (each.result() for each in (refusal, reader, drainer) if each in done), None
            )
            if close is not None:
                await self._close(writer, *close)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._session.end()
            self._forget_voice()
            await self._work.close()

    async def _close(self, writer: asyncio.Task[None], code: int, reason: str) -> None:
        """Once the client has what was sent before; a client that does not read is cut off by the
        deadline of its connection."""
        empty = asyncio.create_task(self._outbox.wait_empty())
        await asyncio.wait({empty, writer}, return_when=asyncio.FIRST_COMPLETED)
        empty.cancel()
        with suppress(*GONE):
            await self._websocket.close(code, reason)

    async def _write(self) -> None:
        """Ends when the connection does."""
        while True:
            data = await self._outbox.next()
            try:
                await self._websocket.send_text(data.decode())
            except GONE:
                return
            self._outbox.sent()

    async def _read(self) -> Close | None:
        """How to close, once nothing more is to be read; None: the client is gone."""
        while True:
            await self._outbox.room()
            while self._session.num_transcribing >= MAX_WAITING_TRANSCRIPTS:
                await self._work.wait_any_end()
            message = await self._receive()
            if message is None:
                self._tell("idle_timeout", f"no event came for {self._idle_timeout:g} s")
                return NORMAL, "idle"
            if message["type"] == "websocket.disconnect":
                return None
            await self._take(message)

    async def _receive(self) -> Message | None:
        """None: the client was silent for too long, and nothing was made for it."""
        while True:
            try:
                async with asyncio.timeout(self._idle_timeout):
                    return await self._websocket.receive()
            except TimeoutError:
                if not self._session.busy:
                    return None

    async def _take(self, message: Message) -> None:
        text = message.get("text")
        data = text.encode() if text is not None else message.get("bytes") or b""
        self._session.receive(data)
        await self._listen()
        await self._work.wait_sound_taken()

    async def _listen(self) -> None:
        """Let the session know whether what was appended is speech."""
        if self._work.voice_forgotten:
            self._work.voice_forgotten = False
            self._forget_voice()
        while frames := self._session.frames_to_hear():
            if self._detector is None:
                self._detector = self._detectors.open()
            try:
                found = await self._detector.detect(frames)
            except LookOnceError as error:
                self._forget_voice()
                self._session.voices_lost(error)
                return
            self._session.heard(found)
            await self._work.wait_sound_taken()
            await self._outbox.room()

    def _forget_voice(self) -> None:
        if self._detector is not None:
            self._detector.close()
            self._detector = None

    async def _drained(self) -> Close:
        """How to close, once the server shuts down and this session's work is done."""
        await self._drain.wait_begun()
        self._session.close()
        while self._session.busy:
            await self._work.wait_any_end()
        return GOING_AWAY, "the server shuts down"

    async def _refused(self) -> Close:
        """How to close, once the key that opened the session has expired or was taken away."""
        await self._wait_refused()
        self._session.tell_error(UnauthorizedError("this API key is not accepted any more"))
        return POLICY, "the API key is not accepted any more"

    def _tell(self, code: str, message: str) -> None:
        detail = ErrorDetail(
            type="invalid_request_error", code=code, message=message, param=None, event_id=None
        )
        self._outbox.put(ErrorEvent(error=detail))
