"""The resolver decodes and processes no media part whose item is held or being made."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from lookonce.cache.directory import Directory
from lookonce.cache.identity import UuidBindings
from lookonce.config import MediaConfig
from lookonce.errors import (
    ConflictError,
    MediaNotCachedError,
    QueueFullError,
    UnprocessableMediaError,
)
from lookonce.render.media import resolver as resolve_module
from lookonce.render.media.loader import MediaLoader, MediaSource, media_source
from lookonce.render.media.resolver import MAX_SIDE_BY_SIDE, MediaResolver
from lookonce.types.request import RenderedItem
from tests.support.render.doubles import (
    ClaimDesk,
    FakeFamily,
    FakeLoader,
    FakePool,
    inline,
    named,
    processed_item,
    remote,
    until,
)

SCOPE, OTHER_SCOPE = b"a" * 32, b"b" * 32
CAT, DOG = "https://x.test/cat.png", "https://x.test/dog.png"
CAT_ITEM = processed_item("image", b"cat")


@dataclass
class Site:
    """A resolver with all it talks to."""

    capacity: int = 1 << 20
    web: Mapping[str, bytes] = field(default_factory=lambda: {CAT: b"cat", DOG: b"doggy"})
    pool: FakePool = field(default_factory=FakePool)
    loader: FakeLoader | MediaLoader | None = None
    claims: ClaimDesk | None = None

    def __post_init__(self) -> None:
        self.directory = Directory(self.capacity)
        self.uuids = UuidBindings()
        self.loader = self.loader or FakeLoader(self.web)
        self.resolver = MediaResolver(
            family=FakeFamily(),
            directory=self.directory,
            uuids=self.uuids,
            loader=self.loader,
            pool=self.pool,
            max_bytes=1 << 24,
            claims=self.claims and self.claims.of(self.directory),
        )

    async def render(
        self, *sources: MediaSource, scope: bytes = SCOPE, **kwargs: object
    ) -> list[RenderedItem]:
        return await self.resolver.resolve(sources, scope, kwargs)

    async def send(
        self, *sources: MediaSource, scope: bytes = SCOPE, **kwargs: object
    ) -> list[RenderedItem]:
        """Render, list the items as the sender does, and let arrays go as the client does."""
        items = await self.render(*sources, scope=scope, **kwargs)
        for item in items:
            if item.item is not None and item.key not in self.directory:
                listed = self.directory.try_list(item.key, item.item.nbytes, item.expansion)
                if listed is None:
                    self.directory.learn(item.key, item.expansion)
            item.item = None
        self.resolver.release(items)
        return items

    @property
    def processed(self) -> list[bytes]:
        return [bytes(job.data) for job in self.pool.jobs]

    @property
    def counted(self) -> tuple[int, int]:
        return self.directory.queries, self.directory.hits


def outcomes(items):
    return [item.outcome for item in items]


def play(scenario, **options):
    """Run a scenario; whatever it did, no pin is left."""
    site = Site(**options)

    async def run():
        await scenario(site)
        assert site.directory.num_pins == 0

    asyncio.run(run())


# --- hits and misses -----------------------------------------------------------------------------


def test_a_new_item_is_processed_once_and_then_held():
    async def scenario(site):
        [first] = await site.send(inline(b"cat"))
        [second] = await site.send(inline(b"cat"))
        assert (first.outcome, first.decode_ms, first.process_ms) == ("miss", 1.0, 2.0)
        assert (second.outcome, second.item, second.decode_ms) == ("hit", None, 0.0)
        assert second.expansion == first.expansion
        assert site.processed == [b"cat"]
        assert site.counted == (2, 1)
        assert site.resolver.stats.processed["image"] == site.resolver.stats.decoded["image"] == 1

    play(scenario)


def test_a_hit_is_pinned_for_its_prompt():
    async def scenario(site):
        await site.send(inline(b"cat"))
        items = await site.render(inline(b"cat"), inline(b"cat"))
        assert [item.pinned for item in items] == [True, True]
        assert site.directory.num_pins == 2
        site.resolver.release(items)
        site.resolver.release(items)

    play(scenario)


def test_copies_in_one_request_are_processed_once():
    async def scenario(site):
        items = await site.render(*[inline(b"cat")] * 8)
        assert outcomes(items) == ["miss", *["hit"] * 7]
        assert all(item.item == CAT_ITEM for item in items)
        assert site.processed == [b"cat"]
        assert site.counted == (8, 7)

    play(scenario)


def test_how_the_bytes_arrived_does_not_matter():
    async def scenario(site):
        [first] = await site.send(remote(CAT))
        [second] = await site.send(inline(b"cat"))
        assert first.key == second.key
        assert second.outcome == "hit"

    play(scenario)


def test_equal_bytes_under_other_options_or_for_others_are_other_items():
    async def scenario(site):
        await site.send(inline(b"cat"))
        await site.send(inline(b"cat"), max_pixels=9)
        await site.send(inline(b"cat"), scope=OTHER_SCOPE)
        await site.send(inline(b"cat"), max_pixels=9)
        assert site.processed == [b"cat"] * 3
        assert site.pool.jobs[1].options == {"max_pixels": 9}

    play(scenario)


def test_concurrent_requests_share_one_flight():
    async def scenario(site):
        site.pool.gate.clear()
        requests = [asyncio.create_task(site.render(inline(b"cat"))) for _ in range(64)]
        await asyncio.sleep(0)
        site.pool.gate.set()
        results = [outcome for items in requests for outcome in outcomes(await items)]
        assert sorted(results) == ["hit"] * 63 + ["miss"]
        assert site.processed == [b"cat"]
        assert site.counted == (64, 63)
        assert site.resolver.stats.waiting["image"] == 63

    play(scenario)


def test_an_item_of_a_prompt_that_is_not_sent_yet_is_shared():
    async def scenario(site):
        rendered = await site.render(inline(b"cat"))
        [shared] = await site.render(inline(b"cat"))
        assert (shared.outcome, shared.item) == ("hit", rendered[0].item)
        assert site.processed == [b"cat"]

    play(scenario)


def test_what_another_process_listed_is_a_shared_hit():
    async def scenario(site):
        [made] = await site.render(inline(b"cat"))
        site.resolver.release([made])
        other = Site()
        other.directory.hint(made.key, made.item.nbytes, made.expansion)
        [shared] = await other.render(inline(b"cat"))
        other.resolver.release([shared])
        assert (shared.outcome, shared.item) == ("shared", None)
        assert (other.counted, other.processed) == ((1, 1), [])

    play(scenario)


def test_a_prompt_that_is_gone_holds_nothing_back():
    async def scenario(site):
        await site.render(inline(b"cat"))
        gc.collect()
        [again] = await site.render(inline(b"cat"))
        assert again.outcome == "miss"

    play(scenario)


def test_an_item_larger_than_the_cache_is_a_bypass():
    async def scenario(site):
        [item] = await site.render(inline(b"cat"))
        assert item.outcome == "bypass"
        assert site.counted == (1, 0)

    play(scenario, capacity=100)


def test_without_a_cache_everything_is_processed_and_nothing_counted():
    async def scenario(site):
        for _ in range(2):
            assert outcomes(await site.send(inline(b"cat"), inline(b"cat"))) == ["bypass", "hit"]
        assert site.processed == [b"cat"] * 2
        assert site.counted == (0, 0)

    play(scenario, capacity=0)


# --- nothing waits for what it does not need -----------------------------------------------------


def test_a_hit_waits_for_no_miss():
    async def scenario(site):
        await site.send(inline(b"cat"))
        site.pool.gate.clear()
        misses = [asyncio.create_task(site.render(inline(bytes([n])))) for n in range(5)]
        await until(lambda: len(site.processed) == 6)
        hit = site.render(inline(b"cat"))
        with pytest.raises(StopIteration) as done:
            hit.send(None)  # it finishes without a single turn of the event loop
        site.resolver.release(done.value.value)
        assert site.resolver.stats.overtaking["image"] == 1
        assert site.resolver.stats.queued["image"] == 6
        site.pool.gate.set()
        await asyncio.gather(*misses)

    play(scenario)


def test_what_is_no_hit_in_the_end_has_neither_waited_nor_overtaken():
    """Its prompt fails for another part, or the cache is off and counts none."""

    async def failing(site):
        await site.send(inline(b"held"))
        site.pool.gate.clear()
        first = asyncio.create_task(site.render(inline(b"cat")))
        await until(lambda: site.processed == [b"held", b"cat"])
        parts = inline(b"held"), inline(b"cat"), inline(b"bad")
        second = asyncio.create_task(site.render(*parts))
        await until(lambda: len(site.processed) == 3)
        site.pool.gate.set()
        with pytest.raises(UnprocessableMediaError):
            await second
        await first
        assert site.counted == (2, 0)

    async def off(site):
        await site.render(inline(b"cat"), inline(b"cat"))

    async def scenario(site):
        await (failing if site.directory.capacity_bytes else off)(site)
        stats = site.resolver.stats
        assert (stats.waiting.total(), stats.overtaking.total()) == (0, 0)

    play(scenario)
    play(scenario, capacity=0)


def test_what_the_queue_refuses_is_not_counted_as_queued():
    class FullPool(FakePool):
        def run(self, job):
            raise QueueFullError("full")

    async def scenario(site):
        with pytest.raises(QueueFullError):
            await site.render(inline(b"cat"))
        assert site.resolver.stats.queued.total() == 0

    play(scenario, pool=FullPool())


def test_parts_are_fetched_and_processed_side_by_side():
    async def scenario(site):
        site.loader.gate.clear()
        site.pool.gate.clear()
        request = asyncio.create_task(site.render(remote(CAT), remote(DOG), inline(b"x")))
        await until(lambda: len(site.loader.loaded) == 2 and site.processed)
        assert site.loader.loaded == [CAT, DOG]
        assert site.processed == [b"x"]
        site.loader.gate.set()
        await until(lambda: len(site.processed) == 3)
        assert site.processed == [b"x", b"cat", b"doggy"]
        site.pool.gate.set()
        assert [item.expansion.length for item in await request] == [3, 5, 1]

    play(scenario)


def test_a_prompt_with_many_new_parts_does_not_fill_the_pool():
    async def scenario(site):
        site.pool.gate.clear()
        parts = [inline(b"%d" % n) for n in range(500)]
        request = asyncio.create_task(site.render(*parts))
        await until(lambda: len(site.processed) == MAX_SIDE_BY_SIDE)
        for _ in range(100):  # turns of the event loop in which no other begins
            await asyncio.sleep(0)
        assert len(site.processed) == MAX_SIDE_BY_SIDE
        site.pool.gate.set()
        assert len(await request) == len(site.processed) == 500

    play(scenario)


def test_large_media_is_hashed_off_the_loop(monkeypatch):
    monkeypatch.setattr(resolve_module, "OFF_LOOP_BYTES", 4)
    large = b"much larger"

    async def scenario(site):
        [first] = await site.send(inline(large))
        [second] = await site.send(remote(CAT))
        assert (first.outcome, second.outcome) == ("miss", "hit")

    play(scenario, web={CAT: large})


def test_base64_and_hash_of_more_than_4_mb_leave_the_loop_s_thread(monkeypatch):
    on_loop: dict[str, list[bool]] = {"base64": [], "hash": []}

    def noted(name, function):
        def call(*args, **kwargs):
            on_loop[name].append(threading.current_thread() is threading.main_thread())
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(resolve_module, "media_hash", noted("hash", resolve_module.media_hash))
    monkeypatch.setattr(MediaSource, "inline_bytes", noted("base64", MediaSource.inline_bytes))

    async def scenario(site):
        await site.send(inline(bytes(4_500_000)))
        await site.send(inline(b"cat"))
        assert on_loop == {"base64": [False, True], "hash": [False, True]}
        await site.loader.aclose()

    play(scenario, loader=MediaLoader(MediaConfig()))


# --- references ahead and recovery ---------------------------------------------------------------


def test_where_the_expansion_is_known_the_reference_goes_ahead():
    async def scenario(site):
        [first] = await site.send(inline(b"cat"))
        site.directory.unlist(first.key)
        [ahead] = await site.render(inline(b"cat"))
        assert (ahead.outcome, ahead.item, ahead.pinned) == ("not_needed", None, False)
        assert ahead.expansion == first.expansion
        assert site.processed == [b"cat"]

    play(scenario)


def test_a_reference_can_be_made_good_from_its_source():
    async def scenario(site):
        [first] = await site.send(remote(CAT))
        site.directory.unlist(first.key)
        [ahead] = await site.render(remote(CAT))
        assert await ahead.recover() == CAT_ITEM
        assert (ahead.outcome, ahead.process_ms) == ("miss", 2.0)
        assert site.processed == [b"cat"] * 2
        site.resolver.release([ahead])
        site.resolver.release([ahead])
        assert site.counted == (2, 0)

    play(scenario)


def test_what_was_made_good_for_one_prompt_is_not_made_again_for_another():
    """Both went ahead; the first one's item is made but not sent when the second one asks."""

    async def scenario(site):
        [first] = await site.send(inline(b"cat"))
        site.directory.unlist(first.key)
        [one], [other] = await site.render(inline(b"cat")), await site.render(inline(b"cat"))
        assert outcomes([one, other]) == ["not_needed"] * 2
        assert await one.recover() is await other.recover()
        assert outcomes([one, other]) == ["miss", "hit"]
        assert site.processed == [b"cat"] * 2
        site.resolver.release([one, other])
        assert site.counted == (3, 1)

    play(scenario)


