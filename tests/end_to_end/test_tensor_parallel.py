"""Two processes that compute one model together answer as one does; when one dies both begin again.

Rank 1 gets its input tokens from rank 0 on the way, and every picture from the plans.
`make test-tensor-parallel` runs this; `make test` has ranks in threads (`tests/model`).
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.live_server import LiveServer, until
from tests.support.traffic import drawn

pytestmark = pytest.mark.soak
ENGINE, RANK = b"lookonce.engine.process\0", b"lookonce.engine.process.tensor_parallel_rank\0"
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}},
    "required": ["count"],
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    "drawn": {"temperature": 1.0, "seed": 7, "n": 2},
    "penalties": {"temperature": 0, "frequency_penalty": 0.8, "presence_penalty": 0.3},
    "schema": {
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "count", "schema": SCHEMA, "strict": True},
        },
    },
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[LiveServer]:
    with LiveServer("--tensor-parallel", "2", "--async-scheduling", "on") as live:
        yield live


def answer(live: LiveServer, content: Any, **options: Any) -> list[tuple[str | None, str]]:
    with live.client() as client:
        found = client.chat.completions.create(
            model="nano", messages=[{"role": "user", "content": content}], max_tokens=24, **options
        )
    return [(choice.message.content, choice.finish_reason) for choice in found.choices]


def asked_with_media() -> list[Any]:
    picture = drawn(1904)
    return [
        "What is 2 + 2?",
        [picture.part, {"type": "text", "text": picture.question}],
        [{"type": "text", "text": "Once more: "}, picture.part, picture.part],
        "word " * 700,
    ]


def test_answers_are_those_of_one_process(server, ranks):
    for content in asked_with_media():
        for name, options in ASKED.items():
            assert answer(ranks, content, **options) == answer(server, content, **options), name
    assert len(ranks.pids(RANK)) == len(ranks.pids(ENGINE)) == 1


def test_a_rank_that_dies_ends_the_engine_which_begins_again(server, ranks):
    [rank], [engine] = ranks.pids(RANK), ranks.pids(ENGINE)
    os.kill(rank, signal.SIGKILL)
    until(lambda: ranks.pids(ENGINE) not in ([engine], []), 100, ranks.log)
    until(lambda: ranks.get("/ready").status_code == 200, 100, ranks.log)
    assert re.search(r"rank 1 of tensor parallelism was killed: the engine ends", ranks.log())
    assert rank not in ranks.pids(RANK)
    content = asked_with_media()[1]
    assert answer(ranks, content, temperature=0) == answer(server, content, temperature=0)


def test_no_rank_outlives_the_engine(ranks):
    [rank] = ranks.pids(RANK)
    os.kill(ranks.pids(ENGINE)[0], signal.SIGKILL)
    until(lambda: rank not in ranks.pids(RANK), 30, ranks.log)
    until(lambda: ranks.get("/ready").status_code == 200, 100, ranks.log)
    with pytest.raises(openai.NotFoundError), ranks.client() as client:
        client.chat.completions.create(model="none", messages=[{"role": "user", "content": "?"}])
