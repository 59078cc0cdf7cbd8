"""One tenant's grammars take neither memory nor time from the others."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from lookonce.types.sampling import MAX_GRAMMAR_BYTES
from tests.support.attacked_server import (
    ATTACKER,
    MIB,
    OTHER,
    SLOWEST,
    AttackedServer,
    check_memory,
    settled_memory,
)

pytestmark = pytest.mark.attack
NUM_REFUSED = 20
NUM_SLOW = 4


def schema_format(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def slow_schema(number: int) -> dict[str, object]:
    """Takes two seconds or more to compile, and is no other's."""
    patterns = [f"^[a-z]{{1,{length}}}$" for length in range(1, 51)] * 50
    texts = {f"p{number}x{i}": {"type": "string", "pattern": p} for i, p in enumerate(patterns)}
    return schema_format({"type": "object", "properties": texts})


LARGE = {
    "regex": "a" * 2_000_000,
    "grammar": "root ::= " + '"a" ' * 500_000,
    "choice": ["a" * 200 + str(number) for number in range(9_999)],
    "json": {"type": "object", "description": "d" * 2_000_000},
}
OVERSIZED: dict[str, dict[str, object]] = {
    **{f"structured_outputs.{kind}": {"structured_outputs": {kind: LARGE[kind]}} for kind in LARGE},
    **{f"guided_{kind}": {f"guided_{kind}": LARGE[kind]} for kind in LARGE},
    "response_format.json_schema.schema": {"response_format": schema_format(LARGE["json"])},
}


@pytest.mark.parametrize("param", OVERSIZED)
def test_a_grammar_that_is_too_large_is_refused_by_its_field(server: AttackedServer, param):
    response = server.complete(ATTACKER, **OVERSIZED[param])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert str(MAX_GRAMMAR_BYTES) in error["message"]
    assert len(error["message"]) < 500


def test_refused_regexes_leave_no_memory_in_the_engine(server: AttackedServer):
    assert server.complete(OTHER, guided_regex="[a-z]{3}").status_code == 200
    before = server.engine_memory()
    for number in range(NUM_REFUSED):
        regex = str(number) + "a" * 2_000_000
        assert server.complete(ATTACKER, guided_regex=regex).status_code == 400
    assert server.engine_memory() - before < 100 * MIB


def test_any_of_ten_thousand_choices_may_be_the_answer(server: AttackedServer):
    choices = [f"{number * 7919 % 10_007} apples" for number in range(10_000)]
    response = server.complete(OTHER, structured_outputs={"choice": choices}, max_tokens=40)
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] in choices


def test_a_small_grammar_does_not_wait_for_another_tenant_s_large_ones(server: AttackedServer):
    """The order counts, not the time: most of the large ones are unfinished when the small one is
    done. Before, it came after those that were asked for first."""
    finished = []

    def attack(number: int) -> None:
        server.complete(ATTACKER, response_format=slow_schema(number), max_tokens=2)
        finished.append(number)

    # The first grammars of a server start its workers.
    assert server.complete(ATTACKER, guided_regex="[a-z]{2}").status_code == 200
    with server.canaries() as canaries, ThreadPoolExecutor(NUM_SLOW) as attackers:
        for number in range(NUM_SLOW):
            attackers.submit(attack, number)
        time.sleep(1.0)  # they are all there
        response = server.complete(OTHER, guided_regex="[a-z]{3}", max_tokens=4)
        num_finished = len(finished)
        assert re.fullmatch("[a-z]{3}", response.json()["choices"][0]["text"])
    assert len(finished) == NUM_SLOW
    assert num_finished <= NUM_SLOW - 2
    canaries.check()


HARD = {
    "literal": {"guided_regex": "a" * 100_000},
    "large literal": {"guided_regex": "a" * 250_000},
    "unclosed": {"guided_regex": "(" * 250_000},
    "nested": {"guided_regex": "(" * 1_000 + "a" + "){1,9}" * 1_000},
    "ambiguous": {"guided_grammar": 'start: s\ns: s s | s s s | "a" | /[a-z]/ | /[ a-zA-Z0-9_]/'},
    "chain": {
        "guided_grammar": "start: " + " ".join(f"r{i}?" for i in range(300)) + "\n"
        + "\n".join(f"r{i}: /[a-z ]+/ | r{(i + 1) % 300}" for i in range(300))
    },
    "exponential": {"guided_regex": r"(.|\n)*a(.|\n){300}"},
    "patterns": {"response_format": slow_schema(77)},
    "bnf": {"guided_grammar": "root ::= " + '"a" ' * 60_000},
}  # fmt: skip


def test_hard_grammars_stall_nobody_and_leave_no_memory(server: AttackedServer):
    """Each is an answer or a 400, whatever it is, twenty at a time."""

    def attack(times: int) -> set[int]:
        with ThreadPoolExecutor(20) as attackers:
            asked = [
                attackers.submit(server.complete, ATTACKER, **fields, max_tokens=16)
                for _ in range(times)
                for fields in HARD.values()
            ]
            return {future.result().status_code for future in asked}

    attack(1)  # fills what the cache of grammars may hold
    before = settled_memory(server.live)
    with server.canaries() as canaries:
        statuses = attack(4)
    assert statuses <= {200, 400}
    canaries.check()
    assert canaries.slowest < SLOWEST
    check_memory(server.live, before)


def test_accepted_grammars_are_kept_within_a_budget(server: AttackedServer):
    server.complete(ATTACKER, guided_regex="[a-z]{2}")
    before = server.engine_memory()
    for number in range(150):
        schema = {"type": "object", "description": f"{number} " + "d" * 250_000}
        fields = {"response_format": schema_format(schema), "max_tokens": 1}
        assert server.complete(ATTACKER, **fields).status_code == 200
    for number in range(40):
        regex = "|".join(f"{number}w{i}" for i in range(25_000))
        assert server.complete(ATTACKER, guided_regex=regex, max_tokens=1).status_code == 200
    assert server.engine_memory() - before < 256 * MIB


def test_grammars_of_clients_that_left_are_not_compiled(server: AttackedServer):
    """They would take both of the tenant's workers for a minute."""

    def leave(number: int) -> None:
        body = {"prompt": "a", "response_format": slow_schema(1000 + number)}
        with server.client(ATTACKER) as client, contextlib.suppress(httpx.TimeoutException):
            client.post("/v1/completions", json=body, timeout=0.3)

    with server.canaries() as canaries:
        threads = [threading.Thread(target=leave, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        response = server.complete(ATTACKER, guided_regex="[a-z]{3}", max_tokens=4)
    assert response.status_code == 200
    assert response.elapsed.total_seconds() < 10
    canaries.check()
