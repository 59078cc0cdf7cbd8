"""Where requests go: to the engine where they cost the fewest seconds."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lookonce.cache.identity import item_key, media_hash, name_digest, scope_digest
from lookonce.config import ENCODER_TOPIC, ITEM_TOPIC
from lookonce.core.request import AdaptedKeys
from lookonce.fleet.identity import (
    MAX_FIRST_LEVEL_VALUES,
    MAX_MARKS,
    MAX_MEDIA,
    MAX_PARTS,
    MAX_PIECES,
    MAX_VALUES,
    Identity,
    Processor,
    body_with_names,
    identify,
    identify_body,
)
from lookonce.fleet.index import short
from lookonce.fleet.router import (
    LEAST_BESIDE,
    EngineState,
    NoEngineError,
    QueuePrice,
    Route,
    Router,
    engines_wanted,
)
from lookonce.fleet.subscriber import Added, AllGone, EngineLoad, Gone, PromptComputed
from lookonce.server.http import body as engine_body
from lookonce.types.lora import LoRAIdentity

PROCESSOR = Processor(b"fingerprint")
KV = "kv-events"


def picture(content: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def chat(*contents: Any, **fields: Any) -> dict[str, Any]:
    """Messages of user and assistant in turn."""
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return {"model": "nano", "messages": messages, **fields}


def identity(body: dict[str, Any], tenant: str = "", session: str | None = None) -> Identity:
    return identify(body, tenant, PROCESSOR, session)


def picture_key(content: bytes, tenant: str = "") -> bytes:
    digest = media_hash(content, modality="image", fingerprint=b"fingerprint")
    return item_key(scope_digest(tenant, None), digest)


def load(running: int = 0, **totals: Any) -> EngineLoad:
    fields: dict[str, Any] = {
        "prompt_tokens": 1000,
        "prompt_seconds": 1.0,
        "encoder_runs": 10,
        "encode_seconds": 2.0,
        "decoded_tokens": 1000,
        "decode_seconds": 1.0,
    }
    return EngineLoad(running=running, waiting=0, **(fields | totals))


class Fleet:
    """A router over engines with equal rates: 1 ms a token, 200 ms an encoder run."""

    def __init__(self, *names: str) -> None:
        self.router = Router()
        for name in names:
            engine = self.router.add_engine(name, "nano", follows=True)
            self.router.apply(engine, [load()])
        self.number = 0

    def send(
        self, what: Identity, without: tuple[str, ...] = (), now: float = 0.0
    ) -> tuple[str, Route]:
        self.number += 1
        name = f"r{self.number}"
        return name, self.router.route(name, what, without, now=now)

    def serve(self, what: Identity, *, block: bytes | None = b"b" * 32) -> Route:
        """Send, and let the engine tell what it computed."""
        name, route = self.send(what)
        self.compute(name, route, block)
        self.router.ended(name, route)
        return route

    def compute(self, name: str, route: Route, block: bytes | None = b"b" * 32) -> None:
        keys = [medium.key.to_bytes(8, "little") + bytes(24) for medium in route.identity.media]
        told = PromptComputed(name, 300, [(key, 50) for key in keys], block)
        engine = route.engine
        blocks = [] if block is None else [Added(KV, [short(block)])]
        held = [Added(topic, [short(k) for k in keys]) for topic in (ENCODER_TOPIC, ITEM_TOPIC)]
        self.router.apply(engine, [*held, *blocks, told])
        self.router.answered(route, 0.1)


def test_a_media_key_is_that_of_the_caches() -> None:
    (medium,) = identity(chat([picture(b"cat")])).media
    assert medium.exact
    assert medium.key == short(picture_key(b"cat"))
    (other,) = identity(chat([picture(b"cat")]), tenant="b").media
    assert other.key == short(picture_key(b"cat", "b")) != medium.key


def test_forms_of_one_picture_have_one_key() -> None:
    data = base64.b64encode(b"cat").decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    forms = [
        {"type": "image", "source": source},
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
        picture(b"cat"),
    ]
    keys = {identity(chat([form])).media[0].key for form in forms}
    assert keys == {short(picture_key(b"cat"))}
    hashes = {"image": [media_hash(b"cat", modality="image", fingerprint=b"fingerprint").hex()]}
    rendered = identity({"token_ids": [1, 2], "features": {"mm_hashes": hashes}})
    assert rendered.media[0].key == short(picture_key(b"cat"))


LARGE = [base64.b64encode(bytes([n]) * 60_000).decode() for n in range(3)]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]
        for data in (LARGE[0], LARGE[0] + "!", LARGE[0] + '"', LARGE[0] + "\\", LARGE[0][:-1])
    ]
    + [
        [picture(b"a" * 60_000), {"type": "text", "text": "and"}, picture(b"b" * 60_000)],
        [picture(b"a" * 60_000), {"type": "text", "text": f"data:image/png;base64,{LARGE[0]}"}],
        [{"type": "text", "text": f";base64,{LARGE[0]}"}],
        [{"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{LARGE[0]}"}}],
        [{"type": "file", "file": {"file_data": f"data:application/pdf;base64,{LARGE[0]}"}}],
        [{"type": "input_audio", "input_audio": {"data": LARGE[0], "format": "wav"}}],
        "hello",
    ],
)
def test_a_body_says_the_same_however_it_is_read(content: Any) -> None:
    given = chat(content)
    body = json.dumps(given).encode()
    for sent in (body, body.replace(b"/", rb"\/")):
        found = identify_body(sent, "a", lambda _: PROCESSOR)[1]
        assert msgspec.structs.replace(found, inline=()) == identity(given, "a")


def test_pictures_in_a_body_are_replaced_by_their_names() -> None:
    large, small = picture(b"a" * 60_000), picture(b"b")
    content = [large, {"type": "text", "text": 'say "x"'}, small, picture(b"c" * 60_000), large]
    sent = json.dumps(chat(content)).encode().replace(b"/", rb"\/")
    _, found = identify_body(sent, "a", lambda _: PROCESSOR)
    named = json.loads(body_with_names(sent, found.inline))
    names = [
        f"lookonce:{media_hash(byte * 60_000, modality='image', fingerprint=b'fingerprint').hex()}"
        for byte in (b"a", b"c", b"a")
    ]
    parts = [{"type": "image_url", "image_url": {"url": name}} for name in names]
    assert named == chat([parts[0], content[1], small, parts[1], parts[2]])


def test_of_a_body_of_very_many_values_the_first_level_is_read() -> None:
    """The event loop of all tenants does this: a stranger's 10 MB held it for 14 seconds."""
    fields = {"model": "nano", "request_id": "mine", "prompt_cache_key": "s", "max_tokens": 3}
    long = {**fields, "messages": [0] * MAX_VALUES}
    given, found = identify_body(json.dumps(long).encode(), "a", lambda _: PROCESSOR)
    assert given == fields
    assert (found.model, found.max_tokens, found.media) == ("nano", 3, ())
    short_body = json.dumps(fields).encode()
    assert found.session == identify_body(short_body, "a", lambda _: PROCESSOR)[1].session
    wrong = json.dumps({**long, "model": 1}).encode()
    assert identify_body(wrong, "a", lambda _: PROCESSOR) == ({}, Identity())


