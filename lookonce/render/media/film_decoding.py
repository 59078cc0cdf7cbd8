"""Decoding of films, in media workers: what is in a file, and its frames.

    index_film: bytes ─▶ FilmIndex: size, rate, and a digest of each frame; no frame is decoded
    decode_frames: bytes, indices ─▶ those frames, resized

* **GIF** (Pillow): a frame is drawn over those before it, so its digest covers all of them.
* **MP4, MOV, WebM, MKV, MPEG-TS, AVI** (PyAV, the extra `film`): packets are read and not decoded.
  A frame's digest covers the decoder's settings and the packets from its keyframe up to its own. So
  a longer cut of the same stream has the same digests, and so has one that begins at a later
  keyframe.

PyAV is taken, not torchcodec: its wheels bring FFmpeg along, it needs no torch (workers run without
it), and it reads packets without decoding them.
"""

from __future__ import annotations

import io
import math
import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image

from lookonce.errors import TooLargeError, UnprocessableMediaError
from lookonce.render.families.film import MAX_FPS, MAX_SIDE_RATIO

Levels = NDArray[np.uint8]
Resized = Callable[[Image.Image], Levels]
GIF_HEADS = (b"GIF87a", b"GIF89a")
GIF_FPS, GIF_MAX_FPS = 10.0, 100.0
"""Of a GIF whose frames have no duration, as browsers show it; and the most that one can have."""
DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,mpegts,avi"
NEEDS_PYAV = (
    "film files are decoded by PyAV, which is not installed here: pip install 'lookonce[film]'. "
    "Lists of frames (data:video/jpeg;base64,...,...) and GIF work without it"
)
UNREADABLE = "the data is no readable film (MP4, MOV, WebM, MKV, MPEG-TS, AVI or GIF)"
BROKEN = "the film is broken or incomplete"
NO_INDEX = f"{BROKEN}: the MP4 or MOV file has no index (moov), as one that is cut off"
MAX_TOTAL_FRAMES = 1_000_000


class FilmLimits(msgspec.Struct, frozen=True, array_like=True):
    """What a film may be; judged before a frame is decoded."""

    max_pixels: int
    """Of one frame."""
    max_seconds: float


class FilmIndex(msgspec.Struct, frozen=True, array_like=True):
    """What is in a film."""

    width: int
    height: int
    fps: float
    digests: bytes
    """32 bytes of each frame, in the order in which they are shown."""
    starts: tuple[int, ...] = ()
    """Index of the first frame of each group that can be decoded by itself."""

    @property
    def num_frames(self) -> int:
        return len(self.digests) // 32

    def digests_of(self, frames: Sequence[int]) -> bytes:
        return b"".join([self.digests[32 * index : 32 * index + 32] for index in frames])


def index_film(data: bytes | memoryview, limits: FilmLimits) -> FilmIndex:
    """Raises `UnprocessableMediaError` or `TooLargeError`, naming no request part."""
    data = bytes(data)
    found = _index_gif(data, limits) if data[:6] in GIF_HEADS else _index_file(data, limits)
    if not found.num_frames:
        raise UnprocessableMediaError("the film has no frames")
    check_film(found.num_frames, found.fps, found.width, found.height, limits)
    return found


def check_film(count: int, fps: float, width: int, height: int, limits: FilmLimits) -> None:
    """Raises `UnprocessableMediaError` or `TooLargeError`."""
    if width < 1 or height < 1:
        raise UnprocessableMediaError("the film's frames are empty")
    if width * height > limits.max_pixels:
        raise TooLargeError(f"the film's frames have more than {limits.max_pixels} pixels")
    if max(width, height) > MAX_SIDE_RATIO * min(width, height):
        raise UnprocessableMediaError(
            f"the film's frames are more than {MAX_SIDE_RATIO} times longer than wide, or wider "
            "than long"
        )
    if not 0 < fps <= MAX_FPS:
        raise UnprocessableMediaError(
            f"the film claims {fps:g} frames per second; at most {MAX_FPS:g} are taken"
        )
    if count / fps > limits.max_seconds:
        raise TooLargeError(
            f"the film is {count / fps:.6g} seconds long; at most {limits.max_seconds:g} are "
            "allowed"
        )


