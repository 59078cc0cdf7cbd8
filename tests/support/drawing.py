"""Pictures and sounds that nano knows, as the content parts that clients send."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

Shape = tuple[str, str]
"""(colour, shape), e.g. ("red", "circle")."""

SAMPLE_RATE = 16_000


def picture(*shapes: Shape, background: str = "white", side: int = 84) -> Image.Image:
    """The shapes side by side, each in a field of `side` pixels."""
    image = Image.new("RGB", (side * len(shapes), side), background)
    draw = ImageDraw.Draw(image)
    for number, (colour, shape) in enumerate(shapes):
        left, top, size = number * side + 12, 12, side - 24
        box = (left, top, left + size, top + size)
        match shape:
            case "circle":
                draw.ellipse(box, fill=colour)
            case "square":
                draw.rectangle(box, fill=colour)
            case "triangle":
                draw.polygon(
                    [(left + size / 2, top), (left + size, top + size), (left, top + size)],
                    fill=colour,
                )
            case _:
                raise ValueError(shape)
    return image


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def image_part(image: Image.Image, kind: str = "PNG") -> dict[str, Any]:
    data = base64.b64encode(encoded(image, kind)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind.lower()};base64,{data}"}}


def tone(start_hz: float, end_hz: float, seconds: float = 1.0) -> np.ndarray:
    """A sine that glides from one pitch to another, float32 in [-1, 1]."""
    count = int(seconds * SAMPLE_RATE)
    pitch = start_hz * (end_hz / start_hz) ** (np.arange(count) / count)
    sound = np.sin(2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE) * 0.7
    fade = np.linspace(0, 1, 160)
    sound[:160] *= fade
    sound[-160:] *= fade[::-1]
    return sound.astype(np.float32)


def beeps(count: int, hz: float = 900) -> np.ndarray:
    silence = np.zeros(SAMPLE_RATE * 15 // 100, np.float32)
    return np.concatenate([np.concatenate([tone(hz, hz, 0.15), silence]) for _ in range(count)])


def wav(sound: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((sound * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def audio_part(sound: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(wav(sound)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def ask(*parts: Any) -> list[dict[str, Any]]:
    """One user message of pictures, sounds and texts."""
    content = []
    for part in parts:
        match part:
            case str():
                content.append(text_part(part))
            case Image.Image():
                content.append(image_part(part))
            case np.ndarray():
                content.append(audio_part(part))
            case _:
                content.append(part)
    return [{"role": "user", "content": content}]
