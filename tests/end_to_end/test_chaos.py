"""Processes of a server with three API processes are killed, at random under mixed load too, and in
the end it is stopped.

`make soak` kills more often (`CHAOS_KILLS` says how often), and with both types of cache.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest

from lookonce.render.media.pool import share_of_workers
from tests.support.chaos import (
    API,
    ENGINE,
    FORK_SERVER,
    KINDS,
    WORKER,
    Chaos,
    ask,
    mapped_slabs,
    num_descriptors,
    num_mappings,
    of_kind,
    processes,
    shared_memory,
    slabs_of,
    zombies,
)
from tests.support.drawing import text_part
from tests.support.live_server import LiveServer, until
from tests.support.server.realtime import until as events_until
from tests.support.traffic import PlannedRequest, drawn, plans, working_set

NUM_KILLS = int(os.environ.get("CHAOS_KILLS", len(KINDS)))
IN_SOAK = "CHAOS_KILLS" in os.environ
PATIENCE = 120.0
LONG = 3000
"""Tokens of an answer that is long enough for the engine to be killed before its end."""
NUM_API = 3
CACHE_GIB = 0.02
"""A third holds fewer pictures than are asked about, so that items are evicted, too."""
PICTURE_SLAB = 176 << 10
"""Bytes of the slab of one picture; sounds are too small for slabs."""
NUM_SLAB_SIZES = 3
"""That, and those of the largest picture and sound, which each engine is warmed up with."""
SLACK_BYTES = 64 << 20
"""Of shared memory: other programs on this machine have some, too."""
COUNTERS = ("request_success_total:stop", "media_decodes_total:image", "mm_cache_queries_total")


@pytest.fixture(scope="module", params=("shm", "lru") if IN_SOAK else ("shm",))
def crowd(request):
    with LiveServer(
        "--api-processes", str(NUM_API),
        "--mm-processor-cache-type", request.param,
        "--mm-processor-cache-gb", str(CACHE_GIB),
        "--limit-mm-per-prompt", "image=4,audio=4",
        "--vllm-metric-names", "--block-size", "32",
    ) as live:  # fmt: skip
        until(lambda: len(of_kind(live, WORKER)) >= 3, 60, live.log)
        yield live


def question(number: int) -> PlannedRequest:
    medium = drawn(number)
    content = [medium.part, text_part(medium.question)]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    return PlannedRequest(body, medium.answer)


def test_any_of_the_api_processes_answers_for_all(crowd):
    """The first test of this server: nobody else has asked it anything."""
    asked = [question(number % 5) for number in range(40)]

    def ask_once(plan: PlannedRequest) -> str:
        answer = crowd.post("/v1/chat/completions", plan.body)
        return answer.json()["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(8) as pool:  # connections of their own: all processes get some
        assert list(pool.map(ask_once, asked)) == [plan.answer for plan in asked]
    for _ in range(8):
        found = crowd.metrics()
        assert found["request_success_total:stop"] == 40
        assert found["mm_cache_queries_total"] == 40
        assert found["mm_cache_hits_total"] + found["media_processed_total:image"] >= 40
        assert found["vllm:mm_cache_queries_total:nano"] == 40
        assert found["e2e_request_latency_seconds_count"] == 40


def test_a_new_picture_is_decoded_once_whichever_processes_get_it(crowd):
    before = crowd.metrics()
    host, _, port = crowd.url.removeprefix("http://").partition(":")

    async def everybody():
        asked = [question(1000 + number) for number in range(6) for _ in range(8)]
        return await asyncio.gather(*(ask(host, int(port), each) for each in asked))

    failed = [seen for seen in asyncio.run(everybody()) if not seen.as_planned]
    assert not failed, failed[0]
    after = crowd.metrics()
    made = {name: after[name] - before.get(name, 0.0) for name in COUNTERS}
    assert made == {
        "request_success_total:stop": 48,
        "media_decodes_total:image": 6,
        "mm_cache_queries_total": 48,
    }
    assert after["mm_cache_hits_total"] - before["mm_cache_hits_total"] == 42


def with_new_pictures(requests):
    """Every third request is about a picture that nobody has seen."""
    for number, plan in enumerate(requests):
        yield plan
        if number % 2:
            yield question(10_000 + number)


def test_nobody_notices_whose_processes_live(crowd):
    media = working_set(num_pictures=30, num_sounds=10)
    shmem = shared_memory()
    steady = {pid: num_descriptors(pid) for pid in of_kind(crowd, "lookonce.cli")}
    kinds = {kind: len(of_kind(crowd, kind)) for kind in (ENGINE, API, FORK_SERVER)}
    before = crowd.metrics()
    requests = list(with_new_pictures(plans(media, 700, seed=5)))
    chaos = Chaos(server=crowd, plans=requests)
    chaos.run(NUM_KILLS, PATIENCE)
    assert set(KINDS) == set(chaos.kills)
    failed = [f"{seen.status} {seen.body[:300]}" for seen in chaos.failed_bystanders()]
    assert not failed, "\n".join(failed)

    until(lambda: len(of_kind(crowd, API)) == 3, PATIENCE, crowd.log)
    found = settled(crowd)
    counted = success(found) - success(before)
    assert chaos.num_successes <= counted <= chaos.num_successes + chaos.num_cut_off
    assert found["e2e_request_latency_seconds_count"] == success(found)
    assert found["mm_cache_bytes"] == found["mm_store_listed_bytes"]
    for name in COUNTERS:
        assert found[name] >= before.get(name, 0.0)
    assert {kind: len(of_kind(crowd, kind)) for kind in kinds} == kinds
    workers = of_kind(crowd, WORKER)
    assert len(workers) <= 3 * share_of_workers(3)
    (forks,) = of_kind(crowd, FORK_SERVER)
    assert num_descriptors(forks) <= 6 + 2 * (3 + len(workers)), "it loses descriptors"
    until(lambda: not zombies(crowd), 60, crowd.log)
    assert_every_slab_is_known(crowd)
    for pid, num in steady.items():
        assert num_descriptors(pid) <= num + 2, "the supervisor loses descriptors"
    assert_slabs_are_mapped_as_often_as_they_are_leased(crowd)
    if IN_SOAK:
        assert shared_memory() <= shmem + SLACK_BYTES


def assert_every_slab_is_known(live):
    """No process holds shared memory that the engine does not count, and the engine holds all."""

    def all_known():
        (engine,) = of_kind(live, ENGINE)
        known = slabs_of([engine])
        held = slabs_of(processes(live))
        return held == known and len(known) == live.metrics().get("mm_slabs", 0.0)

    until(all_known, 60, live.log)


def assert_slabs_are_mapped_as_often_as_they_are_leased(live):
    """By one API process each. It has what it lists, and for each worker, and itself, a slab of
    each size that is written and a spare one."""
    listed = int(CACHE_GIB * 2**30) // NUM_API // PICTURE_SLAB
    most = listed + 2 * NUM_SLAB_SIZES * (share_of_workers(NUM_API) + 1)

    def as_leased():
        mapped = {pid: mapped_slabs(pid) for pid in of_kind(live, API)}
        every = [inode for inodes in mapped.values() for inode in inodes]
        assert len(every) == len(set(every)), "a slab is mapped twice"
        return all(len(inodes) <= most for inodes in mapped.values())

    until(as_leased, PATIENCE, live.log)
    for pid in of_kind(live, API):
        # The processes' counts, and the index of the stored responses' SQLite file.
        assert num_mappings(pid) <= len(mapped_slabs(pid)) + 2, "mappings that are no slabs"


def success(found):
    return sum(value for name, value in found.items() if name.startswith("request_success_total"))


def settled(live):
    """The metrics when nothing runs; every process tells the same ones."""

    def quiet():
        found = live.metrics()
        names = ("num_requests_running", "num_requests_waiting", "mm_store_requests")
        return not any(found.get(name, 1.0) for name in names)

    until(quiet, PATIENCE, live.log)
    told = [live.metrics() for _ in range(6)]
    assert len({success(each) for each in told}) == 1
    return told[0]


def test_aborts_and_resets_reach_processes_that_were_restarted(crowd):
    async def scenario():
        host, _, port = crowd.url.removeprefix("http://").partition(":")
        ids = [f"long-{number}" for number in range(6)]
        plain = {"role": "user", "content": "On and on"}
        body = {"messages": [plain], "max_tokens": 3000, "ignore_eos": True}
        asked = [
            asyncio.create_task(
                ask(host, int(port), PlannedRequest({**body, "request_id": i}, None))
            )
            for i in ids
        ]
        ended: set[str] = set()
        deadline = time.monotonic() + 60
        while ended != set(ids) and time.monotonic() < deadline:
            answer = await asyncio.to_thread(
                crowd.post, "/inference/v1/abort_requests", {"request_ids": ids}
            )
            ended |= set(answer.json()["aborted"])
        return ended, ids, await asyncio.gather(*asked)

    ended, ids, seen = asyncio.run(scenario())
    assert ended == set(ids)
    assert all('"abort"' in each.body for each in seen)
    for tier in ("mm", "encoder", "prefix"):
        assert crowd.post(f"/reset_{tier}_cache").status_code == 200
    assert settled(crowd)["mm_cache_bytes"] == 0


async def finish_reasons(live, begun, max_tokens=LONG):
    """Streams an answer of so many tokens; `begun` is set with its first words."""
    async with live.async_client() as client:
        stream = await client.chat.completions.create(
            model="nano", messages=question(0).body["messages"], stream=True,
            max_tokens=max_tokens, extra_body={"ignore_eos": True},
        )  # fmt: skip
        reasons = []
        async for chunk in stream:
            begun.set()
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        return reasons


def health_of_many_connections(live):
    """The statuses of /health; any of the API processes may take each connection."""
    return {live.get("/health").status_code for _ in range(16)}


async def response_of(connection):
    """The next response of a realtime session, once it is done."""
    while (last := (await events_until(connection, "response.done"))[-1]).type == "error":
        pass
    return last.response


SAID = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 2 3 4"}]}
SHORT = {"max_output_tokens": 4}


def test_a_killed_engine_fails_what_runs_and_its_successor_answers(crowd):
    """Streams, and a realtime session, which outlives it. The engine stands still when the
    session's answer begins, so that it cannot end before the engine."""
    num_engines = crowd.log().count("warmed up audio")
    engine = crowd.engine_pid()

    async def fail_all(connection):
        begun = [asyncio.Event() for _ in range(4)]
        streams = [asyncio.create_task(finish_reasons(crowd, event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(engine, signal.SIGSTOP)
        await connection.response.create(response=SHORT)
        await events_until(connection, "response.created")
        os.kill(engine, signal.SIGKILL)
        errors = await asyncio.gather(*streams, return_exceptions=True)
        assert [type(error) for error in errors] == [openai.APIError] * 4
        assert {error.code for error in errors} == {"engine_dead"}
        error = (await events_until(connection, "response.done"))[-1]
        assert error.error.type == "service_unavailable_error"
        assert (await response_of(connection)).status == "failed"
        await asyncio.to_thread(
            until, lambda: health_of_many_connections(crowd) == {503}, 100, crowd.log
        )

    async def scenario():
        async with crowd.async_client().realtime.connect() as connection:
            await events_until(connection, "conversation.created")
            await connection.conversation.item.create(item=SAID)
            crowd.process.send_signal(signal.SIGSTOP)  # nobody restarts the engine meanwhile
            try:
                await fail_all(connection)
            finally:
                crowd.process.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + PATIENCE
            while True:  # the engine is back when this connection's API process says so
                await connection.response.create(response=SHORT)
                if (again := await response_of(connection)).status != "failed":
                    break
                assert again.status_details.error.type == "service_unavailable_error"
                assert time.monotonic() < deadline, crowd.log()
                await asyncio.sleep(0.2)
            assert again.status in ("completed", "incomplete")

    asyncio.run(scenario())
    until(lambda: is_up(crowd), PATIENCE, crowd.log)
    assert health_of_many_connections(crowd) == {200}
    answer = crowd.post("/v1/chat/completions", question(1).body).json()
    assert answer["choices"][0]["message"]["content"] == question(1).answer
    until(lambda: crowd.log().count("warmed up audio") == num_engines + 1, 60, crowd.log)


def is_up(live):
    """Every API process says so: each connection may reach another one."""
    return all(live.get("/ready").status_code == 200 for _ in range(8))


def test_sigterm_lets_running_requests_end_and_refuses_new_ones_and_nothing_is_left(crowd):
    engine = crowd.engine_pid()

    async def stop_midway():
        begun = asyncio.Event()
        stream = asyncio.create_task(finish_reasons(crowd, begun, max_tokens=600))
        await begun.wait()
        os.kill(engine, signal.SIGSTOP)  # the stream cannot end before a request is refused
        try:
            crowd.process.send_signal(signal.SIGTERM)
            refusal = await first_refusal(crowd)
        finally:
            os.kill(engine, signal.SIGCONT)
        return await stream, refusal

    reasons, refusal = asyncio.run(stop_midway())
    assert reasons == ["length"]
    assert refusal.status_code == 503
    assert refusal.json()["error"]["code"] == "draining"
    assert refusal.headers["connection"] == "close"
    assert crowd.process.wait(60) == 0
    assert processes(crowd) == {}


async def first_refusal(live):
    """Asks until a request is refused.

    One that came in before the signal waits for the stopped engine, and a process that has nothing
    left to do closes its connections: both are left behind.
    """
    async with asyncio.timeout(100), httpx.AsyncClient(base_url=live.url, timeout=1) as client:
        body = {**question(0).body, "max_tokens": 1}
        while True:
            with suppress(httpx.TransportError):
                response = await client.post("/v1/chat/completions", json=body)
                if response.status_code != 200:
                    return response
            await asyncio.sleep(0.02)
