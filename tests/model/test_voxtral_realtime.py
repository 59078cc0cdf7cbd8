"""Voxtral Realtime: a frame of sound is added to each token, live sessions side by side.

Tokens and logits equal Hugging Face's streaming `generate`; negative controls take away one piece
of what is remembered of a sound.
"""

from __future__ import annotations

import base64
import dataclasses
import json

import msgspec
import numpy as np
import pytest
import torch

from lookonce.config import NANO_EAR_FOLDER, ModelConfig
from lookonce.core.mm_features import FrameInputs
from lookonce.errors import BadRequestError, ModelLoadError, TooLargeError
from lookonce.model.families import voxtral_realtime
from lookonce.model.families.voxtral_realtime import VoxtralRealtimeFamily
from lookonce.model.frame_rows import FrameRows
from lookonce.model.fused_modules import FusedDecoder
from lookonce.model.loader import LoadedModel, load_model
from lookonce.model.streaming_encoder import MAX_FRAMES, StreamingEncoder
from lookonce.model.text_model import choose_decoder
from lookonce.render.families.registry import load_family
from lookonce.render.families.voxtral_realtime import LiveSound
from lookonce.render.prompt.tokenizer import Tokenizer
from tests.support.model.cases import MAX_LOGIT_ERROR, Case, sound
from tests.support.model.chats import chat_case, render
from tests.support.model.realtime import (
    FRAME,
    LEFT_PAD,
    LiveSessions,
    RealtimeSubject,
    feed_side_by_side,
    frames_of,
    mel_pieces,
    realtime_subject,
    reference_answer,
    streaming_answer,
)
from tests.support.model.serving import Answer, blocks_for_preemption, compare, serve
from tests.support.render.samples import numpy_of
from tests.support.speech_clips import speech_clips

VISIBLE_ERROR = 1e-2
SECONDS = (3.0, 4.3, 1.1)
"""Of sound beside the silence before it: several times the windows of text and encoder."""


@pytest.fixture(scope="module")
def subject(folder) -> RealtimeSubject:
    return realtime_subject(folder("voxtral_realtime"))


@pytest.fixture(scope="module")
def prompt(folder) -> list[int]:
    family = load_family(folder("voxtral_realtime"), "float32")
    return list(family.whole_prompt)


@pytest.fixture(scope="module")
def pieces(subject, prompt) -> list[list[torch.Tensor]]:
    """What Hugging Face's streaming `generate` takes of each sound."""
    waves = [sound(number, seconds) for number, seconds in enumerate(SECONDS)]
    return [list(mel_pieces(subject.extractor, wave, len(prompt))) for wave in waves]


@pytest.fixture(scope="module")
def expected(subject, prompt, pieces) -> list[Answer]:
    return [streaming_answer(subject, piece, prompt) for piece in pieces]


def answers(
    loaded: LoadedModel, prompt: list[int], pieces, lengths=lambda n: 3, **options
) -> list[Answer]:
    live = LiveSessions(loaded, prompt, **options)
    feed_side_by_side(live, [frames_of(piece) for piece in pieces], lengths)
    found = [live.answer(index, str(index)) for index in range(len(pieces))]
    live.close()
    assert live.runner.frame_rows.num_pages_used == live.runner.frame_rows.num_live == 0
    return found


def logit_error(loaded: LoadedModel, prompt, pieces, expected, **options) -> float:
    return compare(answers(loaded, prompt, pieces, **options), expected).max_logit_error


# --- parity ---------------------------------------------------------------------------------------


def test_the_prompt_is_as_mistral_common_writes_it(subject, prompt):
    """A begin token, and a streaming pad for each frame of silence and of the delay."""
    begin, *pads = prompt
    assert begin == 1
    assert pads == [25] * (LEFT_PAD + subject.delay)