def test_a_hit_can_be_made_good_too_and_stays_what_it_was_counted_as():
    async def scenario(site):
        await site.send(inline(b"cat"))
        [hit] = await site.send(inline(b"cat"))
        assert await hit.recover() == CAT_ITEM
        assert (hit.outcome, hit.decode_ms, hit.process_ms) == ("hit", 0.0, 0.0)
        assert site.counted == (2, 1)

    play(scenario)


def test_what_was_accepted_without_its_item_stays_what_it_was_counted_as():
    """The prefix covered it; the engine asks only later, for want of memory."""

    async def scenario(site):
        [first] = await site.send(inline(b"cat"))
        site.directory.unlist(first.key)
        [ahead] = await site.render(inline(b"cat"))
        site.resolver.release([ahead])  # counts it, as the sender does once it is accepted
        assert await ahead.recover() == CAT_ITEM
        assert (ahead.outcome, ahead.process_ms) == ("not_needed", 0.0)
        assert site.counted == (2, 1)

    play(scenario)


# --- uuids ---------------------------------------------------------------------------------------


def test_a_uuid_alone_names_what_came_with_it():
    async def scenario(site):
        [first] = await site.send(inline(b"cat", uuid="tom"))
        [second] = await site.send(named("tom"))
        assert second.key == first.key
        assert (second.outcome, second.recover) == ("hit", None)
        assert site.processed == [b"cat"]

    play(scenario)


