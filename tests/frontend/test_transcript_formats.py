"""Transcripts as subtitles, and text that comes in pieces."""

from __future__ import annotations

from lookonce.frontend.transcript import TranscriptSegment, TrimmedText, language_code
from lookonce.frontend.transcript_formats import srt, vtt


def segment(number: int, start: float, end: float, text: str) -> TranscriptSegment:
    return TranscriptSegment(number, 0, start, end, text, [], 0.0, 0.0, 0.0, 0.0)


SEGMENTS = [segment(0, 0.0, 1.5, " One"), segment(1, 3599.9996, 3661.25, " two\n\nlines --> x")]


def test_srt_numbers_its_blocks_and_writes_times_with_a_comma() -> None:
    assert srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne\n\n"
        "2\n01:00:00,000 --> 01:01:01,250\ntwo lines -> x\n"
    )


def test_vtt_begins_with_its_name() -> None:
    assert vtt(SEGMENTS[:1]) == "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne\n"


def test_trimmed_text_is_the_pieces_together() -> None:
    text = TrimmedText()
    pieces = [text.push(piece) for piece in ("  ", " Hello ", "", " world", "  ")]
    assert pieces == ["", "Hello", "", "  world", ""]
    assert "".join(pieces) == text.whole == "Hello  world"


def test_languages_have_codes_and_names() -> None:
    assert [language_code(text) for text in ("German", "de", "castilian", "xx", "", None)] == [
        "de",
        "de",
        "es",
        "xx",
        None,
        None,
    ]