@pytest.mark.parametrize("budget", [8, 23, 64])
@pytest.mark.parametrize(
    "lengths",
    [lambda n: 1, lambda n: (5, 1, 2, 40, 3)[n % 5], lambda n: 10_000],
    ids=["frame by frame", "in pieces", "at once"],
)
def test_sessions_side_by_side_equal_hugging_faces_streaming(
    subject, prompt, pieces, expected, budget, lengths
):
    found = answers(subject.loaded, prompt, pieces, lengths, budget=budget)
    difference = compare(found, expected)
    assert [len(answer.token_ids) for answer in found] == [len(e.token_ids) for e in expected]
    assert len(set(found[1].token_ids)) > 5, "the answers say something"
    assert difference.wrong == 0
    assert difference.max_logit_error < MAX_LOGIT_ERROR


def test_the_decoder_is_a_plain_one_once_the_delay_is_in_its_weights(subject):
    loaded = subject.loaded
    decoder = choose_decoder(loaded.family, loaded.dtype, loaded.device)
    assert isinstance(decoder, FusedDecoder)


def test_transformers_own_decoder_gives_the_same(subject, prompt, pieces, expected, monkeypatch):
    monkeypatch.setattr("lookonce.model.text_model.PLAIN_DECODERS", frozenset())
    assert logit_error(subject.loaded, prompt, pieces, expected) < MAX_LOGIT_ERROR


def test_a_sound_longer_than_one_run_of_the_encoder_equals_it_in_pieces(subject):
    rng = np.random.default_rng(0)
    shape = subject.loaded.family.frame_shape
    frames = torch.from_numpy(rng.standard_normal((2 * MAX_FRAMES + 9, *shape), np.float32))
    short = frames[:7]
    encoder = _encoder(subject)
    whole, other = encoder.encode_whole([frames, short])
    assert encoder.num_pages_used == 0
    with torch.inference_mode():
        reference = subject.reference.get_audio_features(
            input_features=frames.transpose(0, 1).flatten(1)[None]
        ).pooler_output[0]
    assert (whole - reference).abs().max() < 1e-4
    assert torch.allclose(other, whole[:7], atol=1e-5)


# --- negative controls ----------------------------------------------------------------------------


def test_another_delay_differs(subject, prompt, pieces, expected, monkeypatch):
    other = subject.delay + 1
    monkeypatch.setattr(VoxtralRealtimeFamily, "num_delay_tokens", other)
    loaded = load_model(ModelConfig(folder=str(subject.folder), served_name="test"))
    assert logit_error(loaded, prompt, pieces, expected) > VISIBLE_ERROR


def test_no_delay_at_all_differs(subject, prompt, pieces, expected, monkeypatch):
    def forget(model, num_delay_tokens):
        for layer in model.get_decoder().layers:
            del layer.ada_rms_norm
            layer.ada_rms_norm = voxtral_realtime._folded

    monkeypatch.setattr(voxtral_realtime, "fold_delay", forget)
    loaded = load_model(ModelConfig(folder=str(subject.folder), served_name="test"))
    assert logit_error(loaded, prompt, pieces, expected) > VISIBLE_ERROR


@pytest.mark.parametrize("convolution", [0, 1])
def test_a_convolution_that_forgets_differs(subject, prompt, pieces, expected, convolution):
    class Forgetful(VoxtralRealtimeFamily):
        def convolve(self, frames, states):
            emptied = list(states)
            emptied[convolution] = torch.zeros_like(states[convolution])
            return super().convolve(frames, tuple(emptied))

    loaded = _with_family(subject, Forgetful)
    assert logit_error(loaded, prompt, pieces, expected) > VISIBLE_ERROR


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("part", ["audio_tower", "language_model"])
def test_a_window_of_another_length_differs(
    subject, prompt, pieces, expected, monkeypatch, part, change
):
    config = getattr(subject.loaded.model.model, part).config
    monkeypatch.setattr(config, "sliding_window", config.sliding_window + change)
    loaded = _with_family(subject, VoxtralRealtimeFamily)
    assert logit_error(loaded, prompt, pieces, expected) > VISIBLE_ERROR


