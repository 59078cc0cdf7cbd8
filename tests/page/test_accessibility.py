"""axe-core finds no violation in any of the page's states, on three sizes, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.drawing import beeps, wav
from tests.support.page.actions import ask, drop_file, drop_picture, expect
from tests.support.page.pausable_server import PausableServer
from tests.support.page.sizes import open_sized

__all__ = ["open_sized"]

axe = pytest.importorskip("axe_playwright_python", reason="no axe-core: `make test-page`")
SCRIPT = (Path(axe.__file__).parent / "axe.min.js").read_text()

ANSWER = """\
# Shapes

A **red** [circle](https://example.org).

| a | b |
|--|--|
| 1 | 2 |

- [ ] x

```py
# The area.
class Square(Shape):
    def area(self):
        return self.side ** 2 or len("none")
```

```html
<p class="red">x</p>
```

$$x^2$$
"""
FOUND = """async () => (await axe.run()).violations.map(
  ({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(" ")}`)"""


def violations(page) -> list[str]:
    page.evaluate(SCRIPT)
    return page.evaluate(FOUND)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_found(open_sized, scheme):
    with PausableServer(ANSWER) as server:
        page = open_sized(
            server.url, color_scheme=scheme, permissions=["camera"], reduced_motion="reduce"
        )
        expect(page.locator("#state-text")).to_have_text("ready")
        expect(page.locator(".sample")).to_have_count(3)
        assert violations(page) == []
        drop_picture(page)
        drop_file(page, wav(beeps(1)), "beep.wav", "audio/wav")
        drop_file(page, b"?", "notes.xyz", "")
        expect(page.locator(".chip")).to_have_count(3)
        page.get_by_role("button", name="Add", exact=True).click()
        assert violations(page) == []
        ask(page, "What?")
        expect(page.locator(".receipt")).to_have_count(1)
        expect(page.locator("math")).to_be_visible()
        expect(page.locator(".kept")).to_have_count(1)
        for kind in ("comment", "keyword", "string", "number", "title", "name"):
            expect(page.locator(f".of-{kind}").first).to_be_visible()
        assert violations(page) == []
        if page.locator("#history").is_hidden():
            page.get_by_role("button", name="Conversations", exact=True).click()
        page.get_by_role("button", name="Actions for What?").click()
        expect(page.get_by_role("button", name="Rename")).to_be_visible()
        assert violations(page) == []
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Settings").click()
        for section in page.locator("#settings summary").all()[1:]:
            section.click()
        assert violations(page) == []
        page.get_by_role("button", name="Done").click()
        page.get_by_role("button", name="Add", exact=True).click()
        page.get_by_role("button", name="Camera", exact=True).click()
        expect(page.get_by_role("button", name="Take picture")).to_be_visible()
        assert violations(page) == []
