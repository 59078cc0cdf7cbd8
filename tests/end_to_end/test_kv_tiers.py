"""External KV tiers as a user gets them: restarts, two servers, a Valkey that hangs and dies."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.drawing import ask
from tests.support.kv_answers import QUESTION, SHAPES, by_tier, look, status, stored
from tests.support.kv_servers import ValkeyServer
from tests.support.live_server import LiveServer, until


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with tempfile.TemporaryDirectory(prefix="lookonce-valkey-") as folder:
        server = ValkeyServer(Path(folder))
        yield server
        server.close()


def test_a_restart_and_a_second_server_find_what_the_first_one_computed(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    """KV, and encoder outputs, whose tiers are used where the prompt before a picture is another:
    then its KV is not found, and its encoder output is."""
    disk, shared = f"disk:{tmp_path}:1GB", f"valkey://127.0.0.1:{valkey.port}"
    outputs = ("--encoder-tier", shared)
    options = ("--kv-load", "always", "--kv-tier", "host:64MB", "--kv-tier", disk)
    address = f"ipc://{Path(valkey.socket).parent}/events"
    with LiveServer(*options, "--kv-tier", shared, *outputs, "--events", address) as first:
        assert status(look(first)) == "none"
        assert status(look(first)) == "shadowed"
        stored(first, "disk")
        stored(first, "valkey")
        assert held(address) == (1, 1)
        first.post("/reset_prefix_cache")
        assert by_tier(look(first)).keys() == {"host"}
        assert status(look(first, scope="another")) == "none"
        metrics = first.metrics()
        assert metrics["external_prefix_cache_hits_total"] > 0
        assert metrics["prompt_tokens_total"] == (
            metrics["external_prefix_cache_queries_total"] + metrics["prefix_cache_hits_total"]
        )
        until(lambda: first.metrics()["encoder_tier_stored_bytes_total:valkey"] > 0, 20, first.log)
        until(lambda: first.metrics()["encoder_tier_queue_bytes:valkey"] == 0, 20, first.log)
        with LiveServer("--kv-load", "always", "--kv-tier", shared, *outputs) as other:
            assert by_tier(look(other)).keys() == {"valkey"}
            (item,) = look_after(other, "Another beginning. ")["reuse_receipt"]["items"]
            assert (item["encoder"], item["encoder_tier"]) == ("hit", "valkey")
            metrics = other.metrics()
            assert metrics["encoder_runs_total"] == 0
            assert metrics["encoder_tier_outputs_total:valkey"] == 1
            assert metrics["media_processed_total:image"] == 1, "each server processes for itself"
            assert status(look(other, scope="a third")) == "none"
    with LiveServer(*options) as again:
        assert by_tier(look(again)).keys() == {"disk"}
        again.post("/reset_prefix_cache")
        assert by_tier(look(again)).keys() == {"host"}, "found far, kept near"


def test_a_valkey_that_hangs_dies_and_comes_back_never_costs_an_answer(
    valkey: ValkeyServer,
) -> None:
    shared = f"valkey://{valkey.socket}"
    with LiveServer("--kv-load", "always", "--kv-tier", shared) as server:
        look(server)
        stored(server, "valkey")

        def cold() -> str:
            server.post("/reset_prefix_cache")
            return status(look(server))

        assert cold() == "loaded"
        valkey.pause()
        started = time.monotonic()
        assert [cold() for _ in range(5)].count("loaded") == 0
        assert time.monotonic() - started < 20.0, "a breaker spares the others the wait"
        assert server.metrics()["kv_tier_breaker_state:valkey"] > 0
        valkey.resume()
        until(lambda: cold() == "loaded", 30, server.log)
        valkey.kill()
        assert [cold() for _ in range(5)].count("loaded") == 0
        valkey.start()
        until(lambda: cold() == "loaded", 30, server.log)
        assert server.metrics()["kv_tier_breaker_state:valkey"] == 0


def test_a_block_that_is_lost_is_computed_again_or_refused_as_the_operator_said(
    tmp_path: Path,
) -> None:
    """The files of the disk tier are changed; the request after the next is served as usual."""
    disk = f"disk:{tmp_path}:1GB"
    for policy, statuses in (("recompute", {200}), ("fail", {503})):
        options = ("--kv-load", "always", "--kv-tier", disk, "--kv-load-failure-policy", policy)
        with LiveServer(*options) as server:
            look(server, scope=policy)
            stored(server, "disk")
            for file in tmp_path.rglob("*"):
                if file.is_file():
                    scribble(file)
            server.post("/reset_prefix_cache")
            body = {"model": "nano", "messages": ask(SHAPES, QUESTION), "cache_salt": policy}
            answer = server.post("/v1/chat/completions", body)
            assert {answer.status_code} == statuses, answer.text
            if policy == "fail":
                error = answer.json()["error"]
                assert error["type"] == "service_unavailable_error"
                assert "KV tier" in error["message"]
            look(server, scope=policy)


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
