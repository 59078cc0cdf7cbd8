"""The slabs that the engine has leased to one API process: which are free, written or in use.

    asked ── leased ──▶ free ── grant ──▶ writing ── finish ──▶ in use
                        │  ▲                 │ the job failed      │ the engine has released every
                        │  │                 ▼                     │ use that was sent, and no view
                        │  └───────────────────────────────────────┘ of this process lives
                        ▼ idle, room needed, or its writer has ended
             given back to the engine

A slab belongs to one writer (a media worker, or this process itself for arrays that clients
processed) for its whole life: no process can change memory that another one writes.

`grant`, `grant_ahead`, `finish` and `close` of a writer may be called in any thread, everything
else belongs to the event loop. Nothing here sends: what is to be sent is asked for with
`take_changes`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lookonce.cache.slabs import (
    ALIGNMENT,
    LARGE,
    MappedSlab,
    check_place,
    map_memory,
    slab_size,
)
from lookonce.errors import ProtocolError
from lookonce.types.counts import Counts
from lookonce.types.media import FLOATS, Array, ProcessedItem, SlabPlace
from lookonce.types.ports import Clock

LEASE_TIMEOUT = 0.25
"""Seconds a job waits for the engine's answer where no slab is free, before it goes without."""
IDLE_SECONDS = 60.0
"""A slab that was free for so long is given back."""
MAX_WANTED = 64
"""Slabs asked for with one message: a message carries a limited number of descriptors."""
LOOSEST_FIT = 1.25
"""A free slab is taken for an item if it is at most this many times as large as needed."""
State = Literal["free", "writing", "in use", "given back"]


class LeasedSlab(MappedSlab):
    """A slab in an API process. The pool's lock guards everything that changes."""

    def __init__(
        self, pool: SlabPool, writer: SlabWriter, number: int, memory: NDArray[np.uint8]
    ) -> None:
        super().__init__(number, memory, pool.view_gone)
        self.writer = writer
        self.fd: int | None = None
        """Open until the writer has it."""
        self.state: State = "free"
        self.is_leased = True
        self.written = False
        """Its pages are there: it costs less to write than one that was never written."""
        self.ahead = False
        """Granted before its writer has asked for it, and not known to be used."""
        self.num_views = 0
        self.sent_use = 0
        self.released_use = 0
        self.free_since = 0.0
        self._pool = pool

    def next_use(self) -> int:
        with self._pool.lock:
            self.sent_use += 1
            return self.sent_use

    def array(self, dtype: str, shape: tuple[int, ...], offset: int, nbytes: int) -> Array:
        """The array that the writer has put there. Raises `ProtocolError` or `ValueError`."""
        check_place(self.nbytes, dtype, offset, nbytes)
        with self._pool.lock:
            self.num_views += 1
            self._pool.used(self)
        return Array(dtype, shape, self.view(offset, nbytes), SlabPlace(self, offset))

    @property
    def is_unused(self) -> bool:
        return self.num_views == 0 and self.released_use >= self.sent_use


@dataclass(slots=True)
class _Want:
    """A slab that the engine was asked for; `done` when it has answered, or will not."""

    number: int
    writer: SlabWriter
    nbytes: int
    done: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """A slab that one writer may write."""

    slab: LeasedSlab
    fd: int | None
    """Its descriptor, the first time; whoever got the grant closes it. None: it is mapped."""


@dataclass(frozen=True, slots=True)
class SlabChanges:
    """What the engine must be told, in this order: slabs given back, uses that are over if no
    message brought them, slabs wanted."""

    given_back: tuple[int, ...]
    uses: tuple[tuple[int, int], ...]
    wanted: tuple[tuple[int, int], ...]
    """(number of the want, bytes)."""


