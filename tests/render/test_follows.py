"""Messages of a session are rendered as what the whole conversation has after those before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lookonce.render.prompt.encoder import ChatOptions
from lookonce.render.renderer import Renderer
from tests.support.model.chats import make_renderer

FIRST = [{"role": "user", "content": "What is this?"}]
ANSWER = {"role": "assistant", "content": "A red square."}
NEXT = [{"role": "user", "content": "And its side?"}]
UNANSWERED = ChatOptions(add_generation_prompt=False)


def rendered_text(renderer: Renderer, messages: Sequence[object], **options: object) -> str:
    return asyncio.run(renderer.render_chat(messages, **options)).text


@pytest.fixture(
    scope="module", params=["llama", "mistral", "qwen2", "qwen3", "gemma2", "qwen2_5_vl"]
)
def renderer(request, folder) -> Renderer:
    return make_renderer(folder(request.param))


def test_a_turn_after_an_answer_is_the_rest_of_the_conversation(renderer: Renderer) -> None:
    whole = rendered_text(renderer, [*FIRST, ANSWER, *NEXT])
    opening = rendered_text(renderer, FIRST)
    rest = rendered_text(renderer, NEXT, follows="answer")
    said = whole[len(opening) : len(whole) - len(rest)]
    assert whole == opening + said + rest
    assert said.strip() == ANSWER["content"]


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_5_vl"])
def test_a_message_after_a_message_too(folder, kind: str) -> None:
    renderer = make_renderer(folder(kind))
    opening = rendered_text(renderer, FIRST, options=UNANSWERED)
    rest = rendered_text(renderer, NEXT, follows="message")
    assert opening + rest == rendered_text(renderer, [*FIRST, *NEXT])


def test_a_message_that_says_what_stands_for_the_answer_is_rendered_whole(folder) -> None:
    renderer = make_renderer(folder("qwen2"))
    message = [{"role": "user", "content": "a So it was 7e1c. b"}]
    rest = rendered_text(renderer, message, follows="answer")
    plain = rendered_text(renderer, [{"role": "user", "content": "a b"}], follows="answer")
    assert rest == plain.replace("a b", "a So it was 7e1c. b")
