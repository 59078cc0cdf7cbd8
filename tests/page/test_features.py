"""Each feature of the page on a phone, a tablet and a desk, by a server on doubles."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from lookonce.errors import QueueFullError, UnprocessableMediaError
from lookonce.frontend.tools.formats import choose_dialect
from tests.support.page.actions import answers, ask, drop_file, drop_picture, expect
from tests.support.page.pausable_server import PausableServer
from tests.support.page.sizes import open_sized

__all__ = ["open_sized"]

MARKDOWN = """\
# Shapes

A **red** circle, a `blue` one, see [this](https://example.org/a), not [that](javascript:x(1)).
First line
second line, 5 &lt; 6, $5 and $6.

| shape | sides |
|:--|--:|
| square | 4 |

- [x] seen
- one
  1. nested

```python
print("<b>")
```

> said

The area is $\\pi r^2$ and

$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$

<script>document.title = "gone"</script>

![cat](https://example.org/cat.png)
"""
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture
def reciting():
    """Opens a server that answers with the text."""
    opened = []

    def serve(answer: str = "yes", **options: object) -> PausableServer:
        server = PausableServer(answer, **options)
        opened.append(server)
        return server.__enter__()

    yield serve
    for server in opened:
        server.__exit__(None, None, None)


def sent(page) -> list[dict]:
    """The bodies of the chat requests, as they are sent from now on."""
    bodies: list[dict] = []

    def note(request) -> None:
        if request.url.endswith("/v1/chat/completions"):
            bodies.append(json.loads(request.post_data))

    page.on("request", note)
    return bodies


def ask_and_wait(page, text: str, answered: int = 1) -> None:
    ask(page, text)
    expect(page.locator(".receipt")).to_have_count(answered)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def show_history(page) -> None:
    if page.locator("#history").is_hidden():
        page.get_by_role("button", name="Conversations", exact=True).click()


def titles(page):
    return page.get_by_role("list", name="Kept conversations").locator(".title")


def open_settings(page, section: str | None = None) -> None:
    page.get_by_role("button", name="Settings").click()
    if section:
        page.locator("#settings summary", has_text=section).click()


def close_settings(page) -> None:
    page.get_by_role("button", name="Done").click()


# --- Answers ----------------------------------------------------------------------------------


def test_an_answer_is_read_as_markdown_and_nothing_in_it_is_run(reciting, open_sized):
    server = reciting(MARKDOWN)
    server.renderer.modalities = ("image",)
    page = open_sized(server.url)
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    ask_and_wait(page, "What?")
    said = answers(page).locator(".said")
    expect(said.locator("h3")).to_have_text("Shapes")
    expect(said.locator("strong")).to_have_text("red")
    links = said.get_by_role("link")
    expect(links).to_have_text(["this", "cat"])
    expect(links.first).to_have_attribute("rel", re.compile("noopener"))
    expect(said.locator("p").first).to_contain_text("not that")
    expect(said.locator("p").first).to_contain_text("5 < 6, $5 and $6.")
    expect(said.locator("p br")).to_have_count(2)
    expect(said.get_by_role("cell", name="4")).to_have_css("text-align", "right")
    expect(said.get_by_role("checkbox", name="done")).to_be_checked()
    expect(said.locator("ol li")).to_have_text("nested")
    expect(said.locator("pre")).to_have_text('print("<b>")')
    expect(said.locator("blockquote")).to_have_text("said")
    expect(said.locator("math")).to_have_count(2)
    expect(said.locator("math msup").first).to_be_visible()
    expect(said).to_contain_text('<script>document.title = "gone"</script>')
    assert page.title() == "LookOnce"
    assert said.locator("script, img").count() == 0
    assert all(url.startswith((server.url, "blob:")) for url in requested)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.viewport_size["width"]


def test_code_has_colours_and_stays_as_it_was(reciting, open_sized):
    code = "def f():\n    return '<img src=x onerror=alert(1)>'"
    unknown = "def <b>"
    server = reciting(f"```python\n{code}\n```\n\n```nothing\n{unknown}\n```\n\n```\ndef\n```")
    page = open_sized(server.url)
    ask_and_wait(page, "What?")
    blocks = answers(page).locator("pre code")
    expect(blocks.first.locator(".of-keyword")).to_have_text(["def", "return"])
    expect(blocks.first.locator(".of-string")).to_contain_text("<img src=x")
    assert [block.text_content() for block in blocks.all()] == [code, unknown, "def"]
    assert answers(page).locator("pre img").count() == 0
    assert blocks.nth(1).locator("span").count() == blocks.nth(2).locator("span").count() == 0


def test_code_and_answers_are_copied(reciting, open_sized):
    page = open_sized(
        reciting("```\nx = 1\n```").url, permissions=["clipboard-read", "clipboard-write"]
    )
    ask_and_wait(page, "What?")
    page.get_by_role("button", name="Copy code").click()
    expect(page.locator("#announcer")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"
    page.get_by_role("button", name="Copy answer").click()
    page.wait_for_function("navigator.clipboard.readText().then((t) => t.startsWith('```'))")
    page.get_by_role("button", name="Copy question").click()
    page.wait_for_function("navigator.clipboard.readText().then((t) => t === 'What?')")


def test_an_answer_is_tried_again_and_a_question_edited(reciting, open_sized):
    server = reciting("one")
    page = open_sized(server.url)
    ask_and_wait(page, "A?")
    ask_and_wait(page, "B?", 2)
    server.engine.answer = "two"
    page.get_by_role("button", name="Try again").click()
    expect(answers(page).locator(".said")).to_have_text(["one", "two"])
    expect(page.locator(".receipt")).to_have_count(2)
    assert bytes(server.engine.prompts[-1].token_ids) == b"A?oneB?"

    page.get_by_role("button", name="Edit question").first.click()
    expect(page.locator("#editing")).to_be_visible()
    expect(page.get_by_label("Question", exact=True)).to_have_value("A?")
    page.keyboard.press("Escape")
    expect(page.locator("#editing")).to_be_hidden()
    page.get_by_role("button", name="Edit question").first.click()
    ask_and_wait(page, "C?")
    expect(page.get_by_role("article", name="You")).to_have_text(["C?"])
    assert bytes(server.engine.prompts[-1].token_ids) == b"C?"


def test_what_was_said_stands_as_before_where_an_edited_question_is_refused(reciting, open_page):
    server = reciting("one")
    page = open_page(server.url, expect_errors=True)
    ask_and_wait(page, "A?")
    ask_and_wait(page, "B?", 2)
    server.engine.refusal = QueueFullError("too many requests are waiting")
    page.get_by_role("button", name="Edit question").first.click()
    ask(page, "C?")
    expect(page.get_by_text("too many requests are waiting")).to_be_visible()
    expect(page.get_by_role("article", name="You")).to_have_text(["A?", "B?"])
    expect(answers(page).locator(".said")).to_have_text(["one", "one"])
    expect(page.locator("#editing")).to_be_visible()
    page.reload()
    expect(page.get_by_role("article", name="You")).to_have_text(["A?", "B?"])

    server.engine.refusal = None
    page.get_by_role("button", name="Edit question").first.click()
    ask(page, "C?")
    expect(page.get_by_role("article", name="You")).to_have_text(["C?"])
    expect(page.locator(".receipt")).to_have_count(1)


def test_an_answer_is_stopped_by_the_button(reciting, open_sized):
    server = reciting("a red circle", pause_after=5)
    page = open_sized(server.url)
    ask(page, "What?")
    expect(answers(page).locator(".said")).to_have_text("a red")
    page.get_by_role("button", name="Stop").click()
    expect(answers(page)).to_contain_text("Stopped.")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()


def test_tools_are_called_and_their_results_sent(reciting, open_sized):
    server = reciting(CALL)
    server.services.tool_dialect = choose_dialect("hermes", "{{ tools }}<tool_call>", {})
    page = open_sized(server.url)
    bodies = sent(page)
    open_settings(page, "Form and tools")
    page.locator("#tools").fill("{")
    close_settings(page)
    expect(page.get_by_role("alert")).to_contain_text("list of tools is not JSON")
    expect(page.locator("#tools")).to_be_focused()
    page.locator("#tools").fill(json.dumps([WEATHER]))
    close_settings(page)
    ask_and_wait(page, "Weather?")
    calls = page.get_by_role("region", name="Calls of tools")
    expect(calls.locator("pre")).to_have_text(re.compile('"city": *"Bern"'))
    server.engine.answer = "Sunny."
    page.get_by_label("Result of get_weather").fill("sun")
    page.get_by_role("button", name="Send results").click()
    expect(answers(page).last.locator(".said")).to_have_text("Sunny.")
    assert bodies[0]["tools"] == [{"type": "function", "function": WEATHER}]
    call, result = bodies[1]["messages"][-2:]
    assert call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "sun"}


def test_thoughts_stand_apart_from_the_answer(reciting, open_sized):
    page = open_sized(reciting().url)
    deltas = [{"reasoning_content": "Let me see"}, {"content": "A circle."}]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=lines, content_type="text/event-stream"),
    )
    ask(page, "What?")
    expect(answers(page).locator(".said")).to_have_text("A circle.")
    page.locator("summary", has_text="Thinking").click()
    expect(page.locator(".thoughts")).to_have_text("Let me see")


# --- Settings ---------------------------------------------------------------------------------


def test_what_is_set_is_sent_and_stays_set(reciting, open_sized):
    page = open_sized(reciting('{"x": 1}').url)
    bodies = sent(page)
    open_settings(page)
    page.get_by_label("System prompt").fill("Be short.")
    for name, value in [
        ("Temperature", "0.5"), ("Longest answer", "64"), ("Top p", "0.9"), ("Top k", "5"),
        ("Seed", "3"), ("Stop at", "###\nEND"),
    ]:  # fmt: skip
        page.get_by_label(name).fill(value)
    page.locator("#settings summary", has_text="Form and tools").click()
    page.get_by_label("Form of answers").select_option("JSON by a schema")
    page.locator("#schema").fill('{"type": "object"}')
    page.get_by_label("Processor options").fill('{"max_pixels": 1000}')
    close_settings(page)
    page.reload()
    ask(page, "What?")
    expect(answers(page).locator("pre")).to_have_text('{"x": 1}')
    (body,) = bodies
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    expected = {
        "temperature": 0.5, "max_tokens": 64, "top_p": 0.9, "top_k": 5, "seed": 3,
        "stop": ["###", "END"], "mm_processor_kwargs": {"max_pixels": 1000},
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}},
        },
    }  # fmt: skip
    assert {name: body[name] for name in expected} == expected


def test_the_model_is_picked(reciting, open_sized):
    page = open_sized(reciting().url, expect_errors=True)
    picker = page.get_by_label("Model", exact=True)
    expect(picker).to_have_value("recital")
    listed = [{"id": "recital", "modalities": []}, {"id": "other", "modalities": ["image"]}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": listed}))
    bodies = sent(page)
    page.reload()
    picker.select_option("other")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "What?")
    expect(page.get_by_label("Question", exact=True)).to_have_value("What?")
    assert bodies[0]["model"] == "other"


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_the_colours_are_chosen(reciting, open_sized, theme):
    scheme = "dark" if theme == "Light" else "light"
    page = open_sized(reciting().url, color_scheme=scheme)
    open_settings(page, "This browser")
    page.get_by_label("Colours").select_option(theme)
    close_settings(page)
    page.reload()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", ground)[0])
    assert (red > 128) == (theme == "Light")


# --- Conversations ----------------------------------------------------------------------------


def test_conversations_are_kept_opened_renamed_and_deleted(reciting, open_sized):
    server = reciting("yes")
    page = open_sized(server.url)
    drop_picture(page)
    ask_and_wait(page, "First?")
    page.get_by_role("button", name="New chat").click()
    ask_and_wait(page, "Second?")
    page.reload()
    expect(page.get_by_role("article", name="You")).to_have_text("Second?")
    show_history(page)
    expect(titles(page)).to_have_text(["Second?", "First?"])
    titles(page).last.click()
    expect(page.get_by_role("article", name="You")).to_have_text("First?")
    expect(page.locator(".shown")).to_be_visible()
    ask_and_wait(page, "More?", 2)
    assert len(server.engine.prompts[-1].items) == 1
    assert bytes(t for t in server.engine.prompts[-1].token_ids if t < 256) == b"First?yesMore?"

    show_history(page)
    expect(titles(page)).to_have_text(["First?", "Second?"])
    page.get_by_role("button", name="Actions for First?").click()
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Title").fill("Shapes")
    page.keyboard.press("Enter")
    expect(titles(page)).to_have_text(["Shapes", "Second?"])
    page.reload()
    show_history(page)
    page.get_by_role("button", name="Actions for Shapes").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete for good?").click()
    expect(titles(page)).to_have_text(["Second?"])
    expect(page.locator("#welcome")).to_be_visible()


def test_conversations_are_saved_as_files(reciting, open_sized):
    page = open_sized(reciting("**yes**").url)
    drop_picture(page)
    ask_and_wait(page, "First?")
    show_history(page)
    page.get_by_role("button", name="Actions for First?").click()
    with page.expect_download() as written:
        page.get_by_role("button", name="Save as Markdown").click()
    assert written.value.suggested_filename == "First.md"
    text = written.value.path().read_text()
    assert text == "# First?\n\n## You\n\n*two.png*\n\nFirst?\n\n## Model\n\n**yes**\n"
    with page.expect_download() as written:
        page.get_by_role("button", name="Save as JSON").click()
    picture, question = json.loads(written.value.path().read_text())["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert question == {"type": "text", "text": "First?"}


def open_saved(page, content: object, name: str = "saved.json") -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    file = {"name": name, "mimeType": "application/json", "buffer": text.encode()}
    page.locator("#saved-file").set_input_files(file)


def test_a_saved_conversation_is_opened_and_goes_on(reciting, open_sized):
    server = reciting("yes")
    page = open_sized(server.url)
    drop_picture(page)
    ask_and_wait(page, "First?")
    show_history(page)
    page.get_by_role("button", name="Actions for First?").click()
    with page.expect_download() as written:
        page.get_by_role("button", name="Save as JSON").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete for good?").click()
    expect(titles(page)).to_have_count(0)
    open_saved(page, written.value.path().read_text())
    expect(page.get_by_role("article", name="You")).to_have_text("First?")
    expect(page.locator(".shown")).to_be_visible()
    ask_and_wait(page, "More?")  # what was saved has no receipts
    assert len(server.engine.prompts[-1].items) == 1
    assert bytes(t for t in server.engine.prompts[-1].token_ids if t < 256) == b"First?yesMore?"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ({"model": "nano"}, "no messages"),
        ({"messages": [{"role": "system", "content": "Hi"}]}, "no question"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "https://example.org/a"}}
                        ],
                    }
                ]
            },
            "elsewhere",
        ),
    ],
)
def test_a_file_that_is_no_conversation_is_refused_in_words(reciting, open_page, content, said):
    page = open_page(reciting().url)
    show_history(page)
    open_saved(page, content)
    expect(page.locator("#saved-problem")).to_contain_text(said)
    expect(titles(page)).to_have_count(0)


def test_conversations_are_found_by_their_words(reciting, open_sized):
    page = open_sized(reciting("A red circle").url)
    ask_and_wait(page, "First?")
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#welcome")).to_be_visible()
    drop_picture(page)
    ask_and_wait(page, "Second?")
    show_history(page)
    expect(titles(page)).to_have_text(["Second?", "First?"])
    find = page.get_by_role("searchbox", name="Find in conversations")
    for words, found in [
        ("first", ["First?"]),
        ("CIRCLE red", ["Second?", "First?"]),
        ("two.png", ["Second?"]),
    ]:
        find.fill(words)
        expect(titles(page)).to_have_text(found)
    find.fill("square")
    expect(titles(page)).to_have_count(0)
    expect(page.locator("#history-none")).to_be_visible()
    find.fill("")
    expect(titles(page)).to_have_count(2)


def test_nothing_is_kept_where_that_is_not_wanted_and_all_can_be_deleted(reciting, open_sized):
    page = open_sized(reciting().url)
    ask_and_wait(page, "First?")
    open_settings(page, "This browser")
    page.get_by_label("Keep conversations").uncheck()
    page.get_by_role("button", name="Delete all conversations").click()
    page.get_by_role("button", name="Delete them all for good?").click()
    expect(page.get_by_role("button", name="Deleted")).to_be_visible()
    close_settings(page)
    ask_and_wait(page, "Second?")
    page.reload()
    show_history(page)
    expect(page.locator("#history-empty")).to_be_visible()
    expect(titles(page)).to_have_count(0)


# --- What is attached -------------------------------------------------------------------------


def add_from(page, source: str) -> None:
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_role("button", name=source, exact=True).click()


def attached(page):
    return page.get_by_role("list", name="Attached").locator(".chip")


def test_the_camera_and_the_screen_give_pictures(reciting, open_sized):
    server = reciting()
    page = open_sized(server.url, permissions=["camera"])
    page.evaluate(SCREEN)
    for number, (source, name) in enumerate([("Camera", "camera.png"), ("Screen", "screen.png")]):
        add_from(page, source)
        page.get_by_role("button", name="Take picture").click()
        expect(attached(page)).to_have_count(number + 1)
        expect(attached(page).last).to_contain_text(name)
    ask_and_wait(page, "What?")
    assert [item.modality for item in server.engine.prompts[-1].items] == ["image", "image"]


SCREEN = """() => {
  const canvas = document.createElement("canvas");
  setInterval(() => canvas.getContext("2d").fillRect(0, 0, 50, 50), 50); // a frame each time
  navigator.mediaDevices.getDisplayMedia = async () => canvas.captureStream(10);
}"""
"""A screen to be captured: there is none where these tests run."""


def test_a_film_is_recorded_where_the_model_takes_films(reciting, open_sized):
    server = reciting()
    server.renderer.modalities = ("image", "video")
    page = open_sized(server.url, permissions=["camera"])
    expect(page.get_by_label("Model", exact=True)).to_be_visible()
    bodies = sent(page)
    add_from(page, "Camera")
    page.get_by_role("button", name="Record film").click()
    expect(page.locator("#capture-note")).to_have_text("Recording")
    page.get_by_role("button", name="Stop and attach").click()
    expect(attached(page)).to_contain_text("recording.")
    ask_and_wait(page, "What?")
    (part, _) = bodies[0]["messages"][0]["content"]
    assert part["video_url"]["url"].startswith("data:video/")
    expect(page.locator("video.shown")).to_be_visible()


def test_the_microphone_gives_a_sound(reciting, open_sized):
    server = reciting()
    page = open_sized(server.url, permissions=["microphone"])
    bodies = sent(page)
    add_from(page, "Record sound")
    page.get_by_role("button", name="Record", exact=True).click()
    expect(page.locator("#capture-note")).to_have_text("Recording")
    page.get_by_role("button", name="Stop and attach").click()
    expect(attached(page)).to_contain_text("recording.wav")
    ask_and_wait(page, "What?")
    (part, _) = bodies[0]["messages"][0]["content"]
    assert part["audio_url"]["url"].startswith("data:audio/wav;base64,UklGR")


def test_a_capture_that_is_cancelled_or_not_allowed_gives_nothing(reciting, open_sized):
    page = open_sized(reciting().url, permissions=["camera"])
    add_from(page, "Camera")
    expect(page.get_by_role("button", name="Take picture")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.evaluate(NOT_ALLOWED)
    add_from(page, "Camera")
    expect(page.locator("#capture-note")).to_contain_text("told not to allow it")
    page.get_by_role("button", name="Cancel").click()
    expect(attached(page)).to_have_count(0)


NOT_ALLOWED = """() => {
  navigator.mediaDevices.getUserMedia = async () => {
    throw new DOMException("no", "NotAllowedError");
  };
}"""


def test_documents_and_texts_go_along(reciting, open_sized):
    server = reciting()
    page = open_sized(server.url)
    drop_file(page, b"%PDF-1.7", "report.pdf", "application/pdf")
    drop_file(page, b"# Notes", "notes.md", "")
    expect(attached(page)).to_have_count(2)
    ask_and_wait(page, "What?")
    assert bytes(server.engine.prompts[-1].token_ids) == b"[report.pdf][notes.md]What?"


def test_what_the_model_does_not_take_is_refused_where_it_was_dropped(reciting, open_sized):
    page = open_sized(reciting().url)
    expect(page.get_by_label("Model", exact=True)).to_be_visible()
    drop_file(page, b"film", "holiday.mp4", "video/mp4")
    drop_file(page, b"", "empty.png", "image/png")
    refusals = attached(page).get_by_role("alert")
    expect(refusals).to_have_text(
        ["holiday.mp4 This model does not take films.", "empty.png This file is empty."]
    )
    page.get_by_role("button", name="Dismiss the refusal of holiday.mp4").click()
    expect(refusals).to_have_count(1)


def test_what_the_server_refuses_is_said_at_the_file(reciting, open_sized):
    server = reciting()
    page = open_sized(server.url, expect_errors=True)
    server.engine.refusal = UnprocessableMediaError(
        "messages[0].content[1]: the picture is broken", param="messages[0].content[1]"
    )
    drop_picture(page)
    drop_file(page, b"x", "broken.png", "image/png")
    ask(page, "What?")
    refusal = attached(page).get_by_role("alert")
    expect(refusal).to_contain_text("broken.png This could not be read. It may be damaged")
    expect(refusal).to_contain_text("the picture is broken")
    expect(page.get_by_label("Question", exact=True)).to_have_value("What?")
    expect(answers(page)).to_have_count(0)
    server.engine.refusal = None
    page.get_by_role("button", name="Remove broken.png").click()
    expect(refusal).to_have_count(0)
    page.get_by_label("Question", exact=True).press("Enter")
    expect(page.locator(".receipt")).to_have_count(1)


# --- How it looks -----------------------------------------------------------------------------


def test_tiles_say_their_window(reciting, open_page):
    page = open_page(reciting().url)
    expect(page.locator("#tile-prefix")).to_contain_text("since start")
    expect(page.locator("#tile-requests")).to_contain_text("now")
    expect(page.locator("#tile-tokens")).to_contain_text("last second")


def test_a_phone_has_a_strip_of_one_line_a_stacked_receipt_and_targets_for_fingers(
    reciting, open_page
):
    page = open_page(
        reciting().url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True
    )
    drop_picture(page)
    ask_and_wait(page, "What?")
    assert page.locator("#tiles").bounding_box()["height"] <= 52
    cells = [cell.bounding_box() for cell in page.locator(".receipt td").all()]
    assert all(upper["y"] + upper["height"] <= lower["y"] for upper, lower in pairwise(cells))
    show_history(page)
    page.get_by_role("button", name="Actions for What?").click()
    small = page.evaluate(SMALL)
    assert small == []
    page.get_by_role("button", name="Close conversations").click()
    add_from(page, "Camera")
    assert page.evaluate(SMALL) == []


SMALL = """() => [...document.querySelectorAll("button, select, summary, input, textarea")]
  .filter((node) => node.checkVisibility({ visibilityProperty: true }) && node.type !== "checkbox")
  .map((node) => [node.id || node.ariaLabel || node.textContent, node.getBoundingClientRect()])
  .filter(([, box]) => box.width < 44 || box.height < 44)
  .map(([name, box]) => `${name}: ${box.width} x ${box.height}`)"""
"""Names of what is pressed and smaller than 44 pixels."""


def test_the_list_of_conversations_is_left_by_escape(reciting, open_sized):
    page = open_sized(reciting().url)
    toggle = page.get_by_role("button", name="Conversations", exact=True)
    if toggle.get_attribute("aria-expanded") == "true":  # a column, where there is room
        toggle.click()
        expect(page.locator("#history")).to_be_hidden()
        return
    toggle.click()
    expect(page.get_by_role("button", name="Close conversations")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#history")).to_be_hidden()
    expect(toggle).to_be_focused()
