"""Live captions from the browser's microphone, which plays speech, and a sound's transcript."""

from __future__ import annotations

import numpy as np

from lookonce.config import NANO_EAR
from tests.support.drawing import SAMPLE_RATE, beeps, wav
from tests.support.live_server import LiveServer
from tests.support.page.actions import ask, drop_file, expect
from tests.support.page.chromium import launched
from tests.support.page.pausable_server import PausableServer
from tests.support.speech_clips import speech_clips


def captions(page):
    return page.get_by_role("log", name="Captions").locator(".caption")


def listen(page):
    page.get_by_role("button", name="Live captions", exact=True).click()


def test_the_microphone_is_captioned_turn_by_turn(open_page):
    with PausableServer("a red circle", pause_after=5) as server:
        page = open_page(server.url, permissions=["microphone"])
        listen(page)
        expect(page.locator("#captions-note")).to_have_text("Listening")
        expect(captions(page).first).to_have_text("a red")
        server.resume()
        expect(captions(page).first).to_have_text("a red circle")
        expect(captions(page)).to_have_count(2)
        page.get_by_role("button", name="Stop live captions").click()
        expect(page.locator("#captions-note")).to_have_text("Stopped.")
        page.get_by_role("button", name="Close live captions").click()
        expect(page.locator("#captions")).to_be_hidden()
        page.close()


def test_the_key_that_was_typed_goes_along(open_page):
    with PausableServer("yes", api_key=("sesame",)) as server:
        page = open_page(server.url, expect_errors=True, permissions=["microphone"])
        page.get_by_label("API key").fill("sesame")
        page.get_by_role("button", name="Done").click()
        listen(page)
        expect(page.locator("#captions-note")).to_have_text("Listening")
        expect(captions(page).first).to_have_text("yes")
        page.close()


def test_a_server_that_ends_the_session_is_told(open_page):
    with PausableServer("yes") as server:
        page = open_page(server.url, permissions=["microphone"])
        listen(page)
        expect(page.locator("#captions-note")).to_have_text("Listening")
        server.drain()
        expect(page.locator("#captions-note")).to_contain_text("shuts down")
        expect(page.get_by_role("button", name="Live captions", exact=True)).to_be_visible()
        page.close()


def test_a_sound_is_transcribed_where_it_stands(open_page):
    with PausableServer("a red circle") as server:
        page = open_page(server.url, expect_errors=True)
        drop_file(page, wav(beeps(1)), "beep.wav", "audio/wav")
        ask(page, "What?")
        page.get_by_role("button", name="Transcript").click()
        expect(page.get_by_label("Transcript", exact=True)).to_have_text("a red circle")


def test_the_embedded_ear_captions_what_it_hears_while_it_is_said(driver, tmp_path):
    clip = max(speech_clips(), key=lambda clip: len(clip.words))
    said = tmp_path / "said.wav"
    said.write_bytes(wav(np.pad(clip.wave(SAMPLE_RATE), (SAMPLE_RATE, 2 * SAMPLE_RATE))))
    with LiveServer(NANO_EAR) as server, launched(driver, said) as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(server.url)
        page.evaluate(NOTE_CAPTIONS)
        listen(page)
        expect(captions(page).first).to_have_text(" ".join(clip.words), timeout=60_000)
        shown = [text.split() for text in page.evaluate("window.shown") if text]
        whole = list(clip.words)
        assert any(whole[: len(words)] == words != whole for words in shown)
        page.screenshot(path=tmp_path / "captions.png")


NOTE_CAPTIONS = """() => {
  window.shown = [];
  const lines = document.querySelector("#caption-lines");
  const note = () => window.shown.push(lines.querySelector(".caption")?.textContent);
  new MutationObserver(note).observe(lines, { childList: true, subtree: true });
}"""
"""Keeps every state of the first caption, however fast the next one comes."""
