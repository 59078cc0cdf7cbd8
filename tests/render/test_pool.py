"""The pool: bounded, off the event loop, and not harmed when a worker crashes or hangs."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from lookonce.errors import (
    BadRequestError,
    DrainingError,
    ModelLoadError,
    QueueFullError,
    TooLargeError,
    UnavailableError,
    UnprocessableMediaError,
    http_status,
)
from lookonce.ipc import framing
from lookonce.render.families.registry import load_family
from lookonce.render.media import cost
from lookonce.render.media import pool as pool_module
from lookonce.render.media.fair_queue import MediaQueue
from lookonce.render.media.pdf import PagesJob
from lookonce.render.media.pool import (
    CheckProcessed,
    MediaPool,
    ServerShare,
    share_of_workers,
)
from lookonce.render.media.processing import MediaJob, Processed, Processing, ProcessingSettings
from lookonce.types import cpu
from lookonce.types.media import ProcessedItem
from tests.support.chaos import descendants
from tests.support.forked import fork_server_of
from tests.support.render.doubles import until
from tests.support.render.fake_worker import EXPANSIONS, PAGES, TIMES

FAKE_MODULE = "tests.support.render.fake_worker"
FAKE = (sys.executable, "-m", FAKE_MODULE)


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """`fake_pool` forks its workers here, which takes them milliseconds."""
    with fork_server_of(FAKE_MODULE) as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "WORKER", FAKE_MODULE)
        patch.setattr(Forked, "path", path)
        yield


class Forked:
    """Where the fork server is."""

    path: Path | None = None


def settings(folder: str = "any") -> ProcessingSettings:
    return ProcessingSettings(folder, "float32", 1_000_000, 20.0)


@asynccontextmanager
async def fake_pool(
    num_workers: int = 1,
    *,
    max_queue: int = 100,
    job_timeout: float = 60.0,
    folder: str = "any",
    check_processed: CheckProcessed | None = None,
    is_forked: bool = True,
) -> AsyncIterator[MediaPool]:
    pool = MediaPool(
        settings(folder),
        share=ServerShare(num_workers=num_workers, fork_server=Forked.path if is_forked else None),
        max_queue=max_queue,
        job_timeout=job_timeout,
        command=FAKE,
        check_processed=check_processed,
    )
    try:
        await pool.start()
        yield pool
    finally:
        await pool.aclose()


def job(data: bytes = b"some data", tenant: str = "", seconds: float = 0.0) -> MediaJob:
    return MediaJob("image", data, {}, tenant, seconds)


def waiting_for(gate: Path, tenant: str = "", seconds: float = 0.0) -> MediaJob:
    """A job that lasts until the file exists."""
    return job(b"wait " + bytes(gate), tenant, seconds)


def worker_of(processed: Processed) -> int:
    return int.from_bytes(processed.item.arrays["pid"].data, "little")


def has_begun(pool: MediaPool) -> bool:
    """Whether the only job has left the queue."""
    return pool.num_pending == 1 and pool.num_waiting == 0


@asynccontextmanager
async def two_workers_of_three(folder: Path) -> AsyncIterator[MediaPool]:
    """A pool whose next job needs its third worker, which has not been started: the others are busy
    for as long as the block runs."""
    gate = folder / "gate"
    async with fake_pool(3) as pool:
        await pool.run(job())
        await until(lambda: pool.num_idle == 2)
        busy = [asyncio.create_task(pool.run(waiting_for(gate))) for _ in range(2)]
        await until(lambda: pool.num_pending == 2 and pool.num_waiting == 0)
        yield pool
        await asyncio.to_thread(gate.touch)
        await asyncio.gather(*busy)


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def is_alive(pid: int) -> bool:
    """False for a process that ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def test_an_item_comes_back_with_its_times() -> None:
    async def scenario() -> None:
        async with fake_pool() as pool:
            processed = await pool.run(job())
            assert bytes(processed.item.arrays["data"].data) == b"some data"
            assert processed.item.arrays["nothing"].shape == (0, 3)
            assert processed.item.expansion.length == 3
            assert (processed.decode_ms, processed.process_ms) == (1.5, 2.5)

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 5_000_000])
def test_bytes_of_any_length_travel_both_ways(size: int) -> None:
    async def scenario() -> None:
        data = np.random.default_rng(0).bytes(size)
        async with fake_pool() as pool:
            processed = await pool.run(job(data))
            assert bytes(processed.item.arrays["data"].data) == data

    asyncio.run(scenario())


