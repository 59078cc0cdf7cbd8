"""What a media worker can do when its decoder has been taken over: nothing but decode.

The workers are real ones in processes of their own, as a server starts them; only their decoder is
replaced by one that attacks.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image, ImageOps

from lookonce.errors import LookOnceError, UnprocessableMediaError
from lookonce.render.media import cost
from lookonce.render.media.pdf import PagesJob, PdfRenderer
from lookonce.render.media.pool import MediaPool, ServerShare
from lookonce.render.media.processing import MediaJob, Processed, Processing, ProcessingSettings
from lookonce.render.media.sandbox import (
    ALLOW,
    ALLOWED,
    ANY_BIT,
    ARGUMENTS,
    AT_EMPTY_PATH,
    AT_LEAST,
    AUDIT_ARCH,
    ENOSYS_INSTEAD,
    EPERM_INSTEAD,
    EQUAL,
    FCNTL,
    FIRST_X32_CALL,
    IOCTL,
    KILL_PROCESS,
    LOAD,
    NEWFSTATAT,
    RETURN,
    TGKILL,
    filter_program,
)
from tests.support.documents import line, pdf, red_circle
from tests.support.model.cases import ALL_MODELS
from tests.support.render.hostile_worker import ATTACKS
from tests.support.render.samples import picture

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
HOSTILE = (sys.executable, "-m", "tests.support.render.hostile_worker")
GUARDS = ("no_new_privs", "capabilities", "landlock", "seccomp")


def settings(folder: Path) -> ProcessingSettings:
    return ProcessingSettings(str(folder), "float32", 50_000_000, 600.0)


class Confined:
    """A pool of one confined worker, and its event loop."""

    def __init__(self, folder: Path, command: tuple[str, ...] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        options = {} if command is None else {"command": command}
        self.pool = MediaPool(settings(folder), share=ServerShare(num_workers=1), **options)  # type: ignore[arg-type]
        self.loop.run_until_complete(self.pool.start())

    def run(self, data: bytes, modality: str = "image", **options: object) -> Processed:
        job = MediaJob(modality, data, options)  # type: ignore[arg-type]
        return self.loop.run_until_complete(asyncio.wait_for(self.pool.run(job), 60))

    def outcome(self, name: str) -> str:
        """What came of an attack."""
        with pytest.raises(UnprocessableMediaError) as outcome:
            self.run(name.encode())
        return outcome.value.message

    def close(self) -> None:
        self.loop.run_until_complete(self.pool.aclose())
        self.loop.close()


@pytest.fixture(scope="module")
def hostile(nano_folder: Path) -> Iterator[Confined]:
    confined = Confined(nano_folder, HOSTILE)
    yield confined
    confined.close()


def png() -> bytes:
    file = io.BytesIO()
    picture(40, 40).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(autouse=True)
def seccomp_works() -> None:
    """Some containers allow no filters; there workers run without."""
    if not Path("/proc/sys/kernel/seccomp").exists():
        pytest.skip("this kernel has no seccomp")


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused(hostile: Confined, attack: str) -> None:
    assert re.fullmatch(r"refused: (EPERM|EACCES|ENOSYS)", hostile.outcome(attack)) or (
        # What the worker has no right to raise is not lowered by trying.
        attack == "privileges" and "EINVAL" in hostile.outcome(attack)
    )
    assert hostile.run(png()).item.arrays


def test_a_worker_holds_few_descriptors(hostile: Confined) -> None:
    """stdin, stdout, the null device as stderr, the real stderr, the socket."""
    assert int(hostile.outcome("descriptors").removeprefix("done: ")) <= 6


def test_a_worker_out_of_memory_is_replaced(hostile: Confined) -> None:
    before = hostile.pool.killed["memory"]
    (first,) = hostile.pool._workers.processes
    assert "too much memory" in hostile.outcome("memory")
    assert hostile.run(png()).item.arrays
    assert hostile.pool._workers.processes != {first}
    assert hostile.pool.killed["memory"] == before + 1


def test_a_worker_that_burns_time_is_replaced(
    hostile: Confined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "SHORTEST_DEADLINE", 0.5)
    assert "takes too long" in hostile.outcome("burn")
    monkeypatch.undo()
    assert hostile.run(png()).item.arrays


def test_a_worker_that_aborts_is_replaced(hostile: Confined) -> None:
    assert "its decoder crashed" in hostile.outcome("abort")
    assert hostile.run(png()).item.arrays


def test_a_worker_dies_with_the_process_that_started_it(nano_folder: Path) -> None:
    """Killed, so that nothing can be tidied up; the worker is busy and does not see its socket."""
    code = f"""
