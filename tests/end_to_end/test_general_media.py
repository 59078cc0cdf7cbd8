"""A model with media that has no family of its own, on a real server. `make test-models` runs it:
in `make test`, tests/model/test_general_media.py has it in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForMultimodalLM, AutoTokenizer

from tests.support.live_server import LiveServer
from tests.support.model.cases import ALL_MODELS, picture
from tests.support.model.chats import reference, sent_part
from tests.support.model.films import film_part, film_reference

pytestmark = pytest.mark.skipif(not ALL_MODELS, reason="`make test-models` runs it")
NUM_TOKENS = 12
PARTS = ("See ", picture(1), " what is it?")


@pytest.fixture(scope="module")
def path(folder):
    return folder("media:internvl")


@pytest.fixture(scope="module")
def server(path) -> Iterator[LiveServer]:
    with LiveServer(str(path), "--max-model-len", "512") as live:
        yield live


def ask(server: LiveServer):
    body = {
        "messages": [{"role": "user", "content": [sent_part(part) for part in PARTS]}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "reuse_receipt": True,
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def text_of_transformers(path, inputs) -> str:
    model = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        found = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    tokens = found[0, inputs["input_ids"].shape[1] :]
    return AutoTokenizer.from_pretrained(path).decode(tokens, skip_special_tokens=True)


def test_a_picture_is_answered_as_by_transformers_and_looked_at_once(server, path):
    first, second = ask(server), ask(server)
    assert first["choices"][0]["message"]["content"] == text_of_transformers(
        path, reference(path, PARTS)
    )
    assert first["choices"] == second["choices"]
    (cold,), (warm,) = (each["reuse_receipt"]["items"] for each in (first, second))
    assert (cold["processor"], cold["encoder"]) == ("miss", "miss")
    assert warm["processor"] in ("hit", "not_needed")
    assert warm["encoder"] in ("skipped", "hit")
    assert warm["decode_ms"] == 0
    assert server.metrics()["media_processed_total:image"] == 1


def test_a_longer_cut_of_a_film_costs_its_new_frames(server, path):
    """By OpenAI's client; frame by frame, for a film is a picture for each."""
    client = server.client()
    before = server.metrics()
    found = []
    for count in (4, 6):
        content = [
            {"type": "text", "text": "See: "},
            film_part(range(count)),
            {"type": "text", "text": " what is it?"},
        ]
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=NUM_TOKENS,
            extra_body={"ignore_eos": True, "reuse_receipt": True},
        )
        expected = film_reference(path, "See: ", range(count), " what is it?")
        assert answer.choices[0].message.content == text_of_transformers(path, expected)
        found.append(answer.model_extra["reuse_receipt"]["film_frames"])
    assert found == [
        {"total": 4, "processed": 4, "encoded": 4},
        {"total": 6, "processed": 2, "encoded": 2},
    ]
    after = server.metrics()
    for name in ("media_decodes_total:video", "media_processed_total:video", "encoder_runs_total"):
        assert after[name] - before.get(name, 0) == 6, name
