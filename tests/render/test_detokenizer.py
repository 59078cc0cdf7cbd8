"""Text comes token by token, complete characters only, and ends before a stop string."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lookonce.render.prompt.detokenizer import Detokenizer, StopSearch
from tests.support.render.tokenizers import nano_tokenizer, spaced_tokenizer

NANO, SPACED = nano_tokenizer(), spaced_tokenizer()
IM_END = 2
THE, CAT, S = (SPACED.token_id(word) for word in ("▁the", "▁cat", "s"))


def run(tokenizer, token_ids, sizes=(), *, skip_special_tokens=True, keep=(), **options):
    """Deltas for `token_ids` pushed in groups of `sizes` (then one by one), and the rest."""
    skipped = tokenizer.special_ids - set(keep) if skip_special_tokens else ()
    detokenizer = Detokenizer(tokenizer, skipped=skipped, **options)
    deltas, rest = [], list(token_ids)
    for size in sizes:
        deltas.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    deltas += [detokenizer.push([token]) for token in rest]
    return [*deltas, detokenizer.finish()], detokenizer


any_tokens = st.lists(st.integers(0, NANO.vocab_size + 5), max_size=40)
group_sizes = st.lists(st.integers(0, 7), max_size=6)


@given(any_tokens, group_sizes, st.booleans())
def test_deltas_of_any_tokens_join_to_their_decoding(token_ids, sizes, skip):
    deltas, detokenizer = run(NANO, token_ids, sizes, skip_special_tokens=skip)
    assert "".join(deltas) == NANO.decode(token_ids, skip_special_tokens=skip)
    assert detokenizer.num_tokens == len(token_ids)


@given(st.text(max_size=20), group_sizes)
@example("🙂", [])
@example("é\ufffd!", [])
def test_deltas_of_a_spaced_vocabulary_join_to_their_decoding(text, sizes):
    token_ids = SPACED.encode(text, add_special_tokens=False)
    deltas, _ = run(SPACED, token_ids, sizes)
    assert "".join(deltas) == SPACED.decode(token_ids) == text


@given(st.lists(st.integers(0, SPACED.vocab_size - 1), max_size=40))
def test_a_spaced_vocabulary_survives_any_tokens(token_ids):
    deltas, _ = run(SPACED, token_ids)
    valid = SPACED.decode(token_ids)
    assert "\ufffd" in valid or "".join(deltas) == valid


def test_half_a_character_is_held_back():
    token_ids = NANO.encode("a🙂b")
    deltas, _ = run(NANO, token_ids)
    assert deltas == ["a", "", "", "", "🙂", "b", ""]


def test_a_character_that_never_completes_ends_as_a_replacement():
    deltas, _ = run(NANO, NANO.encode("🙂")[:2])
    assert deltas == ["", "", "\ufffd"]


def test_the_first_word_keeps_its_space_after_a_prompt():
    assert "".join(run(SPACED, [THE, CAT])[0]) == "the cat"
    prompt = SPACED.encode("a cat")
    assert "".join(run(SPACED, [THE, CAT], context=prompt)[0]) == " the cat"


def test_special_tokens_are_shown_only_where_asked():
    token_ids = [*NANO.encode("yes"), IM_END]
    assert "".join(run(NANO, token_ids)[0]) == "yes"
    assert "".join(run(NANO, token_ids, skip_special_tokens=False)[0]) == "yes<|im_end|>"
    assert "".join(run(NANO, token_ids, keep=[IM_END])[0]) == "yes<|im_end|>"


def test_silent_tokens_do_not_pile_up():
    deltas, _ = run(SPACED, [0] * 100 + [THE, CAT])
    assert "".join(deltas) == "the cat"


# --- stop strings --------------------------------------------------------------------------------

letters = st.text(alphabet="abc", max_size=12)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


def cut_at_stop(text, stops, *, include):
    """The specification: read character by character, stop at the first complete stop string."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.lists(letters, max_size=6), stop_lists, st.booleans())
@example(["xab", "c"], ["abc", "b"], False)
def test_the_text_ends_at_the_first_complete_stop_string(pieces, stops, include):
    search = StopSearch(stops, include_stop=include)
    said = ""
    for piece in pieces:
        if search.stopped is None:
            said += search.push(piece)
    said += search.finish()
    assert (said, search.stopped) == cut_at_stop("".join(pieces), stops, include=include)


@given(letters, stop_lists.filter(bool))
def test_only_what_may_become_a_stop_string_is_held_back(text, stops):
    search = StopSearch(stops)
    said = search.push(text)
    if search.stopped is None:
        held = text[len(said) :]
        assert text.startswith(said)
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(st.text(alphabet="abc", max_size=12), stop_lists, group_sizes)
def test_a_stop_string_across_tokens_is_found(text, stops, sizes):
    deltas, detokenizer = run(NANO, NANO.encode(text), sizes, stops=stops)
    assert ("".join(deltas), detokenizer.stopped) == cut_at_stop(text, stops, include=False)


def test_tokens_after_the_stop_string_are_not_taken():
    token_ids = [*NANO.encode("a"), *NANO.encode("b"), *NANO.encode("c")]
    deltas, detokenizer = run(NANO, token_ids, [3], stops=["b"])
    assert "".join(deltas) == "a"
    assert detokenizer.num_tokens == 2


def test_the_stop_string_is_shown_where_asked():
    deltas, detokenizer = run(NANO, NANO.encode("one. two"), stops=["."], include_stop=True)
    assert "".join(deltas) == "one."
    assert detokenizer.stopped == "."


def test_stop_strings_are_ignored_until_min_tokens():
    token_ids = NANO.encode("....x")
    deltas, detokenizer = run(NANO, token_ids, stops=["."], min_tokens=2)
    assert "".join(deltas) == ".."
    assert detokenizer.num_tokens == 3


def test_text_held_back_for_a_stop_string_comes_at_the_end():
    deltas, detokenizer = run(NANO, NANO.encode("END"), stops=["END."])
    assert deltas[-1] == "END"
    assert detokenizer.stopped is None


@pytest.mark.parametrize("tokenizer", [NANO, SPACED])
def test_finishing_may_complete_a_stop_string(tokenizer):
    token_ids = tokenizer.encode("🙂", add_special_tokens=False)[:-1]
    _, detokenizer = run(tokenizer, token_ids, stops=["\ufffd"])
    assert detokenizer.stopped == "\ufffd"
