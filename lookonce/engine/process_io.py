"""What a supervisor tells the engine process, and hears from it and from API processes.

stdin   `EngineSettings`, one line of JSON
stdout  `ProgressEvent`s, one line of JSON each
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from lookonce.config import (
    Config,
    EncoderConfig,
    EventsConfig,
    KVConfig,
    LoRAConfig,
    MediaConfig,
    ModelConfig,
    SchedulerConfig,
)
from lookonce.errors import WireError
from lookonce.types.logs import LogConfig


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The parts of the configuration that the engine process uses."""

    model: ModelConfig
    scheduler: SchedulerConfig
    kv: KVConfig
    encoder: EncoderConfig
    address: str
    """The path of the unix socket that the engine listens on."""
    media: MediaConfig = field(default_factory=MediaConfig)
    """Its limits decide how large the items are that the engine warms up with."""
    num_senders: int = 1
    """API processes, which share the processor cache's budget equally."""
    logs: LogConfig = field(default_factory=LogConfig)
    events: EventsConfig | None = None
    lora: LoRAConfig | None = None
    """None: no adapters are served."""
    restarted: bool = False
    """An engine served before this one. Adapters whose folders cannot be read any more do not keep
    it from starting."""


def engine_settings(config: Config) -> EngineSettings:
    return EngineSettings(
        model=config.model,
        scheduler=config.scheduler,
        kv=config.kv,
        encoder=config.encoder,
        address=config.channel.address,
        media=config.media,
        num_senders=config.server.api_processes,
        logs=config.logs,
        events=config.events,
        lora=config.lora,
    )


class EngineLoading(msgspec.Struct, frozen=True, tag="loading"):
    """Weights are being loaded; `total` is 0 while it is not known."""

    done: int
    total: int


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The process takes requests."""

    seconds: float
    """From the start of the process."""


class EngineAlive(msgspec.Struct, frozen=True, tag="alive"):
    """Sent twice a second by the input thread."""

    stalled_seconds: float
    """How long the step in progress has taken so far; 0 when idle."""


class StartFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The process cannot start; `error` as in `errors.error_to_wire`."""

    error: WireError


ProgressEvent = EngineLoading | Serving | EngineAlive | StartFailed


_decoder: msgspec.json.Decoder[ProgressEvent] = msgspec.json.Decoder(ProgressEvent)


def parse_progress(line: bytes) -> ProgressEvent | None:
    """The event of a line; None for a line that holds none."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None


class ProgressPipe:
    """Writes events to a file descriptor; they are dropped where the parent does not read them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def tell(self, event: ProgressEvent) -> None:
        line = msgspec.json.encode(event) + b"\n"
        with self._lock:
            if select.select([], [self._fd], [], 0)[1]:
                with suppress(OSError):
                    os.write(self._fd, line)

    def loading(self, done: int, total: int) -> None:
        """Tell `EngineLoading`, at most once per percent."""
        if total and (done in (0, total) or done * 100 // total != (done - 1) * 100 // total):
            self.tell(EngineLoading(done, total))
