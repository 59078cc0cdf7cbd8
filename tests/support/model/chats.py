"""Chats as a client sends them, picture and sound as bytes: ours rendered, Hugging Face's beside.

Both start from the same PNG and WAV bytes and the folder's own chat template. Ours go through the
renderer; Hugging Face's through `apply_chat_template` of the full processor.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from PIL import Image

from lookonce.cache.directory import Directory
from lookonce.cache.identity import UuidBindings
from lookonce.config import MediaConfig
from lookonce.render.families.base import ProcessorFamily
from lookonce.render.families.registry import load_family
from lookonce.render.media.processing import MediaJob, Processed, Processing, ProcessingSettings
from lookonce.render.media.resolver import MediaResolver
from lookonce.render.prompt.encoder import PromptEncoder, template_sources
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.render.renderer import Renderer
from lookonce.types.ports import ClaimsItems
from lookonce.types.request import RenderedPrompt
from tests.support.model.cases import Case
from tests.support.model_folders.make import GENERAL_MEDIA_KINDS
from tests.support.render import hugging_face
from tests.support.render.doubles import FakeLoader

Json = dict[str, Any]
Part = str | Image.Image | np.ndarray


class PoolInProcess:
    """Processes right here, with the real code of a worker."""

    def __init__(self, folder: Path) -> None:
        settings = ProcessingSettings(str(folder), "float32", 1 << 20, 60.0)
        self.processing = Processing(settings)

    @property
    def family(self) -> ProcessorFamily:
        return self.processing.family

    async def run(self, job: MediaJob) -> Processed:
        return self.processing.run(job)

    def counts(self) -> dict[str, float]:
        return {}


def make_renderer(
    folder: Path,
    pool: PoolInProcess | None = None,
    media: MediaConfig | None = None,
    claims: ClaimsItems | None = None,
) -> Renderer:
    tokenizer = Tokenizer.load(folder)
    family = load_family(folder, "float32")
    resolver = family and MediaResolver(
        family=family,
        directory=Directory(1 << 24),
        uuids=UuidBindings(),
        loader=FakeLoader({}),
        pool=pool or PoolInProcess(folder),
        max_bytes=1 << 24,
        claims=claims,
    )
    return Renderer(
        encoder=PromptEncoder(tokenizer, template_sources(folder, tokenizer), family),
        family=family,
        resolver=resolver,
        limits={"image": 4, "audio": 4, "video": 4},
        media=media or MediaConfig(),
    )


def chat_case(folder: Path, parts: Sequence[Part], pool: PoolInProcess | None = None) -> Case:
    """One user message of `parts`, rendered by us; the reference is Hugging Face's alone."""
    prompt = render(folder, parts, pool)
    items = {item.key: item.item for item in prompt.items if item.item is not None}
    token_ids = np.array(prompt.token_ids, np.int32)
    return Case(token_ids, prompt.features, items, reference(folder, parts))


def render(
    folder: Path, parts: Sequence[Part], pool: PoolInProcess | None = None
) -> RenderedPrompt:
    return render_content(folder, [sent_part(part) for part in parts], pool)


def render_content(
    folder: Path, content: list[Json], pool: PoolInProcess | None = None, **options: Any
) -> RenderedPrompt:
    """One user message of parts as a client sends them."""
    message = {"role": "user", "content": content}
    return asyncio.run(make_renderer(folder, pool).render_chat([message], **options))


def reference(folder: Path, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    """Arguments of `generate`, without anything of ours."""
    conversation = [{"role": "user", "content": [_hugging_face_part(part) for part in parts]}]
    kind = hugging_face.model_type(folder)
    if kind in (*hugging_face.PROCESSORS, *GENERAL_MEDIA_KINDS):
        return hugging_face.chat_inputs(folder, conversation)
    if kind == "voxtral_realtime":
        return hugging_face.realtime_inputs(folder, [_decoded(part) for part in parts])
    if kind == "voxtral":
        return _voxtral_reference(folder, parts, conversation)
    return hugging_face.text_inputs(folder, "".join(map(str, parts)))


def _voxtral_reference(
    folder: Path, parts: Sequence[Part], conversation: list[Json]
) -> dict[str, torch.Tensor]:
    """`[BEGIN_AUDIO]` and a token for every 8 frames of the padded sound, as mistral_common has it:
    that library and its tokenizer are not at hand, so its rule is written down here."""
    waves = [_decoded(part) for part in parts if isinstance(part, np.ndarray)]
    features = [hugging_face.voxtral_features(folder, wave) for wave in waves]
    text = hugging_face.template_text(folder, conversation)
    for chunks in features:
        num_tokens = chunks.shape[0] * chunks.shape[2] // 8
        text = text.replace("[BEGIN_AUDIO][AUDIO]", "[BEGIN_AUDIO]" + "\0" * num_tokens, 1)
    inputs = hugging_face.encoded(folder, text.replace("\0", "[AUDIO]"))
    if features:
        inputs["input_features"] = torch.from_numpy(np.concatenate(features))
    return inputs


def sent_part(part: Part) -> Json:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = base64.b64encode(_encoded(part)).decode()
    if isinstance(part, np.ndarray):
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _hugging_face_part(part: Part) -> Json:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, np.ndarray):
        return {"type": "audio", "audio": _decoded(part)}
    return {"type": "image", "image": Image.open(io.BytesIO(_encoded(part)))}


def _encoded(part: Image.Image | np.ndarray) -> bytes:
    file = io.BytesIO()
    if isinstance(part, np.ndarray):
        soundfile.write(file, part, 16000, format="WAV", subtype="PCM_16")
    else:
        part.save(file, "PNG")
    return file.getvalue()


def _decoded(wave: np.ndarray) -> np.ndarray:
    """What is left of a wave in 16 bits."""
    return soundfile.read(io.BytesIO(_encoded(wave)), dtype="float32")[0]
