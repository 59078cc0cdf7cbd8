"""Idefics3 and SmolVLM: a picture is cut into square tiles; a small copy of the whole is added.

    picture ─▶ longest edge as the folder says ─▶ sides rounded up to tiles ─▶ rows x columns tiles
                                                        └▶ one tile of the whole

In the prompt every tile is named by its row and column, and each row ends with a newline. A picture
that fits into one tile is not cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from blake3 import blake3
from PIL import Image

from lookonce.errors import ModelLoadError
from lookonce.render.families.arrays import (
    STORAGE,
    Arrays,
    Levels,
    PixelTable,
    check_arrays,
    int64_array,
    int64_values,
    refuse_arrays,
    stored_array,
)
from lookonce.render.families.base import (
    Decoded,
    Options,
    ProcessorFamily,
    bad_option,
    longest_edge,
    token_id,
)
from lookonce.render.families.processor_files import (
    ProcessorFiles,
    ProcessorTokenizer,
    image_processor,
)
from lookonce.types.media import Array, Expansion, Modality, ProcessedItem

MAX_SIDE = 4096
"""Longest side that transformers' processor makes."""
AROUND, IMAGE, WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"


class Idefics3Processing(ProcessorFamily):
    model_types = ("idefics3", "smolvlm")
    modalities = ("image",)

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        self._tokenizer = ProcessorTokenizer(files)
        self._token = token_id(files.config, "image_token_id")
        if self._tokenizer.token(IMAGE) != self._token:
            raise ModelLoadError(f"image_token_id of config.json is not the id of {IMAGE}")
        config = files.image_processor
        self._tile = int((config.get("max_image_size") or {}).get("longest_edge", 364))
        self._longest = int((config.get("size") or {}).get("longest_edge", 4 * 364))
        self._cuts = config.get("do_image_splitting", True)
        self._tokens_per_tile = int(files.processor.get("image_seq_len") or self._num_tile_tokens())

    def _num_tile_tokens(self) -> int:
        """Tokens of a tile: its patches after the model's connector."""
        vision = self.files.config.get("vision_config") or {}
        patches = int(vision.get("image_size", 364)) // int(vision.get("patch_size", 14))
        return int(patches**2 / int(self.files.config.get("scale_factor", 2)) ** 2)

    def placeholder_token_id(self, modality: Modality) -> int:
        return self._token

    def fingerprint(self) -> bytes:
        return blake3(super().fingerprint() + self._tokenizer.digest).digest()

    def option_names(self) -> tuple[str, ...]:
        return ("size", "do_image_splitting")

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options:
        cuts = kwargs.get("do_image_splitting", self._cuts)
        if not isinstance(cuts, bool):
            raise bad_option("do_image_splitting", "do_image_splitting must be true or false")
        chosen = {} if cuts == self._cuts else {"do_image_splitting": cuts}
        return {**longest_edge(kwargs, self._tile, self._longest), **chosen}

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        return self._expansion(*self._grid(size[0], size[1], options))

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        tiles = (None, 3, self._tile, self._tile)
        expected = {
            "pixel_values": (self.dtype, tiles),
            "rows": ("int64", (1,)),
            "cols": ("int64", (1,)),
        }
        check_arrays(arrays, expected)
        (rows,), (columns,) = int64_values(arrays["rows"]), int64_values(arrays["cols"])
        num_tiles, most = arrays["pixel_values"].shape[0], self._most_tiles
        cut = 0 < rows <= most and 0 < columns <= most and rows * columns > 1
        if num_tiles != rows * columns + 1 or not (cut or rows == columns == 0):
            raise refuse_arrays(
                f"rows and cols must be 1 to {most} and say how the picture was cut into "
                f"{num_tiles} tiles, the whole one among them; or both 0 for one tile"
            )
        return self._expansion(rows, columns)

    def largest_size(self, modality: Modality, max_tokens: int) -> tuple[int, ...] | None:
        """The largest of the widest pictures with 1 to as many rows of tiles as columns."""
        columns = self._most_tiles
        sizes = [(columns * self._tile, rows * self._tile) for rows in range(1, columns + 1)]
        lengths = {self.expansion_of_size(modality, size, {}).length: size for size in sizes}
        fitting = [length for length in lengths if length <= max_tokens]
        return lengths[max(fitting)] if fitting else None

    @property
    def _most_tiles(self) -> int:
        """Largest number of rows, or of columns, of tiles."""
        return math.ceil(min(self._longest, MAX_SIDE) / self._tile)

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """`pixel_values` [tiles, 3, side, side]: row by row, the whole picture last; `rows` [1]
        and `cols` [1], the numbers of rows and columns, which the model does not use.

        The processor's mask of pixels that are not padding is left out: a single picture has no
        padding.
        """
        assert isinstance(decoded, Image.Image)
        rows, columns = self._grid(*decoded.size, options)
        image = decoded.resize(self._scaled(*decoded.size, options), self._filter)
        image = image.resize(
            (max(columns, 1) * self._tile, max(rows, 1) * self._tile), self._filter
        )
        tiles = _cut(np.asarray(image), rows, columns, self._tile)
        if rows:
            image = image.resize((self._tile, self._tile), self._filter)
        arrays = {
            "pixel_values": self._planes([*tiles, np.asarray(image)]),
            "rows": int64_array(rows),
            "cols": int64_array(columns),
        }
        return ProcessedItem("image", arrays, self._expansion(rows, columns))

    def _planes(self, tiles: list[Levels]) -> Array:
        """[side, side, 3] each → [tiles, 3, side, side]."""
        stacked = self._table.planes(np.concatenate(tiles))  # [3, tiles * side, side]
        storage = np.frombuffer(stacked.data, STORAGE[self.dtype])
        parts = self.memory.empty((len(tiles), 3, self._tile, self._tile), self.dtype)
        parts[:] = storage.reshape(3, len(tiles), self._tile, self._tile).swapaxes(0, 1)
        return stored_array(parts, self.dtype)

    def _expansion(self, rows: int, columns: int) -> Expansion:
        text = ""
        for row in range(1, rows + 1):
            tiles = (f"{AROUND}<row_{row}_col_{n}>{IMAGE}" for n in range(1, columns + 1))
            text += "".join(tiles) + "\n"
        text += "\n" if rows else ""
        text += AROUND + WHOLE + IMAGE + AROUND
        runs = (
            (token, count * self._tokens_per_tile if token == self._token else count)
            for token, count in self._tokenizer.runs(text)
        )
        return Expansion(tuple(runs), self._token)

    def _scaled(self, width: int, height: int, options: Options) -> tuple[int, int]:
        """The first resize: the longer side as asked for, the shorter side an even number."""
        longest = options.get("longest_edge", self._longest)
        assert isinstance(longest, int)
        ratio = width / height
        if width >= height:
            width, height = longest, _even(int(longest / ratio))
        else:
            width, height = _even(int(longest * ratio)), longest
        return _bounded(max(width, 1), max(height, 1))

    def _grid(self, width: int, height: int, options: Options) -> tuple[int, int]:
        """Rows and columns of tiles; (0, 0) for a picture that is not cut."""
        if not options.get("do_image_splitting", self._cuts):
            return 0, 0
        width, height = self._scaled(width, height, options)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self._tile)
            rows = math.ceil(int(columns * self._tile / ratio) / self._tile)
        else:
            rows = math.ceil(height / self._tile)
            columns = math.ceil(int(rows * self._tile * ratio) / self._tile)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)

    @cached_property
    def _processor(self) -> Any:
        names = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
        processor = image_processor(self.files.image_processor, *names)
        if not processor.do_resize or processor.size.longest_edge != self._longest:
            raise ModelLoadError("preprocessor_config.json has sizes this family does not know")
        return processor

    @property
    def _filter(self) -> Image.Resampling:
        return Image.Resampling(self._processor.resample)

    @cached_property
    def _table(self) -> PixelTable:
        return PixelTable(self._processor, self.dtype)


def _cut(pixels: Levels, rows: int, columns: int, side: int) -> list[Levels]:
    """[rows * side, columns * side, 3] → tiles [side, side, 3], row by row."""
    tiles = pixels.reshape(max(rows, 1), side, max(columns, 1), side, 3)
    return [tiles[row, :, column] for row in range(rows) for column in range(columns)]


def _even(length: int) -> int:
    return length + length % 2


def _bounded(width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > MAX_SIDE:
        width, height = MAX_SIDE, int(MAX_SIDE / ratio)
    elif height > width and height > MAX_SIDE:
        width, height = int(MAX_SIDE * ratio), MAX_SIDE
    return max(width, 1), max(height, 1)
