"""`lookonce bench kv`: what a prompt's KV costs to compute, and to get back from each tier.

first token   a 4,000-token prompt with pictures: computed, found on the device, in each tier
bandwidth     loading and storing blocks, beside the plain operation underneath
stores        tokens/s of running requests while their KV is stored, over those without a tier
loop          CPU time the step loop spends inside tier calls, while a Valkey hangs and dies
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.kv_bandwidth import bandwidth_report
from benchmarks.kv_subject import (
    BenchEngine,
    load_subject,
    make_folder,
    prompt_with_pictures,
)
from benchmarks.lmcache_server import LMCacheServer
from benchmarks.report import Report, median, percentile
from benchmarks.valkey_server import ValkeyServer
from lookonce.errors import ConfigError
from lookonce.kv.connector import KVConnector
from lookonce.model.loader import LoadedModel
from lookonce.types.kv import TierSpec

PROMPT_TOKENS, PICTURES = 4000, 8
HOST_BYTES, DISK_BYTES, LMCACHE_GB = 1 << 29, 1 << 31, 0.5
PAIRS = 7


def first_token_report(loaded: LoadedModel, tiers: dict[str, TierSpec], repeats: int) -> Report:
    """One row per place the prompt's KV comes from."""
    report = Report(
        "kv (first token)",
        ("from", "ms", "of computing", "loaded tokens"),
        notes=[f"{PROMPT_TOKENS:,} tokens, {PICTURES} pictures, medians of {repeats}"],
    )
    with BenchEngine(loaded) as plain:
        _first_token(plain, 0, forget=True)
        computed = [_first_token(plain, n, forget=True)[0] for n in range(1, repeats + 1)]
        held = [_first_token(plain, repeats, forget=False)[0] for _ in range(repeats)]
    base = median(computed)
    report.add("computed", 1e3 * base, 1.0, 0)
    report.add("device", 1e3 * median(held), median(held) / base, 0)
    for name, tier in tiers.items():
        with BenchEngine(loaded, tier) as engine:
            _first_token(engine, 0, forget=True)
            engine.settle()
            rows = [_first_token(engine, 0, forget=True) for _ in range(repeats)]
        seconds = median([row[0] for row in rows])
        report.add(name, 1e3 * seconds, seconds / base, int(median([row[1] for row in rows])))
    return report


def _first_token(engine: BenchEngine, seed: int, *, forget: bool) -> tuple[float, int]:
    """Seconds, and the tokens loaded from tiers."""
    if forget:
        engine.forget_device()
    prompt = prompt_with_pictures(str(time.time_ns()), PROMPT_TOKENS, PICTURES, seed=seed)
    seconds, deltas = engine.run([prompt])
    facts = deltas[0].facts
    return seconds, 0 if facts is None else facts.external_cached_tokens


def stores_report(loaded: LoadedModel, tiers: dict[str, TierSpec], pairs: int) -> Report:
    """Both engines in turn, so that noise hits both alike."""
    report = Report(
        "kv (throughput while stores go on)",
        ("tier", "tok/s without", "tok/s with", "ratio", "stored MB", "dropped blocks"),
        notes=[f"8 requests of 256 + 48 new tokens each, medians of {pairs} pairs"],
    )
    for name, tier in tiers.items():
        with BenchEngine(loaded) as plain, BenchEngine(loaded, tier) as storing:
            _throughput(plain, -1)
            _throughput(storing, -1)
            rows = []
            for pair in range(pairs):
                order = (plain, storing) if pair % 2 else (storing, plain)
                rates = {engine: _throughput(engine, pair) for engine in order}
                rows.append((rates[plain], rates[storing], rates[storing] / rates[plain]))
            storing.settle()
            stats = storing.core.stats()
            without, with_tier, ratio = (median(column) for column in zip(*rows, strict=True))
            stored = stats[f"kv_tier_stored_bytes_total:{tier.kind}"] / 1e6
            dropped = stats[f"kv_tier_dropped_stores_total:{tier.kind}"]
            dropped += stats["kv_transfer_dropped_stores_total"]
            report.add(name, without, with_tier, ratio, stored, int(dropped))
    return report


