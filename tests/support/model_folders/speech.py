"""Random folders of encoder-decoders, with tokens in the order of published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.model_folders.base import SOUND, Json

SECONDS = 2
"""Seconds of a window; published models hear 30."""
TEXT_TOKENS = 300
LANGUAGES = ("en", "de", "fr")
SPECIALS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
TIMES = tuple(f"<|{0.02 * step:.2f}|>" for step in range(50 * SECONDS + 1))
MAX_LENGTH = 48
ALIGNMENT_HEADS = [[1, 0], [2, 3], [2, 1]]


def write_tokenizer(target: Path, specials: tuple[str, ...], times: tuple[str, ...]) -> Json:
    """Text first, then special tokens, then times; ids by text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tests.support.model_folders.make import CORPUS

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in times])
    named = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), specials[0])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(target)
    return {text: tokenizer.token_to_id(text) for text in (*specials, *times)}


def make_whisper(target: Path, *, seed: int = 0, english: bool = False) -> Path:
    """Every part is there: more heads than layers, decoder and encoder of different depths."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    from tests.support.model_folders.make import randomise

    target.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(target, SPECIALS, TIMES)
    end = ids["<|endoftext|>"]
    config = WhisperConfig(
        vocab_size=len(ids) + TEXT_TOKENS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=32,
        max_source_positions=50 * SECONDS,
        max_target_positions=MAX_LENGTH,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=ids["<|startoftranscript|>"],
    )
    with torch.random.fork_rng(devices=[]):
        model: Any = WhisperForConditionalGeneration(config)
    randomise(model, seed)
    with torch.no_grad():  # what is heard decides: the input's part is larger than the text's
        for layer in model.model.decoder.layers:
            layer.encoder_attn.out_proj.weight *= 3.0
    generation = {
        "alignment_heads": ALIGNMENT_HEADS,
        "begin_suppress_tokens": [3, end],
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "is_multilingual": not english,
        "max_initial_timestamp_index": 10,
        "max_length": MAX_LENGTH,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "suppress_tokens": [5, 7, *(ids[text] for text in SPECIALS[1:-1])],
        "return_timestamps": False,
    }
    if english:
        generation["forced_decoder_ids"] = [[1, ids["<|notimestamps|>"]]]
    else:
        generation["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
        generation["task_to_id"] = {
            task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")
        }
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.generation_config._from_model_config = False  # or transformers makes it anew on loading
    model.save_pretrained(target)
    extractor = {**SOUND, "feature_size": 32, "chunk_length": SECONDS}
    (target / "preprocessor_config.json").write_text(json.dumps(extractor), encoding="utf-8")
    return target


def make_moonshine(target: Path, *, seed: int = 0) -> Path:
    """Heads of 12, padded to 16; decoder and encoder of different depths."""
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration

    ids = _write_moonshine_files(target)
    config = MoonshineConfig(
        **_moonshine(ids),
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=3,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
    )
    return _save(MoonshineForConditionalGeneration, config, target, seed)


def make_moonshine_streaming(target: Path, *, seed: int = 0) -> Path:
    """An encoder of another width than the decoder, attending in windows."""
    from transformers import MoonshineStreamingConfig, MoonshineStreamingForConditionalGeneration

    ids = _write_moonshine_files(target)
    config = MoonshineStreamingConfig(
        **{**_moonshine(ids), "max_position_embeddings": 128},  # of the encoder's rows, too
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        encoder_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 4096,
            "sliding_windows": [[4, 2], [3, 0]],
        },
    )
    return _save(MoonshineStreamingForConditionalGeneration, config, target, seed)


def _moonshine(ids: Json) -> Json:
    return {
        "vocab_size": len(ids) + TEXT_TOKENS,
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": MAX_LENGTH,
        "pad_head_dim_to_multiple_of": 16,
        "pad_token_id": ids["</s>"],
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "decoder_start_token_id": ids["<s>"],
    }


def _write_moonshine_files(target: Path) -> Json:
    target.mkdir(parents=True, exist_ok=True)
    extractor = {
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "feature_size": 1,
        "sampling_rate": 16000,
        "padding_value": 0.0,
        "do_normalize": False,
        "return_attention_mask": True,
    }
    (target / "preprocessor_config.json").write_text(json.dumps(extractor), encoding="utf-8")
    return write_tokenizer(target, ("</s>", "<s>", *(f"<<ST_{i}>>" for i in range(8))), ())


def _save(kind: Any, config: Any, target: Path, seed: int) -> Path:
    import torch

    from tests.support.model_folders.make import randomise

    with torch.random.fork_rng(devices=[]):
        model = kind(config)
    randomise(model, seed)
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.encoder_attn.o_proj.weight *= 3.0
    model.generation_config.max_length = MAX_LENGTH
    model.generation_config._from_model_config = False
    model.save_pretrained(target)
    return target


SPEECH_KINDS: dict[str, Callable[[Path], Path]] = {
    "whisper": make_whisper,
    "moonshine": make_moonshine,
    "moonshine_streaming": make_moonshine_streaming,
}
"""Type → what makes a random folder of it."""
