"""Sender and receiver cache, rule by rule; every interleaving: `test_sender_receiver_machine`."""

import pytest

from lookonce.cache.identity import UuidBindings
from lookonce.engine.client.sender_cache import SenderCache
from lookonce.engine.process import receiver_cache as receiver_module
from lookonce.engine.process.receiver_cache import Held, ReceiverCache
from lookonce.errors import BadRequestError, MediaNotCachedError, NotReadyError
from lookonce.ipc.messages import ClearCache, Hint, Hints, KeyedItem, Welcome
from lookonce.types.media import Array, feature_at
from lookonce.types.request import GenerateRequest, RenderedItem, RenderedPrompt
from lookonce.types.sampling import SamplingParams
from tests.support.cache_items import expansion, item, key
from tests.support.engine.sender_receiver_world import MODEL


async def never_called():
    raise AssertionError("the test supplies what is recovered")


def welcomed(capacity=3000, epoch=1, num_senders=1, name="a", **extra) -> SenderCache:
    sender = SenderCache(name, capacity_bytes=capacity, **extra)
    sender.welcome(Welcome(epoch, MODEL, num_senders, True))
    return sender


def part(number, nbytes=1000, *, pinned=False, ahead=False, recover=never_called) -> RenderedItem:
    """A part as the renderer leaves it: processed, found by a lookup, or going ahead."""
    held = None if pinned or ahead else item(nbytes)
    return RenderedItem(
        key(number), key(number), "image", expansion(), held, recover, pinned=pinned
    )


def looked_up(sender, number, **extra) -> RenderedItem:
    assert sender.directory.lookup(key(number)) is not None
    return part(number, pinned=True, **extra)


def request(*numbers, request_id="r") -> GenerateRequest:
    features = tuple(
        feature_at(key(number), "image", expansion(), 10 * at) for at, number in enumerate(numbers)
    )
    prompt = Array("int32", (1,), bytes(4))
    return GenerateRequest(request_id, bytes(32), prompt, features, SamplingParams(), 0.0)


def submit(sender, *parts, request_id="r"):
    numbers = [int.from_bytes(p.key, "little") for p in parts]
    prompt = RenderedPrompt([1], items=list(parts))
    return sender.submit(request(*numbers, request_id=request_id), prompt)


def added(message):
    return [keyed.key for keyed in message.ops.adds]


def loose(message):
    return [keyed.key for keyed in message.loose]


def pair(capacity=3000, num_senders=2):
    """Two senders of `capacity` each, and the receiver cache that they said hello to."""
    receiver_cache = ReceiverCache(1)
    senders = [welcomed(capacity * num_senders, 1, num_senders, name) for name in ("a", "b")]
    for sender in senders:
        assert receiver_cache.hello(sender.sender_id)
    return (*senders, receiver_cache)


def assert_equal(receiver_cache, *senders):
    receiver_cache.check_integrity()
    assert receiver_cache.store.mismatches == 0
    for sender in senders:
        assert dict(receiver_cache.store.share(sender.sender_id)) == sender.directory.sizes()


# --- submit -----------------------------------------------------------------------------------


def test_new_items_are_added_and_held_ones_referred_to():
    sender = welcomed()
    first = submit(sender, part(1), part(2))
    assert (added(first), first.ops.drops, first.loose) == ([key(1), key(2)], (), ())
    second = submit(sender, looked_up(sender, 1), part(3), request_id="s")
    assert (added(second), second.ops.drops) == ([key(3)], ())
    assert second.seq == first.seq + 1


def test_room_is_made_least_recent_first():
    sender = welcomed()
    submit(sender, part(1), part(2), part(3))
    sender.directory.unpin(looked_up(sender, 1).key)
    message = submit(sender, part(4, 2000))
    assert message.ops.drops == (key(2), key(3))


def test_an_item_another_request_added_meanwhile_is_only_referred_to():
    sender = welcomed()
    submit(sender, part(1))
    message = submit(sender, part(1), request_id="s")
    assert (added(message), loose(message)) == ([], [])


