"""Tools for tests of the routes: a tool, a call of one as the model writes it, a chat template."""

from __future__ import annotations

from lookonce.frontend.tools.formats import choose_dialect

CLOCK = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
QWEN = "{% if tools %}{{ tools }}{% endif %}<tool_call>"


def with_tools(site, answer=CALL, template=QWEN, special=()):
    """Lets the engine answer `answer`, and the server read calls as `template` has them written."""
    site.engine.answer = answer
    ids = {text: number for number, text in enumerate(special)}
    site.services.tool_dialect = choose_dialect("auto", template, ids)