def test_pages_given_back_before_the_window_has_passed_differ(
    subject, prompt, pieces, expected, monkeypatch
):
    """A page more than may be: the keys in it are then of other sounds, or missing."""

    def drop_early(self, stream):
        self.window -= self._block_size
        try:
            honest(self, stream)
        finally:
            self.window += self._block_size

    honest = StreamingEncoder._drop_behind
    monkeypatch.setattr(StreamingEncoder, "_drop_behind", drop_early)
    assert logit_error(subject.loaded, prompt, pieces, expected) > VISIBLE_ERROR


def test_positions_that_start_again_with_each_run_differ(subject, prompt, pieces, expected):
    class Restarting(VoxtralRealtimeFamily):
        def attend(self, hidden, positions, step):
            return super().attend(hidden, torch.arange(len(positions)), step)

    loaded = _with_family(subject, Restarting)
    assert logit_error(loaded, prompt, pieces, expected) > VISIBLE_ERROR


def test_frames_one_token_late_differ(subject, prompt, pieces, expected):
    class Late(VoxtralRealtimeFamily):
        def place(self, embeds, at, rows):
            return super().place(embeds, at, rows.roll(1, 0))

    loaded = _with_family(subject, Late)
    assert logit_error(loaded, prompt, pieces, expected) > VISIBLE_ERROR


def test_frames_in_place_of_tokens_differ(subject, prompt, pieces, expected):
    class Replacing(VoxtralRealtimeFamily):
        def place(self, embeds, at, rows):
            embeds.index_copy_(0, at, rows)
            return {}

    loaded = _with_family(subject, Replacing)
    assert logit_error(loaded, prompt, pieces, expected) > VISIBLE_ERROR


def _with_family(subject: RealtimeSubject, family) -> LoadedModel:
    return dataclasses.replace(subject.loaded, family=family(subject.loaded.model))


def _encoder(subject: RealtimeSubject) -> StreamingEncoder:
    loaded = subject.loaded
    return StreamingEncoder(loaded.family, loaded.dtype, loaded.device)


# --- sessions -------------------------------------------------------------------------------------


