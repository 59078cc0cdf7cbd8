"""The command line: what it says, refuses and starts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from importlib import import_module

import pytest

from lookonce.cli.main import BENCHMARKS, main, run_benchmark
from lookonce.cli.options import HELP, options_from
from lookonce.config import OPTION_RANGES, Options, resolve
from lookonce.errors import ConfigError
from tests.support.drawing import encoded, picture


def lookonce(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lookonce.cli.main", *arguments],
        capture_output=True, text=True, timeout=120, check=False, **options,
    )  # fmt: skip


def test_help_lists_the_commands_and_loads_no_engine():
    code = (
        "import sys; sys.argv = ['lookonce', '--help']\n"
        "import lookonce.cli.main as cli\n"
        "try: cli.main()\n"
        "finally: print({m.partition('.')[0] for m in sys.modules} & "
        "{'torch', 'transformers', 'numpy', 'zmq', 'starlette', 'rich'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    for command in ("serve", "chat", "bench"):
        assert command in done.stdout
    assert done.stdout.endswith("set()\n")


def test_serve_documents_every_option():
    text = lookonce("serve", "--help").stdout
    for field in dataclasses.fields(Options):
        assert HELP[field.name]
        if field.name != "model":
            assert "--" + field.name.replace("_", "-") in text
    assert "--no-prefix-caching" in text


MISTAKES = [
    (["serve", "--prot", "1"], "--prot"),
    (["serve", "--port", "http"], "--port"),
    (["serve", "--api-processes", "0"], "--api-processes"),
    (["serve", "--dtype", "int3"], "--dtype"),
    (["serve", "--device", "tpu"], "--device"),
    (["serve", "--api-key", "a:b:c"], "--api-key"),
    (["serve", "--limit-mm-per-prompt", "smell=2"], "--limit-mm-per-prompt"),
    (["serve", "--chat-template", "/nowhere.jinja"], "--chat-template"),
    (["serve", "--kv-cache-gb", "-1"], "--kv-cache-gb"),
    (["chat"], "TEXT"),
    (["chat", "nano", "two", "three"], "quotes"),
    (["chat", "hi", "--image", "/nowhere.png"], "nowhere.png"),
    (["bench", "nothing"], "nothing"),
    (["dance"], "dance"),
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES)
def test_a_mistake_is_one_line_and_status_2(arguments, named):
    done = lookonce(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert named in line


NUMBERS = [f.name for f in dataclasses.fields(Options) if f.type in ("int", "int | None", "float")]
SLIPS = ["nan", "inf", "-inf", "-1", "1e300", str(10**30)]


def refused(monkeypatch, capsys, *arguments: str) -> str:
    """The one line that `lookonce` ends with, status 2, in this process."""
    monkeypatch.setattr("sys.argv", ["lookonce", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    (line,) = told.err.splitlines()
    return line


def test_every_option_that_is_a_number_has_a_range():
    assert set(OPTION_RANGES) == set(NUMBERS)
    for name, allowed in OPTION_RANGES.items():
        default = getattr(Options(), name)
        assert default is None or default in allowed


@pytest.mark.parametrize("value", SLIPS)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_says_nothing_is_refused_by_the_option_s_name(
    monkeypatch, capsys, name, value
):
    flag = "--" + name.replace("_", "-")
    assert flag in refused(monkeypatch, capsys, "serve", "/nowhere", flag, value)


@pytest.mark.parametrize("value", SLIPS)
@pytest.mark.parametrize("flag", ["--temperature", "--max-tokens"])
def test_so_is_one_of_a_chat_before_the_model_is_looked_for(monkeypatch, capsys, flag, value):
    assert flag in refused(monkeypatch, capsys, "chat", "/nowhere", "Hello", flag, value)


@pytest.mark.parametrize("count", ["nan", "-1", "²", "1e3", str(10**30), "9" * 5000])
def test_so_is_a_count_of_media(monkeypatch, capsys, count):
    given = ["serve", "/nowhere", "--limit-mm-per-prompt", f"image={count}"]
    assert "--limit-mm-per-prompt" in refused(monkeypatch, capsys, *given)


def test_a_processor_cache_of_another_kind_is_refused(monkeypatch, capsys):
    line = refused(monkeypatch, capsys, "serve", "/nowhere", "--mm-processor-cache-type", "fifo")
    assert "--mm-processor-cache-type" in line
    assert "shm or lru" in line


def test_processed_media_is_shared_where_that_is_possible(monkeypatch, capsys):
    assert resolve(Options()).media.processor_cache_type == "shm"
    assert resolve(Options(mm_processor_cache_type="lru")).media.processor_cache_type == "lru"
    monkeypatch.setattr(sys, "platform", "darwin")
    line = refused(monkeypatch, capsys, "serve", "/nowhere", "--mm-processor-cache-type", "shm")
    assert "--mm-processor-cache-type: shm needs Linux" in line


def test_a_model_that_is_not_there_is_said_so(tmp_path):
    done = lookonce("serve", str(tmp_path), "--port", "0")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("lookonce: ")


@pytest.mark.parametrize("command", [["serve"], ["render"], ["chat"]])
def test_a_type_that_is_not_served_is_refused_with_the_reason(tmp_path, command):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    done = lookonce(*command, str(tmp_path), *(["Hello"] if command == ["chat"] else []))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("lookonce: MODEL: models of type 'bert' are not supported")
    assert "lookonce models" in line


def test_options_become_tuples_and_lists_of_domains_are_split():
    options = options_from(
        "m", {"api_key": ["a", "b:c"], "allowed_media_domains": ["x.org,y.org", "z.org"]}
    )
    assert options == Options(
        model="m", api_key=("a", "b:c"), allowed_media_domains=("x.org", "y.org", "z.org")
    )


def test_chat_prints_one_answer(tmp_path):
    image = tmp_path / "drawn.png"
    image.write_bytes(encoded(picture(("green", "triangle"))))
    done = lookonce("chat", "--image", str(image), "What is in the picture?")
    assert (done.returncode, done.stdout) == (0, "a green triangle\n"), done.stderr


def test_benchmarks_are_found_and_get_their_own_arguments(capsys):
    for name, (module, measures) in BENCHMARKS.items():
        assert measures
        with pytest.raises(SystemExit) as ended:
            run_benchmark(name, ["--help"])
        assert ended.value.code == 0
        assert name in capsys.readouterr().out
        assert import_module(module)


def test_an_unknown_benchmark_names_those_there_are(capsys):
    with pytest.raises(ConfigError, match="there is no benchmark 'fast'"):
        run_benchmark("fast", [])
    assert run_benchmark("list", []) == 0


def test_byte_and_pixel_limits_are_whole_numbers_however_python_gave_them():
    media = resolve(Options(max_media_bytes=1e6, max_image_pixels=5e7)).media  # type: ignore[arg-type]
    assert (media.max_bytes, media.max_image_pixels) == (1_000_000, 50_000_000)
    assert type(media.max_bytes) is type(media.max_image_pixels) is int
