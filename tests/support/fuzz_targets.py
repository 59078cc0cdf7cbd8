"""What every parser of strangers' bytes must do with any bytes; one function a parser.

A target takes bytes and raises where a rule is broken. Declared errors of the parser are caught by
the target, anything else is a finding. `tests/fuzz/test_fuzz.py` runs all targets under Hypothesis,
`tools/fuzz.py` runs one under atheris, guided by coverage. To add one, write a function with
`@target`, and seeds.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import ipaddress
import json
import math
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from lookonce.config import ConnectionConfig
from lookonce.errors import (
    BadRequestError,
    ForbiddenError,
    ProtocolError,
    RequestError,
    TooLargeError,
)
from lookonce.frontend.requests import ChatRequest, CompletionRequest, TokenizeRequest
from lookonce.frontend.tools.formats import FORMATS
from lookonce.frontend.tools.parser import (
    CallArguments,
    CallStart,
    ContentText,
    Delta,
    ReasoningText,
    ToolParser,
    joined,
)
from lookonce.ipc.codec import MessageDecoder, MessageEncoder
from lookonce.ipc.framing import FrameReader, greeting, message_pieces
from lookonce.ipc.messages import ClientMessage, EngineMessage, Hello
from lookonce.kv.tier import TierError
from lookonce.kv.valkey import ValkeyTier
from lookonce.render.media.cost import UNREADABLE_SECONDS, CostLimits, estimate_cost
from lookonce.render.media.external_items import decode_kwargs
from lookonce.render.media.loader import media_source, source_of_url
from lookonce.render.media.processing import IMAGE_FORMATS
from lookonce.render.media.worker import JobBegun, WorkerReply, WorkerRequest
from lookonce.server.http.body import parse_reporting
from lookonce.server.http.connections import Connections, HttpProtocol
from lookonce.server.http.multipart import Form, FormParser
from lookonce.server.http.request_guard import PRIVATE_DOMAINS, RequestGuard
from lookonce.server.http.uvicorn_server import uvicorn_config
from lookonce.types.kv import TierSpec
from lookonce.types.media import Array
from tests.support.ipc_samples import engine_messages, item, request, update
from tests.support.kv.tiers import OBJECTS, SIZE, key, payload
from tests.support.render.bombs import Scan, gif, png, progressive_jpeg

CORPUS = Path(__file__).parent.parent / "fuzz" / "corpus"
MAX_MESSAGE = 2_000
"""Characters of an error that a client is sent, whatever it sent."""

Check = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """A parser, what its input looks like, and what must hold."""

    name: str
    check: Check
    seeds: Callable[[], Sequence[bytes]]

    def corpus(self) -> list[bytes]:
        """Inputs that once broke a rule, or reach what nothing else reaches."""
        folder = CORPUS / self.name
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return [*self.seeds(), *(file.read_bytes() for file in files)]


TARGETS: dict[str, Target] = {}


def target(seeds: Callable[[], Sequence[bytes]]) -> Callable[[Check], Check]:
    """Make a target of a function; `seeds` makes valid inputs, which are mutated."""

    def add(check: Check) -> Check:
        TARGETS[check.__name__] = Target(check.__name__, check, seeds)
        return check

    return add


def _check_error(error: RequestError) -> None:
    assert isinstance(error.message, str)
    assert error.message
    assert len(error.message) <= MAX_MESSAGE, f"an error of {len(error.message)} characters"
    assert error.param is None or len(error.param) <= MAX_MESSAGE
    error.message.encode("utf-8", "strict") if error.message.isascii() else None


def _pieces(data: bytes, step: int) -> Iterator[bytes]:
    for start in range(0, len(data), step):
        yield data[start : start + step]


# --- what clients send in a body ------------------------------------------------------------------

MAX_MEDIA = 4096


def _data_urls() -> list[bytes]:
    text = base64.b64encode(bytes(range(256)))
    return [
        b"data:image/png;base64," + text,
        b"DATA:;base64," + text.replace(b"+", b"%2B").rstrip(b"="),
        b"data:image/png;base64,QUJD\r\nREVG\n",
        b"https://example.org/a.png",
        b"file:///tmp/a",
        b'{"type":"input_audio","input_audio":{"data":"QUJD","format":"wav"},"uuid":"x"}',
        b'{"type":"image_url","image_url":{"url":"data:;base64,QUJD"}}',
    ]


@target(_data_urls)
def data_url(data: bytes) -> None:
    """A URL or a content part: a source whose bytes are within the limit and survive base64."""
    text = data.decode("utf-8", "replace")
    try:
        part = json.loads(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        part = None
    try:
        if isinstance(part, dict):
            source = media_source(part, "messages[0].content[0]")
        else:
            source = source_of_url(text, "image", "messages[0].content[0]")
        if source.origin != "inline":
            assert len(source.value) <= 8192
            return
        found = source.inline_bytes(MAX_MEDIA)
    except (BadRequestError, TooLargeError) as error:
        _check_error(error)
        return
    assert 0 < len(found) <= MAX_MEDIA
    again = "data:;base64," + base64.b64encode(found).decode()
    assert source_of_url(again, "image", "p").inline_bytes(MAX_MEDIA) == found


def _wire(**arrays: tuple[str, list[int], bytes]) -> bytes:
    named = {
        name: {"dtype": dtype, "shape": shape, "data": data}
        for name, (dtype, shape, data) in arrays.items()
    }
    return msgspec.msgpack.encode(named)


def _kwargs() -> list[bytes]:
    return [
        _wire(pixel_values=("float32", [2, 3], bytes(24)), grid=("int64", [1, 3], bytes(24))),
        _wire(a=("uint8", [0, 1 << 40], b"")),
        _wire(a=("bfloat16", [], b"ab")),
        _wire(a=("uint8", [-1, -1], b"a")),
    ]


@target(_kwargs)
def kwargs_data(data: bytes) -> None:
    """Injected arrays: no more bytes than came, and each as its shape says."""
    try:
        arrays = decode_kwargs(base64.b64encode(data).decode())
    except BadRequestError as error:
        _check_error(error)
        return
    assert sum(array.nbytes for array in arrays.values()) <= len(data)
    _check_arrays(arrays)
    again = {
        name: {"dtype": a.dtype, "shape": a.shape, "data": bytes(a.data)}
        for name, a in arrays.items()
    }
    encoded = base64.b64encode(msgspec.msgpack.encode(again)).decode()
    assert decode_kwargs(encoded) == arrays


def _check_arrays(arrays: dict[str, Array]) -> None:
    for array in arrays.values():
        assert all(length >= 0 for length in array.shape)
        assert array.data.readonly
        if array.dtype != "bfloat16":
            flat = np.frombuffer(array.data, np.dtype(array.dtype))
            assert flat.reshape(array.shape).nbytes == array.nbytes


def _bodies() -> list[bytes]:
    return [
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"}]}]}',
        b'{"messages":[{"role":"user","content":"a"}],"stream":true,"stop":["a"],"n":2,'
        b'"logit_bias":{"1":2.5},"temprature":1,"response_format":{"type":"json_object"}}',
        b'{"prompt":[[1,2],[3]],"max_tokens":3,"logprobs":2,"echo":true,"seed":7}',
        b'{"messages":[{"role":"assistant","tool_calls":[{"id":"1","type":"function",'
        b'"function":{"name":"f","arguments":"{}"}}]}],"tools":[{"type":"function",'
        b'"function":{"name":"f","parameters":{"type":"object"}}}]}',
    ]


@target(_bodies)
def json_body(data: bytes) -> None:
    """A body is a request, or refused with a short error that names the part."""
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest):
        try:
            decoded, unknown = parse_reporting(data, kind)
        except BadRequestError as error:
            _check_error(error)
            continue
        assert isinstance(decoded, kind)
        assert all(isinstance(name, str) for name in unknown)
        json.loads(data)  # what we take is JSON for others, too


# --- media headers --------------------------------------------------------------------------------

LIMITS = CostLimits(max_pixels=10_000, max_audio_seconds=60.0, max_cpu_seconds=5.0)


MAX_FORM_FILE = 512


def _forms() -> list[bytes]:
    def part(headers: str, value: bytes) -> bytes:
        return b"--B\r\n" + headers.encode() + b"\r\n\r\n" + value + b"\r\n"

    name = 'Content-Disposition: form-data; name="{}"'.format
    file = part(name("file") + '; filename="a \\"b\\".wav"', b"RIFF\r\n--A\r--B--" * 9)
    fields = [part(name("model"), b"nano"), part(name("words[]"), "ü".encode())]
    headers = part("X: y\r\n" + name("prompt").lower() + "\r\nContent-Type: text/plain", b"")
    return [
        file + b"--B--\r\n",
        b"".join([*fields, file, headers]) + b"--B--",
        fields[0] * 101 + b"--B--",
        part(name("file"), bytes(MAX_FORM_FILE + 1)) + b"--B--",
    ]


@target(_forms)
def form(data: bytes) -> None:
    """However bytes are cut, the same form or the same error; nothing is made up."""
    whole = _form_of(data, len(data) or 1)
    for step in (1, 7, 64):
        assert _form_of(data, step) == whole
    if not isinstance(whole, str):
        assert len(whole.file or b"") <= min(len(data), MAX_FORM_FILE)
        values = [value for values in whole.fields.values() for value in values]
        assert sum(len(value.encode()) for value in values) <= len(data)


def _form_of(data: bytes, step: int) -> Form | str:
    """The form of bytes that come `step` at once, or the error."""
    parser = FormParser(b"B", MAX_FORM_FILE, "file")
    try:
        for piece in _pieces(data, step):
            parser.feed(piece)
        return parser.finish()
    except RequestError as error:
        _check_error(error)
        return f"{type(error).__name__}: {error.message}"


def _pictures() -> list[bytes]:
    plain = Image.new("RGB", (20, 10), (1, 2, 3))
    files = [png(30, 20), gif(30, 20, comments=3), png(200, 200), gif(3, 3)]
    files += [progressive_jpeg(16, [Scan(), Scan(refining=True)], components=3)]
    for file_format in IMAGE_FORMATS:
        for side in (plain, plain.resize((120, 120))):
            file = io.BytesIO()
            side.save(file, file_format)
            files.append(file.getvalue())
    return files


@target(_pictures)
def image_cost(data: bytes) -> None:
    """A cost that is a number, and no picture that the decoder sees as too large passes."""
    try:
        seconds = estimate_cost("image", data, LIMITS)
    except TooLargeError as error:
        _check_error(error)
        return
    assert math.isfinite(seconds)
    assert 0 < seconds <= LIMITS.max_cpu_seconds
    if seconds < UNREADABLE_SECONDS:
        size = _size_seen_by_pillow(data)
        assert size is None or size <= LIMITS.max_pixels, (
            "Pillow sees more pixels than the estimate"
        )


def _size_seen_by_pillow(data: bytes) -> int | None:
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            return image.width * image.height
    except Exception:  # noqa: BLE001 - a decoder's own, whatever it is
        return None


def _sounds() -> list[bytes]:
    import soundfile

    files = []
    for container, codec in (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS")):
        file = io.BytesIO()
        soundfile.write(file, np.zeros(1600, np.float32), 16000, codec, format=container)
        files.append(file.getvalue()[:4096])
    return [*files, b"\xff\xfb\x90\xc4" + bytes(200), b"ID3\x03\0\0\0\0\0\0\xff\xfb\x90\xc4"]


@target(_sounds)
def sound_cost(data: bytes) -> None:
    """A cost that is a number."""
    try:
        seconds = estimate_cost("audio", data, LIMITS)
    except TooLargeError as error:
        _check_error(error)
        return
    assert math.isfinite(seconds)
    assert 0 < seconds <= LIMITS.max_cpu_seconds


# --- links between processes ----------------------------------------------------------------------

LINK_BYTES = 1 << 20


def _links() -> list[bytes]:
    small = MessageEncoder().encode(Hello("sender"))
    large = [bytes(20_000), b"", b"abc", bytes(5_000)]
    hello = greeting("name")
    whole = [hello, *message_pieces(small), *message_pieces(large)]
    return [
        b"".join(bytes(piece) for piece in whole),
        hello + b"".join(bytes(p) for p in message_pieces([b""])),
        hello + b"".join(bytes(p) for p in message_pieces([b"a", b"b"])),
    ]


def _read_link(data: bytes, step: int) -> tuple[list[list[bytes]], str]:
    """The messages, and the error that ended them, of bytes that come `step` at once."""
    reader, messages = FrameReader(LINK_BYTES), []
    try:
        for piece in _pieces(data, step):
            while piece:
                room = reader.buffer()
                taken = piece[: len(room)]
                room[: len(taken)] = taken
                piece = piece[len(taken) :]
                for frames, fds in reader.feed(len(taken)):
                    assert not fds
                    messages.append([bytes(frame) for frame in frames])
    except ProtocolError as error:
        return messages, type(error).__name__
    finally:
        reader.close()
    return messages, ""


@target(_links)
def link_frames(data: bytes) -> None:
    """However bytes are cut, the same messages come; sent again, they are the same bytes."""
    whole, broken = _read_link(data, len(data) or 1)
    for step in (1, 7, 4099) if len(data) < 4096 else (251, 4099):
        parts, how = _read_link(data, step)
        # A piece that holds both messages and garbage loses the messages with the connection.
        assert how == broken
        assert parts[: len(whole)] == whole
    if not broken and whole:
        sent = b"".join(bytes(p) for frames in whole for p in message_pieces(frames))
        assert sent in data


def _framed(frames: Sequence[Any]) -> bytes:
    head, *others = [bytes(frame) for frame in frames]
    sizes = b"".join(struct.pack("<H", len(frame)) for frame in others)
    return bytes([len(others)]) + sizes + b"".join(others) + head


def _unframed(data: bytes) -> list[bytes]:
    number = data[0] % 8 if data else 0
    at, frames = 1 + 2 * number, []
    for index in range(number):
        size = int.from_bytes(data[1 + 2 * index : 3 + 2 * index], "little")
        frames.append(data[at : at + size])
        at += size
    return [data[at:], *frames]


def _check_message(data: bytes, union: Any) -> None:
    """Malformed, or a message that is the same after being sent on."""
    try:
        message = MessageDecoder[Any](union).decode(_unframed(data))
    except ProtocolError:
        return
    once = [bytes(frame) for frame in MessageEncoder().encode(message)]
    again = MessageDecoder[Any](union).decode(once)
    assert [bytes(frame) for frame in MessageEncoder().encode(again)] == once


def _client_messages() -> list[bytes]:
    from lookonce.ipc.messages import CacheOps, KeyedItem, Submit

    ops = CacheOps(adds=(KeyedItem(b"k" * 32, item(16, 2000)),), drops=(b"d" * 32,))
    messages = [Hello("s", 1), Submit(1, 2, ops, request()), update(3, 2000)]
    return [_framed(MessageEncoder().encode(each)) for each in messages]


@target(_client_messages)
def client_message(data: bytes) -> None:
    """From an API process to the engine."""
    _check_message(data, ClientMessage)


@target(lambda: [_framed(MessageEncoder().encode(each)) for each in engine_messages])
def engine_message(data: bytes) -> None:
    """From the engine to an API process."""
    _check_message(data, EngineMessage)


def _worker_messages() -> list[bytes]:
    from lookonce.render.media.processing import Processed
    from lookonce.render.media.worker import JobDone, JobRequest, SlabWanted

    fields = {"item": item(16, 2000)}
    missing = [f.name for f in msgspec.structs.fields(Processed) if f.required and f.name != "item"]
    messages: list[Any] = [JobBegun(), SlabWanted(5)]
    if not missing:
        messages.append(JobDone(Processed(**fields)))
    messages.append(JobRequest("image", {"a": 1}, Array("uint8", (2000,), bytes(2000))))
    return [_framed(MessageEncoder().encode(each)) for each in messages]


@target(_worker_messages)
def worker_message(data: bytes) -> None:
    """Between media pool and media worker, both ways."""
    _check_message(data, WorkerReply)
    _check_message(data, WorkerRequest)


# --- KV objects -----------------------------------------------------------------------------------


def _objects() -> list[bytes]:
    good = OBJECTS.header(key(1), payload(1)) + bytes(payload(1))
    return [good, good[:-1], good[:128], b"LOKV" + good[5:]]


@target(_objects)
def kv_object(data: bytes) -> None:
    """Only the very object of a key is intact."""
    header, body = data[:128], data[128:]
    for number in (1, 2):
        whole = OBJECTS.intact(key(number), header, body)
        assert not whole or bytes(header) == OBJECTS.header(key(number), body)
        assert not (whole and number == 2 and bytes(body) == bytes(payload(1)))


def _valkey_answers() -> list[bytes]:
    good = OBJECTS.header(key(1), payload(1)) + bytes(payload(1))
    bulk = b"$%d\r\n" % len(good) + good + b"\r\n"
    return [
        bulk + b"$-1\r\n",
        bulk + bulk,
        b"-ERR no\r\n",
        b"$5\r\nabcde\r\n:1\r\n",
        b"$-1\r\n" * 2,
    ]


class _OneTier(ValkeyTier):
    """A tier whose only connection answers with what was prepared, then closes."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(OBJECTS, TierSpec("valkey", host="x"), timeout=1.0)
        self.answer = answer
        self.theirs: list[socket.socket] = []

    def _connection(self, deadline: float) -> Any:
        connection = _connected()
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        theirs.setblocking(False)
        with contextlib.suppress(OSError):
            theirs.send(self.answer)
        theirs.shutdown(socket.SHUT_WR)
        connection._socket = ours
        self.theirs.append(theirs)
        return connection

    def close(self) -> None:
        super().close()
        for each in self.theirs:
            each.close()


