"""The request log: what it tells, and that it tells no content."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path

import numpy as np

from lookonce.config import RequestLogConfig
from lookonce.server.request_log import RequestLog
from lookonce.simulate.trace import read_trace, token_ids
from lookonce.types.media import MediaFeature
from lookonce.types.request import RenderedPrompt
from tests.support.drawing import image_part, text_part
from tests.support.model.cases import picture
from tests.support.nodes import engine_node, run
from tests.support.server.media import chat, encoded


def log_at(folder: Path) -> RequestLog:
    return RequestLog(RequestLogConfig(str(folder / "log"), secrets.token_hex(32)))


def prompt(*tokens: int, scope: bytes = b"a", picture: bytes | None = None) -> RenderedPrompt:
    features = () if picture is None else (MediaFeature(picture, "image", 2, 3, 3),)
    return RenderedPrompt(list(tokens), features, scope=scope)


def leading(one: bytes, other: bytes) -> int:
    """Digests that two prompts share."""
    first, second = np.frombuffer(one, "<u8"), np.frombuffer(other, "<u8")
    same = first[: min(len(first), len(second))] == second[: min(len(first), len(second))]
    return int(np.argmin(same)) if not same.all() else len(same)


def test_digests_are_shared_as_far_as_prompts_of_one_scope_are(tmp_path: Path) -> None:
    with log_at(tmp_path) as log:
        known = log.blocks(prompt(*range(40)), [7, 8])
        assert len(known) == 8 * 3
        assert leading(known, log.blocks(prompt(*range(40), 7), [8])) == 3
        assert leading(known, log.blocks(prompt(*range(40), 9), [])) == 2
        assert leading(known, log.blocks(prompt(*range(40), scope=b"b"), [7, 8])) == 0
        adapted = prompt(*range(40))
        adapted.lora_name = "a"
        assert leading(known, log.blocks(adapted, [7, 8])) == 0
        pictured = log.blocks(prompt(*range(40), picture=b"p" * 32), [7, 8])
        assert leading(known, pictured) == 0
        assert leading(pictured, log.blocks(prompt(*range(40), picture=b"p" * 32), [7, 8])) == 3
    with log_at(tmp_path) as other:
        assert leading(known, other.blocks(prompt(*range(40)), [7, 8])) == 0, "another secret"


def test_each_request_is_a_line_that_the_simulation_reads(on_site, tmp_path):
    path = tmp_path / "log"

    async def scenario(site):
        with RequestLog(site.services.config.server.request_log) as log:
            site.services.request_log = log
            assert (await site.chat("my secret words " * 9)).status_code == 200
            assert (await site.chat("my secret words " * 9, max_tokens=3)).status_code == 200
            assert (await site.chat("other", stream=True)).status_code == 200
            refused = await site.chat("refused", temperature=-5)
            assert refused.status_code == 400

    on_site(scenario, request_log=str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    written = path.read_text()
    assert "secret" not in written
    lines = list(map(json.loads, written.splitlines()))
    assert len(lines) == 3, "what is refused has no prompt"
    assert all(0 < line["first_token"] <= line["seconds"] for line in lines)
    first, second, third = read_trace(path)
    assert first.prompt_tokens == second.prompt_tokens > third.prompt_tokens
    assert second.output_tokens == 3
    shared = token_ids(first)[: first.prompt_tokens // 16 * 16]
    assert np.array_equal(shared, token_ids(second)[: len(shared)])


def test_media_are_told_with_their_bytes_and_pixels(folder, tmp_path):
    shown = picture(1, 120, 80)
    part = image_part(shown)

    async def scenario():
        async with engine_node(folder("qwen2_5_omni")) as node:
            with log_at(tmp_path) as node.services.request_log:
                await node.ok("/v1/chat/completions", chat(part))
                await node.ok("/v1/chat/completions", chat(text_part("again"), part))

    run(scenario())
    first, second = map(json.loads, (tmp_path / "log").read_text().splitlines())
    (medium,), (again,) = first["media"], second["media"]
    assert medium["num_bytes"] == again["num_bytes"] == len(encoded(part)[1])
    assert medium["pixels"] == again["pixels"] == 120 * 80
    assert medium["key"] == again["key"]
    assert medium["offset"] < again["offset"]


def test_without_the_option_nothing_is_kept(on_site):
    async def scenario(site):
        assert site.services.config.server.request_log is None
        assert (await site.chat("hello")).status_code == 200

    on_site(scenario)


def test_a_full_disk_breaks_one_line_alone(on_site, tmp_path, monkeypatch):
    path = tmp_path / "log"

    async def scenario(site):
        with RequestLog(site.services.config.server.request_log) as log:
            site.services.request_log = log
            assert (await site.chat("one")).status_code == 200
            write = os.write
            with monkeypatch.context() as full:
                full.setattr(os, "write", lambda file, line: write(file, line[: len(line) // 2]))
                assert (await site.chat("two")).status_code == 200
            assert (await site.chat("three")).status_code == 200
            assert (await site.chat("four")).status_code == 200

    on_site(scenario, request_log=str(path))
    first, torn, third, fourth = (line for line in path.read_text().splitlines() if line)
    for whole in (first, third, fourth):
        assert json.loads(whole)["prompt_tokens"]
    assert not torn.endswith("}")