import asyncio, os, sys
from pathlib import Path
from lookonce.render.media.pdf import PagesJob, PdfRenderer
from lookonce.render.media.pool import MediaPool, ServerShare
from lookonce.render.media.processing import MediaJob, ProcessingSettings
async def main():
    settings = ProcessingSettings({str(nano_folder)!r}, "float32", 1000, 1.0)
    pool = MediaPool(settings, share=ServerShare(num_workers=1), command={HOSTILE!r})
    await pool.start()
    task = asyncio.create_task(pool.run(MediaJob("image", b"burn")))
    await asyncio.sleep(0.3)
    print(*[worker._process.pid for worker in pool._workers.processes], flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    worker = Path(f"/proc/{int(done.stdout)}")
    for _ in range(200):
        if not worker.exists() or (worker / "stat").read_text().split(") ")[1][0] in "ZX":
            return
        subprocess.run(["sleep", "0.05"])
    pytest.fail("the worker goes on")


def test_the_log_says_once_what_confines_the_workers(
    nano_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lookonce.render.media.pool"):
        confined = Confined(nano_folder)
        confined.close()
    (line,) = [record for record in caplog.records if "confined" in record.message]
    assert "seccomp" in line.message


def test_what_the_kernel_refuses_is_reported_and_the_rest_holds() -> None:
    code = """
from lookonce.render.media import sandbox
def refused():
    raise OSError(38, "Function not implemented")
sandbox._filter_system_calls = refused
report = sandbox.close_sandbox()
assert report.refused["seccomp"] == "Function not implemented", report
assert "no_new_privs" in report.active, report
if "landlock" in report.active:
    try:
        open("/etc/passwd")
    except PermissionError:
        print("refused")
else:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused\n", done.stderr


@pytest.mark.parametrize("machine", [0, 1], ids=["x86-64", "arm64"])
def test_the_filter_is_sound(machine: int) -> None:
    """Every jump lands on an instruction, and the last word is a refusal."""
    program = filter_program(machine, 1)
    assert program[-1] == (RETURN, 0, 0, EPERM_INSTEAD)
    for place, (code, yes, no, _) in enumerate(program):
        assert max(yes, no) < 256
        assert code == RETURN or place + 1 + max(yes, no) < len(program)
    loads = {each[3] for each in program if each[0] == 0x20}
    assert loads <= {0, 4, *(ARGUMENTS + 8 * n for n in range(6))}
    numbers = [each[machine] for each in ALLOWED.values() if each[machine] is not None]
    assert len(set(numbers)) == len(numbers)


def verdict(machine: int, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter says to a system call, run as the kernel runs it."""
    arch = AUDIT_ARCH[machine] if architecture is None else architecture
    words = {0: number, 4: arch} | {ARGUMENTS + 8 * n: word for n, word in enumerate(arguments)}
    program, place, loaded = filter_program(machine, 77), 0, 0
    while True:
        code, yes, no, constant = program[place]
        place += 1
        if code == RETURN:
            return constant
        if code == LOAD:
            loaded = words.get(constant, 0)
        else:
            holds = {
                EQUAL: loaded == constant,
                AT_LEAST: loaded >= constant,
                ANY_BIT: bool(loaded & constant),
            }[code]
            place += yes if holds else no


@pytest.mark.parametrize("machine", [0, 1], ids=["x86-64", "arm64"])
def test_the_filter_says_what_it_should(machine: int) -> None:
    assert verdict(machine, ALLOWED["read"][machine]) == ALLOW
    assert verdict(machine, ALLOWED["exit_group"][machine]) == ALLOW
    for openat in ((257, 56)[machine], (2, 1024)[machine]):
        assert verdict(machine, openat) == EPERM_INSTEAD
    terminal, typed = 0x5401, 0x5412  # TCGETS; TIOCSTI types into a terminal
    assert verdict(machine, IOCTL[machine], 1, terminal) == ALLOW
    assert verdict(machine, IOCTL[machine], 1, typed) == EPERM_INSTEAD
    duplicate, own = 0, 8  # F_DUPFD; F_SETOWN
    assert verdict(machine, FCNTL[machine], 3, duplicate) == ALLOW
    assert verdict(machine, FCNTL[machine], 3, own) == EPERM_INSTEAD
    assert verdict(machine, TGKILL[machine], 77, 1, 6) == ALLOW
    assert verdict(machine, TGKILL[machine], 78, 1, 6) == EPERM_INSTEAD
    assert verdict(machine, NEWFSTATAT[machine], 3, 0, 0, AT_EMPTY_PATH) == ALLOW
    assert verdict(machine, NEWFSTATAT[machine], 3, 0, 0, 0) == EPERM_INSTEAD
    assert verdict(machine, 435) == ENOSYS_INSTEAD
    assert verdict(machine, ALLOWED["read"][machine], architecture=3) == KILL_PROCESS


def test_calls_of_the_x32_interface_end_the_process() -> None:
    assert verdict(0, FIRST_X32_CALL | 59) == KILL_PROCESS


class TestDecodingInTheSandbox:
    """Nothing that real media need is loaded too late."""

    @pytest.fixture(scope="class")
    def confined(self, nano_folder: Path) -> Iterator[Confined]:
        confined = Confined(nano_folder)
        yield confined
        confined.close()

    @pytest.fixture(scope="class")
    def here(self, nano_folder: Path) -> Processing:
        return Processing(settings(nano_folder))

    @pytest.mark.parametrize("name", ["jpeg", "png", "gif", "webp", "odd", "sounds"])
    def test_media_of_every_form_are_as_outside(
        self, confined: Confined, here: Processing, name: str
    ) -> None:
        for modality, data in FORMS[name]:
            expected = here.run(MediaJob(modality, data))  # type: ignore[arg-type]
            assert confined.run(data, modality).item == expected.item

    def test_pages_of_a_pdf_are_as_outside(self, confined: Confined) -> None:
        """Also one in a font that no file here has."""
        job = PagesJob(pdf(line("a line"), red_circle()).replace(b"/Helvetica", b"/STSong-Xy"))
        outside = PdfRenderer(max_pages=100, max_pixels=50_000_000).render(job)
        inside = confined.loop.run_until_complete(asyncio.wait_for(confined.pool.render(job), 60))
        assert (inside.num_pages, inside.pages) == (outside.num_pages, outside.pages)

    @pytest.mark.parametrize(
        "data",
        [b"BM" + bytes(9), b"II*\0" + bytes(50), b"\xff\xd8\xff\xe0\0\2", b"RIFF", b"%PDF"],
    )
    def test_other_formats_and_broken_ones_are_refused_as_outside(
        self, confined: Confined, here: Processing, data: bytes
    ) -> None:
        for modality in ("image", "audio"):
            with pytest.raises(LookOnceError) as expected:
                here.run(MediaJob(modality, data))  # type: ignore[arg-type]
            with pytest.raises(LookOnceError) as got:
                confined.run(data, modality)
            assert got.value.message == expected.value.message


OTHERS = ("media:internvl", *(("qwen2_5_vl", "voxtral") if ALL_MODELS else ()))


@pytest.mark.parametrize("kind", OTHERS)
def test_processors_of_other_families_work_in_the_sandbox(folder, kind: str) -> None:
    path = folder(kind)
    confined, here = Confined(path), Processing(settings(path))
    modality = here.family.modalities[0]
    data = png() if modality == "image" else sound("WAV", "PCM_16")
    try:
        assert confined.run(data, modality).item == here.run(MediaJob(modality, data)).item
    finally:
        confined.close()


def saved(image: Image.Image, file_format: str, **options: object) -> tuple[str, bytes]:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return "image", file.getvalue()


def sound(container: str, codec: str, channels: int = 1, rate: int = 16000) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).normal(size=(8000, channels)) * 0.1
    soundfile.write(file, noise, rate, codec, format=container)
    return file.getvalue()


def _forms() -> dict[str, list[tuple[str, bytes]]]:
    image = picture(60, 40)
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 8, "Grüße"
    alpha = image.convert("RGBA")
    alpha.putalpha(ImageOps.invert(image.convert("L")))
    grey = np.asarray(image.convert("L")).astype(np.uint16) * 256
    frames = [picture(60, 40, seed) for seed in range(3)]
    return {
        "jpeg": [
            saved(image, "JPEG", exif=exif, comment=b"hello", dpi=(72, 72)),
            saved(image, "JPEG", progressive=True, icc_profile=bytes(200)),
            saved(image.convert("CMYK"), "JPEG"),
            saved(image.convert("L"), "JPEG"),
            saved(frames[0], "MPO", save_all=True, append_images=frames[1:]),
        ],
        "png": [
            *(saved(image.convert(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGB")),
            saved(alpha, "PNG", exif=exif),
            saved(Image.fromarray(grey), "PNG"),
            saved(image.quantize(16), "PNG", transparency=3),
            saved(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        ],
        "gif": [
            saved(image, "GIF", comment=b"hello"),
            saved(image.quantize(16), "GIF", transparency=3),
            saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        ],
        "webp": [
            saved(image, "WEBP", exif=exif),
            saved(alpha, "WEBP", lossless=True),
            saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        ],
        "odd": [saved(picture(1, 1), "PNG"), saved(picture(300, 2), "JPEG")],
        "sounds": [
            ("audio", sound(container, codec, channels, rate))
            for container, codec, channels, rate in (
                ("WAV", "PCM_16", 2, 44100),
                ("WAV", "FLOAT", 1, 16000),
                ("WAV", "ULAW", 1, 8000),
                ("FLAC", "PCM_24", 2, 48000),
                ("OGG", "VORBIS", 2, 22050),
                ("OGG", "OPUS", 1, 48000),
                ("MP3", "MPEG_LAYER_III", 2, 44100),
            )
        ],
    }


FORMS = _forms()