def test_equal_sound_shares_its_prefix_and_other_sound_does_not(subject, prompt, pieces, expected):
    live = LiveSessions(subject.loaded, prompt)
    whole, other = frames_of(pieces[0]), frames_of(pieces[1])
    changed = whole.copy()
    changed[len(prompt) // 2] = other[-1]
    hits = []
    for name, frames in {"first": whole, "same": whole, "changed": changed}.items():
        live.open(name, frames)
        live.run()
        hits.append(live.core.stats()["prefix_cache_hits_total"] - sum(hits))
    live.open("stranger", whole, scope=b"s" * 32)
    live.run()
    blocks = len(prompt) // 4
    assert hits == [0, 4 * blocks, 4 * (len(prompt) // 2 // 4)]
    assert live.core.stats()["prefix_cache_hits_total"] == sum(hits)
    assert live.tokens["first"] == live.tokens["same"] == live.tokens["stranger"]
    assert live.tokens["same"] == expected[0].token_ids
    assert (live.answer(1, "same").logits - expected[0].logits).abs().max() < MAX_LOGIT_ERROR


def test_a_session_waits_within_its_prompt_for_frames_and_goes_on(
    subject, prompt, pieces, expected
):
    live = LiveSessions(subject.loaded, prompt)
    frames = frames_of(pieces[2])
    live.open("live", frames[:5])
    live.run()
    assert not live.core.has_work
    assert live.tokens["live"] == []
    live.extend("live", frames[5 : len(prompt) - 1])
    live.run()
    assert live.tokens["live"] == []
    live.extend("live", frames[len(prompt) - 1 :])
    live.run()
    assert live.tokens["live"] == expected[2].token_ids


def test_what_is_remembered_of_a_sound_does_not_grow(subject, prompt):
    live = LiveSessions(subject.loaded, prompt)
    rng = np.random.default_rng(5)
    live.open("live", rng.standard_normal((len(prompt), 32, 8), np.float32))
    live.run()
    used = set()
    for _ in range(60):
        live.extend("live", rng.standard_normal((4, 32, 8), np.float32))
        live.run()
        used.add(live.runner.frame_rows.num_pages_used)
    assert max(used) <= 3
    (known,) = live.runner.frame_rows._live.values()
    assert known.num_waiting == 0
    assert known.end - known.first <= 16


def test_frames_that_are_no_numbers_end_their_own_session(subject, prompt, pieces, expected):
    live = LiveSessions(subject.loaded, prompt)
    good = frames_of(pieces[2])
    bad = good.copy()
    bad[len(prompt) + 2] = np.nan
    live.open("good", good[: len(prompt)])
    live.open("bad", bad[: len(prompt)])
    live.run()
    for at in range(len(prompt), len(good)):
        live.extend("good", good[at : at + 1])
        live.extend("bad", bad[at : at + 1])
        live.step()
    live.run()
    assert live.ended["bad"].finish_reason == "error"
    assert "not finite" in live.ended["bad"].error[1]
    assert live.tokens["good"] == expected[2].token_ids


def test_a_run_of_the_encoder_that_fails_ends_its_own_session(subject, prompt, pieces, expected):
    class Choking(VoxtralRealtimeFamily):
        def convolve(self, frames, states):
            if (frames == 77.0).any():
                raise RuntimeError("choked")
            return super().convolve(frames, states)

    live = LiveSessions(_with_family(subject, Choking), prompt)
    good = frames_of(pieces[2])
    bad = good.copy()
    bad[-1] = 77.0
    for name, frames in (("good", good), ("bad", bad)):
        live.open(name, frames[:-1])
    live.run()
    live.extend("bad", bad[-1:])
    live.extend("good", good[-1:])
    live.run()
    assert live.ended["bad"].finish_reason == "error"
    assert live.tokens["good"] == expected[2].token_ids


def test_wrong_frames_are_refused_and_change_nothing(subject, prompt, pieces):
    live = LiveSessions(subject.loaded, prompt, num_blocks=400)
    frames = frames_of(pieces[0])
    for wrong in (frames[:0], frames[:, :-1], frames[:, :, :-1]):
        with pytest.raises(BadRequestError, match=r"float32 of shape \(n, 32, 8\)"):
            live.open("wrong", wrong)
    live.tokens.clear()
    live.open("live", frames[: len(prompt)])
    live.run()
    with pytest.raises(BadRequestError, match="32, 8"):
        live.extend("live", frames[:, :5])
    with pytest.raises(TooLargeError, match="has 5000 frames; a session takes 1601 at once"):
        live.extend("live", np.zeros((5000, 32, 8), np.float32))
    with pytest.raises(BadRequestError, match="frames of sound"):
        live.core.extend("live", np.array([1], np.int32), (), {})
    live.extend("live", frames[len(prompt) : len(prompt) + 3])
    live.run()
    assert len(live.tokens["live"]) == 4


# --- live sound -----------------------------------------------------------------------------------


def test_frames_of_a_live_sound_equal_hugging_faces(subject, prompt, pieces):
    family = load_family(subject.folder, "float32")
    rng = np.random.default_rng(3)
    for number, (seconds, theirs) in enumerate(zip(SECONDS, pieces, strict=True)):
        wave, live, found, at = sound(number, seconds), LiveSound(family), [], 0
        while at < len(wave):
            step = int(rng.integers(1, 4000))
            found.append(live.push(wave[at : at + step]))
            at += step
        ours = np.concatenate([numpy_of(each) for each in found if each is not None])
        wanted = frames_of(theirs)
        assert 0 <= len(ours) - len(wanted) <= 1, "Hugging Face's documented loop may leave one"
        assert np.abs(ours[: len(wanted)] - wanted).max() < 1e-3


def test_a_live_sound_that_ends_has_the_frames_of_the_clip(subject):
    family = load_family(subject.folder, "float32")
    wave = sound(4, 1.234)
    live = LiveSound(family)
    parts = [live.push(wave[:9000]), live.push(wave[9000:]), live.finish()]
    ours = np.concatenate([numpy_of(part) for part in parts if part is not None])
    clip = numpy_of(family.process("audio", wave, {}).arrays["input_features"])
    assert len(ours) == len(clip) - 1, "the last frame would give a token beyond the clip's"
    assert np.array_equal(ours, clip[:-1])


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clips(subject) -> list[Case]:
    """Rendered from a client's message; the reference is from Hugging Face's extractor alone."""
    return [chat_case(subject.folder, (sound(n, s),)) for n, s in enumerate((0.7, 2.0, 0.7))]


@pytest.fixture(scope="module")
def transcripts(subject, clips) -> list[Answer]:
    return [reference_answer(subject, **case.reference) for case in clips]


@pytest.mark.parametrize("budget", [16, 64])
def test_files_equal_hugging_faces_generate(subject, clips, transcripts, budget):
    served = serve(subject.loaded, clips, budget=budget, num_tokens=None)
    difference = compare(served.answers, transcripts)
    assert difference.wrong == 0
    assert difference.max_logit_error < 1e-3, "features are computed in float64 here"
    assert served.reasons == ["stop"] * len(clips)


def test_the_same_file_again_is_not_encoded_again(subject, clips):
    served = serve(subject.loaded, [clips[0]] * 3, budget=64, num_tokens=None)
    assert served.stats["encoder_runs_total"] == 1
    assert served.stats["prefix_cache_hits_total"] > 0


def test_a_preempted_file_is_computed_again(subject, clips, transcripts):
    picked = [1, 0]
    cases = [clips[index] for index in picked]
    num_blocks = blocks_for_preemption(cases, 4)
    served = serve(subject.loaded, cases, budget=64, num_blocks=num_blocks, num_tokens=None)
    assert served.stats["num_preemptions_total"] > 0
    assert served.stats["encoder_runs_total"] == 2
    assert compare(served.answers, [transcripts[index] for index in picked]).wrong == 0


def test_the_whole_clip_belongs_to_the_prompt(subject, prompt):
    rendered = render(subject.folder, (sound(1, 1.0),))
    (feature,) = rendered.features
    assert rendered.token_ids == prompt
    silence = LEFT_PAD + subject.delay + 1 + 10
    assert (feature.offset, feature.length) == (0, silence + -(-16000 // FRAME))
    assert FrameInputs(rendered.features).embed_slices(0, len(prompt)) == ()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("Write it down: ", sound(1)), r"messages\[0\].content: this model transcribes sound"),
        (("Hello",), r"messages\[0\].content: this model transcribes sound"),
        ((sound(1), sound(2)), "2"),
        ((" ",), "the messages have 0 sounds; this model takes one"),
    ],
    ids=["text", "text alone", "two sounds", "nothing"],
)
def test_what_the_model_would_not_see_is_refused(subject, parts, message):
    with pytest.raises(BadRequestError, match=message):
        render(subject.folder, parts)


# --- without end ----------------------------------------------------------------------------------


def test_a_session_goes_on_past_the_models_positions(subject, prompt):
    """Its logits equal those of transformers, which has as many positions as it is given."""
    info = msgspec.structs.replace(subject.loaded.info, max_model_len=96, max_positions=96)
    short = dataclasses.replace(subject.loaded, info=info)
    pieces = list(mel_pieces(subject.extractor, sound(9, 13.0), len(prompt)))
    theirs = streaming_answer(subject, pieces, prompt)
    live = LiveSessions(short, prompt, budget=16)
    feed_side_by_side(live, [frames_of(pieces)], lambda n: 3)
    assert len(prompt) + len(theirs.token_ids) > 2 * 96
    assert live.core.stats()["session_reanchors_total"] > 1
    difference = compare([live.answer(0, "0")], [theirs])
    assert difference.wrong == 0
    assert difference.max_logit_error < 5 * MAX_LOGIT_ERROR


def test_rows_that_do_not_move_with_their_tokens_differ(subject, prompt, monkeypatch):
    """A negative control of the test above."""
    monkeypatch.setattr(FrameRows, "drop", lambda self, change: None)
    pieces = list(mel_pieces(subject.extractor, sound(9, 1.0), len(prompt)))
    live = LiveSessions(subject.loaded, prompt, budget=16)
    feed_side_by_side(live, [frames_of(pieces)], lambda n: 3)
    assert live.ended["0"].finish_reason == "error", "the rows of its positions are not there"


# --- Mistral's own tokenizer file -----------------------------------------------------------------


def test_a_folder_with_tekken_json_alone_is_served_without_mistral_common(subject, tmp_path):
    """Published folders have no tokenizer.json. Bytes have the ids after the special tokens."""
    for file in subject.folder.iterdir():
        if file.name not in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / file.name).symlink_to(file)
    specials = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<SPECIAL_{i}>" for i in range(3, 32)),
        "[STREAMING_PAD]",
    ]
    tekken = {
        "config": {
            "pattern": r"\p{L}+|.",
            "default_vocab_size": 256 + 40,
            "default_num_special_tokens": 40,
        },
        "vocab": [
            {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()}
            for byte in range(256)
        ],
        "special_tokens": [{"rank": i, "token_str": text} for i, text in enumerate(specials)],
        "audio": {"streaming_n_left_pad_tokens": 9, "transcription_delay_ms": 480},
    }
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("hé") == [40 + byte for byte in "hé".encode()]
    assert tokenizer.decode([1, 40 + ord("a"), 32, 40 + ord("b"), 2]) == "ab"
    family = load_family(tmp_path, "float32")
    assert list(family.whole_prompt) == [1] + [32] * (9 + subject.delay)
    wave = sound(1, 0.1)
    assert family.process("audio", wave, {}).expansion.length == 9 + 2 + subject.delay + 11
    rendered = render(tmp_path, (wave,))
    assert rendered.token_ids == list(family.whole_prompt)


