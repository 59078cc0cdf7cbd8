"""A real fleet on a local Ray: OpenAI's client, killed processes, engines that come and go.

`make test-fleet` runs these; they need ray.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from PIL import Image

from tests.support.live_server import LiveServer, until

pytest.importorskip("ray")
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]

ENGINES = 3
DELAYS = {"upscale_delay": 1.0, "downscale_delay": 30.0}
"""An engine starts in less than the second."""
FRONT_END = "ray::ServeReplica:lookonce:Frontend"
"""In the command lines of their processes."""
EXAMPLE = Path(__file__).parents[2] / "deploy/kubernetes/fleet/lookonce-fleet.yaml"


class RunningFleet:
    """`lookonce fleet` as a user starts it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "fleet.yaml"
        self.keys = folder / "keys"
        self.keys.write_text("one:key-one:admin\ntwo:key-two\n")
        self.write(ENGINES)
        environment = {"RAY_USAGE_STATS_ENABLED": "0"}
        arguments = (str(self.file),)
        self.server = LiveServer(*arguments, command="fleet", env=environment)
        self.url = self.server.url
        self.until_engines(ENGINES)

    def write(self, engines: int, seqs: int = 8, **scaling: Any) -> None:
        options = {"max-num-seqs": seqs}
        model = {"model": "nano", "engines": engines, "options": options, **scaling}
        fleet = {"frontends": 2, "api_key_file": str(self.keys), "models": [model]}
        self.file.write_text(json.dumps(fleet))

    def scale(self, engines: int, seqs: int = 8, **scaling: Any) -> None:
        self.write(engines, seqs, **scaling)
        self.server.process.send_signal(signal.SIGHUP)

    def client(self, key: str = "key-one", **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": 120} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def engines(self) -> list[dict[str, Any]]:
        """As one of the front-ends sees them; none while that one is away."""
        with contextlib.suppress(httpx.HTTPError):
            headers = {"authorization": "Bearer key-one"}
            answer = httpx.get(f"{self.url}/fleet", headers=headers)
            found: list[dict[str, Any]] = answer.json()["engines"]
            return found
        return []

    def until_engines(self, number: int) -> None:
        """Until each front-end knows so many that are ready: several looks in a row say so."""

        def settled() -> bool:
            looks = [self.engines() for _ in range(8)]
            return all(len(e) == number and all(x["ready"] for x in e) for e in looks)

        until(settled, 300)

    def pids(self, command: str) -> list[int]:
        """Processes of this fleet with this in their command line."""
        parents: dict[int, int] = {}
        lines: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit():
                    state = (folder / "stat").read_text().rpartition(")")[2].split()
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    parents[int(folder.name)], lines[int(folder.name)] = int(state[1]), str(line)

        def is_ours(pid: int) -> bool:
            while pid in parents and pid != self.server.process.pid:
                pid = parents[pid]
            return pid == self.server.process.pid

        return [pid for pid, line in lines.items() if command in line and is_ours(pid)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    running = RunningFleet(tmp_path_factory.mktemp("fleet"))
    try:
        yield running
    finally:
        running.server.stop()


def picture(seed: int) -> dict[str, Any]:
    file = io.BytesIO()
    color = (seed * 37 % 256, seed * 91 % 256, seed * 53 % 256)
    Image.new("RGB", (96, 96), color).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def ask(client: openai.OpenAI, content: Any, **options: Any) -> tuple[Any, httpx.Headers]:
    """The completion and its headers."""
    messages = [{"role": "user", "content": content}]
    options = {"max_tokens": 8, "temperature": 0} | options
    raw = client.chat.completions.with_raw_response.create(
        model="nano", messages=messages, extra_body={"reuse_receipt": True}, **options
    )
    return raw.parse(), raw.headers


def receipt(completion: Any) -> dict[str, Any]:
    found: dict[str, Any] = completion.model_extra["reuse_receipt"]
    return found


def test_a_picture_is_encoded_once_by_the_whole_fleet(fleet: RunningFleet) -> None:
    client = fleet.client()
    for seed in range(6):
        asked = [ask(client, [picture(seed), {"type": "text", "text": f"{n}?"}]) for n in range(3)]
        encoders = [receipt(answer)["items"][0]["encoder"] for answer, _ in asked]
        assert encoders.count("miss") == 1
        assert len({headers["x-lookonce-engine"] for _, headers in asked}) == 1


def test_tenants_are_apart(fleet: RunningFleet) -> None:
    ask(fleet.client("key-one"), [picture(50)])
    other, _ = ask(fleet.client("key-two"), [picture(50)])
    assert receipt(other)["items"][0]["processor"] == "miss"
    assert receipt(other)["prefix_cached_tokens"] == 0
    with pytest.raises(openai.AuthenticationError):
        ask(fleet.client("wrong"), "hello")


def test_streams_tools_uuids_and_models(fleet: RunningFleet) -> None:
    client = fleet.client()
    messages: Any = [{"role": "user", "content": "hello"}]
    stream = client.chat.completions.create(
        model="nano", messages=messages, stream=True, max_tokens=8
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert [model.id for model in client.models.list()] == ["nano"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    called, _ = ask(client, "call it", tools=[tool], tool_choice="required", max_tokens=64)
    assert called.choices[0].message.tool_calls
    named = picture(60) | {"uuid": "sixty"}
    first, headers = ask(client, [named])
    bare, again = ask(client, [{"type": "image_url", "image_url": None, "uuid": "sixty"}])
    assert again["x-lookonce-engine"] == headers["x-lookonce-engine"]
    assert bare.choices[0].message.content == first.choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages)


def test_a_client_that_leaves_ends_its_request(fleet: RunningFleet) -> None:
    client = fleet.client()
    messages: Any = [{"role": "user", "content": "count"}]
    stream = client.chat.completions.create(
        model="nano",
        messages=messages,
        stream=True,
        max_tokens=400,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    until(lambda: all(engine["requests"] == 0 for engine in fleet.engines()), 60)


class Bystanders:
    """Clients that ask all the time, and what went wrong for them."""

    def __init__(
        self, fleet: RunningFleet, number: int = 4, retries: int = 0, max_tokens: int = 8
    ) -> None:
        self._max_tokens = max_tokens
        self.failures: list[str] = []
        self.answered = 0
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(fleet.client(max_retries=retries), n))
            for n in range(number)
        ]

    def __enter__(self) -> Bystanders:
        for thread in self._threads:
            thread.start()
        until(lambda: self.answered >= 2, 60)
        return self

    def __exit__(self, *_: object) -> None:
        answered = self.answered
        until(lambda: self.answered >= answered + 4 or self.failures, 60)
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, client: openai.OpenAI, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            try:
                content = [picture(100 + number), {"type": "text", "text": f"{turn}?"}]
                ask(client, content, max_tokens=self._max_tokens)
                self.answered += 1
            except openai.OpenAIError as error:
                self.failures.append(repr(error))


def test_engines_come_and_go_without_a_failed_request(fleet: RunningFleet) -> None:
    with Bystanders(fleet) as bystanders:
        for number in (2, 4, 2):
            fleet.scale(number)
            fleet.until_engines(number)
    assert bystanders.failures == []


def test_front_ends_that_render_take_the_place_of_others_and_no_engine_is_replaced(
    fleet: RunningFleet,
) -> None:
    before = {engine["name"] for engine in fleet.engines()}
    old = set(fleet.pids(FRONT_END))

    def all_render() -> bool:
        if old & set(fleet.pids(FRONT_END)):
            return False  # it drains, and may yet be asked
        with contextlib.suppress(httpx.HTTPError):
            looks = [httpx.get(f"{fleet.url}/metrics").text for _ in range(8)]
            return all("lookonce_fleet_rendered_total" in text for text in looks)
        return False

    with Bystanders(fleet) as bystanders:
        fleet.scale(len(before), renders=True)
        until(all_render, 300)
    assert bystanders.failures == []
    assert {engine["name"] for engine in fleet.engines()} == before
    answer, headers = ask(fleet.client(), [picture(70), {"type": "text", "text": "what?"}])
    (engine,) = {headers["x-lookonce-engine"]} & before
    exact = headers["x-lookonce-route"].partition("prompt ")[2].partition(";")[0]
    assert answer.usage is not None
    assert int(exact.partition("/")[2]) == answer.usage.prompt_tokens
    assert engine


def test_a_rolling_update_fails_no_request(fleet: RunningFleet) -> None:
    before = {engine["name"] for engine in fleet.engines()}
    with Bystanders(fleet) as bystanders:
        fleet.scale(2, seqs=6, max_engines=3, target_wait=1000.0, **DELAYS)
        until(lambda: not before & {e["name"] for e in fleet.engines()}, 300)
        fleet.until_engines(2)
    assert bystanders.failures == []


def test_a_queue_that_costs_too_much_gets_another_engine(fleet: RunningFleet) -> None:
    before = {engine["name"] for engine in fleet.engines()}
    with Bystanders(fleet, number=6, max_tokens=64) as bystanders:
        fleet.scale(2, seqs=6, max_engines=3, target_wait=0.0005, **DELAYS)
        fleet.until_engines(3)
        assert before < {engine["name"] for engine in fleet.engines()}
    fleet.until_engines(2)
    fleet.scale(2, seqs=6, max_engines=3, target_wait=1000.0, **DELAYS)
    assert bystanders.failures == []


@pytest.mark.parametrize(
    "command", ["ray::ServeReplica:lookonce:Engine", "lookonce.cli.main serve"]
)
def test_a_killed_engine_is_replaced_and_no_whole_answer_fails(
    fleet: RunningFleet, command: str
) -> None:
    before = {engine["name"] for engine in fleet.engines()}
    with Bystanders(fleet) as bystanders:
        os.kill(fleet.pids(command)[0], signal.SIGKILL)
        until(lambda: {e["name"] for e in fleet.engines()} - before, 300)
        fleet.until_engines(len(before))
    assert bystanders.failures == []


def test_an_engine_that_hangs_is_replaced_and_no_whole_answer_fails(fleet: RunningFleet) -> None:
    before = {engine["name"] for engine in fleet.engines()}
    server = fleet.pids("lookonce.cli.main serve")[0]
    stopped = [pid for pid in fleet.pids("lookonce") if os.getsid(pid) == server]
    assert len(stopped) >= 3  # the server, an API process and the one that computes
    with Bystanders(fleet) as bystanders:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: {e["name"] for e in fleet.engines()} - before, 300)
        fleet.until_engines(len(before))
    assert bystanders.failures == []
    until(lambda: not any(map(is_running, stopped)), 60)


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_killed_front_end_is_replaced_and_the_other_serves(fleet: RunningFleet) -> None:
    """Its own connections end: clients that ask again are served."""
    front_ends = fleet.pids(FRONT_END)
    assert len(front_ends) == 2
    with Bystanders(fleet, retries=5) as bystanders:
        os.kill(front_ends[0], signal.SIGKILL)
        until(lambda: len(fleet.pids(FRONT_END)) == 2, 120)
    assert bystanders.failures == []


def test_the_example_for_kuberay_is_what_serve_takes() -> None:
    from ray.serve.schema import ServeDeploySchema

    from lookonce.cli.fleet import build

    service, _ = yaml.safe_load_all(EXAMPLE.read_text())
    serve = ServeDeploySchema.parse_obj(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert build(serve.applications[0].args) is not None
