"""The interface of a family of models to the renderer: placeholders, options, processing.

A family is cheap to load: it reads JSON and imports neither torch nor transformers, so the API
process can hold one to compute identities and lengths. The Hugging Face processor behind it is
built by the first `process`, in a worker.
"""

from __future__ import annotations

import io
import wave
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from importlib.metadata import version
from typing import ClassVar

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image, features

from lookonce.config import MediaConfig
from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.render.families.arrays import ArrayMemory, Arrays, refuse_arrays
from lookonce.render.families.film import FilmInfo, FilmLayout
from lookonce.render.families.processor_files import Json, ProcessorFiles
from lookonce.types.media import Expansion, Modality, ProcessedItem

Options = dict[str, object]
Decoded = Image.Image | NDArray[np.float32] | tuple[Image.Image, ...]
"""An RGB picture, mono samples [n] at the family's `sampling_rate`, or the frames of one item of a
film."""
PIXEL_LIBRARIES = ("Pillow", "numpy", "transformers")
SOUND_LIBRARIES = ("numpy", "soundfile", "soxr", "transformers")
CODECS = ("jpg", "webp", "zlib", "libjpeg_turbo")
SOUND_OF_FILMS = ("use_audio_in_video", "load_audio_from_video")
"""Options of Omni's processors; false, their default, is taken by all."""
MAX_SIDE_RATIO = 200
"""Longest allowed side of a picture over its shorter side, as in Qwen's processor. Processors that
fix the shorter side would make a thinner picture huge."""


@dataclass(frozen=True, slots=True)
class PromptAdditions:
    """Texts that a model's processor adds to each prompt, whatever its chat template writes.

    `bos_token` and other roles of tokenizer_config.json stand for the texts of those tokens.
    """

    first: str = ""
    """At the beginning, unless the prompt begins with it."""
    after_items: str = ""
    """After the placeholder of the last item; without an item, at the beginning."""
    last: str = ""
    """At the end."""

    def __bool__(self) -> bool:
        return bool(self.first or self.after_items or self.last)

    def in_words(self, special_tokens: Mapping[str, str]) -> PromptAdditions:
        """The same with the tokens' texts; `special_tokens`: role → text."""
        roles = {"bos_token": special_tokens.get("eos_token", ""), **special_tokens}
        return PromptAdditions(*(roles.get(text) or text for text in astuple(self)))

    def complete(self, text: str, placeholders: Iterable[str]) -> str:
        """The prompt `text` with these texts."""
        if not text.startswith(self.first):
            text = self.first + text
        if self.after_items:
            ends = (text.rfind(each) + len(each) for each in placeholders if each in text)
            end = max(ends, default=0)
            text = text[:end] + self.after_items + text[end:]
        return text + self.last


NO_ADDITIONS = PromptAdditions()


