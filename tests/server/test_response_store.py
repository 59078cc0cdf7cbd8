"""The store of responses and conversations: what is shared, found, dropped and counted."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lookonce.errors import (
    BadRequestError,
    ConfigError,
    NotFoundError,
    QueueFullError,
    TooLargeError,
)
from lookonce.server import response_store
from lookonce.server.response_store import Origin, ResponseDatabase, ResponseStore

PICTURE = "data:image/png;base64," + "A" * 5000


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def database(tmp_path, clock):
    with closing(opened(tmp_path / "s", clock)) as database:
        yield database
        database.check_integrity()


def opened(path, clock=Clock(), max_bytes=1 << 20, max_age=100.0):  # noqa: B008
    return ResponseDatabase(path, max_bytes=max_bytes, max_age=max_age, durable=False, now=clock)


def item(name, text="x", **more):
    return {"type": "message", "id": name, "role": "user", "content": text, **more}


def answer(database, name, items, origin=None, tenant="t"):
    """Store a whole response, whose output is one item; what it was generated from."""
    context = database.begin(tenant, name, items, origin)
    database.finish(tenant, name, b"{}", [item(f"{name}-out", "y")], keep=True)
    return [each["id"] for each in context] + [each["id"] for each in items]


def test_a_response_continues_another_and_survives_it(database):
    answer(database, "r1", [item("a", PICTURE)])
    assert answer(database, "r2", [item("b")], Origin("response", "r1")) == ["a", "r1-out", "b"]
    database.delete("t", "response", "r1")
    with pytest.raises(NotFoundError):
        database.body("t", "response", "r1")
    context = database.context("t", Origin("response", "r2"))
    assert [each["id"] for each in context] == ["a", "r1-out", "b", "r2-out"]
    assert context[0]["content"] == PICTURE
    database.delete("t", "response", "r2")
    assert database.bytes_by_tenant() == {}


def test_a_long_text_is_stored_once_for_a_tenant_and_not_shared_between_tenants(database):
    answer(database, "r1", [item("a", PICTURE)])
    one = database.bytes_by_tenant()["t"]
    answer(database, "r2", [item("b", [{"type": "input_image", "image_url": PICTURE}])])
    assert database.bytes_by_tenant()["t"] < one + 1000
    answer(database, "r3", [item("a", PICTURE)], tenant="u")
    assert database.bytes_by_tenant()["u"] == one


@pytest.fixture
def shared(database, monkeypatch):
    """A conversation of ten items with one text, which is stored once and read ten times."""
    monkeypatch.setattr(response_store, "LARGEST_CONTEXT", 4 * len(PICTURE))
    monkeypatch.setattr(response_store, "LARGEST_PAGE", 3 * len(PICTURE))
    database.create_conversation("t", "c1", b"{}", [])
    for number in range(10):
        database.add_to_conversation("t", "c1", [item(str(number), PICTURE)])
    assert database.bytes_by_tenant()["t"] < 2 * len(PICTURE)
    return Origin("conversation", "c1")


def test_no_more_is_read_at_a_time_than_may_be_however_little_is_stored(database, shared):
    for read in (
        lambda: database.context("t", shared),
        lambda: database.begin("t", "r1", [item("new")], shared),
        lambda: database.items("t", ["0"] * 10),
    ):
        with pytest.raises(TooLargeError):
            read()
    assert len(database.items("t", ["0", "1", "2"])) == 3
    with pytest.raises(NotFoundError):
        database.body("t", "response", "r1")


def test_pages_of_large_items_are_short_and_lead_to_the_end(database, shared):
    found, after, more = [], None, True
    while more:
        page, more = database.page(
            "t", "conversation", "c1", after=after, limit=100, descending=False
        )
        assert 1 <= len(page) <= 3
        found += [each["id"] for each in page]
        after = found[-1]
    assert found == [str(number) for number in range(10)]


def test_an_item_larger_than_a_page_is_a_page(database, shared, monkeypatch):
    monkeypatch.setattr(response_store, "LARGEST_PAGE", 10)
    page, more = database.page("t", "conversation", "c1", limit=5)
    assert (len(page), more) == (1, True)


def test_no_more_small_values_are_read_at_a_time_than_there_is_memory_for(database, monkeypatch):
    first = Origin("response", "r1")
    answer(database, "r1", [item("a", detail=[[n, n + 1] for n in range(60)])])  # some 230 bytes
    monkeypatch.setattr(response_store, "LARGEST_CONTEXT", 4000)
    answer(database, "r2", [item("b")], first)
    monkeypatch.setattr(response_store, "LARGEST_CONTEXT", 1000)
    with pytest.raises(TooLargeError, match="bytes of memory, 1000 are allowed"):
        database.begin("t", "r3", [item("c")], first)


@pytest.mark.parametrize("empty", [[], {}])
def test_an_item_of_empty_lists_and_objects_is_not_stored(database, empty):
    with pytest.raises(BadRequestError, match="lists and objects"):
        answer(database, "r1", [item("a", detail=[empty] * 5000)])
    part = {"type": "input_text", "text": ""}
    answer(database, "r2", [item("b", [part] * 5000)])


def test_a_text_that_an_item_repeats_is_counted_each_time(database):
    database.create_conversation("t", "c1", b"{}", [item("a", [PICTURE] * 5)])
    assert database.bytes_by_tenant()["t"] > 5 * len(PICTURE)
    assert database.items("t", ["a"])[0]["content"] == [PICTURE] * 5


def test_a_conversation_has_a_largest_number_of_items(database, monkeypatch):
    monkeypatch.setattr(response_store, "MOST_ENTRIES", 4)
    database.create_conversation("t", "c1", b"{}", [item(str(n)) for n in range(3)])
    with pytest.raises(TooLargeError):
        database.add_to_conversation("t", "c1", [item("x"), item("y")])
    database.add_to_conversation("t", "c1", [item("z")])


def test_what_is_not_finished_is_not_found(database):
    database.begin("t", "r1", [item("a")], None)
    with pytest.raises(NotFoundError):
        database.body("t", "response", "r1")
    database.discard("t", "r1")
    assert database.bytes_by_tenant() == {}
    assert not database.finish("t", "r1", b"{}", [], keep=True)


def test_another_tenant_finds_nothing(database):
    answer(database, "r1", [item("a")])
    database.create_conversation("t", "c1", b"{}", [item("b")])
    for kind, name in (("response", "r1"), ("conversation", "c1")):
        with pytest.raises(NotFoundError):
            database.body("u", kind, name)
        with pytest.raises(NotFoundError):
            database.page("u", kind, name)
        with pytest.raises(NotFoundError):
            database.delete("u", kind, name)
        with pytest.raises(NotFoundError):
            database.begin("u", "r9", [], Origin(kind, name))
    assert database.items("u", ["a", "b"]) == [None, None]
    assert [each and each["id"] for each in database.items("t", ["a", "z"])] == ["a", None]


def test_two_processes_share_the_file(tmp_path, clock):
    with closing(opened(tmp_path / "s")) as one, closing(opened(tmp_path / "s")) as other:
        answer(one, "r1", [item("a")])
        assert answer(other, "r2", [item("b")], Origin("response", "r1")) == ["a", "r1-out", "b"]
        other.delete("t", "response", "r1")
        with pytest.raises(NotFoundError):
            one.body("t", "response", "r1")
    with closing(opened(tmp_path / "s")) as later:
        assert later.body("t", "response", "r2") == b"{}"


def test_a_conversation_gets_what_is_new_and_can_be_used_without_keeping_responses(database):
    database.create_conversation("t", "c1", b"{}", [item("a")])
    for name in ("r1", "r2"):
        context = database.begin("t", name, [item(f"{name}-in")], Origin("conversation", "c1"))
        out = [item(f"{name}-out")]
        assert database.finish("t", name, b"{}", out, keep=False, conversation="c1", num_new=1)
    assert [each["id"] for each in context] == ["a", "r1-in", "r1-out"]
    items, _ = database.page("t", "conversation", "c1", descending=False)
    assert [each["id"] for each in items] == ["a", "r1-in", "r1-out", "r2-in", "r2-out"]
    with pytest.raises(NotFoundError):
        database.body("t", "response", "r1")
    database.remove_from_conversation("t", "c1", "r1-in")
    with pytest.raises(NotFoundError):
        database.conversation_item("t", "c1", "r1-in")
    database.add_to_conversation("t", "c1", [item("z")])
    items, _ = database.page("t", "conversation", "c1", limit=2)
    assert [each["id"] for each in items] == ["z", "r2-out"]


def test_pages_follow_each_other(database):
    database.create_conversation("t", "c1", b"{}", [item(str(n)) for n in range(5)])

    def pages(descending):
        after = None
        while True:
            found, more = database.page(
                "t", "conversation", "c1", after=after, limit=2, descending=descending
            )
            yield [each["id"] for each in found]
            if not more:
                return
            after = found[-1]["id"]

    assert list(pages(True)) == [["4", "3"], ["2", "1"], ["0"]]
    assert list(pages(False)) == [["0", "1"], ["2", "3"], ["4"]]
    with pytest.raises(BadRequestError):
        database.page("t", "conversation", "c1", after="nothing")


def test_an_item_that_is_sent_again_gets_an_id_of_its_own_so_that_pages_end(database):
    database.create_conversation("t", "c1", b"{}", [item(str(n)) for n in range(3)])
    again = database.add_to_conversation("t", "c1", [item(str(n), "y") for n in range(3)])
    assert [each["content"] for each in again] == ["y"] * 3
    ids, after = [], None
    for _ in range(3):
        found, more = database.page(
            "t", "conversation", "c1", after=after, limit=2, descending=False
        )
        ids += [each["id"] for each in found]
        after = ids[-1]
    assert not more
    assert ids == ["0", "1", "2", *(each["id"] for each in again)]
    assert len(set(ids)) == 6
    answer(database, "r1", [item("a"), item("a")])
    answer(database, "r2", [item("a")], Origin("response", "r1"))
    context = database.context("t", Origin("response", "r2"))
    assert len({each["id"] for each in context}) == len(context) == 5


def test_a_response_shows_its_input_and_not_its_output(database):
    answer(database, "r1", [item("a")])
    answer(database, "r2", [item("b")], Origin("response", "r1"))
    items, _ = database.page("t", "response", "r2")
    assert [each["id"] for each in items] == ["b", "r1-out", "a"]


def test_what_was_not_used_for_long_is_gone(database, clock):
    answer(database, "r1", [item("a")])
    answer(database, "r2", [item("b")])
    clock.now += 60
    database.body("t", "response", "r2")
    clock.now += 60
    with pytest.raises(NotFoundError):
        database.body("t", "response", "r1")
    database.body("t", "response", "r2")
    database.sweep()
    assert [each and each["id"] for each in database.items("t", ["a", "b"])] == [None, "b"]


def test_the_tenant_that_has_most_loses_what_it_used_least(tmp_path, clock):
    with closing(opened(tmp_path / "s", clock, max_bytes=40_000)) as database:
        answer(database, "small", [item("a")], tenant="u")
        for number in range(20):
            clock.now += 1
            answer(database, f"r{number}", [item("b", str(number) * 3000)])
            database.check_integrity()
            assert sum(database.bytes_by_tenant().values()) <= 40_000
        database.body("u", "response", "small")
        database.body("t", "response", "r19")
        with pytest.raises(NotFoundError):
            database.body("t", "response", "r0")


def test_what_is_too_large_is_refused_and_leaves_nothing(tmp_path):
    with closing(opened(tmp_path / "s", max_bytes=40_000)) as database:
        answer(database, "r1", [item("a")])
        before = database.bytes_by_tenant()
        with pytest.raises(TooLargeError):
            database.begin("t", "r2", [item("b", "x" * 20_000)], None)
        with pytest.raises(BadRequestError):
            database.begin("t", "r3", [item("b", 1 << 70)], None)
        assert database.bytes_by_tenant() == before


def test_another_file_is_not_touched(tmp_path):
    with closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("CREATE TABLE mine (x)")
    with pytest.raises(ConfigError, match="no store of responses"):
        opened(tmp_path / "other")
    (tmp_path / "text").write_text("hello " * 1000)
    with pytest.raises(ConfigError):
        opened(tmp_path / "text")
    with pytest.raises(ConfigError):
        opened(tmp_path / "none" / "s")


# --- turns --------------------------------------------------------------------------------------


class HeldDatabase:
    """Notes who was served, once `go` is set."""

    def __init__(self):
        self.served = []
        self.begun = threading.Event()
        self.go = threading.Event()

    def body(self, tenant, kind, name):
        self.begun.set()
        self.go.wait(60)
        self.served.append(f"{tenant}{name}")

    def finish(self, tenant):
        self.served.append(f"{tenant} finished")

    def discard(self, tenant, name):
        self.served.append(f"{tenant}{name} discarded")

    def close(self):
        """Nothing is open."""


async def begun(store, tenants):
    """Calls in this order, of which the first one is being served."""
    counts = itertools.count()
    calls = []
    for tenant in tenants:
        calls.append(
            asyncio.create_task(store.call(HeldDatabase.body, tenant, "response", next(counts)))
        )
        await asyncio.sleep(0)
    return calls


def test_tenants_take_turns_at_the_file():
    async def play():
        database = HeldDatabase()
        with closing(ResponseStore(database)) as store:
            calls = await begun(store, "a" * 20 + "b")
            database.go.set()
            await asyncio.gather(*calls)
        assert len(database.served) == 21
        assert database.served.index("b20") < 10

    asyncio.run(play())


def test_too_many_calls_of_a_tenant_are_refused_but_not_what_ends_a_response(monkeypatch):
    async def play():
        monkeypatch.setattr(response_store.ResponseDatabase, "finish", HeldDatabase.finish)
        database = HeldDatabase()
        with closing(ResponseStore(database, max_waiting=2)) as store:
            calls = await begun(store, "aaa")
            assert await asyncio.to_thread(database.begun.wait, 60)
            with pytest.raises(QueueFullError, match="stored responses"):
                await store.call(HeldDatabase.body, "a", "response", 3)
            calls += await begun(store, "b")
            store.discard_later("a", 9)
            calls.append(asyncio.create_task(store.call(ResponseDatabase.finish, "a")))
            await asyncio.sleep(0)
            database.go.set()
            await asyncio.gather(*calls)
        assert sorted(database.served) == ["a finished", "a0", "a1", "a2", "a9 discarded", "b0"]

    asyncio.run(play())


def test_a_call_that_is_left_while_it_waits_is_not_made():
    async def play():
        database = HeldDatabase()
        with closing(ResponseStore(database)) as store:
            calls = await begun(store, "aab")
            calls[1].cancel()
            await asyncio.sleep(0)
            database.go.set()
            await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(database.served) == ["a0", "b2"]

    asyncio.run(play())


class Sharing(RuleBasedStateMachine):
    """Responses that continue each other and conversations, against lists of item ids."""

    owners = Bundle("owners")

    def __init__(self):
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.database = opened(Path(self._folder.name, "s"))
        self.names = itertools.count()
        self.known: dict[tuple[str, str, str], list[str]] = {}

    def teardown(self):
        self.database.close()
        self._folder.cleanup()

    @rule(target=owners, tenant=st.sampled_from("tu"), text=st.sampled_from(["x", PICTURE]))
    def create_conversation(self, tenant, text):
        name, own = f"c{next(self.names)}", f"i{next(self.names)}"
        self.database.create_conversation(tenant, name, b"{}", [item(own, text)])
        self.known[tenant, "conversation", name] = [own]
        return tenant, "conversation", name

    @rule(
        target=owners,
        tenant=st.sampled_from("tu"),
        text=st.sampled_from(["x", PICTURE]),
        keep=st.booleans(),
        previous=st.one_of(st.none(), owners),
    )
    def answer(self, tenant, text, keep, previous):
        name, own, out = (f"{kind}{next(self.names)}" for kind in "rio")
        origin = None if previous is None else Origin(previous[1], previous[2])
        reached = previous is None or (previous[0] == tenant and previous in self.known)
        if not reached:
            with pytest.raises(NotFoundError):
                self.database.begin(tenant, name, [item(own, text)], origin)
            return tenant, "response", name
        context = self.database.begin(tenant, name, [item(own, text)], origin)
        before = [] if previous is None else self.known[previous]
        assert [each["id"] for each in context] == before
        conversation = previous[2] if previous and previous[1] == "conversation" else None
        self.database.finish(
            tenant, name, b"{}", [item(out)], keep=keep, conversation=conversation, num_new=1
        )
        if keep:
            self.known[tenant, "response", name] = [*before, own, out]
        if conversation is not None:
            self.known[previous] = [*before, own, out]
        return tenant, "response", name

    @rule(owner=consumes(owners))
    def delete(self, owner):
        if self.known.pop(owner, None) is None:
            with pytest.raises(NotFoundError):
                self.database.delete(*owner)
        else:
            self.database.delete(*owner)

    @invariant()
    def everybody_has_their_items(self):
        self.database.check_integrity()
        for (tenant, kind, name), ids in self.known.items():
            found = self.database.context(tenant, Origin(kind, name))
            assert [each["id"] for each in found] == ids


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
