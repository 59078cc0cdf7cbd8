"""Prices are found again from what requests took, whose kinds are asked in turns."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import prices as bench
from benchmarks.load_generator import ItemReceipt, RequestOutcome
from benchmarks.prices import (
    ANSWERED,
    SHORT_PROMPT,
    SPREAD_QUANTILES,
    Asked,
    Kind,
    Kinds,
    alone_at_the_server,
    ascending,
    ask_in_turns,
    ask_kinds,
    cores_of,
    idle_prices,
    num_embedded,
    request_prices,
    spread_quantiles,
    words,
)
from benchmarks.running_server import RunningServer
from lookonce.simulate.prices import Prices
from tests.support.chat_server import DONE, STREAM, Server, chunked

TRUE = Prices(
    step=5e-4,
    prompt_row=1e-3,
    prompt_token=1e-4,
    prompt_pair=5e-8,
    embed_item=7e-4,
    short_prompt=SHORT_PROMPT,
    long_prompt_row=4e-3,
    long_prompt_token=8e-5,
    encode_item=2e-2,
    request=1.5e-3,
    end=5e-4,
    request_token=3e-6,
    request_item=8e-4,
    request_byte=1e-8,
    first_token=2e-3,
    stream_token=1e-4,
    process_item=3e-3,
    process_pixel=1e-8,
    encode_threads=1.0,
)


def asked(
    prompt: float, cached: float = 0, picture: float = 0, pixels: float = 0, embedded: int = 0
) -> Asked:
    """What a kind of requests would take at these prices; `picture`: its bytes."""
    new, items = prompt - cached, int(picture > 0)
    seconds = TRUE.of_request(int(prompt), items, int(picture)) + TRUE.first_token + TRUE.step
    seconds += TRUE.prompt_pair * new * (cached + (new + 1) / 2)
    if new > SHORT_PROMPT:
        seconds += TRUE.long_prompt_row + TRUE.long_prompt_token * new
    else:
        seconds += TRUE.prompt_row + TRUE.prompt_token * new
    seconds += TRUE.embed_item * embedded
    if pixels:
        seconds += TRUE.encode_item + TRUE.of_processing(int(pixels), 0)
    api = TRUE.request + TRUE.end + 2 * TRUE.stream_token
    firsts = (0.9 * seconds, seconds, 1.4 * seconds)
    return Asked(
        seconds, api, seconds, prompt, cached, items, picture, firsts, num_embedded=embedded
    )


def test_prices_of_requests_are_found_again() -> None:
    known = (
        *(asked(prompt) for prompt in (18, 34, 58, 188, 448)),
        *(asked(500, cached) for cached in (480, 448)),
        *(asked(prompt, prompt - 40, 48_000) for prompt in (225, 275, 425)),
        asked(325, 285, 144_000),
        asked(205, 176, 48_000, embedded=1),
    )
    streamed = known[0].api_cpu + (ANSWERED - 2) * TRUE.stream_token
    longer = Asked(1e-2, streamed, 0.0, 18, 0, first_tokens=(9e-3, 1e-2, 1.4e-2))
    new = {
        "512": asked(225, 128, picture=48_000, pixels=512 * 512, embedded=1),
        "1024": asked(225, 128, picture=144_000, pixels=1024 * 1024, embedded=1),
    }
    start = Prices(
        step=TRUE.step,
        prompt_row=TRUE.prompt_row,
        encode_step=0.0,
        encode_item=TRUE.encode_item,
        short_prompt=SHORT_PROMPT,
    )
    found, report = request_prices(Kinds(known, new, longer), start)
    for name, value in msgspec.structs.asdict(TRUE).items():
        if isinstance(value, float) and not name.endswith("threads"):
            got = getattr(found, name)
            assert got == pytest.approx(value, rel=1e-3, abs=1e-12), name
    assert len(report.rows) == len(known)
    low, middle, high = np.quantile(found.spread, (0.1, 0.5, 0.9))
    assert (low, middle, high) == pytest.approx((0.9, 1.0, 1.4))


def test_requests_that_waited_for_another_are_no_measure() -> None:
    times = [(-3.0, -2.5, -2.0), (0.0, 0.9, 1.0), (0.5, 1.1, 1.2)]
    times += [(1.3, 1.4, 1.4), (1.41, 1.45, 1.5), (1.45, 1.5, 1.6)]
    outcomes = [
        RequestOutcome(asked=asked, text_times=[first], ended=ended)
        for asked, first, ended in times
    ]
    alone = alone_at_the_server(outcomes[::-1])
    assert [each.outcome.asked for each in alone] == [0.0, 1.3, 1.41]
    assert [each.idle for each in alone] == pytest.approx([2.5, 0.2, 0.01])
    outcomes[3].error = "status 503"
    assert [each.outcome.asked for each in alone_at_the_server(outcomes)] == [0.0, 1.41]


PAUSES = np.geomspace(1e-4, 0.8, 160)


def longer(idle: float) -> float:
    """Seconds that a made up server takes more after so many idle."""
    return min(2e-3, 0.04 * idle)


def after_pauses(level: float, first: int) -> Asked:
    """Requests of one kind after pauses of many lengths, each a little unequal to the others."""
    idle = tuple(PAUSES[first::2])
    firsts = tuple(level + longer(each) + 2e-5 * (n % 3 - 1) for n, each in enumerate(idle))
    return Asked(float(np.median(firsts)), 0.0, 0.0, 9, 0, first_tokens=firsts, idle=idle)


def test_what_a_pause_adds_is_told_apart_from_what_kinds_take() -> None:
    kinds = [after_pauses(level, n % 2) for n, level in enumerate((4e-3, 6e-3, 9e-3, 2e-2))]
    prices = Prices(idle=idle_prices(kinds))
    assert prices.idle[0][1] == 0.0
    for idle in (1e-4, 1e-3, 1e-2, 4e-2, 0.1, 1.0):
        assert prices.of_idle(idle) == pytest.approx(longer(idle), abs=1.5e-4)
    at_once = Kinds(tuple(kinds[1:]), {"512": kinds[0]}, kinds[0]).at_once(prices).all
    assert [each.first_token for each in at_once] == pytest.approx(
        [6e-3, 9e-3, 2e-2, 4e-3, 4e-3], abs=1.5e-4
    )


def test_without_pauses_that_are_known_none_adds_anything() -> None:
    assert idle_prices([asked(18), asked(34)]) == ()


def test_a_longer_pause_never_makes_a_request_shorter() -> None:
    assert ascending([1.0, 3.0, 2.0, 2.5, 9.0]).tolist() == [1.0, 2.5, 2.5, 2.5, 9.0]
    assert ascending([3.0, 2.0, 1.0]).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(("encoder", "count"), [("hit", 1), ("miss", 1), ("skipped", 0)])
def test_items_in_cached_blocks_are_not_embedded(encoder: str, count: int) -> None:
    outcome = RequestOutcome(0.0, items=(ItemReceipt("hit", encoder), ItemReceipt()))
    assert num_embedded(outcome) == count


def test_no_kind_of_requests_has_a_minute_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ASKED": 3, "WARM_UP": 1, "RATES": (None, 400.0)}.items():
        monkeypatch.setattr(bench, name, value)
    kinds = [Kind(lambda n, kind=kind: b"%d:%d" % (kind, n), kind, 10.0) for kind in range(3)]
    with serving() as (server, answers):
        asked = ask_in_turns(server, kinds)
    bodies = [each.partition(b"\r\n\r\n")[2] for each in answers.requests]
    order = [int(each.partition(b":")[0]) for each in bodies]
    at_once, at_a_rate = order[:12], order[12:]
    assert [(kind, len(list(alike))) for kind, alike in groupby(at_once)] == [
        (kind, 4) for kind in range(3)
    ]
    assert Counter(at_a_rate) == {0: 3, 1: 3, 2: 3}
    assert len(list(groupby(at_a_rate))) > 3
    assert len(set(bodies)) == len(bodies)
    for kind, each in zip(kinds, asked, strict=True):
        assert (each.api_cpu, each.engine_cpu) == (1.0, 3.0)
        assert len(each.idle) == len(each.first_tokens)
        assert (each.prompt_tokens, each.cached_tokens) == (9, 4)
        assert (each.num_items, each.item_bytes) == (kind.num_items, 10.0)
        assert 0 < len(each.first_tokens) <= 6
        assert each.first_token == pytest.approx(np.median(each.first_tokens))


def test_texts_of_several_lengths_have_no_block_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ASKED": 2, "WARM_UP": 0, "RATES": (None,)}.items():
        monkeypatch.setattr(bench, name, value)
    found: list[Kind] = []

    def note(server: RunningServer, kinds: Sequence[Kind]) -> list[Asked]:
        found.extend(kinds)
        return [asked(18)] * len(kinds)

    monkeypatch.setattr(bench, "ask_in_turns", note)
    ask_kinds(RunningServer("http://127.0.0.1:1", 0, Path(), 0.0, 0.0))
    said = [
        json.loads(kind.body(n))["messages"][0]["content"]
        for kind in found
        if not kind.num_items
        for n in range(2)
    ]
    texts = [text for text in said if not text.startswith(words(20))]
    assert len(texts) == 2 * (1 + 4 + 1)
    assert len({text[:8] for text in texts}) == len(texts)


@contextmanager
def serving() -> Iterator[tuple[RunningServer, Server]]:
    """A server of a few lines in a thread, each of whose requests takes a second of the API process
    and three of the engine."""
    answers = Server(chunked(STREAM + DONE))

    class Counting(RunningServer):
        def cpu_seconds(self) -> tuple[float, float, float]:
            count = len(answers.requests)
            return float(count), 0.0, 3.0 * count

    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(answers.serve, "127.0.0.1", 0))
    host, port = listening.sockets[0].getsockname()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield Counting(f"http://{host}:{port}", 0, Path(), 0.0, 0.0), answers
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listening.close()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


def test_the_spread_is_of_requests_of_all_kinds_over_the_median_of_their_own() -> None:
    quick = Asked(1e-3, 0.0, 0.0, 9, 0, first_tokens=tuple(np.linspace(0.5e-3, 1.5e-3, 101)))
    slow = dataclasses.replace(
        quick, first_token=1.0, first_tokens=tuple(np.linspace(0.5, 1.5, 101))
    )
    spread = spread_quantiles([quick, slow])
    assert len(spread) == SPREAD_QUANTILES
    assert list(spread) == sorted(spread)
    assert spread[0] == pytest.approx(0.505, abs=0.01)
    assert spread[-1] == pytest.approx(1.495, abs=0.01)
    assert np.mean(spread) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("alone", "together", "cores"),
    [
        ([[1.0], [1.0]], [[1.0, 1.0], [3.0, 5.0]], 2.0),
        ([[1.0], [9.0]], [[1.6, 1.6], [2.0, 2.0]], 1.25),
        ([[1.0], [1.2]], [[2.0, 2.4]], 1.0),
        ([[1.1], [1.0]], [[0.9, 0.9]], 2.0),
    ],
)
def test_cores_are_counted_where_the_machine_did_the_least_else(
    alone: list[list[float]], together: list[list[float]], cores: float
) -> None:
    assert cores_of(alone, together) == pytest.approx(cores)
