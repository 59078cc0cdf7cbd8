"""Traces: every form is read as what it says, and generators share what they say they share."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.core.mm_features import MultiModalFeatures
from lookonce.core.request import TokenBuffer, extend_chain
from lookonce.errors import ConfigError
from lookonce.simulate.trace import (
    GENERATORS,
    Shape,
    TraceMedium,
    TraceRequest,
    block_keys,
    few_mixed,
    media_key,
    mix,
    number_of,
    read_trace,
    token_ids,
)
from lookonce.types.media import MediaFeature

SHAPE = Shape(requests=24, rate=4.0, turns=4, seed=3, pictures=5)


def shared(one: TraceRequest, other: TraceRequest) -> int:
    """Leading tokens that two requests share."""
    first, second = token_ids(one), token_ids(other)
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_mooncakes_hash_ids_are_512_tokens_that_are_shared(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"timestamp": 4500, "input_length": 1600, "output_length": 9, "hash_ids": [1, 2, 8, 9]},
    ]
    first, second = read_trace(written(tmp_path, *map(json.dumps, lines)))
    assert (first.arrival, second.arrival) == (0.0, 1.5)
    assert (first.prompt_tokens, first.output_tokens) == (1100, 7)
    assert shared(first, second) == 1024, "the third block of the first is not full"


def test_small_hash_ids_and_pictures_of_traces_without_times(tmp_path: Path) -> None:
    fields = {"input_length": 300, "hash_ids": list(range(19)), "img_ids": ["a"]}
    (only,) = read_trace(written(tmp_path, json.dumps(fields)))
    assert only.block_tokens == 16
    assert only.output_tokens == 1, "no answer is known"
    assert [(m.offset, m.length) for m in only.media] == [(0, 256)]


def test_servegens_columns_share_nothing(tmp_path: Path) -> None:
    path = written(
        tmp_path, "timestamp,input_tokens,output_tokens,image_tokens", "0.5,100,20,64", "2,40,3,"
    )
    first, second = read_trace(path)
    assert second.arrival == 1.5
    assert [m.length for m in first.media] == [64]
    assert (second.prompt_tokens, second.media) == (40, ())
    assert shared(first, second) == 0


def test_a_request_log_has_digests_of_prompt_and_answer(tmp_path: Path) -> None:
    digests = np.arange(1, 5, dtype="<u8").tobytes()
    line = {
        "arrival": 1000.0,
        "prompt_tokens": 40,
        "output_tokens": 20,
        "blocks": base64.b64encode(digests).decode(),
        "media": [{"key": "ab" * 8, "modality": "image", "offset": 3, "length": 8, "pixels": 99}],
    }
    (only,) = read_trace(written(tmp_path, json.dumps(line)))
    assert only.arrival == 0.0
    assert len(token_ids(only)) == 60
    assert only.media[0].pixels == 99


@pytest.mark.parametrize("cut", [1, 13, 40, -1])
def test_a_torn_line_is_passed_over_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    """As a server leaves it that was killed, or had no disk left, even within a letter."""
    line = json.dumps(
        {"tenant": "ü" * 9, "timestamp": 3000, "input_length": 1100, "hash_ids": [1, 2, 3]},
        ensure_ascii=False,
    ).encode()
    path = tmp_path / "trace"
    path.write_bytes(b"\n".join([line, line[:cut], line, b"", line[:cut]]))
    assert len(read_trace(path)) == 2
    (told,) = caplog.messages
    assert told.startswith("2 lines are torn")
    assert "line 2" in told


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"timestamp": 1, "output_length": 3}', "line 1: no field 'input_length'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 3}', "line 1: 0 tokens"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 3}', "an arrival at"),
        ('{"arrival": 1, "prompt_tokens": 40, "output_tokens": 1, "blocks": ""}', "0 blocks"),
        ("{nonsense", "line 1"),
        ("timestamp,input_tokens\n1,2", "no column 'output_tokens'"),
        ("", "no requests"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, line: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_trace(written(tmp_path, line))


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_are_the_same_for_a_seed_and_in_order(name: str) -> None:
    made, again = list(GENERATORS[name](SHAPE)), list(GENERATORS[name](SHAPE))
    assert len(made) == SHAPE.requests
    assert [r.arrival for r in made] == sorted(r.arrival for r in made)
    for one, other in zip(made, again, strict=True):
        assert (one.arrival, one.media) == (other.arrival, other.media)
        assert np.array_equal(token_ids(one), token_ids(other))
        assert len(token_ids(one)) == one.prompt_tokens + one.output_tokens


@pytest.mark.parametrize("name", ["conversations", "agents"])
def test_a_turn_begins_with_all_before_it(name: str) -> None:
    sessions: dict[int | None, list[TraceRequest]] = {}
    for request in GENERATORS[name](SHAPE):
        sessions.setdefault(request.session, []).append(request)
    longest = max(sessions.values(), key=len)
    assert len(longest) > 1
    for before, after in pairwise(longest):
        full = (before.prompt_tokens + before.output_tokens) // 16 * 16
        assert shared(before, after) >= full
        assert after.media[: len(before.media)] == before.media
        assert len(after.media) - len(before.media) == (name == "agents")


def test_popular_pictures_are_shared_and_new_things_are_not() -> None:
    popular = list(GENERATORS["zipf"](SHAPE))
    assert len({r.media[0].key for r in popular}) <= SHAPE.pictures < SHAPE.requests
    new = list(GENERATORS["fresh"](SHAPE))
    assert len({r.media[0].key for r in new}) == len(new)
    assert shared(new[0], new[1]) == 0


PIECE = st.tuples(st.sampled_from(["text", "picture"]), st.integers(0, 1), st.integers(1, 40))


@settings(max_examples=60)
@given(
    prompts=st.lists(st.lists(PIECE, min_size=1, max_size=4), min_size=2, max_size=5),
    size=st.sampled_from([4, 16]),
    block_size=st.sampled_from([4, 6, 16, 32]),
)
def test_keys_of_blocks_are_equal_where_hashes_of_their_tokens_are(
    prompts: list[list[tuple[str, int, int]]], size: int, block_size: int
) -> None:
    """Prompts of pieces with two contents each, so that they often begin alike."""
    keys: list[bytes] = []
    hashes: list[bytes] = []
    for pieces in prompts:
        numbers: list[int] = []
        media: list[TraceMedium] = []
        name, at = 0, 0
        for kind, content, length in pieces:
            name = number_of(name, kind, content, length)
            if kind == "picture":
                media.append(TraceMedium(media_key(content), "image", at, length))
            at += length
            del numbers[(at - length) // size :]
            numbers += [number_of(name, n) for n in range(len(numbers), -(-at // size))]
        blocks = np.array(numbers, np.uint64)
        request = TraceRequest(0.0, at, 0, blocks, size, tuple(media))
        features = MultiModalFeatures(
            tuple(MediaFeature(m.key, m.modality, m.offset, m.length, m.length) for m in media)
        )
        chain: list[bytes] = []
        tokens = TokenBuffer(token_ids(request))
        extend_chain(chain, bytes(32), tokens, features, block_size, at // block_size)
        keys += block_keys(request, block_size)
        hashes += chain
    assert [keys.index(key) for key in keys] == [hashes.index(each) for each in hashes]


@settings(max_examples=50)
@given(first=st.integers(0, 2**64 - 1), count=st.integers(0, 12))
def test_few_numbers_are_mixed_as_many_are(first: int, count: int) -> None:
    numbers = [(first + n) % 2**64 for n in range(count)]
    assert list(few_mixed(first, count)) == mix(np.array(numbers, np.uint64)).tolist()
