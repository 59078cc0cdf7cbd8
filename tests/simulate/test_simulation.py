"""The simulation is exact: by hand, by seed, step by step, and nothing is lost."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.config import EncoderConfig, KVConfig, ModelConfig, SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.core.scheduler import Scheduler
from lookonce.engine.process.build import assemble
from lookonce.engine.process.grammar import GrammarCompiler
from lookonce.engine.process_io import EngineSettings
from lookonce.errors import ConfigError
from lookonce.simulate.clock import VirtualClock
from lookonce.simulate.cores import Cores
from lookonce.simulate.engine import EngineSpec
from lookonce.simulate.prices import NANO_PRICES, Prices, read_prices
from lookonce.simulate.simulation import (
    IDLE_COMPARED,
    MOST_COMPARED,
    ROUTERS,
    FleetSpec,
    Sent,
    Simulation,
    identity_of,
)
from lookonce.simulate.trace import (
    GENERATORS,
    Shape,
    TraceMedium,
    TraceRequest,
    media_key,
    mix,
    token_ids,
)
from lookonce.types.kv import parse_tier_spec
from lookonce.types.media import Array
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import StepPlan, StepResult

KV_BYTES = 8192
PRICES = Prices(
    step=1.0,
    decode_row=0.1,
    decode_context=0.0,
    prompt_row=0.0,
    prompt_token=0.01,
    encode_step=0.5,
    encode_item=2.0,
    request=0.25,
    first_token=0.125,
    stream_token=0.0,
    process_item=4.0,
    media_workers=1,
    kv_token_bytes=KV_BYTES,
    encoder_row_bytes=64,
    item_token_bytes=64,
)
ONE = FleetSpec()
SHAPE = Shape(requests=40, rate=1.0, turns=4, pictures=4, think_seconds=20.0, output_tokens=12)


def asked(
    arrival: float, prompt: int, output: int, *, name: int = 1, pictures: int = 0
) -> TraceRequest:
    """`pictures` of 16 tokens stand at the beginning."""
    count = -(-(prompt + output) // 16)
    blocks = mix(np.uint64(name << 32) + np.arange(count, dtype=np.uint64))
    media = tuple(
        TraceMedium(media_key("p", number), "image", 16 * number, 16) for number in range(pictures)
    )
    return TraceRequest(arrival, prompt, output, blocks, 16, media)


def run(requests: list[TraceRequest], spec: FleetSpec = ONE, prices: Prices = PRICES) -> list[Sent]:
    ended: list[Sent] = []
    simulation = Simulation(spec, prices, ended.append)
    simulation.run(requests)
    simulation.check_integrity()
    return sorted(ended, key=lambda served: served.number)


def test_text_takes_what_its_steps_take() -> None:
    (only,) = run([asked(0.0, 100, 4)])
    computed = 0.25 + 1.0 + 100 * 0.01
    assert only.first_token == pytest.approx(computed + 0.125)
    assert only.ended == pytest.approx(computed + 3 * 1.1 + 0.125)


def test_a_request_takes_as_many_times_its_prices_as_its_spread_until_its_first_token() -> None:
    prices = msgspec.structs.replace(PRICES, spread=(3.0,))
    text, picture = run([asked(0.0, 100, 4), asked(50.0, 64, 4, name=2, pictures=1)], prices=prices)
    computed = 3 * (0.25 + 1.0 + 100 * 0.01)
    assert text.first_token == pytest.approx(computed + 3 * 0.125)
    assert text.ended - text.first_token == pytest.approx(3 * 1.1)
    looked = 3 * (0.25 + 4.0 + 1.0 + 0.64 + 2.5 + 0.125)
    assert picture.first_token - 50.0 == pytest.approx(looked)
    assert picture.ended - picture.first_token == pytest.approx(3 * 1.1)


def test_a_request_after_a_pause_takes_longer_by_what_its_length_adds() -> None:
    prices = msgspec.structs.replace(PRICES, idle=((1.0, 0.0), (3.0, 0.5)))
    warm = 0.25 + 1.0 + 100 * 0.01 + 0.125
    first, second, third = run(
        [
            asked(0.0, 100, 1),
            asked(0.1, 100, 1, name=2),
            asked(8.0, 100, 1, name=3),
        ],
        prices=prices,
    )
    assert first.first_token == pytest.approx(warm + 0.5)  # none came before it
    assert second.first_token == pytest.approx(warm + 0.5 + 2.0)  # the first was under way
    pause = 8.0 - second.ended
    assert 1.0 < pause < 5.0
    assert third.first_token - 8.0 == pytest.approx(warm + min(0.5, (pause - 1.0) * 0.25))
    (without,) = run([asked(9.0, 100, 1)])
    assert without.first_token - 9.0 == pytest.approx(warm)


def test_beside_an_answer_a_pause_is_counted_from_the_last_first_token_on() -> None:
    longer = 10 * 1.1  # as many whole steps of the answer that is streamed meanwhile
    prices = msgspec.structs.replace(PRICES, idle=((1.0, 0.0), (2.0, longer)))
    requests = [
        asked(0.0, 100, 60),
        asked(14.0, 100, 1, name=2),  # the first has just had its first token
        asked(30.0, 100, 1, name=3),
        asked(30.1, 100, 1, name=4),  # the third has not had it
    ]
    with_pauses, without = run(requests, prices=prices), run(requests)
    assert 13.0 < with_pauses[0].first_token < 14.0
    assert with_pauses[0].ended > 40.0
    more = [a.first_token - b.first_token for a, b in zip(with_pauses, without, strict=True)]
    assert more == pytest.approx([longer, 0.0, longer, longer])


def test_a_request_that_was_refused_does_not_keep_a_server_from_pauses() -> None:
    prices = msgspec.structs.replace(PRICES, max_model_len=64, idle=((0.0, 0.0), (1.0, 0.5)))
    refused, later = run([asked(0.0, 100, 1), asked(9.0, 30, 1, name=2)], prices=prices)
    assert refused.failed
    assert later.first_token - 9.0 == pytest.approx(0.25 + 0.5 + 1.0 + 0.3 + 0.125)


def test_a_step_of_two_prompts_takes_the_mean_of_their_spreads() -> None:
    prices = msgspec.structs.replace(PRICES, request=0.0, spread=(1.0, 3.0))
    assert [prices.spread_of(number) for number in range(3)] == [3.0, 1.0, 3.0]
    requests = [asked(0.0, 100, 1), asked(1.0, 100, 1, name=2), asked(1.0, 100, 1, name=3)]
    _, second, third = run(requests, prices=prices)
    computed = 3 * (1.0 + 1.0) + 2 * (1.0 + 2 * 1.0)
    assert second.first_token == pytest.approx(computed + 0.125)
    assert third.first_token == pytest.approx(computed + 3 * 0.125)


def test_the_few_with_new_pictures_have_the_whole_spread_and_so_have_the_others() -> None:
    """Whichever requests they are: here those that would have the least of it among all."""
    spread = tuple(np.linspace(1.0, 2.0, 20))
    prices = msgspec.structs.replace(PRICES, spread=spread)
    order = np.argsort([prices.spread_of(number) for number in range(400)])
    new = set(order[:40].tolist())
    requests = [
        asked(50.0 * number, 64, 1, name=1 + number)
        if number not in new
        else picture(50.0 * number, number)
        for number in range(400)
    ]
    found = run(requests, prices=prices)
    for kind, price in ((new, 8.515), (set(range(400)) - new, 2.015)):
        took = sorted(each.first_token - each.arrival for each in found if each.number in kind)
        wanted = price * np.repeat(spread, len(kind) // len(spread))
        assert took == pytest.approx(wanted.tolist(), rel=0.1)


def test_engines_begin_at_different_places_of_the_spread() -> None:
    prices = Prices(spread=tuple(np.linspace(0.5, 1.5, 50)))
    firsts = [prices.spread_of(0, engine) for engine in range(1000)]
    assert np.quantile(firsts, (0.1, 0.5, 0.9)) == pytest.approx((0.6, 1.0, 1.4), abs=0.02)


def picture(arrival: float, number: int) -> TraceRequest:
    """64 tokens whose first 16 are a picture that nobody else has."""
    text = asked(arrival, 64, 1, name=1 + number)
    media = (TraceMedium(media_key("own", number), "image", 0, 16),)
    return msgspec.structs.replace(text, media=media)


def test_one_core_is_shared_by_all_that_a_server_does() -> None:
    """A request that comes while another decodes takes half of the core from it."""
    shared = msgspec.structs.replace(PRICES, cores=1.0)
    (alone,) = run([asked(0.0, 100, 4)], prices=shared)
    assert alone.first_token == pytest.approx(0.25 + 1.0 + 100 * 0.01 + 0.125)
    first, second = run([asked(0.0, 100, 20), asked(3.0, 50, 2, name=2)], prices=shared)
    # 0.25 s of the API process take 0.5 s, in which steps of 1.1 s make 0.25 s of progress.
    began = 0.25 + 2.0
    computed = began + 1.1 + 0.25 + 1.0 + 0.1 + 50 * 0.01
    assert second.first_token == pytest.approx(computed + 0.125)
    assert first.ended == pytest.approx(computed + 1.2 + 16 * 1.1 + 0.125)
    stepped = run(
        [asked(0.0, 100, 20), asked(3.0, 50, 2, name=2)],
        FleetSpec(engine=EngineSpec(every_step=True)),
        shared,
    )
    assert [each.ended for each in stepped] == pytest.approx([first.ended, second.ended])


def test_streaming_slows_the_api_process_and_no_core_beside_it() -> None:
    """With a core for the engine and one for the API process all is as with cores of their own."""
    prices = msgspec.structs.replace(PRICES, stream_token=0.4)
    requests = [asked(0.0, 100, 20), asked(3.0, 50, 2, name=2)]
    alone = run(requests, prices=prices)
    shared = run(requests, prices=msgspec.structs.replace(prices, cores=2.0))
    assert [each.first_token for each in shared] == pytest.approx([e.first_token for e in alone])
    assert [each.ended for each in shared] == pytest.approx([each.ended for each in alone])
    unslowed = run(requests)
    assert alone[1].first_token > unslowed[1].first_token + 0.1


@given(
    sizes=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8),
    count=st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    background=st.sampled_from([0.0, 0.5]),
)
def test_jobs_have_equal_parts_of_the_cores(
    sizes: list[float], count: float, background: float
) -> None:
    clock = VirtualClock()
    cores = Cores(clock, count)
    cores.set_background(background)
    ended: list[tuple[float, float]] = []
    for size in sizes:
        cores.run(size, lambda size: ended.append((size, clock.now)), size)
    clock.run()
    now, before = 0.0, 0.0
    for number, (size, moment) in enumerate(sorted(ended)):
        now += (size - before) * max(1.0, (len(sizes) - number) / (count - background))
        before = size
        assert moment == pytest.approx(now)


@pytest.mark.parametrize(("threads", "ends"), [(1.0, (2.0, 4.0)), (2.0, (3.0, 5.0))])
def test_a_job_of_two_threads_has_two_cores_if_nobody_else_wants_them(
    threads: float, ends: tuple[float, float]
) -> None:
    """On two cores; with a job of one thread beside it each thread has two thirds of one."""
    clock = VirtualClock()
    cores = Cores(clock, 2.0)
    ended: list[float] = []
    cores.run(2.0, lambda: ended.append(clock.now))
    cores.run(4.0, lambda: ended.append(clock.now), threads=threads)
    clock.run()
    assert ended == pytest.approx(ends)


def test_an_encoder_run_that_keeps_all_cores_busy_is_slowed_by_what_runs_beside_it() -> None:
    """The API process works on a second request meanwhile."""
    prices = msgspec.structs.replace(PRICES, cores=2.0, encode_threads=2.0)
    requests = [asked(0.0, 64, 1, pictures=1), asked(4.25, 64, 1, name=2)]
    first, _ = run(requests, prices=prices)
    # From 4.25 on: 2.5 s of two threads, 1.64 s of one, beside 0.25 s of the API process.
    threads = (2 * 2.5 + 1.64) / (2.5 + 1.64)
    busy_for = 0.25 * (threads + 1.0) / 2.0
    step = busy_for + (4.14 - 0.25)
    assert first.first_token == pytest.approx(4.25 + step + 0.125)


def test_a_picture_is_processed_and_encoded_once() -> None:
    first, second = run([asked(0.0, 100, 1, pictures=1), asked(50.0, 120, 1, name=2, pictures=1)])
    assert first.first_token == pytest.approx(0.25 + 4.0 + 1.0 + 1.0 + 2.5 + 0.125)
    assert second.first_token - 50.0 == pytest.approx(0.25 + 1.0 + 1.2 + 0.125)
    assert (first.processed, second.processed) == (1, 0)
    assert (first.encoder_runs, second.encoder_runs) == (1, 0)


def test_two_that_ask_about_one_new_picture_wait_for_one_worker() -> None:
    first, second = run([asked(0.0, 64, 1, pictures=1), asked(0.0, 64, 1, name=2, pictures=1)])
    assert first.processed + second.processed == 1
    assert first.first_token == pytest.approx(0.25 + 4.0 + 1.0 + 0.64 + 2.5 + 0.125)


def test_a_prefix_is_computed_once() -> None:
    first, second = run([asked(0.0, 100, 1), asked(20.0, 100, 1)])
    assert (first.cached_tokens, second.cached_tokens) == (0, 96)
    assert second.first_token - 20.0 == pytest.approx(0.25 + 1.0 + 4 * 0.01 + 0.125)


def test_a_request_that_comes_while_others_decode_waits_for_their_step() -> None:
    first, second = run([asked(0.0, 100, 20), asked(3.0, 50, 2, name=2)])
    began = 0.25 + 2.0  # the first one's prompt
    # Steps of 1.1 s end at 2.25 + 1.1 n; the second one comes to the engine at 3.25.
    computed = began + 1.1 + 1.0 + 0.1 + 50 * 0.01
    assert second.first_token == pytest.approx(computed + 0.125)
    assert first.ended == pytest.approx(computed + 1.2 + 16 * 1.1 + 0.125)


def test_a_tier_gives_back_what_the_device_has_lost() -> None:
    small = EngineSpec(kv_cache_bytes=16 * KV_BYTES * 16)  # 16 blocks of 16 tokens
    tiered = msgspec.structs.replace(small, kv_tiers=(parse_tier_spec("host:100MB"),))
    requests = [asked(0.0, 200, 1), asked(20.0, 200, 1, name=2), asked(40.0, 200, 1)]
    without = run(requests, FleetSpec(engine=small))
    found = run(requests, FleetSpec(engine=tiered))
    # 13 blocks each: the second one takes the 3 that are free, then the last 10 of the first one.
    assert [served.cached_tokens for served in without] == [0, 0, 48]
    assert [served.external_tokens for served in found] == [0, 0, 144]
    assert found[2].cached_tokens == 192
    assert found[2].first_token < without[2].first_token


def test_a_shared_tier_gives_an_output_that_another_engine_has_encoded() -> None:
    engine = EngineSpec(encoder_tiers=(parse_tier_spec("valkey://somewhere"),))
    spec = FleetSpec(engines=2, router="round_robin", engine=engine)
    requests = [asked(0.0, 100, 1, pictures=1), asked(50.0, 100, 1, name=2, pictures=1)]
    alone = run(requests, FleetSpec(engines=2, router="round_robin"))
    assert [served.encoder_runs for served in alone] == [1, 1]
    first, second = run(requests, spec)
    assert (first.encoder_runs, second.encoder_runs) == (1, 0)
    assert second.first_token - 50.0 == pytest.approx(0.25 + 4.0 + 2.0 + 0.125, abs=0.01)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("name", GENERATORS)
def test_every_request_ends_once_and_a_seed_decides_everything(name: str, router: str) -> None:
    spec = FleetSpec(engines=3, router=router, engine=EngineSpec(kv_cache_bytes=1 << 26))
    requests = list(GENERATORS[name](SHAPE))
    runs = [run(requests, spec, Prices()) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert (one.first_token, one.ended) == (other.first_token, other.ended)
    assert [served.number for served in runs[0]] == list(range(len(requests)))
    assert all(served.ended >= served.first_token >= served.arrival for served in runs[0])


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("gigabytes", [0.1, 0.0015])
def test_runs_of_steps_equal_single_steps(name: str, gigabytes: float) -> None:
    """With prices that depend on the context, of steps and of what streaming slows."""
    prices = msgspec.structs.replace(
        read_prices(NANO_PRICES),
        kv_token_bytes=1024,
        spread=(0.7, 1.0, 2.5),
        idle=((0.0, 0.0), (0.1, 2e-3)),
    )
    engine = EngineSpec(kv_cache_bytes=int(gigabytes * (1 << 30)))
    requests = list(GENERATORS[name](replace(SHAPE, rate=20.0, think_seconds=1.0)))
    several = run(requests, FleetSpec(engine=engine), prices)
    each = msgspec.structs.replace(engine, every_step=True)
    single = run(requests, FleetSpec(engine=each), prices)
    for one, other in zip(several, single, strict=True):
        assert one.first_token == pytest.approx(other.first_token, rel=1e-9)
        assert one.ended == pytest.approx(other.ended, rel=1e-9)
        assert (one.cached_tokens, one.failed) == (other.cached_tokens, other.failed)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("gigabytes", "block_size"), [(0.1, 16), (0.0015, 16), (0.1, 24)])
def test_keys_of_a_trace_are_as_good_as_hashes_of_tokens(
    name: str, gigabytes: float, block_size: int
) -> None:
    prices = Prices(block_size=block_size)
    engine = EngineSpec(kv_cache_bytes=int(gigabytes * (1 << 30)))
    hashing = msgspec.structs.replace(engine, with_tokens=True)
    requests = list(GENERATORS[name](SHAPE))
    for engines in (1, 3):
        by_keys = run(requests, FleetSpec(engines=engines, engine=engine), prices)
        by_hashes = run(requests, FleetSpec(engines=engines, engine=hashing), prices)
        for one, other in zip(by_keys, by_hashes, strict=True):
            assert one.engine.name == other.engine.name
            assert (one.first_token, one.ended) == (other.first_token, other.ended)
            assert (one.cached_tokens, one.failed) == (other.cached_tokens, other.failed)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.integers(1, 300), st.integers(1, 40), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_nothing_is_lost_however_requests_come(
    given_requests: list[tuple[float, int, int, int]],
) -> None:
    requests = sorted(
        (asked(a, p, o, name=n) for a, p, o, n in given_requests), key=lambda r: r.arrival
    )
    small = EngineSpec(kv_cache_bytes=24 * KV_BYTES * 16, max_num_seqs=3, max_num_batched_tokens=64)
    ended = run(requests, FleetSpec(engine=small))
    assert [served.number for served in ended] == list(range(len(requests)))
    for served in ended:
        assert bool(served.failed) == (served.request.prompt_tokens >= 24 * 16)


def test_the_price_router_sends_a_known_prompt_to_where_it_is_known() -> None:
    requests = [asked(10.0 * n, 512, 2, name=1 + n % 2) for n in range(12)]
    ended = run(requests, FleetSpec(engines=4))
    places = {n: {s.engine.name for s in ended[n::2]} for n in (0, 1)}
    assert len(places[0]) == len(places[1]) == 1
    assert sum(served.cached_tokens == 0 for served in ended) == 2


def test_of_many_engines_that_are_equally_idle_the_first_ones_are_compared() -> None:
    requests = [asked(10.0 * n, 512, 2, name=1 + n) for n in range(5)]
    ended = run(requests, FleetSpec(engines=MOST_COMPARED + 1))
    assert {served.engine.number for served in ended} <= set(range(IDLE_COMPARED))


def test_a_request_is_told_to_the_router_as_pieces() -> None:
    identity = identity_of(asked(0.0, 600, 5, pictures=1))
    assert [piece.medium for piece in identity.pieces] == [0, None, None, None]
    assert sum(piece.num_chars for piece in identity.pieces) == 4 * (600 - 16)
    longer = identity_of(asked(0.0, 900, 5, pictures=1))
    same = [a.digest == b.digest for a, b in zip(identity.pieces, longer.pieces, strict=False)]
    assert same == [True, True, True, False]


def test_a_router_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no router 'x'"):
        Simulation(FleetSpec(router="x"), PRICES)


class RecitingRunner:
    """Samples what the trace has; sequences are numbered in the order of their requests."""

    def __init__(self, requests: list[TraceRequest]) -> None:
        self._tokens = [token_ids(request) for request in requests]

    def execute(self, plan: StepPlan) -> StepResult:
        sampled = [each for each in plan.scheduled if each.sample]
        return StepResult(
            token_ids=tuple(
                int(self._tokens[each.seq_id][each.start + each.num_tokens]) for each in sampled
            ),
            encode_seconds=dict.fromkeys((item.key for item in plan.encode), 2.5),
        )


def plans_of_an_engine(requests: list[TraceRequest], engine: EngineSpec) -> list[StepPlan]:
    """What a real engine plans for these requests, if its steps take what the prices say."""
    model = Simulation(ONE, PRICES).engines[0].info
    settings = EngineSettings(
        model=ModelConfig(folder="", served_name="model"),
        scheduler=SchedulerConfig(
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_encoder_tokens=engine.max_num_batched_tokens,
        ),
        kv=KVConfig(),
        encoder=EncoderConfig(cache_bytes=engine.encoder_cache_bytes),
        address="",
    )
    pool = BlockPool(engine.kv_cache_bytes // (KV_BYTES * 16), 16)
    compiler = cast(GrammarCompiler, SimpleNamespace(compile=None))
    core, _ = assemble(model, RecitingRunner(requests), settings, pool, grammars=compiler)
    plans: list[StepPlan] = []
    recorded(core._scheduler, plans)
    waiting = deque(requests)
    now, api_free = 0.0, 0.0
    coming: deque[tuple[float, TraceRequest]] = deque()
    for each in requests:
        api_free = max(api_free, each.arrival) + PRICES.request
        coming.append((api_free, each))
    while coming or core.has_work:
        if not core.has_work:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            _, request = coming.popleft()
            prompt = token_ids(request)[: request.prompt_tokens]
            core.add(
                GenerateRequest(
                    request_id=str(len(waiting)),
                    scope=bytes(32),
                    prompt=Array("int32", prompt.shape, prompt.data),
                    features=(),
                    sampling=SamplingParams(
                        temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True
                    ),
                    arrival=request.arrival,
                ),
                {},
            )
            waiting.popleft()
        count = len(plans)
        core.step()
        now += sum(PRICES.of_step(plan) for plan in plans[count:] if plan.scheduled)
    return plans


def recorded(scheduler: Scheduler, plans: list[StepPlan]) -> None:
    """Note every plan that the scheduler makes."""
    plan = scheduler.plan

    def planned() -> StepPlan | None:
        made = plan()
        if made is not None:
            plans.append(made)
        return made

    scheduler.plan = planned  # type: ignore[method-assign]


@pytest.mark.parametrize("blocks", [400, 40])
def test_an_engine_plans_the_same_for_a_recorded_trace(blocks: int) -> None:
    random = np.random.default_rng(blocks)
    requests = [
        asked(
            float(at),
            int(random.integers(20, 220)),
            int(random.integers(1, 30)),
            name=int(random.integers(4)),
        )
        for at in np.cumsum(random.exponential(2.0, 40))
    ]
    engine = EngineSpec(
        kv_cache_bytes=blocks * KV_BYTES * 16,
        max_num_seqs=6,
        max_num_batched_tokens=128,
        every_step=True,
    )
    simulation = Simulation(FleetSpec(engine=engine), PRICES)
    plans: list[StepPlan] = []
    recorded(simulation.engines[0].scheduler, plans)
    simulation.run(requests)
    simulation.check_integrity()
    real = plans_of_an_engine(requests, engine)
    assert [plan.scheduled for plan in plans] == [plan.scheduled for plan in real]
    assert len(plans) > 2 * len(requests)