def test_of_a_body_that_engines_refuse_for_its_values_nothing_is_read() -> None:
    """To pass over 512 MiB of them took seconds of the event loop."""
    assert MAX_FIRST_LEVEL_VALUES >= engine_body.MAX_VALUES
    sent = b'{"model": "nano", "messages": [' + b"0," * MAX_FIRST_LEVEL_VALUES + b"0]}"
    assert identify_body(sent, "a", lambda _: PROCESSOR) == ({}, Identity())


def test_the_search_for_large_media_ends_after_so_many_marks() -> None:
    """Each costs half a microsecond of the event loop: 512 MiB of them took a minute of it."""
    large = picture(b"a" * 60_000)
    many = chat([{"type": "text", "text": ";base64,"}] * MAX_MARKS + [large])
    found = identify_body(json.dumps(many).encode(), "a", lambda _: PROCESSOR)[1]
    assert [medium.key for medium in found.media] == [short(picture_key(b"a" * 60_000, "a"))]
    assert found.inline == ()  # it is sent as it came
    few = chat([{"type": "text", "text": ";base64,"}, large])
    assert len(identify_body(json.dumps(few).encode(), "a", lambda _: PROCESSOR)[1].inline) == 1


def test_no_more_than_so_many_parts_and_media_are_read() -> None:
    media = [{"type": "image_url", "uuid": str(number)} for number in range(MAX_MEDIA + 100)]
    texts = [{"type": "text", "text": str(number)} for number in range(MAX_PARTS + 100)]
    for parts in (media, texts):
        messages = [{"role": "user", "content": parts}]
        body = json.dumps({"model": "nano", "messages": messages}).encode()
        _, found = identify_body(body, "a", lambda _: PROCESSOR)
        assert len(found.media) <= MAX_MEDIA
        assert len(found.pieces) <= MAX_PIECES
    hashes = {"features": {"mm_hashes": {"image": ["ab" * 32] * 5000}}}
    _, found = identify_body(json.dumps(hashes).encode(), "a", lambda _: PROCESSOR)
    assert len(found.media) <= MAX_MEDIA


def test_large_pictures_are_cut_out_of_a_body() -> None:
    body = json.dumps(chat([picture(b"a" * 60_000), picture(b"b" * 60_000)])).encode()
    given, found = identify_body(body, "", lambda _: PROCESSOR)
    assert len(json.dumps(given)) < 1000
    assert [medium.key for medium in found.media] == [
        short(picture_key(byte * 60_000)) for byte in (b"a", b"b")
    ]
    for what in (b"", b"[]", b"{", b'"x"', b"\xff"):
        assert identify_body(what, "", lambda _: PROCESSOR) == ({}, Identity())


def test_options_and_urls_get_names_of_their_own() -> None:
    plain = identity(chat([picture(b"cat")]))
    other = identity(chat([picture(b"cat")], mm_processor_kwargs={"size": 2}))
    assert not other.media[0].exact
    assert other.media[0].key != plain.media[0].key
    url = {"type": "image_url", "image_url": {"url": "https://a.example/cat.png"}}
    assert not identity(chat([url])).media[0].exact
    assert not identity(chat([url])).media[0].bare
    named = identity(chat([{"type": "image_url", "uuid": "cat"}])).media[0]
    assert named.bare
    assert name_digest(b"", "cat")  # the caches' own name of a uuid is another one


def test_prompts_share_the_digests_of_their_common_beginning() -> None:
    first = identity(chat("x" * 3000, "yes", "next")).pieces
    second = identity(chat("x" * 3000, "yes", "other")).pieces
    equal = [a.digest == b.digest for a, b in zip(first, second, strict=True)]
    assert equal == [True] * (len(first) - 1) + [False]
    stranger = identity(chat("x" * 3000, "yes", "next"), tenant="b").pieces
    assert not {p.digest for p in first} & {p.digest for p in stranger}
    salted = identity(chat("x" * 3000, cache_salt="s")).pieces
    assert not {p.digest for p in first} & {p.digest for p in salted}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 5},
        {"messages": [None, 1, "x", {"role": "user"}, {"role": "user", "content": {"type": []}}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 7}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}]),
        {"features": {"mm_hashes": {"image": ["zz", 3, None]}}, "token_ids": ["a"]},
        {"prompt": [[1, 2], [3]], "max_tokens": "many", "cache_salt": 9, "model": []},
        {"input": "\ud800", "conversation": {"id": 3}},
    ],
)
def test_what_is_no_request_is_identified_all_the_same(body: dict[str, Any]) -> None:
    assert isinstance(identity(body), Identity)


# --- LoRA adapters ------------------------------------------------------------------------------

PLAIN = LoRAIdentity(b"p" * 32)
SEEING = LoRAIdentity(b"s" * 32, b"e" * 32)
"""It changes encoder outputs."""
ADAPTED = msgspec.structs.replace(
    PROCESSOR, model="nano", adapters={"plain": PLAIN, "again": PLAIN, "seeing": SEEING}
)


def adapted(body: dict[str, Any], name: str, processor: Processor = ADAPTED) -> Identity:
    return identify({**body, "model": name}, "", processor)


