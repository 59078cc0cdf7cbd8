"""The untrained model as a folder: Hugging Face's Voxtral Realtime, a thousand times smaller."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    VoxtralRealtimeConfig,
    VoxtralRealtimeForConditionalGeneration,
)

from tools.ear.sentences import VOCABULARY

UNKNOWN, BEGIN, END, PAD = "<unk>", "<s>", "</s>", "<pad>"
AUDIO, STREAMING_PAD, STREAMING_WORD = "[AUDIO]", "[STREAMING_PAD]", "[STREAMING_WORD]"
SPECIALS = (UNKNOWN, BEGIN, END, PAD, AUDIO, STREAMING_PAD, STREAMING_WORD)
"""In the order of their ids; names as in Mistral's tokenizer."""

DELAY = 6
"""Frames of 80 ms from the end of a word to the token that says it."""
SAMPLE_RATE = 16_000
FRAME = 1280
"""Samples of one token."""
MEL_BINS = 64
HOP, WINDOW = 320, 512
"""Samples: a mel frame every 20 ms costs the encoder half of one every 10 ms."""
MEL_PER_TOKEN = FRAME // HOP
ENCODER_PER_TOKEN = MEL_PER_TOKEN // 2
"""Positions of the encoder: its second convolution halves the rate."""

FEATURES = {
    "feature_extractor_type": "VoxtralRealtimeFeatureExtractor",
    "feature_size": MEL_BINS,
    "sampling_rate": SAMPLE_RATE,
    "hop_length": HOP,
    "n_fft": WINDOW,
    "win_length": WINDOW,
    "padding_value": 0.0,
    "global_log_mel_max": 1.5,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word, with the space before it."""
    ids = {token: n for n, token in enumerate((*SPECIALS, *(f" {w}" for w in VOCABULARY)))}
    made = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\S+"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END, pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def model_config(tokenizer: PreTrainedTokenizerFast) -> VoxtralRealtimeConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return VoxtralRealtimeConfig(
        audio_config={
            "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 384,
            "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
            "num_mel_bins": MEL_BINS, "max_position_embeddings": 1500, "sliding_window": 48,
            "rope_parameters": rope,
        },
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 160, "intermediate_size": 448,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
            "head_dim": 40, "max_position_embeddings": 4096, "sliding_window": 48,
            "rope_parameters": rope, "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        },
        audio_length_per_tok=MEL_PER_TOKEN, default_num_delay_tokens=DELAY,
        downsample_factor=ENCODER_PER_TOKEN,
    )  # fmt: skip


def make_untrained(target: Path, *, seed: int) -> None:
    """Writes a complete folder."""
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(target)
    torch.manual_seed(seed)
    model = VoxtralRealtimeForConditionalGeneration(model_config(tokenizer))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    save(model, {}, target)
    (target / "preprocessor_config.json").write_text(json.dumps(FEATURES, indent=1) + "\n")


def save(
    model: VoxtralRealtimeForConditionalGeneration,
    weights: Mapping[str, torch.Tensor],
    target: Path,
) -> None:
    """These weights, by the names of parameters, in bf16: computing with them in fp32 gives the
    same answers."""
    held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.get(name, parameter))
        model.to(torch.bfloat16).save_pretrained(target)
        for name, parameter in model.to(torch.float32).named_parameters():
            parameter.copy_(held[name])


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """Ids of the tokenizer."""

    begin: int
    pad: int
    first_word: int
    """Words follow each other in the order of `VOCABULARY`."""


def token_numbers(tokenizer: PreTrainedTokenizerFast) -> TokenNumbers:
    begin, pad, first = (
        int(tokenizer.convert_tokens_to_ids(token))
        for token in (BEGIN, STREAMING_PAD, f" {VOCABULARY[0]}")
    )
    return TokenNumbers(begin, pad, first)
