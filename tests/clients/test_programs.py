"""Programs that people run beside a server, unmodified: LiteLLM's proxy and lm-evaluation-harness.

`make test-clients` installs them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.drawing import ask, picture
from tests.support.programs import running_program

BIN = Path(sys.executable).parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
CHAT = "<|im_start|>user\nSay {}.<|im_end|>\n<|im_start|>assistant\n"


def needs(program: str) -> pytest.MarkDecorator:
    found = shutil.which(program, path=str(BIN))
    return pytest.mark.skipif(found is None, reason=f"{program} is not installed")


# --- LiteLLM's proxy --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxied(server, tmp_path_factory) -> Iterator[openai.OpenAI]:
    """OpenAI's client of a LiteLLM proxy that has nano as `eyes`."""
    folder = tmp_path_factory.mktemp("litellm")
    params = {"model": "openai/nano", "api_base": f"{server.url}/v1", "api_key": "none"}
    models = [{"model_name": "eyes", "litellm_params": params}]
    config = {"model_list": models, "litellm_settings": {"num_retries": 0}}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    config_file = ["--config", str(folder / "config.yaml")]
    line = [str(BIN / "litellm"), *config_file, "--host", "127.0.0.1"]
    with running_program(line, folder, ready="/health/readiness", env=OFFLINE) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@needs("litellm")
def test_litellm_proxy_asks_about_a_picture(proxied):
    messages = ask(picture(("red", "circle")), "What shape is red?")
    answer = proxied.chat.completions.create(model="eyes", messages=messages)
    assert answer.choices[0].message.content == "the circle"
    assert answer.usage.total_tokens > answer.usage.completion_tokens > 0


@needs("litellm")
def test_litellm_proxy_streams(proxied):
    stream = proxied.chat.completions.create(
        model="eyes", messages=ask("Say apple."), stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "apple"
    assert chunks[-1].usage.completion_tokens > 0


@needs("litellm")
def test_litellm_proxy_calls_a_tool(proxied):
    parameters = {
        "type": "object", "properties": {"city": {"enum": ["Bern", "Rom"]}}, "required": ["city"]
    }  # fmt: skip
    weather = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    answer = proxied.chat.completions.create(
        model="eyes", messages=ask("Weather?"), tools=[weather], tool_choice="required",
        max_tokens=200,
    )  # fmt: skip
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Rom")


@needs("litellm")
def test_litellm_proxy_uses_responses(proxied):
    assert proxied.responses.create(model="eyes", input="Say apple.").output_text == "apple"


@needs("litellm")
def test_litellm_proxy_hands_errors_on(proxied):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        proxied.chat.completions.create(model="eyes", messages=ask("Hi"), temperature=-1)


# --- lm-evaluation-harness --------------------------------------------------------------------


def evaluate(server, folder: Path, *, task: dict, model: str, path: str, **options) -> dict:
    """The results of a task of our own: nano is asked to say a word, and has the choice of two."""
    rows = [{"prompt": CHAT.format(word), "word": word} for word in ("apple", "river")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = {
        "task": "says", "dataset_path": "json", "test_split": "train",
        "dataset_kwargs": {"data_files": str(folder / "rows.jsonl")},
        "doc_to_text": "{{prompt}}", "doc_to_target": "{{word}}", "target_delimiter": "",
        **task,
    }  # fmt: skip
    (folder / "says.yaml").write_text(json.dumps(whole))
    arguments = {"model": "nano", "base_url": server.url + path, "num_concurrent": 1, **options}
    done = subprocess.run(
        [
            str(BIN / "lm_eval"), "--model", model, "--tasks", "says",
            "--include_path", str(folder), "--output_path", str(folder / "out"),
            "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
        ],
        capture_output=True, text=True, timeout=180, check=False, cwd=folder,
        env={**os.environ, **OFFLINE, "HF_HOME": str(folder / "hf")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (written,) = (folder / "out").rglob("results_*.json")
    return json.loads(written.read_text())["results"]["says"]


@needs("lm_eval")
@pytest.mark.parametrize("words", [["apple", "river"], ["river", "apple"]])
def test_lm_eval_scores_choices_with_the_remote_tokenizer(server, tmp_path, words):
    task = {
        "output_type": "multiple_choice", "doc_to_choice": words,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    found = evaluate(
        server, tmp_path, task=task, model="local-completions", path="/v1/completions",
        tokenizer_backend="remote", tokenized_requests=True,
    )  # fmt: skip
    assert found["acc,none"] == 1.0


@needs("lm_eval")
@pytest.mark.parametrize(
    ("model", "path", "options"),
    [
        ("local-completions", "/v1/completions", {"tokenizer_backend": "remote"}),
        ("local-completions", "/v1/completions", {"tokenizer_backend": None}),
    ],
)
def test_lm_eval_generates(server, tmp_path, model, path, options):
    task = {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": 20, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    found = evaluate(server, tmp_path, task=task, model=model, path=path, **options)
    assert found["exact_match,none"] == 1.0