def test_a_tekken_file_that_makes_no_sense_is_refused(subject, tmp_path):
    (tmp_path / "config.json").symlink_to(subject.folder / "config.json")
    (tmp_path / "tekken.json").write_text('{"special_tokens": 5}')
    with pytest.raises(ModelLoadError, match=r"tekken\.json cannot be read"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelLoadError, match=r"tekken\.json cannot be read"):
        load_family(tmp_path, "float32")


# --- nano-ear -------------------------------------------------------------------------------------


def test_what_nano_ear_hears_is_what_transformers_hears():
    """Trained weights and 4 mel frames of 20 ms a token, where others have 8 of 10 ms."""
    subject = realtime_subject(NANO_EAR_FOLDER)
    prompt = list(load_family(NANO_EAR_FOLDER, "float32").whole_prompt)
    waves = [clip.wave() for clip in speech_clips()[:3]]
    pieces = [list(mel_pieces(subject.extractor, wave, len(prompt))) for wave in waves]
    expected = [streaming_answer(subject, each, prompt) for each in pieces]
    live = LiveSessions(subject.loaded, prompt)
    feed_side_by_side(live, [frames_of(each, 4) for each in pieces], lambda n: (1, 7, 2)[n % 3])
    found = [live.answer(index, str(index)) for index in range(len(waves))]
    live.close()
    difference = compare(found, expected)
    assert difference.wrong == 0
    assert difference.max_logit_error < 5 * MAX_LOGIT_ERROR, (
        "its logits are larger than random ones"
    )
