"""External KV tiers as a user gets them: restarts, two servers, a Valkey that hangs and dies."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from tests.support.drawing import ask
from tests.support.kv_answers import QUESTION, SHAPES, by_tier, look, status, stored
from tests.support.kv_servers import ValkeyServer
from tests.support.live_server import LiveServer, until


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with tempfile.TemporaryDirectory(prefix="lookonce-valkey-") as folder:
        server = ValkeyServer(Path(folder))
        yield server
        server.close()


@pytest.fixture(scope="module")
def other(valkey: ValkeyServer) -> Iterator[LiveServer]:
    """A server whose one tier, for encoder outputs too, is that Valkey."""
    shared = f"valkey://127.0.0.1:{valkey.port}"
    with LiveServer("--kv-load", "always", "--kv-tier", shared, "--encoder-tier", shared) as server:
        yield server


def test_a_restart_and_a_second_server_find_what_the_first_one_computed(
    tmp_path: Path, valkey: ValkeyServer, other: LiveServer
) -> None:
    """KV, and encoder outputs, whose tiers are used where the prompt before a picture is another:
    then its KV is not found, and its encoder output is. In the end the files of the disk tier are
    changed: what they held is lost, which fails the request, as the operator said, and no later
    one."""
    disk, shared = f"disk:{tmp_path}:1GB", f"valkey://{valkey.socket}"
    options = ("--kv-load", "always", "--kv-tier", "host:64MB", "--kv-tier", disk)
    address = f"ipc://{Path(valkey.socket).parent}/events"
    outputs = ("--encoder-tier", shared, "--events", address)
    with LiveServer(*options, "--kv-tier", shared, *outputs) as first:
        assert status(stored(first, "valkey")) == "none"
        assert status(look(first)) == "shadowed"
        until(lambda: first.metrics()["encoder_tier_stored_bytes_total:valkey"] > 0, 60, first.log)
        until(lambda: first.metrics()["encoder_tier_queue_bytes:valkey"] == 0, 60, first.log)
        assert held(address) == (1, 1)
        first.post("/reset_prefix_cache")
        assert by_tier(look(first)).keys() == {"host"}
        assert status(stored(first, "disk", scope="another")) == "none"
        metrics = first.metrics()
        assert metrics["external_prefix_cache_hits_total"] > 0
        assert metrics["prompt_tokens_total"] == (
            metrics["external_prefix_cache_queries_total"] + metrics["prefix_cache_hits_total"]
        )
        before = other.metrics()
        assert by_tier(look(other)).keys() == {"valkey"}
        (item,) = look_after(other, "Another beginning. ")["reuse_receipt"]["items"]
        assert (item["encoder"], item["encoder_tier"]) == ("hit", "valkey")
        after = other.metrics()
        assert after["encoder_runs_total"] == before["encoder_runs_total"]
        name = "encoder_tier_outputs_total:valkey"
        assert after[name] - before.get(name, 0) == 1
        assert status(look(other, scope="a third")) == "none"
    with LiveServer(*options, "--kv-load-failure-policy", "fail") as again:
        assert by_tier(stored(again, "host")).keys() == {"disk"}
        again.post("/reset_prefix_cache")
        assert by_tier(look(again)).keys() == {"host"}, "found far, kept near"
        for file in tmp_path.rglob("*"):
            if file.is_file():
                scribble(file)
        answer = asked(again, "another")
        assert answer.status_code == 503, answer.text
        error = answer.json()["error"]
        assert error["type"] == "service_unavailable_error"
        assert "KV tier" in error["message"]
        look(again, scope="another")


def test_a_valkey_that_hangs_dies_and_comes_back_never_costs_an_answer(
    valkey: ValkeyServer, other: LiveServer
) -> None:
    def cold() -> str:
        other.post("/reset_prefix_cache")
        return status(look(other, scope="hanging"))

    stored(other, "valkey", scope="hanging")
    assert cold() == "loaded"
    failures = timeouts(other)
    valkey.pause()
    assert [cold() for _ in range(5)].count("loaded") == 0
    assert timeouts(other) > failures
    assert other.metrics()["kv_tier_breaker_state:valkey"] > 0, (
        "a breaker spares the others the wait"
    )
    valkey.resume()
    until(lambda: cold() == "loaded", 60, other.log)
    valkey.kill()
    assert [cold() for _ in range(5)].count("loaded") == 0
    valkey.start()
    until(lambda: cold() == "loaded", 60, other.log)
    assert other.metrics()["kv_tier_breaker_state:valkey"] == 0


def timeouts(server: LiveServer) -> float:
    return server.metrics().get("kv_tier_failures_total:timeout:valkey", 0.0)


def test_a_block_that_is_lost_is_computed_again(valkey: ValkeyServer, other: LiveServer) -> None:
    """Where the operator has not said otherwise."""
    valkey.call(b"FLUSHALL")
    stored(other, "valkey", scope="lost")
    for name in valkey.names():
        value = valkey.call(b"GET", name)
        assert isinstance(value, bytes)
        valkey.call(b"SET", name, bytes(byte ^ 0x5A for byte in value))
    other.post("/reset_prefix_cache")
    answer = asked(other, "lost")
    assert answer.status_code == 200, answer.text
    look(other, scope="lost")


def asked(server: LiveServer, scope: str) -> httpx.Response:
    body = {"model": "nano", "messages": ask(SHAPES, QUESTION), "cache_salt": scope}
    return server.post("/v1/chat/completions", body)


def held(address: str) -> tuple[int, int]:
    """By snapshots of a server's events: how many encoder outputs and items it holds. Its KV blocks
    are a chain."""
    found: dict[bytes, list[Any]] = {}
    with zmq.Context() as context, context.socket(zmq.DEALER) as asks:
        asks.connect(f"{address}.replay")
        for topic in (b"kv-events", b"lookonce.encoder-outputs", b"lookonce.items"):
            asks.send_multipart([b"", b"snapshot", topic])
            assert asks.poll(20_000)
            _, _, payload = asks.recv_multipart()
            _, ((cleared, *_), *found[topic]) = msgspec.msgpack.decode(payload)
            assert cleared in ("AllBlocksCleared", "AllKeysCleared")
            assert asks.recv_multipart()[-1] == b"", "one batch is enough"
    ((kind, hashes, parent, tokens, size, *_),) = found[b"kv-events"]
    assert (kind, parent) == ("BlockStored", None)
    assert len(tokens) == size * len(hashes) > 0
    outputs, items = found[b"lookonce.encoder-outputs"], found[b"lookonce.items"]
    return sum(len(keys) for _, keys in outputs), sum(len(keys) for _, keys in items)


def look_after(server: LiveServer, text: str) -> dict[str, Any]:
    """One answer to the same picture after other text."""
    (message,) = ask(SHAPES, QUESTION)
    message["content"].insert(0, {"type": "text", "text": text})
    body = {"model": "nano", "messages": [message], "reuse_receipt": True, "max_tokens": 2}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def scribble(file: Path) -> None:
    """Change one byte of every 512 in place."""
    with file.open("r+b") as opened:
        for at in range(0, file.stat().st_size, 512):
            opened.seek(at)
            byte = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte[0] ^ 0x5A]))