def test_a_prompt_with_an_adapter_shares_no_digest_with_one_of_other_contents() -> None:
    body = chat("hello", "yes", [picture(b"cat")])
    nano, plain, again, seeing = (adapted(body, n) for n in ("nano", "plain", "again", "seeing"))
    digests = [{piece.digest for piece in each.pieces} for each in (nano, plain, seeing)]
    assert not digests[0] & digests[1]
    assert not digests[1] & digests[2]
    assert again.pieces == plain.pieces, "equal contents, whatever their names"
    assert nano.media == plain.media
    assert nano == identify(body, "", PROCESSOR), "what serves without adapters stays what it was"


def test_the_output_of_an_adapter_that_changes_the_encoder_has_a_key_of_its_own() -> None:
    (medium,) = adapted(chat([picture(b"cat")]), "seeing").media
    key = picture_key(b"cat")
    assert medium.key == short(key)
    assert medium.output == short(AdaptedKeys(SEEING.encoder_digest).key(key))


def test_media_ask_for_the_adapters_of_their_model() -> None:
    own = msgspec.structs.replace(ADAPTED, media_adapters=(("image", SEEING), ("audio", PLAIN)))
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    text, seen, heard, both, named = (
        adapted(chat(*contents), name, own)
        for contents, name in (
            (["hello"], "nano"),
            (["hello", "yes", [picture(b"cat")]], "nano"),
            (["hello", "yes", [sound]], "nano"),
            (["hello", "yes", [sound, picture(b"cat")]], "nano"),
            (["hello", "yes", [picture(b"cat")]], "plain"),
        )
    )
    beginnings = [each.pieces[0].digest for each in (text, seen, heard, named)]
    assert len({*beginnings}) == 3
    assert beginnings[2] == beginnings[3], "of the same adapter"
    assert both.pieces[0] == seen.pieces[0], "the first one that it has media for"
    assert [each.encoder_digest for each in (text, seen, heard, named)] == [
        b"",
        b"e" * 32,
        b"",
        b"",
    ]


def test_requests_go_to_engines_that_have_the_adapter() -> None:
    fleet = Fleet("a", "b")
    fleet.router.engines["b"].adapters = frozenset({"plain"})
    assert fleet.router.models() == ["nano", "plain"]
    for number in range(4):
        _, route = fleet.send(adapted(chat(f"{number}"), "plain"))
        assert route.engine.name == "b"
    with pytest.raises(NoEngineError):
        fleet.send(adapted(chat("x"), "again"))


@pytest.mark.parametrize("url", [False, True])
def test_an_output_without_the_adapter_is_none_with_it(url: bool) -> None:
    """Of a picture by its bytes, and of one whose key is learned."""
    part = picture(b"cat")
    if url:
        part = {"type": "image_url", "image_url": {"url": "http://example.org/cat.png"}}
    fleet = Fleet("a", "b")
    for engine in fleet.router.engines.values():
        engine.adapters = frozenset({"plain", "seeing"})
    first = fleet.serve(identify(chat([part]), "", ADAPTED))
    _, same = fleet.send(adapted(chat([part, "?"]), "plain"))
    assert same.engine is first.engine
    assert same.work.num_known == 1
    _, other = fleet.send(adapted(chat([part, "!"]), "seeing"))
    assert other.work.num_known == 0


def test_without_reuse_it_goes_where_the_least_waits() -> None:
    fleet = Fleet("a", "b", "c")
    routes = [fleet.send(identity(chat(f"question {n}" * 9)))[1] for n in range(9)]
    assert {route.reason for route in routes} == {"least_loaded"}
    assert [engine.num_requests for engine in fleet.router.engines.values()] == [3, 3, 3]


def sharing_cores(*names: str, cores: int, machine: int = 7) -> Fleet:
    """Engines of one thread on these cores."""
    fleet = Fleet(*names)
    for engine in fleet.router.engines.values():
        fleet.router.apply(engine, [load(machine=machine, cores=cores, threads=1)])
    return fleet


def engines_of_new_pictures(fleet: Fleet, count: int) -> list[str]:
    """The engines of requests that come at once."""
    asked = [identity(chat([picture(b"%d" % number)])) for number in range(count)]
    return [fleet.send(each)[1].engine.name for each in asked]


def test_no_more_engines_compute_at_a_time_than_share_their_cores() -> None:
    fleet = sharing_cores("a", "b", "c", "d", cores=2)
    chosen = engines_of_new_pictures(fleet, 4)
    assert len(set(chosen[:2])) == len(set(chosen)) == 2


def test_engines_with_cores_of_their_own_compute_all_at_a_time() -> None:
    fleet = Fleet("a", "b", "c", "d")
    for number, engine in enumerate(fleet.router.engines.values(), 1):
        fleet.router.apply(engine, [load(machine=number, cores=1, threads=1)])
    assert len(set(engines_of_new_pictures(fleet, 4))) == 4
    assert len(set(engines_of_new_pictures(Fleet("a", "b", "c", "d"), 4))) == 4


def test_another_engine_takes_its_part_of_the_cores_where_much_waits_at_those_that_compute() -> (
    None
):
    fleet = sharing_cores("a", "b", "c", cores=2)
    assert len(set(engines_of_new_pictures(fleet, 9))) == 3


def test_engines_that_each_compute_with_all_cores_share_what_waits() -> None:
    fleet = Fleet("a", "b")
    for engine in fleet.router.engines.values():
        fleet.router.apply(engine, [load(machine=7, cores=8, threads=8)])
    chosen = engines_of_new_pictures(fleet, 12)
    assert len(set(chosen[:2])) == 1
    assert len(set(chosen)) == 2


def test_an_engine_of_another_model_uses_the_cores_too() -> None:
    fleet = sharing_cores("a", "b", cores=2)
    other = fleet.router.add_engine("other", "another", follows=True)
    fleet.router.apply(other, [load(machine=7, cores=2, threads=1)])
    what = chat([picture(b"of the other")])
    fleet.send(identity({**what, "model": "another"}))
    assert len(set(engines_of_new_pictures(fleet, 2))) == 1


