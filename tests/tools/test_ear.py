"""The training of an ear: what is heard, when each word is to be said, and the folder made."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, VoxtralRealtimeForConditionalGeneration

from tools.ear import folder
from tools.ear.corpus import PHONEMES, extractor, read_shard, utterance, write_shard
from tools.ear.dense import DenseForward
from tools.ear.hearing import edits, transcribe
from tools.ear.optimizer import Optimizer, orthogonal
from tools.ear.rows import IGNORED, Rows, emitted_at
from tools.ear.sentences import CONTENT, VOCABULARY, is_held_out, sentence
from tools.ear.speech import HELD_OUT_VOICES, VOICES, Spoken, _ends, any_voice, heard
from tools.ear.training import EarPlan, Trainer, schedule, train

PLAN = EarPlan(steps=3, rows=2, frames=40, sentences=8)
QUARTER = folder.SAMPLE_RATE // 4


def beeps(rng, words, voices):
    """A mouth that needs no espeak-ng: each word a tone of its own, a quarter of a second long."""
    times = np.arange(QUARTER) / folder.SAMPLE_RATE
    tones = [np.sin(2 * np.pi * (200 + 15 * VOCABULARY.index(w)) * times) for w in words]
    begins = [0.25 * n for n in range(len(words) + 1)]
    phonemes = [(at, PHONEMES[1 + n % 9]) for n, at in enumerate(begins[:-1])]
    return Spoken(
        tuple(words), np.concatenate(tones).astype(np.float32), tuple(begins[1:]),
        (*phonemes, (begins[-1], PHONEMES[0])),
    )  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Where speech and state of a training of a few steps lie, and its folder."""
    work, lines = tmp_path_factory.mktemp("ear"), []
    train(work / "model", work, PLAN, lines.append, save_each=1e9, say=beeps)
    assert lines
    return work


@pytest.fixture(scope="module")
def trained(work):
    model = VoxtralRealtimeForConditionalGeneration.from_pretrained(
        work / "model", dtype=torch.float32
    )
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(work / "model")


# --- what is said ---------------------------------------------------------------------------------


def test_held_out_sentences_and_voices_are_never_trained_on():
    rng = random.Random(1)
    assert not any(is_held_out(sentence(rng, held_out=False)) for _ in range(200))
    assert all(is_held_out(sentence(rng, held_out=True)) for _ in range(20))
    assert not set(VOICES) & set(HELD_OUT_VOICES)
    assert {"two", "four", "no"} <= set(CONTENT)
    assert not {"to", "for", "know"} & set(CONTENT)


def test_a_word_ends_where_the_next_begins_and_joined_words_end_together():
    starts = [(1, 0), (5, 200), (16, 700)]  # "the", "red" and "circle" joined, "is"
    assert _ends(("the", "red", "circle", "is"), starts, 1.0) == (0.2, 0.7, 0.7, 1.0)


def test_silence_before_a_sentence_moves_its_words():
    spoken = beeps(None, ("four", "seven"), ())
    assert heard(random.Random(0), spoken, before=0.5, after=0.0).ends == (0.75, 1.0)


@pytest.mark.skipif(not shutil.which("espeak-ng"), reason="espeak-ng is not installed")
def test_espeak_says_when_each_word_ends_and_each_phoneme_begins():
    spoken = any_voice(random.Random(1), ("my", "phone", "is", "four"), HELD_OUT_VOICES)
    assert list(spoken.ends) == sorted(spoken.ends)
    assert 0 < spoken.ends[0] < spoken.ends[-1] <= len(spoken.wave) / folder.SAMPLE_RATE
    begins, names = zip(*spoken.phonemes, strict=True)
    assert list(begins) == sorted(begins)
    assert names[:2] == ("m", "aI")
    assert names[-1] == "_"
    assert set(names) <= set(PHONEMES)


# --- what is trained on ---------------------------------------------------------------------------


def test_a_shard_keeps_what_was_said(tmp_path):
    shard = tmp_path / "shard.safetensors"
    write_shard(shard, "seed", size=3, say=beeps)
    found = read_shard(shard)
    rng = random.Random("seed")
    for each in found:
        expected = utterance(
            beeps(rng, sentence(rng, held_out=False), VOICES), extractor().mel_filters
        )
        assert np.array_equal(each.mel, expected.mel)
        assert each.words.tolist() == expected.words.tolist()
        assert each.ends.tolist() == expected.ends.tolist()
        assert each.phonemes.tolist() == expected.phonemes.tolist()
        assert each.loudness == pytest.approx(expected.loudness)
    assert len(found) == 3


