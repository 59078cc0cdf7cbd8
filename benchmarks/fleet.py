"""`lookonce bench fleet`: one fleet of engines behind front-ends that choose by different rules.

routers     the rules of `benchmarks.fleet_routers` in turn on the same engines, whose caches are
            emptied before each run; each rule gets the same requests:
            zipf    conversations about pictures that are drawn by Zipf's law
            agents  one long prompt for all, and a new screenshot in each turn
            new     nothing is ever repeated; no pause between requests
            encoder runs are those of engines' receipts, by picture that was asked about; CPU is
            of engines and front-ends; where others use cores meanwhile, delays say little
decision    CPU of one choice, for a request with four 720p pictures, beyond reading it
path        what the way through a front-end adds to one server: first token, a 10 MB picture, and
            the CPU of the front-end, and of the engines' API processes, by request and by streamed
            token; with --renders beside it that of a front-end that renders

Answers in histories are not the engines' own: all rules get the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
import msgspec
import pybase64
import uvloop

from benchmarks.fleet_routers import ROUTERS
from benchmarks.load_generator import RequestOutcome, Target
from benchmarks.pictures import data_url, encoded_picture, variant
from benchmarks.report import Report, median, percentile, publish
from benchmarks.running_server import (
    RunningServer,
    cpu_seconds,
    descendants,
    machine_cpu_seconds,
    memory_bytes,
    running_server,
    set_environment,
)
from benchmarks.workloads import QUESTION
from lookonce.errors import UnavailableError
from lookonce.fleet.identity import Processor, identify_body
from lookonce.fleet.members import EngineAddress
from lookonce.fleet.router import Router
from lookonce.types.scheduling import run_when_woken
from tests.support.model_folders.make import make_folder

WORKLOADS = ("zipf", "agents", "new")
PARTS = ("routers", "decision", "path")
CACHES = ("mm", "encoder", "prefix")
ENGINE_OPTIONS = (
    *("--kv-cache-gb", "0.5", "--served-model-name", "bench", "--max-num-seqs", "16"),
)
OUTPUT_TOKENS = 8
PICTURES, CONVERSATION_TURNS, AGENT_TURNS = 24, 4, 6
PAUSES = {"zipf": 0.02, "agents": 0.2, "new": 0.0}
"""Seconds between a client's requests, on average, with which 8 clients keep two cores busy for
most of the time: where nothing waits, any engine does."""
SYSTEM_WORDS = {"zipf": 40, "agents": 300}
BIG_BYTES = 10 << 20
DECISIONS = 200
STREAM_REPEATS = 5
STREAM_TOKENS = (16, 272)
LONG_WORDS, LONG_REPEATS = 2000, 20
API_PROCESS = "lookonce.server.process"
IDLE_SECONDS = 2.0
"""How long the CPU of idle front-ends is measured, which is no cost of a token."""
PROCESSOR = Processor(b"fingerprint")

Script = list[tuple[float, bytes]]
"""Of one client: seconds to wait, then a body."""


# --- processes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Engines:
    addresses: list[EngineAddress]
    pids: list[int]
    """Of their supervisors."""

    def empty_caches(self) -> None:
        for address in self.addresses:
            path = address.http.removeprefix("unix:")
            with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=60) as client:
                for cache in CACHES:
                    client.post(f"http://localhost/reset_{cache}_cache").raise_for_status()


@contextmanager
def running_engines(model: str, count: int) -> Iterator[Engines]:
    """Engines on unix sockets, as `lookonce fleet` starts them on one machine."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lookonce-bench-"))
        addresses, pids = [], []
        for number in range(count):
            events = f"ipc://{folder}/events{number}"
            replay = f"ipc://{folder}/replay{number}"
            line = ["--events", f"{events}?replay={replay}", "--uds", f"{folder}/http{number}"]
            server = stack.enter_context(running_server([model, *ENGINE_OPTIONS, *line]))
            name = f"engine{number}"
            addresses.append(EngineAddress(name, "bench", server.url, events, replay))
            pids.append(server.pid)
        yield Engines(addresses, pids)


@dataclass(frozen=True, slots=True)
class Frontends:
    pid: int
    urls: dict[str, str]
    """Rule → its front-end."""

    @property
    def url(self) -> str:
        """Of the only one."""
        (url,) = self.urls.values()
        return url


@contextmanager
def running_frontends(engines: Engines, *wanted: str) -> Iterator[Frontends]:
    """In one process; `wanted`: rules, or `renders=MODEL`; none: all rules."""
    command = [sys.executable, "-m", "benchmarks.fleet_routers", *wanted]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(engines.addresses) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise UnavailableError("the front-ends did not start")
        ports = msgspec.json.decode(line, type=dict[str, int])
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        yield Frontends(process.pid, urls)
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