class SlabWriter:
    """The slabs of one writer. `on_dropped` is called when it should unmap some of them."""

    def __init__(self, pool: SlabPool, on_dropped: Callable[[], None]) -> None:
        self._pool = pool
        self._on_dropped = on_dropped
        self.is_closed = False
        self.last_size = 0
        """Of the slab that was asked for last; 0: none."""
        self.free: OrderedDict[int, LeasedSlab] = OrderedDict()
        """Least recently freed first."""
        self.dropped: list[int] = []

    def grant(self, nbytes: int) -> Grant | None:
        """A slab that holds `nbytes`, for this writer alone until `finish`; None: there is none.

        Where none is free it waits for the engine's answer, at most `LEASE_TIMEOUT`.
        """
        return self._pool.grant(self, nbytes)

    def grant_ahead(self) -> LeasedSlab | None:
        """A free slab of the size that was asked for last, if the writer has mapped one: it need
        not ask for it then. `finish` as after `grant`; one that was not used is not counted."""
        return self._pool.grant_ahead(self)

    def finish(self, slabs: Iterable[LeasedSlab]) -> None:
        """The writer has written its slabs, or gives them up: those without views are free."""
        self._pool.finish(slabs)

    def take_dropped(self) -> tuple[int, ...]:
        """The slabs that the writer must unmap."""
        return self._pool.take_dropped(self)

    def close(self) -> None:
        """The writer has ended: its free slabs are given back now, the others when unused."""
        self._pool.close_writer(self)

    def tell_dropped(self) -> None:
        self._on_dropped()


def _nothing() -> None:
    pass


