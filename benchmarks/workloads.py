"""The workloads of the load generator: request bodies, made before any clock starts.

text      a new question each, of about as many words as asked for
same      a new question each, about one picture
new       a new question each, about a new picture
folder    the prompts of a folder, in turn
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.pictures import SIZES, data_url, distinct_pictures
from lookonce.errors import ConfigError

Json = dict[str, Any]
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png")
QUESTION = "what is in this picture and how many red circles do you see to the left of it"


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The shape of every request of a workload."""

    model: str
    output_tokens: int = 32
    prompt_words: int = 16
    pictures: int = 1
    picture: str = "1024 JPEG"
    """A size of `pictures.SIZES` and a file format."""
    first: int = 0
    """Number of the first question and picture. Other numbers give other questions and pictures,
    so that a server can be measured again without knowing them."""
    body: Json = field(default_factory=dict)
    """Further fields of the body; they replace ours of the same name."""

    def __post_init__(self) -> None:
        size, _, file_format = self.picture.partition(" ")
        if size not in SIZES or file_format not in ("JPEG", "PNG"):
            raise ConfigError(f"--picture is one of {', '.join(SIZES)}, then JPEG or PNG")

    def request(self, content: object) -> bytes:
        """The body of a streamed, greedy request for exactly `output_tokens`."""
        return json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": self.output_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.body,
            }
        ).encode()

    def question(self, number: int) -> str:
        """Question `number`. It begins with its number, so no two questions share a prefix."""
        words = itertools.chain([f"{self.first + number}:"], itertools.cycle(QUESTION.split()))
        return " ".join(itertools.islice(words, self.prompt_words))

    def new_pictures(self, count: int, first: int) -> list[bytes]:
        size, _, file_format = self.picture.partition(" ")
        return distinct_pictures(count, size, file_format, first=self.first + first)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    warm_up: list[bytes]
    bodies: list[bytes]


def text(shape: RequestShape, count: int, warm_up: int) -> Workload:
    bodies = [shape.request(shape.question(number)) for number in range(count + warm_up)]
    return Workload("text", bodies[count:], bodies[:count])


def same(shape: RequestShape, count: int, warm_up: int) -> Workload:
    """Every request is about the same pictures; the warm-up shows them to the server."""
    urls = [data_url(picture) for picture in shape.new_pictures(shape.pictures, 1_000_000)]
    bodies = [_about(shape, urls, number) for number in range(count + max(1, warm_up))]
    return Workload("same", bodies[count:], bodies[:count])


def new(shape: RequestShape, count: int, warm_up: int) -> Workload:
    pictures = shape.new_pictures((count + warm_up) * shape.pictures, 0)
    urls = [data_url(picture) for picture in pictures]
    starts = range(0, len(urls) + 1, shape.pictures)
    bodies = [
        _about(shape, urls[start:end], number)
        for number, (start, end) in enumerate(itertools.pairwise(starts))
    ]
    return Workload("new", bodies[count:], bodies[:count])


def _about(shape: RequestShape, urls: Sequence[str], number: int) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return shape.request([*parts, {"type": "text", "text": shape.question(number)}])


WORKLOADS: dict[str, Callable[[RequestShape, int, int], Workload]] = {
    "text": text,
    "same": same,
    "new": new,
}


def folder(shape: RequestShape, path: Path, count: int, warm_up: int) -> Workload:
    """The prompts of a folder, repeated as often as needed. Raises `ConfigError`.

    NAME.json   a whole body, or the list of its messages; its fields replace ours
    NAME.txt    a question; about the picture NAME.jpg, .jpeg or .png where there is one
    """
    files = sorted(file for file in path.glob("*") if file.suffix in (".json", ".txt"))
    if not files:
        raise ConfigError(f"--prompts: {path} has neither .json nor .txt files")
    prompts = [_prompt(shape, file) for file in files]
    bodies = [prompts[number % len(prompts)] for number in range(count)]
    return Workload(path.name, bodies[:warm_up], bodies)


def _prompt(shape: RequestShape, file: Path) -> bytes:
    if file.suffix == ".txt":
        return shape.request(_content(file))
    try:
        given = msgspec.json.decode(file.read_bytes(), type=list[Json] | Json)
    except msgspec.MsgspecError:
        raise ConfigError(f"--prompts: {file} is neither messages nor a body") from None
    own = json.loads(shape.request(""))
    fields = {"messages": given} if isinstance(given, list) else given
    return json.dumps({**own, **fields}).encode()


def _content(file: Path) -> list[Json]:
    parts: list[Json] = [{"type": "text", "text": file.read_text(encoding="utf-8")}]
    for suffix in PICTURE_SUFFIXES:
        picture = file.with_suffix(suffix)
        if picture.is_file():
            url = data_url(picture.read_bytes())
            return [{"type": "image_url", "image_url": {"url": url}}, *parts]
    return parts
