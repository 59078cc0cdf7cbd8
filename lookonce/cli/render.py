"""`lookonce render`: one process that renders, a line with the URL."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from lookonce.config import Options, resolve
from lookonce.frontend.model_download import with_local_model
from lookonce.launch import bind, url_of


def run_render_server(options: Options) -> int:
    """Serves until SIGTERM or Ctrl-C; the exit status. Raises `ConfigError`, `ModelLoadError`."""
    config = with_local_model(resolve(options), weights=False)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s render: %(message)s",
        stream=sys.stderr,
    )
    for library in ("uvicorn", "httpx"):
        logging.getLogger(library).setLevel(logging.WARNING)
    from lookonce.server.render_node import serve_render  # after a mistake in an option was told

    with bind(config.server) as listener:
        url = url_of(listener)

        def on_ready() -> None:
            print(f"Rendering {config.model.served_name} on {url}", flush=True)

        try:
            asyncio.run(serve_render(config, listener, on_ready))
        finally:
            if config.server.uds is not None:
                Path(config.server.uds).unlink(missing_ok=True)
    return 0