def test_a_uuid_with_other_bytes_is_a_conflict_before_any_work():
    async def scenario(site):
        await site.send(inline(b"cat", uuid="tom"))
        with pytest.raises(ConflictError) as caught:
            await site.render(inline(b"dog", uuid="tom", param="messages[3].content[1]"))
        assert caught.value.param == "messages[3].content[1]"
        assert site.processed == [b"cat"]

    play(scenario)


def test_a_uuid_means_nothing_in_another_scope():
    async def scenario(site):
        await site.send(inline(b"cat", uuid="tom"))
        await site.send(inline(b"dog", uuid="tom"), scope=OTHER_SCOPE)
        with pytest.raises(MediaNotCachedError):
            await site.render(named("tom"), scope=b"c" * 32)

    play(scenario)


def test_one_uuid_may_be_processed_in_several_ways():
    async def scenario(site):
        await site.send(inline(b"cat", uuid="tom"))
        await site.send(inline(b"cat", uuid="tom"), max_pixels=9)
        first, second = await site.send(named("tom")), await site.send(named("tom"), max_pixels=9)
        assert first[0].key != second[0].key

    play(scenario)


def test_a_uuid_that_nothing_holds_is_not_cached():
    async def scenario(site):
        await site.send(inline(b"cat", uuid="tom"))
        site.directory.reset()
        with pytest.raises(MediaNotCachedError, match="send it again") as caught:
            await site.render(named("tom", param="messages[0].content[2]"))
        assert caught.value.param == "messages[0].content[2]"

    play(scenario)


