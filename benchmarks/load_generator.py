"""A load generator: streamed chat requests to any OpenAI-compatible server, each timed.

It runs in a process of its own and does little per token, so that it does not limit the figures;
`LoadResult.cpu_share` shows whether it does.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec
import uvloop

from benchmarks.report import percentile
from lookonce.errors import ConfigError

REQUEST_SECONDS = 600.0


def run_load(
    url: str,
    warm_up: Sequence[bytes],
    bodies: Sequence[bytes],
    arrivals: Arrivals,
    *,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> LoadResult:
    """Send `warm_up`, uncounted, then `bodies`. Raises `ConfigError` for a bad `url`.

    `headers` are sent with every request, beside the usual ones.
    """

    async def run() -> LoadResult:
        target = Target(url, api_key, headers)
        try:
            await drive(target, warm_up, Arrivals(concurrency=arrivals.concurrency or 8))
            return await drive(target, bodies, arrivals)
        finally:
            target.close()

    result: LoadResult = uvloop.run(run())
    return result


async def drive(target: Target, bodies: Sequence[bytes], arrivals: Arrivals) -> LoadResult:
    """Send every body. Returns when all requests have ended."""
    places = asyncio.Semaphore(arrivals.concurrency or max(1, len(bodies)))
    started, cpu = time.perf_counter(), time.process_time()
    closed = arrivals.rate is None

    async def one(body: bytes) -> RequestOutcome:
        due = time.perf_counter()
        async with places:
            outcome = RequestOutcome(time.perf_counter() if closed else due)
            await target.send(body, outcome)
        return outcome

    sent = []
    for body, due in zip(bodies, arrivals.times(len(bodies)), strict=True):
        if not closed:
            await asyncio.sleep(started + due - time.perf_counter())
        sent.append(asyncio.create_task(one(body)))
    outcomes = await asyncio.gather(*sent)
    seconds = max((outcome.ended for outcome in outcomes), default=started) - started
    return LoadResult(outcomes, seconds, (time.process_time() - cpu) / max(seconds, 1e-9))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests are sent.

    Without `rate` as soon as one of `concurrency` places is free. With it at random times (a
    Poisson process), `rate` a second on average, at most `concurrency` at a time where given.
    """

    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is None and self.rate is None:
            raise ConfigError("a load needs --concurrency or --rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError("--concurrency must be at least 1")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError("--rate must be above 0")

    def times(self, count: int) -> list[float]:
        """Seconds from the start at which each request is due."""
        if self.rate is None:
            return [0.0] * count
        source = random.Random(self.seed)
        gaps = (source.expovariate(self.rate) for _ in range(count))
        return list(itertools.accumulate(gaps))


@dataclass(frozen=True, slots=True)
class LoadResult:
    outcomes: list[RequestOutcome]
    seconds: float
    """From the first request to the end of the last."""
    cpu_share: float
    """CPU seconds of the generator per second; near 1 the generator itself is the limit."""

    @property
    def answered(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    def times(self, name: str) -> list[float]:
        """Milliseconds, ascending; `name`: `first_text`, `per_token` or `whole`."""
        found = [getattr(outcome, name) for outcome in self.answered]
        return sorted(value * 1e3 for value in found if value is not None)

    def time_percentile(self, name: str, percent: float) -> float | None:
        """Milliseconds; None when no request was answered."""
        times = self.times(name)
        return percentile(times, percent) if times else None


@dataclass(slots=True)
class RequestOutcome:
    """What became of one request; times are seconds of `time.perf_counter`."""

    asked: float
    """When it was sent; at a rate, when it was due, so that waiting for a place counts."""
    text_times: list[float] = field(default_factory=list)
    """When each piece of text came."""
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    items: tuple[ItemReceipt, ...] = ()
    error: str | None = None

    @property
    def first_text(self) -> float:
        """Seconds from asking to the first piece of text."""
        return (self.text_times[0] if self.text_times else self.ended) - self.asked

    @property
    def whole(self) -> float:
        """Seconds from asking to the end."""
        return self.ended - self.asked

    @property
    def per_token(self) -> float | None:
        """Seconds per output token after the first; None for an answer of one piece."""
        if len(self.text_times) < 2 or self.output_tokens < 2:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.output_tokens - 1)


class ItemReceipt(msgspec.Struct, frozen=True):
    """Where one media item came from, as LookOnce's receipts say; other servers say nothing."""

    processor: str = "unknown"
    encoder: str = "unknown"


# --- HTTP ----------------------------------------------------------------------------------------


class Target:
    """A server's chat route, and the connections to it."""

    def __init__(
        self, url: str, api_key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """`url`: `http://host:port`, with or without `/v1`, or `unix:PATH`; else `ConfigError`."""
        self._path = url.removeprefix("unix:") if url.startswith("unix:") else None
        parts = urlsplit(url if self._path is None else "http://localhost")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is http://HOST:PORT, got {url}")
        self._parts: SplitResult = parts
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        lines = [
            f"POST {prefix}/v1/chat/completions HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "X-Reuse-Receipt: 1",
        ]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._head = "\r\n".join(lines).encode()
        self._idle: list[LoadConnection] = []

    async def send(self, body: bytes, outcome: RequestOutcome) -> None:
        """Send one request and fill `outcome`; every failure becomes its `error`."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._exchange(body, outcome)
        except (OSError, TimeoutError, msgspec.MsgspecError, ConnectionError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended = time.perf_counter()

    async def _exchange(self, body: bytes, outcome: RequestOutcome) -> None:
        connection = self._idle.pop() if self._idle else await self._connect()
        reader = _EventReader(outcome)
        head = self._head + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        status = await connection.exchange(head + body, reader.feed)
        if connection.reusable:
            self._idle.append(connection)
        if status != 200:
            outcome.error = f"status {status}: {reader.rest[:200].decode(errors='replace')}"
        elif outcome.error is None and not outcome.text_times and not outcome.output_tokens:
            outcome.error = "the answer has no text"

    async def _connect(self) -> LoadConnection:
        loop = asyncio.get_running_loop()
        if self._path is not None:
            return (await loop.create_unix_connection(LoadConnection, self._path))[1]
        secure = self._parts.scheme == "https"
        port = self._parts.port or (443 if secure else 80)
        _, connection = await loop.create_connection(
            LoadConnection,
            self._parts.hostname or "",
            port,
            ssl=ssl.create_default_context() if secure else None,
        )
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _EventReader:
    """Reads the server-sent events of one answer into its outcome."""

    def __init__(self, outcome: RequestOutcome) -> None:
        self._outcome = outcome
        self._decoder = msgspec.json.Decoder(_Chunk)
        self.rest = b""

    def feed(self, data: bytes) -> None:
        now = time.perf_counter()
        *events, self.rest = (self.rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                self._take(self._decoder.decode(event[6:]), now)

    def _take(self, chunk: _Chunk, now: float) -> None:
        outcome = self._outcome
        if any(choice.delta.content for choice in chunk.choices):
            outcome.text_times.append(now)
        if chunk.usage is not None:
            outcome.prompt_tokens = chunk.usage.prompt_tokens
            outcome.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details or _PromptDetails()
            outcome.cached_tokens = details.cached_tokens or 0
        if chunk.reuse_receipt is not None:
            outcome.items = tuple(chunk.reuse_receipt.items)
        if chunk.error is not None:
            outcome.error = chunk.error.message


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Receipt(msgspec.Struct):
    items: list[ItemReceipt] = []


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    reuse_receipt: _Receipt | None = None
    error: _Error | None = None


OnBody = Callable[[bytes], None]


class LoadConnection(asyncio.Protocol):
    """One HTTP/1.1 connection, kept alive between exchanges, which come one after another."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._on_body: OnBody | None = None
        self._answered: asyncio.Future[int] | None = None
        self.reusable = True

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """Send bytes and return the status. `on_body` gets each piece of the body as it comes.

        Raises what `on_body` raises, and `ConnectionError` when the connection is lost or the
        answer is not HTTP.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("the connection is closed")
        self._on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answered
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(ConnectionError("the server closed the connection"))

    # --- httptools ----------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(body)

    def on_message_complete(self) -> None:
        parser, answered = self._parser, self._answered
        if parser is None or answered is None or answered.done():
            return
        self.reusable = parser.should_keep_alive()
        answered.set_result(parser.get_status_code())

    def _fail(self, error: BaseException) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)
