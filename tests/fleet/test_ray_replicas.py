"""What Ray's look at a replica's health finds; without a cluster. They need ray."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(60), pytest.mark.anyio]


async def test_a_front_end_whose_event_loop_does_not_turn_is_unhealthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lookonce.fleet import deploy

    monkeypatch.setattr(deploy, "HEALTH_TIMEOUT", 0.2)
    replica = object.__new__(deploy.FrontendReplica)
    replica._loop = asyncio.new_event_loop()
    replica._thread = threading.Thread(target=replica._loop.run_forever)
    replica._thread.start()
    try:
        await replica.check_health()
        replica._loop.call_soon_threadsafe(time.sleep, 1.0)
        with pytest.raises(RuntimeError, match="does not turn"):
            await replica.check_health()
        await asyncio.sleep(1.0)
        await replica.check_health()
    finally:
        replica._loop.call_soon_threadsafe(replica._loop.stop)
        replica._thread.join()
        replica._loop.close()
    with pytest.raises(RuntimeError, match="has ended"):
        await replica.check_health()


def test_an_engine_that_does_not_start_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that says nothing meanwhile."""
    import subprocess
    import tempfile

    from lookonce.fleet import deploy
    from lookonce.fleet.config import EngineGroup

    monkeypatch.setattr(deploy, "START_SECONDS", 0.3)
    engine = object.__new__(deploy.Engine)
    engine._group = EngineGroup(name="nano", model="nano")
    engine._drain_timeout = 1.0
    engine._folder = tempfile.TemporaryDirectory()
    engine._process = subprocess.Popen(
        ["sleep", "30"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with pytest.raises(RuntimeError, match="did not start"):
        engine._wait_ready()
    assert engine._process.poll() is not None
    assert engine._process.stdout is not None
    engine._process.stdout.close()
