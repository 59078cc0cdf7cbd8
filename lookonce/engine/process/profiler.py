"""A profile of the engine's steps by torch's own profiler, taken on demand.

The step thread starts and stops it between steps; another thread writes it, as steps go on.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class StepProfiler:
    """Used by the step thread. One profile at a time."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._path = Path()

    def start(self, path: str) -> None:
        """Profile from now on; `path` is where the Chrome trace goes, by renaming, when it ends."""
        if self._profile is not None:
            return
        # torch's library writes lines of its own to stderr; it reads this when it first starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        import torch

        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._path = Path(path)
        self._profile = torch.profiler.profile(activities=kinds, record_shapes=False)
        self._profile.start()

    def stop(self) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        arguments = (profile, self._path)
        writer = threading.Thread(target=_write, args=arguments, name="profile", daemon=True)
        try:
            writer.start()
        except RuntimeError:  # the step thread must not end with it
            logger.warning("no thread for writing a profile can be started")


def _write(profile: Any, path: Path) -> None:
    try:
        beside = path.with_suffix(".part")
        profile.export_chrome_trace(str(beside))
        beside.rename(path)
    except Exception:
        logger.exception("a profile could not be written")
