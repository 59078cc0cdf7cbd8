"""`lookonce serve` and `lookonce render`: they serve until SIGTERM or Ctrl-C.

When the server is ready a line with its URL goes to standard output; the log goes to standard
error.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lookonce.cli.config_file import unknown_variables
from lookonce.cli.preflight import check_length, check_machine, check_ranks
from lookonce.config import Config, Options, resolve
from lookonce.frontend.model_download import with_local_model
from lookonce.launch import Supervisor, bind, url_of
from lookonce.types.logs import configure_logging, tell

logger = logging.getLogger("lookonce.cli")


def run_server(options: Options) -> int:
    """Supervise the server's processes; the exit status. Raises `ConfigError` before any load."""
    config = resolve(options)
    configure_logging("server", config.logs)
    _warn_of_variables()
    check_machine(config)
    config = with_local_model(config)
    check_length(config)
    check_ranks(config)
    asyncio.run(_serve(config))
    return 0


async def _serve(config: Config) -> None:
    console = Console(stderr=True)
    with LoadingBar(console, config.model.served_name) as bar:

        def on_ready(url: str) -> None:
            bar.finish()
            tell(f"Serving {config.model.served_name} on {url}")

        await Supervisor(config, on_loading=bar.update, on_ready=on_ready).run()


def run_render_server(options: Options) -> int:
    """Serve from this process; the exit status. Raises `ConfigError`, `ModelLoadError`."""
    config = resolve(options)
    configure_logging("render", config.logs)
    _warn_of_variables()
    config = with_local_model(config, weights=False)
    from lookonce.server.render_server import serve_render  # slow: options are checked first

    with bind(config.server) as listener:
        url = url_of(listener, tls=config.server.ssl_certfile is not None)

        def on_ready() -> None:
            tell(f"Rendering {config.model.served_name} on {url}")

        try:
            asyncio.run(serve_render(config, listener, on_ready))
        finally:
            if config.server.uds is not None:
                Path(config.server.uds).unlink(missing_ok=True)
    return 0


def _warn_of_variables() -> None:
    for said in unknown_variables(os.environ):
        logger.warning("%s", said)


class LoadingBar:
    """A progress bar of the weights that are loaded. Without a terminal it prints nothing."""

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
        """Weights loaded, of how many; `total` is 0 while it is not known."""
        weights = f"{done} of {total} weights" if total else ""
        self._progress.update(self._task, completed=done, total=total or None, weights=weights)

    def finish(self) -> None:
        self._progress.stop()
