"""What the engine process is told when it starts: one line of JSON on its standard input."""

from __future__ import annotations

from dataclasses import dataclass

from lookonce.config import Config, EncoderConfig, KVConfig, ModelConfig, SchedulerConfig


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The parts of the configuration the engine process uses."""

    model: ModelConfig
    scheduler: SchedulerConfig
    kv: KVConfig
    encoder: EncoderConfig
    address: str
    """ZMQ endpoint the engine binds."""
    num_senders: int = 1
    """API processes the processor cache's budget is divided by."""


def engine_settings(config: Config) -> EngineSettings:
    return EngineSettings(
        model=config.model,
        scheduler=config.scheduler,
        kv=config.kv,
        encoder=config.encoder,
        address=config.channel.address,
        num_senders=config.server.api_processes,
    )