def test_copies_in_one_request_are_one_add():
    sender, _, receiver_cache = pair()
    message = submit(sender, part(1), part(1, ahead=True), part(1, ahead=True))
    assert added(message) == [key(1)]
    held = receiver_cache.submit("a", message)
    assert (list(held.items), held.missing) == ([key(1)], ())


def test_what_does_not_fit_beside_pins_travels_loose():
    sender = welcomed()
    submit(sender, part(1), part(2))
    waiting = RenderedPrompt([1], items=[looked_up(sender, 1), looked_up(sender, 2)])
    message = submit(sender, part(3, 1001), request_id="s")
    assert (added(message), loose(message), message.ops.drops) == ([], [key(3)], ())
    sender.cancel(waiting)
    assert added(submit(sender, part(3, 1001), request_id="t")) == [key(3)]


def test_an_item_larger_than_the_cache_is_served_and_evicts_nothing():
    sender, _, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    message = submit(sender, part(2, 3001), request_id="s")
    assert (loose(message), message.ops.drops) == ([key(2)], ())
    assert receiver_cache.submit("a", message).items.keys() == {key(2)}
    receiver_cache.release("s")
    assert key(2) not in receiver_cache.store
    assert_equal(receiver_cache, sender)


def test_a_request_larger_than_the_cache_never_evicts_its_own_items():
    sender, _, receiver_cache = pair()
    message = submit(sender, *(part(number) for number in range(8)))
    assert (len(message.ops.adds), len(message.loose), message.ops.drops) == (3, 5, ())
    held = receiver_cache.submit("a", message)
    assert (len(held.items), held.missing) == (8, ())
    receiver_cache.release("r")
    assert_equal(receiver_cache, sender)


def test_a_reference_may_go_ahead_of_its_item():
    sender, _, receiver_cache = pair()
    message = submit(sender, part(1), part(2, ahead=True))
    held = receiver_cache.submit("a", message)
    assert (list(held.items), held.missing) == ([key(1)], (key(2),))
    assert key(2) not in sender.directory


def test_pins_end_with_sending_or_cancelling_whichever_comes_first():
    sender = welcomed()
    submit(sender, part(1))
    prompt = RenderedPrompt([1], items=[looked_up(sender, 1), looked_up(sender, 1)])
    assert sender.directory.num_pins == 2
    sender.submit(request(1, 1), prompt)
    sender.cancel(prompt)
    assert sender.directory.num_pins == 0


def test_nothing_is_sent_before_the_engine_is_known():
    sender = SenderCache("a", capacity_bytes=3000)
    sender.directory.hint(key(1), 1000, expansion())
    prompt = RenderedPrompt([1], items=[looked_up(sender, 1), part(2)])
    with pytest.raises(NotReadyError):
        sender.submit(request(1, 2), prompt)
    assert (sender.directory.num_pins, len(sender.directory)) == (0, 0)


def test_it_says_whether_every_item_could_be_made_again():
    sender = welcomed()
    assert submit(sender, part(1, recover=None), part(2, ahead=True)).recoverable
    assert not submit(sender, looked_up(sender, 1, recover=None), request_id="s").recoverable


def test_switched_off_everything_travels_loose():
    sender = welcomed(capacity=0)
    message = submit(sender, part(1), part(2))
    assert (added(message), loose(message)) == ([], [key(1), key(2)])
    assert (len(sender.directory), sender.directory.known_expansion(key(1))) == (0, expansion())


# --- resends ----------------------------------------------------------------------------------


def test_a_supply_lists_what_was_recovered():
    sender, _, receiver_cache = pair()
    prompt = RenderedPrompt([1], items=[part(1, ahead=True)])
    held = receiver_cache.submit("a", sender.submit(request(1), prompt))
    assert [p.key for p in sender.to_recover(prompt, held.missing)] == [key(1)]
    message = sender.supply("r", prompt, held.missing, {key(1): item(1000)})
    assert receiver_cache.supply("a", message).items.keys() == {key(1)}
    assert_equal(receiver_cache, sender)


