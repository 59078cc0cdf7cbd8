"""`lookonce bench known`: the first token of prompts whose K/V are all cached, by their length.

Text prompts of a chat, and a picture of 2048 x 2048 pixels, by its bytes and by its `uuid` alone.
Each was asked before, so its prefix is cached up to the last full block, and nothing of it is
tokenized, hashed, decoded or encoded again. One request at a time, over HTTP, all lengths in turn;
medians.

first      from sending the request to its first token
HTTP       receiving and parsing the body, detokenizing, writing the event: the rest of the first
template   the chat template           tokenize   text to token ids
render     the rest of rendering: media found again, placeholders expanded
link       submission to first delta, without what the engine does: messages, wake-ups
take in    the engine's validation     hash       block hashes, looked up or computed
schedule   plan and update             forward    the model on the last tokens, over all K/V

The model has 8 million random parameters and a context of 131,072 tokens (Qwen2.5-VL); nano, whose
context is short, is beside it. Its K/V are not computed (`known_processes`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.known_processes import Stopwatches
from benchmarks.pictures import data_url, encoded_picture
from benchmarks.report import Report, median, publish
from benchmarks.running_server import RunningServer, running_command
from lookonce.config import NANO_FOLDER
from lookonce.errors import UnavailableError
from tests.support.model_folders.make import make_folder

TOKENS = (12, 2_000, 5_300, 11_000, 30_000, 100_000)
CONTEXT = 131_072
PIXELS = 2048 * 2048
BLOCK, COMPUTED = 16, 9
"""Tokens of a KV block; tokens of each prompt after its last full block, which are computed."""
REPEATS = 15
Parts = dict[str, float]
"""Part → milliseconds; "first" is the whole."""
TEXT = (
    "What is in this picture There is a red circle to the left of a blue square How many triangles "
    "do you see Listen to the sound which word was spoken and which picture came first"
)
API_PARTS = ("HTTP", "template", "tokenize", "render", "link")
ENGINE_PARTS = ("take in", "hash", "schedule", "forward")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lookonce bench known",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--scale", default="8m", help="of the random model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = long_model(Path(folder) / "model", options.scale)
        reports = measure("known", model, options.tokens, options.repeats, picture=True)
        fitting = [tokens for tokens in options.tokens if tokens < 4000]
        if fitting:
            reports += measure("known, nano", NANO_FOLDER, fitting, options.repeats, picture=False)
    publish(reports, options.json)
    return 0


def long_model(folder: Path, scale: str) -> Path:
    """A random Qwen2.5-VL folder with a long context, which keeps 2048 x 2048 pixels whole."""
    make_folder("qwen2_5_vl", folder, scale=scale)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor["size"]["longest_edge"] = PIXELS
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def measure(
    name: str, model: Path, lengths: Sequence[int], repeats: int, *, picture: bool
) -> list[Report]:
    """One row per prompt."""
    with tempfile.TemporaryDirectory() as scratch:
        parts = Path(scratch) / "parts"
        watches = Stopwatches.create(parts)
        settings = {"model": str(model), "kv_cache_gb": 2.0}
        serve = ["-m", "benchmarks.known_processes", "serve", str(parts), json.dumps(settings)]
        with running_command(serve) as server:
            asker = Asker(server, watches)
            prompts = [asker.text_prompt(length) for length in sorted(lengths)]
            if picture:
                prompts += asker.picture_prompts()
            for prompt in prompts:
                asker.learn(prompt)
            found: dict[str, list[Parts]] = {prompt.name: [] for prompt in prompts}
            for _ in range(repeats):
                for prompt in prompts:
                    found[prompt.name].append(asker.ask(prompt))
    return _reports(name, prompts, found, repeats)


def _reports(
    name: str, prompts: Sequence[Prompt], found: Mapping[str, Sequence[Parts]], repeats: int
) -> list[Report]:
    whole = Report(name, ("prompt", "tokens", "computed", "first ms", "to shortest"))
    api = Report(f"{name}: API process and link, ms", ("prompt", *API_PARTS))
    engine = Report(f"{name}: engine process, ms", ("prompt", *ENGINE_PARTS))
    shortest = median([parts["first"] for parts in found[prompts[0].name]])
    for prompt in prompts:
        taken = found[prompt.name]
        first = median([parts["first"] for parts in taken])
        computed = prompt.num_tokens - prompt.num_cached
        whole.add(prompt.name, prompt.num_tokens, computed, first, first / shortest)
        for report, names in ((api, API_PARTS), (engine, ENGINE_PARTS)):
            report.add(prompt.name, *(median([parts[part] for parts in taken]) for part in names))
    whole.notes.append(f"medians of {repeats} requests, one at a time, the prompts in turn")
    return [whole, api, engine]


class Prompt:
    """One prompt that is asked again and again, as a request's body."""

    def __init__(self, name: str, content: object) -> None:
        self.name = name
        self.messages = [{"role": "user", "content": content}]
        self.num_tokens = self.num_cached = 0
        fields = {"temperature": 0, "max_tokens": 1, "stream": True}
        usage = {"stream_options": {"include_usage": True}}
        self.body = json.dumps({"messages": self.messages, **fields, **usage}).encode()


