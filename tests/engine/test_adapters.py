"""Adapters by name: what is held is what a name or a request uses, whatever happens in between."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lookonce.engine.process.adapters import EngineAdapters, Load
from lookonce.engine.process.input_thread import AdapterAnswers
from lookonce.errors import BadRequestError, ModelNotFoundError
from lookonce.types.lora import LoRAIdentity, ReadAdapter


class FakeStore:
    """Folders are named by their contents. `installed` is what the runner would have."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.installed: frozenset[bytes] = frozenset()
        self.failures = 0
        """So many removals fail from now on."""

    def load(self, path: str) -> ReadAdapter:
        if path == "broken":
            raise BadRequestError("it is broken", param="lora_path")
        digest = path.encode()
        self.held.add(digest)
        return ReadAdapter(LoRAIdentity(digest), 4, self._install())

    def drop(self, digest: bytes):
        if self.failures:
            self.failures -= 1
            raise MemoryError
        self.held.remove(digest)
        return self._install()

    def _install(self):
        held = frozenset(self.held)

        def install() -> None:
            self.installed = held

        return install


class World:
    """The adapters of one engine, whose jobs are done at once when they are waited for."""

    def __init__(self, max_loras: int = 3, store: FakeStore | None = None, **options) -> None:
        self.store = store or FakeStore()
        self.adapters = EngineAdapters(self.store, max_loras=max_loras, **options)
        self._woken = threading.Event()
        self.adapters.wake = self._woken.set

    def load(self, name: str, path: str, *, replace: bool = False):
        self.adapters.load(Load("sender", 1, name, path), replace=replace)

    def settle(self):
        """Wait for all jobs; the loads that have ended."""
        ended = []
        while self.adapters._running is not None:
            assert self._woken.wait(10)
            self._woken.clear()
            installs, loads = self.adapters.take()
            for install in installs:
                install()
            ended += loads
        return ended

    def identity(self, name: str) -> LoRAIdentity:
        return next(i.identity for i in self.adapters.listed if i.name == name)


def test_an_adapter_stays_until_the_last_request_with_it_has_ended():
    world = World()
    world.load("a", "one")
    assert [error for _, error in world.settle()] == [None]
    assert world.adapters.acquire("r", "a") == world.identity("a")
    world.adapters.unload("a")
    world.settle()
    assert world.store.installed == {b"one"}
    with pytest.raises(ModelNotFoundError, match="'a'"):
        world.adapters.acquire("later", "a")
    world.adapters.release("r")
    world.settle()
    assert world.store.installed == frozenset()


def test_other_contents_under_a_name_do_not_touch_what_runs():
    world = World()
    world.load("a", "one")
    world.settle()
    world.adapters.acquire("r", "a")
    with pytest.raises(BadRequestError, match="loaded already"):
        world.load("a", "two")
    world.load("a", "two", replace=True)
    world.settle()
    assert world.identity("a").digest == b"two"
    assert world.store.installed == {b"one", b"two"}
    world.adapters.release("r")
    world.settle()
    assert world.store.installed == {b"two"}


def test_a_broken_folder_fails_its_own_load_alone():
    world = World()
    world.load("a", "one")
    world.load("b", "broken")
    world.load("c", "two")
    ended = {load.name: error for load, error in world.settle()}
    assert isinstance(ended["b"], BadRequestError)
    assert (ended["a"], ended["c"]) == (None, None)
    assert [info.name for info in world.adapters.listed] == ["a", "c"]


def test_their_number_is_limited_and_a_name_is_loaded_once_at_a_time():
    world = World(max_loras=2)
    world.load("a", "one")
    with pytest.raises(BadRequestError, match="being loaded"):
        world.load("a", "one", replace=True)
    world.load("b", "two")
    with pytest.raises(BadRequestError, match="--max-loras"):
        world.load("c", "three")
    world.settle()
    world.adapters.unload("a")
    world.load("c", "three")
    world.settle()
    assert [info.name for info in world.adapters.listed] == ["b", "c"]


def test_the_models_own_adapters_follow_the_media_and_stay():
    """They have no names, and an adapter of equal contents that is unloaded does not take them."""
    store = FakeStore()
    own = {"image": store.load("sees").identity, "audio": store.load("hears").identity}
    world = World(store=store, for_media=own)
    assert world.adapters.own({"audio", "image"}) == own["image"]
    assert world.adapters.own({"audio"}) == own["audio"]
    assert world.adapters.own(set()) is None
    assert world.adapters.listed == ()
    world.load("a", "hears")
    world.settle()
    world.adapters.unload("a")
    world.settle()
    assert store.held == {b"sees", b"hears"}


def test_an_answer_waits_for_every_sender_that_is_still_there():
    answers = AdapterAnswers()
    number = answers.begin("a", 7, ["a", "b", "c"])
    assert answers.known("a", number) == []
    assert answers.known("b", number) == []
    assert answers.forget("c") == [("a", 7)]
    assert answers.known("c", number) == []


def test_what_could_not_be_dropped_is_dropped_with_the_next_load():
    world = World()
    world.load("a", "one")
    world.settle()
    world.store.failures = 1
    world.adapters.unload("a")
    world.settle()
    assert world.store.installed == {b"one"}
    world.load("b", "two")
    world.settle()
    assert world.store.installed == {b"two"}


NAMES = st.sampled_from(["a", "b", "c"])
CONTENTS = st.sampled_from(["one", "two", "broken"])


class AdaptersMachine(RuleBasedStateMachine):
    """Contents are shared by names, replaced and dropped while requests run and jobs wait."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(max_loras=8)
        self.running: dict[str, bytes] = {}
        self.count = 0

    @rule(name=NAMES, contents=CONTENTS, replace=st.booleans())
    def load(self, name, contents, replace):
        try:
            self.world.load(name, contents, replace=replace)
        except BadRequestError:
            assert self.world.adapters.knows(name)

    @rule(name=NAMES)
    def unload(self, name):
        try:
            self.world.adapters.unload(name)
        except ModelNotFoundError:
            assert name not in {info.name for info in self.world.adapters.listed}

    @precondition(lambda self: self.world.adapters.listed)
    @rule(data=st.data())
    def begin(self, data):
        info = data.draw(st.sampled_from(self.world.adapters.listed))
        self.count += 1
        self.world.adapters.acquire(f"r{self.count}", info.name)
        self.running[f"r{self.count}"] = info.identity.digest

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        self.world.adapters.release(request_id)
        del self.running[request_id]

    @rule(failures=st.integers(0, 2))
    def fail(self, failures):
        self.world.store.failures = failures

    @rule()
    def settle(self):
        self.world.settle()
        kept = set(self.world.adapters._not_dropped)
        assert self.world.store.installed - kept == self.used() - kept

    @invariant()
    def what_is_used_is_installed(self):
        assert self.used() <= self.world.store.installed

    def used(self) -> set[bytes]:
        named = [info.identity.digest for info in self.world.adapters.listed]
        return set(Counter([*named, *self.running.values()]))


TestAdapters = AdaptersMachine.TestCase
TestAdapters.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
