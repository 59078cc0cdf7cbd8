"""The device that tests compute on: a CPU, unless `TEST_DEVICE` says another (`make test-cuda`)."""

from __future__ import annotations

import os

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
ON_CUDA = DEVICE.startswith("cuda")
SERVE_OPTIONS = () if DEVICE == "cpu" else ("--device", DEVICE, "--dtype", "float32")
"""Of every server that tests start: float32 answers can be compared with a CPU's."""
