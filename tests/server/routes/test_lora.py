"""Adapters over HTTP: by model name, loaded and unloaded while the server runs."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from lookonce.config import ModelConfig
from lookonce.engine.client.engine_client import EngineClient
from lookonce.model.loader import load_model
from tests.support.model.adapters import make_adapter
from tests.support.nodes import engine_node, run

ADMIN, USER = "ops:admin-key:admin", "shop:user-key"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """A folder with two adapters of the same model, a link out of it, and a secret beside it."""
    root = tmp_path_factory.mktemp("adapters")
    loaded = load_model(ModelConfig(folder=str(folder("qwen3")), served_name="m"))
    for seed, name in enumerate(("one", "two")):
        make_adapter(folder("qwen3"), loaded, root / "beneath" / name, seed=seed)
    shutil.copytree(root / "beneath" / "one", root / "outside")
    (root / "beneath" / "link").symlink_to(root / "outside")
    return root / "beneath"


def on_node(folder, scenario, **options):
    async def serve():
        async with engine_node(folder("qwen3"), **options) as node:
            await scenario(node)

    run(serve())


def body(model=None, **options):
    asked = {"prompt": "Tell me about this please", "temperature": 0, "max_tokens": 8}
    asked = {**asked, "ignore_eos": True, "reuse_receipt": True, **options}
    return asked if model is None else {**asked, "model": model}


async def ask(node, model=None, **options):
    answer = await node.ok("/v1/completions", body(model, **options))
    assert answer["model"] == (model or "m")
    return answer["choices"][0]["text"]


def test_requests_name_adapters_as_models(folder, adapters, monkeypatch):
    async def scenario(node):
        models = (await node.http.get("/v1/models")).json()["data"]
        assert [(m["id"], m["parent"]) for m in models] == [("m", None), ("a", "m"), ("b", "m")]
        assert (await node.http.get("/v1/models/b")).json()["parent"] == "m"
        said = [await ask(node, name) for name in (None, "a", "b")]
        assert len(set(said)) == 3
        together = await asyncio.gather(*(ask(node, name) for name in (None, "a", "b")))
        assert list(together) == said
        missing = await node.post("/v1/completions", body("c"))
        assert missing.status_code == 404
        assert "'c'" in missing.json()["error"]["message"]
        nothing = await node.post(LOAD, {"lora_name": "x", "lora_path": ""})
        assert nothing.status_code in (400, 403)
        # As long as the engine has not told its adapters, nobody knows that there is no such one.
        monkeypatch.setattr(EngineClient, "state", property(lambda _: "starting"))
        assert (await node.post("/v1/completions", body("c"))).status_code == 503

    on_node(folder, scenario, lora=(f"a={adapters / 'one'}", f"b={adapters / 'two'}"))


def test_the_same_name_with_other_contents_reuses_nothing(folder, adapters):
    async def scenario(node):
        assert (await node.post(LOAD, {"lora_name": "a", "lora_path": "one"})).status_code == 200
        one = await ask(node, "a")
        again = await node.ok("/v1/completions", body("a"))
        assert again["reuse_receipt"]["prefix_cached_tokens"] > 0
        taken = await node.post(LOAD, {"lora_name": "a", "lora_path": "two"})
        assert taken.status_code == 400
        replaced = {"lora_name": "a", "lora_path": "two", "load_inplace": True}
        assert (await node.post(LOAD, replaced)).status_code == 200
        two = await node.ok("/v1/completions", body("a"))
        assert two["choices"][0]["text"] != one
        assert two["reuse_receipt"]["prefix_cached_tokens"] == 0
        back = {"lora_name": "other", "lora_path": "one"}
        assert (await node.post(LOAD, back)).status_code == 200
        assert await ask(node, "other") == one

    on_node(folder, scenario, lora_dir=str(adapters))


def test_an_adapter_is_unloaded_while_requests_run_with_it(folder, adapters):
    async def scenario(node):
        whole = asyncio.create_task(node.ok("/v1/completions", body("a", max_tokens=400)))
        while not (await node.engine.stats())["lora_requests_running"]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        gone = await node.post(UNLOAD, {"lora_name": "a"})
        assert gone.text == "Success: LoRA adapter 'a' removed successfully."
        assert (await node.post("/v1/completions", body("a"))).status_code == 404
        assert not whole.done()
        assert (await whole)["usage"]["completion_tokens"] == 400
        figures = await node.figures()
        assert figures["lora_adapters_loaded"] == 0
        assert figures["lora_requests_running"] == 0
        assert (await node.post(UNLOAD, {"lora_name": "a"})).status_code == 404

    on_node(folder, scenario, lora=(f"a={adapters / 'one'}",), lora_dir=str(adapters))


@pytest.mark.parametrize("path", ["../outside", "link", "none", "one\0", "/etc", "x" * 5000])
def test_a_client_loads_nothing_from_elsewhere(folder, adapters, path):
    async def scenario(node):
        answer = await node.post(LOAD, {"lora_name": "a", "lora_path": path})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert str(adapters.parent) not in message
        assert answer.json()["error"]["param"] == "lora_path"

    on_node(folder, scenario, lora_dir=str(adapters))


def test_loading_needs_an_admin_key_and_using_any_key(folder, adapters):
    async def scenario(node):
        asked = {"lora_name": "a", "lora_path": str(adapters / "one")}
        assert (await node.post(LOAD, asked, key="user-key")).status_code == 403
        assert (await node.post(UNLOAD, {"lora_name": "a"}, key="user-key")).status_code == 403
        answer = await node.post(LOAD, asked, key="admin-key")
        assert answer.text == "Success: LoRA adapter 'a' added successfully."
        assert (await node.post("/v1/completions", body("a"), key="user-key")).status_code == 200
        named = await node.post(LOAD, {**asked, "lora_name": "m"}, key="admin-key")
        assert named.status_code == 400

    on_node(folder, scenario, lora_dir=str(adapters), api_key=(ADMIN, USER))


def test_without_a_folder_nothing_is_loaded(folder, adapters):
    async def scenario(node):
        asked = {"lora_name": "b", "lora_path": str(adapters / "two")}
        refused = await node.post(LOAD, asked)
        assert refused.status_code == 403
        assert "--lora-dir" in refused.json()["error"]["message"]
        assert (await node.post(UNLOAD, {"lora_name": "a"})).status_code == 403

    on_node(folder, scenario, lora=(f"a={adapters / 'one'}",))
