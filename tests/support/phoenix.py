"""Arize Phoenix: a collector and trace store of another maker, unmodified.

It takes OTLP over HTTP, keeps spans in a database, and gives them back by its REST API. It takes no
metrics. `make test-otel` installs it in an environment of its own, and names its command in
`PHOENIX`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import httpx

from tests.support.otlp_collector import CollectedSpan
from tests.support.programs import running_program

COMMAND = os.environ.get("PHOENIX", "")
SPANS = "/v1/projects/default/spans"


class Phoenix:
    def __init__(self, url: str) -> None:
        self.url = url

    def spans(self) -> list[CollectedSpan]:
        """All that it has, the newest first; 1,000 at most."""
        answer = httpx.get(self.url + SPANS, params={"limit": 1000}, timeout=30)
        if answer.status_code == 404:  # its project is made by the first span
            return []
        answer.raise_for_status()
        return [
            CollectedSpan(
                name=span["name"],
                trace_id=span["context"]["trace_id"],
                span_id=span["context"]["span_id"],
                parent_id=span["parent_id"] or "",
                begun=datetime.fromisoformat(span["start_time"]).timestamp(),
                ended=datetime.fromisoformat(span["end_time"]).timestamp(),
                attributes=span["attributes"],
                failed=span["status_code"] == "ERROR",
                tracestate="",
            )
            for span in answer.json()["data"]
        ]

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        """In the order of their beginnings; empty until all of its spans are stored."""
        found = [span for span in self.spans() if span.trace_id == trace_id]
        return sorted(found, key=lambda span: (span.begun, -span.ended))


@contextmanager
def running_phoenix(folder: Path) -> Iterator[Phoenix]:
    """Phoenix with its database in `folder`, until the block ends."""
    env = {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_GRPC_PORT": "0",  # any: it always listens for gRPC, too
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        "PYTHONPATH": "",
    }
    line = [COMMAND, "serve"]
    with running_program(
        line, folder, ready="/healthz", env=env, port_variable="PHOENIX_PORT"
    ) as url:
        yield Phoenix(url)
