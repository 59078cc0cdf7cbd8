"""Chats with media, and injected media that a client processed itself, for tests of the routes."""

from __future__ import annotations

import base64

from lookonce import media_hash
from lookonce.render.media.external_items import encode_kwargs
from lookonce.render.media.processing import MediaJob
from tests.support.drawing import text_part
from tests.support.nodes import Node

MEDIA_CACHE_ROUTE = "/inference/v1/media_cache"


def chat(*parts, **fields):
    """A chat body whose one message is `parts` and a question; its answer has a reuse receipt."""
    return {
        "messages": [{"role": "user", "content": [*parts, text_part(" What?")]}],
        "temperature": 0,
        "max_tokens": 4,
        "reuse_receipt": True,
        **fields,
    }


def processors(answer) -> list[str]:
    """What the processor cache did for each item of the answer: hit, miss and so on."""
    return [item["processor"] for item in answer["reuse_receipt"]["items"]]


def encoded(part) -> tuple[str, bytes]:
    """Modality and file bytes of a content part."""
    if part["type"] == "input_audio":
        return "audio", base64.b64decode(part["input_audio"]["data"])
    return "image", base64.b64decode(part["image_url"]["url"].partition(",")[2])


async def frontend(node: Node, part, *, key: str | None = None) -> tuple[str, str, str]:
    """What a frontend makes by itself: modality, public name and arrays."""
    modality, data = encoded(part)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    facts = (await node.http.get(MEDIA_CACHE_ROUTE, headers=headers)).json()
    name = media_hash(
        data,
        modality=modality,
        fingerprint=bytes.fromhex(facts["fingerprint"]),
        algorithm=facts["algorithm"],
    ).hex()
    return modality, name, encode_kwargs(node.pool.processing.run(MediaJob(modality, data)).item)


async def inject(node: Node, *items, key: str | None = None, salt: str | None = None):
    """The outcomes of `(modality, name, data)` items, in order: `(status, reason)`."""
    body = {"mm_hashes": {}, "kwargs_data": {}, "cache_salt": salt}
    for modality, name, data in items:
        body["mm_hashes"].setdefault(modality, []).append(name)
        body["kwargs_data"].setdefault(modality, []).append(data)
    answer = await node.ok(MEDIA_CACHE_ROUTE, body, key=key)
    listed = [outcome for modality in body["mm_hashes"] for outcome in answer["items"][modality]]
    return [(outcome["status"], outcome["reason"]) for outcome in listed]
