"""Voice detection by the real model, in its real process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np
import pytest

from lookonce.errors import RequestFailedError
from lookonce.render.media.vad import FRAME_BYTES, VoiceDetectors
from tests.support.server.realtime import silence, speech

RATE = 16_000


def frames(samples: np.ndarray) -> bytes:
    data = samples.tobytes()
    return data[: len(data) // FRAME_BYTES * FRAME_BYTES]


def on_detectors(scenario, **how):
    async def whole():
        async with VoiceDetectors(**how) as detectors:
            await scenario(detectors)

    asyncio.run(whole())


def test_speech_is_told_from_silence_and_noise():
    async def scenario(detectors):
        detector = detectors.open()
        noise = (np.random.default_rng(1).standard_normal(RATE) * 300).astype("<i2")
        assert max(await detector.detect(frames(silence(1, RATE)))) < 0.2
        assert max(await detector.detect(frames(noise))) < 0.5
        found = await detector.detect(frames(speech(1, RATE)))
        assert len(found) == RATE // 512
        assert np.mean(np.array(found) > 0.5) > 0.8
        detector.close()
        assert detectors.num_open == 0

    on_detectors(scenario)


def test_each_detector_hears_its_own_sound_alone():
    """What one detects does not depend on others that are asked in between."""
    sounds = [speech(1, RATE), silence(1, RATE), speech(1, RATE, seed=3), -speech(1, RATE) // 2]

    async def scenario(detectors):
        async def heard(sound, step):
            detector = detectors.open()
            data, found = frames(sound), []
            for at in range(0, len(data), step):
                found += await detector.detect(data[at : at + step])
            detector.close()
            return found

        alone = [await heard(sound, 32 * FRAME_BYTES) for sound in sounds]
        beside = await asyncio.gather(*(heard(sound, 2 * FRAME_BYTES) for sound in sounds))
        assert beside == alone

    on_detectors(scenario)


def test_a_process_that_was_killed_is_started_again():
    async def scenario(detectors):
        detector = detectors.open()
        sound = frames(speech(1, RATE))
        before = await detector.detect(sound)
        os.kill(detectors.pid, signal.SIGKILL)
        assert await detector.detect(sound) == before

    on_detectors(scenario)


def test_a_process_that_hangs_is_ended_and_those_who_wait_for_it_are_answered():
    async def scenario(detectors):
        stuck, others = detectors.open(), [detectors.open() for _ in range(3)]
        sound = frames(speech(1, RATE))
        before = await stuck.detect(sound)
        hung = detectors.pid
        os.kill(hung, signal.SIGSTOP)
        found = await asyncio.gather(*(each.detect(sound) for each in (stuck, *others)))
        assert found == [before] * 4
        assert detectors.pid != hung

    on_detectors(scenario, patience=2.0)


def test_a_process_that_never_answers_is_an_error_of_the_request():
    hangs = (sys.executable, "-c", "import time; time.sleep(1000)")

    async def scenario(detectors):
        detector = detectors.open()
        with pytest.raises(RequestFailedError, match="cannot be detected"):
            await detector.detect(frames(speech(0.2, RATE)))
        detector.close()

    on_detectors(scenario, command=hangs, patience=0.05)


def test_a_process_that_does_not_start_is_an_error_of_the_request():
    async def scenario(detectors):
        detector = detectors.open()
        with pytest.raises(RequestFailedError):
            await detector.detect(bytes(FRAME_BYTES))

    on_detectors(scenario, command=(sys.executable, "-c", "raise SystemExit(1)"))


def test_who_is_cancelled_leaves_no_answer_to_the_next():
    async def scenario(detectors):
        detector, other = detectors.open(), detectors.open()
        expected = await other.detect(frames(silence(0.1, RATE)))
        other.close()
        await detector.detect(bytes(FRAME_BYTES))
        for wait in (0.0, 0.001, 0.003):
            task = asyncio.create_task(detector.detect(frames(speech(1, RATE))))
            await asyncio.sleep(wait)
            task.cancel()
            fresh = detectors.open()
            assert await fresh.detect(frames(silence(0.1, RATE))) == expected
            fresh.close()

    on_detectors(scenario)


COUNTS_DETECTORS = """
import numpy as np
from lookonce.render.media import vad_worker

class Counting(vad_worker.Detectors):
    def detect(self, number, frames):
        super().detect(number, frames)
        return np.asarray([len(self._detectors)], "<f4").tobytes()

vad_worker.Detectors = Counting
vad_worker.main()
"""


def test_who_is_gone_before_the_answer_leaves_no_detector():
    """Neither while its sound is heard nor while it waits for its turn."""

    async def scenario(detectors):
        stays = detectors.open()
        assert await stays.detect(bytes(FRAME_BYTES)) == [1.0]
        for wait in (0.0, 0.001, 0.003):
            gone = [detectors.open() for _ in range(4)]
            tasks = [asyncio.create_task(each.detect(bytes(FRAME_BYTES))) for each in gone]
            await asyncio.sleep(wait)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for detector in gone:
                detector.close()
        assert await stays.detect(bytes(FRAME_BYTES)) == [1.0]

    on_detectors(scenario, command=(sys.executable, "-c", COUNTS_DETECTORS))
