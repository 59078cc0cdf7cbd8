"""Every counter of media, against what was seen to happen: at the decoders, at a web server, on the
channel and in the receipts, while mixed requests come side by side.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from lookonce.ipc.messages import ResendMedia
from lookonce.types.sampling import SamplingParams
from tests.support.drawing import audio_part, image_part, text_part
from tests.support.model.cases import picture, sound
from tests.support.nodes import Node, engine_node, run
from tests.support.nodes import cache_type as cache_type
from tests.support.render.counted import counts_of
from tests.support.render.origin import Answer, Origin, origin
from tests.support.server.media import chat, encoded, frontend, inject

pytestmark = pytest.mark.usefixtures("cache_type")

KIND = "qwen2_5_omni"
INLINE = [*(image_part(picture(n)) for n in range(5)), *(audio_part(sound(n)) for n in range(3))]
NUM_ROUNDS, SIDE_BY_SIDE = 14, 4
BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

BROKEN_DATA = encoded(BROKEN)[1]


@dataclass
class Seen:
    """What happened, as seen from outside the code that counts it."""

    parts: int = 0
    """In requests whose rendering resolved."""
    brought: int = 0
    """Injected items that were not there, stored or not."""
    asked: int = 0
    """Items the engine asked for."""
    receipts: list[dict] = field(default_factory=list)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(i["processor"] for r in self.receipts for i in r["items"])

    @property
    def encoder(self) -> Counter[str]:
        return Counter(i["encoder"] for r in self.receipts for i in r["items"])


def watch_asks(node: Node, seen: Seen) -> None:
    assert node.engine is not None
    received = node.engine.received

    def spy(message):
        seen.asked += len(message.keys) if isinstance(message, ResendMedia) else 0
        received(message)

    node.engine.received = spy  # type: ignore[method-assign]


def remote(web: Origin) -> list[dict]:
    """Parts that name the first picture and the first sound by URL."""
    return [
        {"type": "image_url", "image_url": {"url": web.url("/picture")}},
        {"type": "audio_url", "audio_url": {"url": web.url("/sound")}},
    ]


async def one_request(node: Node, rng: random.Random, parts: list[dict], seen: Seen) -> None:
    chosen = [rng.choice(parts) for _ in range(rng.randint(1, 3))]
    match rng.choice(["served", "served", "served", "too long", "broken", "inject"]):
        case "served":
            await served(node, asked(rng, chosen), seen)
        case "too long":  # refused, but only once it is rendered
            body = asked(rng, chosen, max_tokens=1_000_000)
            assert (await node.post("/v1/chat/completions", body)).status_code == 400
            seen.parts += len(chosen)
        case "broken":
            answer = await node.post("/v1/chat/completions", asked(rng, [BROKEN]))
            assert answer.status_code == 422
        case "inject":
            await injected(node, rng.choice(INLINE), seen)


async def served(node: Node, body: dict, seen: Seen) -> None:
    receipt = (await node.ok("/v1/chat/completions", body))["reuse_receipt"]
    seen.receipts.append(receipt)
    seen.parts += len(receipt["items"])


async def injected(node: Node, part: dict, seen: Seen) -> None:
    ((status, _),) = await inject(node, await frontend(node, part))
    seen.parts += 1
    seen.brought += status != "already_held"


def asked(rng: random.Random, parts: list[dict], **fields: object) -> dict:
    question = text_part(f"question {rng.randint(0, 2)}")
    return chat(*parts, question, reuse_receipt=True, **fields)


@pytest.mark.parametrize(("seed", "cache_gb"), [(1, 0.05), (2, 5.5e-4)])
def test_every_counter_equals_what_was_seen(folder, seed, cache_gb):
    """With room for everything, and with room for about two items."""

    async def whole():
        options = {
            "allow_injection": True,
            "allow_private_media": True,
            "limit_mm_per_prompt": "image=3,audio=3",
        }
        fresh = {"Cache-Control": "max-age=60"}
        answers = {
            "/picture": Answer(encoded(INLINE[0])[1], headers=fresh),
            "/sound": Answer(encoded(INLINE[5])[1], headers=fresh),
        }
        async with (
            origin(answers) as web,
            engine_node(folder(KIND), mm_processor_cache_gb=cache_gb, **options) as node,
        ):
            seen, rng = Seen(), random.Random(seed)
            watch_asks(node, seen)
            parts = [*INLINE, *remote(web)]
            await injected(node, INLINE[4], seen)
            await served(node, asked(rng, [INLINE[4]]), seen)
            for _ in range(NUM_ROUNDS):
                group = [one_request(node, rng, parts, seen) for _ in range(SIDE_BY_SIDE)]
                await asyncio.gather(*group)
            await check(node, web, seen)

    run(whole())


async def check(node: Node, web: Origin, seen: Seen) -> None:
    counts = counts_of(node.services.renderer)
    engine = await node.engine.stats()
    taken = Counter(job.modality for job in node.pool.jobs)
    made = Counter(job.modality for job in node.pool.jobs if job.data != BROKEN_DATA)
    queries, hits = node.counts
    assert queries == seen.parts
    assert hits == seen.parts - made.total() - seen.brought
    for modality in ("image", "audio"):
        assert counts[f"media_queued_total:{modality}"] == taken[modality]
        assert counts[f"media_decodes_total:{modality}"] == made[modality]
        assert counts[f"media_processed_total:{modality}"] == made[modality]
    paths = Counter(request.path for request in web.requests)
    assert counts["media_fetches_total:image"] == paths["/picture"] == 1
    assert counts["media_fetches_total:audio"] == paths["/sound"] == 1
    assert node.engine.sender.asks + node.engine.sender.resends == seen.asked
    assert node.engine.sender.resends == 0
    assert engine["encoder_runs_total"] == seen.encoder["miss"]
    assert engine["prefix_cache_queries_total"] == total(seen, "prompt_tokens")
    assert engine["prefix_cache_hits_total"] == total(seen, "prefix_cached_tokens")
    assert engine["mm_store_listed_bytes"] == node.engine.directory.nbytes
    assert {"hit", "miss", "injected"} <= seen.outcomes.keys()


def total(seen: Seen, name: str) -> int:
    return sum(receipt[name] for receipt in seen.receipts)


def test_a_receipt_says_what_was_counted_also_after_a_resend(folder):
    """A picture is counted as held; a reset takes it before its request is sent."""

    async def whole():
        async with engine_node(folder(KIND)) as node:
            body = chat(INLINE[0], text_part("question"))
            await node.ok("/v1/chat/completions", body)
            await node.engine.reset_cache("encoder")
            await node.engine.reset_cache("prefix")
            queries, hits = node.counts
            prompt = await node.services.renderer.render_chat(body["messages"])
            await node.engine.reset_cache("mm")
            generation = await node.engine.generate(prompt, SamplingParams(max_tokens=1), "r")
            async for _ in generation:
                pass
            assert node.engine.sender.resends == 1
            assert node.counts == (queries + 1, hits + 1)
            assert [(item.outcome, item.decode_ms) for item in prompt.items] == [("hit", 0.0)]

    run(whole())
