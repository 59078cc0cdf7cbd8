"""Qwen2-VL to Qwen3.5: pictures of any size, between the template's vision start and end; films.

`QwenImages` is shared by every family with this image processor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from PIL import Image

from lookonce.errors import ModelLoadError, UnprocessableMediaError
from lookonce.render.families.arrays import (
    ArrayMemory,
    Arrays,
    PixelTable,
    check_arrays,
    int64_array,
    patch_grid,
    refuse_arrays,
    resized,
)
from lookonce.render.families.base import (
    MAX_SIDE_RATIO,
    Decoded,
    Options,
    ProcessorFamily,
    bad_option,
    token_id,
)
from lookonce.render.families.film import OPTION_NAMES as FILM_OPTIONS
from lookonce.render.families.film import FilmInfo, FilmLayout, QwenFilms
from lookonce.render.families.processor_files import Json, ProcessorFiles, image_processor
from lookonce.types.media import Expansion, Modality, ProcessedItem

OPTION_NAMES = ("min_pixels", "max_pixels", "size")
DEFAULT_MIN_PIXELS, DEFAULT_MAX_PIXELS = 56 * 56, 28 * 28 * 1280


class Qwen2_5VLProcessing(ProcessorFamily):  # noqa: N801
    model_types: ClassVar[tuple[str, ...]] = (
        "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
    )  # fmt: skip
    modalities: tuple[Modality, ...] = ("image", "video")

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        token = token_id(files.config, "image_token_id")
        self.images = QwenImages(files.image_processor, token, dtype, self.memory)
        self.films: QwenFilms | None = None
        if isinstance(files.config.get("video_token_id"), int):
            self.films = self._films(files, dtype)
        else:
            self.modalities = ("image",)

    def _films(self, files: ProcessorFiles, dtype: str) -> QwenFilms:
        vision = files.config.get("vision_config") or {}
        kind = str(files.config.get("model_type"))
        names = ("vision_start_token_id", "vision_end_token_id")
        return QwenFilms(
            files.video_processor,
            token_id(files.config, "video_token_id"),
            dtype,
            self.memory,
            rule="qwen2" if kind == "qwen2_vl" else "qwen2_5" if kind == "qwen2_5_vl" else "qwen3",
            around=(token_id(files.config, names[0]), token_id(files.config, names[1])),
            tokens_per_second=float(vision.get("tokens_per_second", 4)),
        )

    def placeholder_token_id(self, modality: Modality) -> int:
        if modality == "video" and self.films is not None:
            return self.films.token_id
        return self.images.token_id

    def option_names(self) -> tuple[str, ...]:
        return (*OPTION_NAMES, *FILM_OPTIONS) if "video" in self.modalities else OPTION_NAMES

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options:
        if modality == "video" and self.films is not None:
            return self.films.options(kwargs)
        return self.images.options(kwargs)

    def film_layout(self, info: FilmInfo, options: Options, most_frames: int) -> FilmLayout:
        if self.films is None:
            return super().film_layout(info, options, most_frames)
        return self.films.layout(info, options, most_frames)

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        return self.images.expansion(size[0], size[1], options)

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        if modality == "video" and self.films is not None:
            return self.films.expansion_of_arrays(arrays)
        return self.images.expansion_of_arrays(arrays)

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        return None if modality == "video" else self.images.largest_size(max_tokens)

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        if isinstance(decoded, tuple):
            assert self.films is not None
            return self.films.process(decoded, options)
        assert isinstance(decoded, Image.Image)
        return self.images.process(decoded, options)


class QwenImages:
    """Qwen2-VL's image processor: keeps the aspect ratio, between `min_pixels` and `max_pixels`."""

    def __init__(
        self, config: Json, token_id: int, dtype: str, memory: ArrayMemory | None = None
    ) -> None:
        """`config` is the image processor's; `token_id` the placeholder's."""
        self._memory = memory
        size = config.get("size") or {}
        self.min_pixels = int(
            config.get("min_pixels") or size.get("shortest_edge") or DEFAULT_MIN_PIXELS
        )
        self.max_pixels = int(
            config.get("max_pixels") or size.get("longest_edge") or DEFAULT_MAX_PIXELS
        )
        self.patch = int(config.get("patch_size", 14))
        self.merge = int(config.get("merge_size", 2))
        self.frames = int(config.get("temporal_patch_size", 2))
        self.token_id = token_id
        self._config = config
        self._dtype = dtype

    @cached_property
    def _processor(self) -> Any:
        processor = image_processor(self._config, "Qwen2VLImageProcessor")
        size = processor.size
        if not processor.do_resize or (size.shortest_edge, size.longest_edge) != (
            self.min_pixels,
            self.max_pixels,
        ):
            raise ModelLoadError("preprocessor_config.json has sizes this family does not know")
        return processor

    @cached_property
    def _table(self) -> PixelTable:
        return PixelTable(self._processor, self._dtype, self._memory)

    def options(self, kwargs: Mapping[str, object]) -> Options:
        """The pixel bounds if they differ from the folder's. Raises `BadRequestError`."""
        size = kwargs.get("size")
        size = {} if size is None else size
        if not isinstance(size, Mapping) or not size.keys() <= {"shortest_edge", "longest_edge"}:
            raise bad_option("size", "size must hold shortest_edge and longest_edge, in pixels")
        low = _bound("min_pixels", kwargs, size.get("shortest_edge"), self.min_pixels)
        high = _bound("max_pixels", kwargs, size.get("longest_edge"), self.max_pixels)
        if not low <= high <= self.max_pixels:
            raise bad_option(
                "max_pixels",
                f"max_pixels must be from min_pixels, which is {low}, to {self.max_pixels}",
            )
        if (low, high) == (self.min_pixels, self.max_pixels):
            return {}
        return {"min_pixels": low, "max_pixels": high}

    def expansion(self, width: int, height: int, options: Options) -> Expansion:
        """One token per merge x merge patches."""
        columns, rows = (side // self._factor for side in self._target(width, height, options))
        return self._expansion(rows, columns)

    def _expansion(self, rows: int, columns: int) -> Expansion:
        return Expansion(
            runs=((self.token_id, rows * columns),),
            embed_token_id=self.token_id,
            grid=(1, rows, columns),
        )

    def expansion_of_arrays(self, arrays: Arrays) -> Expansion:
        """See `ProcessorFamily.expansion_of_arrays`. The grid decides positions."""
        values = 3 * self.frames * self.patch**2
        expected = {
            "pixel_values": (self._dtype, (None, values)),
            "image_grid_thw": ("int64", (3,)),
        }
        check_arrays(arrays, expected)
        rows, columns = patch_grid(arrays, "pixel_values", "image_grid_thw", merge=self.merge)
        # A picture may exceed max_pixels: the shorter side of a thin one is rounded up to a whole
        # patch, and both sides of one that is enlarged to min_pixels, which may be max_pixels.
        limit = enlarged_at_most(self.max_pixels, self._factor)
        if rows * columns * self.patch**2 > limit:
            raise refuse_arrays(f"the picture has more than {limit} pixels")
        return self._expansion(rows // self.merge, columns // self.merge)

    def largest_size(self, max_tokens: int) -> tuple[int, int] | None:
        """Of squares and 2:1 pictures, the size with the most tokens, at most `max_tokens`."""
        most = min(max_tokens, self.max_pixels // self._factor**2)
        found: dict[int, tuple[int, int]] = {}
        for shape in (1, 2):
            side = math.isqrt(max(0, most // shape)) * self._factor
            size = (side * shape, side)
            if side:
                found[self.expansion(*size, {}).length] = size
        fitting = [length for length in found if length <= max_tokens]
        return found[max(fitting)] if fitting else None

    def process(self, image: Image.Image, options: Options) -> ProcessedItem:
        """`pixel_values` [patches, patch values] and `image_grid_thw` [3], in patches."""
        width, height = self._target(*image.size, options)
        pixels = resized(image, width, height, self._processor.resample)
        patches = self._table.patches(pixels, self.patch, self.merge, self.frames)
        grid = int64_array(1, height // self.patch, width // self.patch)
        return ProcessedItem(
            modality="image",
            arrays={"pixel_values": patches, "image_grid_thw": grid},
            expansion=self.expansion(*image.size, options),
        )

    @property
    def _factor(self) -> int:
        return self.patch * self.merge

    def _target(self, width: int, height: int, options: Options) -> tuple[int, int]:
        low, high = (options.get(n, getattr(self, n)) for n in ("min_pixels", "max_pixels"))
        assert isinstance(low, int)
        assert isinstance(high, int)
        return smart_size(width, height, self._factor, low, high)


def smart_size(
    width: int, height: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Qwen's `smart_resize`: the nearest multiples of `factor` within the pixel bounds."""
    if max(width, height) > MAX_SIDE_RATIO * min(width, height):
        raise UnprocessableMediaError("the image is too thin for this model")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        scale = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_width, new_height


def enlarged_at_most(pixels: int, factor: int) -> int:
    """No less than the pixels of any result of `smart_size` whose bounds are so many or fewer."""
    return pixels + 2 * factor * (math.isqrt(MAX_SIDE_RATIO * pixels) + 1) + factor**2


def _bound(name: str, kwargs: Mapping[str, object], edge: object, default: int) -> int:
    """Pixels, from the option `name` or an edge of `size`. Raises `BadRequestError`."""
    given: list[int] = []
    for value in (kwargs.get(name), edge):
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad_option(name, f"{name} must be a positive integer, as an edge of size too")
        given.append(value)
    if len(set(given)) > 1:
        raise bad_option(name, f"{name} and size contradict each other")
    return given[0] if given else default