def test_a_uuid_goes_ahead_where_only_its_expansion_is_known():
    async def scenario(site):
        [first] = await site.send(inline(b"cat", uuid="tom"))
        site.directory.unlist(first.key)
        [ahead] = await site.render(named("tom"))
        assert (ahead.outcome, ahead.item, ahead.recover) == ("not_needed", None, None)

    play(scenario)


def test_a_hash_names_what_was_sent_before_in_its_scope_alone():
    async def scenario(site):
        [first] = await site.send(inline(b"cat"))
        part = {"type": "image_url", "image_url": {"url": f"lookonce:{first.media_hash.hex()}"}}
        source = media_source(part, "messages[0].content[0]")
        [second] = await site.send(source)
        assert (second.key, second.outcome, second.recover) == (first.key, "hit", None)
        assert site.processed == [b"cat"]
        with pytest.raises(MediaNotCachedError, match="under this hash; send it again"):
            await site.render(source, scope=OTHER_SCOPE)

    play(scenario)


def test_a_uuid_is_not_bound_to_what_cannot_be_decoded():
    async def scenario(site):
        with pytest.raises(UnprocessableMediaError):
            await site.render(inline(b"bad", uuid="tom"))
        [item] = await site.send(inline(b"cat", uuid="tom"))
        assert item.outcome == "miss"

    play(scenario)


