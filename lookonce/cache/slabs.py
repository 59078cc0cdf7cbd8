"""Slabs: shared memory that is written, read in place and used again, and their owner, the engine.

A slab is one piece of nameless memory (memfd). The engine creates it and leases it to an API
process for one writer, a media worker. The writer and the engine keep it mapped, so a second item
in it costs one write and one read of warm memory; only numbers travel. A slab of the engine:

     lease            a message refers to it         its last view has gone, the sender is told
    ───────▶ unread ─────────────────────────▶ read ────────────────────────────────▶ unread
               │ given back, or sender gone      │ sender gone (or gives it back too early)
               ▼                                 ▼
           destroyed ◀──── last view gone ──── ended

`SlabPool` (`slab_pool.py`) is the other half, in each API process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import secrets
import stat
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookonce.errors import ProtocolError
from lookonce.types.media import FLOATS, Array, SlabPlace

LARGE = 64 << 10
"""Bytes from which on an array of floats lies in a slab: half of the smallest one."""
SMALLEST = 128 << 10
CLASSES_PER_DOUBLING = 8
"""So at most an eighth of a larger slab is unused. The kernel gives out whole pages only when they
are first written, but what is accounted is the whole slab."""
HUGE_PAGE = 2 << 20
MAX_SLABS = 32_768
"""Slabs of one engine: each is a mapping, of which Linux allows a process 65,530."""
ALIGNMENT = 64
"""Arrays start at multiples of this many bytes."""
WORKING_BYTES = 256 << 20
"""Slabs beside the cache's budget, at most: items on their way, and free slabs."""
MFD_NOEXEC_SEAL = 8
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value
_SEALS = (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL) if hasattr(
    fcntl, "F_SEAL_SEAL"
) else 0  # fmt: skip


def why_no_slabs() -> str | None:
    """What stands in the way of shared memory in this process; None: nothing.

    Some builds of Python lack the calls, and containers may forbid them.
    """
    if not hasattr(os, "memfd_create") or not _SEALS:
        return "this Python has no sealed memory files"
    try:
        fd = create_memory(SMALLEST)
        try:
            map_memory(fd, SMALLEST)
        finally:
            os.close(fd)
    except (OSError, ProtocolError) as error:
        return str(error)
    return None


def slab_capacity(cache_bytes: int) -> int:
    """Bytes of slabs for a processor cache of that many bytes; a small cache gets as much again."""
    return cache_bytes + min(cache_bytes, WORKING_BYTES)


