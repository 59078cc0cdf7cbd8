"""`lookonce serve`: a supervisor in this process, a progress bar, and a line with the URL."""

from __future__ import annotations

import asyncio
import logging
import sys

from rich.console import Console

from lookonce.cli.progress import LoadingBar
from lookonce.config import Config, Options, resolve
from lookonce.frontend.model_download import with_local_model
from lookonce.launch import Supervisor


def run_server(options: Options) -> int:
    """Serves until SIGTERM or Ctrl-C; the exit status. Raises `ConfigError` before any load."""
    config = with_local_model(resolve(options))
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s server: %(message)s",
        stream=sys.stderr,
    )
    asyncio.run(_serve(config))
    return 0


async def _serve(config: Config) -> None:
    console = Console(stderr=True)
    with LoadingBar(console, config.model.served_name) as bar:

        def on_ready(url: str) -> None:
            bar.finish()
            print(f"Serving {config.model.served_name} on {url}", flush=True)

        await Supervisor(config, on_loading=bar.update, on_ready=on_ready).run()
