"""Records which functions of a package run in this process; `tools/structure.py --walk` uses it.

Python imports this module at the start of every process that has this folder on its path. The
variable STRUCTURE_WALK names a folder with a file `recording` of one byte, which says what to
record, 0: nothing; the folder gets one file per process, forked ones too. Both are opened at the
start, as a process may lose the right to open files later.
"""

import fcntl
import mmap
import os
import sys
import threading
import time

CO_NEWLOCALS = 2
"""Set in the code of functions, not in that of modules and class bodies (see `inspect`)."""
FIRST_DESCRIPTOR = 200
"""Of the file: who forks a process gives it descriptors at low numbers."""


def install(folder: str) -> None:
    """Write each function of the package that runs: time in ns, what is recorded, line, name, file.

    It is written once for each value of `recording`. A function runs when it is called, resumed
    or returns, and when it calls something.
    """
    with open(os.path.join(folder, "recording"), "rb") as file:
        recording = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    package = os.path.join(os.environ["STRUCTURE_PACKAGE"], "")
    seen = set()
    out = -1

    def open_file():
        nonlocal out
        path = os.path.join(folder, f"{os.getpid()}.txt")
        low = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        out = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
        os.close(low)

    def open_forked():
        inherited = out
        open_file()
        os.close(inherited)
        seen.clear()

    open_file()
    os.write(out, f"{' '.join(sys.orig_argv[1:])}\n".encode())
    os.register_at_fork(after_in_child=open_forked)

    def record(code, what):
        if (code, what) in seen:
            return
        seen.add((code, what))
        if code.co_flags & CO_NEWLOCALS and code.co_filename.startswith(package):
            if os.lseek(out, 0, os.SEEK_CUR) == 0:  # forked, and has its name by now
                os.write(out, f"-m {sys.argv[0]}\n".encode())
            place = f"{code.co_firstlineno}\t{code.co_qualname}\t{code.co_filename}"
            os.write(out, f"{time.monotonic_ns()}\t{what}\t{place}\n".encode())

    def profile(frame, event, _argument):
        what = recording[0]
        if what:
            record(frame.f_code, what)
            if event in ("call", "return") and frame.f_back is not None:
                record(frame.f_back.f_code, what)

    threading.setprofile(profile)
    sys.setprofile(profile)


if "STRUCTURE_WALK" in os.environ:
    install(os.environ["STRUCTURE_WALK"])
