"""How models take films: which frames, in items of how many, with what text between, at what size.

A film is a row of items of modality "video". An item is what the encoder takes by itself: two
frames (a temporal patch) for Qwen, one for models that take a film as pictures. An item's identity
is its frames and the size that they are resized to; where it lies in the film is said by the tokens
around it and by `FilmItem.time`. So the same frames in another film, or elsewhere in the same one,
are the same item.

    film: frame count, rate, size ─▶ sample ─▶ frame indices ─▶ layout ─▶ items, tokens between
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lookonce.errors import BadRequestError, TooLargeError, UnprocessableMediaError
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
from lookonce.render.families.processor_files import Json, image_processor
from lookonce.types.media import Expansion, ProcessedItem

Options = dict[str, object]
OPTION_NAMES = ("fps", "num_frames", "do_sample_frames")
"""Options of a request that choose a film's frames."""
LISTED_FPS = 1.0
"""Frames per second of a list of frames whose client says nothing else, as in vLLM."""
MAX_FPS = 1000.0
"""Frames per second that a film may claim."""
OMNI_FPS = 1.0
"""What Qwen3-Omni's processor takes for the rate of sampled frames unless the request says it."""
QWEN_FPS = 2.0
"""What Qwen's own tools sample files at, where the model's processor is not told to sample."""
PICTURE_FRAMES = 8
"""Frames of a file for models without a rule of their own."""
MAX_SIDE_RATIO = 200
Token = int | str
"""A token id, or a text that is tokenized."""


@dataclass(frozen=True, slots=True)
class FilmInfo:
    """What is known of a film before any of its frames is decoded."""

    num_frames: int
    fps: float
    width: int
    height: int
    chosen: bool = False
    """The client chose the frames itself (a list of frames): all are taken unless it says more."""


@dataclass(frozen=True, slots=True)
class FilmItem:
    """One item: the indices of its frames, and the tokens between it and the item before."""

    frames: tuple[int, ...]
    before: tuple[Token, ...] = ()
    time: int | None = None
    """`MediaFeature.film_time`."""


@dataclass(frozen=True, slots=True)
class FilmLayout:
    """What a film's placeholder becomes."""

    items: tuple[FilmItem, ...]
    options: Options
    """Of processing, for each item: part of its identity."""
    after: tuple[Token, ...] = ()
    """Tokens after the last item."""
    replaces: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Tokens that the template writes before and after the placeholder, which are replaced, too."""
    expansion: Expansion | None = None
    """Of each item; None: only processing says it."""

    @property
    def num_frames(self) -> int:
        """Frames that are looked at; one that fills up the last item counts once."""
        return len({index for item in self.items for index in item.frames})


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which frames of a film are taken."""

    fps: float | None = None
    num_frames: int | None = None
    sample: bool = False
    """Whether frames are left out at all."""


def film_options(kwargs: Mapping[str, object]) -> Options:
    """The options that choose frames, checked. Raises `BadRequestError`."""
    fps, count, sample = (kwargs.get(name) for name in OPTION_NAMES)
    chosen: Options = {}
    if fps is not None:
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_FPS:
            raise _bad("fps", f"fps must be a number above 0, at most {MAX_FPS:g}")
        chosen["fps"] = float(fps)
    if count is not None:
        if type(count) is not int or count < 1:
            raise _bad("num_frames", "num_frames must be a whole number above 0")
        if fps is not None:
            raise _bad("num_frames", "num_frames and fps exclude each other")
        chosen["num_frames"] = count
    if sample is not None:
        if type(sample) is not bool:
            raise _bad("do_sample_frames", "do_sample_frames must be true or false")
        chosen["do_sample_frames"] = sample
    return chosen


def _bad(name: str, message: str) -> BadRequestError:
    return BadRequestError(f"mm_processor_kwargs: {message}", param=f"mm_processor_kwargs.{name}")