def slab_size(nbytes: int) -> int:
    """The size of the smallest slab that holds `nbytes`: whole pages; from 16 MiB, whole huge
    pages."""
    if nbytes <= SMALLEST:
        return SMALLEST
    below = 1 << ((nbytes - 1).bit_length() - 1)
    step = max(below // CLASSES_PER_DOUBLING, mmap.PAGESIZE)
    return -(-nbytes // step) * step


def create_memory(nbytes: int) -> int:
    """A descriptor of new memory that nobody can cut short, lengthen or execute. Raises `OSError`.

    Hosts may refuse memory that could be executed (`vm.memfd_noexec`); a kernel before 6.3 does not
    know that flag.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("lookonce-slab", flags | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("lookonce-slab", flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int, nbytes: int, *, writable: bool = False) -> NDArray[np.uint8]:
    """The memory of a slab, mapped as long as anything refers to it.

    The caller may close the descriptor at once. (Python's `mmap` would keep a copy of it open, and
    there are more slabs than a process may have descriptors.) Raises `ProtocolError` for a
    descriptor that is not a sealed slab of that size, else `OSError`.
    """
    _check_memory(fd, nbytes)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
    if address in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    if nbytes % HUGE_PAGE == 0:  # a kernel without huge pages says no, and that is all
        _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)
    array: NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
    array.flags.writeable = writable
    return array


def _check_memory(fd: int, nbytes: int) -> None:
    """A file that could be cut short would end whoever reads it (SIGBUS)."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
        raise ProtocolError("a descriptor came that is no slab of the size that was told")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        seals = 0
    if seals & _SEALS != _SEALS:
        raise ProtocolError("a descriptor came whose memory is not sealed")


def check_place(slab_nbytes: int, dtype: str, offset: int, nbytes: int) -> None:
    """Raises `ProtocolError` for an array that must not lie there."""
    if dtype not in FLOATS:
        raise ProtocolError(f"an array of {dtype} cannot lie in shared memory")
    if offset < 0 or offset % ALIGNMENT or nbytes < 1 or offset + nbytes > slab_nbytes:
        raise ProtocolError(f"an array of {nbytes} bytes cannot lie at {offset} of its slab")


class MappedSlab:
    """A slab as one process maps it: makes views, and notes when one is gone."""

    def __init__(
        self, number: int, memory: NDArray[np.uint8], on_view_gone: Callable[[MappedSlab], None]
    ) -> None:
        self.number = number
        self.nbytes = memory.nbytes
        self._memory = memory
        self._on_view_gone = on_view_gone

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A read-only view; the mapping lives as long as one of its views.

        `on_view_gone` is called, in whatever thread, when nothing refers to the view any more.
        """
        holder = self._memory[offset : offset + nbytes]
        holder.flags.writeable = False
        weakref.finalize(holder, self._on_view_gone, self).atexit = False
        return holder.data


class EngineSlab(MappedSlab):
    """A slab in the engine process. Only the input thread changes it."""

    is_leased = True

    def __init__(
        self,
        number: int,
        memory: NDArray[np.uint8],
        on_view_gone: Callable[[MappedSlab], None],
        sender: str,
    ) -> None:
        super().__init__(number, memory, on_view_gone)
        self.sender: str | None = sender
        """None: its lease has ended; the slab goes with its last view."""
        self.num_views = 0
        """Views that live, as far as `SlabOwner.collect` has noticed."""
        self.last_use = 0
        """The number of the last use that a message brought."""
        self.released_use = 0
        """The last use that the sender was told is over."""

    def next_use(self) -> int:
        raise NotImplementedError("only API processes refer to slabs in messages")


@dataclass(frozen=True, slots=True)
class Leases:
    """The answers to what a sender asked for."""

    slabs: tuple[tuple[int, int, int], ...]
    """`(number of the want, slab number, or 0: there is no room, bytes)`."""
    descriptors: tuple[int, ...]
    """One per slab, in order; whoever sends them closes them."""

    @property
    def is_short(self) -> bool:
        """Something was refused."""
        return len(self.descriptors) < len(self.slabs)


class SlabOwner:
    """All slabs of one engine: creates, leases, reads and destroys them within a capacity.

    Only the engine's input thread uses it; views may end in any thread. `wake` is called, in that
    thread, when a view has gone: call `collect` then.

        nbytes = sum over slabs, leased or ended, <= capacity_bytes
        a sender is told that use n of a slab is over when all views of uses 1 … n have gone
    """

    def __init__(self, capacity_bytes: int, *, wake: Callable[[], None] = lambda: None) -> None:
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self.num_leases = 0
        """Slabs leased since the start; in steady state it stays the same."""
        self.num_refusals = 0
        self._wake = wake
        self._slabs: dict[int, EngineSlab] = {}
        # Numbers of another engine mean nothing here, so that none is taken for one of this one's.
        self._numbers = itertools.count(secrets.randbits(46) << 16)
        self._gone: deque[MappedSlab] = deque()
        """Slabs that lost a view: one entry per view, appended by finalizers."""
        self._to_tell: dict[int, EngineSlab] = {}
        """Slabs of which a use may be over that the sender was not told of."""

    def change(
        self,
        sender: str,
        given_back: Iterable[int],
        uses: Iterable[tuple[int, int]],
        wanted: Iterable[tuple[int, int]],
    ) -> Leases:
        """Do what a sender asks for, in this order."""
        self.give_back(sender, given_back)
        self.settle(sender, uses)
        self._notice_gone()  # there may be room
        answers: list[tuple[int, int, int]] = []
        descriptors: list[int] = []
        for want, nbytes in wanted:
            lease = self.lease(sender, nbytes)
            if lease is None:
                answers.append((want, 0, nbytes))
            else:
                answers.append((want, lease[0], nbytes))
                descriptors.append(lease[1])
        return Leases(tuple(answers), tuple(descriptors))

    def lease(self, sender: str, nbytes: int) -> tuple[int, int] | None:
        """A new slab's number and descriptor, which the caller closes; None: no room."""
        full = self.nbytes + nbytes > self.capacity_bytes or len(self._slabs) >= MAX_SLABS
        if full or nbytes < 1 or slab_size(nbytes) != nbytes:
            self.num_refusals += 1
            return None
        try:
            fd = create_memory(nbytes)
        except OSError:
            self.num_refusals += 1
            return None
        try:
            memory = map_memory(fd, nbytes)
        except OSError:
            os.close(fd)
            self.num_refusals += 1
            return None
        slab = EngineSlab(next(self._numbers), memory, self._view_gone, sender)
        self._slabs[slab.number] = slab
        self.nbytes += nbytes
        self.num_leases += 1
        return slab.number, fd

    def give_back(self, sender: str, numbers: Iterable[int]) -> None:
        """The sender does not use these slabs any more."""
        for number in numbers:
            slab = self._slabs.get(number)
            if slab is not None and slab.sender == sender:
                self._end(slab)

    def end(self, sender: str) -> int:
        """The sender's socket has closed: its leases end. Returns how many there were."""
        leased = [slab for slab in self._slabs.values() if slab.sender == sender]
        for slab in leased:
            self._end(slab)
        return len(leased)

    def array(
        self,
        sender: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        reference: tuple[int, int, int],
    ) -> Array:
        """The array of a reference (slab number, offset, use) in a message of `sender`.

        Raises `ProtocolError` for a slab that is not the sender's, for a place outside of it, and
        for a dtype that must not be read from memory that its writer may still change.
        """
        number, offset, use = reference
        slab = self._slabs.get(number)
        if slab is None or slab.sender != sender:
            raise ProtocolError("an array is in a slab that is not leased to its sender")
        check_place(slab.nbytes, dtype, offset, nbytes)
        if use <= slab.last_use:
            raise ProtocolError("a use of a slab was told before")
        slab.last_use = use
        slab.num_views += 1
        return Array(dtype, shape, slab.view(offset, nbytes), SlabPlace(slab, offset))

    def settle(self, sender: str, uses: Iterable[tuple[int, int]]) -> None:
        """(slab number, last use) of what the sender has sent up to now: uses of messages that
        could not be read are over, too."""
        for number, use in uses:
            slab = self._slabs.get(number)
            if slab is not None and slab.sender == sender and use > slab.last_use:
                slab.last_use = use
                self._to_tell[number] = slab

    def collect(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """By sender, (slab number, use) of the uses that are over and that it was not told of."""
        self._notice_gone()
        over: dict[str, list[tuple[int, int]]] = {}
        for number, slab in self._to_tell.items():
            if slab.sender and not slab.num_views and slab.last_use > slab.released_use:
                slab.released_use = slab.last_use
                over.setdefault(slab.sender, []).append((number, slab.last_use))
        self._to_tell.clear()
        return {sender: tuple(uses) for sender, uses in over.items()}

    def leased(self, sender: str) -> dict[int, int]:
        """number → bytes of the slabs that are leased to a sender. O(n)."""
        return {n: slab.nbytes for n, slab in self._slabs.items() if slab.sender == sender}

    def counters(self) -> dict[str, float]:
        return {
            "mm_slab_bytes": float(self.nbytes),
            "mm_slabs": float(len(self._slabs)),
            "mm_slab_leases_total": float(self.num_leases),
            "mm_slab_refusals_total": float(self.num_refusals),
        }

    def _notice_gone(self) -> None:
        while self._gone:
            slab = self._gone.popleft()
            assert isinstance(slab, EngineSlab)
            slab.num_views -= 1
            if slab.sender is None:
                self._destroy_if_unused(slab)
            else:
                self._to_tell[slab.number] = slab

    def _view_gone(self, slab: MappedSlab) -> None:
        self._gone.append(slab)
        self._wake()

    def _end(self, slab: EngineSlab) -> None:
        slab.sender = None
        self._destroy_if_unused(slab)

    def _destroy_if_unused(self, slab: EngineSlab) -> None:
        if slab.num_views == 0:
            del self._slabs[slab.number]
            self.nbytes -= slab.nbytes

    def check_integrity(self) -> None:
        """Recount everything. Raises `AssertionError` naming the rule that is broken. O(n)."""
        slabs = self._slabs.values()
        pending: dict[int, int] = {}
        for gone in list(self._gone):
            pending[gone.number] = pending.get(gone.number, 0) + 1
        rules = {
            "nbytes is the sum of all slabs": self.nbytes == sum(slab.nbytes for slab in slabs),
            "slabs fit the capacity": self.nbytes <= self.capacity_bytes,
            "views are counted": all(s.num_views >= pending.get(s.number, 0) for s in slabs),
            "ended slabs have views": all(s.num_views for s in slabs if s.sender is None),
            "no use is over that has not begun": all(s.released_use <= s.last_use for s in slabs),
        }
        for rule, holds in rules.items():
            if not holds:
                raise AssertionError(rule)