def _connected() -> Any:
    from lookonce.kv.valkey import BUFFER_BYTES, RespConnection

    connection = RespConnection.__new__(RespConnection)
    connection._buffer = bytearray(BUFFER_BYTES)
    connection._start = connection._end = 0
    return connection


@target(_valkey_answers)
def valkey_answer(data: bytes) -> None:
    """What a Valkey server answers: only intact blocks are vouched for, and errors are its own."""
    tier = _OneTier(data)
    into = memoryview(bytearray(2 * SIZE))
    began = time.monotonic()
    outcome = tier.read([key(1), key(2)], into)
    assert 0 <= outcome.num_blocks <= 2
    for number in range(outcome.num_blocks):
        stored = OBJECTS.header(key(number + 1), into[number * SIZE : (number + 1) * SIZE])
        assert stored in data
    with contextlib.suppress(TierError):
        assert all(isinstance(held, bool) for held in tier.lease([key(1)]))
    assert time.monotonic() - began < 5
    tier.close()


# --- tool calls -----------------------------------------------------------------------------------

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "o": {"type": "object"}, "n": {"type": "integer"}},
    }
}
NAMES = tuple(FORMATS)


def _calls() -> list[bytes]:
    hermes = '<tool_call>{"name":"f","arguments":{"a":"x\\"y"}}</tool_call>'
    coder = (
        "<tool_call>\n<function=f>\n<parameter=a>\nBern\n</parameter>\n<parameter=o>\n"
        "{'a': True}\n</parameter>\n</function>\n</tool_call>"
    )
    llama = '<|python_tag|>{"name":"f","parameters":{"n":1.50}};{"name":"f"}'
    mistral = 'a[TOOL_CALLS][{"name":"f","arguments":{}}] [TOOL_CALLS]f[ARGS]{"a":1}'
    harmony = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f"
        '<|channel|>commentary <|constrain|>json<|message|>{"a":1}<|call|>'
    )
    texts = {
        "hermes": hermes, "qwen3_coder": coder, "llama3": llama, "mistral": mistral,
        "harmony": harmony,
    }  # fmt: skip
    nested = '<tool_call>{"name": ' + "[" * 1100 + "]" * 1100 + "}</tool_call>"
    written = [*texts.items(), ("hermes", nested)]
    return [bytes([NAMES.index(name)]) + text.encode() for name, text in written]