def test_an_item_outlives_its_pool_and_the_next_items() -> None:
    async def scenario() -> None:
        async with fake_pool() as pool:
            first = await pool.run(job(b"first"))
            for _ in range(10):
                await pool.run(job(b"other"))
        assert bytes(first.item.arrays["data"].data) == b"first"
        assert first.item.arrays["data"].data.readonly

    asyncio.run(scenario())


def test_a_workers_error_is_the_jobs_error() -> None:
    async def scenario() -> None:
        async with fake_pool() as pool:
            with pytest.raises(UnprocessableMediaError, match=r"^refused$"):
                await pool.run(job(b"refuse"))

    asyncio.run(scenario())


def test_a_crash_fails_its_job_alone_and_the_worker_is_replaced() -> None:
    async def scenario() -> None:
        async with fake_pool() as pool:
            before = worker_of(await pool.run(job()))
            results = await asyncio.gather(
                pool.run(job()), pool.run(job(b"crash")), pool.run(job()), return_exceptions=True
            )
            assert isinstance(results[1], UnprocessableMediaError)
            assert "crashed" in results[1].message
            assert isinstance(results[0], Processed)
            assert isinstance(results[2], Processed)
            assert worker_of(results[0]) == before
            assert worker_of(results[2]) != before

    asyncio.run(scenario())


def test_a_pool_that_does_not_wait_for_its_worker_takes_jobs_at_once() -> None:
    async def scenario() -> None:
        pool = MediaPool(settings(), share=ServerShare(num_workers=1), command=FAKE)
        pool.start_beside()
        try:
            assert isinstance(await pool.run(job()), Processed)
        finally:
            await pool.aclose()

    asyncio.run(scenario())


def test_a_job_that_a_killed_worker_has_not_read_goes_to_another_one() -> None:
    """It is stopped, so that the job waits in its socket, and then killed."""

    async def scenario() -> None:
        async with fake_pool() as pool:
            worker = worker_of(await pool.run(job()))
            os.kill(worker, signal.SIGSTOP)
            running = asyncio.create_task(pool.run(job()))
            await asyncio.sleep(0.1)
            os.kill(worker, signal.SIGKILL)
            assert worker_of(await running) != worker

    asyncio.run(scenario())


def test_a_worker_that_died_idle_harms_no_job() -> None:
    async def scenario() -> None:
        async with fake_pool() as pool:
            before = worker_of(await pool.run(job()))
            os.kill(before, signal.SIGKILL)
            await until(lambda: not is_alive(before))
            assert worker_of(await pool.run(job())) != before

    asyncio.run(scenario())


def test_a_worker_that_died_idle_is_replaced_before_the_next_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "IDLE_LOOK_SECONDS", 0.05)

    async def scenario() -> None:
        async with fake_pool() as pool:
            before = worker_of(await pool.run(job()))
            others = descendants(os.getpid()) - {before}
            os.kill(before, signal.SIGKILL)
            await until(lambda: descendants(os.getpid()) - others - {before})
            started = descendants(os.getpid()) - others
            assert worker_of(await pool.run(job())) in started
            assert "a media worker was killed while it had nothing to do" in caplog.text

    asyncio.run(scenario())


def test_a_worker_that_hangs_is_given_up() -> None:
    async def scenario() -> None:
        async with fake_pool(job_timeout=1.0) as pool:
            with pytest.raises(UnprocessableMediaError, match="too long"):
                await pool.run(job(b"hang"))
            await pool.run(job())

    asyncio.run(scenario())


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_pool(1, max_queue=2) as pool:
            gate = tmp_path / "gate"
            waiting = job(b"wait " + bytes(gate))
            tasks = [asyncio.create_task(pool.run(waiting)) for _ in range(3)]
            await asyncio.sleep(0)
            assert pool.num_pending == 3
            with pytest.raises(QueueFullError):
                pool.run(job())  # at once: nothing need be awaited to know
            gate.touch()
            await asyncio.gather(*tasks)
            await pool.run(job())
            assert pool.completed["image"] == 4
            assert pool.num_pending == 0

    asyncio.run(scenario())


