"""What reuse saved today: work is counted exactly, seconds by what the same work took here."""

from __future__ import annotations

import pytest

from lookonce.frontend.savings import MAX_TENANTS, Saved, Savings
from lookonce.types.media import feature_at
from lookonce.types.request import PrefillStats, PrefillTimes, RenderedItem, RenderedPrompt
from tests.support.server.doubles import EXPANSION, IMAGE_TOKEN


def prompt(text: str = "", *outcomes: str, ms: float = 0.0) -> RenderedPrompt:
    """A text of as many tokens, and pictures of four each, decoded and processed in `ms` each."""
    tokens = list(text.encode())
    items, features = [], []
    for number, outcome in enumerate(outcomes):
        key = bytes([number]) * 32
        features.append(feature_at(key, "image", EXPANSION, len(tokens)))
        items.append(
            RenderedItem(
                key, key, "image", EXPANSION, None, outcome=outcome, decode_ms=ms / 4,
                process_ms=ms * 3 / 4,
            )
        )  # fmt: skip
        tokens += [IMAGE_TOKEN] * 4
    return RenderedPrompt(tokens, tuple(features), items, b"")


def stats(cached: int, encoder: tuple = (), ms: tuple = (), seconds: float = 0.0) -> PrefillStats:
    times = PrefillTimes(0.0, 1.0, 1.0 + seconds + sum(ms) / 1e3, 1.0, 1.0 + sum(ms) / 1e3)
    return PrefillStats(cached, encoder=encoder, encode_ms=ms, times=times)


def test_what_is_found_counts_as_much_as_what_was_worked_on():
    savings = Savings()
    savings.count("a", prompt("x" * 92, "miss", "miss", ms=10), stats(0, ("miss",) * 2, (4, 8), 2))
    savings.count("a", prompt("x" * 96, "hit"), stats(50, ("skipped",), (0,), 1))
    _, by_tenant = savings.today()
    saved = by_tenant["a"]
    assert (saved.prompt_tokens, saved.cached_tokens) == (200, 50)
    assert (saved.media, saved.media_reused, saved.encodings_reused) == (3, 1, 1)
    assert saved.media_seconds == pytest.approx(0.010)
    assert saved.encoder_seconds == pytest.approx(0.006)
    # both computed a token in 20 ms
    assert saved.prefill_seconds == pytest.approx(50 * 0.020)


def test_what_was_never_done_here_counts_no_seconds():
    savings = Savings()
    savings.count("a", prompt("x" * 20, "hit", "injected"), stats(20, ("hit", "hit"), (0, 0)))
    saved = savings.today()[1]["a"]
    assert (saved.media_reused, saved.encodings_reused, saved.cached_tokens) == (1, 2, 20)
    assert saved.media_seconds == saved.encoder_seconds == saved.prefill_seconds == 0.0


def test_a_short_prompt_tells_no_rate():
    savings = Savings()
    savings.count("a", prompt("short"), stats(0, seconds=5))
    savings.count("a", prompt("x" * 40), stats(40))
    assert savings.today()[1]["a"].prefill_seconds == 0.0


def test_every_day_begins_anew_and_keeps_what_work_costs():
    day = ["2026-01-01"]
    savings = Savings(lambda: day[0])
    savings.count("a", prompt("x" * 100), stats(0, seconds=1))
    day[0] = "2026-01-02"
    assert savings.today() == ("2026-01-02", {})
    savings.count("b", prompt("x" * 100), stats(100))
    assert savings.today()[1].keys() == {"b"}
    assert savings.today()[1]["b"].prefill_seconds == pytest.approx(1.0)


def test_tenants_are_counted_apart_and_at_most_so_many():
    savings = Savings()
    for number in range(MAX_TENANTS + 5):
        savings.count(str(number), prompt("abc"), stats(1))
    savings.count("0", prompt("abc"), stats(1))
    by_tenant = savings.today()[1]
    assert len(by_tenant) == MAX_TENANTS
    assert by_tenant["0"] == Saved(prompt_tokens=6, cached_tokens=2)
