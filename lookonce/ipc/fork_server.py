"""Starts API processes and media workers by forking a process that has imported all they need.

    python -m lookonce.ipc.fork_server LISTENER_FD       one line of JSON on stdin: `Preload`

What was imported is in memory once, however many processes there are, and a new process is there
within milliseconds. Each process has a connection to the fork server of its own:

    start_forked ── ForkRequest, descriptors ──▶ fork server ── fork ──▶ process
    ForkedProcess ◀── its pid and pidfd ──                                 │
                  ◀── its exit status ────────────── SIGCHLD ──────────────┘

The fork server has one thread and no secrets, and reads nothing but these requests. It ends with
its standard input; its processes live on. The supervisor restarts it; where there is none,
processes are started one by one.

Linux only. One message is one packet (SOCK_SEQPACKET), so no framing is needed, nor numpy.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import logging
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from lookonce.errors import LookOnceError, ProtocolError, UnavailableError
from lookonce.ipc.peer import peer_uid, require_same_user
from lookonce.types.logs import LogConfig, configure_logging

log = logging.getLogger("lookonce.ipc.fork_server")

START_SECONDS = 60.0
"""How long a request waits for a fork server that is still importing."""
REQUEST_SECONDS = 1.0
PAUSE_SECONDS = 0.1
STATUS_SECONDS = 2.0
"""How long a process's status may come after its end."""
MAX_PACKET = 1 << 16
MAX_FDS = 16
TITLE_BYTES = 256
ARGUMENTS_START, ARGUMENTS_END = 47, 48
"""Fields of `/proc/self/stat`: where the command line lies that others see."""


class Preload(msgspec.Struct, frozen=True):
    """What is imported before any process is forked."""

    modules: tuple[str, ...]
    """Modules with a function `main`. Where one has a function `preloaded` too, that is called with
    `settings`, and answers what is run instead of `main`."""
    settings: dict[str, Any]
    logs: LogConfig = LogConfig()


class ForkRequest(msgspec.Struct, frozen=True, array_like=True):
    """`main()` of a module, in a new process."""

    module: str
    arguments: tuple[str, ...]
    """`sys.argv` after the module."""
    places: tuple[int, ...]
    """The numbers that the message's descriptors get in the process. Beside them it has standard
    error; 0 and 1 are empty unless named here."""
    group: int
    """Its process group; 0: one of its own."""
    dies_with_link: bool
    """It is killed when the connection closes."""


# --- who asks ---------------------------------------------------------------------------------


def start_forked(
    path: Path, request: ForkRequest, fds: Sequence[int], timeout: float = START_SECONDS
) -> ForkedProcess:
    """Have the fork server at `path` start a process. Raises `UnavailableError` where it cannot."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.settimeout(timeout)
        link.connect(str(path))
        require_same_user(peer_uid(link))
        socket.send_fds(link, [msgspec.msgpack.encode(request)], fds)
        answer, received, _, _ = socket.recv_fds(link, 32, 1)
        if len(received) != 1:
            raise ConnectionError
        link.setblocking(False)
        return ForkedProcess(msgspec.msgpack.decode(answer, type=int), received[0], link)
    except (OSError, ProtocolError):
        link.close()
        raise UnavailableError("there is no fork server") from None
    except BaseException:
        link.close()
        raise


class ForkedProcess:
    """A process of the fork server; the methods are those of `subprocess.Popen`.

    Its end is seen at its pidfd; with what status, its parent, the fork server, tells soon after.
    """

    def __init__(self, pid: int, pidfd: int, link: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._pidfd = pidfd
        self._link = link
        self._close = weakref.finalize(self, _close, pidfd, link)
        """Called also where nobody has waited for the process."""
        self._end_seen: float | None = None

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process ends; until its status is known."""
        return self._pidfd

    def poll(self) -> int | None:
        """Its exit status once it has ended and the status has been told; negative: the signal that
        ended it. Never waits."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    def _ended(self, timeout: float | None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.returncode is None and _readable(self._pidfd, deadline):
            if self._end_seen is None:
                self._end_seen = time.monotonic()
            last = self._end_seen + STATUS_SECONDS
            _readable(self._link.fileno(), last if deadline is None else min(last, deadline))
            with self._lock:
                self._take_status(late=time.monotonic() >= last)
        return self.returncode

    def _take_status(self, *, late: bool) -> None:
        """Take what the fork server has told, if it has; where it is `late`, nobody knows."""
        if self.returncode is not None:
            return
        status = -signal.SIGKILL
        try:
            status = msgspec.msgpack.decode(self._link.recv(32), type=int)
        except BlockingIOError:
            if not late:
                return
        except (OSError, msgspec.MsgspecError):
            pass  # the fork server has ended too: nobody knows
        self.returncode = status
        self._close()


def _close(pidfd: int, link: socket.socket) -> None:
    link.close()
    os.close(pidfd)


def _readable(fd: int, deadline: float | None) -> bool:
    """Whether a descriptor is readable, or closed by another thread, before `deadline`."""
    if fd < 0:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    return bool(poll.poll(None if left is None else left * 1e3))


# --- the fork server --------------------------------------------------------------------------


@dataclass(slots=True)
class _Child:
    pid: int
    pidfd: int
    link: socket.socket
    dies_with_link: bool


class _ForkServer:
    """Answers requests until its standard input ends, that is, until the supervisor is gone."""

    def __init__(self, listener: socket.socket, mains: Mapping[str, Callable[[], None]]) -> None:
        self._listener = listener
        self._mains = mains
        """By module."""
        self._children: dict[int, _Child] = {}
        """By descriptor of the pidfd."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, None)

    def serve(self) -> Callable[[], None] | None:
        """None when the supervisor is gone; in a new process what that process is to do."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    if os.read(0, 1 << 12):
                        continue
                    return None
                task: Callable[[], None] | None = key.data()
                if task is not None:
                    return task

    def _accept(self) -> Callable[[], None] | None:
        try:
            link, _ = self._listener.accept()
        except OSError as error:  # who asked has left, or no descriptor is free
            log.warning("no request to fork can be taken: %s", error)
            time.sleep(PAUSE_SECONDS)
            return None
        fds: list[int] = []
        try:
            require_same_user(peer_uid(link))
            link.settimeout(REQUEST_SECONDS)
            packet, fds, _, _ = socket.recv_fds(link, MAX_PACKET, MAX_FDS)
            request = msgspec.msgpack.decode(packet, type=ForkRequest)
            if request.module not in self._mains or len(fds) != len(request.places):
                raise ProtocolError("a request for another process, or without its descriptors")
            return self._fork(request, fds, link)
        except (OSError, msgspec.MsgspecError, LookOnceError) as error:
            log.warning("a request to fork was refused: %s", error)
            link.close()
            return None
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(
        self, request: ForkRequest, fds: Sequence[int], link: socket.socket
    ) -> Callable[[], None] | None:
        pid = os.fork()
        if pid == 0:
            try:
                high = _moved(fds, request.places)
                self._close(link)
            except BaseException:  # noqa: BLE001 - it must not go on as another fork server
                os._exit(1)
            return lambda: _become(request, high, self._mains[request.module])
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # no descriptor is free
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        child = _Child(pid, pidfd, link, request.dies_with_link)
        self._children[pidfd] = child
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(child))
        self._selector.register(link, selectors.EVENT_READ, lambda: self._left(child))
        with suppress(OSError):  # who asked is gone: `_left` follows
            socket.send_fds(link, [msgspec.msgpack.encode(pid)], [pidfd])
        return None

    def _reap(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        with suppress(OSError):
            child.link.send(msgspec.msgpack.encode(os.waitstatus_to_exitcode(status)))
        self._forget_link(child)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.pidfd]

    def _left(self, child: _Child) -> None:
        """The connection was closed, or something was sent that nobody expects."""
        if child.link.fileno() < 0:
            return  # the process has just ended
        self._forget_link(child)
        if child.dies_with_link:
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def _forget_link(self, child: _Child) -> None:
        if child.link.fileno() >= 0:
            self._selector.unregister(child.link)
            child.link.close()

    def _close(self, link: socket.socket) -> None:
        """In a new process: nothing of the fork server's stays open."""
        self._selector.close()
        self._listener.close()
        link.close()
        for child in self._children.values():
            os.close(child.pidfd)
            child.link.close()
        self._children.clear()