@pytest.mark.parametrize(("outcome", "counts"), [("hit", (1, 0)), ("not_needed", (0, 1))])
def test_an_ask_is_a_resend_unless_the_reference_went_ahead_knowingly(outcome, counts):
    sender = welcomed()
    prompt = RenderedPrompt([1], items=[part(1, ahead=True)])
    prompt.items[0].outcome = outcome
    sender.submit(request(1), prompt)
    sender.asked(prompt, [key(1)])
    assert (sender.resends, sender.asks) == counts


def ahead_of_items(*numbers):
    items = [part(number, ahead=True) for number in numbers]
    for item_part in items:
        item_part.outcome, item_part.uncounted = "not_needed", True
    return RenderedPrompt([1], items=items)


def test_a_reference_ahead_counts_as_a_hit_once_it_is_accepted():
    sender = welcomed()
    prompt = ahead_of_items(1, 2)
    sender.settle(prompt)
    sender.settle(prompt)
    assert (sender.directory.queries, sender.directory.hits) == (2, 2)


def test_a_reference_ahead_that_is_asked_for_counts_as_what_it_became():
    sender, _, receiver_cache = pair()
    prompt = ahead_of_items(1, 1, 2)
    held = receiver_cache.submit("a", sender.submit(request(1, 1, 2), prompt))
    made, _ = sender.to_recover(prompt, held.missing)
    made.outcome = "miss"
    sender.supply("r", prompt, held.missing, {key(1): item(600), key(2): item(600)})
    sender.settle(prompt)
    counts = sender.directory.queries, sender.directory.hits
    assert counts == (3, 2), "the copy, and what was in the air already"
    assert [p.outcome for p in prompt.items] == ["miss", "hit", "hit"]


def test_what_another_request_has_sent_meanwhile_is_not_made_again():
    sender, _, receiver_cache = pair()
    prompt = RenderedPrompt([1], items=[part(1, ahead=True)])
    held = receiver_cache.submit("a", sender.submit(request(1), prompt))
    receiver_cache.submit("a", submit(sender, part(1), request_id="s"))
    assert sender.to_recover(prompt, held.missing) == ()
    message = sender.supply("r", prompt, held.missing, {})
    assert receiver_cache.supply("a", message).items.keys() == {key(1)}


def test_a_supply_that_does_not_fit_travels_loose():
    sender, _, receiver_cache = pair()
    prompt = RenderedPrompt([1], items=[part(1, ahead=True)])
    held = receiver_cache.submit("a", sender.submit(request(1), prompt))
    message = sender.supply("r", prompt, held.missing, {key(1): item(3001)})
    assert (added(message), loose(message)) == ([], [key(1)])
    assert receiver_cache.supply("a", message).items.keys() == {key(1)}


def test_what_was_rendered_need_not_be_recovered():
    sender = welcomed()
    prompt = RenderedPrompt([1], items=[part(1)])
    sender.submit(request(1), prompt)
    sender.welcome(Welcome(2, MODEL, 1, True))
    assert sender.to_recover(prompt, [key(1)]) == ()
    assert added(sender.supply("r", prompt, [key(1)], {})) == [key(1)]


def test_an_item_that_came_meanwhile_is_not_sent_twice():
    sender, _, receiver_cache = pair()
    prompt = RenderedPrompt([1], items=[part(1, ahead=True)])
    held = receiver_cache.submit("a", sender.submit(request(1), prompt))
    receiver_cache.submit("a", submit(sender, part(1), request_id="s"))
    message = sender.supply("r", prompt, held.missing, {key(1): item(1000)})
    assert (added(message), loose(message)) == ([], [])
    assert receiver_cache.supply("a", message).items.keys() == {key(1)}


def test_a_reference_without_bytes_behind_it_is_422():
    sender = welcomed()
    prompt = RenderedPrompt([1], items=[part(1, ahead=True, recover=None)])
    with pytest.raises(MediaNotCachedError):
        sender.to_recover(prompt, [key(1)])
    with pytest.raises(MediaNotCachedError):
        sender.supply("r", prompt, [key(1)], {})
    assert (len(sender.directory), sender.directory.num_pins, sender.resends) == (0, 0, 0)


