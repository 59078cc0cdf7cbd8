"""What the options that are numbers may be, checked once, before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass

DIGITS = re.compile("[0-9]{1,9}")
"""A whole number within a text: of few ASCII digits, where Python would take more and others."""


@dataclass(frozen=True, slots=True)
class Range:
    """What a number may be: `least` (or, where `above`, more than it) to `most`."""

    least: float
    most: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        enough = value > self.least if self.above else value >= self.least
        return enough and value <= self.most  # nan is neither

    def __str__(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.least} and at most {self.most}"


_MEMORY_GB = Range(0, 1 << 20, above=True)
_SECONDS = Range(0, 1_000_000, above=True)
_COUNT = Range(1, (1 << 31) - 1)
OPTION_RANGES = {
    "port": Range(0, 65_535),
    "api_processes": Range(1, 1_024),
    "max_model_len": _COUNT,
    "max_num_seqs": Range(1, 65_536),
    "max_num_batched_tokens": Range(1, 1 << 24),
    "max_queue": _COUNT,
    "kv_cache_gb": _MEMORY_GB,
    "block_size": Range(1, 65_536),
    "encoder_cache_gb": _MEMORY_GB,
    "encoder_cache_host_gb": Range(0, 1 << 20),
    "mm_processor_cache_gb": Range(0, 1 << 20),
    "media_timeout": _SECONDS,
    "max_media_bytes": Range(1, 1 << 40),
    "max_image_pixels": Range(1, 1 << 40),
    "max_audio_seconds": _SECONDS,
    "engine_stall_timeout": _SECONDS,
}
"""Every option that is a number. The most is what no machine has: a slip, or no number at all."""
