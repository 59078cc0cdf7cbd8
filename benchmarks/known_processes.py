"""The server of `lookonce bench known`: the real processes, with stopwatches around their parts.

`python -m benchmarks.known_processes serve PARTS OPTIONS` starts it and prints its URL. PARTS is a
file that both processes map, and add the seconds of each part to; OPTIONS are `config.Options` as
JSON.

A chunk of a prompt that is not known is not computed: its K/V stay what they are, and its next
token is the first of the vocabulary. Prompts become known at once that way, and what a known one
costs does not depend on the values of its K/V.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PARTS = ("template", "tokenize", "render", "engine", "take in", "hash", "schedule", "forward")
"""In `PARTS` order: in the API process the chat template, tokenizing, all of rendering (both, and
media), and from the submission to the first delta; in the engine process its input thread's
validation, the block hashes, planning and update without them, and the runner."""
LEARNED_TOKENS = 256
"""A step of more tokens is of a prompt that is not known."""


class Stopwatches:
    """The seconds of all parts, in a file that processes share."""

    def __init__(self, path: str | Path) -> None:
        self._seconds = np.memmap(path, np.float64, mode="r+", shape=(len(PARTS),))

    @classmethod
    def create(cls, path: Path) -> Stopwatches:
        path.write_bytes(bytes(8 * len(PARTS)))
        return cls(path)

    def read(self) -> dict[str, float]:
        return dict(zip(PARTS, self._seconds.tolist(), strict=True))

    def add(self, part: str, seconds: float) -> None:
        self._seconds[PARTS.index(part)] += seconds

    def around(self, owner: type, name: str, part: str, *, without: str | None = None) -> None:
        """Add the seconds of each call of a method, not those of `without`. Calls may nest."""
        inner: Callable[..., Any] = getattr(owner, name)
        running = 0

        @functools.wraps(inner)
        def timed(*given: Any, **named: Any) -> Any:
            nonlocal running
            if running:
                return inner(*given, **named)
            running += 1
            other = self.read()[without] if without else 0.0
            started = time.perf_counter()
            try:
                return inner(*given, **named)
            finally:
                running -= 1
                spent = time.perf_counter() - started
                self.add(part, spent - (self.read()[without] - other if without else 0.0))

        setattr(owner, name, timed)

    def around_async(self, owner: type, name: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(inner)
        async def timed(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return await inner(*given, **named)
            finally:
                self.add(part, time.perf_counter() - started)

        setattr(owner, name, timed)


# --- the API process -----------------------------------------------------------------------------


def run_api(parts: str) -> None:
    from lookonce.engine.client.engine_client import EngineClient
    from lookonce.engine.client.sender_cache import SenderCache
    from lookonce.ipc.messages import Deltas
    from lookonce.render.prompt.encoder import ChatTemplate
    from lookonce.render.prompt.token_cache import CachingTokenizer
    from lookonce.render.renderer import Renderer
    from lookonce.server.process import main

    watches = Stopwatches(parts)
    watches.around(ChatTemplate, "render", "template")
    watches.around(CachingTokenizer, "look_up", "tokenize")
    watches.around(CachingTokenizer, "complete", "tokenize")
    watches.around_async(Renderer, "render_chat", "render")
    submit, received = SenderCache.submit, EngineClient.received
    submitted: list[float] = []

    def submitting(self: SenderCache, *given: Any) -> Any:
        submitted.append(time.perf_counter())
        return submit(self, *given)

    def receiving(self: EngineClient, message: Any) -> None:
        if isinstance(message, Deltas) and submitted:
            watches.add("engine", time.perf_counter() - submitted.pop())
            submitted.clear()
        received(self, message)

    SenderCache.submit = submitting  # type: ignore[method-assign,assignment]
    EngineClient.received = receiving  # type: ignore[method-assign]
    main()


# --- the engine process --------------------------------------------------------------------------


def run_engine_process(parts: str) -> None:
    import torch

    from lookonce.core.request import Sequence as CoreSequence
    from lookonce.core.scheduler import Scheduler
    from lookonce.engine.process.engine_core import RequestPreprocessor
    from lookonce.engine.process.load_engine import load_engine
    from lookonce.engine.process.main import run_engine
    from lookonce.model.runner import Runner

    watches = Stopwatches(parts)
    watches.around(RequestPreprocessor, "preprocess", "take in")
    watches.around(CoreSequence, "hash_blocks", "hash")
    watches.around(CoreSequence, "hash_ahead", "hash", without="hash")
    watches.around(Scheduler, "plan", "schedule", without="hash")
    watches.around(Scheduler, "update_from_output", "schedule", without="hash")
    watches.around(Runner, "execute", "forward")
    compute = Runner.logits
    vocab_size = 0

    def logits(self: Runner, inputs: Any, seq_ids: Sequence[int], hidden: Any = None) -> Any:
        nonlocal vocab_size
        if inputs.token_ids.shape[0] <= LEARNED_TOKENS or not vocab_size:
            computed = compute(self, inputs, seq_ids, hidden)
            vocab_size = computed.shape[1]
            return computed
        return torch.zeros(len(seq_ids), vocab_size, device=inputs.token_ids.device)

    Runner.logits = logits  # type: ignore[method-assign]
    run_engine(load_engine)


# --- the supervisor ------------------------------------------------------------------------------


def serve(parts: str, options: dict[str, Any]) -> None:
    from lookonce.config import Options, resolve
    from lookonce.frontend.model_download import with_local_model
    from lookonce.launch import Supervisor

    config = with_local_model(resolve(Options(port=0, **options)))
    own = (sys.executable, "-m", "benchmarks.known_processes")
    supervisor = Supervisor(
        config,
        on_ready=lambda url: print(f"Serving on {url}", flush=True),
        engine_command=(*own, "engine", parts),
        api_command=(*own, "api", parts),
    )
    asyncio.run(supervisor.run())


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        gc.disable()  # as in lookonce.engine.process
        if len(os.sched_getaffinity(0)) <= 2:
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        run_engine_process(sys.argv[2])
    elif sys.argv[1] == "api":
        run_api(sys.argv[2])
    else:
        serve(sys.argv[2], json.loads(sys.argv[3]))
