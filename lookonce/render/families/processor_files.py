"""The files of a model that say how media is processed, and what Hugging Face makes of them.

The JSON is read from a folder or the hub. Hugging Face processors are built from it here only. They
are always those of the PIL backend: torchvision's, which transformers prefers where it is
installed, give other pixels. transformers is imported on use, which takes a second in workers only.
"""

from __future__ import annotations

from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from tokenizers import Tokenizer

from lookonce.errors import ModelLoadError
from lookonce.render.tekken import TekkenImages, read_tekken

Json = dict[str, Any]
Runs = tuple[tuple[int, int], ...]
"""`(token id, count)` in order."""
IMAGE_PROCESSORS = {
    "CLIPImageProcessor": "transformers.models.clip.image_processing_pil_clip",
    "SiglipImageProcessor": "transformers.models.siglip.image_processing_pil_siglip",
    "Qwen2VLImageProcessor": "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    "Gemma3ImageProcessor": "transformers.models.gemma3.image_processing_pil_gemma3",
    "PixtralImageProcessor": "transformers.models.pixtral.image_processing_pil_pixtral",
    "Idefics3ImageProcessor": "transformers.models.idefics3.image_processing_pil_idefics3",
    "SmolVLMImageProcessor": "transformers.models.smolvlm.image_processing_pil_smolvlm",
}
"""`image_processor_type` (without "Fast") → module of its PIL class."""
OLD_NAMES = {"Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor"}


class ProcessorFiles(msgspec.Struct, frozen=True):
    """The JSON of a Hugging Face folder that says how media is processed."""

    config: Json
    preprocessor: Json
    """preprocessor_config.json: image processor, feature extractor, or both."""
    processor: Json
    """processor_config.json: the arguments of the processor class."""
    tokenizer: str | None = None
    """Path of tokenizer.json; None if there is none."""
    tekken: str | None = None
    """Path of Mistral's tekken.json, where there is no tokenizer.json."""
    folder: str = ""
    """The folder or hub id that the files are of."""
    video: Json = {}
    """video_preprocessor_config.json."""

    def described(self) -> list[Json]:
        """The content that decides how media is processed, without paths."""
        parts = [self.config, self.preprocessor, self.processor]
        return [*parts, self.video] if self.video else parts

    @property
    def image_processor(self) -> Json:
        nested = self.processor.get("image_processor")
        return dict(nested) if isinstance(nested, dict) else self.preprocessor

    @property
    def video_processor(self) -> Json:
        """Of films; where a folder has none, transformers takes that of pictures."""
        nested = self.processor.get("video_processor")
        return self.video or (dict(nested) if isinstance(nested, dict) else self.image_processor)

    @property
    def feature_extractor(self) -> Json:
        nested = self.processor.get("feature_extractor")
        return dict(nested) if isinstance(nested, dict) else self.preprocessor


def read_processor_files(folder: str | Path) -> ProcessorFiles:
    """The files of a local Hugging Face folder or a hub id.

    Raises `ModelLoadError` when config.json is missing or any of the files is not JSON.
    """
    config = _read_json(folder, "config.json")
    if not config:
        raise ModelLoadError(f"{folder} has no config.json")
    tokenizer = _file(folder, "tokenizer.json")
    tekken = None if tokenizer is not None else _file(folder, "tekken.json")
    preprocessor = _read_json(folder, "preprocessor_config.json")
    processor = _read_json(folder, "processor_config.json")
    if tekken is not None and (images := read_tekken(tekken).images) is not None:
        preprocessor = preprocessor or _pixtral_settings(images)
        processor = processor or {"spatial_merge_size": images.spatial_merge_size}
    return ProcessorFiles(
        config=config,
        preprocessor=preprocessor,
        processor=processor,
        tokenizer=None if tokenizer is None else str(tokenizer),
        tekken=None if tekken is None else str(tekken),
        folder=str(folder),
        video=_read_json(folder, "video_preprocessor_config.json"),
    )


def _pixtral_settings(images: TekkenImages) -> Json:
    """What Mistral publishes as preprocessor_config.json where it is not left out."""
    patch = images.image_patch_size
    return {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": images.max_image_size},
        "patch_size": {"height": patch, "width": patch},
    }


def _read_json(folder: str | Path, name: str) -> Json:
    """The JSON object in a file; empty if there is no such file."""
    path = _file(folder, name)
    if path is None:
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=Json)
    except msgspec.DecodeError:
        raise ModelLoadError(f"{name} of {folder} is not a JSON object") from None


def read_file(folder: str | Path, name: str) -> bytes | None:
    """A file of a folder or hub id; None if there is none."""
    path = _file(folder, name)
    return None if path is None else path.read_bytes()


def _file(folder: str | Path, name: str) -> Path | None:
    if Path(folder).is_dir():
        path = Path(folder) / name
        return path if path.is_file() else None
    return _hub_file(str(folder), name)