# --- failures ------------------------------------------------------------------------------------


def test_a_failure_names_the_part_of_each_request_that_waited():
    async def scenario(site):
        site.pool.gate.clear()
        params = ["messages[0].content[0]", "messages[4].content[2]"]
        requests = [asyncio.create_task(site.render(inline(b"bad", param=p))) for p in params]
        await asyncio.sleep(0)
        site.pool.gate.set()
        for request, param in zip(requests, params, strict=True):
            with pytest.raises(UnprocessableMediaError) as caught:
                await request
            assert caught.value.param == param
        assert site.processed == [b"bad"]
        assert site.counted == (0, 0)

    play(scenario)


def test_a_failure_is_not_remembered():
    async def scenario(site):
        for _ in range(2):
            with pytest.raises(UnprocessableMediaError):
                await site.render(inline(b"bad"))
        assert site.processed == [b"bad"] * 2

    play(scenario)


@pytest.mark.parametrize("wrong", [inline(b"bad"), remote("https://x.test/none"), named("nobody")])
def test_one_bad_part_gives_all_pins_back(wrong):
    async def scenario(site):
        await site.send(inline(b"cat"), remote(DOG))
        with pytest.raises(UnprocessableMediaError):
            await site.render(inline(b"cat"), remote(DOG), inline(b"new"), wrong)

    play(scenario)


def test_a_cancelled_request_gives_all_pins_back():
    async def scenario(site):
        await site.send(inline(b"cat"))
        site.pool.gate.clear()
        request = asyncio.create_task(site.render(inline(b"cat"), inline(b"new")))
        await asyncio.sleep(0)
        assert site.directory.num_pins == 1
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        site.pool.gate.set()

    play(scenario)