class Asker:
    """Asks over one connection, and reads the parts' stopwatches."""

    def __init__(self, server: RunningServer, watches: Stopwatches) -> None:
        self._http = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=600)
        self._watches = watches

    def text_prompt(self, num_tokens: int) -> Prompt:
        """A chat of about `num_tokens`, of which `COMPUTED` are beyond the last full block."""
        chosen = random.Random(num_tokens)
        known = TEXT.split()
        words = [chosen.choice(known) for _ in range(num_tokens)]
        low, high = 1, num_tokens
        while low < high:
            middle = (low + high + 1) // 2
            few = self._count(words[:middle]) <= num_tokens
            low, high = (middle, high) if few else (low, middle - 1)
        words = words[:low]
        for _ in range(10 * BLOCK):
            if self._count(words) % BLOCK == COMPUTED:
                break
            words.append("a" if self._count([*words, "a"]) else "")
        return Prompt(f"text, {num_tokens:,}", " ".join(words))

    def picture_prompts(self) -> list[Prompt]:
        image = data_url(encoded_picture("2048", "JPEG"))
        question = {"type": "text", "text": "What is in this picture?"}
        named = {"type": "image_url", "uuid": "known"}
        whole = {**named, "image_url": {"url": image}}
        return [
            Prompt("2048 px, its bytes", [whole, question]),
            Prompt("2048 px, its uuid", [named, question]),
        ]

    def learn(self, prompt: Prompt) -> None:
        """Ask until the prefix is cached. Raises `UnavailableError` where it is not."""
        self._first_token(prompt.body)
        usage = self._first_token(prompt.body)[1]
        prompt.num_tokens = usage["prompt_tokens"]
        prompt.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        if prompt.num_cached < (prompt.num_tokens - 1) // BLOCK * BLOCK:
            raise UnavailableError(f"{prompt.name}: only {prompt.num_cached} tokens are cached")

    def ask(self, prompt: Prompt) -> Parts:
        """Milliseconds to the first token and of each part."""
        before = self._watches.read()
        first, _ = self._first_token(prompt.body)
        after = self._watches.read()
        spent = {part: 1e3 * (after[part] - before[part]) for part in after}
        figures = {part: spent[part] for part in ("template", "tokenize", *ENGINE_PARTS)}
        figures["first"] = 1e3 * first
        figures["render"] = spent["render"] - spent["template"] - spent["tokenize"]
        figures["link"] = spent["engine"] - sum(spent[part] for part in ENGINE_PARTS)
        figures["HTTP"] = 1e3 * first - spent["render"] - spent["engine"]
        return figures

    def _first_token(self, body: bytes) -> tuple[float, dict[str, Any]]:
        """Seconds to the first token, and the usage."""
        started, first = time.perf_counter(), 0.0
        usage: dict[str, Any] = {}
        self._http.request("POST", "/v1/chat/completions", body)
        response = self._http.getresponse()
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            choices = event.get("choices")
            if not first and choices and choices[0].get("finish_reason"):
                first = time.perf_counter() - started  # the only token's event is the last
            usage = event.get("usage") or usage
        response.read()
        if response.status != 200:
            raise UnavailableError(f"the server answered {response.status}")
        return first, usage

    def _count(self, words: Sequence[str]) -> int:
        """Tokens of the chat with these words."""
        messages = [{"role": "user", "content": " ".join(words)}]
        self._http.request("POST", "/tokenize", json.dumps({"messages": messages}).encode())
        return int(json.loads(self._http.getresponse().read())["count"])
