"""`lookonce bench NAME`: finds the module of a benchmark and hands it the other arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import lookonce
from lookonce.errors import ConfigError

BENCHMARKS: dict[str, tuple[str, str]] = {
    "attention": ("benchmarks.attention", "our attention kernel beside what torch offers"),
    "engine": ("benchmarks.engine", "a decode step beside the bare model and transformers"),
    "items": ("benchmarks.items", "what 128,000 media items in one request cost per step"),
    "kv": ("benchmarks.kv", "a long prompt's KV: computed, on the device, from each tier"),
    "look": ("benchmarks.look", "what a picture costs when known, when new, uncached"),
    "prefetch": ("benchmarks.prefetch", "first tokens when pictures come late in the prompt"),
    "nano": ("benchmarks.nano", "how often nano answers right about what it never saw"),
    "render": (
        "benchmarks.render",
        "what /render and /tokenize cost beside the picture's work",
    ),
    "serve": ("benchmarks.serve", "a server under load: rates, percentiles, caches; a peer"),
    "start": ("benchmarks.start", "from the command to /ready, and the first requests"),
    "warmup": ("benchmarks.warmup", "the first request after /ready beside later ones"),
}
"""Name → module, whose `main(arguments)` returns the exit status, and what it measures."""
CHECKOUT = Path(lookonce.__file__).parents[1]


def run_benchmark(name: str, arguments: Sequence[str]) -> int:
    """The exit status of benchmark `name`; `list` shows which there are."""
    if name in ("list", "--help"):
        for known, (_, measures) in sorted(BENCHMARKS.items()):
            print(f"{known:12} {measures}")
        return 0
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    if not (CHECKOUT / "benchmarks" / "running_server.py").is_file():
        raise ConfigError(
            "the benchmarks are not installed with the package: they are in benchmarks/ of "
            "LookOnce's source; install a checkout with `pip install -e .`, then run them again"
        )
    sys.path.insert(0, str(CHECKOUT))
    path = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)  # for the processes that benchmarks start
    module, _ = BENCHMARKS[name]
    return int(import_module(module).main(list(arguments)) or 0)