def test_cancelling_one_waiter_leaves_the_others_flying():
    async def scenario(site):
        site.pool.gate.clear()
        first, second = (asyncio.create_task(site.render(inline(b"cat"))) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        site.pool.gate.set()
        [item] = await second
        assert item.item is not None
        assert site.processed == [b"cat"]

    play(scenario)


# --- items that are made of a larger file --------------------------------------------------------


class Later:
    """The bytes of an item of a film; empty ones are broken."""

    def __init__(self, data):
        self.data = data
        self.is_expected = False

    def announce(self):
        self.is_expected = True

    def forget(self):
        self.is_expected = False

    async def __call__(self):
        await asyncio.sleep(0)
        if not self.data:
            raise UnprocessableMediaError("the film is broken")
        return self.data


def later(data):
    return replace(inline(b""), identity=b"of " + data, load=Later(data))


@pytest.mark.parametrize("ended_by", ["its end", "its client", "an error"])
def test_a_prompt_that_is_through_expects_no_frames_any_more(ended_by):
    """Another prompt that joined an item keeps the film alive."""

    async def scenario(site):
        sources = [
            later(b"cat"),
            later(b"" if ended_by == "an error" else b"doggy"),
            later(b"bird"),
        ]
        site.pool.gate.clear()
        first = asyncio.create_task(site.send(*sources))
        second = asyncio.create_task(site.send(later(b"cat")))
        await until(lambda: b"cat" in site.processed)
        if ended_by == "its client":
            first.cancel()
        elif ended_by == "its end":
            site.pool.gate.set()
        await asyncio.wait([first])
        assert not any(source.load.is_expected for source in sources)
        site.pool.gate.set()
        await second
        assert site.processed.count(b"cat") == 1

    play(scenario)


# --- other API processes -------------------------------------------------------------------------


def two_sites(scenario):
    desk = ClaimDesk()
    sites = [Site(claims=desk), Site(claims=desk)]

    async def run():
        await asyncio.wait_for(scenario(*sites), 20)
        assert [site.directory.num_pins for site in sites] == [0, 0]
        assert not desk.queues

    asyncio.run(run())


def test_what_two_processes_want_at_once_is_made_by_one():
    async def scenario(first, second):
        both = await asyncio.gather(
            first.send(inline(b"cat"), inline(b"cat")), second.send(inline(b"cat"), inline(b"cat"))
        )
        assert [outcomes(items) for items in both] == [["miss", "hit"], ["shared", "shared"]]
        assert (first.processed, second.processed) == ([b"cat"], [])
        assert (first.counted, second.counted) == ((2, 1), (2, 2))
        assert second.resolver.stats.waiting["image"] == 2
        assert second.resolver.stats.overtaking["image"] == 0

    two_sites(scenario)


def test_two_processes_that_want_the_same_in_other_orders_do_not_wait_for_each_other():
    async def scenario(first, second):
        await asyncio.gather(
            first.send(inline(b"cat"), inline(b"doggy")),
            second.send(inline(b"doggy"), inline(b"cat")),
        )
        assert sorted(first.processed + second.processed) == [b"cat", b"doggy"]

    two_sites(scenario)


def test_what_cannot_be_made_here_is_tried_by_the_other():
    async def scenario(first, second):
        first.pool.failure = UnprocessableMediaError("no")
        lost, found = await asyncio.gather(
            first.send(inline(b"cat")), second.send(inline(b"cat")), return_exceptions=True
        )
        assert isinstance(lost, UnprocessableMediaError)
        assert outcomes(found) == ["miss"]

    two_sites(scenario)


def test_what_others_made_but_is_gone_each_time_is_made_here_in_the_end():
    async def scenario(first, second):
        first.claims.forgetful = True
        await asyncio.gather(first.send(inline(b"cat")), second.send(inline(b"cat")))
        assert second.processed == [b"cat"]

    two_sites(scenario)


def test_a_published_item_stays_pinned_until_its_prompt_is_sent():
    async def scenario(first, second):
        [item] = await first.render(inline(b"cat"))
        assert item.pinned
        assert item.item is not None
        assert first.directory.lists_for_certain(item.key)
        first.resolver.release([item])

    two_sites(scenario)
