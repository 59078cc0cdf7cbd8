"""Models with media and no family of their own: transformers' whole processor runs on each item.

What the processor makes of one placeholder is the item's expansion, and everything that it gives
beside token ids is the item's arrays. Nothing is known of an item before it is processed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from itertools import groupby
from typing import Any, TypedDict, TypeVar, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image

from lookonce.errors import ModelLoadError, TooLargeError, UnprocessableMediaError
from lookonce.render.families.arrays import Arrays, float_array, refuse_arrays, stored_array
from lookonce.render.families.base import (
    NO_ADDITIONS,
    Decoded,
    Options,
    ProcessorFamily,
    PromptAdditions,
)
from lookonce.render.families.film import OPTION_NAMES as FILM_OPTIONS
from lookonce.render.families.film import (
    FilmInfo,
    FilmItem,
    FilmLayout,
    film_options,
    picture_film,
    plain_film,
)
from lookonce.render.families.processor_files import (
    ProcessorFiles,
    ProcessorTokenizer,
    full_processor,
)
from lookonce.types.media import (
    ITEM_SIZE,
    Array,
    Expansion,
    MediaExample,
    Modality,
    ProcessedItem,
)
from lookonce.types.model import (
    FILMS_BY_FRAME,
    FILMS_BY_PAIR,
    ONE_IN_A_PROMPT,
    ONE_SOUND_IN_A_PROMPT,
    SOUNDS_BESIDE_PICTURES,
    WHOLE_FILMS,
    general_modalities,
    has_axes,
    media_token,
    named_token,
    placeholder_token,
)

TRAINING_LABELS = "labels"
TOKEN_TYPES = "token_type_ids"
"""How the names end of what a processor says of each token of the prompt."""
MODALITY_TYPES = "mm_token_type_ids"
"""How those end that say which tokens are of pictures."""
ARGUMENTS: dict[Modality, str] = {"image": "images", "audio": "audio", "video": "videos"}
MOST_PIXELS = 1 << 26
"""Of all frames of a film that is one item, three bytes each: a media worker holds them at once."""
LONGEST_SOUND = 30.0
"""Seconds; the window of Whisper's extractor, which cuts what is longer without an error."""
EXAMPLE_PICTURES = ((128, 60), (70, 90), (128, 60))
EXAMPLE_FPS = 3.0
EXAMPLE_SECONDS = (0.9, 1.6, 0.9)
"""Two are of one size, so that only their contents tell them apart."""


