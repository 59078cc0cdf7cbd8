"""Monotone counts of what the scheduler did, under the names of the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    prefix_cache_queries: int = 0
    """Prompt tokens of requests at their first admission."""
    prefix_cache_hits: int = 0
    """Of those, tokens whose K/V were cached."""
    encoder_cache_queries: int = 0
    """Times a sequence needed an encoder output it did not hold."""
    encoder_cache_hits: int = 0
    """Of those, found held, cached or in flight; the others ran the encoder."""
    encoder_cache_restores: int = 0
    """Outputs brought back from host memory."""
    encoder_prefetches: int = 0
    """Outputs computed before a chunk needed them; also counted among the runs."""
    encoder_runs: int = 0
    """Outputs computed."""
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
