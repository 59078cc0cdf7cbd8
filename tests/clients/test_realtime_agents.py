"""OpenAI's Agents SDK holds a realtime conversation, unmodified, with the real server.

`make test-clients` installs it.
"""

from __future__ import annotations

import asyncio
import base64

import pytest

from tests.support.drawing import encoded, picture

realtime = pytest.importorskip("agents.realtime", reason="openai-agents is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = {
    "model_name": "nano",
    "output_modalities": ["text"],
    "input_audio_transcription": None,
    "turn_detection": {"type": "server_vad"},
    "max_output_tokens": 30,
}


def test_the_agents_sdk_asks_about_a_picture(server):
    agent = realtime.RealtimeAgent(name="looker", instructions="Answer shortly.")
    runner = realtime.RealtimeRunner(agent, config={"model_settings": SETTINGS})
    address = server.url.replace("http", "ws", 1) + "/v1/realtime"
    data = base64.b64encode(encoded(picture(("red", "circle")))).decode()
    content = [
        {"type": "input_text", "text": "What shape is red?"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
    ]

    async def scenario():
        session = await runner.run(model_config={"url": address, "api_key": "none"})
        async with session, asyncio.timeout(60):
            await session.send_message({"type": "message", "role": "user", "content": content})
            seen = []
            async for event in session:
                seen.append(event.type)
                assert event.type != "error", event
                if event.type == "history_updated":
                    said = [item for item in event.history if item.role == "assistant"]
                    if said and said[-1].status == "completed":
                        return "".join(part.text or "" for part in said[-1].content)
        raise AssertionError(seen)

    assert asyncio.run(scenario()) == "the circle"