class ProcessorFamily(ABC):
    """One loaded family. `dtype` is the model's; floating-point arrays of items have it."""

    model_types: ClassVar[tuple[str, ...]] = ()
    modalities: tuple[Modality, ...] = ()
    arithmetic: ClassVar[int] = 1
    """Version of this family's own code; increased when it makes other arrays."""
    encoder_decoder: ClassVar[bool] = False
    """Whether items have no place in a prompt (`families.speech`)."""
    max_items: int | None = None
    """Most items of one modality in a prompt; None: no limit of its own."""
    max_of: Mapping[Modality, int] = {}
    """The same for some modalities."""
    whole_prompt: tuple[int, ...] | None = None
    """Token ids of every prompt, where a model takes one sound and no text. Rows of the sound are
    added to these tokens and to those that are generated, from position 0 on."""
    item_alone: ClassVar[bool] = False
    """A prompt is one text, or one item and no text, without a chat template."""
    takes_arrays: ClassVar[bool] = True
    """Whether items that were processed elsewhere are taken (`expansion_of_arrays`)."""
    needs_torch: ClassVar[bool] = False
    """Whether `process` needs torch, which workers otherwise go without."""
    films_alone: bool = False
    """Whether a prompt has pictures or films, and not both."""
    sampling_rate: int = 0
    """Hz of the samples that `process` takes; 0 for families without sound."""
    film_resample: int = 3
    """Pillow's number of the filter that frames of files are resized with; 3 is bicubic."""
    max_audio_seconds: float = 0.0
    """Longest clip; the processor would cut a longer one without an error."""

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        self.files = files
        self.dtype = dtype
        self.memory = ArrayMemory()
        """Where `process` puts large arrays."""

    @abstractmethod
    def placeholder_token_id(self, modality: Modality) -> int:
        """The token that a chat template writes for one item; the item's expansion replaces it."""

    def text_around_placeholder(self, modality: Modality) -> tuple[str, str]:
        """Texts that the family adds before and after a placeholder.

        They are added to the rendered template before it is tokenized, because the tokenizer may
        merge them with neighbouring text, as it does for Hugging Face's processor.
        """
        return "", ""

    @property
    def additions(self) -> PromptAdditions:
        """Texts that the model's processor adds to each prompt."""
        return NO_ADDITIONS

    @property
    def default_template(self) -> str | None:
        """The chat template of a folder that has none."""
        return None

    @abstractmethod
    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """Run the processor on one item; `options` are from `item_options`.

        Takes tens of milliseconds: not for the event loop. Raises `UnprocessableMediaError`.
        """

    @abstractmethod
    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        """The expansion of an item of this size, without processing it.

        `size` is (width, height) of the upright picture, or (samples,) at `sampling_rate`.
        """

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        """The expansion of an item that was processed elsewhere. Floats have the model's dtype.

        Raises `BadRequestError` if `process` could not have made these names, dtypes and shapes, or
        the values that decide a shape.
        """
        raise refuse_arrays(f"this model does not take processed {modality} items")

    def check_processed(self, item: ProcessedItem) -> None:
        """Refuse what a media worker says that `process` has made and that it cannot have made: by
        names, dtypes and shapes of the arrays, the values that decide a shape, and the expansion.
        Floats are not read. Raises `LookOnceError`."""
        if self.expansion_of_arrays(item.modality, item.arrays) != item.expansion:
            raise refuse_arrays(f"the arrays of the {item.modality} have another expansion")

    def film_layout(self, info: FilmInfo, options: Options, most_frames: int) -> FilmLayout:
        """What a film's placeholder becomes; `options` are `item_options` of "video".

        At most `most_frames` frames are taken. Raises a `RequestError` that names no part.
        """
        raise BadRequestError("the model takes no films")

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        """The size (see `expansion_of_size`) of the item with the largest placeholder of at most
        `max_tokens`; None if the smallest item has more."""
        return None

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options:
        """The options for one modality out of a request's `mm_processor_kwargs`, checked.

        Equal processing has equal options: they are part of the item's identity. They may narrow
        the folder's limits but not widen them, or a 1x1 picture could become gigabytes. Raises
        `BadRequestError`.
        """
        return {}

    def options_beside(self, modality: Modality, modalities: Collection[Modality]) -> Options:
        """More options of an item in a prompt that has media of all these modalities."""
        return {}

    def check_options(self, kwargs: Mapping[str, object]) -> None:
        """Refuse a request's `mm_processor_kwargs`. Raises `BadRequestError`."""
        known = self.option_names()
        for name in kwargs:
            if name in SOUND_OF_FILMS and kwargs[name] is True:
                raise bad_option(
                    name, "the sound of films is not heard: send it beside the film, as a sound"
                )
            if name not in known and name not in SOUND_OF_FILMS:
                allowed = ", ".join(known) or "none for this model"
                raise BadRequestError(
                    f"mm_processor_kwargs: {name[:40]!r} is not supported; allowed: {allowed}",
                    param=f"mm_processor_kwargs.{name[:40]}",
                )
        for modality in self.modalities:
            self.item_options(modality, kwargs)

    def option_names(self) -> tuple[str, ...]:
        return ()

    def fingerprint(self) -> bytes:
        """32 bytes; other ones whenever `process` might make other arrays of the same media."""
        sound = SOUND_LIBRARIES if "audio" in self.modalities else ()
        libraries = sorted({*PIXEL_LIBRARIES, *sound})
        described = {
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "arithmetic": self.arithmetic,
            "config": self.files.described(),
            "dtype": self.dtype,
            "backend": "pil",
            "libraries": {name: version(name) for name in libraries},
            "codecs": {name: str(features.version(name)) for name in CODECS},
        }
        return blake3(msgspec.json.encode(described, order="deterministic")).digest()