def test_a_cancelled_job_gives_its_place_in_the_queue_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_pool(1, max_queue=1) as pool:
            gate = tmp_path / "gate"
            working = asyncio.create_task(pool.run(job(b"wait " + bytes(gate))))
            await until(lambda: has_begun(pool))
            queued = asyncio.create_task(pool.run(job()))
            await asyncio.sleep(0)
            queued.cancel()
            await asyncio.gather(queued, return_exceptions=True)
            await asyncio.sleep(0)
            later = asyncio.create_task(pool.run(job()))
            await asyncio.sleep(0)
            gate.touch()
            await asyncio.gather(working, later)
            assert pool.completed["image"] == 2

    asyncio.run(scenario())


def test_work_that_began_ends_in_peace_when_its_caller_leaves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_pool() as pool:
            before = worker_of(await pool.run(job()))
            gate = tmp_path / "gate"
            task = asyncio.create_task(pool.run(job(b"wait " + bytes(gate))))
            await until(lambda: has_begun(pool))
            task.cancel()
            gate.touch()
            assert worker_of(await pool.run(job())) == before

    asyncio.run(scenario())


def test_jobs_run_side_by_side(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_pool(2) as pool:
            gate = tmp_path / "gate"
            blocked = asyncio.create_task(pool.run(job(b"wait " + bytes(gate))))
            await pool.run(job())
            assert not blocked.done()
            gate.touch()
            await blocked

    asyncio.run(scenario())


def test_long_jobs_of_everybody_leave_one_worker_for_short_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_pool(2) as pool:
            gate = tmp_path / "gate"
            long = [
                asyncio.create_task(pool.run(waiting_for(gate, tenant, 5.0))) for tenant in "aab"
            ]
            for tenant in "bac":
                await pool.run(job(tenant=tenant, seconds=0.1))
            assert not any(task.done() for task in long)
            gate.touch()
            await asyncio.gather(*long)
            assert pool.killed.total() == 0

    asyncio.run(scenario())


def test_a_pool_of_one_worker_runs_long_jobs_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_pool(1) as pool:
            await pool.run(job(seconds=5.0))

    asyncio.run(scenario())


def test_a_newcomers_job_is_served_before_anothers_backlog(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_pool(1) as pool:
            gate = tmp_path / "gate"
            held = asyncio.create_task(pool.run(waiting_for(gate, "heavy", 0.9)))
            await until(lambda: has_begun(pool))
            order: list[str] = []

            async def served(tenant: str) -> None:
                await pool.run(job(tenant=tenant, seconds=0.5))
                order.append(tenant)

            backlog = [asyncio.create_task(served("heavy")) for _ in range(20)]
            await until(lambda: pool.num_waiting == 20)
            newcomer = asyncio.create_task(served("light"))
            await until(lambda: pool.num_waiting == 21)
            gate.touch()
            await asyncio.gather(held, newcomer, *backlog)
            assert order.index("light") <= 8

    asyncio.run(scenario())


def test_one_tenant_cannot_fill_the_queue(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = MediaPool(
            settings(),
            share=ServerShare(num_workers=1),
            max_queue=10,
            max_queue_per_tenant=3,
            command=FAKE,
        )
        await pool.start()
        gate = tmp_path / "gate"
        tasks = [asyncio.create_task(pool.run(waiting_for(gate, "a")))]
        await until(lambda: has_begun(pool))
        tasks += [asyncio.create_task(pool.run(job(tenant="a"))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="your media") as refused:
            pool.run(job(tenant="a"))
        assert http_status(refused.value) == 429
        tasks.append(asyncio.create_task(pool.run(job(tenant="b"))))
        await asyncio.sleep(0)
        gate.touch()
        await asyncio.gather(*tasks)
        await pool.aclose()

    asyncio.run(scenario())


def test_a_job_that_takes_more_cpu_time_than_its_estimate_allows_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost, "SHORTEST_DEADLINE", 0.3)

    async def scenario() -> None:
        async with fake_pool(1) as pool:
            before = worker_of(await pool.run(job()))
            with pytest.raises(UnprocessableMediaError, match="takes too long to decode"):
                await pool.run(job(b"burn", "liar"))
            assert +pool.killed == {"cpu": 1}
            assert not is_alive(before)
            assert worker_of(await pool.run(job())) != before

    asyncio.run(scenario())


def test_sleeping_is_not_cpu_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things fails no job."""
    monkeypatch.setattr(cost, "SHORTEST_DEADLINE", 0.5)

    async def scenario() -> None:
        async with fake_pool(1) as pool:
            gate = tmp_path / "gate"
            task = asyncio.create_task(pool.run(waiting_for(gate)))
            await asyncio.sleep(0.7)
            gate.touch()
            await task

    asyncio.run(scenario())


def test_a_worker_that_names_an_impossible_item_is_ended() -> None:
    async def scenario() -> None:
        async with fake_pool(1) as pool:
            before = worker_of(await pool.run(job()))
            for impossible in (*EXPANSIONS, b"arrays without end", *TIMES):
                with pytest.raises(UnprocessableMediaError, match="crashed"):
                    await pool.run(job(impossible))
                now = worker_of(await pool.run(job()))
                assert now != before, impossible
                before = now
            assert pool.killed["crashed"] == len(EXPANSIONS) + 1 + len(TIMES)

    asyncio.run(scenario())


def test_an_item_that_the_processor_cannot_have_made_ends_its_worker() -> None:
    def check(item: ProcessedItem) -> None:
        if bytes(item.arrays["data"].data) != b"possible":
            raise BadRequestError("impossible")

    async def scenario() -> None:
        async with fake_pool(1, check_processed=check) as pool:
            before = worker_of(await pool.run(job(b"possible")))
            with pytest.raises(UnprocessableMediaError, match="crashed"):
                await pool.run(job(b"impossible"))
            assert worker_of(await pool.run(job(b"possible"))) != before
            assert pool.killed["crashed"] == 1
            await pool.run(MediaJob("video", b"frames of a film are no item", {"frames": (1,)}))

    asyncio.run(scenario())


def test_a_worker_that_answers_with_impossible_pages_is_ended() -> None:
    async def scenario() -> None:
        async with fake_pool(1) as pool:
            for data in sorted(PAGES.keys() - {b"pages"}):
                with pytest.raises(UnprocessableMediaError, match=r"document .* crashed"):
                    await pool.render(PagesJob(data, pictures=False))
            (page,) = (await pool.render(PagesJob(b"pages", pictures=False))).pages
            assert page.text == "text"
            assert pool.killed["crashed"] == len(PAGES) - 1

    asyncio.run(scenario())


def test_what_a_stopped_job_took_is_charged_to_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "SHORTEST_DEADLINE", 0.3)

    async def scenario() -> None:
        async with fake_pool(1) as pool:
            with pytest.raises(UnprocessableMediaError):
                await pool.run(job(b"burn", "liar"))
            assert pool._queue.debt("liar") > 0.3
            assert pool._queue.debt("other") == 0

    asyncio.run(scenario())


def test_a_long_job_that_nobody_waits_for_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "ABANDONED_TIMEOUT", 0.1)

    async def scenario() -> None:
        async with fake_pool(1) as pool:
            before = worker_of(await pool.run(job()))
            task = asyncio.create_task(pool.run(waiting_for(tmp_path / "never")))
            await until(lambda: has_begun(pool))
            task.cancel()
            assert worker_of(await pool.run(job())) != before
            assert +pool.killed == {"abandoned": 1}

    asyncio.run(scenario())


def test_jobs_of_clients_that_left_are_not_processed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_pool(1) as pool:
            gate, marks = tmp_path / "gate", [tmp_path / str(n) for n in range(5)]
            held = asyncio.create_task(pool.run(waiting_for(gate)))
            await until(lambda: has_begun(pool))
            left = [asyncio.create_task(pool.run(job(b"mark " + bytes(mark)))) for mark in marks]
            await asyncio.sleep(0)
            assert pool.num_waiting == 5
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            assert pool.num_waiting == 0
            gate.touch()
            await held
            await pool.run(job())
            assert not any(mark.exists() for mark in marks)

    asyncio.run(scenario())


def test_an_idle_pool_keeps_neither_the_bytes_nor_the_item_of_its_last_job() -> None:
    async def scenario() -> None:
        async with fake_pool(1) as pool:
            data = np.zeros(100_000, np.uint8)
            kept = weakref.ref(data)
            await pool.run(MediaJob("image", data.data))
            del data
            await until(lambda: kept() is None)

    asyncio.run(scenario())


def test_a_job_whose_worker_died_before_it_began_is_tried_once_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_pool(1) as pool:
            before = worker_of(await pool.run(job()))
            made = await pool.run(job(b"die before " + bytes(tmp_path / "died")))
            assert worker_of(made) != before
            assert pool.killed.total() == 0

    asyncio.run(scenario())


def test_a_job_that_a_stopped_worker_has_not_begun_goes_to_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "BEGIN_TIMEOUT", 1.0)

    async def scenario() -> None:
        async with fake_pool(1) as pool:
            stopped = worker_of(await pool.run(job()))
            os.kill(stopped, signal.SIGSTOP)
            assert worker_of(await pool.run(job())) != stopped
            assert not is_alive(stopped)
            assert pool.killed.total() == 0

    asyncio.run(scenario())


def test_a_job_that_is_tried_again_is_charged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[tuple[str, float]] = []

    def settle(queue: object, tenant: str, seconds: float) -> None:
        settled.append((tenant, seconds))

    monkeypatch.setattr(MediaQueue, "settle", settle)

    async def scenario() -> None:
        async with fake_pool(1) as pool:
            await pool.run(job(b"die before " + bytes(tmp_path / "died"), "unlucky", 100.0))

    asyncio.run(scenario())
    assert settled == [("unlucky", -75.0)], "a quarter of the estimate, and what was left of it"


def test_a_job_is_not_tried_for_ever(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_pool(1) as pool:
            with pytest.raises(UnprocessableMediaError, match="crashed"):
                await pool.run(job(b"die before " + bytes(tmp_path / "no folder" / "died")))
            await pool.run(job())

    asyncio.run(scenario())


def test_workers_get_no_secrets_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "LOOKONCE_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, "canary")
    monkeypatch.setenv("HARMLESS", "seen")

    async def scenario() -> None:
        async with fake_pool(1, is_forked=False) as pool:
            pid = worker_of(await pool.run(job()))
            environment = environment_of(pid)
            assert b"canary" not in environment
            assert b"HARMLESS=seen" in environment

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("bad", "bad folder"),
        ("dead", "ended with status 0 while it started"),
        ("killed", "was killed while it started"),
        ("nonsense", "did not answer as it should while it started"),
    ],
)
def test_a_worker_that_cannot_start_is_an_error_at_the_start(folder: str, words: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ModelLoadError, match=words):
            async with fake_pool(folder=folder):
                pass

    asyncio.run(scenario())


def test_a_command_that_does_not_exist_is_an_error_at_the_start() -> None:
    async def scenario() -> None:
        pool = MediaPool(settings(), share=ServerShare(num_workers=1), command=["/no/such/program"])
        with pytest.raises(ModelLoadError, match="cannot be started"):
            await pool.start()
        await pool.aclose()

    asyncio.run(scenario())


def test_a_start_that_fails_leaves_nothing_open() -> None:
    async def scenario(folder: str) -> None:
        pool = MediaPool(settings(folder), share=ServerShare(num_workers=1), command=FAKE)
        with pytest.raises(ModelLoadError):
            await pool.start()
        await pool.aclose()

    for folder in ("dead", "nonsense", "bad"):
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        asyncio.run(scenario(folder))
        assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("shortage", [OSError(errno.EMFILE, "too many files"), ValueError("?")])
def test_a_worker_that_cannot_be_started_now_is_started_later(
    shortage: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third worker is first needed while something is short, or broken."""

    def short() -> None:
        raise shortage

    async def scenario() -> None:
        async with two_workers_of_three(tmp_path) as pool:
            with monkeypatch.context() as patch:
                patch.setattr(socket, "socketpair", short)
                for _ in range(2):
                    with pytest.raises(UnavailableError) as refused:
                        await pool.run(job())
                    assert http_status(refused.value) == 503
            await pool.run(job())

    asyncio.run(scenario())


def test_a_thread_that_cannot_be_started_leaves_no_place_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        async with two_workers_of_three(tmp_path) as pool:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", short)
                with pytest.raises(UnavailableError):
                    await pool.run(job())
            assert pool.num_pending == 2
            await pool.run(job())

    asyncio.run(scenario())


def test_an_answer_that_there_is_no_memory_for_is_unavailable_and_the_next_job_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(size: int) -> memoryview:
        raise OSError(errno.ENOMEM, "no memory")

    async def scenario() -> None:
        async with fake_pool() as pool:
            large = bytes(100_000)
            with monkeypatch.context() as patch:
                patch.setattr(framing, "_new_buffer", no_memory)
                with pytest.raises(UnavailableError, match="short of resources"):
                    await pool.run(job(large))
            assert bytes((await pool.run(job(large))).item.arrays["data"].data) == large

    asyncio.run(scenario())


def test_a_worker_that_talks_nonsense_is_replaced() -> None:
    async def scenario() -> None:
        async with fake_pool() as pool:
            before = worker_of(await pool.run(job()))
            with pytest.raises(UnprocessableMediaError, match="crashed"):
                await pool.run(job(b"nonsense"))
            assert worker_of(await pool.run(job())) != before

    asyncio.run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's memory")
def test_a_worker_that_a_job_has_left_large_is_replaced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MOST_KEPT_BYTES", 64 << 20)
    caplog.set_level("INFO", "lookonce.render.media.pool")

    async def scenario() -> None:
        async with fake_pool() as pool:
            first = worker_of(await pool.run(job(b"keep 1000000")))
            for _ in range(3):
                assert worker_of(await pool.run(job())) == first
            caplog.clear()
            await pool.run(job(b"keep %d" % (65 << 20), "greedy"))
            assert worker_of(await pool.run(job())) != first
            assert pool.killed.total() == 0
            assert pool._queue.debt("greedy") >= pool_module.START_COST
            assert pool._queue.debt("") < pool_module.START_COST

    asyncio.run(scenario())
    (record,) = [each for each in caplog.records if "much memory" in each.message]
    assert vars(record)["tenant"] == "greedy"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's memory")
def test_memory_that_a_worker_has_freed_costs_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large item that has just been sent."""
    monkeypatch.setattr(pool_module, "MOST_KEPT_BYTES", 64 << 20)

    async def scenario() -> None:
        async with fake_pool() as pool:
            first = worker_of(await pool.run(job(b"free %d" % (65 << 20))))
            assert worker_of(await pool.run(job(b"free %d" % (65 << 20)))) == first
            assert worker_of(await pool.run(job())) == first

    asyncio.run(scenario())


def test_a_worker_that_does_not_end_when_killed_is_replaced_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It hangs in the kernel, say on a disk that is gone."""
    stuck: list[subprocess.Popen[bytes]] = []

    def still_there(process: subprocess.Popen[bytes], timeout: float) -> None:
        stuck.append(process)
        raise subprocess.TimeoutExpired("worker", timeout)

    async def scenario() -> None:
        async with fake_pool(is_forked=False) as pool:
            with monkeypatch.context() as patch:
                patch.setattr(subprocess.Popen, "wait", still_there)
                with pytest.raises(UnprocessableMediaError, match="crashed"):
                    await pool.run(job(b"crash"))
            await pool.run(job())
        assert [process.wait() for process in stuck] == [-signal.SIGSEGV]

    asyncio.run(scenario())


def test_closing_ends_a_worker_that_is_still_starting() -> None:
    async def scenario() -> None:
        pool = MediaPool(settings("mute"), share=ServerShare(num_workers=1), command=FAKE)
        starting = asyncio.create_task(pool.start())
        await until(lambda: pool._workers.processes)
        await pool.aclose()
        with pytest.raises(DrainingError):
            await starting

    asyncio.run(scenario())


def test_a_start_that_is_given_up_breaks_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[object] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)

    async def scenario() -> None:
        pool = MediaPool(settings("mute"), share=ServerShare(num_workers=1), command=FAKE)
        starting = asyncio.create_task(pool.start())
        await until(lambda: pool._workers.processes)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await pool.aclose()

    asyncio.run(scenario())
    assert not broken


def test_closing_ends_the_workers_and_fails_what_they_were_doing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_pool(1) as pool:
            worker = worker_of(await pool.run(job()))
            begun = asyncio.create_task(pool.run(job(b"wait " + bytes(tmp_path / "never"))))
            await until(lambda: has_begun(pool))
            queued = asyncio.create_task(pool.run(job()))
            await asyncio.sleep(0)
        results = await asyncio.gather(begun, queued, return_exceptions=True)
        assert [type(result) for result in results] == [DrainingError, DrainingError]
        assert not is_alive(worker)
        with pytest.raises(DrainingError):
            await pool.run(job())

    asyncio.run(scenario())


class TestRealWorkers:
    """The pool as it is served, on nano."""

    @pytest.fixture(scope="class")
    def pool(self, nano_folder: Path) -> Iterator[MediaPool]:
        family = load_family(nano_folder, "float32")
        assert family is not None
        pool = MediaPool(
            settings(str(nano_folder)),
            share=ServerShare(num_workers=1),
            check_processed=family.check_processed,
        )
        asyncio.run(pool.start())
        yield pool
        asyncio.run(pool.aclose())

    def run(self, pool: MediaPool, modality: str, data: bytes, **options: object) -> Processed:
        async def scenario() -> Processed:
            return await pool.run(MediaJob(modality, data, options))  # type: ignore[arg-type]

        return asyncio.run(scenario())

    def png(self, *size: int) -> bytes:
        buffer = BytesIO()
        noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(noise).save(buffer, "PNG")
        return buffer.getvalue()

    def wav(self, seconds: float) -> bytes:
        buffer = BytesIO()
        noise = np.random.default_rng(0).normal(size=round(24000 * seconds)) * 0.1
        soundfile.write(buffer, noise, 24000, format="WAV")
        return buffer.getvalue()

    @pytest.mark.parametrize("modality", ["image", "audio"])
    def test_a_worker_gives_what_the_family_gives_here(
        self, pool: MediaPool, nano_folder: Path, modality: str
    ) -> None:
        data = self.png(90, 120) if modality == "image" else self.wav(1.5)
        here = Processing(settings(str(nano_folder))).run(MediaJob(modality, data))  # type: ignore[arg-type]
        there = self.run(pool, modality, data)
        assert there.item == here.item
        assert there.decode_ms > 0
        assert there.process_ms > 0

    def test_options_reach_the_processor(self, pool: MediaPool) -> None:
        small = self.run(pool, "image", self.png(90, 120), min_pixels=784, max_pixels=3136)
        assert small.item.expansion.length <= 4

    @pytest.mark.parametrize(
        ("modality", "data", "error"),
        [
            ("image", b"no picture", UnprocessableMediaError),
            ("audio", b"no sound", UnprocessableMediaError),
        ],
    )
    def test_bad_media_are_an_error_and_the_worker_goes_on(
        self, pool: MediaPool, modality: str, data: bytes, error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            self.run(pool, modality, data)
        self.run(pool, "image", self.png(30, 30))

    def test_limits_are_the_settings(self, pool: MediaPool) -> None:
        with pytest.raises(TooLargeError, match="1000000 pixels"):
            self.run(pool, "image", self.png(1001, 1000))
        with pytest.raises(TooLargeError, match="20 seconds"):
            self.run(pool, "audio", self.wav(21))

    def test_limits_below_any_item_do_not_keep_a_worker_from_starting(
        self, nano_folder: Path
    ) -> None:
        async def scenario() -> None:
            narrow = ProcessingSettings(str(nano_folder), "float32", 1, 0.001)
            pool = MediaPool(narrow, share=ServerShare(num_workers=1))
            await pool.start()
            await pool.aclose()

        asyncio.run(scenario())

    def test_a_worker_knows_no_torch(self, pool: MediaPool) -> None:
        self.run(pool, "image", self.png(30, 30))
        (worker,) = pool._workers.processes
        maps = Path(f"/proc/{worker._process.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "numpy" in maps


@pytest.mark.parametrize(
    ("cores", "processes", "workers"),
    [(2, 1, 2), (16, 1, 4), (16, 2, 2), (16, 3, 1), (2, 4, 1), (1, 1, 1)],
)
def test_workers_are_shared_by_all_api_processes(monkeypatch, tmp_path, cores, processes, workers):
    monkeypatch.setattr(cpu, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert share_of_workers(processes) == workers


def test_a_container_s_quota_bounds_the_workers(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    monkeypatch.setattr(cpu, "CGROUPS", tmp_path)
    assert share_of_workers() == 2
