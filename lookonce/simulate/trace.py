"""Traces of requests: what `lookonce simulate` reads, and generators of such traces.

A request is its arrival, its numbers of tokens, its media and its blocks. A block is a number that
stands for `block_tokens` tokens and for all that comes before them, so that two requests share as
many leading blocks as they share tokens. Blocks cover prompt and answer, since a conversation's
next prompt begins with both. No trace has contents.

    request log   JSON lines of `lookonce serve --request-log FILE`
    Mooncake      JSON lines: timestamp (ms), input_length, output_length, hash_ids (of 512 tokens;
                  other traces of this form: of 16), and img_ids
    ServeGen      CSV with a header: timestamp (s), input_tokens, output_tokens, and image_tokens,
                  audio_tokens, video_tokens; these have no identity, so nothing is shared
"""

from __future__ import annotations

import csv
import heapq
import itertools
import json
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from lookonce.errors import ConfigError
from lookonce.types.media import Modality
from lookonce.types.request_trace import LOG_BLOCK_TOKENS, LoggedRequest, decode_blocks

logger = logging.getLogger("lookonce.simulate")

Blocks = NDArray[np.uint64]
MOONCAKE_BLOCK_TOKENS = 512
SMALL_BLOCK_TOKENS = 16
IMAGE_TOKENS = 256
"""Of an `img_ids` entry, whose size such traces do not tell."""
MAX_TOKENS = 1 << 30


