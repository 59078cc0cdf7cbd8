"""The engine process: `python -m lookonce.engine.process`, started by a supervisor."""

from __future__ import annotations

import gc
import os

from lookonce.types.cpu import affinity, usable_cores

gc.disable()  # `load_engine` enables it: imports make a million objects, no garbage (0.5 s)
cores = usable_cores()
if cores < len(affinity()):
    # Torch counts only those that it may run on; threads beyond a container's quota are stopped.
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))
if cores <= 2:
    # Idle threads of OpenMP spin by default. With so few cores they take the time of the threads
    # that they wait for: a step takes ten times as long when the API process is busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from lookonce.engine.process.load_engine import load_engine  # noqa: E402
from lookonce.engine.process.main import run_engine  # noqa: E402

if __name__ == "__main__":
    run_engine(load_engine)