def token_id(config: Json, *names: str) -> int:
    """The first of `names` that the model's config has. Raises `ModelLoadError` if it has none."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int):
            return value
    raise ModelLoadError(f"config.json has no {names[0]}")


def bad_option(name: str, message: str) -> BadRequestError:
    return BadRequestError(f"mm_processor_kwargs: {message}", param=f"mm_processor_kwargs.{name}")


def longest_edge(kwargs: Mapping[str, object], least: int, most: int) -> Options:
    """The option `size.longest_edge`, in pixels; empty if it is `most`, the folder's value.

    Raises `BadRequestError` unless it is a whole number from `least` to `most`.
    """
    size = kwargs.get("size")
    if size is None:
        return {}
    edge = size.get("longest_edge") if isinstance(size, Mapping) and len(size) == 1 else None
    if type(edge) is not int or not least <= edge <= most:
        raise bad_option("size", f"size must hold longest_edge, a number from {least} to {most}")
    return {} if edge == most else {"longest_edge": edge}


@dataclass(frozen=True, slots=True)
class LargestItem:
    """The item with the largest placeholder that the limits allow; warm-up uses it."""

    modality: Modality
    size: tuple[int, ...]
    """(width, height) of a picture; (samples,) of a sound at `sampling_rate`."""
    sampling_rate: int = 0

    def decoded(self) -> Decoded:
        """A grey picture, or a quiet tone: some processors are faster with silence."""
        if self.modality == "image":
            return Image.new("RGB", (self.size[0], self.size[1]), (127, 127, 127))
        time = np.arange(self.size[0]) / self.sampling_rate
        return (0.1 * np.sin(2 * np.pi * 220.0 * time)).astype(np.float32)

    def encoded(self) -> bytes:
        """The same as a PNG or WAV file."""
        target, decoded = io.BytesIO(), self.decoded()
        if isinstance(decoded, Image.Image):
            decoded.save(target, "PNG", compress_level=1)
            return target.getvalue()
        assert isinstance(decoded, np.ndarray)
        with wave.open(target, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(self.sampling_rate)
            file.writeframes((decoded * 32767).astype("<i2").tobytes())
        return target.getvalue()


def largest_media(
    family: ProcessorFamily, media: MediaConfig, max_tokens: int
) -> Iterator[LargestItem]:
    """The largest item of each modality with a limit above 0, of at most `max_tokens`.

    A modality whose smallest item has more tokens is left out.
    """
    for modality in family.modalities:
        if media.limit_per_prompt.get(modality, 0) > 0:
            size = _largest_size(family, media, modality, max_tokens)
            if size is not None:
                yield LargestItem(modality, size, family.sampling_rate)


def _largest_size(
    family: ProcessorFamily, media: MediaConfig, modality: Modality, max_tokens: int
) -> tuple[int, ...] | None:
    size = family.largest_size(modality, max_tokens)
    if modality == "audio":
        longest = int(media.max_audio_seconds * family.sampling_rate)
        return None if size is None else (min(size[0], longest),)
    while size is not None and size[0] * size[1] > media.max_image_pixels:
        num_tokens = family.expansion_of_size(modality, size, {}).length
        size = family.largest_size(modality, num_tokens // 2) if num_tokens > 1 else None
    return size
