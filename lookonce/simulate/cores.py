"""The cores that the processes of one server share.

Each job wants as many cores as it has threads, mostly one. Where all want more than there are, each
thread gets an equal part of them, as by a scheduler that takes turns in much less time than a job
takes; the threads of a job wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lookonce.simulate.clock import VirtualClock

EQUAL_SECONDS = 1e-12


class Job:
    """Work under way. `seconds` is what it takes where each of its threads has a core."""

    __slots__ = ("arguments", "call", "done", "seconds", "threads")

    def __init__(
        self, seconds: float, threads: float, call: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        self.seconds, self.threads = seconds, threads
        self.call, self.arguments = call, arguments
        self.done = 0.0
        """Of these seconds, when the cores were last looked at."""


class Cores:
    """A machine's cores on a virtual clock."""

    def __init__(self, clock: VirtualClock, count: float) -> None:
        """`count` may be no whole number: somebody else has a part of a core."""
        self._clock, self._count = clock, count
        self._jobs: list[Job] = []
        self._background = 0.0
        self._looked = 0.0
        self._version = 0

    def run(
        self, seconds: float, call: Callable[..., None], *arguments: Any, threads: float = 1.0
    ) -> Job:
        """Call when a new job of `seconds` is done."""
        job = Job(seconds, threads, call, arguments)
        self._look()
        self._jobs.append(job)
        self._plan()
        return job

    def done(self, job: Job) -> float:
        """Seconds of the job that are done."""
        self._look()
        return job.done

    def resize(self, job: Job, seconds: float) -> None:
        """The job takes so many seconds in all, at least those that are done."""
        self._look()
        job.seconds = max(seconds, job.done)
        self._plan()

    def set_background(self, share: float) -> None:
        """Cores that something else takes from now on, beside all jobs."""
        if share != self._background:
            self._look()
            self._background = share
            self._plan()

    @property
    def _speed(self) -> float:
        """Of each job: the part of a core that each of its threads has."""
        free = max(0.1, self._count - self._background)
        threads = sum(job.threads for job in self._jobs)
        return min(1.0, free / threads) if threads else 1.0

    def _look(self) -> None:
        elapsed, self._looked = self._clock.now - self._looked, self._clock.now
        if elapsed > 0:
            speed = self._speed
            for job in self._jobs:
                job.done += elapsed * speed

    def _plan(self) -> None:
        """Look again when the first job will be done."""
        self._version += 1
        if self._jobs:
            left = min(job.seconds - job.done for job in self._jobs)
            self._clock.after(max(0.0, left) / self._speed, self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._look()
        ended = [job for job in self._jobs if job.seconds - job.done <= EQUAL_SECONDS]
        self._jobs = [job for job in self._jobs if job not in ended]
        self._plan()
        for job in ended:
            job.call(*job.arguments)
