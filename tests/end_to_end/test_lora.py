"""Adapters on a real server with two API processes, asked by the OpenAI client."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import openai
import pytest

from lookonce.config import NANO_FOLDER, ModelConfig
from lookonce.model.loader import load_model
from tests.support.drawing import ask, picture
from tests.support.live_server import LiveServer, until
from tests.support.model.adapters import PROJECTIONS, another, make_adapter

CHANGES = 4
TEXT = [{"role": "user", "content": "Tell me about red circles"}]
SQUARE, CIRCLE = picture(("red", "square")), picture(("blue", "circle"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Path:
    root: Path = tmp_path_factory.mktemp("adapters")
    loaded = load_model(ModelConfig(folder=str(NANO_FOLDER), served_name="nano"))
    text = rf".*language_model\.layers.*\.({'|'.join(PROJECTIONS)})"
    make_adapter(NANO_FOLDER, loaded, root / "text", target_modules=text)
    another(root / "text", root / "other")
    shutil.copytree(root / "text", root / "going")
    make_adapter(NANO_FOLDER, loaded, root / "whole", target_modules="all-linear", strength=0.1)
    broken = root / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{")
    return root


@pytest.fixture(scope="module")
def server(adapters):
    options = ["--lora", f"kept={adapters / 'text'}", "--lora", f"going={adapters / 'going'}"]
    options += ["--lora-dir", str(adapters)]
    with LiveServer(*options, "--api-processes", "2", "--max-loras", "4") as live:
        yield live


async def say(client, model, messages=TEXT, **options):
    answer = await client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=12, **options
    )
    assert answer.model == model
    return answer.choices[0].message.content


def test_bystanders_do_not_notice_loads_and_unloads(server):
    """With every load and unload a new name is served, or not, by both API processes at once."""

    async def bystander(client, model, messages, expected, ended):
        count = 0
        while not ended.is_set():
            assert await say(client, model, messages) == expected
            count += 1
        return count

    async def connect_anew(model):
        async with server.async_client() as client:
            return await say(client, model)

    async def changes(ended):
        for turn in range(CHANGES):
            name = ("text", "other")[turn % 2]
            loaded = await asyncio.to_thread(
                server.post,
                "/v1/load_lora_adapter",
                {"lora_name": "moving", "lora_path": name},
            )
            assert loaded.status_code == 200, loaded.text
            said = await asyncio.gather(*(connect_anew("moving") for _ in range(6)))
            assert len(set(said)) == 1
            refused = await asyncio.to_thread(
                server.post, "/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": "broken"}
            )
            assert refused.status_code == 400
            assert "adapter_config.json" in refused.json()["error"]["message"]
            gone = await asyncio.to_thread(
                server.post, "/v1/unload_lora_adapter", {"lora_name": "moving"}
            )
            assert gone.status_code == 200, gone.text
            for _ in range(4):
                with pytest.raises(openai.NotFoundError, match="moving"):
                    await connect_anew("moving")
        ended.set()

    async def scenario():
        async with server.async_client() as client:
            question = ask(SQUARE, "What is in the picture?")
            asked = [("nano", TEXT), ("kept", TEXT), ("nano", question), ("kept", question)]
            expected = [await say(client, *each) for each in asked]
            assert expected[0] != expected[1]
            ended = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(bystander(client, *each, said, ended))
                    for each, said in zip(asked, expected, strict=True)
                ]
                group.create_task(changes(ended))
            assert all(task.result() > 0 for task in tasks)

    asyncio.run(scenario())
    assert server.metrics()["lora_adapters_loaded"] == 2


def test_an_adapter_of_the_whole_model_encodes_a_picture_anew_and_processes_nothing(server):
    loaded = server.post("/v1/load_lora_adapter", {"lora_name": "whole", "lora_path": "whole"})
    assert loaded.status_code == 200, loaded.text
    question = {"messages": ask(CIRCLE, "What is in the picture?"), "reuse_receipt": True}

    def items(model):
        body = {**question, "model": model, "max_tokens": 4, "temperature": 0}
        (item,) = server.post("/v1/chat/completions", body).json()["reuse_receipt"]["items"]
        return item["processor"], item["encoder"]

    assert items("nano") == ("miss", "miss")
    assert items("kept")[1] == "hit"
    processor, encoder = items("whole")
    assert processor in ("hit", "shared")
    assert encoder == "miss"
    assert items("whole")[1] in ("hit", "skipped")
    models = {model.id: model.parent for model in server.client().models.list()}
    assert models == {"nano": None, "kept": "nano", "going": "nano", "whole": "nano"}


def test_an_engine_that_was_killed_has_its_adapters_again(server, adapters):
    """Without one whose folder was broken meanwhile, and with a word on one that was changed."""

    def names():
        with server.client() as client:
            return {model.id for model in client.models.list()}

    before = names()
    assert before == {"nano", "kept", "going", "whole"}
    (adapters / "going" / "adapter_config.json").write_text("{")
    another(adapters / "whole", adapters / "changed")
    for file in (adapters / "changed").iterdir():
        file.replace(adapters / "whole" / file.name)
    pid = server.engine_pid()
    os.kill(pid, signal.SIGKILL)
    until(lambda: server.engine_pid() not in (None, pid), 60, server.log)
    until(lambda: server.get("/ready").status_code == 200, 60, server.log)
    until(lambda: names() == before - {"going"}, 30, server.log)
    assert "the adapter going is not served any more: " in server.log()
    changed = "the adapter whole has other contents than before the engine started anew"
    until(lambda: changed in server.log(), 30, server.log)
    assert "the adapter kept has other contents" not in server.log()
    asked = server.post("/v1/chat/completions", {"model": "going", "messages": TEXT})
    assert asked.status_code == 404
    for model in ("kept", "whole"):
        body = {"model": model, "messages": TEXT, "max_tokens": 2}
        until(
            lambda body=body: server.post("/v1/chat/completions", body).status_code == 200,
            30,
            server.log,
        )
