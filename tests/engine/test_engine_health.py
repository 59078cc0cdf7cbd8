"""The engine's state, as connection, welcome and heartbeats tell it."""

from __future__ import annotations

import pytest

from lookonce.engine.client.engine_health import EngineHealth
from lookonce.errors import EngineDeadError, NotReadyError
from lookonce.ipc.messages import Heartbeat
from tests.support.core.builders import model_info

STALL_TIMEOUT = 120.0
EPOCH = 7


class Time:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def health(time):
    """Of an engine that serves."""
    serving = EngineHealth(STALL_TIMEOUT, time)
    serving.connect()
    serving.welcome(model_info(), ready=True)
    return serving


def test_until_the_welcome_an_engine_is_starting(time):
    health = EngineHealth(STALL_TIMEOUT, time)
    assert health.state == "starting"
    health.connect()
    assert health.state == "starting"
    with pytest.raises(NotReadyError):
        health.require_ready()
    with pytest.raises(NotReadyError):
        health.model  # noqa: B018
    health.welcome(model_info(), ready=True)
    assert health.state == "ready"
    assert health.model == model_info()


def test_an_engine_that_warms_up_is_ready_with_the_heartbeat_that_says_so(time):
    health = EngineHealth(STALL_TIMEOUT, time)
    health.connect()
    health.welcome(model_info(), ready=False)
    health.beat(Heartbeat(EPOCH, False, 0.0), EPOCH)
    assert health.state == "starting"
    health.beat(Heartbeat(EPOCH, True, 0.0), EPOCH)
    assert health.state == "ready"


def test_a_lost_connection_is_death_and_a_new_one_a_start(health):
    health.disconnect()
    assert health.state == "dead"
    with pytest.raises(EngineDeadError, match="restarted"):
        health.require_ready()
    assert health.model == model_info()
    health.connect()
    assert health.state == "starting"


def test_a_heartbeat_of_another_epoch_does_not_make_it_ready(health):
    health.disconnect()
    health.connect()
    health.beat(Heartbeat(EPOCH + 1, True, 0.0), EPOCH)
    assert health.state == "starting"


def test_a_long_step_is_stuck_only_beyond_the_stall_timeout(health):
    health.beat(Heartbeat(EPOCH, True, STALL_TIMEOUT), EPOCH)
    assert health.state == "ready"
    health.beat(Heartbeat(EPOCH, True, STALL_TIMEOUT + 0.5), EPOCH)
    assert health.state == "stuck"
    with pytest.raises(EngineDeadError, match="answer"):
        health.require_ready()
    health.beat(Heartbeat(EPOCH, True, 0.0), EPOCH)
    assert health.state == "ready"


def test_silence_counts_as_stalling(health, time):
    health.beat(Heartbeat(EPOCH, True, 100.0), EPOCH)
    time.now += 19.0
    assert health.state == "ready"
    time.now += 2.0
    assert health.state == "stuck"
