"""Which message parts are media, and where their bytes are loaded from."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
from pathlib import Path
from urllib.parse import quote

import pytest

from lookonce.config import MediaConfig
from lookonce.errors import (
    BadRequestError,
    MediaForbiddenError,
    MediaNotCachedError,
    RequestError,
    TooLargeError,
    UnprocessableMediaError,
    http_status,
)
from lookonce.render.media.loader import MediaLoader, MediaSource, for_part, media_source
from tests.support.render.origin import Answer, origin

DATA = bytes(range(200))
ENCODED = base64.b64encode(DATA).decode()
PARAM = "messages[1].content[0]"


def source_of(**part: object) -> MediaSource:
    return media_source(part, PARAM)


def load(source: MediaSource, config: MediaConfig | None = None) -> bytes:
    async def scenario() -> bytes:
        loader = MediaLoader(config or MediaConfig())
        try:
            return await loader.load(source)
        finally:
            await loader.aclose()

    return asyncio.run(scenario())


class TestParts:
    def test_an_image_url(self) -> None:
        source = source_of(type="image_url", image_url={"url": "https://a.example/b"}, uuid="u-1")
        assert source == MediaSource("image", "remote", "https://a.example/b", PARAM, "u-1")

    def test_an_audio_url(self) -> None:
        source = source_of(type="audio_url", audio_url={"url": "http://a.example/b"})
        assert (source.modality, source.origin) == ("audio", "remote")

    def test_a_url_may_stand_alone(self) -> None:
        assert source_of(type="image_url", image_url="https://a.example/").origin == "remote"

    def test_a_data_url(self) -> None:
        source = source_of(type="image_url", image_url={"url": f"data:image/png;base64,{ENCODED}"})
        assert source.origin == "inline"
        assert load(source) == DATA

    @pytest.mark.parametrize("header", ["data:;base64", "DATA:image/PNG;charset=x;BASE64"])
    def test_the_media_type_of_a_data_url_is_not_trusted(self, header: str) -> None:
        assert load(source_of(type="image_url", image_url=f"{header},{ENCODED}")) == DATA

    def test_input_audio(self) -> None:
        source = source_of(type="input_audio", input_audio={"data": ENCODED, "format": "wav"})
        assert source.modality == "audio"
        assert load(source) == DATA

    def test_a_uuid_alone_is_a_source_without_bytes(self) -> None:
        for part in (
            {"type": "image_url", "image_url": None, "uuid": "u"},
            {"type": "image_url", "uuid": "u"},
        ):
            source = media_source(part, PARAM)
            assert (source.origin, source.uuid) == ("nothing", "u")

    @pytest.mark.parametrize(
        ("part", "words"),
        [
            ({"type": "video_url", "video_url": {}}, "needs a url"),
            ({"type": "hologram"}, "'hologram'"),
            ({"type": 3}, "not a text"),
            ({}, "unknown content type"),
            ({"type": "image_url"}, "needs a url"),
            ({"type": "image_url", "image_url": {}}, "needs a url"),
            ({"type": "image_url", "image_url": {"url": 5}}, "needs a url"),
            ({"type": "image_url", "image_url": {"url": ""}}, "needs a url"),
            ({"type": "image_url", "image_url": {"url": "cat.png"}}, "https, http, data"),
            ({"type": "image_url", "image_url": {"url": "ftp://a.b/c"}}, "https, http, data"),
            ({"type": "image_url", "image_url": {"url": "https://a/" + "b" * 9000}}, "longer than"),
            ({"type": "image_url", "image_url": {"url": "data:image/png,raw"}}, "base64"),
            ({"type": "image_url", "image_url": {"url": "data:image/png;base64"}}, "base64"),
            ({"type": "image_url", "image_url": {"url": "lookonce:abc"}}, "64 hexadecimal"),
            ({"type": "image_url", "image_url": "lookonce:" + "0" * 65}, "64 hexadecimal"),
            ({"type": "audio_url", "audio_url": "lookonce:" + "0" * 64}, "https, http, data"),
            ({"type": "image_url", "image_url": "https://a.b/", "uuid": ""}, "uuid"),
            ({"type": "image_url", "image_url": "https://a.b/", "uuid": 7}, "uuid"),
            ({"type": "image_url", "image_url": "https://a.b/", "uuid": "x" * 600}, "uuid"),
            ({"type": "input_audio", "input_audio": {"format": "wav"}}, "base64 data"),
            ({"type": "input_audio", "input_audio": {"data": ENCODED}}, "format"),
            ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "base64 data"),
            ({"type": "input_audio", "input_audio": {"data": "QQ==", "format": "aiff"}}, "format"),
            ({"type": "input_audio", "input_audio": "text"}, "base64 data"),
        ],
    )
    def test_a_part_that_makes_no_sense_is_named_in_its_error(
        self, part: dict[str, object], words: str
    ) -> None:
        with pytest.raises(BadRequestError, match=words) as raised:
            media_source(part, PARAM)
        assert raised.value.param == PARAM
        assert raised.value.message.startswith(PARAM)


class TestInline:
    @pytest.mark.parametrize(
        "text", ["QUJDR", "%51UJD", "QUJ%", "QUJ_", "=QUJ", "QUJD,", "é", "Q===", "QU=JD", "QUJD\0"]
    )
    def test_what_is_no_base64_is_refused(self, text: str) -> None:
        with pytest.raises(BadRequestError, match="base64") as raised:
            load(source_of(type="image_url", image_url=f"data:image/png;base64,{text}"))
        assert raised.value.param == PARAM

    @pytest.mark.parametrize(
        "text", [ENCODED, quote(ENCODED), ENCODED.rstrip("="), "\n".join(ENCODED) + "\n"]
    )
    def test_base64_comes_in_lines_percent_encoded_and_without_padding(self, text: str) -> None:
        url = f"data:audio/wav;base64,{text}"
        assert load(source_of(type="image_url", image_url=url)) == DATA
        assert load(source_of(type="audio_url", audio_url=url)) == DATA
        for data in (text, url):
            audio = {"data": data, "format": "wav"}
            assert load(source_of(type="input_audio", input_audio=audio)) == DATA

    def test_nothing_is_no_media(self) -> None:
        with pytest.raises(BadRequestError, match="empty"):
            load(source_of(type="image_url", image_url="data:image/png;base64,"))

    @pytest.mark.parametrize("size", [99, 100, 101, 102, 103, 104, 1000])
    def test_the_limit_is_exact(self, size: int) -> None:
        text = base64.b64encode(bytes(size)).decode()
        source = source_of(type="image_url", image_url=f"data:;base64,{text}")
        config = MediaConfig(max_bytes=100)
        if size <= 100:
            assert load(source, config) == bytes(size)
        else:
            with pytest.raises(TooLargeError, match="larger than 100 bytes"):
                load(source, config)


class TestFiles:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "outside.png").write_bytes(b"secret")
        root = tmp_path / "media"
        root.mkdir()
        (root / "a b.png").write_bytes(DATA)
        (root / "link.png").symlink_to(root / "a b.png")
        (root / "leak.png").symlink_to(tmp_path / "outside.png")
        (root / "up").symlink_to(tmp_path)
        (root / "loop").symlink_to(root / "loop")
        (root / "empty.png").touch()
        (tmp_path / "media-other").mkdir()
        (tmp_path / "media-other" / "c.png").write_bytes(b"secret")
        return root

    def read(self, url: str, root: Path, **limits: int) -> bytes:
        source = source_of(type="image_url", image_url={"url": url})
        return load(source, MediaConfig(local_path=str(root), **limits))

    @pytest.mark.parametrize(
        "url",
        ["file://{root}/a%20b.png", "file://localhost{root}/link.png", "file:{root}/link.png"],
    )
    def test_files_beneath_the_folder_are_read(self, root: Path, url: str) -> None:
        assert self.read(url.format(root=root), root) == DATA

    @pytest.mark.parametrize(
        "url",
        [
            "file://{root}/../outside.png",
            "file://{root}/%2e%2e/outside.png",
            "file://{root}/leak.png",
            "file://{root}/up/outside.png",
            "file://{root}/../media-other/c.png",
            "file://{root}/../not-there.png",
            "file:///etc/passwd",
            "file://server{root}/link.png",
            "file://",
        ],
    )
    def test_outside_the_folder_nothing_exists(self, root: Path, url: str) -> None:
        with pytest.raises(MediaForbiddenError) as raised:
            self.read(url.format(root=root), root)
        assert str(root.parent) not in raised.value.message

    @pytest.mark.parametrize("name", ["not-there.png", "empty.png", "", "loop"])
    def test_what_is_no_file_is_unreadable(self, root: Path, name: str) -> None:
        with pytest.raises((UnprocessableMediaError, BadRequestError)) as raised:
            self.read(f"file://{root}/{name}", root)
        assert str(root) not in raised.value.message

    def test_a_file_that_fails_while_it_is_read_is_unreadable(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(fd: int, *args: object, **kwargs: object) -> None:
            raise OSError(errno.EIO, "Input/output error", str(root))

        monkeypatch.setattr(os, "fdopen", failing)
        with pytest.raises(UnprocessableMediaError, match="cannot be read") as raised:
            self.read(f"file://{root}/link.png", root)
        assert str(root) not in raised.value.message

    def test_a_null_byte_is_no_name(self, root: Path) -> None:
        with pytest.raises(BadRequestError):
            self.read(f"file://{root}/a%00b", root)

    def test_files_above_the_limit_are_refused(self, root: Path) -> None:
        assert self.read(f"file://{root}/link.png", root, max_bytes=200) == DATA
        with pytest.raises(TooLargeError):
            self.read(f"file://{root}/link.png", root, max_bytes=199)

    def test_without_a_folder_no_file_is_allowed(self, root: Path) -> None:
        with pytest.raises(MediaForbiddenError, match="not allowed"):
            load(source_of(type="image_url", image_url={"url": f"file://{root}/link.png"}))


class TestLoading:
    def test_a_uuid_without_bytes_is_media_not_cached(self) -> None:
        with pytest.raises(MediaNotCachedError) as raised:
            load(source_of(type="image_url", uuid="u"))
        assert (raised.value.code, http_status(raised.value)) == ("media_not_cached", 422)

    def test_remote_errors_name_the_part(self) -> None:
        with pytest.raises(MediaForbiddenError) as raised:
            load(source_of(type="image_url", image_url="http://127.0.0.1/"))
        assert raised.value.param == PARAM
        assert raised.value.message.startswith(f"{PARAM}: ")

    def test_private_media_are_fetched_where_allowed(self) -> None:
        async def scenario() -> bytes:
            async with origin({"/": Answer(DATA)}) as site:
                loader = MediaLoader(MediaConfig(allow_private=True))
                try:
                    return await loader.load(source_of(type="image_url", image_url=site.url()))
                finally:
                    await loader.aclose()

        assert asyncio.run(scenario()) == DATA

    def test_an_error_can_be_told_to_each_part_that_waited_for_it(self) -> None:
        shared: RequestError = UnprocessableMediaError("the image is broken")
        first, second = for_part(shared, "messages[0].content[0]"), for_part(shared, PARAM)
        assert type(first) is UnprocessableMediaError
        assert first.message == "messages[0].content[0]: the image is broken"
        assert second.param == PARAM
        assert second.code == "unprocessable_media"
