"""The memory of this process, as the system and the C library tell it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _glibc() -> ctypes.CDLL | None:
    """The C library where it is glibc 2.33 or newer, which tells what is allocated."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _MallInfo
    return library


GLIBC = _glibc()
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Of glibc's malloc.h."""
KEPT_BYTES = 64 << 20
HEAP_BYTES = 32 << 20
COLLECTED_AFTER = (2000, 2, 125)
"""Thresholds of garbage collection. With Python's 700 the objects of a dozen streams would be
searched again and again for cycles that are not there. A collection of the second generation is of
6,000 objects, a millisecond or two in which no other thread runs: of ten times as many while a
large chat is converted, with 5000 and Python's 10. The oldest is collected as often as with 5000,
10 and 10."""


def allocated_bytes() -> int:
    """Bytes that this process has allocated and not freed; without glibc its resident size."""
    if GLIBC is None:
        return resident_bytes()
    info = GLIBC.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def give_memory_back() -> None:
    """Return what was freed to the system, where the C library can (glibc's `malloc_trim`)."""
    if GLIBC is not None:
        GLIBC.malloc_trim(0)


def use_one_arena() -> None:
    """Let threads that start from now on allocate where the main thread does, so that one after
    another they leave no memory of their own behind (glibc's `M_ARENA_MAX`)."""
    if GLIBC is not None:
        GLIBC.mallopt(M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keep up to `KEPT_BYTES` that were freed until `give_memory_back`, and allocate blocks of up
    to `HEAP_BYTES` from them. Each page that the system gives anew costs a page fault: a body of
    10 MB, copied twice, 7,000 of them."""
    if GLIBC is not None:
        GLIBC.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        GLIBC.mallopt(M_MMAP_THRESHOLD, HEAP_BYTES)


def settle_memory() -> None:
    """Exempt all objects that exist now from garbage collection, and collect the others in other
    parts; what the start has freed goes back to the system, and what requests free is kept for the
    next ones."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AFTER)
    give_memory_back()
    keep_freed_memory()


def resident_bytes() -> int:
    return _statm(1)


def address_space_bytes() -> int:
    return _statm(0)


def _statm(column: int) -> int:
    """A size of this process in bytes; 0 where there is no /proc."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[column]) * resource.getpagesize()
    return 0
