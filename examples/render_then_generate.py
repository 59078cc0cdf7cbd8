"""Two servers: one renders and has no weights, the other generates.

    lookonce render --port 8001
    lookonce serve  --port 8000
    python examples/render_then_generate.py --image picture.png --audio sound.wav "What is this?"

The render server fetches, tokenizes and places media; what it answers goes to the engine's server
as it is. Media travels encoded as it came, not as pixels: the engine's server checks its digest.
"""

from __future__ import annotations

import argparse
import base64
import json
import mimetypes
from pathlib import Path
from typing import Any

import httpx


def image_part(path: Path) -> dict[str, Any]:
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def audio_part(path: Path) -> dict[str, Any]:
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": path.suffix[1:]}}


def post(url: str, path: str, body: object) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.post(url + path, json=body, timeout=120).json()
    if "error" in answer:
        raise SystemExit(answer["error"]["message"])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question")
    parser.add_argument("--image", type=Path, action="append", default=[])
    parser.add_argument("--audio", type=Path, action="append", default=[])
    parser.add_argument("--render", default="http://127.0.0.1:8001", help="the render server")
    parser.add_argument("--engine", default="http://127.0.0.1:8000", help="the engine's server")
    asked = parser.parse_args()

    parts = [*map(image_part, asked.image), *map(audio_part, asked.audio)]
    content = [*parts, {"type": "text", "text": asked.question}]
    chat = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 40,
    }
    rendered = post(asked.render, "/v1/chat/completions/render", chat)
    answer = post(asked.engine, "/inference/v1/generate", rendered)
    token_ids = answer["choices"][0]["token_ids"]
    print(post(asked.engine, "/detokenize", {"tokens": token_ids})["prompt"])

    encoded = sum(len(base64.b64encode(p.read_bytes())) for p in (*asked.image, *asked.audio))
    media = len(json.dumps(rendered.get("features", {})))
    tokens = len(json.dumps(rendered["token_ids"]))
    print(f"  media: {media} bytes of the body, {encoded} as base64; token ids: {tokens} bytes")


if __name__ == "__main__":
    main()
