"""The engine process: `python -m lookonce.engine.process`, started by a supervisor."""

from __future__ import annotations

import gc
import os

gc.disable()  # until the engine is built: imports make a million objects and no garbage (0.5 s)
if len(os.sched_getaffinity(0)) <= 2:
    # Idle threads of OpenMP spin by default. With so few cores they would spin in the way of those
    # they wait for: a step takes ten times as long when the API process is busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from lookonce.engine.process.build import Progress, build_engine  # noqa: E402
from lookonce.engine.process.engine_core import EngineCore, RequestPreprocessor  # noqa: E402
from lookonce.engine.process.main import host_engine  # noqa: E402
from lookonce.engine.process_io import EngineSettings  # noqa: E402


def build(settings: EngineSettings, progress: Progress) -> tuple[EngineCore, RequestPreprocessor]:
    """As `build_engine`, after which garbage is collected as usual."""
    built = build_engine(settings, progress)
    gc.enable()
    return built


if __name__ == "__main__":
    host_engine(build)
