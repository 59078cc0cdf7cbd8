"""Films of random frames, and what transformers gets of them, without anything of ours.

transformers' video processors need torchvision. What they do beside sampling is written down here a
second time, over its picture processors: each frame alone, resized beforehand where the size of a
frame depends on the film; then the two frames of a temporal patch are put together.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer

from tests.support.render import hugging_face

Json = dict[str, Any]
WIDTH, HEIGHT = 90, 60
VIDEO_TYPES = (
    *("exaone4_5", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "lfm3_vl"),
    *("llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "perception_lm"),
    *("video_llama_3", "video_llava"),
)
"""Types without a family of their own whose films go through transformers' video processor."""
OMNI = "qwen3_omni_moe_thinker"


@cache
def frame(number: int, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """A picture as PNG; every number has another one."""
    random = np.random.default_rng(number)
    coarse = Image.fromarray(random.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG", compress_level=1)
    return file.getvalue()


def listed(frames: Sequence[bytes]) -> str:
    """A data URL of frames, as vLLM takes them."""
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(each).decode() for each in frames)


def film_part(numbers: Sequence[int], fps: float | None = None) -> Json:
    """The part of a message with these frames."""
    url: Json = {"url": listed([frame(number) for number in numbers])}
    return {"type": "video_url", "video_url": url if fps is None else {**url, "fps": fps}}


def gif(numbers: Sequence[int], milliseconds: int = 500) -> bytes:
    pictures = [Image.open(io.BytesIO(frame(number))).convert("P") for number in numbers]
    file = io.BytesIO()
    pictures[0].save(
        file, "GIF", save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0
    )
    return file.getvalue()


def gif_part(data: bytes) -> Json:
    url = "data:image/gif;base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def file_part(data: bytes) -> Json:
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def encoded_film(
    numbers: Sequence[int], *, rate=8, gop=4, container="mp4", codec="mpeg4", frames=True
) -> bytes:
    """A file of the frames with these numbers, or of sound alone; PyAV has to be installed."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        if frames:
            stream = out.add_stream(codec, rate=rate)
            stream.width, stream.height, stream.pix_fmt = WIDTH + 6, HEIGHT + 4, "yuv420p"
            stream.codec_context.gop_size = gop
            out.start_encoding()
            for number in numbers:
                picture = Image.open(io.BytesIO(frame(number, WIDTH + 6, HEIGHT + 4)))
                out.mux(stream.encode(av.VideoFrame.from_image(picture)))
            out.mux(stream.encode())
        else:
            sound = out.add_stream("aac", rate=16000)
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), "fltp", "mono")
            samples.sample_rate = 16000
            out.mux(sound.encode(samples))
            out.mux(sound.encode())
    return file.getvalue()


def film_reference(
    folder: Path, before: str, numbers: Sequence[int], after: str, fps: float = 1.0
) -> dict[str, torch.Tensor]:
    """Arguments of `generate` for one user message: text, a film, text."""
    kind = hugging_face.model_type(folder)
    pictures = [Image.open(io.BytesIO(frame(number))).convert("RGB") for number in numbers]
    if kind == "internvl":
        return _internvl(folder, before, pictures, after)
    if kind in VIDEO_TYPES:
        return _by_processor(folder, before, pictures, after, fps)
    return _qwen(folder, kind, before, pictures, after, fps)


def _by_processor(
    folder: Path, before: str, pictures: list[Image.Image], after: str, fps: float
) -> dict[str, torch.Tensor]:
    """As transformers' whole processor has it, with torchvision."""
    metadata = {
        "total_num_frames": len(pictures),
        "fps": fps,
        "frames_indices": list(range(len(pictures))),
        "width": WIDTH,
        "height": HEIGHT,
    }
    asked = hugging_face.model_type(folder) in hugging_face.ASKED_FOR_KINDS
    kinds = {"return_mm_token_type_ids": True} if asked else {}
    found = AutoProcessor.from_pretrained(folder)(
        text=[_text(folder, before, after)],
        videos=[np.stack([np.asarray(picture) for picture in pictures])],
        video_metadata=[metadata],
        do_sample_frames=False,
        add_special_tokens=False,
        return_tensors="pt",
        **kinds,
    )
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _text(folder: Path, before: str, after: str) -> str:
    content = [{"type": "text", "text": before}, {"type": "video"}, {"type": "text", "text": after}]
    return hugging_face.template_text(folder, [{"role": "user", "content": content}])


def _internvl(
    folder: Path, before: str, pictures: list[Image.Image], after: str
) -> dict[str, torch.Tensor]:
    """As `InternVLProcessor.replace_video_token` writes it."""
    each = "<img>" + "<IMG_CONTEXT>" * 4 + "</img>"
    written = "\n".join(f"Frame{number + 1}: {each}" for number in range(len(pictures)))
    ids = AutoTokenizer.from_pretrained(folder)(
        _text(folder, before, after).replace("<video>", written), return_tensors="pt"
    )
    pixels = hugging_face.image_processor(folder)(
        images=pictures, crop_to_patches=False, return_tensors="pt"
    )["pixel_values"]
    return {"input_ids": ids["input_ids"], "pixel_values": pixels}


def _qwen(
    folder: Path, kind: str, before: str, pictures: list[Image.Image], after: str, fps: float
) -> dict[str, torch.Tensor]:
    config = AutoConfig.from_pretrained(folder)
    patches, (rows, columns) = _pairs(folder, kind, pictures)
    count = len(patches)
    merged = rows * columns // 4
    text = _text(folder, before, after)
    pad = "<|video_pad|>"
    if kind.startswith(("qwen3_vl", "qwen3_5")):
        times = [number / fps for number in range(len(pictures))]
        times += times[-1:] * (len(times) % 2)
        written = "".join(
            f"<{(times[2 * n] + times[2 * n + 1]) / 2:.1f} seconds><|vision_start|>{pad * merged}"
            "<|vision_end|>"
            for n in range(count)
        )
        text = text.replace(f"<|vision_start|>{pad}<|vision_end|>", written)
    else:
        text = text.replace(pad, pad * merged * count)
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    found = {
        "input_ids": ids,
        "pixel_values_videos": torch.from_numpy(np.concatenate(patches)),
        "video_grid_thw": torch.tensor([[count, rows, columns]]),
        "mm_token_type_ids": 2 * (ids == config.video_token_id).int(),
    }
    if kind == "qwen2_5_vl":
        found["second_per_grid_ts"] = torch.tensor([2 / fps])
    if kind == OMNI:
        del found["mm_token_type_ids"]
        found["video_second_per_grid"] = torch.tensor([2 / fps])
        found["attention_mask"] = torch.ones_like(ids)
    return found


def _pairs(
    folder: Path, kind: str, pictures: list[Image.Image]
) -> tuple[list[np.ndarray], tuple[int, int]]:
    """The patches of each pair of frames, and rows and columns of patches."""
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    options: Json = {}
    if kind == OMNI:  # what its processor says, whatever the folder has
        options["size"] = {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2}
    if kind.startswith(("qwen3_vl", "qwen3_5")):
        theirs = hugging_face.video_rules("qwen3_vl")
        width, height = pictures[0].size
        size = processor.size
        new_height, new_width = theirs.smart_resize(
            len(pictures),
            height,
            width,
            factor=processor.patch_size * processor.merge_size,
            min_pixels=size.shortest_edge,
            max_pixels=size.longest_edge,
        )
        shape = (new_width, new_height)
        pictures = [each.resize(shape, Image.Resampling.BICUBIC) for each in pictures]
        options["do_resize"] = False
    alone = [processor(images=[each], return_tensors="np", **options) for each in pictures]
    alone += alone[-1:] * (len(alone) % 2)
    _, rows, columns = alone[0]["image_grid_thw"][0].tolist()
    area = processor.patch_size**2
    split = [each["pixel_values"].reshape(-1, 3, 2, area) for each in alone]
    pairs = [
        np.stack([first[:, :, 0], second[:, :, 0]], axis=2).reshape(len(first), -1)
        for first, second in zip(split[::2], split[1::2], strict=True)
    ]
    return pairs, (rows, columns)
