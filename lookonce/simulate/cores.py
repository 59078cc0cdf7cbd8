"""The cores that the processes of one server share.

Each job wants one core. Where there are more jobs than cores, each gets an equal part of them, as
by a scheduler that takes turns in much less time than a job takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookonce.simulate.engine import VirtualClock

EQUAL_SECONDS = 1e-12


class Job:
    """Work of one thread, under way. `seconds` is what it takes on a core of its own."""

    __slots__ = ("arguments", "call", "done", "seconds")

    def __init__(self, seconds: float, call: Callable[..., None], arguments: tuple[Any, ...]):
        self.seconds, self.call, self.arguments = seconds, call, arguments
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

    def run(self, seconds: float, call: Callable[..., None], *arguments: Any) -> Job:
        """Call when a new job of `seconds` is done."""
        job = Job(seconds, call, arguments)
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
        """Of each job: cores that it has."""
        free = max(0.1, self._count - self._background)
        return min(1.0, free / len(self._jobs)) if self._jobs else 1.0

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
