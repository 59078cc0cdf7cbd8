"""A frontend that runs Hugging Face's processor itself and hands the result to the engine.

    lookonce serve MODEL                                    (nano by default)
    python examples/external_frontend.py MODEL picture.png "What is in the picture?" "And now?"

MODEL is a folder of a Qwen2-VL-like model, as nano's. The picture is processed once, here, and
injected under a name of our choice; each question then travels as token ids with that name alone.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer


class ExternalFrontend:
    """Prompts of one model, made without LookOnce."""

    def __init__(self, folder: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        config = AutoConfig.from_pretrained(folder)
        self._placeholder = getattr(config, "image_token_id", None) or config.image_token_index

    def process(self, picture: Path) -> dict[str, np.ndarray]:
        """What the model gets of one picture: `pixel_values` and `image_grid_thw`, unbatched."""
        made = self._processor(images=[Image.open(picture)], return_tensors="np")
        return {
            "pixel_values": made["pixel_values"],
            "image_grid_thw": made["image_grid_thw"][0],
        }

    def prompt(self, question: str, grid: np.ndarray) -> tuple[list[int], int, int]:
        """Token ids with the placeholder expanded, and where it lies: offset and length."""
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        offset = ids.index(self._placeholder)
        length = int(grid.prod()) // self._processor.merge_size**2
        ids[offset : offset + 1] = [self._placeholder] * length
        return ids, offset, length

    def text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def packed(arrays: dict[str, np.ndarray]) -> str:
    """`kwargs_data`: base64 of msgpack with raw little-endian arrays."""
    wire = {
        name: {
            "dtype": array.dtype.name,
            "shape": array.shape,
            "data": np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes(),
        }
        for name, array in arrays.items()
    }
    return base64.b64encode(msgspec.msgpack.encode(wire)).decode()


def inject(server: httpx.Client, name: str, arrays: dict[str, np.ndarray]) -> str:
    """What became of the item: `stored` or `already_held`."""
    body = {"mm_hashes": {"image": [name]}, "kwargs_data": {"image": [packed(arrays)]}}
    answer = server.post("/inference/v1/media_cache", json=body).raise_for_status().json()
    outcome = answer["items"]["image"][0]
    if outcome["status"] == "rejected":
        raise SystemExit(f"the server rejects the item: {outcome['reason']}")
    return str(outcome["status"])


def generate(
    server: httpx.Client, name: str, token_ids: list[int], offset: int, length: int
) -> dict[str, Any]:
    body = {
        "token_ids": token_ids,
        "features": {
            "mm_hashes": {"image": [name]},
            "mm_placeholders": {"image": [{"offset": offset, "length": length}]},
        },
        "sampling_params": {"temperature": 0, "max_tokens": 40},
        "reuse_receipt": True,
    }
    answer: dict[str, Any] = server.post("/inference/v1/generate", json=body).json()
    if "error" in answer:
        raise SystemExit(answer["error"]["message"])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="the folder the server serves")
    parser.add_argument("picture", type=Path)
    parser.add_argument("question", nargs="+")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    asked = parser.parse_args()

    frontend = ExternalFrontend(asked.model)
    arrays = frontend.process(asked.picture)
    name = "sha256:" + hashlib.sha256(asked.picture.read_bytes()).hexdigest()
    with httpx.Client(base_url=asked.server, timeout=120) as server:
        print(f"{asked.picture.name}: {inject(server, name, arrays)}")
        for question in asked.question:
            prompt = frontend.prompt(question, arrays["image_grid_thw"])
            answer = generate(server, name, *prompt)
            (item,) = answer["reuse_receipt"]["items"]
            print(f"{question} {frontend.text(answer['choices'][0]['token_ids'])}")
            print(f"  processor {item['processor']}, encoder {item['encoder']}")


if __name__ == "__main__":
    main()
