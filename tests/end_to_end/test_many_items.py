"""Many media items in one request to a real server: all are placed, encoded once and kept."""

from __future__ import annotations

from tests.support.live_server import LiveServer
from tests.support.traffic import sounding

SOUNDS = range(300, 340)
"""Other tests ask the same server about others."""


def ask(server: LiveServer, numbers: range) -> dict:
    content = [sounding(number).part for number in numbers]
    content.append({"type": "text", "text": "What do you hear?"})
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 4,
        "reuse_receipt": True,
    }
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_many_sounds_in_one_request_are_each_encoded_once_and_found_again(cache_server):
    before = cache_server.metrics()
    first = ask(cache_server, SOUNDS)
    items = first["reuse_receipt"]["items"]
    assert len(items) == len(SOUNDS)
    ends = [item["offset"] + item["length"] for item in items]
    starts = [item["offset"] for item in items]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert {item["encoder"] for item in items} == {"miss"}
    after = cache_server.metrics()
    assert after["encoder_runs_total"] - before["encoder_runs_total"] == len(SOUNDS)
    again = ask(cache_server, SOUNDS)
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert {item["processor"] for item in again["reuse_receipt"]["items"]} == {"hit"}
    assert cache_server.metrics()["encoder_runs_total"] == after["encoder_runs_total"]