class SlabPool:
    """All slabs that are leased to one API process. Closed until `open`; `wake` is called, in any
    thread, when `take_changes` has something."""

    def __init__(
        self,
        wake: Callable[[], None],
        counts: Counts | None = None,
        *,
        clock: Clock = time.monotonic,
        lease_timeout: float = LEASE_TIMEOUT,
    ) -> None:
        """`counts` gets `mm_slab_*`; by default they are counted for this pool alone."""
        self.lock = threading.Condition()
        counts = Counts() if counts is None else counts
        self._grants = counts.count("mm_slab_grants_total")
        self._reuses = counts.count("mm_slab_reuses_total")
        self._waits = counts.count("mm_slab_waits_total")
        self._fallbacks = counts.count("mm_slab_fallbacks_total")
        self._wake = wake
        self._clock = clock
        self._lease_timeout = lease_timeout
        self._capacity = 0
        self._nbytes = 0
        """Of all leased slabs and all wants."""
        self._slabs: dict[int, LeasedSlab] = {}
        self._free: OrderedDict[int, LeasedSlab] = OrderedDict()
        """Of all writers, least recently freed first."""
        self._wants: dict[int, _Want] = {}
        self._num_wants = 0
        self._gone: deque[MappedSlab] = deque()
        self._given_back: list[int] = []
        self._new_wants: list[_Want] = []
        self._uses: list[tuple[int, int]] = []
        self._to_tell: dict[SlabWriter, None] = {}
        """Writers that were not told yet that they should unmap slabs."""

    # --- the engine, on the event loop --------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """An engine is there that leases slabs."""
        return self._capacity > 0

    def open(self, capacity_bytes: int) -> None:
        """An engine is there, which leases at most so much to all API processes together."""
        with self.lock:
            self._capacity = capacity_bytes

    def lose(self) -> None:
        """The engine, or the connection to it, is gone, and all leases with it."""
        with self.lock:
            self._capacity = self._nbytes = 0
            for want in self._wants.values():
                want.done = True
            for slab in self._slabs.values():
                self._forget(slab)
            for mapping in (self._slabs, self._free, self._wants):
                mapping.clear()
            for pending in (self._given_back, self._new_wants, self._uses):
                pending.clear()
            self.lock.notify_all()
        self._tell_writers()

    def leased(self, answers: Sequence[tuple[int, int, int]], descriptors: Sequence[int]) -> None:
        """The engine's answers (want, slab number or 0, bytes), and a descriptor per slab, which
        are closed when the writers have them."""
        rest = deque(descriptors)
        try:
            with self.lock:
                for number_of_want, number, nbytes in answers:
                    fd = rest.popleft() if number and rest else None
                    want = self._wants.pop(number_of_want, None)
                    if want is not None:
                        want.done = True
                        self._nbytes -= want.nbytes
                    if number:
                        self._take_lease(want, number, nbytes, fd)
                self.lock.notify_all()
        finally:
            for fd in rest:
                os.close(fd)
        self._flush()

    def released(self, uses: Iterable[tuple[int, int]]) -> None:
        """(slab number, use): the engine is done with all uses up to this one."""
        with self.lock:
            for number, use in uses:
                slab = self._slabs.get(number)
                if slab is not None:
                    slab.released_use = max(slab.released_use, use)
                    self._settle(slab)
            self._collect()
            self.lock.notify_all()
        self._flush()

    def reclaim(self) -> None:
        """The engine needs room: give back every free slab."""
        with self.lock:
            self._collect()
            for slab in list(self._free.values()):
                self._give_back(slab)
        self._flush()

    def sweep(self) -> None:
        """Give back what was free for long; call it now and then."""
        with self.lock:
            self._collect()
            before = self._clock() - IDLE_SECONDS
            for slab in list(self._free.values()):
                if slab.free_since > before:
                    break
                self._give_back(slab)
        self._flush()

    def settle(self) -> None:
        """A message of this process was lost: tell the engine of all uses up to now."""
        with self.lock:
            self._uses += [
                (slab.number, slab.sent_use)
                for slab in self._slabs.values()
                if slab.sent_use > slab.released_use
            ]
        self._flush()

    def take_changes(self) -> SlabChanges | None:
        """What must be sent to the engine now, after everything sent before; None: nothing."""
        with self.lock:
            if not (self._given_back or self._new_wants or self._uses):
                return None
            changes = SlabChanges(
                tuple(self._given_back),
                tuple(self._uses),
                tuple((want.number, want.nbytes) for want in self._new_wants[:MAX_WANTED]),
            )
            self._given_back.clear()
            self._uses.clear()
            del self._new_wants[:MAX_WANTED]
            return changes

    # --- writers, in any thread ---------------------------------------------------------------

    def writer(self, on_dropped: Callable[[], None] = _nothing) -> SlabWriter:
        """A new writer, which has no slabs."""
        return SlabWriter(self, on_dropped)

    def grant(self, writer: SlabWriter, nbytes: int) -> Grant | None:
        """See `SlabWriter.grant`."""
        size = slab_size(nbytes)
        grant = None
        with self.lock:
            if not self._capacity:
                return None
            self._collect()
            writer.last_size = size
            slab = self._find_free(writer, size) or self._ask_and_wait(writer, size)
            if slab is None:
                self._fallbacks.add()
            else:
                grant = self._begin_writing(slab)
                self._count(slab)
                self._keep_spare(writer, size)
        self._flush()
        return grant

    def grant_ahead(self, writer: SlabWriter) -> LeasedSlab | None:
        """See `SlabWriter.grant_ahead`."""
        with self.lock:
            self._collect()
            slab = self._find_free(writer, writer.last_size) if writer.last_size else None
            if slab is not None and slab.fd is None:
                self._begin_writing(slab)
                slab.ahead = True
            else:
                slab = None
        self._flush()
        return slab

    def used(self, slab: LeasedSlab) -> None:
        """A slab has been written; with the lock held."""
        if slab.ahead:
            slab.ahead = False
            self._count(slab)
            self._keep_spare(slab.writer, slab.nbytes)

    def finish(self, slabs: Iterable[LeasedSlab]) -> None:
        """See `SlabWriter.finish`."""
        with self.lock:
            for slab in slabs:
                if slab.state == "writing":
                    slab.state = "in use"
                    slab.written = slab.written or not slab.ahead
                    slab.ahead = False
                    self._settle(slab)
            self._collect()
        self._flush()

    def take_dropped(self, writer: SlabWriter) -> tuple[int, ...]:
        """See `SlabWriter.take_dropped`."""
        with self.lock:
            dropped = tuple(writer.dropped)
            writer.dropped.clear()
            return dropped

    def close_writer(self, writer: SlabWriter) -> None:
        """See `SlabWriter.close`."""
        with self.lock:
            writer.is_closed = True
            self._collect()
            for slab in [s for s in self._slabs.values() if s.writer is writer]:
                if slab.state == "writing":
                    slab.state = "in use"  # a view that was made before is given up by its holder
                    slab.ahead = False
                self._settle(slab)
                if slab.state == "free":
                    self._give_back(slab)
            for want in self._wants.values():
                want.done = want.done or want.writer is writer
            self.lock.notify_all()
        self._flush()

    def view_gone(self, slab: MappedSlab) -> None:
        """A finalizer: it may run while this thread holds the lock."""
        self._gone.append(slab)

    # --- what was counted ---------------------------------------------------------------------

    @property
    def num_grants(self) -> int:
        """Slabs that writers got."""
        return int(self._grants.value)

    @property
    def num_reuses(self) -> int:
        """Those that had been written before."""
        return int(self._reuses.value)

    @property
    def num_waits(self) -> int:
        """Grants for which a job waited for the engine."""
        return int(self._waits.value)

    @property
    def num_fallbacks(self) -> int:
        """Items whose arrays travelled in messages because no slab could be had."""
        return int(self._fallbacks.value)

    def leased_sizes(self) -> dict[int, int]:
        """number → bytes of every slab that is leased. O(n)."""
        with self.lock:
            return {number: slab.nbytes for number, slab in self._slabs.items()}

    # --- inside, with the lock held -----------------------------------------------------------

    def _find_free(self, writer: SlabWriter, size: int) -> LeasedSlab | None:
        """Of the writer's free slabs that fit, one that was written before, the latest freed."""
        fitting = [s for s in writer.free.values() if fits(size, s.nbytes)]
        return max(fitting, key=lambda s: (s.written, s.free_since), default=None)

    def _ask_and_wait(self, writer: SlabWriter, size: int) -> LeasedSlab | None:
        want = self._wanted(writer, size) or self._want(writer, size, make_room=True)
        if want is None:
            return None
        self._waits.add()
        self._wake()
        self.lock.wait_for(lambda: want.done, self._lease_timeout)
        self._collect()
        return None if writer.is_closed else self._find_free(writer, size)

    def _wanted(self, writer: SlabWriter, size: int) -> _Want | None:
        """An open want of the writer that fits."""
        for want in self._wants.values():
            if want.writer is writer and fits(size, want.nbytes) and not want.done:
                return want
        return None

    def _want(self, writer: SlabWriter, size: int, *, make_room: bool) -> _Want | None:
        """Ask for a slab, if need be after giving back the slabs that were free for longest."""
        while self._nbytes + size > self._capacity:
            if not make_room or not self._free or size > self._capacity:
                return None
            self._give_back(next(iter(self._free.values())))
        self._num_wants += 1
        want = self._wants[self._num_wants] = _Want(self._num_wants, writer, size)
        self._new_wants.append(want)
        self._nbytes += size
        return want

    def _begin_writing(self, slab: LeasedSlab) -> Grant:
        slab.state = "writing"
        del self._free[slab.number], slab.writer.free[slab.number]
        fd, slab.fd = slab.fd, None
        return Grant(slab, fd)

    def _count(self, slab: LeasedSlab) -> None:
        self._grants.add()
        self._reuses.add(slab.written)

    def _keep_spare(self, writer: SlabWriter, size: int) -> None:
        """Have one more free slab of this size soon, so that the next job need not wait."""
        if self._find_free(writer, size) is None and self._wanted(writer, size) is None:
            self._want(writer, size, make_room=False)

    def _take_lease(self, want: _Want | None, number: int, nbytes: int, fd: int | None) -> None:
        memory = None
        if want is not None and not want.writer.is_closed and fd is not None:
            try:
                memory = map_memory(fd, nbytes)
            except (OSError, ProtocolError):
                memory = None
        if want is None or memory is None:
            if fd is not None:
                os.close(fd)
            self._given_back.append(number)
            return
        slab = LeasedSlab(self, want.writer, number, memory)
        slab.fd = fd
        self._slabs[number] = slab
        self._nbytes += nbytes
        self._set_free(slab)

    def _collect(self) -> None:
        """Notice the views that have gone."""
        while self._gone:
            slab = self._gone.popleft()
            assert isinstance(slab, LeasedSlab)
            slab.num_views -= 1
            self._settle(slab)

    def _settle(self, slab: LeasedSlab) -> None:
        """A slab that is not used any more is free, or given back if its writer has ended."""
        if slab.state == "in use" and slab.is_unused and slab.is_leased:
            self._set_free(slab)
            if slab.writer.is_closed:
                self._give_back(slab)

    def _set_free(self, slab: LeasedSlab) -> None:
        slab.state = "free"
        slab.free_since = self._clock()
        self._free[slab.number] = slab.writer.free[slab.number] = slab

    def _give_back(self, slab: LeasedSlab) -> None:
        del self._slabs[slab.number], self._free[slab.number]
        self._nbytes -= slab.nbytes
        self._given_back.append(slab.number)
        self._forget(slab)

    def _forget(self, slab: LeasedSlab) -> None:
        """The lease has ended: the writer is to unmap the slab, if it ever mapped it."""
        slab.is_leased = False
        slab.state = "given back"
        writer = slab.writer
        writer.free.pop(slab.number, None)
        if slab.fd is not None:
            os.close(slab.fd)
            slab.fd = None
        elif not writer.is_closed:
            writer.dropped.append(slab.number)
            self._to_tell[writer] = None

    # --- inside, without the lock -------------------------------------------------------------

    def _flush(self) -> None:
        if self._given_back or self._new_wants or self._uses:
            self._wake()
        self._tell_writers()

    def _tell_writers(self) -> None:
        while self._to_tell:
            try:
                writer, _ = self._to_tell.popitem()
            except KeyError:
                return  # another thread tells it
            writer.tell_dropped()

    def check_integrity(self) -> None:
        """Recount everything. Raises `AssertionError` naming the rule that is broken. O(n)."""
        with self.lock:
            slabs = self._slabs.values()
            wanted = sum(want.nbytes for want in self._wants.values())
            free_of_writers = {n for slab in slabs for n in slab.writer.free}
            rules = {
                "bytes are counted": self._nbytes == wanted + sum(slab.nbytes for slab in slabs),
                "bytes fit the capacity": self._nbytes <= self._capacity,
                "free slabs are known": self._free.keys()
                == {n for n, slab in self._slabs.items() if slab.state == "free"},
                "free slabs have their writers": free_of_writers == self._free.keys(),
                "free slabs are unused": all(slab.is_unused for slab in self._free.values()),
                "all slabs are leased": all(slab.is_leased for slab in slabs),
                "no view is counted twice": all(slab.num_views >= 0 for slab in slabs),
                "ended writers have no free slabs": not any(
                    slab.writer.is_closed for slab in self._free.values()
                ),
            }
        for rule, holds in rules.items():
            if not holds:
                raise AssertionError(rule)


