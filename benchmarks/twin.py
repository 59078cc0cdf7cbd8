"""`lookonce bench twin`: a real server beside its simulation, on the same requests, in one run.

In each of `--rounds` a real server with `--request-log` gets conversations about pictures at random
times, others in each round, and `lookonce simulate`'s engine replays what the log says. First
tokens and tokens are those of the client; what was found in caches is counted by both and must be
equal or nearly so, as both run the same scheduler.

A machine is quicker in one minute than in another, and the simulation knows only prices. So they
are measured before the first round and after each (or read: `--prices FILE`), and each round is
simulated by the prices before it and by those after it. Percentiles are of all rounds' requests.

`off` is the simulation's figure over the real one, less 1: the goal is 10 % at p50 and 20 % at p99.

`--keep-log FOLDER` leaves prices, logs and what the client saw; `--replay FOLDER` compares these
again, after a change to the simulation or with other `--prices`, without a server.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.load_generator import Arrivals, LoadResult, run_load
from benchmarks.pictures import data_url, distinct_pictures
from benchmarks.prices import measure, write_prices
from benchmarks.report import Report, publish
from benchmarks.running_server import running_server, set_environment
from lookonce.config import NANO_FOLDER
from lookonce.errors import ConfigError
from lookonce.simulate.engine import EngineSpec
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


@dataclass(frozen=True, slots=True)
class Load:
    """What a server got at one rate in one round, and what it made of it."""

    real: Kept
    trace: Sequence[TraceRequest]
    prices: Sequence[Prices]
    """Those before and after it, or one."""


def replay(
    trace: Sequence[TraceRequest], prices: Prices, skip: int, requests_before: int = 0
) -> tuple[Outcome, list[float], list[float]]:
    """What one simulated server does with the trace; first tokens and seconds per token of all
    requests after the first `skip`. `requests_before`: see `EngineSpec`."""
    first: list[float] = []
    per_token: list[float] = []

    def note(served: Any) -> None:
        if served.number < skip or served.failed:
            return
        first.append(served.first_token - served.arrival)
        if served.request.output_tokens > 1:
            rest = served.ended - served.first_token
            per_token.append(rest / (served.request.output_tokens - 1))

    spec = FleetSpec(engine=EngineSpec(requests_before=requests_before))
    outcome = Simulation(spec, prices, note).run(trace)
    return outcome, first, per_token


def compare(name: str, loads: Sequence[Load]) -> Report:
    """A table of what the server did at one rate and what its simulation says, of all rounds
    together. Each round has equally many prices."""
    first: list[float] = []
    per_token: list[float] = []
    outcomes: list[Outcome] = []
    before = 0
    for load in loads:
        for prices in load.prices:
            given = prices
            if prices.cores:  # the client has its part of them, too
                left = max(1.0, prices.cores - load.real.cpu_share)
                given = msgspec.structs.replace(prices, cores=left)
            outcome, firsts, tokens = replay(load.trace, given, WARM_UP, before)
            outcomes.append(outcome)
            first += firsts
            per_token += tokens
            before += len(load.trace)
    report = Report(name, ("figure", "real", "simulated", "off %"))
    real_first = [each for load in loads for each in load.real.first_text]
    real_token = [each for load in loads for each in load.real.per_token]
    counted: defaultdict[str, float] = defaultdict(float)
    for load in loads:
        for each, count in load.real.counted.items():
            counted[each] += count
    by_load = len(outcomes) / len(loads)

    def add(label: str, measured: float | None, simulated: float | None) -> None:
        off = None
        if measured and simulated is not None:
            off = 100.0 * (simulated / measured - 1.0)
        report.add(label, measured, simulated, off)

    def add_percentile(label: str, percent: int, real: list[float], simulated: list[float]) -> None:
        found = [1e3 * (percentile(np.array(each), percent) or 0) for each in (real, simulated)]
        add(f"{label} p{percent} ms", *found)

    for percent in (50, 90, 99):
        add_percentile("first token", percent, real_first, first)
    for percent in (50, 99):
        add_percentile("each token", percent, real_token, per_token)
    queries = counted["prefix_cache_queries_total"] or 1.0
    hits = [each.figures()["prefix_hit_rate"] or 0 for each in outcomes]
    add(
        "prompt found %",
        100 * counted["prefix_cache_hits_total"] / queries,
        100 * sum(hits) / len(hits),
    )
    runs = sum(float(each.figures()["encoder_runs"] or 0) for each in outcomes)
    add("encoder runs", counted["encoder_runs_total"], runs / by_load)
    processed = sum(each.processed for each in outcomes)
    add("processed media", counted["media_processed_total"], processed / by_load)
    failed = sum(each.failed for each in outcomes)
    add("failed", float(sum(load.real.failed for load in loads)), failed / by_load)
    busy = sum(each.busy for each in outcomes) / len(outcomes)
    report.notes.append(f"the simulated engine is busy {busy:.0%} of the time")
    share = sum(load.real.cpu_share for load in loads) / len(loads)
    report.notes.append(f"the load generator took {share:.0%} of a core")
    return report


class Folder:
    """Prices, logs and what the client saw, of rounds from 1 on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prices(self, number: int) -> Path:
        """Of prices after that round; 0: before the first."""
        return self.path / f"prices-{number}.json"

    def log(self, rate: float, number: int) -> Path:
        return self.path / f"requests-{rate:g}-{number}.jsonl"

    def client(self, rate: float, number: int) -> Path:
        return self.path / f"client-{rate:g}-{number}.json"

    def clear(self) -> None:
        """Of what an earlier run has left."""
        for pattern in ("prices-*.json", "requests-*.jsonl", "client-*.json"):
            for each in self.path.glob(pattern):
                each.unlink()

    def rates(self) -> list[float]:
        found = [each.stem.removeprefix("client-") for each in self.path.glob("client-*-1.json")]
        return sorted(float(name.removesuffix("-1")) for name in found)

    def loads(self, rate: float, given: Prices | None) -> list[Load]:
        """Of each round, by the prices `given` or by those around it. Raises `ConfigError`."""
        loads: list[Load] = []
        while (path := self.client(rate, len(loads) + 1)).exists():
            number = len(loads) + 1
            try:
                real = msgspec.json.decode(path.read_bytes(), type=Kept)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path} is nothing that --keep-log has left: {error}") from None
            around = (number - 1, number)
            prices = (
                [read_prices(self.prices(each)) for each in around] if given is None else [given]
            )
            loads.append(Load(real, read_trace(self.log(rate, number)), prices))
        return loads