def test_of_two_copies_the_one_with_bytes_is_recovered():
    sender = welcomed()
    prompt = RenderedPrompt([1], items=[part(1, ahead=True, recover=None), part(1, ahead=True)])
    (found,) = sender.to_recover(prompt, [key(1)])
    assert found.recover is never_called


def test_a_supply_for_a_request_that_ended_still_keeps_both_sides_equal():
    sender, _, receiver_cache = pair()
    prompt = RenderedPrompt([1], items=[part(1, ahead=True)])
    held = receiver_cache.submit("a", sender.submit(request(1), prompt))
    message = sender.supply("r", prompt, held.missing, {key(1): item(1000)})
    receiver_cache.release("r")
    assert receiver_cache.supply("a", message) == Held({})
    assert receiver_cache.store.requests == ()
    assert_equal(receiver_cache, sender)


# --- the engine's side ------------------------------------------------------------------------


def test_operations_apply_even_if_the_request_cannot_be_taken():
    sender, _, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    with pytest.raises(BadRequestError, match="request_id"):
        receiver_cache.submit("a", submit(sender, part(2)))
    assert_equal(receiver_cache, sender)
    assert receiver_cache.store.requests == ("r",)


def test_a_request_keeps_its_items_until_released_whatever_is_dropped():
    sender, _, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    receiver_cache.submit("a", submit(sender, part(2, 3000), request_id="s"))
    assert key(1) in receiver_cache.store
    assert_equal(receiver_cache, sender)
    receiver_cache.release("r")
    receiver_cache.release("r")
    receiver_cache.release("never seen")
    assert key(1) not in receiver_cache.store
    assert_equal(receiver_cache, sender)


def test_items_held_for_one_request_serve_another_that_sent_a_reference():
    sender, other, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1, 3001)))
    held = receiver_cache.submit("b", submit(other, part(1, ahead=True), request_id="s"))
    assert held.missing == ()


def test_messages_of_another_epoch_are_discarded_whole():
    sender = welcomed(epoch=1)
    late = submit(sender, part(1))
    receiver_cache = ReceiverCache(2)
    receiver_cache.hello("a", sender.epoch)
    assert receiver_cache.submit("a", late) is None
    assert receiver_cache.update("a", sender.clear(ClearCache(1))) is False
    assert (len(receiver_cache.store), receiver_cache.store.requests) == (0, ())


def test_an_epoch_is_above_0():
    with pytest.raises(ValueError, match="epoch"):
        ReceiverCache(0)


# --- epochs, resets, senders that come and go ----------------------------------------------------


def test_a_new_epoch_empties_the_directory_and_a_repeated_welcome_does_not():
    sender = welcomed(capacity=6000, epoch=1, num_senders=2)
    assert sender.directory.capacity_bytes == 3000
    submit(sender, part(1))
    sender.welcome(Welcome(1, MODEL, 2, True))
    assert len(sender.directory) == 1
    sender.welcome(Welcome(2, MODEL, 3, True))
    assert (len(sender.directory), sender.directory.capacity_bytes) == (0, 2000)
    assert sender.directory.known_expansion(key(1)) == expansion()


def test_a_pin_taken_before_a_restart_is_given_back_after_it():
    sender = welcomed()
    submit(sender, part(1))
    prompt = RenderedPrompt([1], items=[looked_up(sender, 1)])
    sender.welcome(Welcome(2, MODEL, 1, True))
    message = sender.submit(request(1), prompt)
    assert (added(message), message.recoverable) == ([], True)
    assert sender.directory.num_pins == 0


def test_a_reset_travels_through_the_senders_own_queue():
    sender, other, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    under_way = submit(sender, part(2), request_id="s")
    cleared = sender.clear(ClearCache(7))
    after = submit(sender, part(3), request_id="t")
    for message in (under_way, after):
        if message is after:
            assert receiver_cache.update("a", cleared)
        receiver_cache.submit("a", message)
    assert cleared.cleared == 7
    assert sender.directory.sizes() == {key(3): 1000}
    assert_equal(receiver_cache, sender, other)


def test_a_sender_whose_message_was_lost_starts_over():
    sender, _, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    submit(sender, part(2, 3000), request_id="lost")
    assert receiver_cache.update("a", sender.resync())
    assert len(sender.directory) == 0
    assert_equal(receiver_cache, sender)


