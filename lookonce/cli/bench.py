"""`lookonce bench NAME`: finds the module of a benchmark and hands it the other arguments."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from lookonce.errors import ConfigError

BENCHMARKS: dict[str, tuple[str, str]] = {
    "attention": ("lookonce.bench.micro", "our attention kernel beside what torch offers"),
    "engine": ("lookonce.bench.engine", "a decode step beside the bare model and transformers"),
    "items": ("lookonce.bench.items", "what 128,000 media items in one request cost per step"),
    "kv": ("lookonce.bench.kv", "a long prompt's KV: computed, on the device, from each tier"),
    "look": ("lookonce.bench.look", "what a picture costs when known, when new, uncached"),
    "prefetch": ("lookonce.bench.prefetch", "first tokens when pictures come late in the prompt"),
    "nano": ("lookonce.bench.nano", "how often nano answers right about what it never saw"),
    "render": (
        "lookonce.bench.render",
        "what /render and /tokenize cost beside the picture's work",
    ),
    "serve": ("lookonce.bench.serve", "a server under load: rates, percentiles, caches; a peer"),
    "start": ("lookonce.bench.start", "from the command to /ready, and the first requests"),
    "warmup": ("lookonce.bench.warmup", "the first request after /ready beside later ones"),
}
"""Name → module, whose `main(arguments)` returns the exit status, and what it measures."""


def run_benchmark(name: str, arguments: Sequence[str]) -> int:
    """The exit status of benchmark `name`; `list` shows which there are."""
    if name in ("list", "--help"):
        for known, (_, measures) in sorted(BENCHMARKS.items()):
            print(f"{known:12} {measures}")
        return 0
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    module, _ = BENCHMARKS[name]
    return int(import_module(module).main(list(arguments)) or 0)
