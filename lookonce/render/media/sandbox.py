"""What a media worker may still do once it is warmed up: compute, and talk on its socket.

    close_sandbox()
      │ no_new_privs   a program that is executed gains nothing (the rest needs this)
      │ capabilities   all dropped; a worker of root is an ordinary process
      │ landlock       no file can be opened, no TCP port used, no process outside signalled
      └ seccomp        only the system calls of `ALLOWED`; any other one gives EPERM: no socket,
                       file, process, thread or program, no look into another process

A decoder that an attacker has taken over holds the worker's memory and one socket to its pool, and
nothing else. Guards that the kernel or the container refuses are left out and named in the report.
Libraries that open files or start threads late must have been used before (`worker.warm_up`).

Linux only; system call numbers are known for x86-64 and ARM64 (`asm/unistd.h`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable

import msgspec

MAX_OPEN_FILES = 64

PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC = 1, 1
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
LANDLOCK_VERSION = 1
LANDLOCK_FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 5: 0xFFFF}
"""Rights that the interface of this version, and later ones, can take away."""
LANDLOCK_NETWORK_VERSION, LANDLOCK_SCOPE_VERSION = 4, 6

ALLOWED = {
    "read": (0, 63), "write": (1, 64), "futex": (202, 98), "recvmsg": (47, 212),
    "sendmsg": (46, 211), "recvfrom": (45, 207), "sendto": (44, 206), "close": (3, 57),
    "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226),
    "madvise": (28, 233), "brk": (12, 214), "lseek": (8, 62), "fstat": (5, 80),
    "readv": (19, 65), "writev": (20, 66), "poll": (7, None), "ppoll": (271, 73),
    "select": (23, None), "pselect6": (270, 72), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "getrandom": (318, 278), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "restart_syscall": (219, 128),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getcpu": (309, 168),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "membarrier": (324, 283),
    "rseq": (334, 293), "set_robust_list": (273, 99), "dup": (32, 23),
    "shutdown": (48, 210), "getsockopt": (55, 209), "setsockopt": (54, 208),
    "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
"""System calls without further condition: their numbers on x86-64 and ARM64, the hot ones first."""
IOCTL, NEWFSTATAT, TGKILL, CLONE3 = (16, 29), (262, 79), (234, 131), (435, 435)
FCNTL = (72, 25)
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030, 1033, 1034)
"""Copying a descriptor, its flags, seals. F_SETOWN and F_SETSIG would have the kernel send any
signal to another process, which Landlock forbids from version 6 on only."""
SECCOMP = (317, 277)
TERMINAL_IOCTLS = (0x5401, 0x5421, 0x5450, 0x5451)
"""TCGETS, FIONBIO, FIONCLEX and FIOCLEX: what Python asks of a descriptor that it wraps."""
AT_EMPTY_PATH = 0x1000
"""How the C library's `fstat` calls newfstatat."""
AUDIT_ARCH = (0xC000003E, 0xC00000B7)
FIRST_X32_CALL = 0x40000000

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""Instructions of classic BPF: load a word of `struct seccomp_data`, jump on a constant, return."""
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
ALLOW, KILL_PROCESS, EPERM_INSTEAD, ENOSYS_INSTEAD = 0x7FFF0000, 0x80000000, 0x50001, 0x50026

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""


class SandboxReport(msgspec.Struct, frozen=True, array_like=True):
    """The guards that hold, and those that were refused with the reason."""

    active: tuple[str, ...] = ()
    refused: dict[str, str] = {}


def limit_resources(address_space: int) -> None:
    """Limit memory (bytes), descriptors and processes of this process, for good. CPU time is
    limited by the pool, job by job."""
    for name, limit in (
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(name, (limit, limit))


def close_sandbox() -> SandboxReport:
    """Give up, for the rest of this process's life, what decoding does not need."""
    if sys.platform != "linux":
        return SandboxReport(refused={"sandbox": f"not built for {sys.platform}"})
    guards: dict[str, Callable[[], None]] = {
        "no_new_privs": _forbid_new_privileges,
        "capabilities": _drop_capabilities,
        "landlock": _restrict_files_and_network,
        "seccomp": _filter_system_calls,
    }
    active, refused = [], {}
    for name, guard in guards.items():
        try:
            guard()
        except OSError as error:
            refused[name] = error.strerror or repr(error)
        else:
            active.append(name)
    return SandboxReport(tuple(active), refused)


def _forbid_new_privileges() -> None:
    _checked(_libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    _checked(_libc().capset(header, bytes(24)))


def _restrict_files_and_network() -> None:
    """A Landlock ruleset without a rule: everything that it handles is forbidden."""
    call = _libc().syscall
    version = _checked(call(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_VERSION))
    files = LANDLOCK_FILE_RIGHTS[max(known for known in LANDLOCK_FILE_RIGHTS if known <= version)]
    network = 3 if version >= LANDLOCK_NETWORK_VERSION else 0
    scopes = 3 if version >= LANDLOCK_SCOPE_VERSION else 0
    rules = struct.pack("=QQQ", files, network, scopes)
    size = 8 + 8 * bool(network) + 8 * bool(scopes)
    ruleset = _checked(call(LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(size), 0))
    try:
        _checked(call(LANDLOCK_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _filter_system_calls() -> None:
    """Install the filter for all threads of this process."""
    machine = _machine()
    code = b"".join(struct.pack("=HBBI", *each) for each in filter_program(machine, os.getpid()))
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    call = _libc().syscall
    flags = SECCOMP_FILTER_FLAG_TSYNC
    _checked(call(SECCOMP[machine], SECCOMP_SET_MODE_FILTER, flags, program))


def _machine() -> int:
    """0 for x86-64, 1 for ARM64. Raises `OSError` for another one."""
    machines = {"x86_64": 0, "aarch64": 1}
    if platform.machine() not in machines or struct.calcsize("P") != 8:
        raise OSError(0, f"no filter is known for {platform.machine()}")
    return machines[platform.machine()]


def filter_program(machine: int, pid: int) -> list[Instruction]:
    """The filter; the process may send signals to itself (`pid`) alone, as `abort` does."""
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == 0:
        program += [(AT_LEAST, 0, 1, FIRST_X32_CALL), (RETURN, 0, 0, KILL_PROCESS)]
    for numbers in ALLOWED.values():
        number = numbers[machine]
        if number is not None:
            program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    ioctls = [(EQUAL, 0, 1, asked) for asked in TERMINAL_IOCTLS]
    commands = [(EQUAL, 0, 1, asked) for asked in FCNTL_COMMANDS]
    for number, argument, tests in (
        (IOCTL[machine], 1, ioctls),
        (FCNTL[machine], 1, commands),
        (NEWFSTATAT[machine], 3, [(ANY_BIT, 0, 1, AT_EMPTY_PATH)]),
        (TGKILL[machine], 0, [(EQUAL, 0, 1, pid)]),
    ):
        body: list[Instruction] = [(LOAD, 0, 0, ARGUMENTS + 8 * argument)]
        for test in tests:
            body += [test, (RETURN, 0, 0, ALLOW)]
        body.append((RETURN, 0, 0, EPERM_INSTEAD))
        program += [(EQUAL, 0, len(body), number), *body]
    # The C library falls back to clone, which is refused properly.
    program += [(EQUAL, 0, 1, CLONE3[machine]), (RETURN, 0, 0, ENOSYS_INSTEAD)]
    return [*program, (RETURN, 0, 0, EPERM_INSTEAD)]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    """The result of a C function. Raises `OSError` for a negative one."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
