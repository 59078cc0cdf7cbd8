"""`lookonce bench engine`: what a decode step costs beside the bare model, and beside transformers.

model      CPU time in the text model, its embedding and its head
own        CPU time of all threads of both processes in everything else, which is the sum of
  engine   in the engine process: scheduling, building inputs, sampling, sending messages
  client   in the process that asked, as an API process does: receiving messages, handing tokens to
           who waits for them, detokenizing; only HTTP is left out
ratio      our decode tokens/s over those of a plain loop with transformers' dense KV cache,
           same model, batch and context, the two in turn, median of pairs
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    DynamicCache,
)
from transformers.utils.logging import disable_progress_bar

from benchmarks.engine_ours import Ours, open_ours
from benchmarks.report import Report, median
from lookonce.config import NANO_FOLDER

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 64
STEPS = 48
TURNS = 9


class _Theirs:
    """Transformers' text model in a loop over its dense cache: the least such a loop can do.

    It skips what `generate` and the multimodal wrapper do around the text model.
    """

    def __init__(self, folder: str) -> None:
        config = AutoConfig.from_pretrained(folder)
        disable_progress_bar()
        composite = config.get_text_config(decoder=True) is not config
        auto = AutoModelForMultimodalLM if composite else AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self._model = model.eval()
        text = config.get_text_config(decoder=True)
        rope = getattr(text, "rope_parameters", None) or {}
        self._axes = 3 if "mrope_section" in rope else 1
        self._vocab_size = text.vocab_size
        self._cache = DynamicCache(config=text)
        self._length = 0

    @torch.inference_mode()
    def decode(self, batch: int, prompt_tokens: int, steps: int) -> float:
        """CPU seconds of one decode step, on average over `steps` after a prefill."""
        self._cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        self._length = 0
        token = self._forward(torch.randint(20, self._vocab_size, (batch, prompt_tokens)))
        cpu = time.process_time()
        for _ in range(steps):
            token = self._forward(token)
            token.tolist()  # a server reads every token
        return (time.process_time() - cpu) / steps

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        end = self._length + ids.shape[1]
        positions = torch.arange(self._length, end).expand(ids.shape[0], -1)
        self._length = end
        if self._axes > 1:
            positions = positions.expand(self._axes, -1, -1)
        output = self._model.get_decoder()(
            inputs_embeds=self._model.get_input_embeddings()(ids),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        logits = self._model.get_output_embeddings()(output.last_hidden_state[:, -1])
        token: torch.Tensor = logits.argmax(-1, keepdim=True)
        return token


async def measure(folder: str, batches: Sequence[int], turns: int) -> Report:
    """One row per batch size."""
    torch.set_num_threads(1)
    times = ("model ms", "own CPU ms", "engine ms", "client ms")
    columns = ("batch", *times, "our tok/s", "HF tok/s", "ratio")
    report = Report(
        "engine",
        columns,
        notes=[
            f"CPU time of all threads; {STEPS} decode steps of ours and of theirs in turn after "
            f"{PROMPT_TOKENS} prompt tokens, medians of {turns} turns, fp32, one torch thread",
            "own: all but the model, in the engine process and in its client, ZMQ between them",
        ],
    )
    theirs = _Theirs(folder)
    async with open_ours(folder, max(batches)) as ours:
        for batch in batches:
            await _turn(ours, theirs, batch)
            rows = [await _turn(ours, theirs, batch) for _ in range(turns)]
            report.add(batch, *(median(column) for column in zip(*rows, strict=True)))
    return report


_Row = tuple[float, float, float, float, float, float, float]


async def _turn(ours: Ours, theirs: _Theirs, batch: int) -> _Row:
    """Model, own, engine and client ms, our and their tokens per second, and their ratio."""
    turn = await ours.decode(batch, PROMPT_TOKENS, STEPS)
    their_seconds = theirs.decode(batch, PROMPT_TOKENS, STEPS)
    own = turn.engine + turn.client
    ours_rate, their_rate = batch / (turn.model + own), batch / their_seconds
    ms = (turn.model * 1e3, own * 1e3, turn.engine * 1e3, turn.client * 1e3)
    return (*ms, ours_rate, their_rate, ours_rate / their_rate)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lookonce bench engine", description=__doc__)
    parser.add_argument("--model", default=str(NANO_FOLDER), help="folder; default: nano")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    report = asyncio.run(measure(options.model, options.batches, options.turns))
    report.show()
    if options.json is not None:
        report.write_json(options.json)
    return 0
