"""The page with nano: a picture, its answer, the receipt, and the tiles of the tiers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.drawing import beeps, wav
from tests.support.live_server import LiveServer
from tests.support.page.actions import answers, ask, drop_file, drop_picture, expect, stages, tile


@pytest.fixture(scope="module")
def nano(browser) -> Iterator[LiveServer]:
    """Asks for the browser first, so that no server starts where there is none."""
    with LiveServer() as live:
        yield live


def test_a_dropped_picture_is_looked_at_once(nano, open_page):
    page = open_page(nano.url)
    expect(page.locator("#state-text")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("nano")
    drop_picture(page)
    expect(page.get_by_role("list", name="Attached")).to_contain_text("two.png")
    ask(page, "What is in the picture?")
    answer = answers(page).first
    expect(answer).to_contain_text("a red circle to the left of a blue square")
    expect(answer).to_contain_text("0 % of the prompt reused")
    process, encode, prefill = stages(page)
    assert re.fullmatch(r"[0-9.]+ m?s", process)
    assert re.fullmatch(r"[0-9.]+ m?s", encode)
    assert prefill == "18 tokens"

    ask(page, "Where is the red circle?")
    expect(answers(page)).to_have_count(2)
    expect(answers(page).last).to_contain_text("on the left")
    expect(page.locator(".receipt")).to_have_count(2)
    assert stages(page) == ["reused", "not needed", "reused"]

    expect(tile(page, "Processed media")).to_contain_text("1 of 2 parts")
    expect(tile(page, "Processed media")).to_contain_text("50 %")
    expect(tile(page, "Looked at")).to_contain_text("1 decoded")
    expect(tile(page, "Requests")).to_contain_text("2 answered")
    reused = tile(page, "KV on the device").locator("path.reused")
    expect(reused).to_have_attribute("d", re.compile("M"))


def test_the_same_picture_in_a_new_chat_is_known(nano, open_page):
    page = open_page(nano.url)
    for _ in range(2):
        page.get_by_role("button", name="New chat").click()
        drop_picture(page)
        ask(page, "What shape is red?")
        expect(page.locator(".receipt")).to_have_count(1)
        expect(answers(page)).to_contain_text("the circle")
    assert stages(page) == ["reused", "not needed", "reused"]


def test_a_sound_and_its_player(nano, open_page):
    page = open_page(nano.url)
    drop_file(page, wav(beeps(3)), "beeps.wav", "audio/wav")
    ask(page, "How many beeps do you hear?")
    expect(answers(page)).to_contain_text("3")
    player = page.get_by_label("beeps.wav")
    expect(player).to_be_visible()
    assert player.evaluate(SECONDS) == pytest.approx(0.9, abs=0.05)
    expect(page.locator(".receipt")).to_contain_text("sound 1")


SECONDS = """player => new Promise((resolve) => {
  if (player.readyState > 0) resolve(player.duration);
  player.onloadedmetadata = () => resolve(player.duration);
  player.onerror = () => resolve(player.error.message);
})"""


@pytest.mark.parametrize(
    ("sample", "answer"),
    [
        ("Two shapes", "a red circle to the left of a blue square"),
        ("A few shapes", "4"),
        ("Beeps", "3"),
    ],
)
def test_the_examples_are_answered_right(nano, open_page, sample, answer):
    page = open_page(nano.url)
    page.get_by_role("button", name=sample).click()
    expect(answers(page).locator(".said")).to_have_text(answer)


def test_all_of_it_by_keyboard(nano, open_page):
    page = open_page(nano.url)
    question = page.get_by_label("Question", exact=True)
    expect(question).to_be_focused()
    page.keyboard.type("What is your name?")
    page.keyboard.press("Shift+Enter")
    assert question.input_value().endswith("\n")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("I am a tiny model")
    expect(page.locator(".receipt")).to_have_count(1)
    expect(question).to_be_focused()
    reach(page, ".receipt summary")
    page.keyboard.press("Enter")
    expect(page.locator(".receipt")).not_to_have_attribute("open", re.compile(".*"))
    reach(page, "#open-settings")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Settings")).to_be_hidden()


def reach(page, selector: str) -> None:
    """Tab backwards until the element has the focus; the ring around it must be there."""
    for _ in range(20):
        page.keyboard.press("Shift+Tab")
        if page.locator(f"{selector}:focus").count():
            ring = page.locator(selector).evaluate("node => getComputedStyle(node).outlineStyle")
            assert ring == "solid"
            return
    raise AssertionError(f"{selector} is not reached by the keyboard")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground_in_both_schemes(nano, open_page, scheme):
    page = open_page(nano.url, color_scheme=scheme)
    drop_picture(page)
    ask(page, "What is in the picture?")
    expect(page.locator(".receipt")).to_have_count(1)
    ground = luminance(page, "body", "backgroundColor")
    assert (ground > 0.8) == (scheme == "light")
    for words, behind in [
        (".answer .said", "body"), (".asked .said", ".asked .said"), (".mark", ".mark"),
        (".why", ".receipt"),
        (".receipt summary", ".receipt"), (".tile h3", ".tile"), (".tile .value", ".tile"),
        (".facts", ".tile"), (".keys", "body"),
    ]:  # fmt: skip
        assert contrast(page, words, behind) >= 4.5, words


def contrast(page, words: str, behind: str) -> float:
    """WCAG's contrast ratio, 1 to 21; 4.5 is enough for small print."""
    pair = luminance(page, words, "color"), luminance(page, behind, "backgroundColor")
    return (max(pair) + 0.05) / (min(pair) + 0.05)


def luminance(page, selector: str, colour: str) -> float:
    style = f"node => getComputedStyle(node).{colour}"
    parts = [float(p) for p in re.findall(r"[0-9.]+", page.locator(selector).first.evaluate(style))]
    linear = [((p / 255 + 0.055) / 1.055) ** 2.4 if p > 10 else p / 3294 for p in parts[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_nothing_is_cut_off_on_a_phone(nano, open_page):
    page = open_page(nano.url, viewport={"width": 360, "height": 740}, has_touch=True)
    drop_picture(page)
    ask(page, "What is in the picture?")
    expect(page.locator(".receipt")).to_have_count(1)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 360
    for place in (".receipt", "#composer", ".tile >> nth=0", "#open-settings"):
        box = page.locator(place).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