def test_an_engine_that_takes_no_requests_uses_no_cores_for_those_it_had() -> None:
    fleet = sharing_cores("a", "b", "c", cores=2)
    gone = fleet.router.engines["a"]
    fleet.router.apply(gone, [load(running=40, machine=7, cores=2, threads=1)])
    gone.accepts = False
    assert engines_of_new_pictures(fleet, 2) in (["b", "c"], ["c", "b"])


def serve_new(fleet: Fleet, number: int, now: float, without: tuple[str, ...] = ()) -> str:
    """Serve what leaves nothing at the engine; its name."""
    what = identity(chat(f"question {number} {LONG}"))
    name, route = fleet.send(what, without, now)
    fleet.router.ended(name, route, failed=True, now=now)
    return route.engine.name


def test_of_idle_engines_that_share_cores_the_one_that_was_busy_last_is_taken() -> None:
    fleet = sharing_cores("a", "b", "c", cores=2)
    for number, others in enumerate((("a", "b"), ("b", "c"), ("a", "c"))):
        serve_new(fleet, number, 10.0 + 0.05 * number, others)
    assert {serve_new(fleet, number, 10.11 + 0.01 * number) for number in range(10, 18)} == {"b"}


def test_an_engine_that_evicts_what_is_asked_for_again_is_not_preferred_for_being_busy_last() -> (
    None
):
    fleet = sharing_cores("a", "b", cores=2)
    first = identity(chat(LONG))
    for number, what in enumerate((first, identity(chat("x", LONG)))):
        name, route = fleet.send(what, ("b",), 1.0)
        fleet.compute(name, route, bytes([number]) * 32)
        fleet.router.ended(name, route, now=1.0)
    assert serve_new(fleet, 1, 1.0) == "a"
    fleet.router.apply(route.engine, [Gone(KV, [short(bytes([0]) * 32)])])
    assert serve_new(fleet, 2, 1.0) == "a"  # nobody has missed it yet
    name, route = fleet.send(first, ("b",), 1.0)
    fleet.router.ended(name, route, failed=True, now=1.0)
    assert serve_new(fleet, 3, 1.0) == "b"


def slow_and_fast() -> Fleet:
    """Engine a takes 20 ms a prompt token, b takes 1 ms."""
    fleet = Fleet("a", "b")
    for name, seconds in (("a", 20.0), ("b", 1.0)):
        for n in range(1, 5):
            told = load(prompt_tokens=1000 + 1000 * n, prompt_seconds=seconds * n)
            fleet.router.apply(fleet.router.engines[name], [told])
    return fleet


@pytest.mark.parametrize("content", ["question " * 90, [picture(b"cat")]])
def test_an_engine_that_is_only_faster_is_not_said_to_know_a_request(content: Any) -> None:
    fleet = slow_and_fast()
    first = fleet.serve(identity(chat(content)))
    assert (first.engine.name, first.reason) == ("b", "least_loaded")
    again = fleet.serve(identity(chat(content)))
    assert (again.engine.name, again.reason) == ("b", "known")


@pytest.mark.parametrize("content", ["question " * 900, [picture(b"cat")]])
def test_an_engine_is_chosen_for_what_it_knows_where_another_one_would_be_otherwise(
    content: Any,
) -> None:
    fleet = Fleet("a", "b")
    first = fleet.serve(identity(chat(content)))
    assert first.reason == "least_loaded"
    without = tuple({"a", "b"} - {first.engine.name})
    fleet.send(identity(chat("x", max_tokens=1)), without)  # more waits there now
    again = fleet.serve(identity(chat(content)))
    assert (again.engine, again.reason) == (first.engine, "known")


def test_of_two_engines_that_know_a_request_alike_the_less_loaded_one_is_not_chosen_for_that() -> (
    None
):
    fleet = Fleet("a", "b")
    what = identity(chat([picture(b"cat")]))
    first = fleet.serve(what)
    name, second = fleet.send(what, (first.engine.name,))
    fleet.compute(name, second)
    again = fleet.serve(what)
    assert (again.engine, again.reason) == (first.engine, "least_loaded")
    assert again.work.num_known == 1


def test_an_engine_that_holds_a_processed_picture_knows_more_than_one_that_does_not() -> None:
    fleet = Fleet("a", "b")
    cat = identity(chat([picture(b"cat")]))
    holder = fleet.router.engines["b"]
    fleet.router.apply(holder, [Added(ITEM_TOPIC, [cat.media[0].key])])
    holder.rates.processing = fleet.router.engines["a"].rates.processing = 0.5
    route = fleet.send(cat)[1]
    assert (route.engine.name, route.reason) == ("b", "known")
    fleet = Fleet("a", "b")
    fleet.router.apply(fleet.router.engines["a"], [Added(ITEM_TOPIC, [cat.media[0].key])])
    route = fleet.send(cat)[1]
    assert (route.engine.name, route.reason) == ("a", "known")


def test_a_conversation_and_its_picture_stay_where_they_are() -> None:
    fleet = Fleet("a", "b", "c")
    first = fleet.serve(identity(chat([picture(b"cat"), {"type": "text", "text": "what?" * 50}])))
    again = identity(
        chat([picture(b"cat"), {"type": "text", "text": "what?" * 50}], "a cat", "sure?")
    )
    second = fleet.serve(again)
    assert second.engine is first.engine
    assert second.reason == "known"
    assert second.work.num_known == 1
    assert "media 1/1" in second.why()
    third = fleet.serve(identity(chat([picture(b"cat")], tenant="other")))
    assert third.engine is first.engine  # another prompt, the same picture
    assert third.work.num_known == 1


def test_a_request_on_its_way_counts_as_held() -> None:
    fleet = Fleet("a", "b")
    _, first = fleet.send(identity(chat([picture(b"cat")])))
    _, second = fleet.send(identity(chat([picture(b"cat")], "x", "y", max_tokens=1)))
    assert second.engine is first.engine


def test_a_hot_picture_gets_a_second_engine_when_the_queue_costs_more() -> None:
    fleet = Fleet("a", "b")
    fleet.serve(identity(chat([picture(b"cat")])))
    used = [fleet.send(identity(chat([picture(b"cat")], f"{n}", "?")))[1] for n in range(24)]
    assert {route.engine.name for route in used} == {"a", "b"}
    assert used[0].engine is used[1].engine


