"""SECURITY.md's tables name tests that exist, and classes of weakness that no other test covers."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from lookonce.errors import BadRequestError, LookOnceError, ModelLoadError
from lookonce.render.prompt.encoder import ChatTemplate
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.sampling import SamplingParams
from tests.support.model.copies import copied, edit, load
from tests.support.server.site import site

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "SECURITY.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))
CLASSES = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]

RUNS_CODE = {"eval", "exec", "compile", "__import__"}
"""Builtins that run what they are given."""
UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "diskcache"}
READERS = {"load", "fromfile", "jit"}
"""Of torch and numpy: they may unpickle."""
SHELLS = {"system", "popen"}


# --- the page -------------------------------------------------------------------------------------


@cache
def _functions(path: str) -> set[str]:
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[f"{p}::{n}" if n else p for p, n in NAMED])
def test_a_test_that_the_page_names_exists(path: str, name: str) -> None:
    assert (ROOT / path).is_file()
    assert not name or name in _functions(path)


def test_seventeen_classes_have_numbers_and_tests() -> None:
    assert [int(line.split("|")[1]) for line in CLASSES] == list(range(1, len(CLASSES) + 1))
    assert len(CLASSES) >= 17
    for line in CLASSES:
        assert re.search(r"CVE-\d{4}-\d{4,}|GHSA(-\w{4}){3}", line), line
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", line), line


# --- code that is not ours is never run -----------------------------------------------------------


@cache
def _sources() -> list[tuple[Path, ast.AST]]:
    """Every node of our own code that calls, imports or passes something by name."""
    wanted = (ast.Import, ast.ImportFrom, ast.Call, ast.keyword)
    files = sorted((ROOT / "lookonce").rglob("*.py"))
    nodes = ((path, node) for path in files for node in ast.walk(ast.parse(path.read_text())))
    return [(path, node) for path, node in nodes if isinstance(node, wanted)]


def test_nothing_unpickles_or_runs_text() -> None:
    found = []
    for path, node in _sources():
        match node:
            case ast.Import(names):
                found += [(path.name, n.name) for n in names if n.name.split(".")[0] in UNPICKLES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in UNPICKLES:
                found.append((path.name, module))
            case ast.ImportFrom(module="torch" | "numpy" as module, names=names):
                found += [(path.name, f"{module}.{n.name}") for n in names if n.name in READERS]
            case ast.Call(args=[ast.Constant(str(name)), *_]) if name.split(".")[0] in UNPICKLES:
                found.append((path.name, name))  # import_module("pickle")
            case ast.Call(func=ast.Name(name)) if name in RUNS_CODE:
                found.append((path.name, name))
            case ast.Call(func=ast.Attribute(ast.Name("os"), name)) if name in SHELLS:
                found.append((path.name, name))
            case ast.Call(func=ast.Attribute(ast.Name("torch"), "load" | "jit" as name)):
                found.append((path.name, f"torch.{name}"))
            case ast.Call(
                func=ast.Attribute(ast.Name("np" | "numpy"), "load" | "fromfile" as name)
            ):
                found.append((path.name, f"numpy.{name}"))
            case ast.keyword("shell" | "allow_pickle" | "trust_remote_code", value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    found.append((path.name, node.arg))
    assert found == []


def test_every_automatic_class_is_told_to_run_no_code_of_the_folder() -> None:
    """transformers would ask on the terminal, where the option is left out."""
    for path, node in _sources():
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value)
        if node.func.attr == "from_pretrained" and "Auto" in owner:
            told = {keyword.arg for keyword in node.keywords}
            assert "trust_remote_code" in told, f"{path.name}:{node.lineno}"


EVIL = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
(Path(__file__).parent / "ran").touch()
class Config(LlamaConfig): pass
class Model(LlamaForCausalLM): pass
class Tokenizer(PreTrainedTokenizerFast): pass
"""


def test_code_in_a_model_folder_is_not_run(folder, tmp_path: Path) -> None:
    own = copied(folder("llama"), tmp_path)
    (own / "evil.py").write_text(EVIL)
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit(own / "config.json", auto_map=names, trust_remote_code=True)
    edit(own / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Tokenizer"]})
    edit(own / "config.json", _attn_implementation="somebody/kernels", experts_implementation="x/y")
    for attempt in (lambda: load(own), lambda: Tokenizer.load(own)):
        with suppress(LookOnceError):  # refused, or served without it
            attempt()
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 2) + b"{",
        b"\x08\0\0\0\0\0\0\0" + b"[" * 8,
    ],
    ids=["overflow", "beyond the file", "cut short", "no object"],
)
def test_a_weight_file_whose_header_lies_is_refused(folder, tmp_path: Path, header: bytes) -> None:
    own = copied(folder("llama"), tmp_path)
    (own / "model.safetensors").write_bytes(header)
    with pytest.raises(ModelLoadError, match=r"do not load|safetensors"):
        load(own)


@pytest.mark.parametrize("offsets", [[0, 1 << 62], [8, 0], [-4, 4], [0, 1 << 64]])
def test_a_weight_outside_of_its_file_is_refused(folder, tmp_path: Path, offsets) -> None:
    own = copied(folder("llama"), tmp_path)
    entry = {"dtype": "F32", "shape": [1, 1 << 60], "data_offsets": offsets}
    head = json.dumps({"model.embed_tokens.weight": entry}).encode()
    (own / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(16))
    with pytest.raises(ModelLoadError, match=r"do not load|safetensors"):
        load(own)


# --- templates ------------------------------------------------------------------------------------

ESCAPES = (
    "{{ cycler.__init__.__globals__.os.popen('touch ran').read() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ lipsum.__globals__['os'].system('touch ran') }}",
    "{{ messages.append({'role': 'system', 'content': 'x'}) }}",
    "{{ (raise_exception|attr('__globals__')) }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
)


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(source: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    try:
        said = ChatTemplate(source).render(messages)
    except LookOnceError as refused:
        said = str(refused)
    assert not (tmp_path / "ran").exists()
    assert "<class" not in said
    assert "root:" not in said
    assert messages == [{"role": "user", "content": "x"}]


# --- numbers that multiply work -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1 << 40), ("n", 0), ("n", -1), ("logprobs", 1 << 31), ("prompt_logprobs", 1 << 31),
        ("max_tokens", -1), ("top_k", -2), ("min_tokens", -1),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises((BadRequestError, ValueError), match=field.split("_")[0]):
        SamplingParams(**{field: value})


# --- keys -----------------------------------------------------------------------------------------


def test_no_host_or_path_opens_a_route_without_a_key() -> None:
    odd = ["/v1/models/", "//v1/models", "/version/../v1/models", "/v1/models;/health"]

    async def scenario() -> None:
        async with site(api_key=("one",)) as here:
            for path in ["/v1/models", "/reset_prefix_cache", "/abort_requests", *odd]:
                for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
                    for host in ("localhost", "localhost/health?", "localhost:80/version#"):
                        here.client.headers["Host"] = host
                        answer = await here.client.request(method, path)
                        assert answer.status_code in (400, 401, 403, 404, 405, 421), path
                        assert "data" not in answer.json()

    asyncio.run(scenario())
