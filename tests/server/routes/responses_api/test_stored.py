"""Stored responses and conversations on doubles: tenants, refusals, and requests that fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from lookonce.errors import RequestFailedError
from lookonce.server.response_store import ResponseDatabase, ResponseStore
from tests.support.server.site import response_events

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
ANNA, BEN = ({"Authorization": f"Bearer {key}"} for key in ("ka", "kb"))
KEYS = ("anna:ka", "ben:kb")


@pytest.fixture
def opened(tmp_path):
    """Gives a site a store of so many bytes."""

    @contextmanager
    def open_store(site, max_bytes=1 << 20) -> Iterator[ResponseDatabase]:
        path = tmp_path / "store"
        database = ResponseDatabase(path, max_bytes=max_bytes, max_age=1000, durable=False)
        site.services.responses = store = ResponseStore(database)
        try:
            yield database
        finally:
            store.close()
        with closing(
            ResponseDatabase(path, max_bytes=max_bytes, max_age=1000, durable=False)
        ) as left:
            left.check_integrity()

    return open_store


def test_another_tenant_s_id_is_a_404_everywhere(on_site, opened):
    async def scenario(site):
        with opened(site):
            http = site.client
            first = (await http.post(RESPONSES, json={"input": "hi"}, headers=ANNA)).json()
            assert first["store"]
            item = {"role": "user", "content": "hello"}
            made = await http.post(CONVERSATIONS, json={"items": [item]}, headers=ANNA)
            response = f"{RESPONSES}/{first['id']}"
            conversation = f"{CONVERSATIONS}/{made.json()['id']}"
            listed = (await http.get(f"{conversation}/items", headers=ANNA)).json()["data"]
            own = f"{conversation}/items/{listed[0]['id']}"
            asked = [
                ("GET", response, None), ("GET", f"{response}/input_items", None),
                ("DELETE", response, None), ("GET", conversation, None),
                ("POST", conversation, {"metadata": {}}), ("GET", f"{conversation}/items", None),
                ("POST", f"{conversation}/items", {"items": [item]}), ("GET", own, None),
                ("DELETE", own, None), ("DELETE", conversation, None),
                ("POST", RESPONSES, {"input": "x", "previous_response_id": first["id"]}),
                ("POST", RESPONSES, {"input": "x", "conversation": made.json()["id"]}),
            ]  # fmt: skip
            for method, path, body in asked:
                answer = await http.request(method, path, json=body, headers=BEN)
                assert answer.status_code == 404, (method, path)
            for path in (response, f"{response}/input_items", conversation, own):
                assert (await http.get(path, headers=ANNA)).status_code == 200, path

    on_site(scenario, api_key=KEYS)


def test_a_request_that_fails_leaves_nothing(on_site, opened):
    async def scenario(site):
        with opened(site) as database:
            site.engine.failure = RequestFailedError("it broke")
            for stream in (False, True):
                await site.client.post(RESPONSES, json={"input": "hi", "stream": stream})
            bad = {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}
            assert (await site.client.post(RESPONSES, json=bad)).status_code == 400
            await site.services.responses.sweep()  # after whatever else is waiting to be done
            database.check_integrity()
            assert database.bytes_by_tenant() == {}

    on_site(scenario)


def test_what_is_too_large_is_answered_and_not_stored(on_site, opened):
    async def scenario(site):
        with opened(site, max_bytes=240):
            body = {"input": "x" * 60}
            answer = (await site.client.post(RESPONSES, json=body)).json()
            assert (answer["status"], answer["store"]) == ("completed", False)
            gone = await site.client.get(f"{RESPONSES}/{answer['id']}")
            assert gone.status_code == 404
            item = {"role": "user", "content": "x" * 60}
            refused = await site.client.post(CONVERSATIONS, json={"items": [item]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (413, "items")

    on_site(scenario)


def test_a_stream_is_stored_before_its_end_is_sent(on_site, opened):
    async def scenario(site):
        with opened(site):
            answer = await site.client.post(RESPONSES, json={"input": "hi", "stream": True})
            _, last = response_events(answer.text)[-1]
            stored = await site.client.get(f"{RESPONSES}/{last['response']['id']}")
            assert stored.json() == last["response"]

    on_site(scenario)


REFUSED = [
    ("POST", CONVERSATIONS, {"items": [{"role": "wizard", "content": "x"}]}, "items[0].role"),
    (
        "POST",
        CONVERSATIONS,
        {"items": [{"type": "function_call_output", "call_id": "c", "output": 5}]},
        "items[0].output",
    ),
    ("POST", CONVERSATIONS, {"metadata": {"a": 5}}, "metadata"),
    ("POST", CONVERSATIONS, {"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ("GET", f"{RESPONSES}/ID?stream=true", None, "stream"),
    ("GET", f"{RESPONSES}/ID/input_items?limit=0", None, "limit"),
    ("GET", f"{RESPONSES}/ID/input_items?limit=101", None, "limit"),
    ("GET", f"{RESPONSES}/ID/input_items?order=up", None, "order"),
    ("GET", f"{RESPONSES}/ID/input_items?after=nobody", None, "after"),
]


def test_mistakes_are_named(on_site, opened):
    async def scenario(site):
        with opened(site):
            first = (await site.client.post(RESPONSES, json={"input": "hi"})).json()
            for method, path, body, param in REFUSED:
                path = path.replace("ID", first["id"])
                answer = await site.client.request(method, path, json=body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    on_site(scenario)


def test_without_a_store_responses_are_answered_and_say_so(on_site):
    async def scenario(site):
        answer = (await site.client.post(RESPONSES, json={"input": "hi", "store": True})).json()
        assert (answer["status"], answer["store"]) == ("completed", False)
        for method, path in (("GET", f"{RESPONSES}/x"), ("POST", CONVERSATIONS)):
            assert (await site.client.request(method, path, json={})).status_code == 404

    on_site(scenario)
