"""The log of every process: text or JSON lines on stderr, with request ids, and nothing of clients.

    record ─▶ LogLimiter ─▶ TextFormatter or JsonFormatter ─▶ one line

What a client sends never becomes a line. Our own messages do not contain it; of an exception the
type and the frames are shown, and its message only where the interpreter or the system wrote it
(`SAFE_MESSAGES`); libraries may warn, and their messages are cut; and in whatever is left, data
URLs, bearer tokens and long runs of base64 are replaced, and control characters escaped.

`configure_logging` is called once by each process.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

current_request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that is being served; every line written meanwhile has it."""

MAX_LINES = 20
WINDOW_SECONDS = 60.0
MAX_MESSAGE = 2000
"""Characters of a message; of a library's, `MAX_FOREIGN`."""
MAX_FOREIGN = 300
MAX_FRAMES = 40
OWN = "lookonce"
"""The name under which all loggers of this package are."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """How the processes of a server write their log."""

    format: LogFormat = "text"
    level: LogLevel = "info"


def configure_logging(
    process: str, config: LogConfig | None = None, *, stream: TextIO | None = None
) -> None:
    """Write the log to `stream` (stderr), each line named after this process.

    `config` None: not known yet, until the second call. The level is that of our own loggers:
    libraries log URLs, headers and texts below warnings, so these never come out.
    """
    config = LogConfig() if config is None else config
    handler = logging.StreamHandler(stream or sys.stderr)
    named = JsonFormatter(process) if config.format == "json" else TextFormatter(process)
    handler.setFormatter(named)
    handler.addFilter(LogLimiter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(OWN).setLevel(config.level.upper())
    logging.captureWarnings(True)
    for name in SPEAK_FOR_THEMSELVES:
        _let_propagate(logging.getLogger(name))
    logging.raiseExceptions = False  # a line that cannot be written is dropped, not printed
    global _config
    _config = config


SPEAK_FOR_THEMSELVES = ("transformers",)
"""Libraries that give their logger a handler of its own when they are imported, so that their lines
would have neither our format nor our limits."""


class _Propagating(logging.Logger):
    """A library's logger whose records go to the handlers of the root and to no other."""

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802  logging's name
        """Does nothing."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "propagate":
            super().__setattr__(name, value)


def tell(line: str) -> None:
    """Write a line to standard output, in one piece: where the log goes to the same pipe, and
    output is not buffered, `print` lets a line of the log come before the line's end."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _let_propagate(logger: logging.Logger) -> None:
    """Also if the library is imported later."""
    logger.handlers.clear()
    logger.propagate = True
    logger.__class__ = _Propagating


_config = LogConfig()


def log_config() -> LogConfig:
    """What `configure_logging` was given, for processes that this one starts."""
    return _config


# --- what a line may contain ----------------------------------------------------------------------

