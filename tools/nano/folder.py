"""The untrained model: tokenizer, chat template, configuration and random weights, as a folder.

The layout is the one Hugging Face's Qwen2.5-Omni thinker has, so that every tool that knows that
model loads this one: five million parameters instead of billions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from tools.nano.world.conversations import Materials, conversation
from tools.nano.world.speech import Utterance

END = "<|im_end|>"
PAD = "<|endoftext|>"
IMAGE, AUDIO, VIDEO = "<|IMAGE|>", "<|AUDIO|>", "<|VIDEO|>"
VISION_START, VISION_END = "<|vision_bos|>", "<|vision_eos|>"
AUDIO_START, AUDIO_END = "<|audio_bos|>", "<|audio_eos|>"
SPECIALS = (
    PAD, "<|im_start|>", END, AUDIO, AUDIO_START, AUDIO_END, VISION_START, VISION_END,
    "<|vision_pad|>", IMAGE, VIDEO,
)  # fmt: skip
"""In the order of their ids."""

VOCABULARY = 1024
CONTEXT = 4096
SMALLEST_PICTURE, LARGEST_PICTURE = 56 * 56, 224 * 224
"""In pixels; others are resized to between them."""

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "Tools: {{ tools | length }} <tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] or [] %}"
    "{% if part['type'] in ('image', 'image_url', 'input_image') %}"
    "<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif part['type'] in ('audio', 'audio_url', 'input_audio') %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{{ call['function']['name'] }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

PREPROCESSOR = {
    "processor_class": "Qwen2_5OmniProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": SMALLEST_PICTURE, "longest_edge": LARGEST_PICTURE},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "dither": 0.0,
}
"""Settings for pictures and sounds in one file: saved one by one, they overwrite each other."""


def make_untrained(target: Path, materials: Materials, *, seed: int, texts: int) -> None:
    """Writes a complete folder; the tokenizer learns from `texts` conversations."""
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(texts_of(materials, seed, texts))
    tokenizer.save_pretrained(target)
    torch.manual_seed(seed)
    model = Qwen2_5OmniThinkerForConditionalGeneration(model_config(tokenizer))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        max_new_tokens=256,
        do_sample=False,
    )
    save(model, target)
    (target / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=1) + "\n")


def save(model: Qwen2_5OmniThinkerForConditionalGeneration, target: Path) -> None:
    """The weights in bf16: computing with them in fp32 gives the same answers."""
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(torch.bfloat16).save_pretrained(target)
    model.to(torch.float32).load_state_dict(held)


def make_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Byte-level pairs. Digits stand alone, and capitals begin a piece, so both can be read out."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r"(?=[A-Z])"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=PAD, padding_side="left",
        model_max_length=CONTEXT,
        extra_special_tokens={
            "image_token": IMAGE, "audio_token": AUDIO, "video_token": VIDEO,
            "vision_bos_token": VISION_START, "vision_eos_token": VISION_END,
            "audio_bos_token": AUDIO_START, "audio_eos_token": AUDIO_END,
        },
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def texts_of(materials: Materials, seed: int, conversations: int) -> Iterator[str]:
    rng, textless = random.Random(seed), replace(materials, speaker=_Mouth())
    for _ in range(conversations):
        for turn in conversation(rng, textless):
            yield turn.asked.question
            yield turn.asked.answer
    yield from (line.lower() for line in materials.lines[::4])


class _Mouth:
    """Says everything without a sound: only the words are wanted."""

    def say(self, rng: random.Random, words: Sequence[str]) -> Utterance:
        return Utterance(np.zeros(1, np.float32), ())


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5OmniThinkerConfig:
    token = tokenizer.convert_tokens_to_ids
    return Qwen2_5OmniThinkerConfig(
        text_config={
            "vocab_size": max(VOCABULARY, len(tokenizer)), "hidden_size": 256,
            "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12],
            },
            "tie_word_embeddings": False, "use_sliding_window": False,
            "pad_token_id": token(PAD), "eos_token_id": token(END), "bos_token_id": None,
        },
        vision_config={
            "depth": 4, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4,
            "out_hidden_size": 256, "patch_size": 14, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [1, 3],
        },
        audio_config={
            "num_mel_bins": 128, "encoder_layers": 3, "encoder_attention_heads": 4,
            "encoder_ffn_dim": 512, "d_model": 128, "n_window": 100,
            "max_source_positions": 1500, "output_dim": 256,
        },
        audio_token_index=token(AUDIO), image_token_index=token(IMAGE),
        video_token_index=token(VIDEO), audio_start_token_id=token(AUDIO_START),
        audio_end_token_id=token(AUDIO_END),
        # Read by `get_rope_index`, though the configuration class declares neither.
        vision_start_token_id=token(VISION_START), vision_end_token_id=token(VISION_END),
        tie_word_embeddings=False, eos_token_id=token(END), pad_token_id=token(PAD),
    )  # fmt: skip