def test_goodbye_names_the_requests_to_abort_and_closes_the_share():
    sender, other, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    receiver_cache.submit("b", submit(other, part(2), request_id="s"))
    assert receiver_cache.goodbye("a") == ("r",)
    assert receiver_cache.goodbye("a") == ("r",)
    receiver_cache.release("r")
    assert not receiver_cache.knows("a")
    assert [number for number in (1, 2) if key(number) in receiver_cache.store] == [2]
    receiver_cache.check_integrity()


def test_a_sender_taken_for_dead_comes_back_by_clearing_itself():
    sender, other, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    receiver_cache.release("r")
    receiver_cache.goodbye("a")
    assert receiver_cache.submit("a", submit(sender, part(2), request_id="s")) is None
    assert receiver_cache.hello("a", sender.epoch) is False
    assert receiver_cache.update("a", sender.clear(ClearCache(1)))
    receiver_cache.submit("a", submit(sender, part(3), request_id="t"))
    assert_equal(receiver_cache, sender, other)


def test_a_repeated_hello_of_this_epoch_keeps_the_share():
    sender, _, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    hello = sender.hello()
    assert receiver_cache.hello(hello.sender, hello.epoch)
    assert_equal(receiver_cache, sender)


# --- several senders --------------------------------------------------------------------------


def pass_hints(receiver_cache, sender):
    sender.hint(receiver_cache.take_hints(sender.sender_id))


def test_an_item_another_sender_added_is_adopted_without_sending_it():
    sender, other, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    pass_hints(receiver_cache, other)
    message = submit(other, looked_up(other, 1), request_id="s")
    assert (added(message), message.ops.adopts) == ([], ((key(1), 1000),))
    assert receiver_cache.submit("b", message).missing == ()
    assert_equal(receiver_cache, sender, other)


def test_even_an_item_already_processed_is_adopted_to_save_its_bytes():
    sender, other, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    pass_hints(receiver_cache, other)
    message = submit(other, part(1), request_id="s")
    assert (added(message), loose(message)) == ([], [])


def test_a_stale_hint_is_a_resend():
    sender, other, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    pass_hints(receiver_cache, other)
    receiver_cache.release("r")
    receiver_cache.update("a", sender.clear(ClearCache(1)))
    prompt = RenderedPrompt([1], items=[looked_up(other, 1)])
    held = receiver_cache.submit("b", other.submit(request(1, request_id="s"), prompt))
    assert held.missing == (key(1),)
    assert_equal(receiver_cache, sender, other)
    message = other.supply("s", prompt, held.missing, {key(1): item(1000)})
    assert added(message) == [key(1)]
    assert receiver_cache.supply("b", message).items.keys() == {key(1)}
    assert_equal(receiver_cache, sender, other)
    again = submit(other, looked_up(other, 1), request_id="t")
    assert receiver_cache.submit("b", again).missing == ()


def test_a_hint_is_withdrawn_when_nobody_lists_its_item_any_more():
    """Otherwise small caches of several senders would ask again for most of what they share."""
    sender, other, receiver_cache = pair(capacity=1000)  # one item each
    receiver_cache.submit("a", submit(sender, part(1)))
    pass_hints(receiver_cache, other)
    assert other.directory.hinted(key(1)) is not None
    receiver_cache.release("r")
    receiver_cache.submit("a", submit(sender, part(2), request_id="s"))  # evicts the first
    told = receiver_cache.take_hints("b")
    assert told.gone == (key(1),)
    other.hint(told)
    assert other.directory.hinted(key(1)) is None
    assert other.directory.hinted(key(2)) is not None


def test_an_item_that_another_sender_still_lists_is_not_withdrawn():
    sender, other, receiver_cache = pair(capacity=1000)
    receiver_cache.submit("a", submit(sender, part(1)))
    pass_hints(receiver_cache, other)
    receiver_cache.submit("b", submit(other, looked_up(other, 1), request_id="t"))
    receiver_cache.release("r")
    receiver_cache.submit("a", submit(sender, part(2), request_id="s"))
    assert receiver_cache.take_hints("b").gone == ()


