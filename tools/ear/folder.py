"""The untrained model as a folder: Hugging Face's Voxtral Realtime, a thousand times smaller."""

from __future__ import annotations

import json
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
MEL_BINS = 64
FRAMES_PER_TOKEN = 8
"""Mel frames of 10 ms."""

FEATURES = {
    "feature_extractor_type": "VoxtralRealtimeFeatureExtractor",
    "feature_size": MEL_BINS,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "win_length": 400,
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
            "vocab_size": len(tokenizer), "hidden_size": 192, "intermediate_size": 512,
            "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 48,
            "num_mel_bins": MEL_BINS, "max_position_embeddings": 1500, "sliding_window": 100,
            "rope_parameters": rope,
        },
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 192, "intermediate_size": 512,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 48, "max_position_embeddings": 4096, "sliding_window": 64,
            "rope_parameters": rope, "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        },
        audio_length_per_tok=FRAMES_PER_TOKEN, default_num_delay_tokens=DELAY,
        downsample_factor=4,
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
    save(model, target)
    (target / "preprocessor_config.json").write_text(json.dumps(FEATURES, indent=1) + "\n")


def save(model: VoxtralRealtimeForConditionalGeneration, target: Path) -> None:
    """The weights in bf16: computing with them in fp32 gives the same answers."""
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(torch.bfloat16).save_pretrained(target)
    model.to(torch.float32).load_state_dict(held)
