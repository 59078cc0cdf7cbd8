"""API keys: what a file and a command line may say, and what becomes of them over time."""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress
from types import SimpleNamespace

import pytest

from lookonce.config import ApiKey, Options, key_digest, reloaded_api_keys, resolve
from lookonce.errors import ConfigError, UnauthorizedError
from lookonce.server.http.api_keys import KeyRing, Principal

NEW_YEAR_2027 = 1_798_761_600.0


def scope(key):
    return {"headers": [(b"authorization", f"Bearer {key}".encode())]}


def keys_of(*lines, file=None):
    return resolve(Options(api_key=lines, api_key_file=file)).server.api_keys


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys"


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("k", {}),
        ("t:k", {"tenant": "t"}),
        ("t:k:admin", {"tenant": "t", "admin": True}),
        ("t:k:inject:admin", {"tenant": "t", "inject": True, "admin": True}),
        ("k:expires=2027-01-01", {"expires": NEW_YEAR_2027}),
        ("k:expires=2027-01-01T01:00+01:00", {"expires": NEW_YEAR_2027}),
        ("t:k:admin:expires=2026-12-31T24", None),
        ("t:k:admin:expires=2027-01-01T00:00Z",
         {"tenant": "t", "admin": True, "expires": NEW_YEAR_2027}),
        ("k:expires=", None),
        ("k:expires=soon", None),
        (":k", None),
        ("t:", None),
        ("t:k:root", None),
    ],
)  # fmt: skip
def test_a_key_says_whose_it_is_what_it_may_and_how_long(text, rest):
    if rest is None:
        with pytest.raises(ConfigError, match="--api-key number 1"):
            keys_of(text)
    else:
        assert keys_of(text) == (ApiKey(key_digest("k"), **rest),)


def test_what_is_refused_about_a_key_does_not_show_it(file):
    file.write_text("first\n\nacme:secret-thing:wizard\n")
    with pytest.raises(ConfigError, match="line 3") as raised:
        keys_of(file=str(file))
    assert "secret-thing" not in raised.value.message


def test_the_configuration_has_no_key_in_it(file):
    file.write_text("t:filed-secret\n")
    config = resolve(Options(api_key=("t:given-secret",), api_key_file=str(file)))
    assert "secret" not in repr(config).replace(str(file), "")


def test_a_file_has_a_key_a_line_and_comments(file):
    file.write_text("# ops\n\n  a:one:admin  \r\ntwo\n")
    assert keys_of("three", file=str(file)) == (
        ApiKey(key_digest("three")),
        ApiKey(key_digest("one"), tenant="a", admin=True, from_file=True),
        ApiKey(key_digest("two"), from_file=True),
    )


@pytest.mark.parametrize("text", ["", "# nobody\n", "one\none\n", "a:one\nb:one\n", "three\n"])
def test_a_file_that_would_let_everybody_or_one_key_twice_in_is_refused(file, text):
    file.write_text(text)
    with pytest.raises(ConfigError, match="--api-key-file"):
        keys_of("three", file=str(file))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"--api-key-file: .* cannot be read"):
            keys_of(file=str(path))


def test_the_file_is_read_again_and_the_others_stay(file):
    file.write_text("one\n")
    server = resolve(Options(api_key=("fixed",), api_key_file=str(file))).server
    file.write_text("two\n")
    digests = [key.digest for key in reloaded_api_keys(server)]
    assert digests == [key_digest("fixed"), key_digest("two")]


def test_every_key_is_compared_in_constant_time_wherever_the_right_one_is(monkeypatch):
    ring, compared = KeyRing(keys_of("a:one", "b:two", "c:three")), []

    def compare(asked, digest):
        compared.append(digest)
        return hmac.compare_digest(asked, digest)

    monkeypatch.setattr(
        "lookonce.server.http.api_keys.hmac", SimpleNamespace(compare_digest=compare)
    )
    digests = [bytes.fromhex(key_digest(key)) for key in ("one", "two", "three")]
    for key in ("one", "three", "none of them"):
        compared.clear()
        with suppress(UnauthorizedError):
            ring.principal(scope(key))
        assert compared == digests


def test_a_key_is_known_until_it_expires():
    now = NEW_YEAR_2027 - 1
    ring = KeyRing(keys_of("t:k:expires=2027-01-01"), now=lambda: now)
    assert ring.principal(scope("k")) == Principal("t")
    now = NEW_YEAR_2027
    with pytest.raises(UnauthorizedError, match="expired"):
        ring.principal(scope("k"))


def test_an_expired_key_does_not_open_the_server_to_those_without():
    ring = KeyRing(keys_of("k:expires=2001-01-01"))
    with pytest.raises(UnauthorizedError):
        ring.principal({"headers": []})


def test_keys_are_replaced_at_once_and_no_key_means_no_guest():
    ring = KeyRing(keys_of("one"))
    ring.replace(keys_of("two"))
    assert ring.principal(scope("two")) == Principal()
    with pytest.raises(UnauthorizedError):
        ring.principal(scope("one"))


def test_who_waits_learns_that_a_key_is_taken_away_or_has_expired():
    now = NEW_YEAR_2027 - 0.05
    ring = KeyRing(keys_of("a:first", "b:second:expires=2027-01-01"), now=lambda: now)
    first, second = (ring.principal(scope(key)) for key in ("first", "second"))

    async def scenario():
        nonlocal now
        waiting = [asyncio.create_task(ring.wait_refused(each)) for each in (first, second)]
        ring.replace(keys_of("a:first", "b:second:expires=2027-01-01", "c:third"))
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting), "both are accepted still"
        now = NEW_YEAR_2027
        await waiting[1]
        assert not waiting[0].done()
        ring.replace(keys_of("a:other"))
        await waiting[0]
        ring.replace(())
        anyone = asyncio.create_task(ring.wait_refused(first))
        await asyncio.sleep(0)
        assert not anyone.done(), "a server without keys serves everybody"
        anyone.cancel()

    asyncio.run(scenario())