def test_a_hint_without_room_is_only_referred_to():
    sender, other, receiver_cache = pair()
    receiver_cache.submit("b", submit(other, part(2, 2500), request_id="s"))
    waiting = RenderedPrompt([1], items=[looked_up(other, 2)])
    receiver_cache.submit("a", submit(sender, part(1)))
    pass_hints(receiver_cache, other)
    message = submit(other, looked_up(other, 1), request_id="t")
    assert message.ops.adopts == ()
    assert receiver_cache.submit("b", message).missing == ()
    other.cancel(waiting)


def test_hints_name_only_what_is_new_to_the_store_and_still_there():
    sender, other, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    receiver_cache.release("r")
    receiver_cache.update("a", sender.clear(ClearCache(1)))
    assert receiver_cache.take_hints("b") is None
    receiver_cache.submit("b", submit(other, part(2), request_id="s"))
    receiver_cache.submit("a", submit(sender, part(2), request_id="t"))
    assert receiver_cache.take_hints("b") is None
    assert receiver_cache.take_hints("a") == Hints((Hint(key(2), 1000, expansion()),))


def test_pending_hints_are_bounded(monkeypatch):
    monkeypatch.setattr(receiver_module, "MAX_PENDING_HINTS", 2)
    sender, _, receiver_cache = pair(capacity=9000)
    receiver_cache.submit("a", submit(sender, part(1), part(2), part(3)))
    assert [hint.key for hint in receiver_cache.take_hints("b").items] == [key(2), key(3)]


def test_uuid_bindings_reach_the_other_senders_and_the_first_counts():
    scope, cat, dog = b"s" * 32, b"c" * 32, b"d" * 32
    sender, other, receiver_cache = pair()
    sender.uuids.bind(scope, "pet", cat, tenant="t")
    receiver_cache.submit("a", submit(sender, part(1)))
    other.uuids.bind(scope, "pet", dog, tenant="t")
    receiver_cache.submit("b", submit(other, part(2), request_id="s"))
    pass_hints(receiver_cache, other)
    assert other.uuids.resolve(scope, "pet") == cat
    assert submit(other, part(3), request_id="t").bindings == ()
    pass_hints(receiver_cache, sender)
    assert sender.uuids.resolve(scope, "pet") == cat


def test_a_new_sender_is_told_of_items_that_others_list_and_of_all_bindings():
    scope, cat = b"s" * 32, b"c" * 32
    sender, _, receiver_cache = pair()
    sender.uuids.bind(scope, "pet", cat, tenant="t")
    receiver_cache.submit("a", submit(sender, part(1), part(2, 3500)))
    receiver_cache.goodbye("b")
    again = welcomed(num_senders=2, capacity=6000, name="c")
    receiver_cache.hello("c")
    pass_hints(receiver_cache, again)
    assert again.directory.peek(key(1)) == expansion()
    assert again.directory.peek(key(2)) is None, "it is held for one request alone"
    assert again.uuids.resolve(scope, "pet") == cat
    assert again.uuids.take_fresh() == ()


def test_a_sender_alone_has_nobody_to_tell_of_bindings():
    uuids = UuidBindings()
    sender = welcomed(uuids=uuids)
    uuids.bind(b"s" * 32, "pet", b"c" * 32, tenant="t")
    assert submit(sender, part(1)).bindings == ()
    assert uuids.take_fresh() == ()


# --- injection --------------------------------------------------------------------------------


def test_injected_items_are_added_unless_held_or_too_large():
    sender, _, receiver_cache = pair()
    receiver_cache.submit("a", submit(sender, part(1)))
    message = sender.update(
        [KeyedItem(key(n), item(size)) for n, size in enumerate((3001, 900, 900))]
    )
    assert added(message) == [key(2)]
    assert key(0) not in sender.directory
    assert receiver_cache.update("a", message)
    assert_equal(receiver_cache, sender)


def test_injection_with_the_cache_off_stores_nothing():
    assert welcomed(capacity=0).update([KeyedItem(key(1), item())]).ops.adds == ()
