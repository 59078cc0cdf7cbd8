"""Installs a wheel into an empty environment in another folder and answers there.

    python tools/wheel_smoke.py dist/lookonce-*.whl

The embedded model says what it sees in a drawn picture, once with each variant of the CPU kernels
that this CPU can run and once with none. All must answer the same, and the log must name the
variant. Then `lookonce serve` answers the same over HTTP. `make wheel` builds the wheel and calls
this.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import venv
from base64 import b64encode
from io import BytesIO
from pathlib import Path

TORCH = "torch==2.13.0"
QUESTION = "What is in the picture?"


def main(wheel: Path) -> None:
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
    with tempfile.TemporaryDirectory(prefix="lookonce-wheel-") as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        for wanted in (TORCH, str(wheel.resolve())):
            pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", wanted]
            subprocess.run(pip, check=True)
        script = folder / "smoke.py"
        script.write_bytes(Path(__file__).read_bytes())
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        subprocess.run([python, script, "compare"], cwd=folder, env=environment, check=True)


def compare() -> None:
    """In the environment with the wheel: answers with every variant, and with none."""
    import lookonce
    from lookonce.model.native.compiled import NONE, VARIABLE, VARIANTS, cpu_flags, runnable

    place = Path(lookonce.__file__).resolve()
    if not place.is_relative_to(Path(sys.prefix).resolve()):
        sys.exit(f"lookonce is imported from {place}, which is not the environment")
    can_run = runnable(cpu_flags())
    answers: dict[str, list[str]] = {}
    for variant in (*can_run, NONE):
        child = subprocess.run(
            [sys.executable, __file__, "answer"],
            env={**os.environ, VARIABLE: variant},
            capture_output=True,
            text=True,
        )
        line = next((x for x in child.stderr.splitlines() if f"CPU kernels: {variant} (" in x), "")
        if child.returncode or not line or "OpenMP runtimes" in child.stderr:
            sys.exit(f"{variant}: exit status {child.returncode}\n{child.stderr}")
        answers[variant] = json.loads(child.stdout)
        print(f"{variant:12} {answers[variant]}", flush=True)
    for variant in VARIANTS:
        if variant not in can_run:
            print(f"{variant:12} not tried: this CPU cannot run it")
    if len({str(answer) for answer in answers.values()}) != 1:
        sys.exit("the answers differ")
    if "red circle" not in answers[NONE][0]:
        sys.exit("the answer is wrong")
    if (said := serve()) != answers[NONE][0]:
        sys.exit(f"lookonce serve answers {said!r}")
    print(f"{'served':12} {said!r}")


def serve() -> str:
    """What `lookonce serve` of this environment says of the picture."""
    command = [Path(sys.prefix) / "bin" / "lookonce", "serve", "--port", "0"]
    log = Path("serve.log")
    with log.open("wb") as stderr:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        line = server.stdout.readline() if server.stdout else ""
        found = re.search(r"http://\S+", line)
        if found is None:
            sys.exit(f"lookonce serve does not say where it listens\n{log.read_text()}")
        body = {
            "messages": [{"role": "user", "content": shown()}],
            "temperature": 0,
            "max_tokens": 24,
        }
        request = urllib.request.Request(
            f"{found[0]}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])
    finally:
        server.terminate()
        server.wait()


def shown() -> list[dict[str, object]]:
    """A picture and a question about it."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (168, 112), "white")
    draw = ImageDraw.Draw(picture)
    draw.ellipse((14, 30, 66, 82), fill="red")
    draw.rectangle((100, 30, 152, 82), fill="blue")
    png = BytesIO()
    picture.save(png, "PNG")
    url = f"data:image/png;base64,{b64encode(png.getvalue()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    return [image, {"type": "text", "text": QUESTION}]


def answer() -> None:
    """Prints what the embedded model says of a picture, and of words alone, as JSON."""
    from lookonce import LLM, SamplingParams

    with LLM("nano") as llm:
        conversations = [[{"role": "user", "content": content}] for content in (shown(), QUESTION)]
        sampling = SamplingParams(temperature=0, max_tokens=24)
        print(json.dumps([output.text for output in llm.chat(conversations, sampling)]))


if __name__ == "__main__":
    if sys.argv[1:] == ["compare"]:
        compare()
    elif sys.argv[1:] == ["answer"]:
        answer()
    elif len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        sys.exit(__doc__)
