"""The file of limits: what it says, and what is wrong with it."""

from __future__ import annotations

import msgspec
import pytest

from lookonce.errors import ConfigError
from lookonce.types.limits import Limits, parse_limits

DIGEST = "3f0a9c51d2e4"
WHOLE = f"""
[default]
requests_per_second = 2
max_tokens = 100
[tenants.a]
weight = 4
requests_per_second = inf
[tenants."b.c"]
media_per_minute = 0.5
[keys.{DIGEST}]
concurrent_requests = 1
"""
YAML = f"""
default:
  requests_per_second: 2
  max_tokens: 100
tenants:
  a: {{weight: 4, requests_per_second: .inf}}
  b.c:
    media_per_minute: 0.5
keys:
  "{DIGEST}":
    concurrent_requests: 1
"""


def limits_of(text: str, suffix: str = ".toml") -> Limits:
    return parse_limits(text.encode("utf-8", "surrogateescape"), suffix)


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_yaml_says_what_toml_says(suffix):
    assert limits_of(YAML, suffix) == limits_of(WHOLE)
    assert limits_of("", suffix) == limits_of("") == Limits()


def test_sections_of_yaml_may_share_what_they_have():
    text = "tenants:\n  a: &a {weight: 4, max_tokens: 5}\n  b:\n    <<: *a\n    weight: 2"
    own = limits_of(text, ".yaml").of_tenant("b")
    assert (own.weight, own.max_tokens) == (2, 5)


def test_a_section_inherits_what_it_leaves_out():
    limits = limits_of(WHOLE)
    assert limits.of_tenant("stranger").requests_per_second == 2
    assert limits.of_tenant("a").requests_per_second is None
    assert limits.of_tenant("a").max_tokens == 100
    assert limits.of_tenant("b.c").media_per_minute == 0.5
    assert limits.of_tenant("b.c").requests_per_second == 2


def test_limits_are_the_same_after_their_way_to_an_api_process():
    limits = limits_of(WHOLE)
    assert msgspec.json.decode(msgspec.json.encode(limits), type=Limits) == limits


def test_a_key_is_named_by_the_beginning_of_its_digest():
    limits = limits_of(WHOLE)
    assert limits.of_key(DIGEST + "0" * 52).concurrent_requests == 1
    assert limits.of_key(DIGEST + "0" * 52).max_tokens is None
    assert limits.of_key("4" * 64) is None


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[tenants.a]\nwieght = 2", "tenants.a.wieght: no such limit"),
        ("[tenants.a]\nweight = 0", "tenants.a.weight: expected"),
        ("[default]\ntokens_per_minute = -1", "default.tokens_per_minute: expected"),
        ("[default]\nrequests_per_second = 'many'", "default.requests_per_second: expected"),
        ("[default]\nrequests_per_second = nan", "default.requests_per_second: expected"),
        ("[keys.abc]\nmax_tokens = 1", "keys.abc: a key is named by"),
        (f"[keys.{DIGEST}]\nweight = 1", f"keys.{DIGEST}.weight: no such limit"),
        ("[tenant.a]\nweight = 2", "tenant: a section is"),
        ("tenants = 3", "tenants: a table"),
        ("[tenants]\na = 3", "tenants.a: expected"),
        ("[default", "not valid TOML"),
        ("\udcff", "not valid TOML"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(text, where):
    with pytest.raises(ConfigError) as refused:
        limits_of(text)
    assert refused.value.message.startswith(where)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("tenants:\n  a:\n    wieght: 2", "tenants.a.wieght: no such limit"),
        ("tenants: {a: {weight: 1e2}}", "tenants.a.weight: expected"),  # a text in YAML
        ("default: {max_tokens: .nan}", "default.max_tokens: expected"),
        ("keys: {123456789012: {max_tokens: 1}}", "123456789012: YAML takes this for no text"),
        ("tenants: {on: {weight: 2}}", "on: YAML takes this for no text"),
        ("tenants: {a: {weight: 1}, a: {weight: 2}}", "a: is there twice"),
        ("tenants: 3", "tenants: a table"),
        ("tenants: [a]", "tenants: a table"),
        ("tenant: {}", "tenant: a section is"),
        ("- default", "not a list of default"),
        ("default", "not a list of default"),
        ("default: {", "not valid YAML in line 1"),
        ("default: !!python/object:os.system {}", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("\udcff", "not valid YAML"),
    ],
)
def test_a_mistake_in_yaml_is_one_line_that_names_it(text, where):
    with pytest.raises(ConfigError) as refused:
        limits_of(text, ".yaml")
    assert refused.value.message.startswith(where)
    assert "\n" not in refused.value.message


def test_a_file_of_another_kind_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"must end in one of \.yaml, \.yml, \.toml"):
        limits_of("", ".json")
