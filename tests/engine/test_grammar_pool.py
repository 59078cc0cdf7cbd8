"""Grammars of many tenants: taken in turn, compiled within limits, cached by bytes."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from lookonce.config import NANO_FOLDER
from lookonce.engine.process.grammar import (
    ENTRY_BYTES,
    MAX_WAITING,
    AbandonedError,
    GrammarCache,
    GrammarCompiler,
    GrammarCompilerPool,
    GrammarWorker,
    grammar_key,
)
from lookonce.engine.process.grammar_worker import NICENESS, GrammarLimits
from lookonce.errors import BadRequestError, QueueFullError, UnavailableError
from lookonce.types.sampling import Grammar
from tests.support.engine.grammars import EOS, VOCAB
from tests.support.engine.living import PATIENCE
from tests.support.live_server import until


def asking(name: str) -> SimpleNamespace:
    """A request, as far as the pool reads it."""
    return SimpleNamespace(request_id=name, grammar=None, weight=1.0)


def grammar(source, kind="regex"):
    return Grammar(kind=kind, source=source, param="structured_outputs.regex")


def soon(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class GatedCompiler:
    """Compiles a grammar when its gate opens, and keeps a list of what it began."""

    nbytes = 100

    def __init__(self):
        self.begun = []
        self.gates = {}
        self.abandoned = []

    def __call__(self, asked, abandoned):
        self.begun.append(asked.source)
        gate = self.gates.get(asked.source)
        while gate is not None and not gate.wait(0.01):
            if abandoned():
                self.abandoned.append(asked.source)
                raise AbandonedError
        if asked.source.startswith("bad"):
            raise BadRequestError("no", param=asked.param)
        return self

    def close_gates(self, *sources):
        for source in sources:
            self.gates[source] = threading.Event()

    def open_all(self):
        for gate in self.gates.values():
            gate.set()


@contextlib.contextmanager
def pooled(**options):
    compiler = GatedCompiler()
    pool = GrammarCompilerPool(lambda: None, **options)
    try:
        yield pool, compiler
    finally:
        compiler.open_all()
        pool.close()


def begin(pool, compiler, name, source, tenant=""):
    request = asking(name)
    pool.begin(request, grammar(source), compiler, True, tenant)
    return request


def finished(pool, *names):
    """Wait for these requests; name → error."""
    found = {}

    def all_there():
        found.update({done.request.request_id: done.error for done in pool.take()})
        return found.keys() >= set(names)

    soon(all_there)
    return found


def test_no_tenant_has_all_workers():
    slow = [f"slow {number}" for number in range(6)]
    with pooled() as (pool, compiler):
        compiler.close_gates(*slow)
        for source in slow:
            begin(pool, compiler, source, source, tenant="greedy")
        request = begin(pool, compiler, "quick", "[a-z]{3}", tenant="other")
        assert finished(pool, "quick") == {"quick": None}
        assert request.grammar is compiler
        until(lambda: len(set(compiler.begun) & set(slow)) == 2, 60, lambda: str(compiler.begun))
        assert len(set(compiler.begun) & set(slow)) == 2


def test_one_grammar_that_takes_long_leaves_a_worker_to_its_own_tenant():
    with pooled() as (pool, compiler):
        compiler.close_gates("slow")
        begin(pool, compiler, "slow", "slow")
        begin(pool, compiler, "quick", "quick")
        assert finished(pool, "quick") == {"quick": None}


def test_requests_with_one_grammar_wait_for_one_job_and_later_ones_for_none():
    with pooled() as (pool, compiler):
        compiler.close_gates("slow")
        for number in range(5):
            begin(pool, compiler, f"r{number}", "slow")
        compiler.open_all()
        assert len(finished(pool, *(f"r{number}" for number in range(5)))) == 5
        begin(pool, compiler, "later", "slow")
        assert [done.request.request_id for done in pool.take()] == ["later"]
        begin(pool, compiler, "bad", "bad")
        assert isinstance(finished(pool, "bad")["bad"], BadRequestError)
        begin(pool, compiler, "again", "bad")
        assert isinstance(pool.take()[0].error, BadRequestError)
        assert compiler.begun == ["slow", "bad"]
        assert len(pool) == 0


def test_a_tenant_may_have_so_many_grammars_waiting_and_no_more():
    with pooled() as (pool, compiler):
        compiler.close_gates(*(str(number) for number in range(MAX_WAITING)))
        for number in range(MAX_WAITING):
            begin(pool, compiler, f"r{number}", str(number), "greedy")
        begin(pool, compiler, "one more", "one more", "greedy")
        begin(pool, compiler, "the same", "0", "greedy")  # it needs no work of its own
        assert isinstance(finished(pool, "one more")["one more"], QueueFullError)
        begin(pool, compiler, "other", "other", "other")
        assert finished(pool, "other") == {"other": None}
        compiler.open_all()
        errors = finished(pool, "the same", *(f"r{number}" for number in range(MAX_WAITING)))
        assert set(errors.values()) == {None}


def test_each_tenant_has_its_own_compiled_grammars():
    with pooled() as (pool, compiler):
        for tenant in ("a", "b", "a"):
            begin(pool, compiler, "r", "same", tenant)
            finished(pool, "r")
        assert compiler.begun == ["same", "same"]


def test_a_grammar_whose_client_left_is_not_begun_or_no_longer_compiled():
    with pooled(num_workers=2) as (pool, compiler):
        compiler.close_gates("running", "waiting")
        begin(pool, compiler, "running", "running")
        soon(lambda: compiler.begun == ["running"])
        begin(pool, compiler, "waiting", "waiting")
        assert pool.cancel("waiting")
        assert pool.cancel("running")
        assert not pool.cancel("running")
        soon(lambda: compiler.abandoned == ["running"])
        begin(pool, compiler, "next", "next")
        assert finished(pool, "next") == {"next": None}
        assert compiler.begun == ["running", "next"]


def test_a_grammar_that_somebody_still_waits_for_goes_on():
    with pooled() as (pool, compiler):
        compiler.close_gates("slow")
        begin(pool, compiler, "one", "slow")
        begin(pool, compiler, "other", "slow")
        assert pool.cancel("one")
        compiler.open_all()
        assert finished(pool, "other") == {"other": None}


def test_without_a_thread_a_request_fails_alone(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with pooled() as (pool, compiler):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            pool.begin(
                asking("a"),
                grammar("x"),
                compiler,
                True,
            )
        (failed,) = pool.take()
        assert isinstance(failed.error, UnavailableError)
        assert len(pool) == 0
        pool.begin(asking("b"), grammar("x"), compiler, True)
        done = []
        soon(lambda: done.extend(pool.take()) or done)
        assert done[0].error is None


def test_a_request_that_leaves_when_its_grammar_is_done_is_not_returned():
    with pooled() as (pool, compiler):
        begin(pool, compiler, "first", "one")
        soon(lambda: compiler.begun == ["one"])
        soon(lambda: not pool._running)
        assert pool.cancel("first")
        assert pool.take() == []


# --- the cache ------------------------------------------------------------------------------------


def compiled(nbytes):
    return SimpleNamespace(nbytes=nbytes)


def test_the_cache_is_bounded_by_bytes_and_drops_the_least_recently_used():
    cache = GrammarCache(10 * ENTRY_BYTES)
    keys = [grammar_key("", grammar(str(number))) for number in range(4)]
    for key in keys[:3]:
        cache.put(key, compiled(2 * ENTRY_BYTES))
    assert cache.get(keys[0]) is not None
    cache.put(keys[3], compiled(2 * ENTRY_BYTES))
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]
    assert cache.nbytes == 9 * ENTRY_BYTES


def test_a_tenant_s_grammars_drop_its_own_first():
    cache = GrammarCache(10 * ENTRY_BYTES)
    modest = grammar_key("modest", grammar("a"))
    cache.put(modest, compiled(2 * ENTRY_BYTES))
    for number in range(50):
        cache.put(grammar_key("greedy", grammar(str(number))), compiled(ENTRY_BYTES))
    assert cache.get(modest) is not None
    assert cache.nbytes <= 10 * ENTRY_BYTES


def test_a_grammar_larger_than_the_cache_drops_nothing():
    cache = GrammarCache(10 * ENTRY_BYTES)
    key = grammar_key("", grammar("a"))
    cache.put(key, compiled(10))
    cache.put(grammar_key("", grammar("b")), compiled(10 * ENTRY_BYTES))
    assert cache.get(key) is not None
    assert cache.nbytes == ENTRY_BYTES + 10


# --- the workers ----------------------------------------------------------------------------------


def compiler_with(**limits):
    return GrammarCompiler(str(NANO_FOLDER), VOCAB, [EOS], GrammarLimits(**limits))


TEXTS = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 50 + 1}}}$"} for i in range(4000)}
PATTERNS = json.dumps({"type": "object", "properties": TEXTS})
"""Takes seconds."""


@pytest.mark.parametrize(
    ("limits", "asked", "words"),
    [
        ({"cpu_seconds": 0.3}, grammar(PATTERNS, "json_schema"), "0.3 s of CPU time"),
        ({"memory_bytes": 16 << 20}, grammar("a" * 200_000), "16 MiB of memory to compile"),
        ({"compiled_bytes": 4 << 20}, grammar("a" * 50_000), "compiled it takes"),
        ({"mask_seconds": 0.02}, grammar("a" * 60_000), "takes too long"),
    ],
)
def test_a_grammar_beyond_a_limit_is_refused_naming_its_field_and_the_next_one_works(
    limits, asked, words
):
    compiler = compiler_with(**limits)
    with pytest.raises(BadRequestError, match=words) as caught:
        compiler.compile(asked)
    assert caught.value.param == "structured_outputs.regex"
    assert compiler.compile(grammar("[a-z]{3}")).nbytes < 1 << 20


def test_what_takes_long_gets_a_low_priority_and_is_killed_when_its_client_left():
    compiler = compiler_with(cpu_seconds=60.0)
    compiler.compile(grammar("[a-z]{3}"))
    worker = compiler._thread.worker
    usual, seen = priority(worker.pid), set[int]()

    def left():
        seen.update(priorities(worker))
        return True

    began = time.thread_time()
    with pytest.raises(AbandonedError):
        compiler.compile(grammar(PATTERNS, "json_schema"), left)
    assert time.thread_time() - began < 1  # nothing was compiled here
    if Path("/proc/self/task").is_dir():
        assert seen == {usual, max(usual, NICENESS)}  # of the first thread, and of the grammar's
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
    assert compiler.compile(grammar("[a-z]{4}"))


def priorities(worker):
    """Of all its threads; empty where there is no /proc."""
    folder = Path(f"/proc/{worker.pid}/task")
    return [priority(int(task.name)) for task in folder.iterdir()] if folder.is_dir() else []


def priority(thread):
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_a_worker_that_dies_fails_one_grammar_at_most():
    compiler = compiler_with()
    compiler.compile(grammar("[a-z]{3}"))
    worker = compiler._thread.worker
    threading.Timer(0.2, worker.kill).start()
    with pytest.raises(UnavailableError):
        compiler.compile(grammar(PATTERNS, "json_schema"))
    assert compiler.compile(grammar("[a-z]{4}"))
    worker = compiler._thread.worker
    worker.kill()
    worker._process.wait(PATIENCE)
    assert compiler.compile(grammar("[a-z]{5}"))


def test_the_next_worker_is_started_before_it_is_needed():
    compiler = compiler_with()
    compiler.compile(grammar("[a-z]{3}"))
    first, spare = compiler._thread.worker, compiler._spare.result(PATIENCE)
    with ThreadPoolExecutor(1) as another:
        another.submit(compiler.compile, grammar("[a-z]{4}")).result(PATIENCE)
        assert another.submit(lambda: compiler._thread.worker).result(PATIENCE) is spare
    first.kill()
    first._process.wait(PATIENCE)
    spare = compiler._spare.result(PATIENCE)
    assert compiler.compile(grammar("[a-z]{5}"))
    assert compiler._thread.worker is spare
    spare = compiler._spare.result(PATIENCE)
    spare.kill()
    spare._process.wait(PATIENCE)
    with ThreadPoolExecutor(1) as another:
        assert another.submit(compiler.compile, grammar("[a-z]{6}")).result(PATIENCE)
    last = compiler._spare.result(PATIENCE)
    compiler.close()
    last._process.wait(PATIENCE)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_worker_does_not_get_the_secrets_of_the_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary")
    worker = GrammarWorker(GrammarLimits())
    try:
        soon(lambda: b"OMP_NUM_THREADS=1" in environment_of(worker))
        assert b"canary" not in environment_of(worker)
    finally:
        worker.stop()


def environment_of(worker):
    return Path(f"/proc/{worker.pid}/environ").read_bytes()


def test_a_grammar_that_gets_no_processor_is_the_server_s_fault():
    compiler = compiler_with(wall_seconds=0.01, cpu_seconds=60.0)
    with pytest.raises(UnavailableError, match="no time"):
        compiler.compile(grammar(PATTERNS, "json_schema"))


def test_after_it_is_closed_nothing_is_compiled():
    compiler = compiler_with()
    compiler.compile(grammar("[a-z]{3}"))
    compiler.close()
    with pytest.raises(UnavailableError):
        compiler.compile(grammar("[a-z]{4}"))


def test_a_state_that_takes_too_long_over_its_tokens_fails():
    compiler = compiler_with()
    made = compiler.compile(grammar("[a-z]{3}"))
    state = made.start()
    assert state.error is None
    state._seconds = 10.0
    assert "too long" in state.error
