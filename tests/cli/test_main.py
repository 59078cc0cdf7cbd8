"""The command line: what it says, refuses and starts."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module

import pytest

from lookonce.cli import config_file, preflight
from lookonce.cli.help import COMMANDS
from lookonce.cli.main import BENCHMARKS, app, main, run_benchmark
from lookonce.cli.options import GROUPS, HELP, options_from
from lookonce.config import OPTION_RANGES, Options, resolve
from lookonce.errors import ConfigError, ModelLoadError
from lookonce.types.kv import parse_tier_spec
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


def test_every_option_of_serve_is_in_one_group():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(
        f.name for f in dataclasses.fields(Options) if f.name != "model"
    )


def test_help_of_a_group_shows_it_alone(capsys):
    app(["serve", "--help=logs"], standalone_mode=False)
    text = capsys.readouterr().out
    assert text.startswith("Logs options:")
    assert all(f"--{name.replace('_', '-')}" in text for name in GROUPS["logs"])
    assert "--port" not in text


def test_every_command_has_a_heading(capsys):
    app(["--help"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "Other:" not in text
    assert not [line for line in text.splitlines()[1:] if line.endswith("...")]  # none is cut
    assert all(f"{heading}:" in text for heading in COMMANDS)


def test_commands_and_benchmarks_are_completed():
    def completed(words: str, at: int) -> list[str]:
        code = "import sys; sys.argv = ['lookonce']; from lookonce.cli.main import main; main()"
        asked = {"_LOOKONCE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **asked},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stdout.split()

    assert completed("lookonce ser", 1) == ["serve"]
    assert completed("lookonce bench war", 2) == ["warmup"]


MISTAKES = [
    (["serve", "--help=nothing"], "server, keys"),
    (["chat", "hi", "--url", "nowhere"], "--url"),
    (["chat", "hi", "--url", "http://127.0.0.1:1", "--device", "cuda"], "--device is an option of"),
    (["chat", "hi", "--audio", "/nowhere.wav"], "nowhere.wav"),
    (["serve", "--prot", "1"], "--prot"),
    (["serve", "--port", "http"], "--port must be a whole number, got 'http'"),
    (["serve", "--kv-cache-gb", "many"], "--kv-cache-gb must be a number, got 'many'"),
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
    (["serve", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
    (["serve", "--kv-cache-gb", "1000000"], "--kv-cache-gb"),
    (["serve", "--max-model-len", "1000000"], "--max-model-len is at most 4096"),
    (["serve", "--tensor-parallel", "3"], "--tensor-parallel 3: the model has 4 attention heads"),
    *(
        (["serve", "--kv-tier", spec], "--kv-tier")
        for spec in ("host", "host:4", "disk:relative:1GB", "lmcache://", "valkey://")
    ),
    (["serve", "--kv-tier", "valkey://127.0.0.1:1"], "valkey://127.0.0.1:1 does not answer"),
    (["serve", "--kv-tier", "valkey:///nowhere.sock"], "valkey:///nowhere.sock does not answer"),
    (["serve", "--kv-tier", "disk:/proc/none:1GB"], "/proc/none cannot be made"),
    *((["serve", "--lora", spec], "--lora: ") for spec in ("a", "=x", "a=", "nano=/", "a b=/")),
    (["serve", "--lora", "a=/nowhere"], "--lora: /nowhere is not a folder"),
    (["serve", "--lora-dir", "/nowhere"], "--lora-dir: /nowhere is not a folder"),
    (["serve", "--lora", "a=/", "--lora", "a=/"], "two models have the name 'a'"),
    (["serve", "--lora", "a=/", "--lora", "b=/", "--max-loras", "1"], "--max-loras 1"),
    (["serve", "--lora", "a=/"], "--lora: / has no adapter_config.json"),
    (["serve", "/nowhere"], "'/nowhere' is not a folder"),
    (["serve", "--root-path", "models"], "--root-path"),
    (["chat", "hi", "--image", __file__], f"--image: {__file__} is not a picture"),
    (["bench", "nothing"], "nothing"),
    (["dance"], "dance"),
]


def refused(monkeypatch, capsys, *arguments: str) -> str:
    """The one line that `lookonce` ends with, status 2, in this process."""
    monkeypatch.setattr("sys.argv", ["lookonce", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    (line,) = told.err.splitlines()
    return line


@pytest.mark.parametrize(("arguments", "named"), MISTAKES)
def test_a_mistake_is_one_line_and_status_2(monkeypatch, capsys, arguments, named):
    assert named in refused(monkeypatch, capsys, *arguments)


def test_so_is_a_model_that_cannot_be_loaded(monkeypatch, capsys):
    def run_server(options: Options) -> int:
        raise ModelLoadError("the weights of /m do not load")

    monkeypatch.setattr("lookonce.cli.serve.run_server", run_server)
    assert "the weights of /m" in refused(monkeypatch, capsys, "serve")


def test_kernels_that_cannot_be_had_are_refused_before_anything_loads(monkeypatch, capsys):
    monkeypatch.setenv("LOOKONCE_CPU_KERNELS", "zz")
    line = refused(monkeypatch, capsys, "serve")
    assert "LOOKONCE_CPU_KERNELS must be one of" in line


def test_python_m_lookonce_is_the_command_line():
    assert import_module("lookonce.__main__").main is main


def test_a_mistake_in_the_file_of_limits_ends_the_start(monkeypatch, capsys, tmp_path):
    limits = tmp_path / "limits.toml"
    limits.write_text("[default]\nweight = 'much'\n")
    line = refused(monkeypatch, capsys, "serve", "--limits", str(limits))
    assert "default.weight: expected" in line


def test_a_mistake_is_told_without_a_traceback_or_a_warning():
    """In a process of its own, whose whole output is seen."""
    done = lookonce("serve", "--kv-tier", "host:4")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "--kv-tier" in line


NUMBERS = [f.name for f in dataclasses.fields(Options) if f.type in ("int", "int | None", "float")]
SLIPS = ["nan", "inf", "-inf", "-1", "1e300", str(10**30)]


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


def test_steps_are_planned_ahead_where_the_device_is_no_cpu(monkeypatch):
    monkeypatch.setattr("lookonce.config._device", lambda device: device)
    assert not resolve(Options()).scheduler.async_scheduling
    assert resolve(Options(device="cuda")).scheduler.async_scheduling
    assert resolve(Options(async_scheduling="on")).scheduler.async_scheduling
    assert not resolve(Options(async_scheduling="off", device="cuda")).scheduler.async_scheduling
    with pytest.raises(ConfigError, match="--async-scheduling is auto or on or off"):
        resolve(Options(async_scheduling="sometimes"))


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("--quantize", {"quantize": "int8"}),
        ("--kv-tier", {"kv_tier": ("host:1GB",)}),
        ("--encoder-tier", {"encoder_tier": ("host:1GB",)}),
        ("--lora-dir", {"lora_dir": "/adapters"}),
    ],
)
def test_what_one_process_alone_serves_is_refused_beside_tensor_parallelism(named, given):
    assert resolve(Options(tensor_parallel=2)).model.tensor_parallel_size == 2
    with pytest.raises(ConfigError, match=f"--tensor-parallel and {named}"):
        resolve(Options(tensor_parallel=2, **given))


def test_each_rank_of_tensor_parallelism_has_a_device(monkeypatch):
    monkeypatch.setattr(preflight, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(preflight, "num_cuda_devices", lambda: 2)
    preflight.check_device("cuda", 2)
    preflight.check_device("cpu", 4)
    with pytest.raises(ConfigError, match="--tensor-parallel 4: this machine has 2"):
        preflight.check_device("cuda", 4)
    with pytest.raises(ConfigError, match="--device is cpu or cuda"):
        resolve(Options(tensor_parallel=2, device="cuda:1"))


def test_snapshots_of_states_have_a_bound_of_their_own(monkeypatch, capsys):
    assert resolve(Options()).kv.state_cache_bytes == 1 << 28
    assert resolve(Options(state_cache_gb=0)).kv.state_cache_bytes == 0
    line = refused(monkeypatch, capsys, "serve", "/nowhere", "--state-cache-gb", "-1")
    assert "--state-cache-gb must be at least 0" in line


def test_a_model_that_is_not_there_is_said_so(tmp_path):
    done = lookonce("serve", str(tmp_path), "--port", "0")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("lookonce: ")


@pytest.mark.parametrize("command", [["serve"], ["render"], ["chat"]])
def test_a_type_that_is_not_served_is_refused_with_the_reason(
    monkeypatch, capsys, tmp_path, command
):
    (tmp_path / "config.json").write_text('{"model_type": "electra"}')
    words = ["Hello"] if command == ["chat"] else []
    line = refused(monkeypatch, capsys, *command, str(tmp_path), *words)
    assert line.startswith("lookonce: MODEL: models of type 'electra' are not supported")
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


# --- the options' three places --------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch):
    """Runs `lookonce serve` with arguments; returns the `Options` it would serve with."""
    found: list[Options] = []

    def run_server(options: Options) -> int:
        found.append(options)
        return 0

    monkeypatch.setattr("lookonce.cli.serve.run_server", run_server)

    def serve(*arguments: str) -> Options:
        app(["serve", *arguments], standalone_mode=False)
        return found.pop()

    return serve


FILE = """
model: /from/file
port: 1111
max-num-seqs: 5
kv_tier: [host:1GB, "disk:/tmp/x:1GB"]
allowed_hosts: one.example
limit_mm_per_prompt: {image: 3}
prefix_caching: false
served_model_name:
"""


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    served, monkeypatch, tmp_path
):
    file = tmp_path / "lookonce.yaml"
    file.write_text(FILE)
    from_file = served("--config", str(file))
    assert (from_file.model, from_file.port, from_file.max_num_seqs) == ("/from/file", 1111, 5)
    assert from_file.kv_tier == ("host:1GB", "disk:/tmp/x:1GB")
    assert from_file.allowed_hosts == ("one.example",)
    assert from_file.limit_mm_per_prompt == "image=3"
    assert (from_file.prefix_caching, from_file.served_model_name) == (False, None)
    monkeypatch.setenv("LOOKONCE_CONFIG", str(file))
    monkeypatch.setenv("LOOKONCE_PORT", "2222")
    monkeypatch.setenv("LOOKONCE_KV_TIER", "host:2GB host:3GB")
    monkeypatch.setenv("LOOKONCE_PREFIX_CACHING", "1")
    monkeypatch.setenv("LOOKONCE_MODEL", "/from/environment")
    both = served()
    assert (both.model, both.port, both.max_num_seqs) == ("/from/environment", 2222, 5)
    assert (both.kv_tier, both.prefix_caching) == (("host:2GB", "host:3GB"), True)
    typed = served("typed", "--port", "3333", "--kv-tier", "host:4GB", "--no-prefix-caching")
    assert (typed.model, typed.port, typed.max_num_seqs) == ("typed", 3333, 5)
    assert (typed.kv_tier, typed.prefix_caching) == (("host:4GB",), False)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Options)])
def test_every_option_may_stand_in_the_environment(served, monkeypatch, name):
    kind = type(getattr(Options(), name))
    value = {bool: "0" if getattr(Options(), name) else "1", int: "7", float: "7"}.get(kind, "7")
    monkeypatch.setenv(config_file.variable_of(name), value)
    assert getattr(served(), name) != getattr(Options(), name)


def test_what_kubernetes_sets_for_a_service_is_no_option():
    environment = {"LOOKONCE_PORT": "tcp://10.0.0.1:80", "LOOKONCE_HOST": "0.0.0.0"}
    config_file.drop_service_links(environment)
    assert environment == {"LOOKONCE_HOST": "0.0.0.0"}


def test_variables_that_are_no_options_are_named():
    kubernetes = ("LOOKONCE_SERVICE_HOST", "LOOKONCE_SERVICE_PORT_HTTP", "LOOKONCE_UI_PORT")
    links = ("LOOKONCE_PORT_8000_TCP", "LOOKONCE_PORT_8000_TCP_ADDR")
    known = ("LOOKONCE_PORT", "LOOKONCE_CONFIG", "LOOKONCE_MODEL", "PATH", *kubernetes, *links)
    assert config_file.unknown_variables(dict.fromkeys(known, "x")) == []
    (said,) = config_file.unknown_variables({"LOOKONCE_MAX_NUM_SEQ": "5"})
    assert said.endswith(
        "LOOKONCE_MAX_NUM_SEQ is no option and has no effect (did you mean LOOKONCE_MAX_NUM_SEQS?)"
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 5", "'prot' (did you mean port?)"),
        ("- port", "OPTION: VALUE"),
        ("port: [", "line 1"),
        ("port: 80.5", "--port must be a whole number, got '80.5' (in the file of --config)"),
        ("port: {a: 1}", "port is not a value"),
        ("kv_tier: [[a]]", "kv_tier is not a value"),
        ("host: h\nport: 2026-99-99", "is not YAML in line 2"),  # read as a date
        ("port: " + "9" * 5000, "is not YAML in line 1"),
        ("port: 1\nport: 2", "'port' twice, the second time in line 2"),
        ("max-num-seqs: 5\nmax_num_seqs: 6", "max_num_seqs is there twice"),
        ("limit_mm_per_prompt: &a {image: *a}", "limit_mm_per_prompt is not a value"),
    ],
)
def test_a_file_s_mistakes_are_named(monkeypatch, capsys, tmp_path, text, named):
    file = tmp_path / "lookonce.yaml"
    file.write_text(text)
    assert named in refused(monkeypatch, capsys, "serve", "--config", str(file))


# --- what is judged before anything loads ---------------------------------------------------------


def test_a_mistake_in_a_variable_names_it(monkeypatch, capsys):
    monkeypatch.setenv("LOOKONCE_PORT", "http")
    assert "got 'http' (LOOKONCE_PORT)" in refused(monkeypatch, capsys, "serve")


def test_the_version_is_told_and_h_is_help():
    assert lookonce("--version").stdout.startswith("lookonce ")
    assert lookonce("serve", "-h").stdout == lookonce("serve", "--help").stdout


@pytest.mark.parametrize(
    ("has_cuda", "devices", "device", "said"),
    [
        (False, 1, "cuda", "built without CUDA"),
        (True, 0, "cuda", "no CUDA device"),
        (True, 2, "cuda:2", "cuda:0 to cuda:1"),
    ],
)
def test_a_device_that_is_not_there_is_said_so(monkeypatch, has_cuda, devices, device, said):
    monkeypatch.setattr(preflight, "torch_has_cuda", lambda: has_cuda)
    monkeypatch.setattr(preflight, "num_cuda_devices", lambda: devices)
    with pytest.raises(ConfigError, match=f"--device {device}: .*{said}"):
        preflight.check_device(device)


def test_a_device_that_is_there_is_taken(monkeypatch):
    monkeypatch.setattr(preflight, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(preflight, "num_cuda_devices", lambda: 2)
    for device in ("cpu", "cuda", "cuda:1"):
        preflight.check_device(device)


def test_a_tier_that_answers_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        preflight.check_tier(parse_tier_spec(f"valkey://127.0.0.1:{port}"))
    preflight.check_tier(parse_tier_spec(f"disk:{tmp_path}/made/later:1GB"))


def test_a_hub_that_cannot_be_reached_is_told_apart_from_a_model_it_lacks(monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    asked = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "empty")}
    done = lookonce("serve", "someone/model", env={**os.environ, **asked})
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "someone/model" in line
    assert "http://127.0.0.1:1 cannot be reached" in line
    with hub_without_models() as endpoint:
        done = lookonce(
            "serve", "someone/model", env={**os.environ, **asked, "HF_ENDPOINT": endpoint}
        )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert f"{endpoint} gives out no such model" in line


@contextmanager
def hub_without_models():
    """Answers 404 as the hub does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
