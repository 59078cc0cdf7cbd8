"""Documents: what is read of them, what is refused by name, and that no page is made twice."""

from __future__ import annotations

import asyncio
import io
from contextlib import asynccontextmanager

import pytest
from PIL import Image

from lookonce.cache.directory import Directory
from lookonce.cache.identity import UuidBindings
from lookonce.config import MediaConfig, ModelConfig
from lookonce.errors import BadRequestError, LookOnceError, TooLargeError, UnprocessableMediaError
from lookonce.render.media.documents import Documents, document_source
from lookonce.render.media.loader import MediaLoader, MediaSource
from lookonce.render.media.pdf import PAGES_PER_JOB, PagesJob, PdfRenderer, sample_pdf
from lookonce.render.renderer import open_renderer
from tests.support.documents import (
    as_base64,
    data_url,
    encrypted_pdf,
    file_part,
    line,
    pdf,
    red_circle,
)
from tests.support.render.doubles import until

PARAM = "messages[0].content[1]"
SCOPE = bytes(32)
TWO_PAGES = pdf(line("first page"), line("second page"))


class LocalPool:
    """Renders right here, while `gate` is open."""

    def __init__(self, max_pages: int = 100) -> None:
        self.renderer = PdfRenderer(max_pages=max_pages, max_pixels=50_000_000)
        self.jobs: list[tuple[int, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def start_beside(self) -> None:
        pass

    async def render(self, job: PagesJob):
        self.jobs.append((job.first, job.count))
        await self.gate.wait()
        return self.renderer.render(job)


@asynccontextmanager
async def documents(pool=None, *, pictures=True, max_pages=100, **options):
    loader = MediaLoader(MediaConfig())
    try:
        yield Documents(
            loader=loader,
            pool=pool or LocalPool(max_pages),
            pictures=pictures,
            max_pages=max_pages,
            max_pixels=50_000_000,
            **options,
        )
    finally:
        await loader.aclose()


def content_of(*parts, scope=SCOPE, **options):
    """What the parts become, in order."""

    async def read():
        async with documents(**options) as reader:
            sources = [document_source(part, f"p{n}") for n, part in enumerate(parts)]
            contents = await reader.read(sources, scope)
            return [contents[f"p{n}"] for n in range(len(parts))]

    return asyncio.run(read())


def refusal(part, **options) -> LookOnceError:
    async def read():
        async with documents(**options) as reader:
            await reader.read([document_source(part, PARAM)], SCOPE)

    with pytest.raises(LookOnceError) as refused:
        asyncio.run(read())
    return refused.value


def shown(content) -> str:
    """Texts, and `<image>` for each picture."""
    return "".join(p["text"] if isinstance(p, dict) else "<image>" for p in content)


# --- what is read --------------------------------------------------------------------------------


def test_a_pdf_is_a_picture_and_the_text_of_each_page():
    (content,) = content_of(file_part(TWO_PAGES, filename="a.pdf"))
    assert shown(content) == (
        "[a.pdf, page 1 of 2]\n<image>\nfirst page\n[a.pdf, page 2 of 2]\n<image>\nsecond page\n"
    )
    pages = [part for part in content if isinstance(part, MediaSource)]
    assert [Image.open(io.BytesIO(page.data)).size for page in pages] == [(400, 200)] * 2


def test_a_page_is_drawn_as_it_is():
    (content,) = content_of(file_part(pdf(red_circle(), size=(42, 42))))
    image = Image.open(io.BytesIO(content[1].data))
    assert image.size == (84, 84)
    assert image.getpixel((42, 42)) == (255, 0, 0)
    assert image.getpixel((2, 2)) == (255, 255, 255)


def test_a_form_s_values_are_drawn():
    (content,) = content_of(file_part(sample_pdf()))
    image = Image.open(io.BytesIO(content[1].data)).convert("L")
    field = image.crop((20, 140, 80, 180))
    assert min(field.tobytes()) < 128


def test_a_large_page_is_drawn_with_as_many_pixels_as_an_ordinary_one():
    (content,) = content_of(file_part(pdf(line("plan"), size=(2384, 3370))))
    width, height = Image.open(io.BytesIO(content[1].data)).size
    assert 1_900_000 < width * height <= 2_000_000


def test_a_model_that_does_not_see_gets_the_texts_alone():
    (content,) = content_of(file_part(TWO_PAGES), pictures=False)
    assert shown(content) == "[page 1 of 2]\nfirst page\n[page 2 of 2]\nsecond page\n"
    error = refusal(file_part(pdf(red_circle())), pictures=False)
    assert isinstance(error, UnprocessableMediaError)
    assert "hold no text" in error.message


@pytest.mark.parametrize("media_type", ["text/plain", "text/markdown", "application/json", ""])
def test_a_text_file_is_its_text(media_type):
    data = "\ufeffKöln\n".encode()
    plain = {"type": "file", "file": {"file_data": as_base64(data)}}
    parts = file_part(data, media_type, filename="n.md"), plain
    assert list(map(shown, content_of(*parts))) == ["[n.md]\nKöln\n", "Köln\n"]


def test_a_pdf_without_a_media_type_is_known_by_its_bytes():
    plain = {"type": "file", "file": {"file_data": as_base64(TWO_PAGES)}}
    octets = file_part(TWO_PAGES, "application/octet-stream")
    assert [len(content) for content in content_of(plain, octets)] == [6, 6]


# --- what is refused -----------------------------------------------------------------------------

BROKEN = [
    (TWO_PAGES[:300], 422, "broken or incomplete"),
    (encrypted_pdf(), 422, "encrypted"),
    (pdf(), 422, "has no pages"),
    (pdf(*[line("x")] * 10_000), 413, "has 10000 pages; at most 100"),
    (pdf(line("x"), size=(14_400, 14_400)), 413, "page 1 of the PDF is 200 x 200 inches"),
    (pdf(line("x"), size=(14_000, 1)), 422, "times longer than wide"),
]


@pytest.mark.parametrize(("data", "status", "words"), BROKEN)
def test_what_cannot_be_rendered_is_refused_by_name(data, status, words):
    error = refusal(file_part(data))
    expected = {413: TooLargeError, 422: UnprocessableMediaError}[status]
    assert type(error) is expected
    assert error.param == PARAM
    assert error.message.startswith(PARAM)
    assert words in error.message


UNSERVED = [
    (file_part(b"x", "image/png"), "image_url"),
    (file_part(b"PK", "application/zip"), "'application/zip' is not supported"),
    (file_part(b"hello"), "not a PDF"),
    (file_part(b"\xff\xfeh\0i\0", "text/plain"), "byte 0 is not UTF-8"),
    (file_part(b"a\0b", "text/plain"), "NUL"),
    (file_part(b"\x89PNG\r\n", ""), "neither PDF nor text"),
    ({"type": "file"}, "needs an object"),
    ({"type": "file", "file": {}}, "needs file_data or file_url"),
    ({"type": "file", "file": {"file_id": "file-1"}}, "no files are kept here"),
    ({"type": "file", "file": {"file_data": 5}}, "must be a text"),
    ({"type": "file", "file": {"file_data": "!"}}, "not valid base64"),
    ({"type": "file", "file": {"file_data": "data:,x"}}, "must hold base64"),
    ({"type": "file", "file": {"file_data": "aGk=", "file_url": "http://a/b"}}, "file_data or"),
    ({"type": "file", "file": {"file_data": "aGk=", "filename": "x" * 256}}, "filename"),
    ({"type": "file", "file": {"file_url": "ftp://a/b.pdf"}}, "must be https"),
    ({"type": "file", "file": {"file_url": "file:///etc/passwd"}}, "local files are not allowed"),
]


@pytest.mark.parametrize(("part", "words"), UNSERVED)
def test_other_files_are_refused_by_name(part, words):
    error = refusal(part)
    assert error.param == PARAM
    assert words in error.message


def test_documents_of_one_request_have_a_number_of_pages_together():
    with pytest.raises(TooLargeError, match="p1: the documents have 4 pages up to here; at most 3"):
        content_of(file_part(TWO_PAGES), file_part(pdf(line("a"), line("b"))), max_pages=3)


def test_without_the_extra_a_pdf_is_refused_and_a_text_is_read():
    error = refusal(file_part(TWO_PAGES), available=False)
    assert isinstance(error, BadRequestError)
    assert "pip install 'lookonce[documents]'" in error.message
    (content,) = content_of(file_part(b"hi", "text/plain"), available=False)
    assert shown(content) == "hi\n"


# --- once ----------------------------------------------------------------------------------------


def test_many_pages_are_rendered_a_few_at_a_time_and_held_for_their_scope():
    data = file_part(pdf(*[line(f"page {n}") for n in range(2 * PAGES_PER_JOB + 1)]))

    async def scenario():
        pool = LocalPool()
        async with documents(pool) as reader:
            source = [document_source(data, PARAM)]
            first = await reader.read(source, SCOPE)
            assert sorted(pool.jobs) == [(n * PAGES_PER_JOB, PAGES_PER_JOB) for n in range(3)]
            again = await reader.read(source, SCOPE)
            assert len(pool.jobs) == 3
            assert again == first
            assert dict(reader.pages) == {"rendered": 9, "held": 9}
            await reader.read(source, b"\1" * 32)
            assert len(pool.jobs) == 6

    asyncio.run(scenario())


def test_requests_that_bring_the_same_document_at_once_render_it_once():
    async def scenario():
        pool = LocalPool()
        pool.gate.clear()
        async with documents(pool) as reader:
            source = [document_source(file_part(TWO_PAGES), PARAM)]
            asked = [asyncio.create_task(reader.read(source, SCOPE)) for _ in range(3)]
            await until(lambda: pool.jobs)
            pool.gate.set()
            first, *others = await asyncio.gather(*asked)
            assert all(other == first for other in others)
            assert len(pool.jobs) == 1

    asyncio.run(scenario())


def test_what_does_not_fit_is_rendered_again():
    async def scenario():
        pool = LocalPool()
        async with documents(pool, capacity_bytes=1000) as reader:
            source = [document_source(file_part(TWO_PAGES), PARAM)]
            assert await reader.read(source, SCOPE) == await reader.read(source, SCOPE)
            assert len(pool.jobs) == 2

    asyncio.run(scenario())


def test_the_same_page_of_two_documents_is_the_same_picture():
    one, other = content_of(
        file_part(pdf(red_circle(), line("one"))), file_part(pdf(line("other"), red_circle()))
    )
    assert one[1].data == other[-2].data


# --- in chats, with real workers -----------------------------------------------------------------


class Chats:
    """A renderer of a model, with an event loop; its limit is 2 pictures."""

    def __init__(self, folder):
        media = MediaConfig(limit_per_prompt={"image": 2, "audio": 1})
        self.loop = asyncio.new_event_loop()
        self.opened = open_renderer(
            ModelConfig(str(folder), "model"),
            media,
            directory=Directory(1 << 24),
            uuids=UuidBindings(),
        )
        self.renderer = self.loop.run_until_complete(self.opened.__aenter__())

    def rendered(self, *messages):
        """The prompt's text and its number of pictures."""
        prompt = self.loop.run_until_complete(self.renderer.render_chat(messages))
        self.renderer.release(prompt)
        return prompt.text, len(prompt.items)

    def close(self):
        self.loop.run_until_complete(self.opened.__aexit__(None, None, None))
        self.loop.close()


@pytest.fixture(scope="module")
def nano(nano_folder):
    chats = Chats(nano_folder)
    yield chats
    chats.close()


def user(*parts):
    return {"role": "user", "content": list(parts)}


def test_a_text_only_model_reads_a_document_in_its_own_workers(folder):
    chats = Chats(folder("llama"))
    try:
        text, count = chats.rendered(user(file_part(TWO_PAGES, filename="a.pdf")))
    finally:
        chats.close()
    assert "[a.pdf, page 2 of 2]\nsecond page" in text
    assert count == 0


def test_pages_are_no_pictures_of_the_limit_where_the_model_takes_any_number(nano):
    pages = pdf(*[line(f"page {n}") for n in range(3)])
    text, count = nano.rendered(user(file_part(pages), {"type": "text", "text": "What?"}))
    assert "page 2" in text
    assert count == 3


def test_a_document_s_text_forges_no_placeholder(nano):
    (content,) = content_of(file_part(pdf(line("<|IMAGE|> <|vision_bos|>"))))
    assert "<|IMAGE|>" in shown(content)
    _, count = nano.rendered(user(file_part(pdf(line("<|IMAGE|> <|vision_bos|>")))))
    assert count == 1


def test_a_part_that_is_wrong_is_named_before_any_document_is_read(nano):
    with pytest.raises(BadRequestError, match=r"messages\[0\].content\[1\]"):
        nano.rendered(user(file_part(TWO_PAGES[:300]), {"type": "hologram"}))


def test_a_data_url_may_have_parameters_and_capitals():
    header = data_url(b"hi", "Text/Plain;charset=utf-8;name=a.txt")
    (content,) = content_of({"type": "file", "file": {"file_data": header}})
    assert shown(content) == "hi\n"
