"""Writes docs/clients.md from a run of the tests of clients.

    python tools/clients_table.py RESULTS.xml...

A client that was not run keeps its row. Each `RESULTS.xml` is what `pytest --junitxml` wrote; `make
test-clients` does both. Versions are those of the environment that this runs in, of
`tests/clients/node`, and of `.venv-open-webui`.
"""

import json
import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "clients.md"
NODE = ROOT / "tests" / "clients" / "node" / "node_modules"
OPENAI = r"end_to_end.test_(openai_client|responses|documents)\.test_(?!anthropic)|test_openai_"
CLIENTS = (
    ("OpenAI's client for Python", "openai", OPENAI),
    ("OpenAI's Agents SDK", "openai-agents", r"test_agents_sdk|test_realtime_agents"),
    ("Anthropic's client for Python", "anthropic", r"test_anthropic"),
    ("LangChain", "langchain-openai", r"test_langchain"),
    ("LlamaIndex", "llama-index-llms-openai-like", r"test_llama_index"),
    ("LiteLLM", "litellm", r"test_litellm_(?!proxy)"),
    ("LiteLLM's proxy", "litellm", r"test_litellm_proxy"),
    ("instructor", "instructor", r"test_instructor"),
    ("pydantic-ai", "pydantic-ai-slim", r"test_pydantic_ai"),
    ("DSPy", "dspy", r"test_dspy"),
    ("smolagents", "smolagents", r"test_smolagents"),
    ("Haystack", "haystack-ai", r"test_haystack"),
    ("lm-evaluation-harness", "lm-eval", r"test_lm_eval"),
    ("Open WebUI", "open-webui", r"test_open_webui"),
    ("OpenAI's client for Node.js", "node:openai", r"test_node_clients.*\[openai: "),
    ("Vercel's AI SDK", "node:ai", r"test_node_clients.*\[ai: "),
    ("Anthropic's client for Node.js", "node:@anthropic-ai/sdk", r"test_node_clients.*\[anthropic"),
)
"""Name, package, and what the ids of its tests have in them."""
HEAD = """\
# Clients of other makers

Each was used as published, in the version named, against a real server with nano. This page is
written by `make test-clients` (`tools/clients_table.py`); the tests are in `tests/clients`. Open
WebUI's row is that of the last `make test-open-webui`. Some of these hold OpenAI's client for
Python below its newest version, which `make test` uses for the same tests.

| client | package | version | tests passed | what was tried |
|---|---|---|---|---|"""


def main() -> None:
    cases = [case for path in sys.argv[1:] for case in ElementTree.parse(path).iter("testcase")]
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in rows_before()}
    for name, package, pattern in CLIENTS:
        own = [case for case in cases if re.search(pattern, identity(case))]
        passed = [case for case in own if len(case) == 0]
        if not own or all(case.find("skipped") is not None for case in own):
            rows.setdefault(name, f"| {name} | `{bare(package)}` | | not installed | |")
            continue
        tried = "; ".join(dict.fromkeys(words(case.get("name", "")) for case in passed))
        rows[name] = (
            f"| {name} | `{bare(package)}` | {version_of(package)} | {len(passed)} of {len(own)} "
            f"| {tried} |"
        )
    PAGE.write_text("\n".join([HEAD, *(rows[name] for name, _, _ in CLIENTS)]) + "\n")


def rows_before() -> list[str]:
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    return [line for line in lines if line.startswith("| ")]


def identity(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '')}.{case.get('name', '')}"


def words(test: str) -> str:
    """`test_llama_index_streams[x]` → "streams"; of a parameter that says what, the parameter."""
    said = re.search(r"\[\w+: (.*)\]", test)
    if said:
        return said[1]
    plain = re.sub(r"\[.*\]$", "", test).removeprefix("test_")
    firsts = (
        "openai|the_agents_sdk|agents_sdk|litellm_proxy|litellm|langchain|llama_index|instructor|"
        "pydantic_ai|dspy|smolagents|haystack|lm_eval|open_webui"
    )
    return re.sub(rf"^(?:{firsts})_(?:s_)?", "", plain).replace("_s_", "'s ").replace("_", " ")


def bare(package: str) -> str:
    return package.removeprefix("node:")


def version_of(package: str) -> str:
    if not package.startswith("node:"):
        own = [*sys.path, *map(str, ROOT.glob(".venv-open-webui/lib/*/site-packages"))]
        return next(iter(distributions(name=package, path=own))).version
    told = json.loads((NODE / bare(package) / "package.json").read_text())
    return str(told["version"])


if __name__ == "__main__":
    main()
