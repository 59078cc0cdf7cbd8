"""Slabs one rule at a time: sizes, sealed memory, what the engine judges, what the pool decides."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.cache import slab_pool, slabs
from lookonce.cache.slab_pool import OwnSlabs, SlabPool, arrange
from lookonce.cache.slabs import (
    ALIGNMENT,
    HUGE_PAGE,
    LARGE,
    MFD_NOEXEC_SEAL,
    SMALLEST,
    SlabOwner,
    create_memory,
    map_memory,
    slab_capacity,
    slab_size,
)
from lookonce.engine.process.main import usable_slab_bytes
from lookonce.errors import ProtocolError
from lookonce.types.media import ITEM_OVERHEAD, Array, Expansion, ProcessedItem
from tests.support.render.slab_engine import SlabEngine

EXPANSION = Expansion(((900, 1),), 900)


def floats(count: int, value: float = 1.5) -> Array:
    return Array("float32", (count,), np.full(count, value, np.float32).data)


def item(*arrays: Array) -> ProcessedItem:
    return ProcessedItem("image", {f"a{n}": array for n, array in enumerate(arrays)}, EXPANSION)


# --- memory -----------------------------------------------------------------------------------


@given(st.integers(1, 1 << 34))
def test_a_slab_is_whole_pages_and_at_most_an_eighth_too_large(nbytes: int) -> None:
    size = slab_size(nbytes)
    assert size >= nbytes
    assert size % mmap.PAGESIZE == 0
    assert slab_size(size) == size, "a class is its own class"
    assert size == SMALLEST or size - nbytes < nbytes / 8
    assert size < 16 << 20 or size % HUGE_PAGE == 0


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda flags: 0, None),
        (lambda flags: errno.EINVAL if flags & MFD_NOEXEC_SEAL else 0, None),  # an old kernel
        (lambda flags: 0 if flags & MFD_NOEXEC_SEAL else errno.EACCES, None),  # vm.memfd_noexec=2
        (lambda flags: errno.EPERM, "not permitted"),  # a container's seccomp profile
        (None, "this Python"),
    ],
)
def test_where_there_is_no_shared_memory_the_engine_does_without(
    refused, says, monkeypatch, caplog
) -> None:
    create = os.memfd_create

    def judged(name: str, flags: int) -> int:
        code = refused(flags)
        if code:
            raise OSError(code, os.strerror(code))
        return create(name, flags & ~MFD_NOEXEC_SEAL)

    if refused is None:
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", judged)
    assert usable_slab_bytes(1 << 20) == (2 << 20 if says is None else 0)
    assert says is None or says in caplog.text
    assert says is not None or not caplog.text


def test_a_slab_cannot_be_cut_short_or_lengthened() -> None:
    fd = create_memory(SMALLEST)
    try:
        for size in (0, SMALLEST - 1, SMALLEST + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def unsealed() -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SMALLEST)
    return fd


def pipe() -> int:
    out, other = os.pipe()
    os.close(other)
    return out


def plain_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SMALLEST)
        return os.dup(file.fileno())


@pytest.mark.parametrize("make", [unsealed, pipe, plain_file, lambda: create_memory(2 * SMALLEST)])
def test_only_a_sealed_slab_of_the_size_that_was_told_is_mapped(make) -> None:
    fd = make()
    try:
        with pytest.raises(ProtocolError):
            map_memory(fd, SMALLEST)
    finally:
        os.close(fd)


# --- the engine's side ------------------------------------------------------------------------


@pytest.fixture
def owner() -> SlabOwner:
    return SlabOwner(8 * SMALLEST)


def leased(owner: SlabOwner, sender: str = "a", nbytes: int = SMALLEST) -> int:
    lease = owner.lease(sender, nbytes)
    assert lease is not None
    os.close(lease[1])
    return lease[0]


def test_what_fits_is_leased_and_no_more(owner: SlabOwner) -> None:
    numbers = [leased(owner) for _ in range(8)]
    assert owner.lease("a", SMALLEST) is None
    owner.give_back("b", numbers)
    assert owner.lease("a", SMALLEST) is None, "b cannot give back what a has"
    owner.give_back("a", numbers[:1])
    leased(owner)
    assert owner.counters()["mm_slab_refusals_total"] == 2


@pytest.mark.parametrize("nbytes", [-SMALLEST, 0, 1, SMALLEST + 1, 1 << 62])
def test_only_the_sizes_of_classes_are_leased(owner: SlabOwner, nbytes: int) -> None:
    assert owner.lease("a", nbytes) is None


def test_the_number_of_slabs_is_bounded(owner: SlabOwner, monkeypatch) -> None:
    monkeypatch.setattr(slabs, "MAX_SLABS", 2)
    leased(owner)
    leased(owner)
    assert owner.lease("a", SMALLEST) is None


@pytest.mark.parametrize(
    ("dtype", "offset", "nbytes"),
    [
        ("float32", SMALLEST, 64),
        ("float32", SMALLEST - 64, 128),
        ("float32", 0, SMALLEST + 64),
        ("float32", -64, 64),
        ("float32", 32, 64),
        ("float32", 0, 0),
        ("int64", 0, 64),
        ("uint8", 0, 64),
        ("bool", 0, 64),
    ],
)
def test_a_reference_beyond_its_slab_or_of_another_dtype_is_refused(
    owner: SlabOwner, dtype: str, offset: int, nbytes: int
) -> None:
    number = leased(owner)
    with pytest.raises(ProtocolError):
        owner.array("a", dtype, (nbytes,), nbytes, (number, offset, 1))
    owner.check_integrity()


def test_a_slab_of_another_sender_is_refused(owner: SlabOwner) -> None:
    number = leased(owner, "a")
    with pytest.raises(ProtocolError, match="not leased to its sender"):
        owner.array("b", "float32", (16,), 64, (number, 0, 1))
    with pytest.raises(ProtocolError, match="not leased to its sender"):
        owner.array("a", "float32", (16,), 64, (number + 1, 0, 1))


def test_what_the_engine_reads_cannot_be_written_there(owner: SlabOwner) -> None:
    array = owner.array("a", "float32", (16,), 64, (leased(owner), 0, 1))
    assert array.data.readonly
    assert not np.frombuffer(array.data, np.float32).flags.writeable


def test_memory_is_counted_until_the_last_view_has_gone(owner: SlabOwner) -> None:
    array = owner.array("a", "float32", (16,), 64, (leased(owner), 0, 1))
    view = np.frombuffer(array.data, np.float32)[3:5]
    del array
    assert owner.end("a") == 1
    owner.collect()
    assert owner.nbytes == SMALLEST
    assert view.tolist() == [0, 0]
    del view
    owner.collect()
    assert owner.nbytes == 0


def test_running_out_of_descriptors_refuses_a_lease(owner: SlabOwner, monkeypatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    leases = owner.change("a", (), (), [(7, SMALLEST)])
    assert leases.slabs == ((7, 0, SMALLEST),)
    assert leases.is_short
    assert owner.nbytes == 0


# --- the API process's side -------------------------------------------------------------------


@pytest.fixture
def engine() -> SlabEngine:
    return SlabEngine(16 * SMALLEST)


def test_a_first_job_waits_for_its_lease_and_later_ones_do_not(engine: SlabEngine) -> None:
    writer = engine.pool.writer()
    for _ in range(5):
        grant = writer.grant(1000)
        assert grant is not None
        if grant.fd is not None:
            os.close(grant.fd)
        writer.finish([grant.slab])
    assert engine.pool.num_waits == 1
    assert (engine.pool.num_grants, engine.pool.num_reuses) == (5, 4)
    assert engine.owner.num_leases == 2, "one that is used, and a spare one"


def test_without_an_engine_there_is_no_slab_and_no_waiting() -> None:
    pool = SlabPool(lambda: None, lease_timeout=1000)
    assert pool.writer().grant(1000) is None
    assert pool.num_fallbacks == 0


def test_an_engine_that_does_not_answer_costs_one_timeout() -> None:
    pool = SlabPool(lambda: None, lease_timeout=0.01)
    pool.open(16 * SMALLEST)
    assert pool.writer().grant(1000) is None
    assert (pool.num_waits, pool.num_fallbacks) == (1, 1)


def test_whoever_waits_is_woken_by_the_lease() -> None:
    asked = threading.Event()
    pool = SlabPool(asked.set, lease_timeout=30)
    owner = SlabOwner(16 * SMALLEST)
    pool.open(owner.capacity_bytes)
    found = []
    waiting = threading.Thread(target=lambda: found.append(pool.writer().grant(1000)))
    waiting.start()
    assert asked.wait(30)
    changes = pool.take_changes()
    assert changes is not None
    leases = owner.change("a", changes.given_back, changes.uses, changes.wanted)
    pool.leased(leases.slabs, leases.descriptors)
    waiting.join(30)
    assert found[0] is not None
    os.close(found[0].fd)


def test_room_is_made_by_giving_back_what_was_free_for_longest(engine: SlabEngine) -> None:
    writer = engine.pool.writer()
    for size in (4, 8):
        grant = writer.grant(size * SMALLEST)
        assert grant is not None
        if grant.fd is not None:
            os.close(grant.fd)
        writer.finish([grant.slab])
    sizes = sorted(engine.pool.leased_sizes().values())
    assert sizes == [4 * SMALLEST, 4 * SMALLEST, 8 * SMALLEST], "one of them spare"
    grant = writer.grant(5 * SMALLEST)
    assert grant is not None
    os.close(grant.fd)
    assert sorted(engine.pool.leased_sizes().values()) == [5 * SMALLEST, 8 * SMALLEST]
    assert writer.grant(17 * SMALLEST) is None, "larger than everything"
    assert sorted(engine.pool.leased_sizes().values()) == [5 * SMALLEST, 8 * SMALLEST]


def test_a_free_slab_that_is_a_little_larger_is_used(engine: SlabEngine) -> None:
    writer = engine.pool.writer()
    grant = writer.grant(5 * SMALLEST)
    assert grant is not None
    os.close(grant.fd)
    writer.finish([grant.slab])
    again = writer.grant(4 * SMALLEST)
    assert again is not None
    assert again.slab is grant.slab
    writer.finish([again.slab])
    other = writer.grant(2 * SMALLEST)
    assert other is not None
    os.close(other.fd)
    assert other.slab.nbytes == 2 * SMALLEST, "an item must not take twice its size"


def test_descriptors_that_did_not_come_are_leases_not_got(engine: SlabEngine) -> None:
    engine.descriptors_lost = True
    assert engine.pool.writer().grant(1000) is None
    engine.turn()
    assert engine.owner.nbytes == 0
    engine.pool.check_integrity()


def test_other_senders_are_asked_for_room() -> None:
    engine = SlabEngine(4 * SMALLEST)
    writer = engine.pool.writer()
    grant = writer.grant(1000)
    assert grant is not None
    os.close(grant.fd)
    writer.finish([grant.slab])
    engine.pool.reclaim()
    assert engine.owner.nbytes == 0


# --- items ------------------------------------------------------------------------------------


def test_large_arrays_of_floats_go_into_one_slab_and_nothing_else_does() -> None:
    arrays = {
        "pixels": ("float32", 3 * LARGE + 4),
        "grid": ("int64", 4 * LARGE),
        "small": ("float32", LARGE - 4),
        "mask": ("bfloat16", LARGE),
    }
    offsets = arrange(arrays)
    assert offsets.keys() == {"pixels", "mask"}
    assert offsets["pixels"] == 0
    assert offsets["mask"] == 3 * LARGE + ALIGNMENT


def test_own_arrays_are_placed_and_read_the_same(engine: SlabEngine) -> None:
    own = OwnSlabs(engine.pool)
    given = item(floats(100_000), Array("int64", (3,), np.arange(3).data), floats(50_000, 2.5))
    placed = own.place(given)
    assert placed == given
    big, grid, other = placed.arrays.values()
    assert big.place is not None
    assert grid.place is None
    assert other.place is not None
    assert big.place.slab is other.place.slab
    assert placed.nbytes == ITEM_OVERHEAD + big.place.slab.nbytes + grid.nbytes
    assert placed.message_nbytes == grid.nbytes
    assert own.place(placed) is placed, "what is placed stays there"


def test_an_item_outlives_its_engine(engine: SlabEngine) -> None:
    """A lost lease is not referred to any more: the bytes travel, and are counted as such."""
    own = OwnSlabs(engine.pool)
    given = item(floats(100_000))
    placed = own.place(given)
    engine.pool.lose()
    assert placed.arrays["a0"].place is None
    assert placed == given
    assert placed.nbytes == given.nbytes
    assert own.place(given) is given, "there is no engine"
    engine.restart()
    again = own.place(given)
    assert again.arrays["a0"].place is not None
    assert again == given == placed


def test_a_slab_is_not_used_again_while_an_item_in_it_is_held_here(engine: SlabEngine) -> None:
    own = OwnSlabs(engine.pool)
    first = own.place(item(floats(100_000, 1.0)))
    second = own.place(item(floats(100_000, 2.0)))
    assert first.arrays["a0"].place.slab is not second.arrays["a0"].place.slab
    number = first.arrays["a0"].place.slab.number
    del first
    third = own.place(item(floats(100_000, 3.0)))
    assert third.arrays["a0"].place.slab.number == number
    assert np.frombuffer(second.arrays["a0"].data, np.float32)[0] == 2.0


def test_a_lease_that_ends_while_it_is_written_leaves_the_item_as_it_was(
    engine: SlabEngine, monkeypatch
) -> None:
    own = OwnSlabs(engine.pool)
    own.place(item(floats(100_000)))
    real = OwnSlabs._mapping

    def lost(self, grant):
        engine.pool.lose()
        return real(self, grant)

    monkeypatch.setattr(slab_pool.OwnSlabs, "_mapping", lost)
    given = item(floats(100_000))
    assert own.place(given) == given


def test_a_lease_that_ends_before_it_is_mapped_leaves_no_mapping(
    engine: SlabEngine, monkeypatch
) -> None:
    """It was to be unmapped already when it was not mapped yet."""
    own = OwnSlabs(engine.pool)
    gc.collect()  # mappings of tests before
    before = own_mappings()

    def lost(fd: int, nbytes: int, *, writable: bool = False):
        if writable:
            engine.pool.lose()
            engine.owner.end("a")
        return map_memory(fd, nbytes, writable=writable)

    monkeypatch.setattr(slab_pool, "map_memory", lost)
    given = item(floats(100_000))
    assert own.place(given) == given
    engine.pool.sweep()  # it lets go of what nobody views
    assert own_mappings() == before


def own_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lookonce-slab")


def test_a_small_cache_has_as_much_for_work_and_a_large_one_a_little() -> None:
    assert slab_capacity(0) == 0
    assert slab_capacity(1 << 20) == 2 << 20
    assert slab_capacity(4 << 30) == (4 << 30) + (256 << 20)
