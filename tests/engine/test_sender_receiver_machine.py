"""The cache protocol under every interleaving, and proof that the machine would notice.

Hypothesis, and random steps from seeds, drive the world of `sender_receiver_world`: two API
processes and an engine. The world checks itself after every event. The mutations at the end break
the protocol in one place each; the same machine must find every one.
"""

from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from lookonce.cache.directory import ByteLRU, Directory, Evicted
from lookonce.engine.client.sender_cache import SenderCache, _Change
from lookonce.engine.process.receiver_cache import ReceiverCache
from lookonce.ipc.messages import NO_OPS
from tests.support.drawn_steps import BOOLEAN, DrawnSteps, ListOf, first, one_of, run_seeds, step
from tests.support.engine.sender_receiver_world import Api, Engine, World

PICK = one_of(*range(12))
NUMBERS = ListOf(PICK, most=5)
SELDOM = one_of(True, False, False)
DISTURBANCES = ("reset", "restart", "forget", "silence")
FATES = one_of("serve", "serve", "covered", "reject")


def build_machine(**world_parts):
    """The machine over a world in which some parts may be replaced by broken ones."""

    class Machine(DrawnSteps):
        @first(capacity=one_of(0, 550, 2000, 5000, 5000, 40000))
        def begin(self, capacity):
            self.world = World(capacity, **world_parts)

        def api(self, pick):
            return list(self.world.apis.values())[pick % len(self.world.apis)]

        def some(self, things, pick):
            return things[pick % len(things)] if things else None

        @step(who=PICK, numbers=NUMBERS, fate=FATES, ahead=BOOLEAN, reference=BOOLEAN)
        def look_up(self, who, numbers, fate, ahead, reference):
            self.api(who).start(numbers, fate, ahead=ahead, by_reference=reference)

        @step(who=PICK, numbers=NUMBERS, fate=FATES, at_once=BOOLEAN)
        def look_up_and_finish(self, who, numbers, fate, at_once):
            api = self.api(who)
            api.start(numbers, fate, ahead=True, by_reference=False)
            request = api.in_state("rendering")[-1]
            if request in api.to_finish():
                api.finish(request)
                if at_once:
                    api.send(request)

        @step(who=PICK, which=PICK)
        def finish_rendering(self, who, which):
            request = self.some(self.api(who).to_finish(), which)
            if request:
                self.api(who).finish(request)

        @step(numbers=NUMBERS, ahead=BOOLEAN)
        def look_up_everywhere(self, numbers, ahead):
            for api in self.world.apis.values():
                api.start(numbers, "serve", ahead=ahead, by_reference=False)

        @step(who=PICK, which=PICK)
        def make(self, who, which):
            name = self.some(self.api(who).to_make(), which)
            if name:
                self.api(who).make(name)

        @step(who=PICK, which=PICK, really=SELDOM)
        def fail_to_make(self, who, which, really):
            name = self.some(self.api(who).to_make(), which)
            if name and really:
                self.api(who).fail(name)

        @step(who=PICK)
        def repeat_claims(self, who):
            self.api(who).repeat_claims()

        @step(who=PICK, which=PICK)
        def send(self, who, which):
            request = self.some(self.api(who).in_state("rendered"), which)
            if request:
                self.api(who).send(request)

        @step(who=PICK, which=PICK, really=SELDOM)
        def cancel_before_sending(self, who, which, really):
            request = self.some(self.api(who).in_state("rendering", "rendered"), which)
            if request and really:
                self.api(who).cancel(request)

        @step(who=PICK, which=PICK, really=SELDOM)
        def disconnect(self, who, which, really):
            request = self.some(self.api(who).in_state("sent", "accepted"), which)
            if request and really:
                self.api(who).disconnect(request)

        @step(who=PICK, how_many=one_of(1, 2, 3, 4))
        def deliver_to_engine(self, who, how_many):
            for _ in range(min(how_many, len(self.api(who).outbox))):
                self.world.engine.receive(self.api(who))

        @step(who=PICK, how_many=one_of(1, 2, 3, 4))
        def deliver_to_api(self, who, how_many):
            for _ in range(min(how_many, len(self.api(who).inbox))):
                self.api(who).receive()

        @step(who=PICK, which=PICK)
        def recover(self, who, which):
            request = self.some(self.api(who).to_recover(), which)
            if request:
                self.api(who).recover(request)

        @step(which=PICK)
        def finish_request(self, which):
            engine = self.world.engine
            request_id = self.some([*engine.running, *engine.waiting], which)
            if request_id:
                self.world.engine.finish(request_id)

        @step(who=PICK, numbers=NUMBERS)
        def inject(self, who, numbers):
            self.api(who).inject(numbers)

        @step(who=PICK, which=PICK, really=SELDOM)
        def spoil_a_message(self, who, which, really):
            if really:
                self.api(who).spoil(which)

        @step(who=PICK, what=one_of(*DISTURBANCES, *[None] * 6))
        def disturb(self, who, what):
            if what == "reset":
                self.world.engine.reset()
            elif what == "restart":
                self.world.restart_engine()
            elif what == "forget":
                self.world.engine.forget(self.api(who).name)
            elif what == "silence":
                self.world.engine.pass_over(self.api(who).name)

        @step()
        def settle(self):
            self.world.settle()

        @invariant()
        def check(self):
            self.world.check()

        def teardown(self):
            if hasattr(self, "world"):
                self.world.settle()

    return Machine


