"""Clients cannot fill the log, and nothing that they send is in it."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import pytest

from lookonce.errors import BadRequestError
from lookonce.types.logs import (
    MAX_LINES,
    JsonFormatter,
    LogLimiter,
    TextFormatter,
    current_request_id,
    scrubbed,
    tell,
)
from lookonce.types.request import client_request_id, engine_request_id


class Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.lines = []
        self.addFilter(LogLimiter(3, 60.0, lambda: self.now))

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def logger(log):
    logger = logging.Logger("a server")
    logger.addHandler(log)
    return logger


def complain(logger, number):
    logger.warning("client %d left", number)


def test_the_first_lines_are_written_and_the_rest_is_counted(log, logger):
    for number in range(1000):
        complain(logger, number)
    assert log.lines == ["client 0 left", "client 1 left", "client 2 left"]
    log.now = 60.0
    complain(logger, 1000)
    complain(logger, 1001)
    assert log.lines[3:] == [
        "client 1000 left (997 more such lines were left out)",
        "client 1001 left",
    ]


def test_others_are_not_held_back(log, logger):
    for number in range(10):
        complain(logger, number)
    logger.warning("something else")
    assert log.lines[-1] == "something else"


def test_a_few_lines_a_minute_are_all_written(log, logger):
    for number in range(30):
        log.now += 25.0
        complain(logger, number)
    assert len(log.lines) == 30
    assert not any("left out" in line for line in log.lines)


def test_tenants_cannot_hide_one_another(log, logger):
    for tenant in ["loud"] * 10 + ["quiet"]:
        logger.warning("refused %s", tenant, extra={"tenant": tenant})
    assert log.lines == ["refused loud"] * 3 + ["refused quiet"]


def test_an_event_is_limited_wherever_it_is_written(log, logger):
    for _ in range(3):
        logger.warning("refused here", extra={"event": "refused"})
    logger.warning("refused there", extra={"event": "refused"})
    logger.warning("reset", extra={"event": "reset"})
    assert log.lines == ["refused here"] * 3 + ["reset"]


def test_debug_lines_are_not_limited(log, logger):
    for number in range(10):
        logger.debug("served %d", number)
    assert len(log.lines) == 10


# --- what a line says, and what it does not -----------------------------------------------------

CANARY = "canary"


def record(message: str, *args: object, name: str = "lookonce.x", **extra: object):
    made = logging.LogRecord(name, logging.WARNING, __file__, 1, message, args, None)
    vars(made).update(extra)
    return made


def failure(error: BaseException) -> logging.LogRecord:
    try:
        raise error
    except BaseException:  # noqa: BLE001
        made = record("failed")
        made.exc_info = sys.exc_info()
        return made


def both(made: logging.LogRecord) -> list[str]:
    return [TextFormatter("api 0").format(made), JsonFormatter("api 0").format(made)]


def test_a_json_line_has_the_request_and_the_fields():
    token = current_request_id.set("id-1")
    try:
        line = json.loads(JsonFormatter("api 0").format(record("hello %d", 7, tenant="t", count=2)))
    finally:
        current_request_id.reset(token)
    assert line.pop("time").endswith("Z")
    assert line.pop("pid") > 0
    assert line == {
        "level": "warning",
        "process": "api 0",
        "logger": "lookonce.x",
        "message": "hello 7",
        "request_id": "id-1",
        "tenant": "t",
        "count": 2,
    }


def test_a_text_line_quotes_what_would_look_like_more_fields():
    text = TextFormatter("api 0").format(record("hello", tenant='a b="c'))
    assert text.endswith(r'WARNING api 0: hello tenant="a b=\"c"')


@pytest.mark.parametrize(
    "text",
    [
        "data:image/png;base64,canary",
        "DATA:;charset=utf-8,canary",
        "Authorization: Bearer canary",
        "api_key=canary",
        "token: canary",
        "HF_TOKEN=canary",
        "client_secret_2 = canary",
        "file:///srv/canary.png",
        "https://host/canary?signature=canary",
        "https://user:canary@host/",
        "valkey://:canary@host:6379",
        "x" * 60 + "canary" + "x" * 60,
    ],
)
def test_what_looks_like_a_secret_or_media_is_replaced(text):
    for line in both(record("library says %s", text, field=text)):
        assert CANARY not in line


def test_names_of_our_own_that_only_look_like_secrets_are_written():
    for text in (
        "tenants.a.tokens_per_minut: no such limit",
        "max_tokens: 9 is too many",
        "--api-key-file: line 1 is wrong",
    ):
        assert scrubbed(text) == text


@pytest.mark.parametrize(
    "error",
    [
        ValueError("canary"),
        KeyError("canary"),
        UnicodeDecodeError("utf-8", b"canary\xff", 6, 7, "canary"),
        FileNotFoundError(2, "No such file or directory", "/srv/canary"),
        BadRequestError("canary", param="canary"),
        TypeError("unexpected 'canary " + "x" * 50 + "'"),
    ],
)
def test_an_exception_is_shown_without_what_a_client_sent(error):
    for line in both(failure(error)):
        assert CANARY not in line
        assert type(error).__name__ in line
        assert "test_logs.py" in line


def test_messages_about_the_program_are_shown():
    for line in both(failure(RuntimeError("CUDA out of memory"))):
        assert "CUDA out of memory" in line
    for line in both(failure(OSError(28, "No space left on device", "/srv/canary"))):
        assert "No space left on device" in line


def test_the_cause_is_shown_too():
    try:
        try:
            raise RuntimeError("first")
        except RuntimeError as error:
            raise ValueError(CANARY) from error
    except ValueError as error:
        line = json.loads(JsonFormatter("x").format(failure(error)))
    assert [each["type"] for each in line["exception"]] == ["ValueError", "RuntimeError: first"]


def test_nobody_forges_a_line():
    for line in both(record("path %s", "/a\nERROR api 0: forged\x1b[2J\u2028")):
        assert "\n" not in line
        assert "\x1b" not in line


def test_libraries_speak_in_one_short_line():
    made = record("Task exception\nfuture: exception=ValueError('canary')", name="asyncio")
    for line in both(made):
        assert "Task exception" in line
        assert CANARY not in line


TINY_PICTURES = """
import sys
from lookonce.types.logs import LogConfig, configure_logging