def decode_frames(
    data: bytes | memoryview, wanted: Sequence[int], width: int, height: int, resample: int
) -> list[Levels]:
    """Frames [height, width, 3], resized; `wanted` are ascending indices.

    Raises `UnprocessableMediaError` where the film has no such frame any more.
    """
    data = bytes(data)

    def resized(image: Image.Image) -> Levels:
        """At once: the frames as they are may take far more memory together."""
        return np.asarray(image.resize((width, height), Image.Resampling(resample)))

    decode = _gif_frames if data[:6] in GIF_HEADS else _file_frames
    frames = decode(data, wanted, resized)
    if len(frames) != len(wanted):
        raise UnprocessableMediaError(BROKEN)
    return frames


# --- GIF -----------------------------------------------------------------------------------------


def _index_gif(data: bytes, limits: FilmLimits) -> FilmIndex:
    """Walks the blocks of the file; every frame's digest is over all bytes up to its end."""
    most = min(MAX_TOTAL_FRAMES, math.ceil(limits.max_seconds * GIF_MAX_FPS))
    try:
        width, height = _little(data, 6), _little(data, 8)
        at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
        hashed, begun = blake3(data[:at]), at
        digests, hundredths, delay = [], 0, 0
        while data[at] != 0x3B:
            if data[at] == 0x21:
                if data[at + 1] == 0xF9:
                    delay = _little(data, at + 4)
                at = _after_blocks(data, at + 2)
            elif data[at] == 0x2C:
                left, top = _little(data, at + 1), _little(data, at + 3)
                if left + _little(data, at + 5) > width or top + _little(data, at + 7) > height:
                    raise UnprocessableMediaError("a frame of the GIF is larger than the film")
                table = 3 << (data[at + 9] & 7) + 1 if data[at + 9] & 0x80 else 0
                at = _after_blocks(data, at + 11 + table)
                hashed.update(data[begun:at])
                begun = at
                digests.append(hashed.digest())
                hundredths, delay = hundredths + delay, 0
            else:
                raise UnprocessableMediaError(BROKEN)
            if len(digests) > most:
                raise TooLargeError(f"the film has more than {most} frames")
    except IndexError:
        raise UnprocessableMediaError(BROKEN) from None
    fps = 100 * len(digests) / hundredths if hundredths else GIF_FPS
    return FilmIndex(width, height, min(fps, GIF_MAX_FPS), b"".join(digests), (0,))


def _little(data: bytes, at: int) -> int:
    return data[at] | data[at + 1] << 8


def _after_blocks(data: bytes, at: int) -> int:
    """The position after a chain of sub-blocks."""
    while data[at]:
        at += 1 + data[at]
    return at + 1


def _gif_frames(data: bytes, wanted: Sequence[int], resized: Resized) -> list[Levels]:
    try:
        image = Image.open(io.BytesIO(data), formats=("GIF",))
        frames = []
        for index in wanted:
            image.seek(index)
            frames.append(resized(_on_white(image)))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  decoders raise anything on hostile bytes
        raise UnprocessableMediaError(BROKEN) from None
    return frames


def _on_white(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        drawn = image.convert("RGBA")
        white = Image.new("RGBA", drawn.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, drawn).convert("RGB")
    return image.convert("RGB")


# --- files, by PyAV ------------------------------------------------------------------------------


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise UnprocessableMediaError(NEEDS_PYAV) from None
    return av


def warm_up_files() -> None:
    """Load all of PyAV, which imports its parts when they are needed, and decode a small film.
    Later a media worker can open no file. Does nothing where PyAV is not installed."""
    try:
        av = _av()
    except UnprocessableMediaError:
        return
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.endswith(("__main__", "datasets")):
            import_module(module.name)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        stream.codec_context.thread_count = 1  # this process may be one to be forked
        for level in (0, 200):
            levels = np.full((64, 64, 3), level, np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(levels, format="rgb24")))
        out.mux(stream.encode())
    index_film(file.getvalue(), FilmLimits(1 << 20, 60.0))
    decode_frames(file.getvalue(), (1,), 28, 28, 3)


