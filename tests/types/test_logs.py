"""Clients cannot fill the log: what is left out is counted, and told."""

from __future__ import annotations

import logging

import pytest

from lookonce.types.logs import LogLimiter


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
