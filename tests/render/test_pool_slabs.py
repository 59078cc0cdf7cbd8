"""Media workers that write into slabs: the real one, and one that was taken over."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import soundfile

from lookonce.cache.slab_pool import Grant, SlabWriter
from lookonce.cache.slabs import LARGE, SMALLEST, create_memory
from lookonce.errors import UnprocessableMediaError
from lookonce.ipc.framing import MessageSocket, close_fds
from lookonce.render.media import pool as pool_module
from lookonce.render.media.pool import MediaPool, ServerShare
from lookonce.render.media.processing import MediaJob, Processed, Processing, ProcessingSettings
from lookonce.render.media.worker import SlabGranted, WorkerSlabs, request_decoder, send
from lookonce.types.media import Array
from tests.support.drawing import encoded, picture
from tests.support.forked import fork_server_of
from tests.support.render.doubles import until
from tests.support.render.slab_engine import SlabEngine

FAKE = "tests.support.render.fake_worker"
REAL = (sys.executable, "-m", pool_module.WORKER)
CAPACITY = 64 << 20


@pytest.fixture(scope="module")
def forks() -> Iterator[Path]:
    """The socket of a fork server for workers that do as they are told."""
    with fork_server_of(FAKE) as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "WORKER", FAKE)
        yield path


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings(pid: int | str = "self") -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:lookonce-slab")


@asynccontextmanager
async def pool_with_slabs(
    engine: SlabEngine, forks: Path | None = None, *, folder: str = "any"
) -> AsyncIterator[MediaPool]:
    """With a worker that does as it is told, or a real one where there is no fork server for it."""
    pool = MediaPool(
        ProcessingSettings(folder, "float32", 1_000_000, 20.0),
        share=ServerShare(
            num_workers=1, slabs=engine.pool, shared_cache_bytes=CAPACITY, fork_server=forks
        ),
        command=REAL,
    )
    try:
        await pool.start()
        yield pool
    finally:
        await pool.aclose()
        engine.pool.check_integrity()
        engine.owner.check_integrity()


def job(how: str) -> MediaJob:
    return MediaJob("image", how.encode(), {})


def worker_of(processed: Processed) -> int:
    return int.from_bytes(processed.item.arrays["pid"].data, "little")


def test_a_real_worker_writes_a_picture_where_it_is_read(
    nano_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers as without slabs, in memory that is used again; the worker asks only for
    slabs that did not come with the job."""
    plain = Processing(ProcessingSettings(str(nano_folder), "float32", 1_000_000, 20.0))
    colours = ("red", "green", "blue", "black", "red", "green", "blue")
    sides = (224, 224, 224, 96, 96, 224, 224)
    files = [
        encoded(picture((colour, "circle"), side=side))
        for colour, side in zip(colours, sides, strict=True)
    ]
    asked: list[int] = []
    grant = SlabWriter.grant

    def counted(writer: SlabWriter, nbytes: int) -> Grant | None:
        asked.append(nbytes)
        return grant(writer, nbytes)

    monkeypatch.setattr(SlabWriter, "grant", counted)

    async def scenario() -> None:
        engine = SlabEngine(CAPACITY)
        questions = []
        async with pool_with_slabs(engine, folder=str(nano_folder)) as pool:
            for data in files:
                made = await pool.run(MediaJob("image", data, {}))
                assert made.item == plain.run(MediaJob("image", data, {})).item
                arrays = made.item.arrays
                assert arrays["pixel_values"].nbytes >= LARGE
                assert arrays["pixel_values"].place is not None
                assert arrays["image_grid_thw"].place is None
                questions.append(len(asked))
                del made, arrays
            assert engine.pool.num_fallbacks == 0
            assert engine.pool.num_grants == len(files)
            assert engine.pool.num_reuses == len(files) - 2
        # With the first job one slab is mapped. A job of another size asks, and the next does not.
        assert questions == [1, 1, 1, 2, 2, 3, 3]

    asyncio.run(scenario())


def test_a_real_worker_copies_what_its_processor_has_put_elsewhere(nano_folder: Path) -> None:
    """Sound: the feature extractor returns an array of its own."""
    samples = np.sin(np.arange(16_000 * 3) / 30).astype(np.float32)
    file = BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV")
    data = file.getvalue()
    plain = Processing(ProcessingSettings(str(nano_folder), "float32", 1_000_000, 20.0))

    async def scenario() -> None:
        engine = SlabEngine(CAPACITY)
        async with pool_with_slabs(engine, folder=str(nano_folder)) as pool:
            made = await pool.run(MediaJob("audio", data, {}))
            assert made.item == plain.run(MediaJob("audio", data, {})).item
            large = [a for a in made.item.arrays.values() if a.nbytes >= LARGE]
            assert large
            assert all(array.place is not None for array in large)

    asyncio.run(scenario())


def test_a_worker_that_breaks_the_rules_is_ended_and_only_its_job_fails(forks: Path) -> None:
    attacks = (
        "none", "negative", "huge", "endless", "refused without end", "begun without end", "pipe",
        "foreign", "beyond", "unaligned", "integers",
    )  # fmt: skip

    async def scenario() -> None:
        engine = SlabEngine(CAPACITY)
        before = descriptors()
        async with pool_with_slabs(engine, forks) as pool:
            last = worker_of(await pool.run(job("hello")))
            for how in attacks:
                with pytest.raises(UnprocessableMediaError, match="crashed"):
                    await pool.run(job(f"hostile {how}"))
                made = await pool.run(job("hostile write"))
                assert worker_of(made) != last, how
                last = worker_of(made)
                assert np.frombuffer(made.item.arrays["pixels"].data, np.float32)[0] == 1.0
                del made
                engine.pool.sweep()
        engine.pool.sweep()
        engine.pool.reclaim()
        assert engine.pool.leased_sizes() == {}
        assert engine.owner.nbytes == 0
        assert descriptors() == before

    asyncio.run(scenario())