def _opened(av: Any, data: bytes) -> tuple[Any, Any]:
    """The container and its first stream of pictures that is no cover."""
    options = {"format_whitelist": DEMUXERS, "protocol_whitelist": ""}
    container = av.open(io.BytesIO(data), "r", options=options, metadata_errors="ignore")
    streams = [s for s in container.streams.video if not s.disposition & 0x400]
    if not streams:
        kinds = "sound alone" if container.streams.audio else "no frames"
        container.close()
        raise UnprocessableMediaError(f"the film has {kinds}: it has no video stream")
    stream = streams[0]
    stream.thread_type, stream.codec_context.thread_count = "NONE", 1
    return container, stream


def _index_file(data: bytes, limits: FilmLimits) -> FilmIndex:
    if not _looks_like_film(data):
        raise UnprocessableMediaError(UNREADABLE)
    av = _av()
    try:
        container, stream = _opened(av, data)
    except av.FFmpegError:
        raise UnprocessableMediaError(NO_INDEX if _lacks_index(data) else UNREADABLE) from None
    with container:
        width, height = stream.codec_context.width, stream.codec_context.height
        claimed = float(stream.average_rate or stream.base_rate or 0)
        check_film(0, claimed or 1.0, width, height, limits)
        most = min(MAX_TOTAL_FRAMES, math.ceil(limits.max_seconds * MAX_FPS))
        try:
            packets = _packets(container, stream, most)
        except av.FFmpegError:
            raise UnprocessableMediaError(BROKEN) from None
        if not packets:
            raise UnprocessableMediaError("the film has no frames")
        settings = [stream.codec_context.name, width, height]
        extra = bytes(stream.codec_context.extradata or b"")
        digests, starts = _digests(packets, msgspec.msgpack.encode([settings, extra]))
        times = [at for at, _, _ in packets]
        fps = _measured_fps(times, stream.time_base, claimed)
        _check_whole(container, stream, (max(times) - min(times)) * float(stream.time_base), fps)
    return FilmIndex(width, height, fps, digests, starts)


CUT_SHORT = 0.9
"""A film with less of the time that it claims is cut off."""


def _check_whole(container: Any, stream: Any, span: float, fps: float) -> None:
    """Refuse a file that ends before the time that its header claims."""
    claimed = 0.0
    if stream.duration is not None:
        claimed = stream.duration * float(stream.time_base)
    elif container.duration is not None and not container.streams.audio:
        claimed = container.duration / 1e6
    if span + 2 / fps < CUT_SHORT * claimed:
        raise UnprocessableMediaError(
            f"{BROKEN}: it claims {claimed:.1f} seconds and has {span:.1f}"
        )