LONG = "long " * 800
"""A beginning of 1,000 tokens by the router's estimate: 1 s."""


@pytest.mark.parametrize(("later", "waits"), [(0.0, False), (1.8, True)])
def test_of_work_that_waits_what_has_been_done_meanwhile_is_not_counted(
    later: float, waits: bool
) -> None:
    fleet = Fleet("a", "b")
    new = identity(chat(LONG, "yes", "one " * 1800, max_tokens=1))
    holder = fleet.send(new, now=5.0)[1].engine
    assert holder.waiting_seconds(5.0 + later) == pytest.approx(holder.backlog - later)
    # It would be the first request's 2.8 s, less what has passed, or LONG computed again.
    other = identity(chat(LONG, "yes", "two " * 900, max_tokens=1))
    second = fleet.send(other, now=5.0 + later)[1]
    assert (second.engine is holder) == waits


def test_an_engine_begins_with_the_next_request_when_the_first_one_is_answered() -> None:
    fleet = Fleet("a")
    (engine,) = fleet.router.engines.values()
    sent = [fleet.send(identity(chat(f"{n} {LONG}", max_tokens=0)))[1] for n in range(3)]
    each = sent[0].work.to_first_token
    assert engine.waiting_seconds(0.4) == pytest.approx(3 * each - 0.4, abs=0.01)
    fleet.router.answered(sent[1], 0.5)
    assert engine.waiting_seconds(0.6) == pytest.approx(2 * each - 0.6, abs=0.01)
    fleet.router.answered(sent[0], 0.7)
    assert engine.waiting_seconds(0.7) == pytest.approx(each, abs=0.01)
    assert engine.waiting_seconds(0.9) == pytest.approx(each - 0.2, abs=0.01)
    fleet.router.ended("r3", sent[2], failed=True)
    assert engine.waiting_seconds(1.0) == pytest.approx(0, abs=0.01)


def test_an_engine_that_has_stopped_does_not_look_idle() -> None:
    """However long ago requests were sent to it, all but the first one count in full."""
    fleet = Fleet("a", "b")
    stopped, other = fleet.router.engines.values()
    used = []
    for number in range(12):
        name, route = fleet.send(
            identity(chat(f"{number} {LONG}", max_tokens=1)), now=60.0 * number
        )
        used.append(route.engine)
        if route.engine is other:
            fleet.router.answered(route, 1.0)
            fleet.router.ended(name, route)
    assert used.count(stopped) <= 2
    assert stopped.waiting_seconds(1e6) > 0


def test_what_was_evicted_or_lost_is_not_counted() -> None:
    fleet = Fleet("a", "b")
    body = identity(chat("long " * 600))
    engine = fleet.serve(body).engine
    assert fleet.serve(body).work.known_tokens > 0
    fleet.router.apply(engine, [Gone(KV, [short(b"b" * 32)])])
    assert fleet.serve(body).work.known_tokens == 0
    cat = identity(chat([picture(b"cat")]))
    holder = fleet.serve(cat, block=None).engine
    fleet.router.apply(holder, [AllGone(ENCODER_TOPIC), AllGone(ITEM_TOPIC)])
    assert fleet.send(cat)[1].work.num_known == 0


def test_a_failed_request_has_computed_nothing() -> None:
    fleet = Fleet("a", "b")
    body = identity(chat("long " * 600))
    name, route = fleet.send(body)
    fleet.router.ended(name, route, failed=True)
    _, again = fleet.send(body, (route.engine.name,))
    assert again.engine is not route.engine
    assert again.work.known_tokens == 0


def test_a_failed_request_takes_nothing_from_another_one_with_its_beginning() -> None:
    fleet = Fleet("a")
    body = identity(chat("long " * 600))
    fleet.send(body)
    name, second = fleet.send(body)
    fleet.router.ended(name, second, failed=True)
    assert fleet.send(body)[1].work.known_tokens > 0


def test_a_prompt_that_was_aborted_before_it_was_computed_is_not_known() -> None:
    fleet = Fleet("a")
    body = identity(chat("long " * 600))
    name, route = fleet.send(body)
    fleet.router.ended(name, route)
    for number in range(2):  # loads that come after it; it is not told of between them
        fleet.router.check_integrity()
        fleet.router.apply(route.engine, [load(prompt_tokens=2000 + number)])
    assert fleet.send(body)[1].work.known_tokens == 0


def test_an_engine_that_has_lost_all_is_computing_only_what_runs() -> None:
    fleet = Fleet("a")
    ended, runs = (identity(chat(name * 3000)) for name in "er")
    name, route = fleet.send(ended)
    fleet.router.ended(name, route)
    fleet.send(runs)
    fleet.router.apply(route.engine, [AllGone(KV)])
    assert fleet.send(ended)[1].work.known_tokens < 10  # what all prompts begin with
    assert fleet.send(runs)[1].work.known_tokens > 100


def test_engines_tell_of_their_own_prompts_of_one_id() -> None:
    fleet = Fleet("a", "b")
    prompts = [identity(chat(name * 3000)) for name in "ab"]
    routes = [
        fleet.router.route("same", prompt, without)
        for prompt, without in zip(prompts, ("b", "a"), strict=True)
    ]
    for route in routes:
        fleet.router.ended("same", route)
    for route in routes:
        fleet.compute("same", route)
        fleet.router.check_integrity()
    for _ in range(2):
        for route in routes:
            fleet.router.apply(route.engine, [load()])
    for prompt, route in zip(prompts, routes, strict=True):
        name, again = fleet.send(prompt)
        assert (again.engine, again.reason) == (route.engine, "known")
        fleet.router.ended(name, again)
        gone = Gone(KV, [short(b"b" * 32)])
        fleet.router.apply(route.engine, [load(), load(), gone])
        assert fleet.send(prompt)[1].work.known_tokens < 10


