"""The training of an ear: what is heard, when each word is to be said, and the folder made."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tools.ear import folder
from tools.ear.sentences import VOCABULARY, is_held_out, sentence
from tools.ear.speech import (
    HELD_OUT_VOICES,
    SAMPLE_RATE,
    VOICES,
    Spoken,
    _ends,
    any_voice,
    heard,
)
from tools.ear.training import IGNORED, EarPlan, Sentences, emitted_at, train, transcribe
from tools.train_ear import edits


def beeps(rng, words, voices):
    """A mouth that needs no espeak-ng: each word a tone of its own, a quarter of a second long."""
    quarter = np.arange(SAMPLE_RATE // 4) / SAMPLE_RATE
    tones = [np.sin(2 * np.pi * (200 + 15 * VOCABULARY.index(w)) * quarter) for w in words]
    ends = tuple(0.25 * (n + 1) for n in range(len(words)))
    return Spoken(tuple(words), np.concatenate(tones).astype(np.float32), ends)


def test_held_out_sentences_and_voices_are_never_trained_on():
    rng = random.Random(1)
    assert not any(is_held_out(sentence(rng, held_out=False)) for _ in range(200))
    assert all(is_held_out(sentence(rng, held_out=True)) for _ in range(20))
    assert not set(VOICES) & set(HELD_OUT_VOICES)


def test_a_word_ends_where_the_next_begins_and_joined_words_end_together():
    starts = [(1, 0), (5, 200), (16, 700)]  # "the", "red" and "circle" joined, "is"
    assert _ends(("the", "red", "circle", "is"), starts, 1.0) == (0.2, 0.7, 0.7, 1.0)


def test_each_word_is_said_its_delay_after_its_end_and_one_in_each_frame():
    assert emitted_at([0.05, 0.5, 0.51, 2.0], left=3, delay=6) == [9, 15, 16, 34]


def test_targets_stand_where_the_words_were_heard(tmp_path):
    tokenizer = folder.make_tokenizer()
    batch = next(iter(Sentences(tokenizer, seed=3, size=4, say=beeps)))
    frames = batch.targets.shape[1]
    assert batch.mel.shape == (4, folder.MEL_BINS, frames * folder.FRAMES_PER_TOKEN)
    for mel, targets, token_ids in zip(batch.mel, batch.targets, batch.token_ids, strict=True):
        assert token_ids[0] == tokenizer.bos_token_id
        kept = targets != IGNORED
        words = kept & (targets != tokenizer.convert_tokens_to_ids(folder.STREAMING_PAD))
        assert words.any()
        assert torch.equal(token_ids[1:][kept[:-1]], targets[:-1][kept[:-1]])
        for place in words.nonzero()[:, 0].tolist():
            tone = mel[:, (place - folder.DELAY - 1) * 8 : (place - folder.DELAY) * 8]
            assert tone.max() > mel[:, :8].max()  # something sounded a delay before


def test_silence_before_a_sentence_moves_its_words():
    spoken = beeps(None, ("four", "seven"), ())
    rng = random.Random(0)
    assert heard(rng, spoken, before=0.5, after=0.0).ends == (0.75, 1.0)


def test_edits_are_counted_in_words():
    assert edits(("a", "red", "box"), ("a", "box")) == 1
    assert edits(("a",), ("the", "red")) == 2
    assert edits((), ("a",)) == 1


def test_a_trained_folder_loads_and_transcribes(tmp_path):
    lines: list[str] = []
    train(tmp_path, EarPlan(steps=2, batch=2), lines.append, save_each=1e9, say=beeps)
    from transformers import VoxtralRealtimeForConditionalGeneration

    assert lines
    model = VoxtralRealtimeForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    spoken = beeps(None, ("four", "seven"), ())
    assert set(transcribe(model.eval(), tokenizer, spoken, left=4)) <= set(VOCABULARY)
    assert tokenizer.decode(tokenizer.encode(" four seven")) == " four seven"


@pytest.mark.skipif(not shutil.which("espeak-ng"), reason="espeak-ng is not installed")
def test_espeak_says_when_each_word_ends():
    spoken = any_voice(random.Random(1), ("my", "phone", "is", "four"), HELD_OUT_VOICES)
    assert list(spoken.ends) == sorted(spoken.ends)
    assert 0 < spoken.ends[0] < spoken.ends[-1] <= len(spoken.wave) / SAMPLE_RATE
