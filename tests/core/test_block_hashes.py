"""Equal block hashes mean equal K/V: everything that changes it changes the hash."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.core import request as request_module
from lookonce.core.mm_features import MultiModalFeatures
from lookonce.core.request import (
    HASH_RUN,
    BlockHashCache,
    Request,
    Sequence,
    TokenBuffer,
    extend_chain,
    root_hash,
)
from lookonce.types.media import Array, MediaFeature
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from tests.support.core.builders import feature, text

BLOCK = 4
SCOPE = b"s" * 32


def chain_of(
    tokens: list[int], features: tuple[MediaFeature, ...] = (), scope: bytes = SCOPE
) -> list[bytes]:
    chain: list[bytes] = []
    buffer = TokenBuffer(np.asarray(tokens, np.int32))
    extend_chain(
        chain, root_hash(scope), buffer, MultiModalFeatures(features), BLOCK, len(tokens) // BLOCK
    )
    return chain


def differs_from(base: list[bytes], other: list[bytes]) -> list[bool]:
    return [a != b for a, b in zip(base, other, strict=True)]


def test_digests_are_whole() -> None:
    digests = [root_hash(b"t" * 32), *chain_of(text(9))]
    assert {len(digest) for digest in digests} == {32}
    parts = [digest[at : at + 8] for digest in digests for at in range(0, 32, 8)]
    assert len(set(parts)) == len(parts)  # none is cut and filled up, or repeated


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(chain_of(text(n))) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_the_scope_is_in_every_hash() -> None:
    assert all(differs_from(chain_of(text(12)), chain_of(text(12), scope=b"t" * 32)))


def test_a_token_changes_its_block_and_all_after_it() -> None:
    tokens = text(12)
    changed = [*tokens[:5], tokens[5] + 1, *tokens[6:]]
    assert differs_from(chain_of(tokens), chain_of(changed)) == [False, True, True]


@pytest.mark.parametrize(
    "other",
    [
        feature("other", 5, 6),
        feature("x", 4, 6),
        feature("x", 5, 5),
        feature("x", 5, 7),
        feature("x", 5, 6, is_embed=((0, 2), (3, 6))),
        MediaFeature(feature("x", 5, 6).key, "image", 5, 6, 6, None, (1, 2, 3)),
    ],
    ids=["key", "offset", "shorter", "longer", "embed ranges", "grid"],
)
def test_an_item_is_hashed_with_all_that_changes_what_is_computed(other: MediaFeature) -> None:
    tokens = text(16)
    base, changed = chain_of(tokens, (feature("x", 5, 6),)), chain_of(tokens, (other,))
    assert differs_from(base, changed) == [False, True, True, True]


def test_an_item_is_hashed_into_every_block_it_overlaps_and_no_other() -> None:
    tokens = text(16)
    item = chain_of(tokens, (feature("x", 5, 3),))
    assert differs_from(chain_of(tokens), item) == [False, True, True, True]
    touching = chain_of(tokens, (feature("x", 8, 8),))
    assert differs_from(chain_of(tokens), touching) == [False, False, True, True]


def test_two_items_in_a_block_hash_differently_when_exchanged() -> None:
    tokens = text(4)
    one = chain_of(tokens, (feature("x", 0, 2), feature("y", 2, 2)))
    other = chain_of(tokens, (feature("y", 0, 2), feature("x", 2, 2)))
    assert one != other


def test_extending_gives_what_hashing_at_once_gives() -> None:
    tokens = text(41)
    features = MultiModalFeatures([feature("x", 3, 9), feature("y", 20, 8)])
    grown: list[bytes] = []
    buffer = TokenBuffer(np.asarray(tokens[:2], np.int32))
    for token in tokens[2:]:
        buffer.append(token)
        extend_chain(grown, root_hash(SCOPE), buffer, features, BLOCK, len(buffer) // BLOCK)
    assert grown == chain_of(tokens, features.as_tuple())


def test_the_prompt_is_shared_until_the_first_append_and_never_written() -> None:
    prompt = np.asarray(text(5), np.int32)
    prompt.flags.writeable = False
    one, two = TokenBuffer(prompt), TokenBuffer(prompt)
    assert np.shares_memory(one.view(), two.view())
    one.append(7)
    two.append(8)
    assert (one.view()[-1], two.view()[-1], len(prompt)) == (7, 8, 5)


def test_a_view_of_the_tokens_cannot_be_written() -> None:
    buffer = TokenBuffer(np.asarray(text(5), np.int32))
    with pytest.raises(ValueError, match="read-only"):
        buffer.view()[0] = 1


# --- hashes of runs of blocks --------------------------------------------------------------------


def sequence_of(
    tokens: list[int],
    cache: BlockHashCache | None,
    features: tuple[MediaFeature, ...] = (),
    scope: bytes = SCOPE,
) -> Sequence:
    ids = np.asarray(tokens, np.int32)
    wire = GenerateRequest(
        "r", scope, Array("int32", ids.shape, ids.data), features, SamplingParams(), 0.0
    )
    return Sequence(1, Request(wire, ids, MultiModalFeatures(features), {}, ()), 0, 10**6, cache)


def hashes_of(sequence: Sequence) -> list[bytes]:
    return list(sequence.hashes(BLOCK, len(sequence.tokens) // BLOCK))


RUN = HASH_RUN * BLOCK
"""Tokens of a run."""
GRIDS = st.sampled_from([None, (1, 2, 3), (1, 3, 2)])


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], tuple[MediaFeature, ...], bytes]:
    """Prompts that often share a beginning, with items of often equal keys and other shapes."""
    num_tokens = draw(st.integers(1, 3 * RUN))
    tokens = [7] * num_tokens
    for at in draw(st.lists(st.integers(0, num_tokens - 1), max_size=2)):
        tokens[at] = 8
    features, start = [], 0
    for gap, length in draw(
        st.lists(st.tuples(st.integers(0, RUN), st.integers(2, RUN)), max_size=3)
    ):
        offset = start + gap
        start = offset + length
        if start > num_tokens:
            break
        ranges = draw(st.sampled_from([None, ((0, 1), (length - 1, length)), ((0, length),)]))
        rows = length if ranges is None else sum(b - a for a, b in ranges)
        key = draw(st.sampled_from([b"x", b"y"])) * 32
        features.append(MediaFeature(key, "image", offset, length, rows, ranges, draw(GRIDS)))
    return tokens, tuple(features), draw(st.sampled_from([SCOPE, b"t" * 32]))


@settings(max_examples=100, deadline=None)
@given(st.lists(prompts(), min_size=1, max_size=5), st.integers(1, 400))
def test_known_runs_give_the_hashes_that_hashing_gives(given_prompts, num_blocks) -> None:
    cache = BlockHashCache(num_blocks)
    for tokens, features, scope in (*given_prompts, *given_prompts):
        assert hashes_of(sequence_of(tokens, cache, features, scope)) == chain_of(
            tokens, features, scope
        )
        assert len(cache) <= num_blocks // HASH_RUN + 1


def test_known_runs_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    extend = request_module.extend_chain

    def counted(chain, *rest) -> None:
        before = len(chain)
        extend(chain, *rest)
        hashed.append(len(chain) - before)

    monkeypatch.setattr(request_module, "extend_chain", counted)
    cache, tokens = BlockHashCache(1000), text(4 * RUN + 3 * BLOCK)
    first = hashes_of(sequence_of(tokens, cache))
    assert sum(hashed) == 4 * HASH_RUN + 3
    hashed.clear()
    assert hashes_of(sequence_of(tokens, cache)) == first
    assert sum(hashed) == 3
    hashed.clear()
    hashes_of(sequence_of([*tokens[: 2 * RUN], 1, *tokens[2 * RUN + 1 :]], cache))
    assert sum(hashed) == 2 * HASH_RUN + 3


def test_known_runs_are_found_as_far_as_the_limit_allows() -> None:
    cache, tokens = BlockHashCache(1000), text(2 * RUN)
    whole = hashes_of(sequence_of(tokens, cache))
    cut = sequence_of(tokens, cache)
    assert list(cut.hashes(BLOCK, 2 * HASH_RUN - 1)) == whole[:-1]
    assert len(cut.block_hashes) == 2 * HASH_RUN - 1


def test_runs_of_other_scopes_are_not_found() -> None:
    cache, tokens = BlockHashCache(1000), text(RUN)
    hashes_of(sequence_of(tokens, cache))
    hashes_of(sequence_of(tokens, cache, scope=b"t" * 32))
    assert len(cache) == 2


def test_generated_tokens_are_part_of_a_run() -> None:
    cache, tokens = BlockHashCache(1000), text(RUN)
    sequence = sequence_of(tokens[:-5], cache)
    for token in tokens[-5:]:
        sequence.tokens.append(token)
    sequence.hash_blocks(BLOCK, HASH_RUN)
    assert len(cache) == 1
    assert sequence.block_hashes == hashes_of(sequence_of(tokens, cache)) == chain_of(tokens)
    assert len(cache) == 1
