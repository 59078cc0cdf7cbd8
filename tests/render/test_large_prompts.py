"""What fits no model is refused before any of it is converted; what is large holds up no one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lookonce.errors import BadRequestError
from lookonce.render.prompt.messages import FEW_VALUES
from tests.render.test_renderer import Kitchen, text, user

CONTEXT = 4096
WRONG = {"role": "wizard", "content": "no message: the first to be converted would be refused"}
OUTSIDE = 1 << 30
"""A token id that no vocabulary has."""


@pytest.fixture(scope="module")
def kitchen():
    return Kitchen(max_model_len=CONTEXT)


CALLS = {"role": "assistant", "tool_calls": [{}] * (CONTEXT + 1)}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([WRONG, *[user()] * CONTEXT], "messages"),
        ([WRONG, user(*[text("")] * CONTEXT, text(""))], "messages[1].content"),
        ([WRONG, user(*[text("")] * CONTEXT), user(text(""))], "messages[2].content"),
        ([WRONG, CALLS], "messages[1].tool_calls"),
    ],
)
def test_more_messages_or_parts_than_tokens_are_refused_unread(kitchen, messages, param):
    with pytest.raises(BadRequestError, match=str(CONTEXT)) as caught:
        kitchen.chat(*messages)
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


def test_token_ids_that_do_not_fit_are_not_looked_at(kitchen):
    with pytest.raises(BadRequestError) as caught:
        kitchen.completion([OUTSIDE] * CONTEXT)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


class Watched(dict):
    """A message, or a template's variable, that notes which threads read it."""

    threads: set[int]

    def items(self):
        self.threads.add(threading.get_ident())
        return super().items()


@pytest.mark.parametrize(("extra", "on_the_loop"), [(0, True), (FEW_VALUES, False)])
@pytest.mark.parametrize("heavy", ["messages", "chat_template_kwargs"])
def test_only_a_large_chat_is_converted_and_rendered_beside_the_loop(
    kitchen, heavy, extra, on_the_loop
):
    Watched.threads = set()
    many = {"many": [1] * extra}
    message = Watched(user(text("Hello")), **(many if heavy == "messages" else {}))
    variables = Watched(many if heavy == "chat_template_kwargs" else {})

    async def scenario() -> int:
        options = {"chat_template_kwargs": variables}
        await kitchen.renderer.render_chat([message], options=options)
        return threading.get_ident()

    loop_thread = asyncio.run(scenario())
    assert Watched.threads
    assert (loop_thread in Watched.threads) == on_the_loop