MOST_STEPS = 60


def run(max_examples, **world_parts):
    run_state_machine_as_test(
        build_machine(**world_parts),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=MOST_STEPS,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_interleaving_breaks_the_protocol():
    run(30)
    run_seeds(build_machine(), 500, MOST_STEPS)


@pytest.mark.parametrize("num_senders", [1, 3])
def test_nor_with_other_numbers_of_senders(num_senders):
    run(5, num_senders=num_senders)
    run_seeds(build_machine(num_senders=num_senders), 100, MOST_STEPS)


# --- mutations: each must be found ------------------------------------------------------------


def assert_found(how, num_seeds=2000, **world_parts):
    """The machine fails, and with one of the messages that `how` (a pattern) allows."""
    with pytest.raises(AssertionError, match=how):
        run_seeds(build_machine(**world_parts), num_seeds, MOST_STEPS)


def api_of(broken_sender):
    """API processes whose sender's half is broken."""

    class ApiOf(Api):
        sender_type = broken_sender

    return ApiOf


def sender_over(directory_type):
    """A sender's half over a broken directory."""

    class SenderOver(SenderCache):
        def __init__(self, sender_id, *, capacity_bytes):
            super().__init__(sender_id, capacity_bytes=capacity_bytes)
            self.directory = directory_type(capacity_bytes)

    return SenderOver


class CommitsBeforeTheAwait(Api):
    """The directory changes when rendering ends, the message goes out when there is room."""

    def finish(self, request):
        super().finish(request)
        request.early = self.sender.submit(self._generate(request), request.prompt)

    def commit(self, request):
        return request.early


def test_committing_before_the_await_is_found():
    assert_found("the two sides differ|contradicted|evicted", make_api=CommitsBeforeTheAwait)


class RejectsFirst(ReceiverCache):
    """A request that will be rejected never gets its cache operations applied."""

    def __init__(self, world, epoch):
        super().__init__(epoch)
        self.world = world

    def submit(self, sender, message):
        if self.world.fate(message.request.request_id) == "reject":
            message = type(message)(
                message.epoch, message.seq, type(message.ops)(), message.request
            )
        return super().submit(sender, message)


def test_rejecting_before_applying_is_found():
    assert_found(
        "the two sides differ|contradicted|did not bring|guaranteed",
        make_receiver_cache=RejectsFirst,
    )


def test_evicting_a_pinned_entry_is_found():
    real = ByteLRU.try_insert

    def blind_to_pins(self, key, size, value):
        if size > self.capacity_bytes:
            return None
        evicted = []
        while self.nbytes + size > self.capacity_bytes:
            oldest = next(iter(self))
            evicted.append(Evicted(oldest, self.size_of(oldest), self.remove(oldest)))
        return real(self, key, size, value) + evicted

    with patch.object(ByteLRU, "try_insert", blind_to_pins):
        assert_found("pinned entry was evicted|contradicted|own")


def test_a_lookup_that_does_not_pin_is_found():
    class PeekingDirectory(Directory):
        lookup = Directory.peek

    class WithoutPins(sender_over(PeekingDirectory)):
        def cancel(self, rendered):
            for part in rendered.items:
                part.pinned = False

    assert_found(
        "a pinned entry was evicted|a pin was not given back|differ", make_api=api_of(WithoutPins)
    )


def test_not_protecting_a_messages_own_keys_is_found():
    with (
        patch.object(_Change, "__enter__", lambda self: self),
        patch.object(_Change, "__exit__", lambda self, *exc_info: None),
    ):
        assert_found("contradicted|guaranteed|the two sides differ")


def test_listening_to_another_epoch_is_found():
    class OfAnyEpoch(ReceiverCache):
        def __init__(self, world, epoch):
            super().__init__(epoch)

        def _accepts(self, sender, epoch):
            return self.knows(sender)

    assert_found("differ|contradicted|still held", make_receiver_cache=OfAnyEpoch)


def test_clearing_without_saying_so_is_found():
    class ClearsInSilence(SenderCache):
        def clear(self, message):
            self.directory.reset()
            return self._update(NO_OPS)

    assert_found("differ|contradicted|end", make_api=api_of(ClearsInSilence))


def test_trusting_a_hint_is_found():
    """A stale adoption is taken for certain: its resend brings nothing."""

    class CertainDirectory(Directory):
        def try_list(self, key, nbytes, expansion, *, adopted=False, injected=False):
            return super().try_list(key, nbytes, expansion)

    broken = sender_over(CertainDirectory)
    assert_found("did not bring|asked|sent", make_api=api_of(broken))


def test_counting_a_reference_ahead_twice_is_found():
    class CountsTwice(SenderCache):
        def settle(self, rendered):
            for part in rendered.items:
                if part.outcome == "not_needed":
                    self.directory.count(part.outcome)

    assert_found("miscounted", make_api=api_of(CountsTwice))


def test_never_counting_what_was_asked_for_is_found():
    class NeverCounts(SenderCache):
        def settle(self, rendered):
            pass

        def _settle_asked(self, rendered, keys):
            pass

    assert_found("miscounted", make_api=api_of(NeverCounts))


def test_telling_a_resend_in_the_receipt_is_found():
    """A part was counted as a hit; its receipt calls it a miss because it was made again."""

    class CallsItMiss(Api):
        def made_again(self, part):
            self.processed += part.uncounted
            part.outcome = "miss"

    assert_found("receipts say other", make_api=CallsItMiss)


def test_keeping_the_pins_of_a_cancelled_prompt_is_found():
    class KeepsPins(Api):
        def cancel(self, request):
            self.end(request, "cancelled")

    assert_found("pins leaked", make_api=KeepsPins)


def test_forgetting_to_release_is_found():
    class NeverReleases(ReceiverCache):
        def __init__(self, world, epoch):
            super().__init__(epoch)

        def release(self, request_id):
            pass

    assert_found("still held", make_receiver_cache=NeverReleases)


def test_ignoring_what_could_not_be_read_is_found():
    class IgnoresUnreadable(Engine):
        def _misread(self, api, request_id):
            pass

    assert_found("never made good|never reach an end|'sent'", make_engine=IgnoresUnreadable)


# --- claims: the machine finds the first three; each of the others is one short story -----------

WAITS = r"lost|leaked|never reach|rendering"


def broken_receiver(**methods):
    """Receivers of which these methods are replaced."""

    def make(world, epoch):
        return type("Broken", (ReceiverCache,), methods)(epoch)

    return make


def test_not_passing_a_claim_on_is_found():
    def end_claim(self, sender, number):
        key = self._senders[sender].claims.pop(number, None)
        if key is not None:
            self._claims[key].remove((sender, number))
            if not self._claims[key]:
                del self._claims[key]

    assert_found(WAITS, make_receiver_cache=broken_receiver(_end_claim=end_claim))


def test_not_telling_those_that_wait_for_an_item_is_found():
    def answer_claims(self, keyed):
        for name, number in self._claims.pop(keyed.key, ()):
            del self._senders[name].claims[number]

    assert_found(WAITS, make_receiver_cache=broken_receiver(_answer_claims=answer_claims))


def test_listing_an_item_without_ending_its_claims_is_found():
    def answer_claims(self, keyed):
        pass

    assert_found(WAITS, make_receiver_cache=broken_receiver(_answer_claims=answer_claims))


def deliver(world, api):
    """All that this API process has sent, and all that it is told then."""
    while api.outbox:
        world.engine.receive(api)
    while api.inbox:
        api.receive()


def both_claim(**world_parts):
    """The first makes an item, the second waits for it."""
    world = World(2000, **world_parts)
    for api in world.apis.values():
        api.start([1], "serve", ahead=False, by_reference=False)
        deliver(world, api)
    return world, *world.apis.values()


def test_granting_a_claim_to_everybody_is_found():
    def claim(self, sender, message):
        taken = ReceiverCache.claim(self, sender, message)
        self._senders[sender].granted.append(message.number)
        return taken

    world, *_ = both_claim(make_receiver_cache=broken_receiver(claim=claim))
    with pytest.raises(AssertionError, match="made twice at a time"):
        world.check()


@pytest.mark.parametrize("broken", [False, True])
def test_the_claim_of_a_sender_that_is_gone_passes_on(broken):
    def end_claims(self, sender):
        pass

    methods = {"_end_claims": end_claims} if broken else {}
    world, first, second = both_claim(make_receiver_cache=broken_receiver(**methods))
    world.engine.forget(first.name)
    deliver(world, second)
    assert second.to_make() == ([] if broken else [first.to_make()[0]])


def test_the_claim_of_a_silent_sender_passes_on_and_both_may_end_it():
    world, first, second = both_claim()
    world.engine.pass_over(first.name)
    world.engine.pass_over(second.name)  # nobody waits for it: it keeps the claim
    deliver(world, second)
    assert second.to_make() == first.to_make()
    first.repeat_claims()  # it is alive after all, and waits in the queue now
    deliver(world, first)
    world.settle()
    assert (first.processed, second.processed) == (1, 1)


@pytest.mark.parametrize("broken", [False, True])
def test_who_gives_an_item_up_says_so(broken):
    class LeavesSilently(Api):
        def _give_up(self, flight):
            self.sender.forget_claim(flight.number)

    world, first, second = both_claim(make_api=LeavesSilently if broken else Api)
    first.fail(first.to_make()[0])
    if not broken:
        world.settle()
        assert second.processed == 1
        return
    with pytest.raises(AssertionError, match=WAITS):
        world.settle()


@pytest.mark.parametrize("broken", [False, True])
def test_a_claim_whose_end_could_not_be_read_ends_all_the_same(broken):
    """Whoever starts over says which of its claims are open."""

    class SaysAll(SenderCache):
        def _start_over(self, cleared):
            return msgspec.structs.replace(
                super()._start_over(cleared), open_claims=tuple(range(1, self._num_claims + 1))
            )

    world, first, second = both_claim(make_api=api_of(SaysAll) if broken else Api)
    first.fail(first.to_make()[0])
    first.spoil(0)
    if not broken:
        world.settle()
        assert second.processed == 1
        return
    with pytest.raises(AssertionError, match=WAITS):
        world.settle()


def test_an_item_that_two_want_is_made_once():
    world = World(40000)
    for api in world.apis.values():
        api.start([1, 2], "serve", ahead=False, by_reference=False)
    world.settle()
    assert sum(api.processed for api in world.apis.values()) == 2
    assert {r.state for api in world.apis.values() for r in api.requests.values()} == {"done"}


def test_two_that_want_the_same_items_in_other_orders_do_not_wait_for_each_other():
    world = World(40000)
    first, second = world.apis.values()
    first.start([1, 2], "serve", ahead=False, by_reference=False)
    second.start([2, 1], "serve", ahead=False, by_reference=False)
    for api in (first, second, first, second):  # each is granted the one it asked for first
        while api.outbox:
            world.engine.receive(api)
    world.settle()
    assert first.processed + second.processed == 2


def test_a_settled_world_has_its_items_on_both_sides():
    """The machine is not vacuous: plain requests list items, and repeat them as hits."""
    world = World(40000)
    first, second = world.apis.values()
    for api in (first, first, second):
        api.start([1, 2, 1], "serve", ahead=True, by_reference=False)
        world.settle()
    assert (first.processed, second.processed) == (2, 0), "the second adopts what the first added"
    assert first.sender.directory.sizes().keys() == second.sender.directory.sizes().keys()
    assert (first.sender.directory.queries, first.sender.directory.hits) == (6, 4)
    assert {r.state for api in (first, second) for r in api.requests.values()} == {"done"}
    assert len(world.engine.receiver_cache.store) == 2
