"""A bar on the terminal while a model loads."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class LoadingBar:
    """Shows weights as they come in. Without a terminal it prints nothing."""

    def __init__(self, console: Console, model: str) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("Loading {task.description}"),
            BarColumn(),
            TextColumn("{task.fields[weights]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(model, total=None, weights="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def update(self, done: int, total: int) -> None:
        """`total` 0 while it is not known."""
        weights = f"{done} of {total} weights" if total else ""
        self._progress.update(self._task, completed=done, total=total or None, weights=weights)

    def finish(self) -> None:
        self._progress.stop()