sys.modules["torch"] = None  # as in media workers; transformers is there sooner
configure_logging("media worker", LogConfig("json"))  # before it is imported, and after
import numpy, transformers.image_utils
configure_logging("media worker", LogConfig("json"))
for width in range(1, 51):
    transformers.image_utils.infer_channel_dimension_format(numpy.zeros((3, width, 3)))
"""


def test_transformers_has_our_format_and_our_limits():
    """It warns of each picture that is three pixels high, by a handler of its own."""
    done = subprocess.run(
        [sys.executable, "-c", TINY_PICTURES], capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    warned = [line for line in lines if "channel dimension" in line["message"]]
    assert len(warned) == MAX_LINES
    assert len(lines) < 2 * MAX_LINES


def test_a_wrong_format_string_is_a_line_all_the_same():
    assert "hello %d" in TextFormatter("x").format(record("hello %d", "seven"))


@pytest.mark.parametrize("client", ["", "my-id-1", "-", "a.b:c_d"])
def test_the_engine_s_id_holds_the_client_s(client):
    assert client_request_id(engine_request_id("abc-1", client)) == client


def test_a_line_to_standard_output_is_written_in_one_piece(monkeypatch):
    """As of a process with PYTHONUNBUFFERED, whose log goes to the same pipe."""
    written = []

    class Pipe(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            written.append(bytes(data))
            return len(data)

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Pipe(), write_through=True))
    tell("Serving nano on http://127.0.0.1:8000")
    assert written == [b"Serving nano on http://127.0.0.1:8000\n"]
