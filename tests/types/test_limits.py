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


def test_a_section_inherits_what_it_leaves_out():
    limits = parse_limits(WHOLE.encode())
    assert limits.of_tenant("stranger").requests_per_second == 2
    assert limits.of_tenant("a").requests_per_second is None
    assert limits.of_tenant("a").max_tokens == 100
    assert limits.of_tenant("b.c").media_per_minute == 0.5
    assert limits.of_tenant("b.c").requests_per_second == 2


def test_limits_are_the_same_after_their_way_to_an_api_process():
    limits = parse_limits(WHOLE.encode())
    assert msgspec.json.decode(msgspec.json.encode(limits), type=Limits) == limits


def test_a_key_is_named_by_the_beginning_of_its_digest():
    limits = parse_limits(WHOLE.encode())
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
        parse_limits(text.encode("utf-8", "surrogateescape"))
    assert refused.value.message.startswith(where)
    assert "\n" not in refused.value.message
