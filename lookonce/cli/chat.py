"""`lookonce chat`: prints one answer as it is generated, without a server."""

from __future__ import annotations

import base64
import dataclasses
import mimetypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lookonce.cli.preflight import check_machine
from lookonce.cli.serve import LoadingBar
from lookonce.config import Options, resolve
from lookonce.errors import BadRequestError, ConfigError
from lookonce.types.sampling import SamplingParams

if TYPE_CHECKING:
    from lookonce.llm import LLM


@dataclass(frozen=True, slots=True)
class Question:
    """The command line. None for `max_tokens` or `temperature` is the model's default."""

    text: str
    images: tuple[Path, ...] = ()
    sounds: tuple[Path, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None


def run_chat(question: Question, options: Options) -> None:
    """Raises `ConfigError` before the model loads for a file that cannot be read, or an option that
    is out of range."""
    _check_sampling(question)
    _check_pictures(question.images)
    check_machine(resolve(options))
    messages = [{"role": "user", "content": _content(question)}]
    from lookonce.llm import LLM  # slow: what was typed is checked first

    typed = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    bar = LoadingBar(Console(stderr=True), options.model)
    with bar, LLM(**typed, on_loading=bar.update) as llm:
        bar.finish()
        for text in llm.stream_chat(messages, _sampling(question, llm)):
            sys.stdout.write(text)
            sys.stdout.flush()
    print()


def _check_sampling(question: Question) -> None:
    try:
        SamplingParams(**_asked_sampling(question))
    except BadRequestError as error:
        raise ConfigError(f"--{(error.param or '').replace('_', '-')}: {error.message}") from None


def _check_pictures(paths: tuple[Path, ...]) -> None:
    """Whether each is a picture, by its header. Raises `ConfigError`."""
    from PIL import Image, UnidentifiedImageError

    for path in paths:
        try:
            with Image.open(path):
                pass
        except UnidentifiedImageError:
            raise ConfigError(f"--image: {path} is not a picture") from None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--image: {path}: {reason}") from None


def _asked_sampling(question: Question) -> dict[str, Any]:
    asked = {"max_tokens": question.max_tokens, "temperature": question.temperature}
    return {name: value for name, value in asked.items() if value is not None}


def _sampling(question: Question, llm: LLM) -> SamplingParams:
    return llm.default_sampling_params(**_asked_sampling(question))


def _content(question: Question) -> list[dict[str, Any]]:
    """The message: media before the text, as in the training of most models."""
    pictures = [
        {"type": "image_url", "image_url": {"url": _data_url(path)}} for path in question.images
    ]
    sounds = [
        {"type": "audio_url", "audio_url": {"url": _data_url(path)}} for path in question.sounds
    ]
    return [*pictures, *sounds, {"type": "text", "text": question.text}]


def _data_url(path: Path) -> str:
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{data}"
