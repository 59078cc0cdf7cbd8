"""What one response reports of several prompts."""

from __future__ import annotations

from lookonce.frontend.receipt import _status


def test_the_status_of_several_prompts():
    assert _status(["loaded", "loaded"]) == "loaded"
    assert _status(["loaded", "none"]) == "partial"
    assert _status(["shadowed", "failed"]) == "failed"
    assert _status(["shadowed", "none"]) == "shadowed"
    assert _status([]) == "none"