class OwnSlabs:
    """Puts arrays that were not made by a media worker (injected ones) into slabs that this process
    itself writes. May be used by several threads."""

    def __init__(self, pool: SlabPool) -> None:
        self._mappings: dict[int, NDArray[np.uint8]] = {}
        self._writer = pool.writer(self._unmap)

    def place(self, item: ProcessedItem) -> ProcessedItem:
        """The item with its large arrays of floats in one slab; as it is where none can be had.

        May wait for a lease: not for the event loop.
        """
        places = arrange({n: (a.dtype, a.nbytes) for n, a in item.arrays.items() if not a.place})
        if not places:
            return item
        end = max(offset + item.arrays[name].nbytes for name, offset in places.items())
        grant = self._writer.grant(end)
        if grant is None:
            return item
        slab = grant.slab
        try:
            memory = self._mapping(grant)
            arrays = dict(item.arrays)
            for name, offset in places.items():
                array = item.arrays[name]
                memory[offset : offset + array.nbytes] = np.frombuffer(array.data, np.uint8)
                arrays[name] = slab.array(array.dtype, array.shape, offset, array.nbytes)
        except (OSError, KeyError):  # it cannot be mapped, or its lease has just ended
            return item
        finally:
            self._writer.finish([slab])
            if not slab.is_leased:  # it was to be unmapped before it was mapped
                self._mappings.pop(slab.number, None)
        return ProcessedItem(item.modality, arrays, item.expansion)

    def _mapping(self, grant: Grant) -> NDArray[np.uint8]:
        number = grant.slab.number
        if grant.fd is not None:
            try:
                self._mappings[number] = map_memory(grant.fd, grant.slab.nbytes, writable=True)
            finally:
                os.close(grant.fd)
        return self._mappings[number]

    def _unmap(self) -> None:
        for number in self._writer.take_dropped():
            self._mappings.pop(number, None)


def fits(size: int, nbytes: int) -> bool:
    """Whether a slab of `nbytes` is taken where one of `size`, a size of slabs, is needed."""
    return size <= nbytes <= size * LOOSEST_FIT


def arrange(arrays: dict[str, tuple[str, int]]) -> dict[str, int]:
    """name → offset in one slab of the arrays (dtype, bytes) that belong there; the others are
    left out."""
    offsets, end = {}, 0
    for name, (dtype, nbytes) in arrays.items():
        if dtype in FLOATS and nbytes >= LARGE:
            offsets[name] = end
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return offsets
