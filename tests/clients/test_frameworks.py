"""Frameworks that speak OpenAI's API, unmodified, against the real server.

`make test-clients` installs them, from `requirements.txt` beside this file.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from tests.support.drawing import ask, encoded, picture

pytestmark = pytest.mark.filterwarnings("ignore")
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

SHAPE = "What shape is red?"
PNG = encoded(picture(("red", "circle")))


def needs(module: str) -> pytest.MarkDecorator:
    """Skips before the server is started."""
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        found = False
    return pytest.mark.skipif(not found, reason=f"{module} is not installed")


class Point(BaseModel):
    """A point on a line."""

    x: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def address(server):
    return f"{server.url}/v1"


# --- instructor -------------------------------------------------------------------------------


@pytest.fixture
def instructed(address):
    """Makes a client of a mode."""

    def make(mode):
        import instructor
        import openai

        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        return instructor.from_openai(client, mode=instructor.Mode[mode])

    return make


@needs("instructor")
@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "MD_JSON"])
def test_instructor_gets_a_model_in_its_modes(instructed, mode):
    # nano cannot be asked for a code block in words: a regular expression makes it write one.
    block = {"structured_outputs": {"regex": '```json\\n\\{"x": [0-9]\\}\\n```'}}
    point = instructed(mode).chat.completions.create(
        model="nano", response_model=Point, messages=ask("Say apple."), max_tokens=200,
        max_retries=0, extra_body=block if mode == "MD_JSON" else None,
    )  # fmt: skip
    assert 0 <= point.x <= 9


@needs("instructor")
def test_instructor_gets_a_model_from_any_json(instructed):
    class Whatever(BaseModel):
        """What nano writes fits it, if it is an object."""

    answer = instructed("JSON").chat.completions.create(
        model="nano", response_model=Whatever, messages=ask("Say apple."), max_tokens=200,
        max_retries=0,
    )  # fmt: skip
    assert isinstance(answer, Whatever)


@needs("instructor")
def test_instructor_gets_models_by_parallel_calls_and_streamed(instructed):
    fields = {"model": "nano", "messages": ask("Say apple."), "max_retries": 0, "max_tokens": 200}
    client = instructed("PARALLEL_TOOLS").chat.completions
    required = {
        "tool_choice": "required"
    }  # instructor leaves it to the model, and nano to a grammar
    points = list(client.create(response_model=Iterable[Point], extra_body=required, **fields))
    assert points
    assert all(0 <= point.x <= 9 for point in points)
    client = instructed("JSON_SCHEMA").chat.completions
    partial = list(client.create_partial(response_model=Point, **fields))
    assert 0 <= partial[-1].x <= 9


@needs("instructor")
def test_instructor_gets_a_model_from_responses(instructed):
    client = instructed("RESPONSES_TOOLS").responses
    point = client.create(
        model="nano", input="Say apple.", response_model=Point, max_output_tokens=200, max_retries=0
    )
    assert 0 <= point.x <= 9


# --- OpenAI's Agents SDK ----------------------------------------------------------------------


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def agents_model(request, address):
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0)
    return getattr(agents, request.param)("nano", client)


@needs("agents")
def test_agents_sdk_calls_a_tool_and_goes_on(agents_model):
    import agents

    asked = []

    @agents.function_tool
    def get_point(x: Literal[1, 2, 3]) -> str:
        """A point on a line."""
        asked.append(x)
        return "apple"

    settings = agents.ModelSettings(
        tool_choice="required", parallel_tool_calls=False, max_tokens=200, temperature=0
    )
    agent = agents.Agent("looker", model=agents_model, tools=[get_point], model_settings=settings)
    result = agents.Runner.run_sync(agent, "Say apple.", max_turns=4)
    assert asked
    assert set(asked) <= {1, 2, 3}
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert kinds[-1] == "message_output_item"


@needs("agents")
def test_agents_sdk_streams_and_gets_a_model(agents_model):
    import agents

    settings = agents.ModelSettings(max_tokens=200, temperature=0)
    pointer = agents.Agent("p", model=agents_model, output_type=Point, model_settings=settings)

    async def scenario():  # in one event loop: the client's connections belong to it
        result = agents.Runner.run_streamed(agents.Agent("sayer", model=agents_model), "Say apple.")
        events = [event.type async for event in result.stream_events()]
        point = await agents.Runner.run(pointer, "Say apple.")
        return events, result.final_output, point.final_output

    events, said, point = asyncio.run(scenario())
    assert "raw_response_event" in events
    assert said == "apple"
    assert 0 <= point.x <= 9


# --- LlamaIndex -------------------------------------------------------------------------------


@pytest.fixture
def llama(address):
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model="nano", api_base=address, api_key="none", is_chat_model=True, max_retries=0,
        is_function_calling_model=True, max_tokens=200, temperature=0, context_window=4096,
    )  # fmt: skip


@needs("llama_index.llms.openai_like")
def test_llama_index_asks_about_a_picture(llama):
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

    blocks = [ImageBlock(image=PNG, image_mimetype="image/png"), TextBlock(text=SHAPE)]
    answer = llama.chat([ChatMessage(role="user", blocks=blocks)])
    assert answer.message.content == "the circle"


@needs("llama_index.llms.openai_like")
def test_llama_index_streams(llama):
    from llama_index.core.llms import ChatMessage

    pieces = llama.stream_chat([ChatMessage(role="user", content="Say apple.")])
    assert "".join(piece.delta or "" for piece in pieces) == "apple"


@needs("llama_index.llms.openai_like")
def test_llama_index_gets_a_model(llama):
    from llama_index.core.prompts import PromptTemplate

    point = llama.structured_predict(Point, PromptTemplate("Say apple."))
    assert 0 <= point.x <= 9


# --- pydantic-ai ------------------------------------------------------------------------------


@pytest.fixture
def agent_of(address):
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("nano", provider=OpenAIProvider(base_url=address, api_key="none"))

    def make(**fields):
        settings = {"max_tokens": 200, "temperature": 0}
        return pydantic_ai.Agent(model, model_settings=settings, **fields)

    return make


@needs("pydantic_ai")
def test_pydantic_ai_asks_about_a_picture(agent_of):
    from pydantic_ai import BinaryContent

    answer = agent_of().run_sync([BinaryContent(PNG, media_type="image/png"), SHAPE])
    assert answer.output == "the circle"


@needs("pydantic_ai")
def test_pydantic_ai_gets_a_model_by_a_tool_and_natively(agent_of):
    from pydantic_ai import NativeOutput

    for output in (Point, NativeOutput(Point)):
        assert 0 <= agent_of(output_type=output).run_sync("Say apple.").output.x <= 9


# --- smolagents -------------------------------------------------------------------------------


@pytest.fixture
def smol(address):
    import smolagents

    return smolagents.OpenAIModel("nano", api_base=address, api_key="none", max_tokens=200)


@needs("smolagents")
def test_smolagents_asks_about_a_picture(smol):
    content = [
        {"type": "image", "image": picture(("red", "circle"))},
        {"type": "text", "text": SHAPE},
    ]
    assert smol.generate([{"role": "user", "content": content}]).content == "the circle"


@needs("smolagents")
def test_smolagents_calls_a_tool_and_streams(smol):
    from smolagents import tool

    @tool
    def get_weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        return city

    messages = [{"role": "user", "content": [{"type": "text", "text": "Say apple."}]}]
    answer = smol.generate(messages, tools_to_call_from=[get_weather], parallel_tool_calls=False)
    assert answer.tool_calls[0].function.name == "get_weather"
    said = "".join(piece.content or "" for piece in smol.generate_stream(messages))
    assert said == "apple"


# --- Haystack ---------------------------------------------------------------------------------


@pytest.fixture
def haystack(address):
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.utils import Secret

    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"), model="nano", api_base_url=address, max_retries=0,
        generation_kwargs={"max_tokens": 200},
    )  # fmt: skip


@needs("haystack")
def test_haystack_asks_about_a_picture_and_streams(haystack):
    from haystack.dataclasses import ChatMessage, ImageContent

    image = ImageContent(base64.b64encode(PNG).decode(), mime_type="image/png")
    pieces = []
    answer = haystack.run(
        [ChatMessage.from_user(content_parts=[image, SHAPE])],
        streaming_callback=lambda chunk: pieces.append(chunk.content),
    )
    assert answer["replies"][0].text == "".join(pieces) == "the circle"


@needs("haystack")
def test_haystack_calls_a_tool(haystack):
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool

    tool = Tool("get_point", "A point", Point.model_json_schema(), function=lambda x: x)
    answer = haystack.run(
        [ChatMessage.from_user("Say apple.")], tools=[tool],
        generation_kwargs={"tool_choice": "required", "parallel_tool_calls": False},
    )  # fmt: skip
    (call,) = answer["replies"][0].tool_calls
    assert call.tool_name == "get_point"
    assert 0 <= call.arguments["x"] <= 9


# --- DSPy -------------------------------------------------------------------------------------


@needs("dspy")
def test_dspy_asks_about_a_picture(address):
    import dspy

    model = dspy.LM(
        "openai/nano", api_base=address, api_key="none", cache=False, num_retries=0, max_tokens=50
    )
    (said,) = model(messages=ask(picture(("red", "circle")), SHAPE))
    assert (said if isinstance(said, str) else said["text"]) == "the circle"
    (said,) = model("Say apple.")
    assert (said if isinstance(said, str) else said["text"]) == "apple"
