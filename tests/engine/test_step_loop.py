"""The step loop sleeps while nothing can be done, and not longer."""

from __future__ import annotations

import threading

import pytest

from lookonce.core import session_eviction as idleness
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.request_validation import Door
from lookonce.engine.process.engine_core import EngineCore
from lookonce.engine.process.step_loop import Add, StepChannel, StepLoop, Stop
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import ROW_BYTES, Limits, make_scheduler, request, text
from tests.support.core.fake_runner import FakeRunner
from tests.support.engine.living import PATIENCE

LIMITS = Limits(max_num_seqs=1)
ANSWER = 8
"""Tokens, and so steps, that the request under test takes."""


class Outlet:
    """Notices the end of a request."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def send(self, _sender, message) -> bool:
        if any(delta.finish_reason is not None for delta in message.deltas):
            self.ended.set()
        return True


class CountingCore(EngineCore):
    """Knows how often the loop has looked for something to do."""

    steps = 0

    def step(self):
        self.steps += 1
        return super().step()


@pytest.fixture
def core() -> CountingCore:
    """Its one seat is taken by an idle session."""
    core = CountingCore(make_scheduler(LIMITS), FakeRunner(LIMITS))
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    core.add(request("live", text(8), sampling=sampling), {}, live=True)
    while core.step() is not None:
        pass
    core.steps = 0
    return core


def test_who_waits_for_an_idle_session_gets_its_place_though_nothing_else_happens(
    core: CountingCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idleness, "IDLE_SECONDS", 0.3)
    outlet = Outlet()
    exchange = StepChannel(lambda: None, outlet)
    pool, outputs = BlockPool(LIMITS.num_blocks, LIMITS.block_size), EncoderCache(64, ROW_BYTES)
    door = Door(pool, outputs, LIMITS.model, LIMITS.max_num_batched_tokens)
    exchange.command(Add(door.build_request(request("a", text(6)), {}), "sender", accepted=True))
    thread = threading.Thread(target=StepLoop(core, exchange).run)
    thread.start()
    try:
        assert outlet.ended.wait(PATIENCE)
    finally:
        exchange.command(Stop())
        thread.join(PATIENCE)
    assert core.steps < 3 * ANSWER, "it has slept meanwhile"
