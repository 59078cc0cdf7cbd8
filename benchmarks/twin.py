"""`lookonce bench twin`: a real server beside its simulation, on the same requests, in one run.

The price list is measured (or read: `--prices FILE`). Then a real server with `--request-log` gets
conversations about pictures at random times, and `lookonce simulate`'s engine replays what the log
says. First tokens and tokens are those of the client; what was found in caches is counted by both
and must be equal or nearly so, as both run the same scheduler.

`off` is the simulation's figure over the real one, less 1: the goal is 10 % at p50 and 20 % at p99.

`--keep-log FOLDER` leaves the logs and what the client saw; `--replay FOLDER --prices FILE`
compares these again, with other prices or after a change to the simulation, without a server.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.load_generator import Arrivals, LoadResult, run_load
from benchmarks.pictures import data_url, distinct_pictures
from benchmarks.prices import measure
from benchmarks.report import Report, publish
from benchmarks.running_server import running_server, set_environment
from lookonce.config import NANO_FOLDER
from lookonce.errors import ConfigError
from lookonce.simulate.prices import Prices, read_prices
from lookonce.simulate.simulation import FleetSpec, Outcome, Simulation, percentile
from lookonce.simulate.trace import TraceRequest, read_trace

SYSTEM = "You look at simple pictures and answer in a few words. " * 6
QUESTIONS = (
    "What is in this picture?",
    "How many red circles are there?",
    "What is left of the blue square?",
    "Which colour has the largest shape, and where is it?",
)
ANSWER = "There is a red circle and a blue square to the left of it."
WARM_UP = 12


def bodies(count: int, *, pictures: int, turns: int, tokens: int, seed: int) -> list[bytes]:
    """Conversations of so many turns, whose requests alternate; each is about one of the pictures,
    of which some are asked about far more often than others."""
    urls = [data_url(each) for each in distinct_pictures(pictures, "512", "JPEG", first=seed)]
    random = np.random.default_rng(seed)
    ranks = 1.0 / np.arange(1, pictures + 1)
    open_sessions: list[list[Any]] = []
    made = []
    for number in range(count):
        if len(open_sessions) < 8:
            picture = int(random.choice(pictures, p=ranks / ranks.sum()))
            open_sessions.append([number, picture, 0])
        at = int(random.integers(len(open_sessions)))
        session, picture, turn = open_sessions[at]
        made.append(_body(session, urls[picture], turn, tokens))
        open_sessions[at][2] += 1
        if turn + 1 == turns:
            del open_sessions[at]
    return made


def _body(session: int, url: str, turn: int, tokens: int) -> bytes:
    first = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": f"Conversation {session}. {QUESTIONS[0]}"},
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": first},
    ]
    for earlier in range(turn):
        messages.append({"role": "assistant", "content": f"{ANSWER} That was answer {earlier}."})
        question = QUESTIONS[(earlier + 1) % len(QUESTIONS)]
        messages.append({"role": "user", "content": question})
    return json.dumps(
        {
            "model": "nano",
            "messages": messages,
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def replay(
    trace: Sequence[TraceRequest], prices: Prices, skip: int
) -> tuple[Outcome, list[float], list[float]]:
    """What one simulated server does with the trace; first tokens and seconds per token of all
    requests after the first `skip`."""
    first: list[float] = []
    per_token: list[float] = []

    def note(served: Any) -> None:
        if served.number < skip or served.failed:
            return
        first.append(served.first_token - served.arrival)
        if served.request.output_tokens > 1:
            rest = served.ended - served.first_token
            per_token.append(rest / (served.request.output_tokens - 1))

    outcome = Simulation(FleetSpec(), prices, note).run(trace)
    return outcome, first, per_token


def compare(
    name: str,
    real: Kept,
    trace: Sequence[TraceRequest],
    prices: Prices,
) -> Report:
    """A table of what the server did and what its simulation says."""
    if prices.cores:  # the client has its part of them, too
        prices = msgspec.structs.replace(prices, cores=max(1.0, prices.cores - real.cpu_share))
    outcome, first, per_token = replay(trace, prices, WARM_UP)
    report = Report(name, ("figure", "real", "simulated", "off %"))
    firsts, tokens, counted = np.array(real.first_text), np.array(real.per_token), real.counted

    def add(label: str, measured: float | None, simulated: float | None) -> None:
        off = None
        if measured and simulated is not None:
            off = 100.0 * (simulated / measured - 1.0)
        report.add(label, measured, simulated, off)

    for percent in (50, 90, 99):
        real_ms = percentile(firsts, percent)
        simulated_ms = percentile(np.array(first), percent)
        add(f"first token p{percent} ms", 1e3 * (real_ms or 0), 1e3 * (simulated_ms or 0))
    for percent in (50, 99):
        real_ms = percentile(tokens, percent)
        simulated_ms = percentile(np.array(per_token), percent)
        add(f"each token p{percent} ms", 1e3 * (real_ms or 0), 1e3 * (simulated_ms or 0))
    figures = outcome.figures()
    queries = counted["prefix_cache_queries_total"] or 1.0
    add(
        "prompt found %",
        100 * counted["prefix_cache_hits_total"] / queries,
        100 * (figures["prefix_hit_rate"] or 0),
    )
    add("encoder runs", counted["encoder_runs_total"], float(figures["encoder_runs"] or 0))
    add("processed media", counted["media_processed_total"], float(outcome.processed))
    add("failed", float(real.failed), float(outcome.failed))
    report.notes.append(f"the simulated engine is busy {outcome.busy:.0%} of the time")
    report.notes.append(f"the load generator took {real.cpu_share:.0%} of a core")
    return report


class Kept(msgspec.Struct, frozen=True):
    """What a load at one rate was, beside its request log."""

    first_text: list[float]
    """Seconds, of each answer."""
    per_token: list[float]
    failed: int
    cpu_share: float
    """Of a core, by the load generator."""
    counted: dict[str, float]
    """The server's metrics."""

    @classmethod
    def of(cls, real: LoadResult, counted: dict[str, float]) -> Kept:
        return cls(
            [each.first_text for each in real.answered],
            [each.per_token for each in real.answered if each.per_token],
            len(real.outcomes) - len(real.answered),
            real.cpu_share,
            counted,
        )