FILM_PLACEHOLDER = "<video>"
NEWLINE = "\n"
PICTURE_OF_FILM: dict[str, object] = {"crop_to_patches": False}
"""Options of the picture processor for a frame."""
BESIDE_PICTURES: dict[str, object] = {"beside": "image"}
"""Options of a sound in a prompt with pictures, of `SOUNDS_BESIDE_PICTURES`."""
PICTURE_ARGUMENT = "image_pixel_values"
"""What the forward of these types is given for pictures; it looks whether there are any by this
alone."""
NO_OPTIONS: dict[str, object] = {}
Given = Decoded | NDArray[np.uint8]
"""What transformers' processor gets of an item; of a film its frames in one array."""
PLACEHOLDERS: dict[str, dict[Modality, str]] = {
    "gemma3": {"image": "<start_of_image>"},
    "gemma3n": {"image": "<image_soft_token>", "audio": "<audio_soft_token>"},
    "molmo2": {"image": "<|image|>"},
    "qianfan_ocr": {"image": "<image>"},
}
"""Type → what its templates write for an item, where that is another token than its config and
processor_config.json name."""
TEXT_AROUND: dict[str, tuple[str, str]] = {"gemma3": ("\n\n", "\n\n"), "gemma3n": ("\n\n", "\n\n")}
"""Type → texts that its processor adds before and after an item, which may merge with others."""
FILM_TEXTS: dict[str, Callable[[int, Sequence[float]], str]] = {
    "gemma4": lambda number, times: " " * bool(number) + _clock(times[number]) + " ",
    "gemma4_unified": lambda number, times: " " * bool(number) + _clock(times[number]) + " ",
    "lfm3_vl": lambda number, times: f"<{(times[0] + times[:2][-1]) / 2:.1f} seconds>",
    "video_llama_3": lambda number, times: f"Time {times[0]:.1f}s:",
}
"""Type → the text that its processor writes before item `number` of a film whose frames are at
these seconds. It may merge with the text before it, so it is no part of the item."""
TEXTS_AFTER_FRAMES: dict[str, Callable[[float], str]] = {
    "glm46v": lambda seconds: f"{seconds:.1f} seconds",
    "glm4v": lambda seconds: f"{int(seconds)}",
    "glm4v_moe": lambda seconds: f"{int(seconds)}",
}
"""The same after each item, whose first frame is at so many seconds."""
WRAPPED: tuple[str, ...] = ("hunyuan_vl",)
"""Types whose processor wants an item's placeholder between two tokens, which templates write."""
AROUND_FILMS = ("<|begin_of_video|>", "<|end_of_video|>")
"""Tokens that templates write around films of `FILMS_BY_PAIR`."""
PIXELS_OF_FILMS = (112 * 112, 28 * 28 * 2 * 30000)
"""Least and most pixels of all frames, where `size` does not say it (GLM-4V)."""
ADDITIONS: dict[str, PromptAdditions] = {
    "emu3": PromptAdditions(first="bos_token"),
    "molmo2": PromptAdditions(first="bos_token"),
    "paligemma": PromptAdditions(after_items="bos_token", last=NEWLINE),
}
"""Type → what its processor adds to a prompt; tokens by their role in tokenizer_config.json."""
DEFAULT_TEMPLATES = {
    "paligemma": """\
{%- for message in messages %}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] if part['type'] == 'image' %}
            {{- '<image>' }}
        {%- endfor %}
        {%- for part in message['content'] if part['type'] == 'text' %}
            {{- part['text'] }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
"""
}
"""Type → chat template, where models are published without one: the picture and the text alone."""


