"""Equal block hashes mean equal K/V: everything that changes it changes the hash."""

from __future__ import annotations

import numpy as np
import pytest

from lookonce.core.mm_features import MultiModalFeatures
from lookonce.core.request import TokenBuffer, extend_chain, root_hash
from lookonce.types.media import MediaFeature
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
    assert {len(block_hash) for block_hash in chain_of(text(9))} == {32}


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
