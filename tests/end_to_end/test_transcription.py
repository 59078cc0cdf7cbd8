"""The OpenAI client's audio routes against real servers: a random Whisper, and nano."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
import torch

from tests.support.live_server import LiveServer
from tests.support.model_folders.speech import make_whisper

GREEDY = 1e-7
"""Greedy, and above 0, so that a doubtful text is not tried again at higher temperatures."""
RATE = 16000
ABORT = "/inference/v1/abort_requests"


def tones(seed: int, seconds: float) -> np.ndarray:
    """A melody with noise; the loudest tone is the first, so that levels do not
    depend on the end."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(RATE * seconds)) / RATE
    wave = 0.02 * rng.standard_normal(len(time))
    for start in np.arange(0, seconds, 0.25):
        within = (time >= start) & (time < start + 0.25)
        level = 0.9 if start == 0 else 0.4
        wave[within] += level * np.sin(2 * np.pi * rng.integers(200, 3000) * time[within])
    return wave.astype(np.float32)


def wav(wave: np.ndarray) -> bytes:
    target = io.BytesIO()
    soundfile.write(target, wave, RATE, format="WAV", subtype="FLOAT")
    return target.getvalue()


@pytest.fixture(scope="module")
def whisper_folder(tmp_path_factory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def whisper(whisper_folder) -> Iterator[LiveServer]:
    with LiveServer(str(whisper_folder), "--served-model-name", "ear") as live:
        yield live


@pytest.fixture(scope="module")
def reference(whisper_folder):
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(whisper_folder).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(whisper_folder)

    def segments(wave: np.ndarray, *, skip: int = 0, **options: Any) -> list[tuple]:
        long = len(wave) > extractor.n_samples
        padding = {"truncation": False, "padding": "longest"} if long else {}
        features = extractor(
            wave, sampling_rate=RATE, return_tensors="pt", **padding
        ).input_features[:, :, skip:]
        with torch.no_grad():
            found = model.generate(
                features, return_timestamps=True, return_segments=True, **options
            )
        end = model.generation_config.eos_token_id
        return [
            (
                round(float(each["start"]), 3),
                round(float(each["end"]), 3),
                [token for token in each["tokens"].tolist() if token != end],
            )
            for each in found["segments"][0]
        ]

    return segments


def transcribe(server: LiveServer, data: bytes, **options: Any) -> Any:
    with server.client() as client:
        answer = client.audio.transcriptions.create(
            **{"model": "ear", "file": ("clip.wav", data), "temperature": GREEDY, **options}
        )
        return list(answer) if options.get("stream") else answer


def verbose(server: LiveServer, data: bytes, **options: Any) -> Any:
    receipt = {"extra_body": {"reuse_receipt": "true"}}
    return transcribe(server, data, response_format="verbose_json", **receipt, **options)


def found(answer: Any) -> list[tuple]:
    return [(each.start, each.end, each.tokens) for each in answer.segments]


LONG = tones(1, 5.37)


def test_a_long_file_is_heard_in_transformers_windows(whisper, reference) -> None:
    answer = verbose(whisper, wav(LONG))
    expected = reference(LONG, task="transcribe")
    assert len({segment.seek for segment in answer.segments}) > 1
    assert found(answer) == expected
    assert answer.duration == 5.37
    assert answer.language in ("english", "german", "french")
    assert [tokens for *_, tokens in expected] != [
        tokens for *_, tokens in reference(LONG, task="transcribe", skip=7)
    ], "windows at other offsets are heard differently"


@pytest.mark.parametrize(
    ("options", "generating"),
    [({"language": "de"}, {"language": "de"}), ({"prompt": "red circle"}, {})],
)
def test_short_clips_with_options_equal_transformers(
    whisper, reference, whisper_folder, options, generating
) -> None:
    wave = tones(2, 1.3)
    if "prompt" in options:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(whisper_folder)
        ids = tokenizer(" " + options["prompt"], add_special_tokens=False).input_ids
        before = tokenizer.convert_tokens_to_ids("<|startofprev|>")
        generating = {"prompt_ids": torch.tensor([before, *ids])}
    answer = verbose(whisper, wav(wave), **options)
    expected = reference(wave, task="transcribe", **generating)
    assert [each.tokens for each in answer.segments] == [tokens for *_, tokens in expected]


def test_a_translation_is_another_task(whisper, reference) -> None:
    wave = tones(3, 1.1)
    with whisper.client() as client:
        answer = client.audio.translations.create(
            model="ear", file=("a.wav", wav(wave)), response_format="verbose_json",
            temperature=GREEDY,
        )  # fmt: skip
    expected = reference(wave, task="translate")
    assert [each.tokens for each in answer.segments] == [tokens for *_, tokens in expected]


def test_every_format_says_the_same(whisper) -> None:
    data = wav(LONG)
    plain = transcribe(whisper, data)
    whole = verbose(whisper, data)
    assert plain.text == whole.text
    assert plain.usage.type == "tokens"
    assert plain.usage.total_tokens == plain.usage.input_tokens + plain.usage.output_tokens
    assert whole.usage.seconds == 6
    assert transcribe(whisper, data, response_format="text") == plain.text + "\n"
    srt = transcribe(whisper, data, response_format="srt")
    vtt = transcribe(whisper, data, response_format="vtt")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(whole.segments)
    assert vtt.startswith("WEBVTT\n\n00:00:")


def test_a_stream_has_openai_s_events_and_logprobs(whisper) -> None:
    data = wav(LONG)
    *deltas, done = transcribe(whisper, data, stream=True, include=["logprobs"])
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas) == done.text == transcribe(whisper, data).text
    scored = [entry for event in deltas for entry in event.logprobs]
    assert [entry.logprob for entry in scored] == [entry.logprob for entry in done.logprobs]
    assert all(entry.logprob <= 0 for entry in scored)
    assert done.usage.output_tokens > 0


