"""What the engine process is told when it starts: one line of JSON on its standard input."""

from __future__ import annotations

from dataclasses import dataclass, field

from lookonce.config import (
    Config,
    EncoderConfig,
    KVConfig,
    MediaConfig,
    ModelConfig,
    SchedulerConfig,
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The parts of the configuration the engine process uses."""

    model: ModelConfig
    scheduler: SchedulerConfig
    kv: KVConfig
    encoder: EncoderConfig
    address: str
    """ZMQ endpoint the engine binds."""
    media: MediaConfig = field(default_factory=MediaConfig)
    """Its limits say what the largest items are that the engine warms up with."""
    num_senders: int = 1
    """API processes the processor cache's budget is divided by."""


def engine_settings(config: Config) -> EngineSettings:
    return EngineSettings(
        model=config.model,
        scheduler=config.scheduler,
        kv=config.kv,
        encoder=config.encoder,
        address=config.channel.address,
        media=config.media,
        num_senders=config.server.api_processes,
    )