def test_a_slab_cannot_be_cut_short_by_its_worker(forks: Path) -> None:
    async def scenario() -> None:
        engine = SlabEngine(CAPACITY)
        async with pool_with_slabs(engine, forks) as pool:
            with pytest.raises(UnprocessableMediaError, match="it cannot be cut short"):
                await pool.run(job("hostile cut short"))
            assert worker_of(await pool.run(job("hello"))), "it still works"

    asyncio.run(scenario())


def test_contents_that_change_spoil_the_item_of_that_worker_alone(forks: Path) -> None:
    async def scenario() -> None:
        engine = SlabEngine(CAPACITY)
        async with (
            pool_with_slabs(engine, forks) as spoiler,
            pool_with_slabs(engine, forks) as other,
        ):
            mine = (await other.run(job("hostile write"))).item.arrays["pixels"]
            spoilt = (await spoiler.run(job("hostile write"))).item.arrays["pixels"]
            read = read_by_engine(engine, spoilt)
            await spoiler.run(job("scribble"))
            assert np.frombuffer(read.data, np.float32).tolist() == [2.0] * 16
            assert np.frombuffer(mine.data, np.float32).tolist() == [1.0] * 16
            assert (read.dtype, read.shape) == ("float32", (16,)), "they were copied"
            del read, mine, spoilt

    asyncio.run(scenario())


def read_by_engine(engine: SlabEngine, array: Array) -> Array:
    place = array.place
    assert place is not None
    reference = (place.slab.number, place.offset, place.slab.next_use())
    return engine.owner.array("a", array.dtype, array.shape, array.nbytes, reference)


def test_a_killed_worker_leaves_no_slab_no_mapping_and_no_descriptor(forks: Path) -> None:
    """What the engine still reads stays readable; everything else is destroyed."""

    async def scenario() -> None:
        engine = SlabEngine(CAPACITY)
        before = descriptors(), mappings()
        async with pool_with_slabs(engine, forks) as pool:
            made = await pool.run(job("hostile write"))
            array = made.item.arrays["pixels"]
            read = read_by_engine(engine, array)
            assert mappings(worker_of(made)) == 1
            with pytest.raises(UnprocessableMediaError, match="crashed"):
                await pool.run(job("crash"))
            assert len(engine.owner.leased("a")) == 1, "the spare one was given back"
            del made, array
            assert np.frombuffer(read.data, np.float32)[0] == 1.0
            del read
            engine.pool.released(engine.owner.collect()["a"])
            assert engine.owner.nbytes == 0
            assert engine.pool.leased_sizes() == {}
        assert (descriptors(), mappings()) == before

    asyncio.run(scenario())


def test_nobody_waits_for_a_worker_that_does_not_read(forks: Path) -> None:
    """The event loop tells idle workers what to unmap. One that was taken over may be deaf."""

    async def scenario() -> None:
        engine = SlabEngine(CAPACITY)
        async with pool_with_slabs(engine, forks) as pool:
            made = await pool.run(job("hostile deaf"))
            (worker,) = pool._workers.processes
            link = worker._link._link
            with suppress(BlockingIOError):
                while True:
                    link.send(bytes(1 << 16), socket.MSG_DONTWAIT)
            assert len(engine.pool.leased_sizes()) == 2
            del made
            telling = threading.Thread(target=engine.pool.reclaim)
            telling.start()
            await until(lambda: not telling.is_alive())

            def all_given_back() -> bool:
                engine.pool.reclaim()
                return not engine.pool.leased_sizes()

            await until(all_given_back)

    async def bounded() -> None:
        async with asyncio.timeout(100):
            await scenario()

    asyncio.run(bounded())


def test_a_slab_that_came_with_a_job_and_was_not_used_is_unmapped() -> None:
    ours, theirs = socket.socketpair()
    pool, worker = MessageSocket(ours), MessageSocket(theirs, takes_fds=True)
    slabs = WorkerSlabs(worker, request_decoder())
    fd = create_memory(SMALLEST)
    before = mappings()
    send(pool, SlabGranted(7, SMALLEST), [fd])
    slabs.begin(usable=True)
    assert slabs.take(LARGE) is not None
    assert mappings() == before + 1
    slabs.begin(usable=True, ahead=7)
    slabs.unmap([7])
    assert mappings() == before
    close_fds([fd])
    pool.close()
    worker.close()


def test_an_idle_worker_unmaps_what_is_given_back(nano_folder: Path) -> None:
    async def scenario() -> None:
        engine = SlabEngine(CAPACITY)
        async with pool_with_slabs(engine, folder=str(nano_folder)) as pool:
            made = await pool.run(
                MediaJob("image", encoded(picture(("red", "circle"), side=224)), {})
            )
            assert made.item.arrays["pixel_values"].place is not None
            (worker,) = pool._workers.processes
            assert mappings(worker._process.pid) == 1
            del made
            await asyncio.sleep(0.01)  # the loop lets go of the job's result
            engine.pool.reclaim()
            await until(lambda: mappings(worker._process.pid) == 0)
            assert engine.owner.nbytes == 0

    asyncio.run(scenario())