def serve(rate: float, asked: Sequence[bytes], log: Path, seed: int) -> Kept:
    """Give a server with a request log what is asked, at so many requests a second."""
    with running_server(["--request-log", str(log)]) as server:
        # One after another: a first request at a rate would find a cold client.
        run_load(server.url, [], asked[:WARM_UP], Arrivals(concurrency=1))
        real = run_load(server.url, [], asked[WARM_UP:], Arrivals(rate=rate, seed=seed))
        return Kept.of(real, server.metrics())


def serve_round(options: argparse.Namespace, folder: Folder, number: int) -> None:
    """All rates, with requests of this round's own."""
    for place, rate in enumerate(options.rate):
        seed = 100 * (options.rounds * place + number)
        asked = bodies(
            options.requests + WARM_UP,
            pictures=options.pictures,
            turns=options.turns,
            tokens=options.tokens,
            seed=seed,
        )
        real = serve(rate, asked, folder.log(rate, number), seed)
        folder.client(rate, number).write_bytes(msgspec.json.encode(real))


def measure_prices(folder: Folder, number: int) -> list[Report]:
    """The prices after a round; tables of them."""
    with running_server() as server:
        prices, tables = measure(str(NANO_FOLDER), server)
    write_prices(prices, folder.prices(number))
    return tables


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "lookonce bench twin",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = "default: %(default)s"
    parser.add_argument("--requests", type=int, default=200, help=f"of each load; {default}")
    parser.add_argument("--rounds", type=int, default=3, help=default)
    parser.add_argument("--rate", type=float, nargs="+", default=[12.0], help="requests a second")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prices", type=Path, metavar="FILE", help="do not measure them")
    parser.add_argument("--keep-log", type=Path, metavar="FOLDER", help="where traces are left")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="of --keep-log: no server")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: at least one")
    set_environment()
    given = None if options.prices is None else read_prices(options.prices)
    if options.replay is not None:
        kept = Folder(options.replay)
        if not kept.rates():
            raise ConfigError(f"--replay: there are no logs of --keep-log in {kept.path}")
        reports = [compare(f"twin, {r:g}/s, again", kept.loads(r, given)) for r in kept.rates()]
        publish(reports, options.json)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Folder(options.keep_log or Path(scratch))
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.clear()
        reports = [] if given is not None else measure_prices(folder, 0)
        for number in range(1, options.rounds + 1):
            serve_round(options, folder, number)
            if given is None:
                reports = measure_prices(folder, number)
        reports += [compare(f"twin, {r:g}/s", folder.loads(r, given)) for r in options.rate]
    publish(reports, options.json)
    return 0
