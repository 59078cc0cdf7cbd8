"""A real server: `lookonce serve` as a user starts it, on a free port."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.support.device import SERVE_OPTIONS

START_SECONDS = 120.0
URL = re.compile(r"https?://[0-9.]+:[0-9]+")


class LiveServer:
    """Runs `lookonce serve` with `options`; a context manager that stops it with SIGTERM."""

    def __init__(
        self,
        *options: str,
        command: str = "serve",
        env: Mapping[str, str] | None = None,
        max_descriptors: int | None = None,
    ) -> None:
        """`env` is added to the environment; `max_descriptors` limits each of its processes."""
        device = SERVE_OPTIONS if command == "serve" else ()
        line = [
            sys.executable,
            "-m",
            "lookonce.cli.main",
            command,
            "--port",
            "0",
            *device,
            *options,
        ]
        self.process = subprocess.Popen(
            line,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            start_new_session=True,
            preexec_fn=max_descriptors and (lambda: _limit_descriptors(max_descriptors)),
        )
        self._watcher = _Watcher(self.process.pid)
        self.output: list[str] = []
        self._url: str | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until(lambda: self._url or self.process.poll() is not None, START_SECONDS, self.log)
        assert self._url, self.log()
        self.url = self._url

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            found = URL.search(line)
            if found and self._url is None:
                self._url = found.group()

    def log(self) -> str:
        return "".join(self.output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Stop the server with SIGTERM. Returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        self._watcher.close()
        self._reader.join(5)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60
        )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: object = None) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def post_bytes(self, path: str, body: bytes) -> httpx.Response:
        return httpx.post(self.url + path, content=body, timeout=60)

    def metrics(self) -> dict[str, float]:
        """Every sample, as `samples` names it."""
        return samples(self.get("/metrics").text)

    def engine_pid(self) -> int | None:
        """The pid of the engine process."""
        return next(iter(self.pids(b"lookonce.engine.process")), None)

    def pids(self, command: bytes) -> list[int]:
        """Of this server's processes with this in their command line, found by their session."""
        folders = (folder for folder in Path("/proc").iterdir() if folder.name.isdigit())
        return [int(folder.name) for folder in folders if self._is_ours(folder, command)]

    def _is_ours(self, folder: Path, wanted: bytes) -> bool:
        try:
            command = (folder / "cmdline").read_bytes()
            state, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return wanted in command and state != "Z" and int(fields[2]) == self.process.pid


class _Watcher:
    """A process that ends the server when this one has ended without stopping it.

    It reads a pipe that ends with this process, however that ends.
    """

    def __init__(self, pid: int) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f"read line || kill -TERM {pid}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        if self._process.returncode is None:  # a test may have stopped the server already
            self._process.communicate(b"stopped\n")


def _limit_descriptors(most: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def samples(text: str) -> dict[str, float]:
    """Every sample of `/metrics`, by name and label values: `media_decodes_total:image`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ":".join(["", *sample.labels.values()]) if sample.labels else ""
            found[sample.name.removeprefix("lookonce_") + labels] = sample.value
    return found


def until(
    condition: Callable[[], object],
    seconds: float,
    explain: Callable[[], str] = lambda: "it did not come to that",
) -> None:
    """Wait at most `seconds` for `condition`. Fails with what `explain` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)