def test_a_prompt_whose_end_was_evicted_is_known_up_to_there() -> None:
    fleet = Fleet("a")
    prompt = identity(chat("one " * 1000, "two " * 1000, "three " * 1000))
    name, route = fleet.send(prompt)
    total = route.work.num_tokens
    earlier = [(bytes([n]) * 32, round(total * n / 10)) for n in range(1, 10)]
    told = PromptComputed(name, total, [], b"z" * 32, earlier)
    held = Added(KV, [short(block) for block, _ in earlier] + [short(b"z" * 32)])
    fleet.router.apply(route.engine, [held, told])
    fleet.router.ended(name, route)
    again, route = fleet.send(prompt)
    fleet.router.ended(again, route, failed=True)
    assert route.work.known_tokens == total
    evicted = [b"z" * 32, *(block for block, _ in earlier[5:])]
    fleet.router.apply(route.engine, [Gone(KV, [short(block) for block in evicted])])
    assert 0.3 * total < fleet.send(prompt)[1].work.known_tokens <= 0.5 * total


def test_a_session_and_what_is_stored_stay_at_their_engine_as_long_as_it_takes_requests() -> None:
    fleet = Fleet("a", "b", "c")
    _, first = fleet.send(identity(chat("one"), session="s"))
    for n in range(8):
        assert fleet.send(identity(chat(f"{n}"), session="s"))[1].engine is first.engine
    first.engine.accepts = False
    assert fleet.send(identity(chat("x"), session="s"))[1].engine is not first.engine
    holder = next(e.name for e in fleet.router.engines.values() if e is not first.engine)
    fleet.router.bind_stored("", "resp_1", holder)
    stored = fleet.send(identity({"input": "and?", "previous_response_id": "resp_1"}))[1]
    assert (stored.engine.name, stored.reason) == (holder, "stored")


def test_a_bare_name_goes_to_who_knows_it() -> None:
    fleet = Fleet("a", "b", "c")
    url = "https://a.example/cat.png"
    part = {"type": "image_url", "image_url": {"url": url}}
    holder = fleet.serve(identity(chat([part]))).engine
    for n in range(20):  # whatever waits there
        assert fleet.send(identity(chat(f"{n}" * 500)))[1]
    bare = identity(chat([{"type": "image_url", "uuid": "cat"}]))
    name, route = fleet.send(bare)
    key = picture_key(b"cat")
    told = PromptComputed(name, 90, [(key, 50)], None)
    held = [Added(ITEM_TOPIC, [short(key)])]
    fleet.router.apply(route.engine, [*held, told])
    for _ in range(5):
        assert fleet.send(bare)[1].engine is route.engine
    assert holder.accepts


def test_requests_of_others_count_and_ones_own_are_not_counted_twice() -> None:
    fleet = Fleet("a", "b")
    a, b = fleet.router.engines.values()
    fleet.router.apply(a, [load(running=3)])
    assert fleet.send(identity(chat("x")))[1].engine is b
    name, route = fleet.send(identity(chat("y")), ("a",))
    fleet.router.ended(name, route)
    fleet.router.apply(b, [load(running=2)])  # told before it had ended
    assert b.others == 0


def test_rates_are_those_that_engines_measure() -> None:
    fleet = Fleet("a", "b")
    slow, fast = fleet.router.engines.values()
    for n in range(1, 5):
        fleet.router.apply(slow, [load(prompt_tokens=1000 + 1000 * n, prompt_seconds=20.0 * n)])
        fleet.router.apply(fast, [load(prompt_tokens=1000 + 1000 * n, prompt_seconds=1.0 + n)])
    assert slow.rates.prompt_token > 5 * fast.rates.prompt_token
    assert fleet.send(identity(chat("z" * 5000)))[1].engine is fast


def tell_decode_steps(router: Router, engine: EngineState, added: float) -> None:
    """Steps of one and of eight sequences take 1 ms, and `added` for each after the first."""
    steps = tokens = 1000
    seconds = 1.0
    for number in range(20):
        size = 1 + 7 * (number % 2)
        steps, tokens = steps + 100, tokens + 100 * size
        seconds += 0.1 + 100 * (size - 1) * added
        told = load(decode_steps=steps, decoded_tokens=tokens, decode_seconds=seconds)
        router.apply(engine, [told])


@pytest.mark.parametrize(("added", "chosen"), [(None, "b"), (0.0001, "a"), (0.001, "b")])
def test_answers_count_by_what_they_add_to_a_step(added: float | None, chosen: str) -> None:
    """`a` knows the prompt and decodes four answers; `b` knows nothing and is idle."""
    fleet = Fleet("a", "b")
    a, b = fleet.router.engines.values()
    if added is not None:
        for engine in (a, b):
            tell_decode_steps(fleet.router, engine, added)
    known = identity(chat("k" * 160))
    name, route = fleet.send(known, ("b",))
    fleet.compute(name, route)
    for number in range(3):
        name, route = fleet.send(identity(chat(f"{number}")), ("b",))
        fleet.compute(name, route, None)
    assert fleet.send(known)[1].engine.name == chosen


def test_an_engine_that_tells_of_no_decode_steps_keeps_the_usual_share() -> None:
    fleet = Fleet("a")
    (engine,) = fleet.router.engines.values()
    for number in range(2, 9):
        fleet.router.apply(engine, [load(decoded_tokens=1000 * number, decode_seconds=number)])
    assert engine.rates.beside == 0.5
    tell_decode_steps(fleet.router, engine, 0.0)
    assert engine.rates.beside == LEAST_BESIDE


def test_what_a_warm_up_measured_does_not_keep_requests_from_an_idle_engine() -> None:
    router = Router()
    for name, seconds in (("a", 1.0), ("b", 2.5)):
        engine = router.add_engine(name, "nano", follows=True)
        router.apply(engine, [load(prompt_seconds=seconds, encode_seconds=seconds)])
    used = [router.route(str(n), identity(chat(f"{n}" * 99))).engine.name for n in range(6)]
    assert used.count("a") == used.count("b") == 3


@pytest.mark.parametrize(("slower", "most"), [(1.8, 3), (4.0, 2)])
def test_engines_that_measure_about_the_same_get_equally_much(slower: float, most: int) -> None:
    fleet = Fleet("a", "b")
    slow, fast = fleet.router.engines.values()
    for engine, factor in ((slow, slower), (fast, 1.0)):
        for n in range(1, 9):
            told = load(prompt_tokens=1000 + 1000 * n, prompt_seconds=1.0 + factor * n)
            fleet.router.apply(engine, [told])
    used = [fleet.send(identity(chat(f"{n}" * 4000)))[1].engine for n in range(6)]
    assert used.count(slow) <= most
    assert (used.count(slow) == 3) == (slower < 2)