def test_each_word_is_said_its_delay_after_its_end_and_one_in_each_frame():
    assert emitted_at([0.05, 0.5, 0.51, 2.0], left=3, delay=6) == [9, 15, 16, 34]


def test_targets_stand_where_the_words_were_heard(work):
    tokens = folder.token_numbers(folder.make_tokenizer())
    utterances = read_shard(work / "corpus" / "000.safetensors")
    rows = Rows(tokens, seed=3, frames=60, noise_seconds=8)
    batch = rows.batch(utterances, 6)
    assert batch.mel.shape == (6, folder.MEL_BINS, 60 * folder.MEL_PER_TOKEN)
    assert batch.phonemes.shape == (6, 60 * folder.ENCODER_PER_TOKEN)
    said_wrong = 0
    for token_ids, targets, phonemes in zip(
        batch.token_ids, batch.targets, batch.phonemes, strict=True
    ):
        assert token_ids[0] in (tokens.begin, tokens.pad)
        assert (targets == IGNORED).any() == (token_ids[0] == tokens.begin)
        words = targets >= tokens.first_word
        assert words.any()
        for place in words.nonzero()[:, 0].tolist():  # something sounded a delay before
            ended = (place - folder.DELAY) * folder.ENCODER_PER_TOKEN
            assert (phonemes[max(0, ended - 2) : ended + 4] > 0).any()
        kept = targets[:-1] != IGNORED
        said, meant = token_ids[1:][kept], targets[:-1][kept]
        assert torch.equal(said >= tokens.first_word, meant >= tokens.first_word)
        said_wrong += int((said != meant).sum())
    assert said_wrong <= 0.3 * int((batch.targets >= tokens.first_word).sum())


# --- the training ---------------------------------------------------------------------------------


def test_the_fused_forward_pass_is_transformers_own(trained):
    model, _ = trained
    mel, token_ids = torch.randn(2, folder.MEL_BINS, 240), torch.randint(0, 100, (2, 60))
    with torch.no_grad():
        expected = model(
            input_ids=token_ids, input_features=mel, num_delay_tokens=folder.DELAY, use_cache=False
        ).logits
        found, _ = DenseForward(model, 60)(mel, token_ids)
    assert (found - expected).abs().max() < 1e-4


def test_directions_of_matrices_are_near_orthogonal():
    for rows, columns in ((8, 20), (20, 8)):
        made = orthogonal(torch.randn(3, rows, columns))
        assert torch.linalg.svdvals(made).sub(1).abs().max() < 0.35


def test_the_optimizer_finds_a_minimum():
    torch.manual_seed(0)
    wanted = {"matrix": torch.randn(6, 4), "bias": torch.randn(6)}
    found = {name: torch.nn.Parameter(torch.zeros_like(each)) for name, each in wanted.items()}
    optimizer = Optimizer(found)
    for step in range(300):
        sum(((found[name] - wanted[name]) ** 2).sum() for name in wanted).backward()
        optimizer.step(0.1 * schedule(step, 300, 0.4))
    assert all((found[name] - wanted[name]).abs().max() < 0.1 for name in wanted)


def test_training_goes_on_where_it_was_ended(work, tmp_path):
    state = work / "state.safetensors"
    trainer = Trainer(work / "model", PLAN)
    assert trainer.steps == 0
    trainer.restore(state)
    assert trainer.steps == PLAN.steps
    trainer.save(tmp_path / "state.safetensors")
    assert (tmp_path / "state.safetensors").read_bytes() == state.read_bytes()


def test_a_trained_folder_loads_and_transcribes(trained):
    model, tokenizer = trained
    wave = beeps(None, ("four", "seven"), ()).wave
    assert set(transcribe(model, tokenizer, wave, left=4)) <= set(VOCABULARY)
    assert tokenizer.decode(tokenizer.encode(" four seven")) == " four seven"


def test_edits_are_counted_in_words():
    assert edits(("a", "red", "box"), ("a", "box")) == 1
    assert edits(("a",), ("the", "red")) == 2
    assert edits((), ("a",)) == 1