def counts(server: LiveServer) -> tuple[float, float]:
    metrics = server.metrics()
    return metrics["media_decodes_total:audio"], metrics["encoder_runs_total"]


def test_the_same_file_again_is_neither_decoded_nor_encoded(whisper) -> None:
    data = wav(tones(4, 4.2))
    first = verbose(whisper, data)
    before = counts(whisper)
    again = verbose(whisper, data)
    assert counts(whisper) == before
    assert found(again) == found(first)
    items = again.reuse_receipt["items"]
    assert {item["processor"] for item in items} == {"hit"}
    assert {item["encoder"] for item in items} == {"hit"}
    assert first.reuse_receipt["items"][0]["encoder"] == "miss"
    assert first.reuse_receipt["items"][0]["decode_ms"] > 0


def test_a_file_that_begins_like_another_reuses_its_windows(whisper) -> None:
    beginning, one, two = tones(5, 3.0), tones(6, 2.0)[4000:], tones(7, 2.0)[4000:]
    verbose(whisper, wav(np.concatenate([beginning, one])))
    answer = verbose(whisper, wav(np.concatenate([beginning, two])))
    by_window: dict[str, str] = {}
    for item in answer.reuse_receipt["items"]:
        by_window.setdefault(item["hash"], item["encoder"])
    assert next(iter(by_window.values())) == "hit"
    assert "miss" in by_window.values()


def test_one_clip_for_many_at_once_is_decoded_and_encoded_once(whisper) -> None:
    data, (decoded, _) = wav(tones(8, 1.5)), counts(whisper)

    async def many() -> list[Any]:
        async with whisper.async_client() as client:
            asked = [
                client.audio.transcriptions.create(
                    model="ear",
                    file=("a.wav", data),
                    temperature=GREEDY,
                    extra_body={"reuse_receipt": "true"},
                )
                for _ in range(6)
            ]
            return await asyncio.gather(*asked)

    answers = asyncio.run(many())
    assert len({answer.text for answer in answers}) == 1
    items = [item for answer in answers for item in answer.reuse_receipt["items"]]
    windows = {item["hash"] for item in items}
    assert [item["encoder"] for item in items].count("miss") == len(windows)
    assert len(items) > 6 * len(windows)
    assert counts(whisper)[0] == decoded + 1


def test_a_doubtful_text_is_tried_again_and_stays_the_same(whisper) -> None:
    data = wav(tones(9, 1.2))
    one, two = (verbose(whisper, data, temperature=0) for _ in range(2))
    assert found(one) == found(two)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"file": ("a.wav", b"no sound at all")}, "file"),
        ({"file": ("a.wav", b"")}, "file"),
        ({"language": "xx"}, "language"),
        ({"temperature": 7}, "temperature"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"stream": True, "response_format": "srt"}, "response_format"),
        ({"extra_body": {"keywords": ["x"]}}, "keywords"),
    ],
)
def test_a_wrong_field_is_named(whisper, options, param) -> None:
    with pytest.raises(openai.APIStatusError) as failure:
        transcribe(whisper, wav(tones(1, 0.5)), **options)
    assert failure.value.status_code in (400, 422)
    assert failure.value.param == param


def test_a_form_of_a_foreign_page_and_a_body_that_is_no_form_are_refused(whisper) -> None:
    url, form = whisper.url + "/v1/audio/transcriptions", {"file": ("a.wav", wav(LONG))}
    foreign = httpx.post(url, files=form, headers={"Origin": "https://elsewhere.example"})
    assert foreign.status_code == 403
    assert httpx.post(url, json={"file": "x"}).status_code == 415


def test_an_encoder_decoder_does_not_chat(whisper) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    assert whisper.post("/v1/chat/completions", body).status_code == 400
    assert whisper.post("/v1/completions", {"prompt": "Hello"}).status_code == 400


# --- a model that chats -------------------------------------------------------------------------


def test_an_audio_chat_model_transcribes_in_its_way(server) -> None:
    data = wav(tones(1, 0.8))
    first = transcribe(server, data, model="nano")
    before = counts(server)
    *deltas, done = transcribe(server, data, model="nano", stream=True)
    assert counts(server) == before
    assert "".join(event.delta for event in deltas) == done.text == first.text
    assert done.usage.input_token_details.audio_tokens > 0
    with pytest.raises(openai.BadRequestError, match="no timestamps"):
        transcribe(server, data, model="nano", response_format="srt")


def test_a_transcription_is_aborted_by_its_request_id(whisper) -> None:
    """The engine stands still until the abort is on its way."""
    asked = {"request_ids": ["heard-by-nobody"]}
    pid = whisper.engine_pid()
    with ThreadPoolExecutor(2) as threads:
        os.kill(pid, signal.SIGSTOP)
        try:
            answer = threads.submit(
                transcribe, whisper, wav(LONG), extra_body={"request_id": "heard-by-nobody"}
            )

            def abort() -> list[str]:
                while not (ended := whisper.post(ABORT, asked).json()["aborted"]):
                    assert not answer.done()
                return list(ended)

            aborting = threads.submit(abort)
            wait([aborting], timeout=5)  # it may be answered once the engine goes on
        finally:
            os.kill(pid, signal.SIGCONT)
        assert aborting.result() == asked["request_ids"]
        with pytest.raises(openai.BadRequestError, match="was aborted"):
            answer.result()
    assert transcribe(whisper, wav(LONG)).text
