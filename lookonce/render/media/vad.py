"""Voice activity detection: the probability of speech in frames of 32 ms, by Silero's model.

The model keeps a state per detector. It is computed in a process of its own, for it holds Python's
lock, and its OpenMP threads would be the event loop's otherwise: 0.2 ms a frame, so that 64 people
who speak at once take a third of one core. The process starts with the first detector and ends
with the block around `VoiceDetectors`.

    VoiceDetectors ── header, frames ──▶ vad_worker
                   ◀── header, float32 ──
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from lookonce.errors import RequestFailedError
from lookonce.ipc.worker_process import start_worker

logger = logging.getLogger("lookonce.render")

VOICE_RATE = 16_000
FRAME_SAMPLES = 512
FRAME_MILLISECONDS = 32
FRAME_BYTES = 2 * FRAME_SAMPLES
HEADER = struct.Struct("<QI")
"""Detector, and bytes that follow; a request without bytes ends the detector."""
MAX_REQUEST_BYTES = 1 << 20
PATIENCE = 10.0
"""Seconds that an answer may take; a second of sound takes a hundredth of one."""
START_PATIENCE = 3
"""Times as long that the first answer may take, before which the process imports its model."""
COMMAND = (sys.executable, "-m", "lookonce.render.media.vad_worker")


class VoiceDetectors:
    """The detectors of one process; use it on an event loop."""

    def __init__(self, command: Sequence[str] = COMMAND, *, patience: float = PATIENCE) -> None:
        """`patience`: seconds that an answer may take, and the process's start three times."""
        self._command = command
        self._patience = patience
        self._numbers = itertools.count(1)
        self._worker: _Worker | None = None
        self._starting = asyncio.Lock()
        self._open = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()

    @property
    def num_open(self) -> int:
        return self._open

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        return None if self._worker is None else self._worker.pid

    def open(self) -> VoiceDetector:
        self._open += 1
        return VoiceDetector(self, next(self._numbers))

    async def detect(self, detector: int, frames: bytes) -> list[float]:
        """One probability per frame; a worker that died, or that does not answer in time, is ended
        and started again, once."""
        for last in (False, True):
            worker = await self._running()
            try:
                return await worker.detect(detector, frames)
            except ConnectionError:
                if self._worker is worker:
                    self._worker = None
                    logger.warning("the process that detects voices has ended, or did not answer")
                await worker.close()
                if last:
                    break
        raise RequestFailedError("voices cannot be detected now")

    def forget(self, detector: int) -> None:
        self._open -= 1
        if self._worker is not None:
            self._worker.forget(detector)

    async def _running(self) -> _Worker:
        async with self._starting:
            if self._worker is None:
                self._worker = await _Worker.start(self._command, self._patience)
            return self._worker


class VoiceDetector:
    """One stream of frames. `close` it at the end."""

    def __init__(self, detectors: VoiceDetectors, number: int) -> None:
        self._detectors = detectors
        self._number = number
        self._closed = False

    async def detect(self, frames: bytes) -> list[float]:
        """The probability of speech in each frame of 16-bit samples at 16 kHz.

        Raises `RequestFailedError`.
        """
        assert len(frames) % FRAME_BYTES == 0, "whole frames"
        return await self._detectors.detect(self._number, frames)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._detectors.forget(self._number)


class _Worker:
    """The process, and the requests that wait for its answers, which come in order."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        patience: float,
    ) -> None:
        self._process = process
        self._patience = START_PATIENCE * patience
        """Seconds that the next answer may take."""
        self._usual_patience = patience
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, command: Sequence[str], patience: float) -> _Worker:
        try:
            ours, process = start_worker(command)
            ours.setblocking(False)
            return cls(process, *await asyncio.open_unix_connection(sock=ours), patience)
        except OSError as error:
            raise RequestFailedError("voices cannot be detected now") from error

    async def detect(self, detector: int, frames: bytes) -> list[float]:
        """Raises `ConnectionError` where the process has ended or does not answer; it is ended,
        and what others asked of it fails in the same way. One request at a time is sent: the others
        wait here, in the order they came."""
        await self._turn.acquire()  # who is cancelled here has asked nothing, and `forget` is last
        try:
            self._writer.write(HEADER.pack(detector, len(frames)) + frames)
            exchange = asyncio.create_task(self._answer(len(frames) // FRAME_BYTES))
        except BaseException:
            self._turn.release()
            raise
        exchange.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(exchange)  # who is cancelled leaves no answer to the next one

    async def _answer(self, num_frames: int) -> list[float]:
        """To what was asked last; ends the turn."""
        try:
            async with asyncio.timeout(self._patience):
                await self._writer.drain()
                answer = await self._reader.readexactly(4 * num_frames)
        except (asyncio.IncompleteReadError, TimeoutError) as error:
            self._process.kill()
            self._writer.close()
            raise ConnectionResetError from error
        finally:
            self._turn.release()
        self._patience = self._usual_patience
        found: list[float] = np.frombuffer(answer, "<f4").tolist()
        return found

    def forget(self, detector: int) -> None:
        if not self._writer.is_closing():
            self._writer.write(HEADER.pack(detector, 0))

    async def close(self) -> None:
        self._writer.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