# --- requests ------------------------------------------------------------------------------------


def body(messages: object, tokens: int = OUTPUT_TOKENS) -> bytes:
    fields = {"model": "bench", "messages": messages, "max_tokens": tokens, "temperature": 0}
    options = {"include_usage": True}
    more = {"ignore_eos": True, "stream": True, "stream_options": options}
    return json.dumps(fields | more).encode()


def message(role: str, *content: object) -> dict[str, object]:
    return {"role": role, "content": list(content)}


def words(source: random.Random, count: int) -> dict[str, object]:
    return {"type": "text", "text": " ".join(source.choices(QUESTION.split(), k=count))}


class PictureSource:
    """Pictures of one size that differ in their bytes."""

    def __init__(self, size: str) -> None:
        self._encoded = encoded_picture(size, "JPEG")

    def part(self, number: int) -> dict[str, object]:
        url = data_url(variant(self._encoded, number))
        return {"type": "image_url", "image_url": {"url": url}}


class Scripts:
    """What the clients of one run send; `pictures`: how many different ones."""

    def __init__(
        self, kind: str, clients: int, turns: int, pause: float, seed: int, of: PictureSource
    ) -> None:
        self._random = random.Random(seed)
        self._pause, self._first, self._of = pause, seed * 1_000_000, of
        self._asked: set[int] = set()
        words_before = SYSTEM_WORDS.get(kind, 0)
        # The first words differ between runs: no rule may know a text from an earlier one.
        system = {
            "type": "text",
            "text": f"run {seed}: {words(self._random, words_before)['text']}",
        }
        self._system = message("system", system)
        make = {"zipf": self._zipf, "agents": self._agent, "new": self._new}[kind]
        self.clients: list[Script] = [[] for _ in range(clients)]
        for script in self.clients:
            while len(script) < turns:
                script += make(turns - len(script))
        self.pictures = len(self._asked)

    def _picture(self, number: int) -> dict[str, object]:
        self._asked.add(number)
        return self._of.part(self._first + number)

    def _conversation(self, turns: int, picture: int | None) -> Script:
        """A picture in its first turn, or with None a new one in each."""
        history: list[object] = [self._system]
        script = []
        for turn in range(turns):
            content = [words(self._random, 12)]
            if picture is None or turn == 0:
                number = len(self._asked) + PICTURES if picture is None else picture
                content.insert(0, self._picture(number))
            history.append(message("user", *content))
            wait = self._random.expovariate(1 / self._pause) if self._pause else 0.0
            script.append((wait, body(history)))
            history.append(message("assistant", words(self._random, 8)))
        return script

    def _zipf(self, most: int) -> Script:
        weights = [1 / rank for rank in range(1, PICTURES + 1)]
        picture = self._random.choices(range(PICTURES), weights)[0]
        return self._conversation(min(most, CONVERSATION_TURNS), picture)

    def _agent(self, most: int) -> Script:
        return self._conversation(min(most, AGENT_TURNS), None)

    def _new(self, most: int) -> Script:
        number = len(self._asked)
        text = {"type": "text", "text": f"{self._first + number} {words(self._random, 12)['text']}"}
        return [(0.0, body([message("user", self._picture(number), text)]))]


async def run_scripts(url: str, scripts: Scripts) -> tuple[list[RequestOutcome], float]:
    """Outcomes, and the seconds from the first request to the last answer."""
    target = Target(url)

    async def client(script: Script) -> list[RequestOutcome]:
        outcomes = []
        for wait, request in script:
            await asyncio.sleep(wait)
            outcome = RequestOutcome(time.perf_counter())
            await target.send(request, outcome)
            outcomes.append(outcome)
        return outcomes

    started = time.perf_counter()
    found = await asyncio.gather(*map(client, scripts.clients))
    seconds = time.perf_counter() - started
    target.close()
    outcomes = [outcome for of_client in found for outcome in of_client]
    for outcome in outcomes:
        if outcome.error is not None:
            raise UnavailableError(f"a request failed: {outcome.error}")
    return outcomes, seconds


