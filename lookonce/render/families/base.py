"""What the renderer must know about a family of models: placeholders, options, processing.

A family is cheap to load: it reads JSON and imports neither torch nor transformers, so the API
process can hold one to name identities and lengths. The Hugging Face processor behind it is built
on the first `process`, which runs in a worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.metadata import version
from typing import ClassVar

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image, features

from lookonce.errors import BadRequestError, ModelLoadError
from lookonce.render.families.external_arrays import Arrays, refuse_arrays
from lookonce.render.families.folder import FolderFiles, Json
from lookonce.types.media import Expansion, Modality, ProcessedItem

Options = dict[str, object]
Decoded = Image.Image | NDArray[np.float32]
"""An RGB picture, or mono samples [n] at the family's `sampling_rate`."""

PIXEL_LIBRARIES = ("Pillow", "numpy", "transformers")
SOUND_LIBRARIES = ("numpy", "soundfile", "soxr", "transformers")
CODECS = ("jpg", "webp", "zlib", "libjpeg_turbo")


class ProcessorFamily(ABC):
    """One loaded family. `dtype` is the model's: floating arrays of items are cast to it."""

    model_types: ClassVar[tuple[str, ...]] = ()
    modalities: ClassVar[tuple[Modality, ...]] = ()
    arithmetic: ClassVar[int] = 1
    """Counts changes of our own code that change the arrays of an item."""
    sampling_rate: int = 0
    """Hz of the samples `process` wants; 0 for families without sound."""
    max_audio_seconds: float = 0.0
    """What the processor takes at most; a longer clip would silently lose its end."""

    def __init__(self, files: FolderFiles, dtype: str) -> None:
        self.files = files
        self.dtype = dtype

    @abstractmethod
    def placeholder_token_id(self, modality: Modality) -> int:
        """The token that a chat template emits for one item, which its expansion replaces."""

    def surroundings(self, modality: Modality) -> tuple[str, str]:
        """Text the family wants before and after a placeholder.

        It is added to the rendered template before tokenizing, never as ids of its own: a tokenizer
        may merge it with the text beside it, as it does for Hugging Face's processor.
        """
        return "", ""

    @abstractmethod
    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """Run the processor on one item; `options` are those of `item_options`.

        Slow (tens of milliseconds) and not for the event loop. Raises `UnprocessableMediaError`.
        """

    @abstractmethod
    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        """The expansion of an item known only by its size, without processing it.

        `size` is (width, height) of the upright picture, or (samples,) at `sampling_rate`.
        """

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        """The expansion of an item that was processed elsewhere, known only by its arrays.

        Floats are of the model's dtype. Raises `BadRequestError` for arrays, by name, dtype, shape
        or content that decides a shape, that `process` could not have made.
        """
        raise refuse_arrays(f"this model does not take processed {modality} items")

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        """The size, as `expansion_of_size` takes it, of the item with the largest placeholder of
        at most `max_tokens`; None when even the smallest has more."""
        return None

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options:
        """What of a request's `mm_processor_kwargs` concerns one modality, checked and canonical.

        Equal options mean equal processing, so they belong into the item's identity.
        """
        return {}

    def check_options(self, kwargs: Mapping[str, object]) -> None:
        """Refuse a request's `mm_processor_kwargs`. Raises `BadRequestError`."""
        known = self.option_names()
        for name in kwargs:
            if name not in known:
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
        """32 bytes that change when anything changes what `process` makes of equal bytes."""
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
    """The first of `names` in the model's config. Raises `ModelLoadError` when there is none."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int):
            return value
    raise ModelLoadError(f"config.json has no {names[0]}")
