"""`lookonce bench kv`: what a prompt's KV costs to compute, and to load from each tier.

bandwidth     loading and storing blocks, beside the plain operation underneath in the same run
first token   a 4,000-token prompt with pictures: computed, found on the device, in each tier
encoder       a short prompt with the same pictures after other text: encoded, and in each tier
stores        tokens/s of running requests while their KV is stored, over those without a tier
loop          CPU time that the step loop spends inside tier calls, while a Valkey hangs and dies
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench_engine import (
    BenchEngine,
    load_bench_model,
    prompt_with_pictures,
)
from benchmarks.report import Report, median, percentile, write_json
from lookonce.errors import ConfigError
from lookonce.kv.chain import open_chain
from lookonce.kv.connector import KVConnector
from lookonce.kv.objects import ObjectFormat, namespace_digest
from lookonce.kv.valkey import RespConnection, command, packed
from lookonce.model.kv_pages import PageCopier
from lookonce.model.loader import LoadedModel
from lookonce.types.kv import KVLayout, TierSpec
from tests.support.kv_servers import LMCacheServer, ValkeyServer
from tests.support.model_folders.make import make_folder

PROMPT_TOKENS, PICTURES = 4000, 8
HOST_BYTES, DISK_BYTES, LMCACHE_GB = 1 << 29, 1 << 31, 0.5
PAIRS = 7


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
        loaded = load_bench_model(model)
        reports = [
            bandwidth_report(loaded, tiers),
            first_token_report(loaded, tiers, options.repeats),
            encoder_report(loaded, tiers, options.repeats),
            stores_report(loaded, tiers, options.pairs),
        ]
        if server is not None:
            reports.append(loop_report(loaded, server, tiers["valkey"]))
    for number, report in enumerate(reports):
        report.show()
        if options.json is not None:
            options.json.mkdir(parents=True, exist_ok=True)
            write_json(options.json / f"kv-{number}.json", [report])
    return 0


@contextmanager
def _tiers() -> Iterator[tuple[dict[str, TierSpec], ValkeyServer | None]]:
    """New tiers by name, Valkey and LMCache where a server is installed; and the Valkey server."""
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


# --- Bandwidth -----------------------------------------------------------------------------------

NUM_BLOCKS = 240
SLICE = 20
"""Blocks that a worker moves in one call."""
ROUNDS = 5


def bandwidth_report(loaded: LoadedModel, tiers: dict[str, TierSpec]) -> Report:
    """One row per tier: GB/s of the best round; each round writes and reads blocks of its own."""
    pages = loaded.kv_pages(NUM_BLOCKS, 16)
    copier = PageCopier(pages)
    size = copier.layout.block_bytes
    report = Report(
        "kv (bandwidth)",
        ("tier", "load GB/s", "store GB/s", "raw load", "raw store", "raw is"),
        notes=[f"{NUM_BLOCKS} blocks of {size:,} bytes, best of {ROUNDS}; tiers verify every read"],
    )
    rng = np.random.default_rng(0)
    source = np.frombuffer(rng.bytes(NUM_BLOCKS * size), dtype=np.uint8).copy()
    ids = list(range(NUM_BLOCKS))
    load = _best(lambda: copier.scatter(ids, source.data), source.nbytes)
    store = _best(lambda: copier.gather(ids, source.data), source.nbytes)
    copy = _best(lambda: np.copyto(np.empty_like(source), source), source.nbytes)
    report.add("pages", load, store, copy, copy, "memory copy")
    objects = ObjectFormat(
        namespace_digest(weights_digest="bench", layout=copier.layout, rope={}), copier.layout
    )
    for name, spec in tiers.items():
        ours = _tier_rates(spec, objects, copier.layout, source)
        raw_load, raw_store, raw_is = _raw_rates(spec, size, source)
        report.add(name, *ours, raw_load, raw_store, raw_is)
    return report


def _tier_rates(
    spec: TierSpec, objects: ObjectFormat, layout: KVLayout, source: np.ndarray
) -> tuple[float, float]:
    size = layout.block_bytes
    chain = open_chain([spec], objects)
    (tier,) = chain.tiers
    into = np.empty(SLICE * size, dtype=np.uint8)
    rates: list[tuple[float, float]] = []
    for round_number in range(ROUNDS):
        keys = [os.urandom(28) + round_number.to_bytes(4, "big") for _ in range(NUM_BLOCKS)]
        started = time.perf_counter()
        for at in range(0, NUM_BLOCKS, SLICE):
            payloads = [source.data[n * size : (n + 1) * size] for n in range(at, at + SLICE)]
            tier.write(keys[at : at + SLICE], payloads)
        stored = time.perf_counter()
        for at in range(0, NUM_BLOCKS, SLICE):
            outcome, _ = tier.read(keys[at : at + SLICE], into.data)
            if outcome.num_blocks != SLICE:
                raise RuntimeError(f"{tier.name} lost blocks: {outcome.reason}")
        loaded = time.perf_counter()
        rates.append((source.nbytes / (loaded - stored), source.nbytes / (stored - started)))
    chain.close()
    return max(rate[0] for rate in rates) / 1e9, max(rate[1] for rate in rates) / 1e9


def _raw_rates(spec: TierSpec, size: int, source: np.ndarray) -> tuple[float, float, str]:
    match spec.kind:
        case "host" | "lmcache":
            held = source.copy()
            load = _best(lambda: np.copyto(held, source), source.nbytes)
            return load, load, "memory copy"
        case "disk":
            return (*_raw_files(spec.path or "", size, source), "write, rename, read")
        case "valkey":
            return (*_raw_valkey(spec.path or "", size, source), "the client, unverified")


def _raw_files(folder: str, size: int, source: np.ndarray) -> tuple[float, float]:
    parts = [source.data[n * size : (n + 1) * size] for n in range(NUM_BLOCKS)]
    into = bytearray(size)
    rounds = count()

    def store() -> None:
        round_number = next(rounds)
        for number, part in enumerate(parts):
            path = f"{folder}/raw-{round_number}-{number}"
            with open(f"{path}.tmp", "wb", buffering=0) as file:
                file.write(part)
            os.rename(f"{path}.tmp", path)

    def load() -> None:
        for number in range(NUM_BLOCKS):
            with open(f"{folder}/raw-0-{number}", "rb", buffering=0) as file:
                file.readinto(into)

    stored = _best(store, source.nbytes)
    return _best(load, source.nbytes), stored


def _raw_valkey(path: str, size: int, source: np.ndarray) -> tuple[float, float]:
    connection = RespConnection(path, time.monotonic() + 5)
    into = memoryview(bytearray(size))
    rounds = count()

    def store() -> None:
        round_number = next(rounds)
        for at in range(0, NUM_BLOCKS, SLICE):
            end = time.monotonic() + 10
            for n in range(at, at + SLICE):
                part = source.data[n * size : (n + 1) * size]
                connection.send(command(b"SET", b"raw-%d-%d" % (round_number, n), part), end)
            for _ in range(SLICE):
                connection.read_status(end)

    def load() -> None:
        for at in range(0, NUM_BLOCKS, SLICE):
            end = time.monotonic() + 10
            asked = [packed(b"GET", b"raw-0-%d" % n) for n in range(at, at + SLICE)]
            connection.send(asked, end)
            for _ in range(SLICE):
                connection.read_bulk([into], end)

    stored = _best(store, source.nbytes)
    loaded = _best(load, source.nbytes)
    connection.close()
    return loaded, stored


def _best(work: Callable[[], object], nbytes: int) -> float:
    """GB/s of the fastest of `ROUNDS` rounds."""
    return nbytes / min(_seconds(work) for _ in range(ROUNDS)) / 1e9


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# --- First token ---------------------------------------------------------------------------------


def first_token_report(loaded: LoadedModel, tiers: dict[str, TierSpec], repeats: int) -> Report:
    """One row per place that the prompt's KV comes from."""
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
    """Seconds to the first token, and the number of tokens loaded from tiers."""
    if forget:
        engine.forget_device()
    prompt = prompt_with_pictures(str(time.time_ns()), PROMPT_TOKENS, PICTURES, seed=seed)
    seconds, deltas = engine.run([prompt])
    reuse_stats = deltas[0].reuse_stats
    return seconds, 0 if reuse_stats is None else reuse_stats.external_cached_tokens


