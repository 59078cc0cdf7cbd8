"""The page while an answer is streamed, when it is stopped, and when it is refused."""

from __future__ import annotations

from lookonce.errors import QueueFullError
from tests.support.page.actions import answers, ask, drop_file, drop_picture, expect
from tests.support.page.pausable_server import PausableServer

WRITTEN = """\
# Shapes

A **red** one and

[a]: https://a.example

- one

  more
- two

1. b
   - c

> said
so

```py
print(1)

$$
```

| a | b |
|---|---|
| 1 | 2 |

$$
a = b

c

d

e
$$

Title
=====

    code

$5 and $6.\r\n\r\nSee [a].
"""
READ_IN_PIECES = """async ([text, sizes]) => {
  const { Markdown } = await import("/page/markdown.js");
  await import("/page/temml.js");
  await import("/page/highlight.js");
  const made = [];
  for (const size of sizes) {
    const markdown = new Markdown(document.createElement("div"));
    for (let at = 0; at < text.length; at += size) markdown.add(text.slice(at, at + size));
    await new Promise((resolve) => setTimeout(resolve));
    made.push([markdown.node.innerHTML, markdown.source.length]);
  }
  return made;
}"""
MARKUP = '<img src=x onerror="document.title=1">'


def test_the_answer_is_shown_while_it_comes(open_page):
    with PausableServer("a red circle", pause_after=5) as server:
        page = open_page(server.url)
        ask(page, "What?")
        words = answers(page).locator(".said")
        expect(words).to_have_text("a red")
        expect(answers(page)).to_have_attribute("aria-busy", "true")
        expect(page.get_by_role("button", name="Stop")).to_be_enabled()
        server.resume()
        expect(words).to_have_text("a red circle")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.locator("#announcer")).to_have_text("a red circle")


def test_an_answer_in_pieces_looks_as_at_once_and_whole_blocks_are_not_read_again(open_page):
    with PausableServer("yes") as server:
        page = open_page(server.url)
        at_once, *grown = page.evaluate(READ_IN_PIECES, [WRITTEN, [len(WRITTEN), 1, 7]])
        assert [html for html, _ in grown] == [at_once[0]] * 2
        assert at_once[0].count("https://a.example") == 1
        long = "word **bold** word\n\n" * 200
        ((html, held),) = page.evaluate(READ_IN_PIECES, [long, [9]])
        assert html.count("<strong>") == 200
        assert held < 100


def test_an_answer_that_is_nested_without_end_is_shown_as_it_is(open_page):
    for said in (">" * 500, "- " * 500 + "a"):
        with PausableServer(said) as server:
            page = open_page(server.url)
            ask(page, "What?")
            expect(page.locator(".receipt")).to_have_count(1)
            expect(answers(page).locator(".said")).to_have_text(said)
            assert answers(page).locator("blockquote, li").count() == 0


def test_escape_stops_the_engine_and_keeps_what_was_said(open_page):
    with PausableServer("a red circle", pause_after=5) as server:
        page = open_page(server.url)
        ask(page, "What?")
        expect(answers(page).locator(".said")).to_have_text("a red")
        page.keyboard.press("Escape")
        expect(answers(page)).to_contain_text("Stopped.")
        server.resume()
        ask(page, "And now?")
        expect(page.locator(".receipt")).to_have_count(1)
        prompt = bytes(server.engine.prompts[-1].token_ids).decode()
        assert prompt == "What?a redAnd now?"
    assert server.engine.running == {}  # now that the server has ended what was stopped


def test_every_turn_is_sent_with_what_went_before(open_page):
    with PausableServer("yes") as server:
        page = open_page(server.url)
        drop_picture(page)
        ask(page, "A?")
        expect(page.locator(".receipt")).to_have_count(1)
        ask(page, "B?")
        expect(page.locator(".receipt")).to_have_count(2)
        last = server.engine.prompts[-1]
        assert len(last.items) == 1
        assert bytes(t for t in last.token_ids if t < 256) == b"A?yesB?"
        page.get_by_role("button", name="New chat").click()
        ask(page, "C?")
        expect(page.locator(".receipt")).to_have_count(1)
        assert bytes(server.engine.prompts[-1].token_ids) == b"C?"


def test_an_external_tier_s_share_is_shown(open_page):
    with PausableServer("yes") as server:
        page = open_page(server.url)
        ask(page, "12345678")
        expect(page.locator(".prompt")).to_contain_text(
            "8 prompt tokens: 2 from KV on the device, 1 from external KV, 5 computed"
        )


def test_each_external_tier_has_a_tile(open_page):
    with PausableServer("yes") as server:
        server.engine.counters |= {
            "kv_tier_lookups_total:disk": 200, "kv_tier_hits_total:disk": 150,
            "kv_tier_held_bytes:disk": 2.5e9,
        }  # fmt: skip
        page = open_page(server.url)
        tile = page.locator("#tile-kv-disk")
        expect(tile).to_contain_text("KV in disk")
        expect(tile).to_contain_text("75 %")
        expect(tile).to_contain_text("2.5 GB held")


def test_markup_is_shown_as_text(open_page):
    with PausableServer(MARKUP) as server:
        page = open_page(server.url)
        ask(page, MARKUP)
        expect(answers(page).locator(".said")).to_have_text(MARKUP)
        expect(page.get_by_role("article", name="You")).to_have_text(MARKUP)
        assert page.locator("#transcript img").count() == 0
        assert page.title() == "LookOnce"


def test_a_refused_question_goes_back_to_where_it_was_typed(open_page):
    with PausableServer("yes") as server:
        server.engine.refusal = QueueFullError("too many requests are waiting")
        page = open_page(server.url, expect_errors=True)
        drop_picture(page)
        ask(page, "What?")
        expect(page.get_by_role("alert")).to_have_text("too many requests are waiting")
        expect(page.get_by_label("Question", exact=True)).to_have_value("What?")
        expect(page.get_by_role("list", name="Attached")).to_contain_text("two.png")
        server.engine.refusal = None
        page.keyboard.press("Enter")
        expect(page.locator(".receipt")).to_have_count(1)
        assert len(server.engine.prompts[-1].items) == 1


def test_an_attachment_is_taken_away_and_a_strange_file_refused(open_page):
    with PausableServer("yes") as server:
        page = open_page(server.url)
        drop_picture(page)
        drop_file(page, b"?", "notes.xyz", "application/x-notes")
        refusal = page.get_by_role("list", name="Attached").get_by_role("alert")
        expect(refusal).to_contain_text("notes.xyz This is neither a picture, a sound nor a film")
        page.get_by_role("button", name="Dismiss the refusal of notes.xyz").click()
        expect(refusal).to_have_count(0)
        page.get_by_role("button", name="Remove two.png").click()
        expect(page.locator("#chips")).to_be_hidden()
        expect(page.get_by_role("button", name="Send")).to_be_disabled()


def test_a_server_with_keys_asks_for_one(open_page):
    with PausableServer("yes", api_key=("secret",)) as server:
        page = open_page(server.url, expect_errors=True)
        dialog = page.get_by_role("dialog", name="Settings")
        expect(dialog).to_contain_text("an API key is needed")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#model")).to_have_text("recital")
        ask(page, "What?")
        expect(answers(page).locator(".said")).to_have_text("yes")


def test_the_server_s_state_is_told(open_page):
    with PausableServer("yes") as server:
        server.engine.state = "starting"
        page = open_page(server.url, expect_errors=True)
        state = page.locator("#state-text")
        expect(state).to_have_text("loading the model")
        server.engine.state = "ready"
        expect(state).to_have_text("ready")
