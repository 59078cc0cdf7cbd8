"""Bytes per second of each tier, beside the plain operation underneath it in the same run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count

import numpy as np

from benchmarks.report import Report
from lookonce.kv.chain import open_chain
from lookonce.kv.objects import ObjectFormat, namespace_digest
from lookonce.kv.valkey import RespConnection, command, packed
from lookonce.model.kv_pages import PageCopier
from lookonce.model.loader import LoadedModel
from lookonce.types.kv import KVLayout, TierSpec

NUM_BLOCKS = 240
SLICE = 20
"""Blocks a worker moves at once."""
ROUNDS = 5


def bandwidth_report(loaded: LoadedModel, tiers: dict[str, TierSpec]) -> Report:
    """Best of some rounds, GB/s; each round reads and writes blocks of its own."""
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
    """GB/s of the fastest round."""
    return nbytes / min(_seconds(work) for _ in range(ROUNDS)) / 1e9


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
