# ruff: noqa: SIM115
"""A media worker whose decoder has been taken over: it does what its job's bytes name.

The process starts, warms up and confines itself as every worker does. A job's answer is an error
that says what came of the attack: "refused: EPERM", or "done: ..." if it succeeded.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Callable

from lookonce.errors import UnprocessableMediaError
from lookonce.render.media import worker
from lookonce.render.media.processing import MediaJob, Processed, Processing

LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, F_SETSIG = 16, 10
SYS_IO_URING_SETUP, SYS_BPF, SYS_OPENAT2, SYS_PIDFD_OPEN = 425, 321, 437, 434


def called(function: str, *arguments: object) -> object:
    """What a C function returns. Raises `OSError` for -1."""
    result = getattr(LIBC, function)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def connect() -> None:
    with socket.socket(fileno=3) as link:
        link.connect(("127.0.0.1", 9))


def fork() -> object:
    child = os.fork()
    if child == 0:
        os._exit(0)
    return child


def open_descriptors() -> int:
    count = 0
    for number in range(1024):
        try:
            os.fstat(number)
        except OSError:
            continue
        count += 1
    return count


ATTACKS: dict[str, Callable[[], object]] = {
    "read /etc/passwd": lambda: open("/etc/passwd").read(),
    "read the parent's memory": lambda: open(f"/proc/{os.getppid()}/mem", "rb"),
    "read its environment": lambda: open(f"/proc/{os.getppid()}/environ", "rb").read(),
    "write a file": lambda: open("/tmp/lookonce-hostile", "w"),
    "list a folder": lambda: os.listdir("/"),
    "look for a file": lambda: os.stat("/etc/passwd"),
    "make a folder": lambda: os.mkdir("/tmp/lookonce-hostile"),
    "remove a file": lambda: os.unlink("/tmp/lookonce-hostile"),
    "rename a file": lambda: os.rename("/tmp/lookonce-hostile", "/tmp/lookonce-hostile-2"),
    "link a file": lambda: os.symlink("/etc/passwd", "/tmp/lookonce-hostile"),
    "openat2": lambda: called("syscall", SYS_OPENAT2, -100, b"/etc/passwd", bytes(24), 24),
    "tcp": lambda: socket.socket(),
    "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "netlink": lambda: socket.socket(socket.AF_NETLINK),
    "socketpair": lambda: socket.socketpair(),
    "execve": lambda: os.execv("/bin/true", ["true"]),
    "fork": fork,
    "vfork": lambda: called("vfork"),
    "program": lambda: subprocess.run(["/bin/true"]),
    "shell": lambda: os.system("true") and called("vfork"),
    "thread": lambda: threading.Thread(target=print).start(),
    "kill the parent": lambda: os.kill(os.getppid(), 0),
    "kill all": lambda: os.kill(-1, 0),
    "signal the parent by a descriptor": lambda: fcntl.fcntl(3, fcntl.F_SETOWN, os.getppid()),
    "choose a descriptor's signal": lambda: fcntl.fcntl(3, F_SETSIG, 9),
    "ptrace": lambda: called("ptrace", PTRACE_ATTACH, os.getppid(), 0, 0),
    "process_vm_readv": lambda: called("process_vm_readv", os.getppid(), 0, 0, 0, 0, 0),
    "pidfd": lambda: called("syscall", SYS_PIDFD_OPEN, os.getppid(), 0),
    "io_uring": lambda: called("syscall", SYS_IO_URING_SETUP, 1, bytes(120)),
    "bpf": lambda: called("syscall", SYS_BPF, 0, 0, 0),
    "memfd": lambda: os.memfd_create("x"),
    "setuid": lambda: os.setuid(0),
    "chroot": lambda: os.chroot("/"),
    "mount": lambda: called("mount", b"none", b"/mnt", b"tmpfs", 0, 0),
    "nicer": lambda: os.nice(-10),
    "more memory": lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)),
    "more time": lambda: resource.setrlimit(resource.RLIMIT_CPU, (-1, -1)),
    "privileges": lambda: called("prctl", 38, 0, 0, 0, 0),
}
QUESTIONS: dict[str, Callable[[], object]] = {
    "descriptors": open_descriptors,
    "processor time limit": lambda: resource.getrlimit(resource.RLIMIT_CPU)[0],
}


class HostileProcessing(Processing):
    def run(self, job: MediaJob) -> Processed:
        name = bytes(job.data).decode("latin-1")
        if name == "memory":
            bytearray(1 << 45)
        if name == "burn":
            while True:
                pass
        if name == "abort":
            os.abort()
        attack = ATTACKS.get(name) or QUESTIONS.get(name)
        if attack is None:
            return super().run(job)
        try:
            result = f"done: {attack()!r}"
        except OSError as error:
            result = f"refused: {errno.errorcode.get(error.errno or 0, error)}"
        except (RuntimeError, ValueError):  # Python's words for a thread, and for a limit
            result = "refused: EPERM"
        raise UnprocessableMediaError(result)


if __name__ == "__main__":
    worker.Processing = HostileProcessing  # type: ignore[misc]
    worker.main()
