"""An engine process as it is started for real, around a fake runner: `python -m ...fake_process`.

The model's folder in the settings says how it behaves: "refuse", "break", "crash" once loaded,
"hold" its first step up, or anything else to serve.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from lookonce.engine.process.engine_core import EngineCore, RequestPreprocessor
from lookonce.engine.process.main import run_engine
from lookonce.engine.process_io import EngineSettings
from lookonce.errors import ConfigError
from tests.support.core.builders import Limits
from tests.support.core.fake_runner import FakeRunner
from tests.support.engine.living import GatedRunner, fake_engine

LIMITS = Limits(num_blocks=1100, max_num_seqs=16)
CRASH_AFTER = 0.2


def build(
    settings: EngineSettings, progress: Callable[[int, int], None]
) -> tuple[EngineCore, RequestPreprocessor]:
    sys.stdout.write("libraries may print what they like\n")
    progress(0, 2)
    progress(2, 2)
    match settings.model.folder:
        case "refuse":
            raise ConfigError("--max-num-batched-tokens must be at least 900 for this model")
        case "break":
            raise RuntimeError("a bug")
        case "crash":
            threading.Timer(CRASH_AFTER, os._exit, [7]).start()
        case "hold":
            runner = GatedRunner(LIMITS)
            runner.gate.clear()
            return fake_engine(LIMITS, runner)
    return fake_engine(LIMITS, FakeRunner(LIMITS))


if __name__ == "__main__":
    run_engine(build)