def test_a_picture_that_took_long_does_not_make_an_engine_slow() -> None:
    """The time of a first token that nothing explains may be anything: a wait for cores, too."""
    fleet = Fleet("a", "b")
    for engine, factor in zip(fleet.router.engines.values(), (1.8, 1.0), strict=True):
        for n in range(1, 9):
            told = load(prompt_tokens=1000 + 1000 * n, prompt_seconds=1.0 + factor * n)
            fleet.router.apply(engine, [told])
    a, b = fleet.router.engines.values()

    def answer(other: str, picture_name: str, seconds: float) -> None:
        name, route = fleet.send(identity(chat([picture(picture_name.encode())])), (other,))
        fleet.router.answered(route, seconds)
        fleet.router.ended(name, route)

    answer("a", "small", 0.3)
    answer("b", "huge", 5.0)
    assert 1 < a.rates.processing / b.rates.processing < 2, "one picture says little of others"
    for number in range(5):
        answer("b", f"huge {number}", 5.0)
    assert a.rates.processing > 5 * b.rates.processing
    used = [fleet.send(identity(chat(f"{n}" * 4000)))[1].engine for n in range(6)]
    assert used.count(a) == used.count(b) == 3
    pictures = [identity(chat([picture(name)])) for name in (b"c", b"d", b"e", b"f")]
    used += [fleet.send(each)[1].engine for each in pictures]
    assert used.count(a) == used.count(b) == 5


def new_picture(name: str, num_bytes: int = 3) -> Identity:
    return identity(chat([picture(name.encode().ljust(num_bytes, b" "))], max_tokens=0))


def test_what_processing_takes_is_learned_of_items_and_of_their_bytes() -> None:
    fleet = Fleet("a")

    def serve(name: str, num_bytes: int) -> float:
        """The seconds that its processing was taken for; it is 20 ms, and 100 ms a MB."""
        request, route = fleet.send(new_picture(name, num_bytes))
        took = route.work.prompt + route.work.encoding + 0.02 + 0.1 * num_bytes / 1e6
        fleet.router.answered(route, took)
        fleet.router.ended(request, route)
        return route.work.processing

    for number in range(20):
        serve(f"small {number}", 10_000)
    before = serve("small", 10_000)
    assert before == pytest.approx(0.021, rel=0.1)
    serve("huge", 20_000_000)
    assert serve("another small one", 10_000) < 2 * before, "a huge picture makes no small one dear"
    for number in range(20):
        serve(f"huge {number}", 20_000_000)
    assert serve("one more", 20_000_000) == pytest.approx(2.02, rel=0.1)
    assert serve("small one", 10_000) < 2 * before


def test_a_first_token_says_nothing_of_processing_where_nothing_was_processed() -> None:
    fleet = Fleet("a")
    (engine,) = fleet.router.engines.values()
    cat = new_picture("cat")
    fleet.router.apply(engine, [Added(ITEM_TOPIC, [cat.media[0].key])])
    before = engine.rates.processing
    name, route = fleet.send(cat)
    assert route.work.num_known == 0
    fleet.router.answered(route, 30.0)
    fleet.router.ended(name, route)
    assert engine.rates.processing == before


def test_a_large_picture_costs_more_processing_than_a_small_one() -> None:
    fleet = Fleet("a", "b")
    small, large = (fleet.send(new_picture("x", size))[1] for size in (100, 5_000_000))
    assert large.price > small.price + 0.1
    assert large.work.encoding == small.work.encoding


def test_models_are_apart() -> None:
    router = Router()
    router.add_engine("a", "nano", follows=False)
    router.add_engine("b", "other", follows=False)
    assert router.models() == ["nano", "other"]
    assert router.route("1", identity({"model": "other", "prompt": "x"})).engine.name == "b"
    with pytest.raises(NoEngineError):
        router.route("2", identity({"model": "third", "prompt": "x"}))


CONTENTS = st.lists(
    st.one_of(
        st.sampled_from([b"cat", b"dog", b"owl"]).map(lambda c: [picture(c)]),
        st.sampled_from(["x" * 1500, "short", "y" * 3000]),
    ),
    min_size=1,
    max_size=4,
)


def test_a_queue_costs_what_its_requests_usually_take() -> None:
    price = QueuePrice()
    price.apply([load()])  # of the warm-up: 4 s
    computed = [PromptComputed(str(n), 10, [], None) for n in range(4)]
    price.apply([*computed, load(2, prompt_seconds=5.0, decode_seconds=5.0)])  # 8 s more
    assert price.seconds == pytest.approx(2 * 0.5 * 2.0)
    price.apply([load(0, prompt_seconds=5.0, decode_seconds=5.0)])
    assert price.seconds == 0
    price.apply([load(4, prompt_seconds=0.0, decode_seconds=0.0, encode_seconds=0.0)])
    assert price.seconds == pytest.approx(4.0)  # the engine began anew, requests are the same


def test_two_requests_of_one_id_do_not_teach_of_each_other() -> None:
    """Clients choose ids: what was computed may be of either."""
    router = Router()
    engine = router.add_engine("a", "nano", follows=True)
    cat = {"type": "image_url", "image_url": {"url": "https://a.example/cat"}}
    routes = [router.route("same", identity(chat([cat]), tenant)) for tenant in ("a", "b")]
    key = b"k" * 32
    told = PromptComputed("same", 300, [(key, 50)], None)
    router.apply(engine, [Added(ENCODER_TOPIC, [short(key)]), told])
    for route in routes:
        router.ended("same", route)
    router.check_integrity()
    later = [identity(chat("another prompt", [cat]), tenant) for tenant in ("a", "b")]
    assert [router.route("other", each).work.num_known for each in later] == [0, 0]
    third = router.route("same", identity(chat([cat]), "c"))  # whose prompt is told alone
    router.apply(engine, [told])
    router.ended("same", third)
    assert router.route("another", identity(chat("x", [cat]), "c")).work.num_known == 1


