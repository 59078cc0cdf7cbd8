"""The prefetch benchmark: the same arrivals on a virtual clock, with prefetch and without."""

from __future__ import annotations

from benchmarks.bench_engine import BenchEngine, load_bench_model
from benchmarks.prefetch import CHUNK, ENCODER_ROWS, at_random_times, late_pictures, serve
from lookonce.config import SchedulerConfig


def test_late_pictures_come_along_with_the_first_and_everyone_gets_a_first_token(folder):
    config = SchedulerConfig(max_num_batched_tokens=CHUNK, max_encoder_tokens=ENCODER_ROWS)
    prompts = [late_pictures(number, 2, 0.0, seed=1) for number in range(3)]
    arrivals = at_random_times(prompts, rate=1e6, seed=1)
    with BenchEngine(load_bench_model(str(folder("llava"))), scheduler=config) as engine:
        outcomes = serve(arrivals, engine)
    assert [outcome.prefetched for outcome in outcomes] == [4]
    assert len(outcomes[0].first_tokens) == 3
    assert all(seconds > 0 for seconds in outcomes[0].first_tokens)