class TraceMedium(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A media item of a prompt: tokens `[offset, offset + length)`."""

    key: bytes
    """32 bytes."""
    modality: Modality
    offset: int
    length: int
    num_bytes: int = 0
    """Encoded; 0: not known."""
    pixels: int = 0


class TraceRequest(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One request of a trace."""

    arrival: float
    """Seconds from the trace's beginning."""
    prompt_tokens: int
    output_tokens: int
    blocks: Blocks
    """Of prompt and answer, the last one perhaps not full."""
    block_tokens: int
    media: tuple[TraceMedium, ...] = ()
    tenant: str = ""
    session: int | None = None
    """Requests with one number belong together; the router is not told."""


def token_ids(request: TraceRequest) -> NDArray[np.int32]:
    """Tokens of prompt and answer: equal where blocks are equal, else different."""
    total = request.prompt_tokens + request.output_tokens
    starts = (mix(request.blocks) >> np.uint64(33)).astype(np.uint32)
    places = np.arange(request.block_tokens, dtype=np.uint32)
    tokens: NDArray[np.uint32] = (starts[:, None] + places) & np.uint32(0x7FFF_FFFF)
    return tokens.ravel()[:total].view(np.int32)


def block_keys(request: TraceRequest, block_size: int) -> list[bytes]:
    """A key of 32 bytes for each full block of `block_size` tokens: two are equal where all tokens
    and media up to the block's end are. So a scheduler can know blocks without hashing tokens."""
    size = request.block_tokens
    count = (request.prompt_tokens + request.output_tokens) // block_size
    keys = np.zeros((count, 4), np.uint64)
    if block_size % size == 0:
        step = block_size // size
        keys[:, 0] = request.blocks[step - 1 : count * step : step]
    else:  # several may end in one block of the trace
        lasts = np.arange(block_size - 1, count * block_size, block_size, dtype=np.uint64)
        keys[:, 0] = request.blocks[(lasts // np.uint64(size)).astype(np.intp)]
        keys[:, 2] = lasts % np.uint64(size)
        keys[:, 0] ^= mix(keys[:, 2])
    folded = b""
    for medium in request.media:
        folded = blake3(b"%b%b%d %d" % (folded, medium.key, medium.offset, medium.length)).digest(8)
        keys[medium.offset // block_size :, 1] = int.from_bytes(folded, "little")
    keys[:, 0] ^= keys[:, 1]  # routers know a key by its first 8 bytes
    listed: list[bytes] = keys.view("V32").ravel().tolist()
    return listed


def mix(numbers: Blocks) -> Blocks:
    """A one-to-one map of 64-bit numbers to such that look random (splitmix64)."""
    mixed = numbers + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))


FEW = 8
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN, _FIRST = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def few_mixed(first: int, count: int) -> array[int]:
    """`mix` of `count` numbers of 64 bits from `first` on, quicker where they are few."""
    if count > FEW:
        numbers = np.uint64(first) + np.arange(count, dtype=np.uint64)
        return array("Q", mix(numbers).tobytes())
    found = array("Q")
    for number in range(first, first + count):
        number = (number + 0x9E3779B97F4A7C15) & _MASK
        number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
        found.append(number ^ (number >> 31))
    return found


def number_of(*parts: object) -> int:
    """A 64-bit number that stands for `parts`."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(blake3(text).digest(8), "little")


def media_key(*parts: object) -> bytes:
    """A key of 32 bytes that stands for `parts`."""
    return blake3("\0".join(map(str, parts)).encode()).digest()


# --- files ---------------------------------------------------------------------------------------


def read_trace(path: Path, *, max_requests: int | None = None) -> list[TraceRequest]:
    """The requests of a file, by arrival, whose form is seen from its first line.

    Lines of JSON that are torn, as a server leaves them which is killed or has no disk left, are
    passed over with one warning. Raises `ConfigError` naming the line at fault.
    """
    torn: list[int] = []
    try:  # what is not UTF-8 may be one line that ends within a letter
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            found = list(itertools.islice(_read(path, file, torn), max_requests))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeError:
        raise ConfigError(f"{path} is not UTF-8") from None
    if not found:
        told = f"; line {torn[0]} is no whole JSON" if torn else ""
        raise ConfigError(f"{path} has no requests{told}")
    if torn:
        told = "line %d of %s is torn and is passed over"
        if len(torn) > 1:
            told = f"{len(torn)} lines are torn and are passed over, the first is line %d of %s"
        logger.warning(told, torn[0], path)
    found.sort(key=lambda request: request.arrival)
    first = found[0].arrival
    return [msgspec.structs.replace(each, arrival=each.arrival - first) for each in found]


def _read(path: Path, file: Iterable[str], torn: list[int]) -> Iterator[TraceRequest]:
    """`torn` gets the numbers of lines that are no whole JSON."""
    lines = iter(file)
    first = next(lines, "")
    rest = itertools.chain([first], lines)
    if not first.lstrip().startswith("{"):
        yield from _read_csv(path, map(_whole, rest))
        return
    for number, line in enumerate(rest, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(_whole(line))
        except ValueError:
            torn.append(number)
            continue
        try:
            if "arrival" in fields:
                yield _logged(msgspec.convert(fields, LoggedRequest))
            else:
                yield _mooncake(fields, number)
        except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
            told = f"no field {error}" if isinstance(error, KeyError) else error
            raise ConfigError(f"{path}, line {number}: {told}") from None


def _whole(line: str) -> str:
    """Raises `UnicodeError` for a line that is not UTF-8."""
    if not line.isascii():
        line.encode()
    return line


def _logged(logged: LoggedRequest) -> TraceRequest:
    total = logged.prompt_tokens + logged.output_tokens
    blocks = np.frombuffer(decode_blocks(logged.blocks), "<u8")
    if len(blocks) != -(-total // LOG_BLOCK_TOKENS):
        raise ValueError(f"{len(blocks)} blocks for {total} tokens")
    media = tuple(
        TraceMedium(
            bytes.fromhex(m.key).ljust(32, b"\0"),
            m.modality,
            m.offset,
            m.length,
            m.num_bytes,
            m.pixels,
        )
        for m in logged.media
    )
    return _checked(
        logged.arrival,
        logged.prompt_tokens,
        logged.output_tokens,
        blocks,
        LOG_BLOCK_TOKENS,
        media,
        logged.tenant,
    )


def _mooncake(fields: dict[str, Any], number: int) -> TraceRequest:
    prompt, output = int(fields["input_length"]), int(fields.get("output_length", 1))
    ids = [int(each) for each in fields.get("hash_ids", ())]
    size = MOONCAKE_BLOCK_TOKENS
    if len(ids) > -(-prompt // size):
        size = SMALL_BLOCK_TOKENS
    ids = ids[: prompt // size]
    media, at = [], 0
    for name in fields.get("img_ids", ()):
        length = min(IMAGE_TOKENS, prompt - at)
        if length > 0:
            media.append(TraceMedium(media_key("img", name), "image", at, length))
            at += length
    own = _own_blocks(number, prompt + output, size)
    own[: len(ids)] = mix(np.array(ids, dtype=np.int64).astype(np.uint64))
    arrival = float(fields.get("timestamp", 0.0)) / 1e3
    return _checked(arrival, prompt, output, own, size, tuple(media))


def _read_csv(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    reader = csv.DictReader(lines)
    for number, row in enumerate(reader, 2):
        fields = {(name or "").strip().lower(): value for name, value in row.items()}
        try:
            yield _servegen(fields, number)
        except (ValueError, KeyError, TypeError) as error:
            told = f"no column {error}" if isinstance(error, KeyError) else error
            raise ConfigError(f"{path}, line {number}: {told}") from None


_MEDIA_COLUMNS: dict[str, Modality] = {
    "image_tokens": "image",
    "audio_tokens": "audio",
    "video_tokens": "video",
}


def _servegen(fields: dict[str, Any], number: int) -> TraceRequest:
    media: list[TraceMedium] = []
    at = 0
    for column, modality in _MEDIA_COLUMNS.items():
        length = int(float(fields.get(column) or 0))
        if length > 0:
            media.append(TraceMedium(media_key(number, modality), modality, at, length))
            at += length
    prompt = max(int(float(fields["input_tokens"])), at + 1)
    output = int(float(fields["output_tokens"]))
    size = SMALL_BLOCK_TOKENS
    blocks = _own_blocks(number, prompt + output, size)
    arrival = float(fields["timestamp"])
    return _checked(arrival, prompt, output, blocks, size, tuple(media))


def _own_blocks(number: int, num_tokens: int, size: int) -> Blocks:
    """Blocks that no other request has."""
    start = np.uint64(number_of("own", number))
    return mix(start + np.arange(-(-max(1, num_tokens) // size), dtype=np.uint64))


def _checked(
    arrival: float,
    prompt_tokens: int,
    output_tokens: int,
    blocks: Blocks,
    block_tokens: int,
    media: tuple[TraceMedium, ...],
    tenant: str = "",
) -> TraceRequest:
    if not 1 <= prompt_tokens <= MAX_TOKENS or not 0 <= output_tokens <= MAX_TOKENS:
        raise ValueError(f"{prompt_tokens} tokens and an answer of {output_tokens}")
    if not 0 <= arrival < float("inf"):
        raise ValueError(f"an arrival at {arrival}")
    end = 0
    for medium in media:
        if medium.offset < end or medium.length < 1:
            raise ValueError("media items overlap or are empty")
        end = medium.offset + medium.length
    if end > prompt_tokens:
        raise ValueError(f"a media item ends at {end} of {prompt_tokens} tokens")
    if not output_tokens:  # the request was aborted, or only its prompt is known
        output_tokens = 1
        if len(blocks) * block_tokens < prompt_tokens + 1:
            blocks = np.append(blocks, mix(blocks[-1:]))
    return TraceRequest(arrival, prompt_tokens, output_tokens, blocks, block_tokens, media, tenant)


# --- generators ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a generator makes. Lengths are means; each request's are drawn around them."""

    requests: int = 1000
    rate: float = 10.0
    """Requests a second, all sessions together, at random times."""
    seed: int = 0
    system_tokens: int = 256
    systems: int = 4
    user_tokens: int = 64
    output_tokens: int = 64
    picture_tokens: int = 256
    picture_pixels: int = 1280 * 720
    picture_bytes: int = 200_000
    pictures: int = 1000
    zipf: float = 1.0
    """Exponent of the pictures' popularity."""
    turns: int = 8
    think_seconds: float = 10.0
    """Between the end of an answer, at a usual rate, and the next turn."""
    block_tokens: int = 16


Generator = Callable[[Shape], Iterator[TraceRequest]]


def zipf(shape: Shape) -> Iterator[TraceRequest]:
    """Questions about pictures, some of which are asked about far more often than others."""
    draws = _Draws(shape)
    for number, arrival in enumerate(draws.arrivals(shape.requests, shape.rate)):
        story = _Story(shape, number_of(shape.seed, "system", draws.below(shape.systems)))
        story.say(shape.system_tokens)
        story.show(draws.picture())
        story.begin(number_of(shape.seed, "question", number))
        story.say(draws.length(shape.user_tokens))
        yield story.ask(arrival, draws.length(shape.output_tokens))


def conversations(shape: Shape) -> Iterator[TraceRequest]:
    """Sessions of several turns about one popular picture; each prompt has all that was said."""
    return _sessions(shape, new_picture=False)


def agents(shape: Shape) -> Iterator[TraceRequest]:
    """Sessions that send a new screenshot in each turn, after all that came before."""
    return _sessions(shape, new_picture=True)


def fresh(shape: Shape) -> Iterator[TraceRequest]:
    """Nothing is ever repeated."""
    draws = _Draws(shape)
    for number, arrival in enumerate(draws.arrivals(shape.requests, shape.rate)):
        story = _Story(shape, number_of(shape.seed, "fresh", number))
        story.show(media_key(shape.seed, "new", number))
        story.say(draws.length(shape.system_tokens + shape.user_tokens))
        yield story.ask(arrival, draws.length(shape.output_tokens))


def _sessions(shape: Shape, *, new_picture: bool) -> Iterator[TraceRequest]:
    """Sessions begin at random times; the requests of all of them in order of arrival."""
    draws = _Draws(shape)
    num_sessions = -(-shape.requests // shape.turns)
    begins = enumerate(draws.arrivals(num_sessions, shape.rate / shape.turns))
    coming = next(begins, None)
    running: list[tuple[float, int, int, _Story]] = []
    for _ in range(shape.requests):
        if coming is not None and (not running or coming[1] <= running[0][0]):
            session, begun = coming
            coming = next(begins, None)
            story = _Story(shape, number_of(shape.seed, "system", draws.below(shape.systems)))
            story.say(shape.system_tokens)
            if not new_picture:
                story.show(draws.picture())
            story.begin(number_of(shape.seed, "session", session))
            story.session = session
            heapq.heappush(running, (begun, session, 0, story))
        arrival, session, turn, story = heapq.heappop(running)
        if new_picture:
            story.show(media_key(shape.seed, "screen", session, turn))
        story.say(draws.length(shape.user_tokens))
        yield story.ask(arrival, draws.length(shape.output_tokens))
        if turn + 1 < shape.turns:
            later = arrival + draws.gap(shape.think_seconds)
            heapq.heappush(running, (later, session, turn + 1, story))


GENERATORS: dict[str, Generator] = {
    "zipf": zipf,
    "conversations": conversations,
    "agents": agents,
    "fresh": fresh,
}


class _Draws:
    """The random numbers of one generator."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._random = np.random.default_rng(shape.seed)
        ranks = np.arange(1, shape.pictures + 1, dtype=np.float64)
        self._popularity = np.cumsum(ranks**-shape.zipf)

    def arrivals(self, count: int, rate: float) -> list[float]:
        gaps = np.random.default_rng(self._shape.seed + 1).exponential(1.0 / rate, count)
        times: list[float] = np.cumsum(gaps).tolist()
        return times

    def gap(self, mean: float) -> float:
        return float(self._random.exponential(mean))

    def below(self, count: int) -> int:
        return int(self._random.integers(count))

    def length(self, mean: int) -> int:
        """Half of `mean` to one and a half of it."""
        return max(1, int(self._random.integers(mean - mean // 2, mean + mean // 2 + 1)))

    def picture(self) -> bytes:
        place = self._random.random() * self._popularity[-1]
        return media_key(self._shape.seed, "picture", int(np.searchsorted(self._popularity, place)))


class _Story:
    """A prompt that grows. What is appended decides the blocks from there on."""

    def __init__(self, shape: Shape, name: int) -> None:
        self._shape = shape
        self._name = name
        self._tokens = 0
        self._blocks = array("Q")
        self._media: tuple[TraceMedium, ...] = ()
        self.session: int | None = None

    def begin(self, name: int) -> None:
        """What follows is that of `name`. The block that has begun is its own from its start."""
        self._name = name

    def say(self, num_tokens: int) -> None:
        """Append text, which the name and the position decide."""
        size = self._shape.block_tokens
        del self._blocks[self._tokens // size :]
        self._tokens += num_tokens
        first, last = len(self._blocks), -(-self._tokens // size)
        if last > first:
            self._blocks += few_mixed((self._name + first) & _MASK, last - first)

    def show(self, key: bytes) -> None:
        """Append a picture. What follows depends on it."""
        shape = self._shape
        self._name = number_of(self._name, key)
        medium = TraceMedium(
            key,
            "image",
            self._tokens,
            shape.picture_tokens,
            shape.picture_bytes,
            shape.picture_pixels,
        )
        self._media += (medium,)
        self.say(shape.picture_tokens)

    def ask(self, arrival: float, output_tokens: int) -> TraceRequest:
        """The request with this prompt; the answer becomes part of it."""
        prompt_tokens = self._tokens
        self.say(output_tokens)
        blocks = np.array(self._blocks, dtype=np.uint64)
        return TraceRequest(
            arrival,
            prompt_tokens,
            output_tokens,
            blocks,
            self._shape.block_tokens,
            self._media,
            session=self.session,
        )