# --- Encoder outputs -----------------------------------------------------------------------------


def encoder_report(loaded: LoadedModel, tiers: dict[str, TierSpec], repeats: int) -> Report:
    """One row per place that the encoder outputs come from; no KV is reused."""
    report = Report(
        "kv (encoder outputs)",
        ("from", "ms", "of encoding", "encoder runs", "loaded outputs"),
        notes=[f"{OUTPUT_TOKENS:,} tokens, {PICTURES} pictures, medians of {repeats}"],
    )
    base = 0.0
    for name, specs in {"encoded": (), **{name: (tier,) for name, tier in tiers.items()}}.items():
        with BenchEngine(loaded, encoder_tiers=specs) as engine:
            _seconds_with_outputs(engine)
            engine.settle()
            before = engine.core.stats()
            seconds = median([_seconds_with_outputs(engine) for _ in range(repeats)])
            after = engine.core.stats()
        base = base or seconds
        counts = [
            int(after.get(count, 0) - before.get(count, 0)) // repeats
            for count in ("encoder_runs_total", "external_encoder_cache_hits_total")
        ]
        report.add(name, 1e3 * seconds, seconds / base, *counts)
    return report


OUTPUT_TOKENS = 256


def _seconds_with_outputs(engine: BenchEngine) -> float:
    """Seconds to the first token of a prompt of new text with pictures that are always the same."""
    engine.forget_device()
    name = str(time.time_ns())
    request, items = prompt_with_pictures(name, OUTPUT_TOKENS, PICTURES, seed=1)
    seconds, _ = engine.run([(request, items)])
    return seconds


# --- Throughput while stores go on ---------------------------------------------------------------


def stores_report(loaded: LoadedModel, tiers: dict[str, TierSpec], pairs: int) -> Report:
    """One row per tier. Engines with and without it take turns, so that noise hits both alike."""
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
    """Prompt and generated tokens per second of a batch of new prompts."""
    batch = [
        prompt_with_pictures(f"{turn}-{n}", 256, 1, seed=1000 * (turn + 2) + n, max_tokens=48)
        for n in range(8)
    ]
    started = time.perf_counter()
    engine.run(batch)
    return 8 * (256 + 48) / (time.perf_counter() - started)


# --- Tier calls of the step loop -----------------------------------------------------------------


class LoopStopwatch:
    """Records the CPU seconds that the step thread spends in each call of the KV connector."""

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
