"""What a rendered prompt refers to: its exact tokens, and the keys of its media.

The chain is that of `identity`, over token ids in place of text:

    ids  [ 0:32) [32:64) … [1024:1152) … [8192:8704) …     cut at fixed positions, which lie
         └────── text ─────┘└── medium ──┘└─ text ──        closer together at the beginning

A medium is one piece, known by its key. Two prompts that begin alike have the same digests up to
the last cut before they differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from blake3 import blake3

from lookonce.fleet.identity import Identity, Medium, Piece, Processor, session_digest
from lookonce.fleet.index import short
from lookonce.types.lora import adapted_item_key
from lookonce.types.request import RenderedPrompt

CUTS = ((1024, 32), (8192, 128))
"""(position, tokens of a piece before it)."""
LAST_CUT = 512


def identify_prompt(
    prompt: RenderedPrompt,
    processor: Processor,
    *,
    model: str,
    max_tokens: int | None = None,
    session: str | None = None,
) -> Identity:
    """`model`: as the request names it, an adapter too; `prompt` has its scope and tenant."""
    modalities = [feature.modality for feature in prompt.features]
    adapter = processor.adapter_of(model, modalities)
    encoder_digest = b"" if adapter is None else adapter.encoder_digest
    media = []
    for item in prompt.items:
        output = short(adapted_item_key(encoder_digest, item.key)) if encoder_digest else None
        bare = item.encoded is None and item.recover is None
        media.append(
            Medium(
                item.modality,
                short(item.key),
                exact=True,
                output=output,
                bare=bare,
                num_bytes=0 if item.encoded is None else len(item.encoded),
            )
        )
    pieces = list(_pieces(prompt, b"tokens" + str(processor.model).encode()))
    if adapter is not None:
        salt = short(adapter.digest)
        pieces = [msgspec.structs.replace(each, digest=each.digest ^ salt) for each in pieces]
    return Identity(
        model,
        tuple(media),
        tuple(pieces),
        max_tokens,
        session_digest(prompt.scope, session) if session else None,
        encoder_digest=encoder_digest,
        tenant=prompt.tenant,
    )


def _pieces(prompt: RenderedPrompt, root: bytes) -> Iterator[Piece]:
    state = blake3(prompt.scope + root).digest()
    for begin, end, medium in _stretches(prompt):
        if medium is None:
            content = prompt.ids[begin:end].tobytes()
        else:
            content = b"media" + prompt.features[medium].key
        state = blake3(state + content).digest()
        yield Piece(short(state), 0, medium, end - begin)


def _stretches(prompt: RenderedPrompt) -> Iterator[tuple[int, int, int | None]]:
    """`(begin, end, medium)` of every piece: its tokens, and the number of its medium."""
    at = 0
    for number, feature in enumerate(prompt.features):
        yield from _cut(at, feature.offset)
        yield feature.offset, feature.end, number
        at = feature.end
    yield from _cut(at, prompt.num_tokens)


def _cut(begin: int, end: int) -> Iterator[tuple[int, int, None]]:
    while begin < end:
        size = next((size for until, size in CUTS if begin < until), LAST_CUT)
        cut = min(end, (begin // size + 1) * size)
        yield begin, cut, None
        begin = cut