@target(_calls)
def tool_calls(data: bytes) -> None:
    """The same deltas however the text is cut; calls are numbered; nothing is held for ever."""
    if not data:
        return
    name, text = NAMES[data[0] % len(NAMES)], data[1:].decode("utf-8", "replace")
    whole = _parsed(FORMATS[name].parser(SCHEMAS), [text])
    for step in (1, 5) if len(text) < 500 else (97,):
        cut = [text[at : at + step] for at in range(0, len(text), step)]
        assert _parsed(FORMATS[name].parser(SCHEMAS), cut) == whole
    calls = [delta.index for delta in whole if isinstance(delta, CallStart)]
    assert calls == list(range(len(calls)))
    begun = -1
    for delta in whole:
        match delta:
            case CallStart(index, function):
                begun = index
                assert function
            case CallArguments(index, _):
                assert index == begun
            case ContentText(said) | ReasoningText(said):
                assert said in text or name != "hermes" or not calls


def _parsed(parser: ToolParser, pieces: Sequence[str]) -> list[Delta]:
    deltas: list[Delta] = []
    length = 0
    for piece in pieces:
        deltas += parser.push(piece)
        length += len(piece)
        assert 0 <= parser.num_held <= length
    deltas += parser.finish()
    return joined(deltas)


# --- HTTP -----------------------------------------------------------------------------------------