def sampling(config: Json, info: FilmInfo, options: Options, fps: float | None) -> Sampling:
    """What the request asks for, else the model's processor (`config`); `fps` is for files where
    neither says anything."""
    asked_fps, asked_count = options.get("fps"), options.get("num_frames")
    sample = options.get("do_sample_frames")
    if sample is None:
        asked = asked_fps is not None or asked_count is not None
        sample = asked or not info.chosen
    if not sample:
        return Sampling()
    if asked_fps is None and asked_count is None:
        of_config = config.get("fps") if config.get("do_sample_frames") else None
        asked_count = config.get("num_frames")
        asked_fps = None if asked_count else of_config or fps
    return Sampling(
        float(asked_fps) if isinstance(asked_fps, int | float) else None,
        asked_count if isinstance(asked_count, int) else None,
        sample=True,
    )


def all_frames(total: int, most: int) -> list[int]:
    """Every frame. Raises `TooLargeError` where that is more than `most`."""
    if total > most:
        raise TooLargeError(f"the film has {total} frames; at most {most} are looked at")
    return list(range(total))


def evenly(start: float, total: int, count: int) -> list[int]:
    """`torch.arange(start, total, total / count).int()`, without the frame after the last one that
    rounding may add."""
    found: NDArray[np.float32] = np.arange(start, total, total / count).astype(np.float32)
    return [min(int(index), total - 1) for index in found[:count]]


