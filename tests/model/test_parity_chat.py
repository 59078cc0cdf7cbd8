"""From a client's message to greedy tokens, in one process: all of it equal to Hugging Face's.

A message with pictures and sounds as PNG and WAV bytes goes through renderer, engine core,
scheduler and runner. Its ids equal those of Hugging Face's full processor, its answer that of
`generate`. In `make test-models` with all kinds of model.
"""

from __future__ import annotations

import pytest

from tests.support.model.cases import COMPARED, MAX_LOGIT_ERROR, picture, sound
from tests.support.model.chats import chat_case
from tests.support.model.serving import compare, expected_answers, serve

PICTURES = ("Look at ", picture(1), " and ", picture(2, 90, 140), " well?")
SOUNDS = ("Hear ", sound(1), " and ", sound(2, 1.3), " well?")
BOTH = ("See ", picture(4, 64, 48), " hear ", sound(3, 0.7), " well?")
ONE_SOUND = ("Hear ", sound(2, 1.3), " well?")
PADS_TOGETHER = ("qwen3_omni",)
"""Kinds of which transformers pads the sounds of a prompt to the longest, and hears the end of the
shorter ones otherwise than alone."""
TEXT = ("What now? " * 4,)


def chats_of(kind, modalities):
    chats = [TEXT]
    chats += [PICTURES] if "image" in modalities else []
    sounds = ONE_SOUND if kind in PADS_TOGETHER else SOUNDS
    chats += [sounds] if "audio" in modalities else []
    return [*chats, BOTH] if {"image", "audio"} <= set(modalities) else chats


@pytest.mark.parametrize("kind", COMPARED)
def test_a_chat_is_answered_as_hugging_face_answers_it(subjects, folder, kind, record_property):
    subject = subjects(kind)
    chats = chats_of(kind, subject.loaded.info.modalities)
    cases = [chat_case(folder(kind), chat) for chat in chats]
    for case in cases:
        assert case.token_ids.tolist() == case.reference["input_ids"][0].tolist()
    expected = expected_answers(folder(kind), subject.loaded.info, cases)
    difference = compare(serve(subject.loaded, cases, budget=48).answers, expected)
    record_property("near_ties", difference.near_ties)
    assert difference.wrong == 0
    assert difference.max_logit_error < MAX_LOGIT_ERROR