def _moved(fds: Sequence[int], places: Sequence[int]) -> list[int]:
    """Duplicates beyond all places, so that none is overwritten by another."""
    return [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(places) + 1) for fd in fds]


def _become(request: ForkRequest, fds: Sequence[int], task: Callable[[], None]) -> None:
    """Be the process that was asked for."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # not the fork server's: whoever reads it waits for its last writer
        os.dup2(nowhere, standard)
    os.close(nowhere)
    for fd, place in zip(fds, request.places, strict=True):
        os.dup2(fd, place)
        os.close(fd)
    with suppress(OSError):  # the group has ended
        os.setpgid(0, request.group)
    set_title([sys.executable, "-m", request.module, *request.arguments])
    sys.argv = [request.module, *request.arguments]
    logging.root.handlers.clear()
    gc.enable()
    task()


def set_title(arguments: Sequence[str]) -> None:
    """Let `ps` show these arguments, as far as there is room where the first ones are."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(stat[field - 2]) for field in (ARGUMENTS_START, ARGUMENTS_END))
    room = end - start
    if start == 0 or room <= 1:  # the system does not tell
        return
    title = b"\0".join(map(os.fsencode, arguments))[: room - 1]
    ctypes.memset(start, 0, room)
    ctypes.memmove(start, title, len(title))


def fork_server_command(listener_fd: int) -> list[str]:
    """How to start a fork server; the padding is room for the titles of its processes."""
    plain = [sys.executable, "-m", "lookonce.ipc.fork_server", str(listener_fd)]
    return [*plain, " " * max(1, TITLE_BYTES - sum(map(len, plain)))]


def main() -> None:
    began = time.monotonic()
    for ignored in (signal.SIGINT, signal.SIGHUP):  # the parent gets them too, and decides
        signal.signal(ignored, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)
    preload = msgspec.json.decode(_first_line(), type=Preload)
    configure_logging("fork server", preload.logs)
    # Without torch transformers starts in one second instead of four, and takes 70 MB, not 300.
    sys.modules["torch"] = None  # type: ignore[assignment]
    mains = {name: _main_of(name, preload.settings) for name in preload.modules}
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("the fork server has more than one thread")
    gc.collect()
    gc.disable()  # a collection would write to all objects, and so copy their pages
    gc.freeze()
    log.info("ready to fork after %.1f s", time.monotonic() - began)
    os.write(1, b"ready\n")
    task = _ForkServer(listener, mains).serve()
    if task is not None:
        task()


def _main_of(name: str, settings: Mapping[str, Any]) -> Callable[[], None]:
    module: Any = import_module(name)
    if not hasattr(module, "preloaded"):
        return module.main  # type: ignore[no-any-return]
    try:
        return module.preloaded(settings)  # type: ignore[no-any-return]
    except LookOnceError:  # the process itself will say so
        return module.main  # type: ignore[no-any-return]


def _first_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n") and (data := os.read(0, 1)):
        line += data
    return bytes(line)


if __name__ == "__main__":
    main()