def _looks_like_film(data: bytes) -> bool:
    mov = data[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
    ts = data[:1] == b"\x47" and data[188:189] in (b"\x47", b"")
    avi = data[:4] == b"RIFF" and data[8:12] == b"AVI "
    return mov or ts or avi or data[:4] == b"\x1aE\xdf\xa3"


def _lacks_index(data: bytes) -> bool:
    """Whether this is an MP4 or MOV file with frames (mdat) and without their places (moov)."""
    at, boxes = 0, set()
    while len(head := data[at : at + 16]) >= 8:
        boxes.add(head[4:8])
        size = int.from_bytes(head[:4], "big")
        if size == 1:
            size = int.from_bytes(head[8:], "big")
        if size < 8:  # 0: the box ends with the file
            break
        at += size
    return b"mdat" in boxes and b"moov" not in boxes


def _packets(container: Any, stream: Any, most: int) -> list[tuple[int, bool, bytes]]:
    """`(time shown, keyframe, digest of its bytes)` in the order in which they are decoded."""
    found = []
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if packet.is_corrupt:
            raise UnprocessableMediaError(BROKEN)
        at = packet.pts if packet.pts is not None else packet.dts
        if packet.is_discard or at is None:
            continue
        found.append((int(at), packet.is_keyframe, blake3(bytes(packet)).digest()))
        if len(found) > most:
            raise TooLargeError(f"the film has more than {most} frames")
    return found


def _digests(
    packets: list[tuple[int, bool, bytes]], settings: bytes
) -> tuple[bytes, tuple[int, ...]]:
    """Each frame's digest in the order in which frames are shown, and where groups begin there."""
    keys = [number for number, (_, keyframe, _) in enumerate(packets) if keyframe]
    if not keys or keys[0] != 0:
        raise UnprocessableMediaError("the film does not begin with a whole picture")
    groups = [packets[first:end] for first, end in pairwise([*keys, len(packets)])]
    shown: list[tuple[int, bytes, bool]] = []
    before = b""
    for group in groups:
        first, so_far = group[0][0], blake3(settings)
        for at, _, digest in group:
            so_far.update(digest)  # a frame needs no packet that comes after its own
            # A frame that is shown before its keyframe needs the group before, too.
            found = blake3(so_far.digest() + before) if at < first else so_far
            shown.append((at, found.digest(), at == first))
        before = so_far.digest()
    shown.sort(key=lambda frame: frame[0])
    starts = tuple(index for index, (_, _, key) in enumerate(shown) if key)
    return b"".join([digest for _, digest, _ in shown]), starts


def _measured_fps(times: list[int], base: Any, claimed: float) -> float:
    """Frames per second by the times of the frames; as claimed where there is one frame alone."""
    span = (max(times) - min(times)) * float(base or 0)
    if len(times) < 2 or span <= 0:
        return claimed or 1.0
    measured = (len(times) - 1) / span
    return claimed if claimed and abs(measured - claimed) < 0.01 * claimed else measured


def _file_frames(data: bytes, wanted: Sequence[int], resized: Resized) -> list[Levels]:
    """Seeks to the keyframe before the first one, and decodes from there; where a container cannot
    be sought in (MPEG-TS), from its beginning."""
    av = _av()
    try:
        container, stream = _opened(av, data)
        with container:
            times = _shown_times(container, stream)
        shown = [times[index] for index in wanted]
        for seeks in (True, False):
            container, stream = _opened(av, data)
            with container:
                if seeks:
                    container.seek(shown[0], stream=stream, backward=True)
                try:
                    found = _decoded(container, stream, shown, resized)
                except av.FFmpegError:
                    if not seeks:
                        raise
                    continue
            if len(found) == len(shown):
                break
    except (av.FFmpegError, IndexError, ValueError):
        raise UnprocessableMediaError(BROKEN) from None
    return found


def _shown_times(container: Any, stream: Any) -> list[int]:
    times = []
    for packet in container.demux(stream):
        at = packet.pts if packet.pts is not None else packet.dts
        if packet.size and not packet.is_discard and at is not None:
            times.append(int(at))
    return sorted(times)


def _decoded(container: Any, stream: Any, wanted: Sequence[int], resized: Resized) -> list[Levels]:
    """The frames shown at these times, of those that are decoded from here on."""
    frames: dict[int, Levels] = {}
    needed, last = set(wanted), wanted[-1]
    for frame in container.decode(stream):
        at = frame.pts if frame.pts is not None else frame.dts
        if at in needed and at not in frames:
            # The sandbox allows no thread.
            levels = frame.reformat(format="rgb24", threads=1).to_ndarray()
            frames[at] = resized(Image.fromarray(levels))
        if len(frames) == len(needed) or (at is not None and at > last):
            break
    return [frames[at] for at in wanted if at in frames]