def test_a_prompt_is_known_where_its_answer_ended_before_its_engine_told() -> None:
    """Answers of few tokens end before events come."""
    fleet = Fleet("a", "b")
    prompt = identity(chat("a question " * 50))
    name, route = fleet.send(prompt)
    fleet.router.ended(name, route)
    fleet.compute(name, route)
    fleet.router.check_integrity()
    name, again = fleet.send(prompt)
    assert (again.engine, again.reason) == (route.engine, "known")
    fleet.router.ended(name, again, failed=True)
    fleet.router.apply(route.engine, [Gone(KV, [short(b"b" * 32)])])
    assert fleet.send(prompt, ())[1].work.known_tokens == 0


def test_ended_requests_whose_engines_never_tell_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lookonce.fleet.router.MAX_UNTOLD_PIECES", 12)
    fleet = Fleet("a")
    cat = {"type": "image_url", "image_url": {"url": "https://a.example/cat"}}
    name, first = fleet.send(identity(chat("one", [cat])))
    fleet.router.ended(name, first)
    for number in range(9):
        other, route = fleet.send(identity(chat(f"{number}")))
        fleet.router.ended(other, route)
        fleet.router.check_integrity()
    told = PromptComputed(name, 300, [(b"k" * 32, 50)], None)
    fleet.router.apply(first.engine, [Added(ENCODER_TOPIC, [short(b"k" * 32)]), told])
    assert fleet.send(identity(chat("two", [cat])))[1].work.num_known == 0


def test_a_tenant_takes_no_bindings_of_others_before_it_has_used_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MAX_SESSIONS", "MAX_STORED"):
        monkeypatch.setattr(f"lookonce.fleet.router.{name}", 8)
    fleet = Fleet("a", "b", "c")
    router = fleet.router
    _, first = fleet.send(identity(chat("one"), "quiet", "s"))
    router.bind_stored("quiet", "resp_1", "c")
    for number in range(50):
        fleet.send(identity(chat(f"{number}"), "loud", f"s{number}"))
        router.bind_stored("loud", f"resp_{number}", "a")
    route = fleet.send(identity(chat("x"), "quiet", "s"))[1]
    assert (route.engine, route.reason) == (first.engine, "session")
    found = router.engine_of_stored("quiet", "resp_1")
    assert found is not None
    assert found.name == "c"
    assert router.engine_of_stored("other", "resp_1") is None


@pytest.mark.parametrize(
    ("prices", "wanted"), [([0.0, 0.0], 1), ([0.5], 1), ([0.6], 2), ([1.0, 1.0, 0.1], 5)]
)
def test_engines_follow_the_work_that_waits(prices: list[float], wanted: int) -> None:
    assert engines_wanted(prices, target_wait=0.5) == wanted


def test_what_a_shared_tier_gives_costs_what_it_takes() -> None:
    fleet = Fleet("a", "b")
    asked = identity(chat([picture(b"cat"), {"type": "text", "text": "What? " * 400}]))
    first = fleet.serve(asked)
    other = next(e for e in fleet.router.engines.values() if e is not first.engine)
    without = fleet.serve(asked).next_price
    assert without > 0.2  # an encoder run and the prompt
    outputs = {"tier_outputs": 10, "tier_output_seconds": 0.01}
    fleet.router.apply(other, [load(**outputs)])
    with_outputs = fleet.serve(asked).next_price
    assert with_outputs < without - 0.19
    tokens = {"tier_tokens": 1000, "tier_token_seconds": 0.01}
    fleet.router.apply(first.engine, [load(**tokens)])  # what one loads, others can
    assert fleet.serve(asked).next_price < with_outputs / 2


class RouterMachine(RuleBasedStateMachine):
    """Requests come and go, engines die and come back: the sums stay right."""

    @initialize(cores=st.sampled_from([0, 1, 2]))
    def start(self, cores: int) -> None:
        names = "e0", "e1", "e2"
        self.fleet = sharing_cores(*names, cores=cores) if cores else Fleet(*names)
        self.running: dict[str, Route] = {}
        self.ended: Any = None
        """Name and route of the last request that ended."""
        self.named = 3

    @rule(contents=CONTENTS, session=st.sampled_from([None, "s", "t"]), now=st.floats(0, 10))
    def send(self, contents: list[Any], session: str | None, now: float) -> None:
        try:
            what = identity(chat(*contents), session=session)
            name, route = self.fleet.send(what, now=now)
        except NoEngineError:
            assert not any(e.accepts for e in self.fleet.router.engines.values())
            return
        assert route.engine.accepts
        assert 0 <= route.price < math.inf
        assert 0 <= route.work.known_tokens <= route.work.num_tokens
        self.running[name] = route

    @rule(which=st.integers(0, 9), what=st.sampled_from(["compute", "end", "fail"]))
    def go_on(self, which: int, what: str) -> None:
        if not self.running:
            return
        name = list(self.running)[which % len(self.running)]
        if what == "compute":
            self.fleet.compute(name, self.running[name], bytes([which]) * 32)
            return
        self.fleet.router.ended(name, self.running[name], failed=what == "fail")
        self.ended = name, self.running.pop(name)

    @precondition(lambda self: self.ended is not None)
    @rule()
    def compute_late(self) -> None:
        self.fleet.compute(*self.ended)

    @rule(which=st.integers(0, 2))
    def drain(self, which: int) -> None:
        engines = list(self.fleet.router.engines.values())
        if engines:
            engine = engines[which % len(engines)]
            engine.accepts = not engine.accepts

    @rule(which=st.integers(0, 2))
    def replace(self, which: int) -> None:
        router = self.fleet.router
        if router.engines:
            router.remove_engine(list(router.engines)[which % len(router.engines)])
        router.add_engine(f"e{self.named}", "nano", follows=True)
        self.named += 1

    @rule(which=st.integers(0, 2), blocks=st.lists(st.integers(0, 9)))
    def evict(self, which: int, blocks: list[int]) -> None:
        engines = list(self.fleet.router.engines.values())
        engine = engines[which % len(engines)]
        self.fleet.router.apply(engine, [Gone(KV, [short(bytes([b]) * 32) for b in blocks])])

    @invariant()
    def check(self) -> None:
        self.fleet.router.check_integrity()
        numbers = [engine.number for engine in self.fleet.router.engines.values()]
        assert len(set(numbers)) == len(numbers)


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