def logs_of(folder: Path) -> list[tuple[str, Path, Kept]]:
    """Rate, request log and the rest of what `--keep-log` has left. Raises `ConfigError`."""
    found = []
    for path in sorted(folder.glob("client-*.json")):
        rate = path.stem.removeprefix("client-")
        log = folder / f"requests-{rate}.jsonl"
        try:
            found.append((rate, log, msgspec.json.decode(path.read_bytes(), type=Kept)))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is nothing that --keep-log has left: {error}") from None
    if not found:
        raise ConfigError(f"--replay: there are no logs of --keep-log in {folder}")
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "lookonce bench twin",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rate", type=float, nargs="+", default=[12.0], help="requests a second")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prices", type=Path, metavar="FILE", help="do not measure them")
    parser.add_argument("--write-prices", type=Path, metavar="FILE")
    parser.add_argument("--keep-log", type=Path, metavar="FOLDER", help="where traces are left")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="of --keep-log: no server")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.replay is not None and options.prices is None:
        parser.error("--replay needs --prices")
    set_environment()
    reports: list[Report] = []
    if options.replay is not None:
        prices = read_prices(options.prices)
        for rate, log, kept in logs_of(options.replay):
            reports.append(compare(f"twin, {rate}/s, again", kept, read_trace(log), prices))
        publish(reports, options.json)
        return 0
    if options.prices is not None:
        prices = read_prices(options.prices)
    else:
        with running_server() as server:
            prices, tables = measure(str(NANO_FOLDER), server)
        reports += tables
        if options.write_prices is not None:
            written = msgspec.json.format(msgspec.json.encode(prices), indent=1)
            options.write_prices.write_bytes(written + b"\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep_log or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for number, rate in enumerate(options.rate):
            log = folder / f"requests-{rate:g}.jsonl"
            log.unlink(missing_ok=True)
            asked = bodies(
                options.requests + WARM_UP,
                pictures=options.pictures,
                turns=options.turns,
                tokens=options.tokens,
                seed=100 * (number + 1),
            )
            with running_server(["--request-log", str(log)]) as server:
                # One after another: a first request at a rate would find a cold client.
                run_load(server.url, [], asked[:WARM_UP], Arrivals(concurrency=1))
                real = run_load(server.url, [], asked[WARM_UP:], Arrivals(rate=rate, seed=number))
                counted = server.metrics()
            kept = Kept.of(real, counted)
            (folder / f"client-{rate:g}.json").write_bytes(msgspec.json.encode(kept))
            reports.append(compare(f"twin, {rate:g}/s", kept, read_trace(log), prices))
    publish(reports, options.json)
    return 0