class GeneralProcessing(ProcessorFamily):
    """Items have whatever arrays the model's processor gives for one item."""

    arithmetic = 2
    needs_torch = True
    takes_arrays = False

    def __init__(self, files: ProcessorFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        self.modalities = general_modalities(files.config)
        self.max_items = 1 if files.config.get("model_type") in ONE_IN_A_PROMPT else None
        if files.config.get("model_type") in ONE_SOUND_IN_A_PROMPT:
            self.max_of = {"audio": 1}
        self._tokenizer = ProcessorTokenizer(files)
        kind = files.config.get("model_type")
        self._frames = 1 if kind in FILMS_BY_FRAME else 2 if kind in FILMS_BY_PAIR else 0
        """Of an item that goes through transformers' video processor; 0: all of a film."""
        self.films_alone = kind in FILMS_BY_PAIR
        self._videos = self._frames > 0 or kind in WHOLE_FILMS
        """Whether films go through transformers' video processor, not that of pictures."""
        film = self._tokenizer.find(FILM_PLACEHOLDER)
        if (find_spec("torchvision") if self._videos else film) is None:
            self.modalities = tuple(each for each in self.modalities if each != "video")
        self._tokens = {
            modality: placeholder_token(files.config, modality) for modality in self.modalities
        }
        self._placeholders = {
            modality: self._find_placeholder(modality) for modality in self._tokens
        }
        if "video" in self._placeholders and film is not None and not self._videos:
            self._placeholders["video"] = film
        self._has_axes = has_axes(files.config.get("text_config") or {})
        self._around = TEXT_AROUND.get(str(files.config.get("model_type")), ("", ""))
        if "audio" in self.modalities:
            sound = files.feature_extractor
            self.sampling_rate = int(sound.get("sampling_rate", 16000))
            self.max_audio_seconds = LONGEST_SOUND

    def gives_up_films(self) -> bool:
        """Take no films from now on; whether any were taken."""
        taken = self.modalities
        self.modalities = tuple(each for each in taken if each != "video")
        return self.modalities != taken

    def placeholder_token_id(self, modality: Modality) -> int:
        return self._placeholders[modality]

    @property
    def additions(self) -> PromptAdditions:
        return ADDITIONS.get(str(self.files.config.get("model_type")), NO_ADDITIONS)

    @property
    def default_template(self) -> str | None:
        return DEFAULT_TEMPLATES.get(str(self.files.config.get("model_type")))

    def _find_placeholder(self, modality: Modality) -> int:
        """The token that takes rows, unless templates are known to write another one."""
        known = PLACEHOLDERS.get(str(self.files.config.get("model_type")), {})
        text = known.get(modality) or self.files.processor.get(f"{modality}_token")
        found = self._tokenizer.find(text) if isinstance(text, str) else None
        if found is None and modality == "video":
            found = named_token(self.files.config, modality)
        return self._tokens[modality] if found is None else found

    def text_around_placeholder(self, modality: Modality) -> tuple[str, str]:
        return self._around

    def option_names(self) -> tuple[str, ...]:
        return FILM_OPTIONS if "video" in self.modalities else ()

    def item_options(self, modality: Modality, kwargs: Mapping[str, object]) -> Options:
        return film_options(kwargs) if modality == "video" else {}

    def options_beside(self, modality: Modality, modalities: Collection[Modality]) -> Options:
        listed = self.files.config.get("model_type") in SOUNDS_BESIDE_PICTURES
        return BESIDE_PICTURES if listed and modality == "audio" and "image" in modalities else {}

    def film_layout(self, info: FilmInfo, options: Options, most_frames: int) -> FilmLayout:
        """A picture for each frame, without tiles; text between them says which it is. Or what
        transformers' video processor makes of the film, or of each frame."""
        if self._videos:
            return self._video_layout(info, options, most_frames)
        frames = picture_film(info, self.files.video_processor, options, most_frames)
        items = [
            FilmItem((frame,), (f"{NEWLINE if number else ''}Frame{number + 1}: ",))
            for number, frame in enumerate(frames)
        ]
        return FilmLayout(tuple(items), {"width": info.width, "height": info.height})

    def _video_layout(self, info: FilmInfo, options: Options, most_frames: int) -> FilmLayout:
        """What the processor writes between the frames of a whole film depends on their times,
        which are part of its identity then."""
        frames = plain_film(info, self.files.video_processor, options, most_frames)
        size: Options = {"width": info.width, "height": info.height}
        if self._frames:
            groups = _groups(frames, self._frames)
            texts, last = self._film_texts(frames, info.fps, len(groups))
            items = [
                FilmItem(group, (text,) if text else ())
                for group, text in zip(groups, texts, strict=True)
            ]
            size |= self._share_of_pixels(info, len(frames))
            return FilmLayout(tuple(items), size, (last,) if last else ())
        if len(frames) * info.width * info.height > MOST_PIXELS:
            raise TooLargeError(
                f"the film has {len(frames)} frames of {info.width} x {info.height}; this model "
                f"looks at whole films, of {MOST_PIXELS // 1_000_000} million pixels at most"
            )
        (text,), _ = self._film_texts(frames, info.fps, 1)
        chosen = {**size, **_chosen(frames, info.fps, info.num_frames)}
        return FilmLayout((FilmItem(tuple(frames), (text,) if text else ()),), chosen)

    def _share_of_pixels(self, info: FilmInfo, num_frames: int) -> Options:
        """The bounds of an item's pixels, where those of the whole film decide how large a frame
        is: a pair of frames has its share of them."""
        if self._frames != 2:
            return {}
        bounds = self.files.video_processor.get("size") or {}
        low = int(bounds.get("shortest_edge") or PIXELS_OF_FILMS[0])
        high = int(bounds.get("longest_edge") or PIXELS_OF_FILMS[1])
        pixels = info.width * info.height
        if 2 * low <= pixels and 2 * num_frames * pixels <= high:  # with room for rounding
            return {}
        return {"low": -(-2 * low // num_frames), "high": 2 * high // num_frames}

    def _film_texts(
        self, indices: Sequence[int], fps: float, num_items: int
    ) -> tuple[list[str], str]:
        """What stands before each item of a film, of which these frames are looked at, and after
        the last one."""
        times = [index / fps for index in indices]
        kind = str(self.files.config.get("model_type"))
        write, add = FILM_TEXTS.get(kind), TEXTS_AFTER_FRAMES.get(kind)
        texts = [write(number, times) if write else "" for number in range(num_items)]
        texts.append("")
        for number in range(num_items if add else 0):
            assert add is not None
            texts[number + 1] += add(times[number * max(1, self._frames)])
        return texts[:-1], texts[-1]

    def fingerprint(self) -> bytes:
        torch = [version(name) for name in ("torch", "torchvision") if find_spec(name)]
        described = super().fingerprint() + self._tokenizer.digest + " ".join(torch).encode()
        return blake3(described).digest()

    def expansion_of_size(
        self, modality: Modality, size: tuple[int, ...], options: Options
    ) -> Expansion:
        """Raises `ModelLoadError`: only processing says it."""
        raise ModelLoadError("the tokens of an item are not known before it is processed")

    def expansion_of_arrays(self, modality: Modality, arrays: Arrays) -> Expansion:
        raise refuse_arrays(
            f"this model type takes no processed {modality} items: what their tokens are is known "
            "from the encoded media alone; send that"
        )

    def check_processed(self, item: ProcessedItem) -> None:
        """As far as anything is known: the token that takes rows, and grids of patches, which are
        as many as the arrays have numbers at most."""
        numbers = sum(math.prod(array.shape) for array in item.arrays.values())
        for name, array in item.arrays.items():
            if not name.endswith("grid_thw"):
                continue
            if array.dtype not in ("int64", "int32"):
                raise refuse_arrays(f"{name} is {array.dtype}; it must be whole numbers")
            grid: list[int] = np.frombuffer(array.data, array.dtype).tolist()
            if min(grid, default=0) < 1 or math.prod(grid) > numbers:
                raise refuse_arrays(f"{name} has more patches than there are")
        expansion, token = item.expansion, media_token(self.files.config, item.modality)
        if (expansion.embed_token_id, expansion.grid) != (
            token,
            self._grid(item.modality, item.arrays),
        ):
            raise refuse_arrays(f"the {item.modality} has another placeholder or grid")

    def process(self, modality: Modality, decoded: Decoded, options: Options) -> ProcessedItem:
        """The processor's arrays as it gives them for a prompt of this item's placeholder."""
        given: Given = decoded[0] if isinstance(decoded, tuple) else decoded
        written, given_options, text, last = modality, NO_OPTIONS, "", ""
        if modality == "video" and self._videos:
            assert isinstance(decoded, tuple)
            own = range(self._frames)
            chosen = _chosen(own, 1.0, len(own)) if own else cast("ChosenFrames", options)
            given, given_options = _film_of(decoded), _film_options([(decoded, chosen)])
            if "high" in options:
                bounds = {"shortest_edge": options["low"], "longest_edge": options["high"]}
                given_options = {**given_options, "size": bounds}
            (text,), last = self._film_texts(chosen["indices"], chosen["fps"], 1)
        elif modality == "video":
            written, given_options = "image", PICTURE_OF_FILM
        try:
            ids, found = self._run(self._wrapped(written), {written: [given]}, given_options)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UnprocessableMediaError(
                f"the model's processor refuses the {modality} ({type(error).__name__})"
            ) from error
        own_ids = self._own_tokens(written, ids, text, last)
        arrays = {
            name: value
            for name, value in found.items()
            if not name.endswith(TOKEN_TYPES) and name != TRAINING_LABELS
        }
        for name, value in found.items():
            if name.endswith(MODALITY_TYPES) and value.shape == (1, len(ids)):
                types = np.frombuffer(value.data, value.dtype)
                arrays[name] = stored_array(types[None, own_ids], value.dtype)
        if options == BESIDE_PICTURES:
            arrays[PICTURE_ARGUMENT] = float_array(np.zeros(1, np.float32), self.dtype)
        ids = ids[own_ids]
        arrays["input_ids"] = stored_array(np.array([ids], np.int64), "int64")
        runs = tuple((token, len(list(same))) for token, same in groupby(ids))
        token = media_token(self.files.config, modality)
        expansion = Expansion(runs, token, self._grid(modality, arrays))
        if not expansion.num_embeds:
            raise UnprocessableMediaError(f"the model's processor gives the {modality} no tokens")
        return ProcessedItem(modality, arrays, expansion)

    def examples(self) -> tuple[MediaExample, ...]:
        """Prompts with one random item of each modality, with three, and with one of each; where
        only one may be in a prompt, with one and with another.

        Raises `ModelLoadError` where an item's tokens in a prompt are not those that it has alone.
        """
        assert self._processor is not None  # with which it is known whether films are taken
        media = {
            modality: _example_media(modality, self, videos=self._videos)
            for modality in self.modalities
        }
        films = [] if self._videos else media.pop("video", [])
        several = {each: self.max_items is None and each not in self.max_of for each in media}
        for modality, (_, *neighbours) in media.items():
            if several[modality]:
                self._check_neighbours(modality, neighbours)
        orders: list[list[tuple[Modality, int]]] = []
        for modality in media:
            orders.append([(modality, 0)])
            numbers = (0, 1, 2) if modality != "video" else (1, 2, 1)  # of one number of frames
            orders.append(
                [(modality, number) for number in (numbers if several[modality] else (1,))]
            )
        together = [modality for modality in media if modality != "video" or not self.films_alone]
        if len(together) > 1:
            orders.append([(modality, 1) for modality in together])
        examples = [
            self._example([(modality, media[modality][number]) for modality, number in order])
            for order in orders
        ]
        return (*examples, self._film_example(films)) if films else tuple(examples)

    def _film_example(self, frames: Sequence[Decoded]) -> MediaExample:
        """A film of all frames. Films have no processor of transformers without torchvision: what
        the model gets is its picture processor's, without tiles."""
        layout = self.film_layout(FilmInfo(len(frames), 1.0, 1, 1, chosen=True), {}, len(frames))
        ids = self._encoded("Look\n")
        items: list[tuple[int, ProcessedItem]] = []
        for item, frame in zip(layout.items, frames, strict=True):
            ids += [token for text in item.before for token in self._encoded(str(text))]
            items.append((len(ids), self.process("video", frame, {})))
            ids += items[-1][1].expansion.token_ids()
        ids += self._encoded("\nand what? ")
        placeholder = self._wrapped("image")
        _, arrays = self._run(placeholder * len(frames), {"image": frames}, PICTURE_OF_FILM)
        return MediaExample(tuple(ids), tuple(items), arrays)

    def _example(self, media: Sequence[tuple[Modality, Decoded]]) -> MediaExample:
        before, after = self._around
        text = written = "Look\n"
        given: dict[Modality, list[Decoded]] = {}
        beside = {modality for modality, _ in media}
        waiting: list[ProcessedItem] = []
        for number, (modality, decoded) in enumerate(media):
            placeholder, following = self._wrapped(modality), f"\nand {number} what? "
            inner, items_of_it = self._items_of_example(modality, decoded, beside)
            waiting += items_of_it
            text += placeholder + following
            written += before + self._wrapped(modality, inner) + after + following
            given.setdefault(modality, []).append(decoded)
        written = self._completed(written)
        ids: list[int] = []
        items: list[tuple[int, ProcessedItem]] = []
        for token in self._encoded(written):
            if waiting and token == self._placeholders[waiting[0].modality]:
                items.append((len(ids), waiting.pop(0)))
                ids += items[-1][1].expansion.token_ids()
            else:
                ids.append(token)
        theirs, arrays = self._run_media(text, given)
        if theirs != ids:
            raise ModelLoadError(
                "its processor gives an item other tokens in a prompt than it gives it alone"
            )
        return MediaExample(tuple(ids), tuple(items), arrays)

    def _items_of_example(
        self, modality: Modality, decoded: Decoded, beside: Collection[Modality] = ()
    ) -> tuple[str, list[ProcessedItem]]:
        """The items of a picture, a sound or a film, and their placeholders with the texts between
        them."""
        placeholder = self._placeholder(modality)
        if modality != "video" or not isinstance(decoded, tuple):
            options = self.options_beside(modality, beside)
            return placeholder, [self.process(modality, decoded, options)]
        chosen = _example_film(decoded)
        parts = _groups(decoded, self._frames) if self._frames else [decoded]
        texts, last = self._film_texts(chosen["indices"], chosen["fps"], len(parts))
        inner = "".join(text + placeholder for text in texts) + last
        width, height = decoded[0].size
        info = FilmInfo(chosen["total"], chosen["fps"], width, height)
        options = {**chosen, **self._share_of_pixels(info, len(decoded))}
        return inner, [self.process("video", part, options) for part in parts]

    def _check_neighbours(self, modality: Modality, decoded: list[Decoded]) -> None:
        """Two items without text between them have the tokens that each has alone."""
        before, after = self._around
        placeholder, written = self._wrapped(modality), ""
        waiting: list[ProcessedItem] = []
        for each in decoded:
            inner, items = self._items_of_example(modality, each)
            waiting += items
            written += before + self._wrapped(modality, inner) + after
        ids: list[int] = []
        for token in self._encoded(self._completed(written)):
            is_placeholder = waiting and token == self._placeholders[modality]
            ids += waiting.pop(0).expansion.token_ids() if is_placeholder else [token]
        found, _ = self._run_media(placeholder * len(decoded), {modality: decoded})
        if found != ids and not any(self._around):
            raise ModelLoadError("its processor gives neighbouring items other tokens")

    def _own_tokens(
        self, modality: Modality, ids: list[int], text: str = "", last: str = ""
    ) -> slice:
        """Where an item's tokens are among those that the processor gives for it alone; it writes
        `text` before them and `last` after them."""
        before, after = self._around
        placeholder = self._wrapped(modality, text + self._placeholder(modality) + last)
        alone = self._encoded(self._completed(before + placeholder + after))
        at = alone.index(self._placeholders[modality])
        first, rest = alone[:at], alone[at + 1 :]
        if ids[:at] == first and ids[len(ids) - len(rest) :] == rest:
            return slice(at, len(ids) - len(rest))
        return slice(0, len(ids))

    def _completed(self, text: str) -> str:
        """A prompt with what the processor adds to it."""
        additions = self.additions.in_words(self._processor.tokenizer.special_tokens_map)
        return additions.complete(text, [self._placeholder(each) for each in self._tokens])

    def _run_media(
        self, text: str, media: Mapping[Modality, Sequence[Decoded]]
    ) -> tuple[list[int], dict[str, Array]]:
        """`_run` of a prompt with pictures, sounds and whole films."""
        films = [film for film in media.get("video", ()) if isinstance(film, tuple)]
        if not films:
            return self._run(text, media)
        given: dict[Modality, Sequence[Given]] = {**media}
        given["video"] = [_film_of(film) for film in films]
        return self._run(
            text, given, _film_options([(film, _example_film(film)) for film in films])
        )

    def _run(
        self,
        text: str,
        media: Mapping[Modality, Sequence[Given]],
        options: Mapping[str, object] = NO_OPTIONS,
    ) -> tuple[list[int], dict[str, Array]]:
        """The token ids and arrays that the processor makes of a prompt."""
        try:
            # As `apply_chat_template` gives them: pictures in a list for each prompt.
            found = self._processed(text, media, options, nested=True)
        except ValueError:
            found = self._processed(text, media, options, nested=False)
        ids = [int(token) for token in found.pop("input_ids")[0]]
        found.pop("attention_mask", None)
        return ids, {name: _as_array(name, value, self.dtype) for name, value in found.items()}

    def _processed(
        self,
        text: str,
        media: Mapping[Modality, Sequence[Given]],
        options: Mapping[str, object],
        *,
        nested: bool,
    ) -> dict[str, Any]:
        given: dict[str, Any] = dict(options)
        for modality, items in media.items():
            several = nested and modality == "image"
            given[ARGUMENTS[modality]] = [list(items)] if several else list(items)
        if self._has_axes:
            given["return_mm_token_type_ids"] = True  # the model finds positions by them
        return dict(
            self._processor(text=[text], add_special_tokens=False, return_tensors="pt", **given)
        )

    def _encoded(self, text: str) -> list[int]:
        return list(self._processor.tokenizer.encode(text, add_special_tokens=False))

    def _placeholder(self, modality: Modality) -> str:
        """The text of the placeholder token."""
        token = self._placeholders[modality]
        return str(self._processor.tokenizer.convert_ids_to_tokens(token))

    def _wrapped(self, modality: Modality, inner: str = "") -> str:
        """The placeholder, or what takes its place, as the processor takes it in a prompt."""
        text = inner or self._placeholder(modality)
        if modality == "video" and self.films_alone:
            return text.join(AROUND_FILMS)
        if self.files.config.get("model_type") not in WRAPPED:
            return text
        processor = self._processor
        return f"{processor.image_start_token}{text}{processor.image_end_token}"

    def _grid(self, modality: Modality, arrays: Arrays) -> tuple[int, int, int] | None:
        """Of pictures whose processor states a grid of patches: the same in merged patches."""
        films = modality == "video" and self._videos
        stated = arrays.get("video_grid_thw" if films else "image_grid_thw")
        if modality == "audio" or stated is None or stated.shape != (1, 3):
            return None
        time, height, width = np.frombuffer(stated.data, stated.dtype).tolist()
        vision = self.files.config.get("vision_config") or {}
        merge = int(vision.get("spatial_merge_size", 2))
        return time, height // merge, width // merge

    @cached_property
    def _processor(self) -> Any:
        """Without the part for films where transformers cannot make that."""
        if self._videos and "video" in self.modalities:
            with suppress(ModelLoadError):
                return full_processor(self.files, films=True)
            self.gives_up_films()
        return full_processor(self.files)


def _film_of(frames: Sequence[Image.Image]) -> NDArray[np.uint8]:
    """[frames, height, width, 3], as transformers takes decoded films."""
    return np.stack([np.asarray(frame.convert("RGB")) for frame in frames])


class ChosenFrames(TypedDict):
    """Which frames of a film are looked at, as transformers' video processors are told."""

    fps: float
    total: int
    """Frames of the film."""
    indices: Sequence[int]


def _chosen(indices: Sequence[int], fps: float, total: int) -> ChosenFrames:
    return {"fps": float(fps), "total": total, "indices": indices}


def _example_film(frames: Sequence[Image.Image]) -> ChosenFrames:
    """Every other frame of a film is looked at."""
    return _chosen(list(range(0, 2 * len(frames), 2)), EXAMPLE_FPS, 2 * len(frames))


def _film_options(
    films: Sequence[tuple[Sequence[Image.Image], ChosenFrames]],
) -> dict[str, object]:
    """What transformers' processor is told of films whose frames are chosen already."""
    return {
        "do_sample_frames": False,
        "video_metadata": [
            {
                "total_num_frames": chosen["total"],
                "fps": chosen["fps"],
                "frames_indices": chosen["indices"],
                "width": frames[0].width,
                "height": frames[0].height,
            }
            for frames, chosen in films
        ],
    }


Frame = TypeVar("Frame")


def _groups(frames: Sequence[Frame], size: int) -> list[tuple[Frame, ...]]:
    """Frames that make an item each; the last one is repeated where some are missing."""
    filled = [*frames, *[frames[-1]] * (-len(frames) % size)]
    return [tuple(filled[at : at + size]) for at in range(0, len(filled), size)]


def _clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def _example_media(modality: Modality, family: ProcessorFamily, *, videos: bool) -> list[Decoded]:
    random = np.random.default_rng(0)
    if modality == "video" and videos:
        return [
            tuple(
                Image.fromarray(random.integers(0, 256, (60, 90, 3), dtype=np.uint8))
                for _ in range(count)
            )
            for count in (3, 4, 4)
        ]
    if modality != "audio":
        return [
            Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
            for width, height in EXAMPLE_PICTURES
        ]
    lengths = [int(seconds * family.sampling_rate) for seconds in EXAMPLE_SECONDS]
    return [random.normal(0, 0.1, length).astype(np.float32) for length in lengths]


def _as_numpy(value: Any) -> Any:
    """A tensor's numbers, bfloat16 widened to float32; anything else as it is."""
    if not hasattr(value, "numpy"):
        return value
    return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()


def _as_array(name: str, value: Any, dtype: str) -> Array:
    """A processor's tensor, array or list of numbers; floats in the model's dtype.

    Raises `ValueError` for anything else.
    """
    if isinstance(value, list) and value and hasattr(value[0], "numpy"):
        value = [_as_numpy(each) for each in value]
    values: NDArray[Any] = np.asarray(_as_numpy(value))
    if values.dtype.kind == "f":
        return float_array(values.astype(np.float32), dtype)
    if values.dtype.name not in ITEM_SIZE:
        raise ValueError(f"{name} is not an array of numbers")
    return stored_array(values, values.dtype.name)
