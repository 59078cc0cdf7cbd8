"""Mixed requests about a working set of media: some are refused, some disconnect early.

The pixels of a picture decide its true answer; a comment in the file makes its media hash unique.
So the working set can have any size, and every answer can be checked.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from PIL.PngImagePlugin import PngInfo

from tests.support.drawing import picture, text_part, tone, wav

COLOURS = ("red", "green", "blue", "purple", "orange")
SHAPES = ("circle", "square", "triangle")
ARTICLES = {"orange": "an orange"}

REFUSED = 0.05
LEAVING = 0.05
LEAVES_WITHIN = 0.15
"""Seconds: long enough for some requests to disconnect after their first words."""


@dataclass(frozen=True)
class Medium:
    """One item of the working set."""

    part: dict[str, Any]
    question: str
    answer: str


@dataclass
class PlannedRequest:
    """One request: its body, and the outcome that is expected."""

    body: dict[str, Any]
    answer: str | None
    """None for prompts with several media, of which only the status is checked."""
    refused: bool = False
    leaves_after: float | None = None

    @property
    def media(self) -> set[str]:
        """What names or holds its media: addresses, sounds and uuids."""
        found = set()
        for message in self.body["messages"]:
            parts = message["content"] if isinstance(message["content"], list) else []
            for part in parts:
                inner = part.get(part["type"])
                if isinstance(inner, dict):
                    found |= {str(inner[name]) for name in ("url", "data") if name in inner}
                found |= {str(part["uuid"])} if part.get("uuid") else set()
        return found


@dataclass
class Tally:
    """Counts of the requests' outcomes."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    """Bodies of answers with an unexpected status."""
    left: int = 0


def working_set(num_pictures: int, num_sounds: int) -> list[Medium]:
    return [*map(drawn, range(num_pictures)), *map(sounding, range(num_sounds))]


def drawn(number: int) -> Medium:
    """Picture `number`; its file differs from all others."""
    colour, shape = COLOURS[number % 5], SHAPES[number // 5 % 3]
    comment = PngInfo()
    comment.add_text("number", str(number))
    buffer = io.BytesIO()
    picture((colour, shape)).save(buffer, "PNG", pnginfo=comment)
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    answer = f"{ARTICLES.get(colour, 'a ' + colour)} {shape}"
    part = {"type": "image_url", "image_url": {"url": url}}
    return Medium(part, "What is in the picture?", answer)


def sounding(number: int) -> Medium:
    """Tone `number`, rising or falling."""
    low, high = 400 + 3 * number, 1400 + 3 * number
    rising = number % 2 == 0
    sound = tone(low, high) if rising else tone(high, low)
    data = base64.b64encode(wav(sound)).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return Medium(part, "Is the tone rising or falling?", "rising" if rising else "falling")


def plans(media: Sequence[Medium], count: int, seed: int) -> list[PlannedRequest]:
    """`count` requests. Some media are asked about often, most seldom; one in five has several."""
    rng = random.Random(seed)
    weights = [1 / (1 + rank) ** 0.7 for rank in range(len(media))]
    order = rng.sample(list(media), len(media))
    return [_plan(rng, order, weights) for _ in range(count)]


def _plan(rng: random.Random, media: Sequence[Medium], weights: Sequence[float]) -> PlannedRequest:
    chosen = rng.choices(media, weights, k=1 if rng.random() < 0.8 else rng.randint(2, 4))
    parts = [medium.part for medium in chosen]
    # With several media the question is new: the prefix of the prompt may be known, its end is not.
    question = chosen[0].question if len(chosen) == 1 else f"What is in picture {rng.random()}?"
    fate = rng.random()
    refused = fate < REFUSED
    body = {
        "model": "nano",
        "messages": [{"role": "user", "content": [*parts, text_part(question)]}],
        "temperature": 0,
        "max_tokens": 1_000_000 if refused else 8,
        "stream": rng.random() < 0.5,
    }
    leaves = rng.random() * LEAVES_WITHIN if REFUSED <= fate < REFUSED + LEAVING else None
    return PlannedRequest(body, chosen[0].answer if len(chosen) == 1 else None, refused, leaves)


async def drive(url: str, requests: Sequence[PlannedRequest], *, concurrency: int) -> Tally:
    """Send every request, at most `concurrency` at a time."""
    tally, queue = Tally(), iter(requests)
    limits = httpx.Limits(max_connections=concurrency)

    async def one_after_another(client: httpx.AsyncClient) -> None:
        for plan in queue:
            await _follow(client, plan, tally)

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(one_after_another(client) for _ in range(concurrency)))
    return tally


async def _follow(client: httpx.AsyncClient, plan: PlannedRequest, tally: Tally) -> None:
    try:
        async with asyncio.timeout(plan.leaves_after):
            response = await client.post("/v1/chat/completions", json=plan.body)
    except TimeoutError:
        tally.left += 1
        return
    tally.statuses[response.status_code] += 1
    if response.status_code != (400 if plan.refused else 200):
        tally.unexpected.append(response.text)
    if response.status_code == 200 and plan.answer is not None:
        said = _said(response.text, streamed=plan.body["stream"])
        if said != plan.answer:
            tally.wrong.append((said, plan.answer))


def _said(text: str, *, streamed: bool) -> str:
    if not streamed:
        return str(json.loads(text)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert not any("error" in event for event in events), text[-500:]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