# --- routers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds until now: of engines and front-ends with all their processes, and of everything
    else on the machine but this process."""

    fleet: float
    others: float

    @classmethod
    def now(cls, engines: Engines, frontends: Frontends) -> CpuUse:
        pids = [*engines.pids, frontends.pid]
        pids += [pid for each in engines.pids for pid in descendants(each, "")]
        fleet = 0.0
        for pid in pids:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                fleet += cpu_seconds(pid)
        return cls(fleet, machine_cpu_seconds() - fleet - time.process_time())

    def since(self, before: CpuUse) -> CpuUse:
        return CpuUse(self.fleet - before.fleet, max(0.0, self.others - before.others))


@dataclass(slots=True)
class Runs:
    """All runs of one workload with one rule."""

    first_tokens: list[float] = field(default_factory=list)
    encoder_runs: int = 0
    pictures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rates: list[float] = field(default_factory=list)
    cpu: float = 0.0
    others_cpu: float = 0.0
    seconds: float = 0.0

    def add(
        self, outcomes: Sequence[RequestOutcome], seconds: float, pictures: int, cpu: CpuUse
    ) -> None:
        self.first_tokens += [1e3 * outcome.first_text for outcome in outcomes]
        items = [item for outcome in outcomes for item in outcome.items]
        self.encoder_runs += sum(item.encoder == "miss" for item in items)
        self.pictures += pictures
        self.prompt_tokens += sum(outcome.prompt_tokens for outcome in outcomes)
        self.cached_tokens += sum(outcome.cached_tokens for outcome in outcomes)
        self.rates.append(len(outcomes) / seconds)
        self.cpu += cpu.fleet
        self.others_cpu += cpu.others
        self.seconds += seconds

    COLUMNS: ClassVar[tuple[str, ...]] = (
        *("requests", "encoder runs/picture", "cached %"),
        *("first token p50 ms", "p90 ms", "p99 ms", "CPU ms/request", "others' cores"),
        "requests/s",
    )

    def figures(self) -> tuple[float, ...]:
        """As `COLUMNS` names them."""
        times = sorted(self.first_tokens)
        return (
            len(times),
            self.encoder_runs / self.pictures,
            100 * self.cached_tokens / self.prompt_tokens,
            percentile(times, 50),
            percentile(times, 90),
            percentile(times, 99),
            1e3 * self.cpu / len(times),
            self.others_cpu / self.seconds,
            median(self.rates),
        )


def routers_report(given: argparse.Namespace, engines: Engines, frontends: Frontends) -> Report:
    """Each round runs every workload with every rule; its runs are told on standard error."""
    run_when_woken()  # clients elsewhere would not wait for a core of these machines
    pictures = PictureSource(given.size)
    for number in range(given.engines):
        # Some requests at each engine, so that what it measures of itself is no first time.
        scripts = Scripts("agents", 2, AGENT_TURNS, 0.0, 999 - number, pictures)
        uvloop.run(run_scripts(frontends.urls["robin"], scripts))
    pauses = PAUSES
    if given.pause is not None:
        pauses = {name: given.pause if usual else usual for name, usual in PAUSES.items()}
    runs = {(workload, name): Runs() for workload in given.workloads for name in given.routers}
    for turn in range(given.rounds):
        for workload in given.workloads:
            seed = 10 * (turn + 1) + WORKLOADS.index(workload)
            scripts = Scripts(
                workload, given.clients, given.turns, pauses[workload], seed, pictures
            )
            for step in range(len(given.routers)):
                name = given.routers[(turn + step) % len(given.routers)]
                engines.empty_caches()
                time.sleep(0.3)  # events of this come before the first request
                before = CpuUse.now(engines, frontends)
                outcomes, seconds = uvloop.run(run_scripts(frontends.urls[name], scripts))
                done = runs[workload, name]
                used = CpuUse.now(engines, frontends).since(before)
                done.add(outcomes, seconds, scripts.pictures, used)
                row = " ".join(f"{value:.4g}" for value in done.figures())
                print(f"{turn} {workload} {name}: {row}", file=sys.stderr, flush=True)
    report = Report(
        "fleet",
        ("workload", "router", *Runs.COLUMNS, "ratio to two"),
        notes=[
            f"{given.engines} engines of one thread, {given.clients} clients, {given.rounds} rounds"
            f" of {given.turns} requests a client, in turn; {given.size} JPEGs; pauses of"
            f" {', '.join(f'{pauses[name]:g} s in {name}' for name in given.workloads)} on average",
        ],
    )
    for (workload, name), done in runs.items():
        usual = runs.get((workload, "two"))
        ratio = None if usual is None else done.figures()[-1] / usual.figures()[-1]
        report.add(workload, name, *done.figures(), ratio)
    return report


# --- the cost of one choice ----------------------------------------------------------------------


def decision_report(engines: int) -> Report:
    """In this process; no engine runs."""
    report = Report(
        "fleet (decision)",
        ("request", "bytes", "JSON ms", "base64 ms", "identity ms", "choice ms", "beyond ms"),
        notes=[
            f"CPU of this thread, medians of {DECISIONS}; {engines} engines; identity reads the"
            " body in its own way: beyond = identity + choice - JSON - base64",
        ],
    )
    encoded = encoded_picture("720p", "JPEG")
    urls = [data_url(variant(encoded, number)) for number in range(4)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    text = words(random.Random(0), 500)
    for name, listed in (("text", []), ("four 720p pictures", parts)):
        sent = body([message("user", *listed, text)])
        router = Router()
        for number in range(engines):
            router.add_engine(f"engine{number}", "bench", follows=True)
        columns: list[list[float]] = [[], [], [], []]
        for number in range(DECISIONS):
            marks = [time.thread_time()]
            msgspec.json.decode(sent)
            marks.append(time.thread_time())
            for url in urls[: len(listed)]:
                pybase64.b64decode(url.partition(",")[2], validate=True)
            marks.append(time.thread_time())
            _, identity = identify_body(sent, "", lambda _: PROCESSOR)
            marks.append(time.thread_time())
            route = router.route(str(number), identity)
            marks.append(time.thread_time())
            router.ended(str(number), route)
            for column, (start, end) in zip(columns, itertools.pairwise(marks), strict=True):
                column.append(1e3 * (end - start))
        decoded, plain, identified, chosen = map(median, columns)
        beyond = identified + chosen - decoded - plain
        report.add(name, len(sent), decoded, plain, identified, chosen, beyond)
    return report


# --- the way through a front-end -----------------------------------------------------------------


def path_report(
    given: argparse.Namespace, alone: RunningServer, engines: Engines, fleets: Sequence[Frontends]
) -> Report:
    """A server beside front-ends over engines; the requests of all are alike, in turn.

    The one server gets every new picture, and each engine of the fleet some of them. So the fleet
    is compared with one of its own engines, asked without the front-end, too."""
    run_when_woken()  # as of `routers_report`
    report = Report(
        "fleet (path)",
        ("what", "one server", *("fleet", "rendering")[: len(fleets)]),
        notes=[
            f"medians of {given.repeats} requests each, one at a time, in turn; one engine: of the"
            " fleet's own, another one each time, drawn by chance, without the front-end; CPU by"
            f" token: {given.clients} streams at once"
        ],
    )
    source = random.Random(7)
    plain = body([message("user", words(source, 100))])
    jpeg = encoded_picture("512", "JPEG")
    big = jpeg + bytes(source.randbytes(1 << 20)) * (BIG_BYTES >> 20)
    words_after = words(source, 10)

    def large(number: int) -> bytes:
        picture = {"type": "image_url", "image_url": {"url": data_url(variant(big, number))}}
        return body([message("user", picture, words_after)], 1)

    through = [[each.url] for each in fleets]
    own = [address.http for address in engines.addresses]
    ways: list[tuple[str, Iterator[bytes], dict[str, list[str]]]] = [
        ("first token ms", itertools.repeat(plain), {"": [alone.url]}),
        ("10 MB picture, known, ms", itertools.repeat(large(0)), {"": [alone.url]}),
        (
            "10 MB picture, new, ms",
            map(large, itertools.count(1)),
            {"": [alone.url], ", beside one engine": own},
        ),
    ]
    for name, requests, direct in ways:
        servers = [*direct.values(), *through]
        times = uvloop.run(_in_turn(servers, requests, given.repeats, 2 * given.engines))
        medians = [median(each) for each in times]
        for beside, taken in zip(direct, medians, strict=False):
            report.add(name + beside, taken, *medians[len(direct) :])
    question = message("user", words(source, 20))
    long = body([message("user", words(source, LONG_WORDS))], 1)

    def same(_: int) -> bytes:
        return long

    def of_length(tokens: int) -> bytes:
        return body([question], tokens)

    measured: list[tuple[str, Callable[[int], bytes], tuple[int, int]]] = [
        (f"{LONG_WORDS} words, CPU ms by request", same, (1, 1 + LONG_REPEATS)),
        ("CPU ms by token", of_length, STREAM_TOKENS),
    ]
    for name, request, amounts in measured:
        used = [_cpu_of(request, amounts, given, engines, each) for each in fleets]
        for what, each in zip(("front-end", "API processes"), zip(*used, strict=True), strict=True):
            report.add(f"{name}: {what}", None, *each)
    megabytes = [memory_bytes(each.pid, "Rss") / 1e6 for each in fleets]
    report.add("memory of the front-end, MB", None, *megabytes)
    return report


def _cpu_of(
    request: Callable[[int], bytes],
    amounts: tuple[int, int],
    given: argparse.Namespace,
    engines: Engines,
    frontend: Frontends,
) -> tuple[float, float]:
    """CPU milliseconds of the front-end, and of the engines' API processes, for one token, or for
    one request where that is the same for every amount.

    What requests cost at their beginning and end is the same for few and for many."""

    def used() -> tuple[float, float]:
        apis = [pid for each in engines.pids for pid in descendants(each, API_PROCESS)]
        return cpu_seconds(frontend.pid), sum(map(cpu_seconds, apis))

    url = frontend.url
    before = used()
    time.sleep(IDLE_SECONDS)
    idle = [(now - then) / IDLE_SECONDS for now, then in zip(used(), before, strict=True)]
    by_token = request(amounts[0]) != request(amounts[1])
    found: list[list[float]] = []
    for _ in range(STREAM_REPEATS):
        runs = []
        for amount in amounts:
            before, started = used(), time.perf_counter()
            if by_token:
                count = uvloop.run(_streams(url, request(amount), given.clients))
            else:
                count = amount
                for _ in range(amount):
                    uvloop.run(_streams(url, request(amount), 1))
            waited = time.perf_counter() - started
            spent = [
                now - then - waited * each
                for now, then, each in zip(used(), before, idle, strict=True)
            ]
            runs.append((spent, count))
        (short, few), (long, many) = runs
        found.append([1e3 * (b - a) / (many - few) for a, b in zip(short, long, strict=True)])
    front, api = (median(list(each)) for each in zip(*found, strict=True))
    return front, api


async def _in_turn(
    servers: Sequence[Sequence[str]], requests: Iterator[bytes], repeats: int, uncounted: int
) -> list[list[float]]:
    """Milliseconds to the first token of each repeat, after those that are not counted; for each
    of the lists of URLs, one of which gets each request."""
    source = random.Random(11)
    targets = [[Target(url) for url in urls] for urls in servers]
    times: list[list[float]] = [[] for _ in servers]
    for number in range(uncounted + repeats):
        for listed, found in zip(targets, times, strict=True):
            request = next(requests)
            target = source.choice(listed)
            outcome = RequestOutcome(time.perf_counter())
            await target.send(request, outcome)
            if outcome.error is not None:
                raise UnavailableError(f"a request failed: {outcome.error}")
            if number >= uncounted:
                found.append(1e3 * outcome.first_text)
    for target in itertools.chain.from_iterable(targets):
        target.close()
    return times


async def _streams(url: str, request: bytes, clients: int) -> int:
    """Tokens of as many streams at once."""
    target = Target(url)
    outcomes = [RequestOutcome(time.perf_counter()) for _ in range(clients)]
    await asyncio.gather(*(target.send(request, outcome) for outcome in outcomes))
    target.close()
    return sum(outcome.output_tokens for outcome in outcomes)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench fleet", description=__doc__)
    parser.add_argument("--model", help="a folder with pictures; default: a random one, 8M")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=8, help="requests of a client in a round")
    usual = ", ".join(f"{pause:g} in {name}" for name, pause in PAUSES.items() if pause)
    parser.add_argument("--pause", type=float, help=f"seconds, on average; default: {usual}")
    parser.add_argument("--size", default="512", help="of pictures")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument(
        "--renders", action="store_true", help="path: a front-end that renders, too"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    set_environment()
    reports: list[Report] = []
    if "decision" in given.parts:
        reports.append(decision_report(given.engines))
    if {"routers", "path"} & set(given.parts):
        reports += _served_reports(given)
    publish(reports, given.json)
    return 0


def _served_reports(given: argparse.Namespace) -> list[Report]:
    gc.disable()  # of this process: clients elsewhere would not wait for it
    found: list[Report] = []
    with ExitStack() as stack:
        model: Any = given.model
        if model is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = str(make_folder("qwen2_5_vl", folder / "bench", scale="8m"))
        engines = stack.enter_context(running_engines(model, given.engines))
        if "path" in given.parts:
            ways = ("price", f"renders={model}") if given.renders else ("price",)
            with running_server([model, *ENGINE_OPTIONS]) as alone, ExitStack() as opened:
                fleets = [opened.enter_context(running_frontends(engines, way)) for way in ways]
                found.append(path_report(given, alone, engines, fleets))
        if "routers" in given.parts:
            frontends = stack.enter_context(running_frontends(engines))
            found.append(routers_report(given, engines, frontends))
    return found
