"""Digests of frames of sound: the same in whatever pieces they came, and only as many as needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.core.frame_digests import DIGEST_BYTES, SPARE, FrameDigests
from lookonce.types.media import Array

FRAMES = np.arange(300 * 6, dtype=np.float32).reshape(300, 2, 3)


def array(frames: np.ndarray) -> Array:
    return Array("float32", frames.shape, np.ascontiguousarray(frames).tobytes())


def digests(frames: np.ndarray, *cuts: int) -> FrameDigests:
    made = FrameDigests()
    for piece in np.split(frames, sorted(cuts)):
        if len(piece):
            made.extend(array(piece))
    return made


@given(st.lists(st.integers(0, 300), max_size=6), st.integers(0, 300), st.integers(0, 300))
def test_pieces_make_no_difference_and_every_frame_does(cuts, first, second):
    start, end = sorted((first, second))
    whole, cut = digests(FRAMES), digests(FRAMES, *cuts)
    assert cut.total == 300
    found = cut.between(start, end)
    assert found == whole.between(start, end)
    each = {found[at : at + DIGEST_BYTES] for at in range(0, len(found), DIGEST_BYTES)}
    assert len(each) == end - start


@given(st.lists(st.integers(0, 300), max_size=8))
def test_what_is_before_a_position_is_forgotten_and_the_rest_kept(positions):
    made, whole, forgotten = digests(FRAMES), digests(FRAMES), 0
    for position in positions:
        made.forget_before(position)
        forgotten = max(forgotten, position)
        assert made.between(forgotten, 300) == whole.between(forgotten, 300)
    with pytest.raises(RuntimeError, match="frames 0 to 300 of"):
        digests_forgetting(SPARE).between(0, 300)


def digests_forgetting(position: int) -> FrameDigests:
    made = digests(FRAMES)
    made.forget_before(position)
    return made


def test_frames_that_have_not_come_have_no_digest():
    with pytest.raises(RuntimeError, match="frames 299 to 301 of 0 to 300"):
        digests(FRAMES).between(299, 301)


def test_after_tokens_have_left_only_frames_are_counted():
    made = digests(FRAMES)
    made.move_back(100)
    made.extend(array(FRAMES[:5]))
    assert made.total == 205
    with pytest.raises(RuntimeError, match="frames 0 to 4"):
        made.between(0, 4)