class QwenFilms:
    """Qwen2-VL's, Qwen2.5-VL's and Qwen3-VL's films: items of two frames (`temporal_patch_size`).

    Qwen2 and 2.5 limit the pixels of a frame, and number the film's items in time, Omni in whole
    positions; Qwen3 limits those of the film, and writes the time of each item before it.
    """

    def __init__(
        self,
        config: Json,
        token_id: int,
        dtype: str,
        memory: ArrayMemory,
        *,
        rule: Literal["qwen2", "qwen2_5", "qwen3", "omni"],
        around: tuple[int, int] = (0, 0),
        tokens_per_second: float = 1.0,
    ) -> None:
        """`config` is the video processor's; `around` are the tokens of vision's start and end,
        for Qwen3, `tokens_per_second` positions, for Qwen2.5 and Omni."""
        timed = rule == "qwen3"
        self._rule = rule
        self._around = around
        self._tokens_per_second = tokens_per_second
        self.token_id = token_id
        self._dtype = dtype
        self._memory = memory
        self.patch = int(config.get("patch_size", 16 if timed else 14))
        self.merge = int(config.get("merge_size", 2))
        self.frames = int(config.get("temporal_patch_size", 2))
        side = self.patch * self.merge if not timed else 32
        size = config.get("size") or {}
        low = config.get("min_pixels") or size.get("shortest_edge") or 128 * side * side
        high = config.get("max_pixels") or size.get("longest_edge") or 768 * side * side
        self.min_pixels, self.max_pixels = int(low), int(high)
        self.min_frames = int(config.get("min_frames", 4))
        self.max_frames = int(config.get("max_frames", 768))
        self._config = config

    @cached_property
    def _processor(self) -> Any:
        kept = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if self._rule == "qwen3" else {}
        given = {name: self._config[name] for name in (*kept, "resample") if name in self._config}
        return image_processor({**half, **given}, "Qwen2VLImageProcessor")

    @cached_property
    def _table(self) -> PixelTable:
        return PixelTable(self._processor, self._dtype, self._memory)

    def options(self, kwargs: Mapping[str, object]) -> Options:
        """The options of one film. Pixel bounds narrow the folder's, which may differ from those of
        pictures, and never widen them."""
        size = kwargs.get("size")
        size = size if isinstance(size, Mapping) else {}
        chosen = film_options(kwargs)
        low = kwargs.get("min_pixels") or size.get("shortest_edge")
        high = kwargs.get("max_pixels") or size.get("longest_edge")
        if isinstance(high, int):
            chosen["max_pixels"] = min(self.max_pixels, max(1, high))
        if isinstance(low, int):
            chosen["min_pixels"] = min(low, _number(chosen.get("max_pixels"), self.max_pixels))
        return chosen

    def layout(self, info: FilmInfo, options: Options, most: int) -> FilmLayout:
        """The items of a film, of which at most `most` frames are looked at."""
        indices = self._sample(info, options, most)
        times = [index / info.fps for index in indices]
        sampled_fps = len(indices) / info.num_frames * info.fps
        if self._rule == "omni":
            listed_fps = info.fps if info.chosen else OMNI_FPS
            sampled_fps = float(str(options.get("fps", listed_fps)))
        width, height = self._size(len(indices), info.width, info.height, options)
        indices += [indices[-1]] * (-len(indices) % self.frames)
        times += [times[-1]] * (-len(times) % self.frames)
        groups = [
            tuple(indices[at : at + self.frames]) for at in range(0, len(indices), self.frames)
        ]
        rows, columns = height // self.patch // self.merge, width // self.patch // self.merge
        expansion = self._expansion(rows, columns)
        chosen: Options = {"width": width, "height": height}
        if self._rule != "qwen3":
            times_of_items = self._times(len(groups), sampled_fps, expansion.length)
            numbered = zip(groups, times_of_items, strict=True)
            items = [FilmItem(group, time=time) for group, time in numbered]
            return FilmLayout(tuple(items), chosen, expansion=expansion)
        start, end = self._around
        middles = [
            (times[at] + times[at + self.frames - 1]) / 2
            for at in range(0, len(times), self.frames)
        ]
        stamps = [f"<{middle:.1f} seconds>" for middle in middles]
        items = [
            FilmItem(group, (stamp, start) if number == 0 else (end, stamp, start))
            for number, (group, stamp) in enumerate(zip(groups, stamps, strict=True))
        ]
        around = (start,), (end,)
        return FilmLayout(tuple(items), chosen, (end,), around, expansion)

    def _times(self, count: int, fps: float, num_tokens: int) -> list[int]:
        """Of each item, of `num_tokens`, as `get_rope_index` computes it, in single precision."""
        if self._rule == "qwen2":
            return list(range(count))
        with np.errstate(over="ignore"):  # a client may say any rate above 0
            seconds = np.float32(self.frames / fps)
            interval = np.float32(self._tokens_per_second) * seconds
        # Infinity cannot be rounded.
        if self._rule == "omni" and (interval > num_tokens or interval != round(interval)):
            raise UnprocessableMediaError(
                f"at {fps:g} frames per second two frames of the film are {interval:g} positions "
                f"long; this model's films take a whole number up to {num_tokens}: choose another "
                "fps"
            )
        return [int(np.float32(number) * interval) for number in range(count)]

    def _sample(self, info: FilmInfo, options: Options, most: int) -> list[int]:
        total = info.num_frames
        asked = sampling(self._config, info, options, QWEN_FPS)
        if not asked.sample:
            return all_frames(total, most)
        most = min(most, self.max_frames)
        if asked.num_frames is not None and asked.num_frames > min(total, most):
            raise UnprocessableMediaError(
                f"num_frames is {asked.num_frames}; the film has {total} frames, of which at most "
                f"{most} are looked at"
            )
        if self._rule == "qwen3":
            count = asked.num_frames or int(total / info.fps * (asked.fps or QWEN_FPS))
            if asked.num_frames is None:
                count = min(max(count, self.min_frames), most, total)
            return [int(index) for index in np.linspace(0, total - 1, count).round()]
        if asked.num_frames is not None:
            count = round(asked.num_frames / self.frames) * self.frames
        else:
            most = math.floor(min(most, total) / self.frames) * self.frames
            wanted = total / info.fps * (asked.fps or QWEN_FPS)
            wanted = min(max(wanted, self.min_frames), most, total)
            count = math.floor(wanted / self.frames) * self.frames
        if not 0 < count <= total:
            return list(range(total))  # fewer frames than one item has
        return evenly(0, total, count)

    def _size(self, count: int, width: int, height: int, options: Options) -> tuple[int, int]:
        """Width and height that frames are resized to: the processor's `smart_resize`."""
        factor = self.patch * self.merge
        low = _number(options.get("min_pixels"), self.min_pixels)
        high = _number(options.get("max_pixels"), self.max_pixels)
        depth, full_depth = 1, 1
        if self._config.get("cap_pixels_per_frame"):
            high = self._capped(count, low, high, factor)
        if self._rule == "qwen3":
            if height < factor or width < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
            count = max(count, self.frames)
            depth, full_depth = count, round(count / self.frames) * self.frames
        if max(width, height) > MAX_SIDE_RATIO * min(width, height):
            raise UnprocessableMediaError("the film's frames are too thin for this model")
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if full_depth * new_height * new_width > high:
            scale = math.sqrt(depth * height * width / high)
            new_height = max(factor, math.floor(height / scale / factor) * factor)
            new_width = max(factor, math.floor(width / scale / factor) * factor)
        elif full_depth * new_height * new_width < low:
            scale = math.sqrt(low / (depth * height * width))
            new_height = math.ceil(height * scale / factor) * factor
            new_width = math.ceil(width * scale / factor) * factor
        return new_width, new_height

    def _capped(self, count: int, low: int, high: int, factor: int) -> int:
        """The upper bound of pixels with `cap_pixels_per_frame`, as in qwen-vl-utils."""
        if self._rule == "qwen3":
            cap = int(self._config.get("max_video_tokens", 768)) * factor**2
            return max(min(cap, high // count), int(low * 1.05)) * count
        cap = int(int(self._config.get("max_video_tokens", 128000)) * factor**2 * 0.9)
        return max(min(high, cap * self.frames // count), int(low * 1.05))

    def _expansion(self, rows: int, columns: int) -> Expansion:
        return Expansion(((self.token_id, rows * columns),), self.token_id, (1, rows, columns))

    def process(self, frames: Sequence[Image.Image], options: Options) -> ProcessedItem:
        """`pixel_values_videos` [patches, patch values] and `video_grid_thw` [3], in patches."""
        width, height = _number(options.get("width"), 0), _number(options.get("height"), 0)
        levels = [resized(frame, width, height, self._processor.resample) for frame in frames]
        levels += [levels[-1]] * (self.frames - len(levels))
        rows, columns = height // self.patch, width // self.patch
        return ProcessedItem(
            modality="video",
            arrays={
                "pixel_values_videos": self._table.film_patches(levels, self.patch, self.merge),
                "video_grid_thw": int64_array(1, rows, columns),
            },
            expansion=self._expansion(rows // self.merge, columns // self.merge),
        )

    def expansion_of_arrays(self, arrays: Arrays) -> Expansion:
        """See `ProcessorFamily.expansion_of_arrays`: one item, not a whole film."""
        values = 3 * self.frames * self.patch**2
        expected = {
            "pixel_values_videos": (self._dtype, (None, values)),
            "video_grid_thw": ("int64", (3,)),
        }
        check_arrays(arrays, expected)
        note = ": a film is sent as one item for each pair of frames"
        rows, columns = patch_grid(
            arrays, "pixel_values_videos", "video_grid_thw", merge=self.merge, note=note
        )
        if rows * columns * self.patch**2 > MAX_SIDE_RATIO * self.max_pixels:
            raise refuse_arrays("the frames have too many pixels")
        return self._expansion(rows // self.merge, columns // self.merge)


def picture_film(info: FilmInfo, config: Json, options: Options, most: int) -> list[int]:
    """The frames of a film for a model that takes them as pictures (InternVL's rule)."""
    asked = sampling(config, info, options, None)
    total = info.num_frames
    if not asked.sample:
        return all_frames(total, most)
    if asked.fps is not None:
        count = int(total / info.fps * asked.fps)
    else:
        count = min(asked.num_frames or PICTURE_FRAMES, total) if total else 0
    count = max(1, min(count, total, most))
    return evenly(total / count / 2, total, count)


def plain_film(info: FilmInfo, config: Json, options: Options, most: int) -> list[int]:
    """The frames of a film by the rule of transformers' video processors that have none of their
    own: as many as are asked for, evenly from the first one on."""
    asked = sampling(config, info, options, None)
    total = info.num_frames
    if not asked.sample:
        return all_frames(total, most)
    if asked.fps is not None:
        count = int(total / info.fps * asked.fps)
    else:
        count = asked.num_frames or PICTURE_FRAMES
    return evenly(0, total, max(1, min(count, total, most)))


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) else default