def _hub_file(model: str, name: str) -> Path | None:
    # Imported only for a hub id: a worker that reads a local folder starts sooner.
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except LocalEntryNotFoundError:
        raise ModelLoadError(f"{model} is no local folder, and the hub is not reached") from None
    except EntryNotFoundError:
        return None
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ModelLoadError(f"{name} of {model} cannot be read: {error}") from None


class ProcessorTokenizer:
    """The folder's tokenizer, for the texts that some families write around a picture's tokens.

    It needs the `tokenizers` library only. Of a folder that has tekken.json instead, special tokens
    are known. Raises `ModelLoadError` without either.
    """

    def __init__(self, files: ProcessorFiles) -> None:
        path = files.tokenizer or files.tekken
        if path is None:
            raise ModelLoadError("the model has no tokenizer.json, which says how media is written")
        self._special = {} if files.tekken is None else read_tekken(Path(files.tekken)).special_ids
        described = Path(path).read_bytes()
        self.digest = blake3(described).digest()
        """Digest of the tokenizer; part of the fingerprint of families that use this class."""
        self._tokenizer = Tokenizer.from_buffer(described) if files.tokenizer else None

    def runs(self, text: str) -> Runs:
        if self._tokenizer is None:
            raise ModelLoadError("the model has no tokenizer.json, which says how media is written")
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tuple((token, len(list(same))) for token, same in groupby(ids))

    def token(self, text: str) -> int:
        """The id of a text that is one token. Raises `ModelLoadError` if it is not."""
        found = self.find(text)
        if found is None:
            raise ModelLoadError(f"the tokenizer has no token {text}")
        return found

    def find(self, text: str) -> int | None:
        """The id of a text that is one token; None if it is not."""
        if self._tokenizer is None:
            return self._special.get(text)
        found: int | None = self._tokenizer.token_to_id(text)
        return found


def image_processor(config: Json, *allowed: str) -> Any:
    """The image processor that the folder names. Raises `ModelLoadError` unless it is `allowed`."""
    name = str(config.get("image_processor_type", allowed[0])).removesuffix("Fast")
    name = OLD_NAMES.get(name, name)
    if name not in allowed:
        raise ModelLoadError(f"image processor {name} is not supported with this model type")
    return getattr(import_module(IMAGE_PROCESSORS[name]), f"{name}Pil").from_dict(dict(config))


def whisper_feature_extractor(config: Json) -> Any:
    """The extractor, of which `whisper` uses only the settings and the mel filters."""
    module = import_module("transformers.models.whisper.feature_extraction_whisper")
    return module.WhisperFeatureExtractor.from_dict(dict(config))


def full_processor(files: ProcessorFiles, *, films: bool = False) -> Any:
    """transformers' processor of the folder: tokenizer, picture processor, feature extractor.

    The part for films needs torchvision: without `films` it is left out, except where the processor
    cannot be made without it. Raises `ModelLoadError` where transformers has no processor
    for this type, or not without torchvision.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        named = files.processor.get("processor_class") or files.preprocessor.get("processor_class")
        base = getattr(transformers, str(named), None)
        if base is None:
            base = PROCESSOR_MAPPING[type(_ours(transformers.AutoConfig, files))]
        kind = base if films else _without_films(base)
        parts = [_part(name, files, films=films) for name in kind.get_attributes()]
        settings, _ = kind.get_processor_dict(files.folder)
        try:
            return kind.from_args_and_dict(parts, settings)
        except AttributeError:  # it reads settings of the part for films (MiniCPM-V)
            watching = _ours(transformers.AutoVideoProcessor, files)
            parts = [watching if part is None else part for part in parts]
            return base.from_args_and_dict(parts, settings)
    except (ImportError, KeyError, OSError, TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"transformers cannot build its processor ({error})") from error


def _ours(kind: Any, files: ProcessorFiles, **options: Any) -> Any:
    """What transformers' own class makes of the folder; no code in the folder is run."""
    return kind.from_pretrained(files.folder, trust_remote_code=False, **options)


def _part(name: str, files: ProcessorFiles, *, films: bool) -> Any:
    import transformers

    if name == "video_processor":
        return _ours(transformers.AutoVideoProcessor, files) if films else None
    if name == "tokenizer":
        return _ours(transformers.AutoTokenizer, files)
    if name == "image_processor":
        try:
            return _ours(transformers.AutoImageProcessor, files, backend="pil")
        except ValueError:  # there is none of this backend
            return _ours(transformers.AutoImageProcessor, files)
    if name in ("feature_extractor", "audio_processor"):
        return _ours(transformers.AutoFeatureExtractor, files)
    raise ValueError(f"it has an unknown part {name}")


def _without_films(base: Any) -> Any:
    """The class, which accepts that it has no part for films."""

    def check(self: Any, name: str, value: object) -> Any:
        if name == "video_processor" and value is None:
            return type(None)
        return base.check_argument_for_proper_class(self, name, value)

    return type(base.__name__, (base,), {"check_argument_for_proper_class": check})
