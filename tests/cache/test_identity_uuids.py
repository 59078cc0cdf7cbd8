"""A uuid is bound to the content that first came with it, per scope."""

import pytest

from lookonce.cache.identity import UuidBindings, name_digest
from lookonce.errors import ConflictError, http_status

MINE, YOURS = b"m" * 32, b"y" * 32
CAT, DOG = b"c" * 32, b"d" * 32


def test_the_first_digest_counts():
    uuids = UuidBindings()
    uuids.bind(MINE, "pet", CAT)
    uuids.bind(MINE, "pet", CAT)
    assert uuids.resolve(MINE, "pet") == CAT


def test_other_bytes_are_a_conflict_that_names_the_part():
    uuids = UuidBindings()
    uuids.bind(MINE, "pet", CAT)
    with pytest.raises(ConflictError) as error:
        uuids.bind(MINE, "pet", DOG, param="messages[0].content[1]")
    assert http_status(error.value) == 409
    assert error.value.param == "messages[0].content[1]"
    assert uuids.resolve(MINE, "pet") == CAT


def test_scopes_do_not_meet():
    uuids = UuidBindings()
    uuids.bind(MINE, "pet", CAT)
    assert uuids.resolve(YOURS, "pet") is None
    uuids.bind(YOURS, "pet", DOG)
    assert uuids.resolve(MINE, "pet") == CAT


def test_the_binding_used_longest_ago_is_forgotten_first():
    uuids = UuidBindings(max_bindings=2)
    uuids.bind(MINE, "one", CAT)
    uuids.bind(MINE, "two", CAT)
    uuids.resolve(MINE, "one")
    uuids.bind(MINE, "three", CAT)
    assert len(uuids) == 2
    assert uuids.resolve(MINE, "two") is None
    assert uuids.resolve(MINE, "one") == CAT
    assert len(uuids.take_fresh()) == 2


def test_new_bindings_are_handed_out_once():
    uuids = UuidBindings()
    uuids.bind(MINE, "pet", CAT)
    uuids.bind(MINE, "pet", CAT)
    assert uuids.take_fresh() == ((name_digest(MINE, "pet"), CAT),)
    assert uuids.take_fresh() == ()


def test_what_the_engine_announces_overrules_and_is_not_news():
    uuids = UuidBindings()
    uuids.bind(MINE, "pet", CAT)
    uuids.learn(name_digest(MINE, "pet"), DOG)
    assert uuids.resolve(MINE, "pet") == DOG
    assert uuids.take_fresh() == ()
