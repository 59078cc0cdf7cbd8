"""Stacks of all Python processes of a server, sampled on demand.

Every process opens a file of its own in the server's socket folder and installs a handler of
SIGUSR1; until the signal comes that costs nothing. Whoever wants samples sends the signal to all of
them, many times a second; each handler appends the stacks of its process's threads to its file.

    sampler ── SIGUSR1, 50 times a second ──▶ every process ──▶ stacks-PROCESS-PID ──▶ sampler

A handler runs between two bytecodes of the main thread, so a long call into C code is seen when it
returns: a sample therefore carries the time since the one before it, which is what stacks are
weighed by. A file is locked as long as its process lives: no other process is ever signalled.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

MAX_FILE_BYTES = 16 << 20
"""A process whose file is that long writes no more samples."""
MAX_FRAMES = 60
HERTZ = 50
GRACE_SECONDS = 0.1
_FILE = re.compile(r"stacks-([\w-]+)-(\d+)")
_LINE = re.compile(r"(\d+) (.{1,8000})")


@dataclass(slots=True)
class ProcessSamples:
    """What one process did."""

    process: str
    pid: int
    samples: int = 0
    stacks: dict[str, float] = field(default_factory=dict)
    """`thread;outermost function;…;innermost` → seconds."""


_folder: Path | None = None


def samples_folder() -> Path | None:
    """Where this process listens, for processes that it starts; None: nowhere."""
    return _folder


def listen_for_samples(folder: Path, process: str) -> None:
    """Let `sample_stacks` see this process; called once, in its main thread. Where the folder
    cannot be written, it is not seen."""
    global _folder
    name = f"{process.replace(' ', '-')}-{os.getpid()}"
    unnamed = folder / f"new-stacks-{name}"  # `sample_stacks` removes files that nobody holds
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_APPEND | os.O_NOFOLLOW
    try:
        fd = os.open(unnamed, flags, 0o600)
    except OSError:
        return
    last = time.monotonic()

    def sample(number: int, interrupted: FrameType | None) -> None:
        nonlocal last
        now, before = time.monotonic(), last
        last = now
        size = os.fstat(fd).st_size
        if size < MAX_FILE_BYTES:
            microseconds = int((now - before) * 1e6) if size else 0
            with suppress(OSError):
                os.write(fd, _stacks(microseconds, interrupted))

    signal.signal(signal.SIGUSR1, sample)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with suppress(OSError):
        unnamed.rename(folder / f"stacks-{name}")  # from now on it is signalled
    _remove_ended(folder, process)
    _folder = folder


def _remove_ended(folder: Path, process: str) -> None:
    """Files of earlier processes of this name: where workers crash again and again they would
    become many. What was sampled and not read yet stays."""
    for path in folder.glob(f"stacks-{process.replace(' ', '-')}-*"):
        with suppress(OSError):
            if path.stat().st_size == 0 and not _lives(path):
                path.unlink()


def _stacks(microseconds: int, interrupted: FrameType | None) -> bytes:
    """One line for each thread. Takes no lock: the interrupted code may hold it."""
    names = {ident: thread.name for ident, thread in dict(threading._active).items()}  # type: ignore[attr-defined]
    own = threading.get_ident()
    lines = []
    for ident, frame in sys._current_frames().items():
        top = interrupted if ident == own else frame
        name = names.get(ident, str(ident)).replace(";", " ").replace("\n", " ")
        lines.append(f"{microseconds} {name};{_folded(top)}\n")
    return "".join(lines).encode("utf-8", "replace")


def _folded(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None and len(names) < MAX_FRAMES:
        code = frame.f_code
        module = frame.f_globals.get("__name__", "?")
        names.append(f"{module}.{code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return ";".join(reversed(names))


# --- the sampler ----------------------------------------------------------------------------------


def sample_stacks(folder: Path, seconds: float, hertz: float = HERTZ) -> list[ProcessSamples]:
    """Of every process that listens in `folder`; blocks for `seconds`. One caller at a time."""
    files = [path for path in sorted(folder.glob("stacks-*")) if _FILE.fullmatch(path.name)]
    living = [path for path in files if _lives(path)]
    for path in set(files) - set(living):
        path.unlink(missing_ok=True)
    for path in living:
        os.truncate(path, 0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in living:
            if _lives(path):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(_pid(path), signal.SIGUSR1)
        time.sleep(1 / hertz)
    time.sleep(GRACE_SECONDS)
    return [_read(path) for path in living]


def _pid(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _lives(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _read(path: Path) -> ProcessSamples:
    """The samples in a file, which is then emptied."""
    found = _FILE.fullmatch(path.name)
    assert found is not None
    result = ProcessSamples(found[1].replace("-", " "), int(found[2]))
    with suppress(OSError):
        with path.open("rb") as file:  # a worker that was taken over may have written more
            text = file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
        os.truncate(path, 0)
        for line in text.splitlines():
            parsed = _LINE.fullmatch(line)
            if parsed is not None:
                seconds, stack = int(parsed[1]) / 1e6, parsed[2]
                result.stacks[stack] = result.stacks.get(stack, 0.0) + seconds
                result.samples += stack.startswith("MainThread;")
    return result
