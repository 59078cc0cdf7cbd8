"""The folder of one server's unix sockets: it is removed when the last process that uses it ends.

Every process of a server holds a shared lock on the file `lock` in it, which the kernel releases
however the process ends. Whoever gets the exclusive lock knows that nobody uses the folder:

supervisor     creates the folder, and first removes those whose processes were all killed
its children   join it; the last one to end removes it, where the supervisor could not
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "lookonce-"
_LOCK = "lock"


@contextmanager
def socket_folder(address: str) -> Iterator[Path]:
    """The folder of a socket's path: created for this user alone, removed at the end."""
    folder = folder_of(address)
    remove_abandoned_folders(folder.parent)
    lock = _created(folder)
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def joined_socket_folder(address: str) -> Iterator[Path]:
    """The same folder for a child process: removed at the end if no other process uses it."""
    folder = folder_of(address)
    lock = _opened(folder)
    try:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield folder
    finally:
        if lock is not None:
            os.close(lock)
            remove_if_abandoned(folder)


def folder_of(address: str) -> Path:
    """The folder of a socket's path."""
    return Path(address).parent


def remove_abandoned_folders(parent: Path) -> None:
    """Remove this user's socket folders in `parent` that no process uses."""
    for folder in parent.glob(PREFIX + "*"):
        with suppress(OSError):
            if folder.stat(follow_symlinks=False).st_uid == os.getuid():
                remove_if_abandoned(folder)


def remove_if_abandoned(folder: Path) -> bool:
    """Remove the folder if no process uses it; whether none does.

    A folder without a lock file is none of ours and stays.
    """
    lock = _opened(folder)
    if lock is None:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # somebody holds it
        return False
    finally:
        os.close(lock)
    return True


def _created(folder: Path) -> int:
    """Create the folder; the descriptor of its lock, which is held.

    Another server that starts now may take a folder for abandoned whose lock nobody holds yet. It
    is then created again.
    """
    while True:
        folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)


def _opened(folder: Path) -> int | None:
    """A descriptor of its lock, which is not held; None where it has none."""
    try:
        return os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