SAFE_MESSAGES = (
    RuntimeError, MemoryError, ImportError, AttributeError, TypeError, IndexError,
    ZeroDivisionError,
)  # fmt: skip
"""Exceptions whose message is about the program: torch's, the interpreter's."""
_SECRET = r"(?:api[_-]?key|secret|password|signature)\w*|token"  # not tokens: those are counted
_REPLACED = (
    (re.compile(r"data:[\w.+-]*/?[\w.+-]*(?:;[\w=.+-]*)*,\S*", re.I), "data:…"),
    (re.compile(r"\b(bearer|basic)\s+\S+", re.I), r"\1 …"),
    (re.compile(rf"((?:\b|_)(?:{_SECRET})\s*[=:]\s*)\S+", re.I), r"\1…"),
    (re.compile(r"\bfile:\S+", re.I), "file:…"),
    (re.compile(r"(\w://)[^\s/?#]*@", re.I), r"\1…@"),
    (re.compile(r"(https?://[^\s/?#]+)[/?#]\S*", re.I), r"\1/…"),
    (re.compile(r"[A-Za-z0-9+/_-]{120,}={0,2}"), "…"),
)
_QUOTED = re.compile(r"(?<=['\"])[^'\"]{40,}(?=['\"])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def scrubbed(text: str, limit: int = MAX_MESSAGE) -> str:
    """One line of at most `limit` characters, without what looks like a secret or media."""
    text = text[: 4 * limit]
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    text = _CONTROL.sub(_escaped, text)
    return text if len(text) <= limit else text[:limit] + "…"


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode("ascii")


def described(error: BaseException) -> str:
    """Type and, where it is about the program and not about what a client sent, message."""
    kind = type(error).__name__
    if isinstance(error, OSError):
        return f"{kind}: {error.strerror}" if error.strerror else kind
    code = getattr(error, "code", None)
    if isinstance(code, str):
        return f"{kind} ({code})"
    if isinstance(error, SAFE_MESSAGES):
        return f"{kind}: {scrubbed(_QUOTED.sub('…', str(error)), MAX_FOREIGN)}"
    return kind


def frames_of(error: BaseException) -> list[str]:
    """`file:line function` of the innermost frames, outermost first; no source and no values."""
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    return [f"{_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]


def chain_of(error: BaseException) -> list[BaseException]:
    """The error and what it came from, the cause last."""
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain and len(chain) < 8:
        chain.append(step)
        step = step.__cause__ or (None if step.__suppress_context__ else step.__context__)
    return chain


def _short(path: str) -> str:
    """A path without what is before the package: logs name no folders of the machine."""
    for mark in ("/site-packages/", "/lib/python"):
        _, found, rest = path.rpartition(mark)
        if found:
            return rest
    _, found, rest = path.rpartition(f"/{OWN}/")
    return f"{OWN}/{rest}" if found else os.path.basename(path)


# --- lines ----------------------------------------------------------------------------------------

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a line says beside its message: the request's id, and the `extra` of the call."""
    fields: dict[str, Any] = {}
    current = current_request_id.get()
    if current:
        fields["request_id"] = current
    for name, value in vars(record).items():
        if name not in _STANDARD and value is not None and value != "":
            number = isinstance(value, bool | int | float)
            fields[name] = value if number or isinstance(value, Mapping) else scrubbed(str(value))
    return fields


def message_of(record: logging.LogRecord) -> str:
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001 - a wrong format string must not end a request
        message = str(record.msg)
    if record.name == OWN or record.name.startswith(f"{OWN}."):
        return scrubbed(message)
    return scrubbed(message.partition("\n")[0], MAX_FOREIGN)  # asyncio appends an object's repr


class TextFormatter(logging.Formatter):
    """`2027-01-31 18:00:00,123 INFO api 0: message name=value`; a traceback's frames follow."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record)} {record.levelname} {self._process}: "
        fields = "".join(f" {name}={_quoted(value)}" for name, value in fields_of(record).items())
        lines = [head + message_of(record) + fields]
        if record.exc_info and record.exc_info[1] is not None:
            for error in chain_of(record.exc_info[1]):
                lines.append(f"  {described(error)}")
                lines += [f"    {frame}" for frame in frames_of(error)]
        return "\n".join(lines)


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and not re.search(r"[\s\"=]", text) else msgspec.json.encode(text).decode()


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `process`, `pid`, `logger`, `message`, what
    `fields_of` gives, and `exception`: a list of `type` and `frames`, the cause last."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._pid = os.getpid()

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": self._pid,
            "logger": record.name,
            "message": message_of(record),
        }
        line |= {name: value for name, value in fields_of(record).items() if name not in line}
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = [
                {"type": described(error), "frames": frames_of(error)}
                for error in chain_of(record.exc_info[1])
            ]
        return msgspec.json.encode(line, enc_hook=str).decode()


# --- how many lines -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Window:
    begun: float
    lines: int = 0
    left_out: int = 0


class LogLimiter(logging.Filter):
    """Lets the first `max_lines` records of each line of code pass in every `seconds`.

    The first record after others were left out says how many. Add it to a handler. Records with an
    `event` (the audit's) count by that, wherever they are written; those with a `tenant` count
    apart for each, so that none can hide what another did. DEBUG is not limited.
    """

    def __init__(
        self,
        max_lines: int = MAX_LINES,
        seconds: float = WINDOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._max_lines = max_lines
        self._seconds = seconds
        self._clock = clock
        self._windows: dict[tuple[str, int, str], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        now = self._clock()
        event, tenant = getattr(record, "event", None), str(getattr(record, "tenant", None) or "")
        place = (record.pathname, record.lineno) if event is None else (str(event), 0)
        key = (*place, tenant)
        window = self._windows.setdefault(key, _Window(now))
        if now - window.begun >= self._seconds:
            if window.left_out:
                record.msg = f"{record.msg} ({window.left_out} more such lines were left out)"
            window.begun, window.lines, window.left_out = now, 0, 0
        window.lines += 1
        if window.lines > self._max_lines:
            window.left_out += 1
            return False
        return True
