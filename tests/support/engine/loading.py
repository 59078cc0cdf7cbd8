"""Engines with a real model, as a test asks for them."""

from __future__ import annotations

import dataclasses

from lookonce.config import EncoderConfig, KVConfig, ModelConfig, SchedulerConfig
from lookonce.engine.process.load_engine import load_engine
from lookonce.engine.process_io import EngineSettings


def settings(folder, **changes):
    plain = EngineSettings(
        model=ModelConfig(str(folder), "m"),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512),
        kv=KVConfig(cache_bytes=1 << 20),
        encoder=EncoderConfig(cache_bytes=1 << 20),
        address="/nowhere",
    )
    return dataclasses.replace(plain, **changes)


def build(given):
    return load_engine(given, lambda done, total: None)
