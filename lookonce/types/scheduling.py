"""How Linux gives threads their turns on a core."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SHORT_SLICE_SECONDS = 1e-4
"""The shortest that Linux has."""
SWITCH_SECONDS = 0.0001
"""How long a thread may hold the interpreter while another one waits for it. The event loop waits
each time it has looked for events: with Python's 5 ms the ten turns that a short answer takes would
cost 50 ms while one large chat is converted or rendered in a thread. Less gains nothing: each time,
a thread that waits wakes up to ask again."""
_SCHED_OTHER, _SCHED_BATCH = 0, 3
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
"""The number of the system call, which the C library does not have."""


def run_when_woken() -> None:
    """Let the calling thread, and those that it starts from now on, run at once when they wake up
    where a thread with longer slices is running, and not once that one's slice is over, 3 ms later.
    Linux 6.12 and later can (EEVDF's `sched_runtime`); others go on as before."""
    _set_scheduling(_SCHED_OTHER, SHORT_SLICE_SECONDS)


def prefer_event_loop() -> None:
    """To be called by the thread that runs a server's event loop: it goes on at once when it wakes
    up (`run_when_woken`), and every thread of the process leaves others the interpreter early."""
    run_when_woken()
    sys.setswitchinterval(SWITCH_SECONDS)


def run_behind_others() -> None:
    """Let the calling thread, and those that it starts from now on, never take the core of a thread
    that is running, when they wake up (`SCHED_BATCH`)."""
    _set_scheduling(_SCHED_BATCH, 0.0)


def _set_scheduling(policy: int, slice_seconds: float) -> None:
    """`slice_seconds` 0: the system's own. The priority stays."""
    if _SCHED_SETATTR is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # of the calling thread
    # struct sched_attr: size, policy, flags, nice, priority, runtime in ns, deadline, period
    attributes = struct.pack("=IIQiIQQQ", 48, policy, 0, nice, 0, int(slice_seconds * 1e9), 0, 0)
    # It may be forbidden, as in a sandbox: then nothing changes.
    ctypes.CDLL(None).syscall(_SCHED_SETATTR, 0, ctypes.c_char_p(attributes), 0)
