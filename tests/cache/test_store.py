"""The store: an item stays while a sender lists it or a request holds it."""

import pytest

from lookonce.cache.store import Store
from tests.support.cache_items import item, key


def store(*senders: str) -> Store:
    made = Store()
    for sender in senders or ("a", "b"):
        made.open_share(sender)
    return made


def test_an_item_leaves_with_its_last_lister():
    made = store()
    assert made.add("a", key(1), item(1000))
    assert not made.add("b", key(1), item(1000))
    assert (made.share_nbytes("a"), made.share_nbytes("b"), made.nbytes) == (1000, 1000, 1000)
    made.drop("a", key(1))
    assert key(1) in made
    made.drop("b", key(1))
    assert (len(made), made.nbytes) == (0, 0)
    made.check_integrity()


def test_a_request_keeps_what_every_sender_dropped():
    made = store()
    given = item(1000)
    made.add("a", key(1), given)
    made.open_request("r")
    assert made.hold("r", [key(1), key(2)]) == {key(1): given}
    made.drop("a", key(1))
    assert made.get(key(1)) is given
    made.release("r")
    made.release("r")
    assert key(1) not in made
    made.check_integrity()


def test_loose_items_serve_their_request_and_any_other_meanwhile():
    made = store()
    made.open_request("r")
    made.open_request("s")
    made.hold_loose("r", key(1), item(700))
    assert made.hold("s", [key(1)]).keys() == {key(1)}
    made.release("r")
    assert made.nbytes == 700
    made.release("s")
    assert made.nbytes == 0
    made.check_integrity()


def test_the_first_copy_stays():
    made = store()
    first, second = item(1000), item(1000)
    made.open_request("r")
    made.hold_loose("r", key(1), first)
    made.add("a", key(1), second)
    assert made.get(key(1)) is first
    assert made.nbytes == 1000


def test_a_key_may_be_listed_before_its_item_comes_again():
    made = store()
    made.adopt("b", key(1), 1000)
    assert key(1) not in made
    assert dict(made.share("b")) == {key(1): 1000}
    made.open_request("r")
    assert made.hold("r", [key(1)]) == {}
    assert made.add("a", key(1), item(1000))
    assert made.hold("r", [key(1)]).keys() == {key(1)}
    made.check_integrity()


def test_an_item_added_again_by_its_lister_is_accounted_once():
    made = store()
    made.add("a", key(1), item(1000))
    made.add("a", key(1), item(1000))
    assert made.share_nbytes("a") == 1000
    made.check_integrity()


def test_a_closed_share_takes_what_only_it_listed():
    made = store()
    made.add("a", key(1), item(1000))
    made.add("a", key(2), item(1000))
    made.adopt("b", key(2), 1000)
    made.close_share("a")
    made.close_share("a")
    assert (key(1) in made, key(2) in made, made.senders) == (False, True, ("b",))
    made.check_integrity()


def test_dropping_what_is_not_listed_is_counted_and_harmless():
    made = store()
    made.add("b", key(1), item(1000))
    made.drop("a", key(1))
    assert (made.mismatches, key(1) in made) == (1, True)
    made.check_integrity()


def test_a_request_opens_once():
    made = store()
    made.open_request("r")
    with pytest.raises(ValueError, match="open"):
        made.open_request("r")
    assert made.requests == ("r",)