def _throughput(engine: BenchEngine, turn: int) -> float:
    """Prompt and generated tokens per second of a batch never seen before."""
    batch = [
        prompt_with_pictures(f"{turn}-{n}", 256, 1, seed=1000 * (turn + 2) + n, max_tokens=48)
        for n in range(8)
    ]
    started = time.perf_counter()
    engine.run(batch)
    return 8 * (256 + 48) / (time.perf_counter() - started)


class LoopStopwatch:
    """CPU seconds of the step thread inside each call of the external tiers."""

    CALLS = ("lookup", "on_allocated", "on_admitted", "on_request_finished", "try_store", "poll")

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def watch(self, connector: KVConnector) -> None:
        for name in self.CALLS:
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds.append(time.thread_time() - started)

        return timed


def loop_report(loaded: LoadedModel, server: ValkeyServer, tier: TierSpec) -> Report:
    """Requests go on while the server is paused, resumed, killed and started again."""
    report = Report(
        "kv (step loop inside tier calls)",
        ("calls", "p50 us", "p99 us", "p99.9 us", "max us", "requests", "errors"),
        notes=["CPU time of the step thread, while a Valkey is paused, killed and restarted"],
    )
    stopwatch = LoopStopwatch()
    faults = threading.Thread(target=_disturb, args=(server,))
    with BenchEngine(loaded, tier, stopwatch=stopwatch.watch) as engine:
        faults.start()
        requests = errors = 0
        while faults.is_alive():
            engine.forget_device()
            batch = [
                prompt_with_pictures(f"{requests}-{n}", 400, 1, seed=n, max_tokens=4)
                for n in range(4)
            ]
            _, deltas = engine.run(batch)
            requests += len(batch)
            errors += sum(delta.error is not None for delta in deltas)
        faults.join()
    taken = [1e6 * seconds for seconds in stopwatch.seconds]
    figures = [percentile(taken, percent) for percent in (50, 99, 99.9, 100)]
    report.add(len(taken), *figures, requests, errors)
    return report


def _disturb(server: ValkeyServer) -> None:
    for act in (server.pause, server.resume, server.kill, server.start):
        time.sleep(2.0)
        act()
    time.sleep(2.0)


@contextmanager
def _tiers() -> Iterator[tuple[dict[str, TierSpec], ValkeyServer | None]]:
    """Fresh ones, by name; Valkey and LMCache where a server is installed."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lookonce-bench-"))
        tiers = {
            "host": TierSpec("host", capacity_bytes=HOST_BYTES),
            "disk": TierSpec("disk", path=f"{folder}/kv", capacity_bytes=DISK_BYTES),
        }
        server = None
        try:
            server = ValkeyServer(Path(folder))
        except ConfigError as error:
            print(f"without Valkey: {error}")
        else:
            stack.callback(server.close)
            tiers["valkey"] = TierSpec("valkey", path=server.socket)
        if find_spec("lmcache") is not None:
            lmcache = LMCacheServer(Path(folder), capacity_gb=LMCACHE_GB)
            stack.callback(lmcache.close)
            tiers["lmcache"] = TierSpec("lmcache", host="127.0.0.1", port=lmcache.port)
        yield tiers, server


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench kv", description=__doc__)
    parser.add_argument("--model", help="folder of a llava model; default: a random one, 8M")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--json", type=Path, help="a folder for one file per table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, _tiers() as (tiers, server):
        model = options.model or str(make_folder("llava", Path(folder), scale="8m"))
        loaded = load_subject(model)
        reports = [
            bandwidth_report(loaded, tiers),
            first_token_report(loaded, tiers, options.repeats),
            stores_report(loaded, tiers, options.pairs),
        ]
        if server is not None:
            reports.append(loop_report(loaded, server, tiers["valkey"]))
    for number, report in enumerate(reports):
        report.show()
        if options.json is not None:
            options.json.mkdir(parents=True, exist_ok=True)
            report.write_json(options.json / f"kv-{number}.json")
    return 0
