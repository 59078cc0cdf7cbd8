"""The state of the engine as one client sees it, from connections and heartbeats."""

from __future__ import annotations

import asyncio
from typing import Literal

from lookonce.errors import EngineDeadError, NotReadyError
from lookonce.ipc.messages import Heartbeat
from lookonce.types.model import ModelInfo
from lookonce.types.ports import Clock

EngineState = Literal["starting", "ready", "stuck", "dead"]


class EngineHealth:
    """The engine's state as one client sees it.

    starting ── welcome ──▶ ready ◀── a step takes too long ──▶ stuck
        ▲                     └───────── connection lost ─────────┴──▶ dead
        └────────────────────────── connected again ─────────────────────┘
    """

    def __init__(self, stall_timeout: float, clock: Clock) -> None:
        self.connected = False
        self._stall_timeout = stall_timeout
        self._clock = clock
        self._was_connected = False
        self._ready = asyncio.Event()
        self._model: ModelInfo | None = None
        self._last_beat = 0.0
        self._stalled = 0.0

    @property
    def state(self) -> EngineState:
        """ "dead" only after a connection was lost; "stuck" while a step takes too long."""
        if not self.connected:
            return "dead" if self._was_connected else "starting"
        if not self._ready.is_set():
            return "starting"
        silent = self._clock() - self._last_beat
        return "stuck" if self._stalled + silent > self._stall_timeout else "ready"

    @property
    def model(self) -> ModelInfo:
        """The served model, also after the engine has died; `NotReadyError` before it was ready."""
        if self._model is None:
            raise NotReadyError("the model is still loading")
        return self._model

    async def wait_ready(self) -> None:
        await self._ready.wait()

    def require_ready(self) -> None:
        """Raises `NotReadyError` or `EngineDeadError` unless the engine takes requests now."""
        match self.state:
            case "starting":
                raise NotReadyError("the model is still loading")
            case "dead":
                raise EngineDeadError("the engine is not running; it is being restarted")
            case "stuck":
                raise EngineDeadError("the engine does not answer")

    def connect(self) -> None:
        self.connected = self._was_connected = True
        self._last_beat = self._clock()

    def welcome(self, model: ModelInfo, *, ready: bool) -> None:
        self._model = model
        self._last_beat = self._clock()
        if ready:
            self._ready.set()

    def beat(self, message: Heartbeat, epoch: int) -> None:
        """`epoch`: that of the engine that has sent its welcome."""
        self._last_beat = self._clock()
        self._stalled = message.stalled_seconds
        if message.ready and message.epoch == epoch:
            self._ready.set()

    def disconnect(self) -> None:
        self.connected = False
        self._ready.clear()
        self._stalled = 0.0
