"""`lookonce bench serve`: a server under load, over HTTP: rates, percentiles, origins of media.

Without --url it starts a server of its own for --model, on all cores unless OMP_NUM_THREADS says
otherwise. Every request is streamed and greedy, and asks for exactly --output-tokens.

    TTFT        from asking (with --rate: from when the request was due) to the first piece of text
    per token   between pieces of text after the first
    whole       from asking to the end

--peer-shape runs the load that another server's figures were published with, and shows ours beside
them: a random Qwen2.5-VL folder of 8 million parameters, 64 requests of 32 output tokens, 8 at a
time, each with one JPEG of 1024 x 1024 pixels; all options of that server tuned. The share of its
vision tower was not published; with new pictures it decides (--scale 8m: 15 %, 8m-small-tower:
7 %). Ours is tuned by one option, --dtype bfloat16: the type such models are published and run in,
while our default on a CPU is float32 (--serve-options="--dtype float32" measures that).
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import msgspec

from benchmarks.load_generator import Arrivals, LoadResult, run_load
from benchmarks.report import Panel, Report, publish, write_shares
from benchmarks.running_server import running_server
from benchmarks.workloads import WORKLOADS, RequestShape, Workload, folder, text
from lookonce.errors import ConfigError, UnavailableError
from tests.support.model_folders.make import make_folder

PERCENTILES = (50, 90, 99)
TIMES = (("TTFT", "first_text"), ("per token", "per_token"), ("whole", "whole"))
Results = dict[str, LoadResult]
"""Workload → its result."""


def main(arguments: Sequence[str]) -> int:
    options = _settled(arguments)
    arrivals = Arrivals(options.concurrency, options.rate, options.seed)
    with _served(options) as url:
        shape = RequestShape(
            model=options.served_model_name or _served_name(url, options.api_key),
            output_tokens=options.output_tokens,
            prompt_words=options.prompt_words,
            pictures=options.pictures,
            picture=options.picture,
            first=options.seed * 10_000,
            body=_body(options.body),
        )
        results = measure(url, _workloads(options, shape), arrivals, options.api_key)
        alone = text_alone(url, shape, options.api_key) if options.peer_shape else None
    reports = [rates(results, _note(options)), times(results), caches(results)]
    if alone is not None:
        reports.append(beside_peer(results, alone))
    publish(reports, options.json)
    if options.plot is not None:
        plot(options.plot, results)
    return 0 if all(result.answered for result in results.values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lookonce bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help="an OpenAI-compatible server that runs already")
    add("--api-key", help="its key")
    add("--model", default="nano", help="folder or id to start a server for; default nano")
    add("--device", default="cpu", help="of the server that is started; default: cpu")
    add("--serve-options", default="", help="more options of lookonce serve, in one string")
    add("--served-model-name", help="the name in requests; default: the server's first")
    add("--workload", nargs="+", choices=[*WORKLOADS], default=None, help="default: all of them")
    add("--prompts", type=Path, help="a folder of prompts: .json, or .txt with a picture beside")
    add("--requests", type=int, default=64)
    add("--warm-up", type=int, default=16, help="uncounted requests before; default 16")
    add("--concurrency", type=int, help="requests at a time; default 8 without --rate")
    add("--rate", type=float, help="requests a second, at random moments")
    add("--seed", type=int, help="of moments, questions and pictures; default: new ones each time")
    add("--output-tokens", type=int, default=32)
    add("--prompt-words", type=int, default=16)
    add("--picture", default="1024 JPEG", help='size and format, default "1024 JPEG"')
    add("--pictures", type=int, default=1, help="per request")
    add("--body", default="{}", help="JSON: more fields of every request")
    add("--peer-shape", action="store_true", help="the published benchmark of another server")
    add("--scale", default=PEER_SCALE, help=f"of its folder; default {PEER_SCALE}")
    add("--json", type=Path)
    add("--plot", type=Path, help="an SVG file: shares of requests below each time")
    return parser


def _settled(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed options with defaults filled in. Raises `ConfigError`."""
    options = _parser().parse_args(arguments)
    for name in ("requests", "pictures", "output_tokens", "prompt_words"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if options.warm_up < 0:
        raise ConfigError("--warm-up must not be negative")
    if options.peer_shape:
        settle_peer_shape(options)
    if options.workload is None:
        options.workload = [] if options.prompts else [*WORKLOADS]
    if options.rate is None and options.concurrency is None:
        options.concurrency = 8
    if options.seed is None:
        options.seed = secrets.randbelow(1_000_000)
    return options


@contextmanager
def _served(options: argparse.Namespace) -> Iterator[str]:
    """The given URL, or that of a server that runs until the block ends."""
    if options.url is not None:
        yield options.url
        return
    with tempfile.TemporaryDirectory() if options.peer_shape else nullcontext("") as scratch:
        model = options.model
        if options.peer_shape:
            target = Path(scratch) / "folder"
            model = str(make_folder(PEER_FOLDER, target, scale=options.scale, dtype=PEER_DTYPE))
        arguments = [model, "--served-model-name", "bench", "--device", options.device]
        arguments += shlex.split(options.serve_options)
        with running_server(arguments) as server:
            yield server.url


def _served_name(url: str, api_key: str | None) -> str:
    """The first model that a server lists. Raises `UnavailableError`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.get(f"{base}/v1/models", headers=headers, timeout=30)
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise UnavailableError(f"{base}/v1/models names no model: {error}") from None


def _workloads(options: argparse.Namespace, shape: RequestShape) -> list[Workload]:
    count, warm_up = options.requests, options.warm_up
    found = [WORKLOADS[name](shape, count, warm_up) for name in options.workload]
    if options.prompts is not None:
        found.append(folder(shape, options.prompts, count, warm_up))
    return found


def _body(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError:
        raise ConfigError(f"--body is a JSON object, got {text}") from None


def _note(options: argparse.Namespace) -> str:
    pace = f"concurrency {options.concurrency}" if options.concurrency else ""
    if options.rate is not None:
        pace = f"{options.rate:g} requests/s {'at ' + pace if pace else ''}".strip()
    note = (
        f"{options.requests} requests, {pace}, {options.output_tokens} output tokens, "
        f"{options.pictures} x {options.picture}, seed {options.seed}"
    )
    return f"{note}, served with {options.serve_options}" if options.serve_options else note


# --- Tables --------------------------------------------------------------------------------------


def measure(
    url: str, workloads: Sequence[Workload], arrivals: Arrivals, api_key: str | None
) -> Results:
    """Run one workload after another."""
    return {
        work.name: run_load(url, work.warm_up, work.bodies, arrivals, api_key=api_key)
        for work in workloads
    }


def rates(results: Results, note: str) -> Report:
    """One row per workload."""
    report = Report("serve", ("workload", "answered", "failed", "seconds", "req/s", "tok/s"))
    for name, result in results.items():
        answered, seconds = result.answered, result.seconds
        tokens = sum(outcome.output_tokens for outcome in answered)
        failed = len(result.outcomes) - len(answered)
        rate = len(answered) / seconds
        report.add(name, len(answered), failed, seconds, rate, tokens / seconds)
    busiest = max((result.cpu_share for result in results.values()), default=0.0)
    report.notes.append(f"{note}; the load generator took at most {busiest:.0%} of one CPU")
    report.notes += [f"{name}: {line}" for name, r in results.items() for line in failures(r)]
    return report


def times(results: Results) -> Report:
    """One row per workload and kind of time."""
    columns = ("workload", "ms", *(f"p{percent}" for percent in PERCENTILES))
    report = Report("serve (times)", columns)
    for name, result in results.items():
        for title, time in TIMES:
            report.add(name, title, *(result.time_percentile(time, p) for p in PERCENTILES))
    return report


def failures(result: LoadResult) -> list[str]:
    """The three most frequent errors, with their counts."""
    errors = Counter(outcome.error for outcome in result.outcomes if outcome.error is not None)
    return [f"{count} x {error}" for error, count in errors.most_common(3)]


def caches(results: Results) -> Report:
    """One row per workload: where prompts and media came from, as the server's receipts say."""
    columns = ("workload", "prompt tokens", "cached tokens", "media", "processor", "encoder")
    report = Report("serve (caches)", columns)
    for name, result in results.items():
        answered = result.answered
        items = [item for outcome in answered for item in outcome.items]
        report.add(
            name,
            sum(outcome.prompt_tokens for outcome in answered),
            sum(outcome.cached_tokens for outcome in answered),
            len(items),
            _counted(Counter(item.processor for item in items)),
            _counted(Counter(item.encoder for item in items)),
        )
    return report


def _counted(outcomes: Counter[str]) -> str | None:
    return ", ".join(f"{count} {name}" for name, count in outcomes.most_common()) or None


def plot(path: Path, results: Results) -> None:
    """Plot the share of requests below each time, one line per workload."""
    write_shares(
        path,
        [
            Panel(title, "ms", {name: result.times(time) for name, result in results.items()})
            for title, time in TIMES
        ],
    )


# --- The figures another server publishes --------------------------------------------------------

PEER_FOLDER, PEER_SCALE, PEER_DTYPE = "qwen2_5_vl", "8m", "bfloat16"
PEER_RATES: Mapping[str, float] = {"new": 4.4, "same": 20.0, "text": 66.0}
"""Workload → the peer's requests a second."""
PEER_FIRST_TEXT_MS = 8.2
"""The peer's median for a text prompt, one at a time."""
NUM_ALONE = 32
"""Requests that are sent one at a time."""


def settle_peer_shape(options: argparse.Namespace) -> None:
    """Set the options that the published load fixes."""
    options.requests, options.concurrency, options.rate = 64, 8, None
    options.output_tokens, options.pictures, options.picture = 32, 1, "1024 JPEG"
    options.workload, options.prompts = ["text", "same", "new"], None
    options.serve_options = options.serve_options or f"--dtype {PEER_DTYPE}"


def text_alone(url: str, shape: RequestShape, api_key: str | None) -> LoadResult:
    """Text prompts one at a time, each with a new question."""
    work = text(shape, 1000 + NUM_ALONE, 4)
    bodies = work.bodies[1000:]
    return run_load(url, work.warm_up, bodies, Arrivals(concurrency=1), api_key=api_key)


def beside_peer(results: Mapping[str, LoadResult], alone: LoadResult) -> Report:
    """Our figures and the peer's; `ahead by` is above 1 where ours are better."""
    report = Report("serve (beside a peer)", ("figure", "ours", "peer", "ahead by"))
    for name, theirs in PEER_RATES.items():
        ours = len(results[name].answered) / results[name].seconds
        report.add(f"{name}: requests/s", ours, theirs, ours / theirs)
    first = alone.time_percentile("first_text", 50)
    ahead = None if first is None else PEER_FIRST_TEXT_MS / first
    report.add("text: TTFT ms, one at a time, p50", first, PEER_FIRST_TEXT_MS, ahead)
    return report
