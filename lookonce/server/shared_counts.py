"""What all API processes of one server have counted, those that died included.

Each start of an API process has a file of counts (`types.counts`) in the server's socket folder,
which it maps and holds locked for as long as it lives. Whoever is asked for the sums reads all
files; the counters of a process that has died stay, its gauges go. A process that starts adds the
files of dead ones to one file and removes them, so there are never more files than API processes,
those that died since the last start, and one.

    counts.lock         held shared while files are read, exclusively while they change
    counts.folded       the sums of dead processes, and the names of the files they are from
    counts-INDEX-TOKEN  one start of one process

`counts.folded` is replaced in one step, and says which files are in it: a process that is killed
while it folds neither loses a count nor adds it twice.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec

from lookonce.types.counts import SIZE, Counts, Values, add_up, read_counts


class _Folded(msgspec.Struct):
    """The contents of `counts.folded`."""

    files: list[str] = []
    counters: dict[str, tuple[float, ...]] = {}


class SharedCounts:
    """The counts of this process, `counts`, and the sums over all; a context manager.

    `index` is this process's number among the API processes.
    """

    def __init__(self, folder: Path, index: int) -> None:
        self._folder = folder
        self._lock = folder / "counts.lock"
        self._folded = folder / "counts.folded"
        with self._locked(fcntl.LOCK_EX):
            self._fold_dead()
            self._fd = self._create(index)
        self._map = mmap.mmap(self._fd, SIZE)
        self.counts = Counts(memoryview(self._map))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """From now on this process counts as dead: its file is folded by the next one."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # the mapping keeps a descriptor of its own
        os.close(self._fd)

    def sums(self) -> dict[str, Values]:
        """By name: counters of all processes that there ever were, gauges of those that live."""
        with self._locked(fcntl.LOCK_SH):
            folded = self._read_folded()
            files = [path for path in self._files() if path.name not in folded.files]
            counters = {name: Values(numbers) for name, numbers in folded.counters.items()}
            return add_up([counters, *map(_read, files)])

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("counts-*"))

    def _create(self, index: int) -> int:
        """The descriptor of this process's file, which is locked."""
        path = self._folder / f"counts-{index}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.ftruncate(fd, SIZE)
        return fd

    def _fold_dead(self) -> None:
        """Add the counters of dead processes to the folded ones, and remove their files."""
        before = self._read_folded()
        dead = [path for path in self._files() if not _lives(path)]
        new = [path for path in dead if path.name not in before.files]
        if new:
            known = {name: Values(numbers) for name, numbers in before.counters.items()}
            sums = add_up([known, *map(_read, new)])
            after = _Folded(
                [path.name for path in dead],
                {name: values.numbers for name, values in sums.items()},
            )
            beside = self._folded.with_suffix(".new")
            beside.write_bytes(msgspec.msgpack.encode(after))
            beside.rename(self._folded)
        for path in dead:
            path.unlink()

    def _read_folded(self) -> _Folded:
        with suppress(FileNotFoundError):
            return msgspec.msgpack.decode(self._folded.read_bytes(), type=_Folded)
        return _Folded()

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)


def _lives(path: Path) -> bool:
    """Whether the process of this file still holds it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _read(path: Path) -> dict[str, Values]:
    """The counts of a file; of a dead process without its gauges."""
    lives = _lives(path)
    counts = read_counts(path.read_bytes())
    return {name: values for name, values in counts.items() if lives or not values.gauge}