def _http() -> list[bytes]:
    return [
        b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/x?y=%20 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
        b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;x=y\r\nabc\r\n0\r\nTrailer: 1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok",
        b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
    ]


ANSWER = re.compile(rb"HTTP/1\.1 (?=\d{3} )")


class _Wire(asyncio.Transport):
    """The transport of a connection: keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close
    write_eof = close

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


@dataclass
class _Outcome:
    """What an application and a client see of a connection."""

    requests: list[tuple[Any, ...]]
    written: bytes
    peak: int
    """Most bytes of headers that were held."""


def _serve(data: bytes, step: int) -> _Outcome:
    return asyncio.run(_served(data, step))


async def _served(data: bytes, step: int) -> _Outcome:
    outcome = _Outcome([], b"", 0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
        headers = tuple(scope["headers"])
        outcome.requests.append((scope["method"], scope["raw_path"], headers, body))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn_config(app)
    config.loaded_app, config.loaded = app, True
    config.http_protocol_class, config.ws_protocol_class = HttpProtocol, None
    config.encoded_headers = []
    state = type("State", (), {"connections": set(), "tasks": set(), "total_requests": 0})()
    state.default_headers = []
    limits = ConnectionConfig(max_header_bytes=2048, max_headers=16)
    table = Connections(limits)
    protocol, wire = HttpProtocol(config, state, {}, connections=table, address="a"), _Wire()
    table.add(protocol)
    protocol.connection_made(wire)
    for piece in _pieces(data, step):
        if wire.closed:
            break
        protocol.data_received(piece)
        held = sum(len(n) + len(v) for n, v in protocol.headers or [])
        outcome.peak = max(outcome.peak, held)
        for _ in range(8):
            await asyncio.sleep(0)
    protocol.connection_lost(None)
    for _ in range(8):
        await asyncio.sleep(0)
    assert not state.tasks, "a request goes on although its connection is lost"
    assert table.total == 0
    outcome.written = wire.written
    return outcome


@target(_http)
def http(data: bytes) -> None:
    """One meaning, however the bytes are cut; each answer is HTTP; headers are bounded."""
    whole, cut = _serve(data, 1 << 16), _serve(data, 3)
    shorter = min(len(whole.requests), len(cut.requests))
    assert whole.requests[:shorter] == cut.requests[:shorter]
    for outcome in (whole, cut):
        assert outcome.peak <= 2048 + len(data[: 1 << 16])
        for answer in ANSWER.split(outcome.written)[1:]:
            assert answer[:3].isdigit()
            head, _, body = answer.partition(b"\r\n\r\n")
            if b"application/json" in head:
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def _names() -> list[bytes]:
    hosts = (b"localhost:8000", b"127.0.0.1", b"[::1]:80", b"evil.example:80", b"a.local.", b"box")
    pairs = [host + b"\nhttp://" + host + b"\n" for host in hosts]
    return [*pairs, b"localhost\nhttp://evil.example\n", b"localhost\nnull\ncross-site"]


GUARD = RequestGuard(check_hosts=True, check_origins=True)


@target(_names)
def host_and_origin(data: bytes) -> None:
    """On a server without keys no name that a stranger can own is served, and no page of one."""
    host, origin, site, *_ = [*data.split(b"\n"), b"", b"", b""]
    headers = [(b"host", host), (b"origin", origin), (b"sec-fetch-site", site)]
    sent = [(name, value) for name, value in headers if value]
    scope = {"method": "POST", "path": "/v1/completions", "headers": sent, "http_version": "1.1"}
    try:
        GUARD.admit(scope)
    except (BadRequestError, ForbiddenError) as error:
        _check_error(error)
        return
    named = re.sub(r":[0-9]*$", "", host.decode("latin-1").lower()) if host[-1:] != b"]" else ""
    named = (named or host.decode("latin-1")).strip("[]").removesuffix(".")
    try:
        ipaddress.ip_address(named.partition("%")[0])
    except ValueError:
        assert "." not in named or named.endswith(PRIVATE_DOMAINS), f"{named!r} was served"
    if origin and site != b"same-origin":
        assert origin.lower().partition(b"://")[2].split(b":")[0] == host.lower().split(b":")[0]
