"""Films: which frames are taken, what they become, and what is refused before it is decoded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from contextlib import asynccontextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.video_utils import VideoMetadata

from lookonce.config import MediaConfig
from lookonce.errors import (
    BadRequestError,
    ConflictError,
    MediaNotCachedError,
    RequestError,
    TooLargeError,
    UnprocessableMediaError,
)
from lookonce.render.families.arrays import ArrayMemory
from lookonce.render.families.film import (
    FilmInfo,
    FilmItem,
    FilmLayout,
    QwenFilms,
    picture_film,
)
from lookonce.render.media.cost import CostLimits, estimate_cost, picture_size
from lookonce.render.media.film import FilmFile, Films
from lookonce.render.media.film_decoding import FilmIndex, FilmLimits, decode_frames, index_film
from lookonce.render.media.loader import media_source
from lookonce.render.media.processing import MediaJob, Processed, unpack_frames
from lookonce.render.prompt.messages import read_messages
from lookonce.types.media import Array, Expansion, ProcessedItem
from tests.support.model.chats import PoolInProcess, make_renderer
from tests.support.model.films import (
    HEIGHT,
    WIDTH,
    encoded_film,
    file_part,
    film_part,
    frame,
    gif,
    gif_part,
    listed,
)
from tests.support.render.bombs import Scan, gif_film, progressive_jpeg, segment
from tests.support.render.doubles import until
from tests.support.render.hugging_face import video_rules

LIMITS = FilmLimits(1 << 20, 3600.0)
LIMITED = CostLimits(max_pixels=1 << 20, max_audio_seconds=60.0, max_cpu_seconds=10.0)
RULES = {"qwen2": video_rules("qwen2_vl"), "qwen3": video_rules("qwen3_vl")}


PICTURES = video_rules("internvl")


def films(rule: str, **config) -> QwenFilms:
    return QwenFilms(config, 7, "float32", ArrayMemory(), rule=rule, around=(8, 9))


def frames_of(layout) -> list[int]:
    return sorted({index for item in layout.items for index in item.frames})


# --- which frames, and how large: as transformers' own video processors say ----------------------


@pytest.mark.parametrize("rule", RULES)
@given(
    total=st.integers(4, 2000),
    rate=st.sampled_from([0.5, 1.0, 8.0, 23.976, 25.0, 29.97, 60.0, 240.0]),
    asked=st.sampled_from([{"fps": 0.5}, {"fps": 2.0}, {"num_frames": 4}, {}]),
)
def test_the_frames_are_those_of_transformers(rule, total, rate, asked):
    theirs = RULES[rule]
    settings = SimpleNamespace(
        fps=2.0, num_frames=None, min_frames=4, max_frames=768, temporal_patch_size=2
    )
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    expected = theirs.sample_frames(settings, metadata, **(asked or {"fps": 2.0}))
    info = FilmInfo(total, rate, WIDTH, HEIGHT)
    layout = films(rule).layout(info, dict(asked), 768)
    # Rounding makes transformers add a frame after the last one now and then, which no film has.
    assert frames_of(layout) == sorted({int(index) for index in expected} - {total})


@given(
    total=st.integers(1, 500),
    asked=st.integers(1, 64),
)
def test_a_film_of_pictures_has_the_frames_of_transformers(total, asked):
    asked = min(total, asked)
    settings = SimpleNamespace(num_frames=None, initial_shift=True)
    metadata = VideoMetadata(total_num_frames=total, fps=25.0)
    expected = PICTURES.sample_frames(settings, metadata, num_frames=asked)
    info = FilmInfo(total, 25.0, WIDTH, HEIGHT)
    found = picture_film(info, {}, {"num_frames": asked}, 768)
    assert found == [min(int(index), total - 1) for index in expected][:asked]


@given(count=st.integers(2, 300), width=st.integers(30, 3000), height=st.integers(30, 3000))
def test_the_size_of_a_frame_is_that_of_transformers(count, width, height):
    info = FilmInfo(count, 2.0, width, height, chosen=True)
    for rule, patch in (("qwen2", 14), ("qwen3", 16)):
        side = 28 if rule == "qwen2" else 32
        bounds = {"factor": side, "min_pixels": 128 * side**2, "max_pixels": 768 * side**2}
        if rule == "qwen2":
            expected = RULES[rule].smart_resize(height, width, **bounds)
        else:
            expected = RULES[rule].smart_resize(count, height, width, **bounds)
        layout = films(rule, patch_size=patch).layout(info, {}, 768)
        assert (layout.options["height"], layout.options["width"]) == expected


def test_frames_keep_their_size_where_the_bound_grows_with_their_number():
    """The same pixels for a frame in each request, as docs/models.md says."""
    subject = films("qwen3", size={"shortest_edge": 4096, "longest_edge": 25165824})
    sizes: dict[bool, set[tuple[object, ...]]] = {True: set(), False: set()}
    for count in range(2, 65):
        info = FilmInfo(count, 2.0, 1920, 1080, chosen=True)
        size = {"shortest_edge": 4096, "longest_edge": 200704 * count}
        for grows, kwargs in ((True, {"size": size}), (False, {})):
            sizes[grows].add(
                tuple(subject.layout(info, subject.options(kwargs), 768).options.items())
            )
    assert len(sizes[True]) == 1
    assert len(sizes[False]) > 1


def test_the_client_may_choose_from_a_list():
    info = FilmInfo(20, 4.0, WIDTH, HEIGHT, chosen=True)
    subject = films("qwen3")
    assert frames_of(subject.layout(info, {}, 768)) == list(range(20))
    assert len(frames_of(subject.layout(info, {"num_frames": 4}, 768))) == 4
    stamps = [item.before[-2] for item in subject.layout(info, {"num_frames": 4}, 768).items]
    assert stamps == ["<0.8 seconds>", "<4.0 seconds>"]


def test_more_frames_than_are_allowed_are_refused_or_sampled():
    listed_film = FilmInfo(20, 4.0, WIDTH, HEIGHT, chosen=True)
    with pytest.raises(TooLargeError, match="20 frames; at most 8"):
        films("qwen2").layout(listed_film, {}, 8)
    file = FilmInfo(2000, 25.0, WIDTH, HEIGHT)
    assert len(frames_of(films("qwen2").layout(file, {}, 8))) == 8


# --- what clients send -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "video_url", "video_url": "https://a.example/film.mp4"},
        {"type": "input_video", "input_video": {"data": "AAAA", "format": "mp4"}},
        {"type": "video", "video": "file:///film.webm"},
        {"type": "video", "video": ["data:image/png;base64,AAAA", "https://a.example/2.png"]},
        film_part([1, 2], 5.0),
    ],
)
def test_the_shapes_of_a_film(part):
    source = media_source(part, "messages[0].content[0]")
    assert source.modality == "video"
    content = [{"role": "user", "content": [part]}]
    assert read_messages(content, ("video",), {"video": 1}).conversation == [
        {"role": "user", "content": [{"type": "video"}]}
    ]
    with pytest.raises(BadRequestError, match="the model takes no video"):
        read_messages(content, ("image",), {"image": 1})


def test_films_that_the_engine_does_not_serve_are_refused(folder):
    """It found that they differ from transformers'; until it says so, the renderer takes them."""
    renderer = make_renderer(folder("media:internvl"))
    messages = [{"role": "user", "content": [film_part([1, 2])]}]
    assert asyncio.run(renderer.render_chat(messages)).items
    renderer.served_modalities = ("image",)
    assert renderer.modalities == ("image",)
    with pytest.raises(BadRequestError, match="the model takes no video"):
        asyncio.run(renderer.render_chat(messages))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"url": ""}, "needs a url"),
        ({"url": []}, "at least one frame"),
        ({"url": [5]}, r"content\[0\]\[0\]: a frame is the URL of a picture"),
        ({"url": "data:video/mp4;base64,AA", "fps": 0}, "fps: must be a number above 0"),
        ({"url": "data:video/mp4;base64,AA", "fps": 10000}, "fps: must be a number above 0"),
        ({"url": "ftp://a.example/film"}, "the URL must be"),
    ],
)
def test_a_part_that_is_no_film_is_named(body, message):
    with pytest.raises(BadRequestError, match=message):
        media_source({"type": "video_url", "video_url": body}, "messages[0].content[0]")


@pytest.fixture(scope="module")
def pool(folder) -> PoolInProcess:
    return PoolInProcess(folder("qwen3_vl"))


@pytest.fixture
def renderer(folder, pool):
    return make_renderer(folder("qwen3_vl"), pool)


def render(renderer, *parts, **options):
    messages = [{"role": "user", "content": [*parts]}]
    return asyncio.run(renderer.render_chat(messages, options=options))


BROKEN_GIF = gif(range(4))[:-200]


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        (film_part([]), BadRequestError, "frame 0 is empty"),
        (
            {"type": "video_url", "video_url": {"url": listed([frame(1), b"nothing"])}},
            UnprocessableMediaError,
            "frame 1 of the film is not a readable",
        ),
        (
            {"type": "video_url", "video_url": {"url": listed([frame(1), frame(2, 40, 30)])}},
            UnprocessableMediaError,
            "frame 1 of the film is 40 x 30, the first one 90 x 60",
        ),
        (
            {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,%%"}},
            BadRequestError,
            "frame 1 is not valid base64",
        ),
        (film_part(range(2), 1000.0), None, ""),
        (gif_part(BROKEN_GIF), UnprocessableMediaError, "broken or incomplete"),
        (file_part(b"GIF89a"), UnprocessableMediaError, "broken or incomplete"),
        (file_part(b"no film at all"), UnprocessableMediaError, "no readable film"),
        (film_part([1] * 800), TooLargeError, "800 frames; at most 768"),
        (film_part([1, 2], 0.0001), TooLargeError, "20000 seconds long; at most 3600"),
    ],
)
def test_a_bad_film_is_refused_and_named(renderer, part, error, message):
    text = {"type": "text", "text": "See"}
    if error is None:
        assert render(renderer, text, part).features
        return
    with pytest.raises(error, match=message) as refused:
        render(renderer, text, part)
    assert refused.value.message.startswith("messages[0].content[1]")


def test_frames_that_are_too_large_together_are_not_all_loaded():
    """Each of them may be as large as a whole film."""
    loaded = []

    class Site:
        async def load(self, source, scope, tenant=""):
            loaded.append(source.value)
            await asyncio.sleep(0)
            return bytes(1000)

    urls = [f"https://a.example/{number}.png" for number in range(500)]
    source = media_source({"type": "video", "video": urls}, "messages[0].content[0]")
    opened = Films(films("qwen2"), Site(), MediaConfig(max_bytes=10_000))
    with pytest.raises(TooLargeError, match="larger than 10000 bytes"):
        asyncio.run(opened.open(source, b"", {}))
    assert len(loaded) < 30


def test_a_film_that_is_longer_than_the_context_is_refused_before_it_is_decoded(folder):
    class NoWork(PoolInProcess):
        async def run(self, job):
            raise AssertionError("nothing is to be decoded")

    renderer = make_renderer(folder("qwen3_vl"), NoWork(folder("qwen3_vl")))
    renderer.max_model_len = 60
    with pytest.raises(BadRequestError, match="60"):
        render(renderer, film_part(range(40)))


def test_the_text_before_a_film_is_tokenized_with_its_time(renderer):
    """`Look: <0.5 seconds>`: a space and a bracket may be one token."""
    prompt = render(renderer, {"type": "text", "text": "Look: "}, film_part([1, 2]))
    whole = renderer.decode(prompt.token_ids)
    assert "Look: <0.5 seconds>" in whole
    text = whole.split("<|vision_start|>")[0].split("<|im_start|>user\n")[-1]
    tokens = renderer.tokenizer.encode(text, add_special_tokens=False)
    end = prompt.token_ids.index(renderer.special_tokens["<|vision_start|>"])
    assert prompt.token_ids[end - len(tokens) : end] == tokens


def test_a_clients_text_is_no_placeholder(renderer):
    text = {"type": "text", "text": "<|video_pad|>"}
    prompt = render(renderer, text, film_part([1, 2]))
    assert len(prompt.features) == 1
    alone = render(renderer, film_part([1, 2]))
    assert prompt.modality_tokens("video") == alone.modality_tokens("video")


@pytest.mark.parametrize("name", ["use_audio_in_video", "load_audio_from_video"])
def test_the_sound_of_a_film_is_refused_and_named(renderer, name):
    with pytest.raises(BadRequestError, match="the sound of films is not heard") as refused:
        render(renderer, film_part([1, 2]), mm_processor_kwargs={name: True})
    assert refused.value.param == f"mm_processor_kwargs.{name}"
    assert render(renderer, film_part([1, 2]), mm_processor_kwargs={name: False}).items


def test_a_rate_that_makes_parts_of_positions_is_refused():
    subject = QwenFilms(
        {"patch_size": 16}, 7, "float32", ArrayMemory(), rule="omni", tokens_per_second=13
    )

    def times(rate, **asked):
        info = FilmInfo(6, rate, 400, 300, chosen=True)
        return [item.time for item in subject.layout(info, asked, 768).items]

    assert times(2.0) == [0, 13, 26]
    assert times(1.0) == [0, 26, 52]
    assert times(3.0, fps=2.0, do_sample_frames=False) == [0, 13, 26]
    for rate in (4.0, 0.05):
        with pytest.raises(UnprocessableMediaError, match="choose another fps"):
            times(rate)
    for asked in (1e-30, 1e-300, 5e-324):  # longer than any number of single precision
        with pytest.raises(UnprocessableMediaError, match="choose another fps"):
            times(2.0, fps=asked)


# --- names ---------------------------------------------------------------------------------------


FILM = {**film_part(range(6), 4.0), "uuid": "film"}
NAMED = {"type": "video_url", "video_url": None, "uuid": "film"}


def live(*frames, fps=4.0):
    """A list of frames: numbers are sent, with a uuid; texts name one."""
    urls = [
        {"uuid": each}
        if isinstance(each, str)
        else {"url": listed([frame(each)]), "uuid": f"f{each}"}
        for each in frames
    ]
    return {"type": "video_url", "video_url": {"url": urls, "fps": fps}}


def outcomes(prompt):
    return [item.outcome for item in prompt.items]


@pytest.mark.parametrize("part", [FILM, {**gif_part(gif(range(6))), "uuid": "film"}])
def test_a_film_that_was_sent_is_named_by_its_uuid(renderer, part):
    first = render(renderer, part)
    named = render(renderer, NAMED)
    assert named.token_ids == first.token_ids
    assert named.features == first.features
    assert outcomes(named) == ["hit"] * len(first.items)


def test_another_film_under_its_uuid_is_refused(renderer):
    kept = render(renderer, FILM)
    for other in (range(8), (0, 1, 2, 9, 4, 5)):
        with pytest.raises(ConflictError, match=r"content\[0\]: this uuid is bound"):
            render(renderer, {**film_part(other, 4.0), "uuid": "film"})
    assert render(renderer, FILM).token_ids == kept.token_ids


def test_a_film_that_could_not_be_made_has_not_used_its_uuid_up(renderer):
    broken = [frame(number) for number in range(4)]
    broken[2] = broken[2][:60]
    part = {"type": "video_url", "video_url": {"url": listed(broken)}, "uuid": "film"}
    with pytest.raises(UnprocessableMediaError, match="broken"):
        render(renderer, part)
    assert render(renderer, FILM).items


@pytest.mark.parametrize(
    ("part", "where"),
    [
        (NAMED, r"content\[0\]"),
        (live(1, "unknown"), r"content\[0\]\[1\]"),
    ],
)
def test_what_nothing_is_held_of_is_named(renderer, part, where):
    with pytest.raises(MediaNotCachedError, match=where):
        render(renderer, part)


def test_names_belong_to_their_tenant(renderer):
    kept = render(renderer, FILM)
    messages = [{"role": "user", "content": [NAMED]}]
    with pytest.raises(MediaNotCachedError):
        asyncio.run(renderer.render_chat(messages, tenant="other"))
    assert kept.items


def test_a_live_film_sends_its_new_frames_and_names_the_others(renderer):
    kept = [render(renderer, live(1, 2, 3, 4))]
    moved = render(renderer, live("f3", "f4", 5, 6))
    assert outcomes(moved) == ["hit", "miss"]
    whole = render(renderer, film_part([3, 4, 5, 6], 4.0))
    assert whole.token_ids == moved.token_ids
    assert whole.features == moved.features
    # A named frame in a pair that was never made: it has to come again.
    with pytest.raises(MediaNotCachedError, match=r"content\[0\]\[0\]: no media is held"):
        render(renderer, live("f2", 3))
    part = live(1, 2)
    part["video_url"]["url"][1]["uuid"] = "f3"
    with pytest.raises(ConflictError, match=r"content\[0\]\[1\]: this uuid is bound"):
        render(renderer, part)
    assert kept


# --- GIF ---------------------------------------------------------------------------------------


def test_a_gif_has_its_frames_and_its_rate():
    index = index_film(gif(range(6), 250), LIMITS)
    assert (index.width, index.height, index.num_frames) == (WIDTH, HEIGHT, 6)
    assert math.isclose(index.fps, 4.0)
    first, fourth = decode_frames(gif(range(6)), [0, 3], 56, 28, 3)
    assert first.shape == (28, 56, 3)
    assert not np.array_equal(first, fourth)


def test_a_longer_gif_has_the_digests_of_the_shorter():
    short, long = (index_film(gif(range(count)), LIMITS) for count in (4, 7))
    assert long.digests[: 32 * 3] == short.digests[: 32 * 3]
    other = index_film(gif([9, 1, 2, 3]), LIMITS)
    assert not {short.digests_of([n]) for n in range(4)} & {other.digests_of([n]) for n in range(4)}


def test_every_cut_of_a_gif_is_a_film_or_an_error():
    whole = gif(range(3))
    for end in range(0, len(whole), 7):
        try:
            decode_frames(whole[:end], [index_film(whole[:end], LIMITS).num_frames - 1], 28, 28, 3)
        except RequestError:
            continue


def test_a_gif_is_looked_at_once(folder):
    pool = Counting(folder("qwen2_5_vl"))
    renderer = make_renderer(folder("qwen2_5_vl"), pool)
    short, long = gif(range(6)), gif(range(8))
    kept = [render(renderer, gif_part(short), **ALL_FRAMES)]
    assert [item.outcome for item in kept[0].items] == ["miss"] * 3
    assert pool.decoded == [list(range(6))]
    pool.jobs.clear()
    kept.append(render(renderer, gif_part(short), **ALL_FRAMES))
    assert not pool.jobs
    kept.append(render(renderer, gif_part(long), **ALL_FRAMES))
    assert [item.outcome for item in kept[-1].items] == ["hit"] * 3 + ["miss"]
    assert pool.decoded == [[6, 7]]


def test_indexes_of_many_small_films_are_not_all_kept(folder, monkeypatch):
    """Each takes more memory than the digests of its few frames."""
    monkeypatch.setattr("lookonce.render.media.film.INDEX_BYTES", 8192)
    pool = Counting(folder("qwen2_5_vl"))
    renderer = make_renderer(folder("qwen2_5_vl"), pool)
    films = [gif([number]) for number in range(40)]
    for film in (*films, films[-1]):
        render(renderer, gif_part(film))
    assert [job.data for job in pool.jobs if "index" in job.options] == films
    pool.jobs.clear()
    render(renderer, gif_part(films[0]))
    assert "index" in pool.jobs[0].options


class Counting(PoolInProcess):
    """Notes the jobs."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.jobs: list[MediaJob] = []

    async def run(self, job):
        self.jobs.append(job)
        return await super().run(job)

    @property
    def decoded(self) -> list[list[int]]:
        """The frames of each job that decoded some of a file."""
        return [job.options["frames"] for job in self.jobs if "frames" in job.options]


ALL_FRAMES = {"mm_processor_kwargs": {"do_sample_frames": False}}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, r"about 1\d CPU seconds; at most 10 are allowed at a time \(--max-decode-seconds\)"),
        (
            {"max_decode_seconds": 60, "max_video_decode_seconds": 5},
            r"decoding 768 frames of the film would take about 1\d CPU seconds; at most 5 are "
            r"allowed \(--max-video-decode-seconds\)",
        ),
    ],
)
def test_a_film_of_very_many_frames_is_refused_before_one_is_decoded(folder, limits, message):
    """2.3 MB: the last frames need all those before them."""
    pool = Counting(folder("qwen2_5_vl"))
    renderer = make_renderer(folder("qwen2_5_vl"), pool, MediaConfig(**limits))
    with pytest.raises(TooLargeError, match=message) as refused:
        render(renderer, gif_part(gif_film(100_000)))
    assert refused.value.param == "messages[0].content[0]"
    assert [job.options.keys() for job in pool.jobs] == [{"index"}]
    assert renderer._resolver.stats.refused["estimate"] == 1


def test_frames_that_are_dear_together_are_refused_before_one_is_decoded(folder):
    """Each picture of the list is allowed by itself."""
    plain = progressive_jpeg(200, [Scan(refining=True)] * 90)
    pictures = [plain[:-2] + segment(0xFE, bytes([number])) + plain[-2:] for number in range(2)]
    each = estimate_cost("image", pictures[0], LIMITED)
    part = {"type": "video_url", "video_url": {"url": listed(pictures)}}
    for enough in (True, False):
        pool = Counting(folder("qwen2_5_vl"))
        media = MediaConfig(max_video_decode_seconds=(3 if enough else 1.5) * each)
        renderer = make_renderer(folder("qwen2_5_vl"), pool, media)
        if enough:
            assert render(renderer, part).items
            continue
        with pytest.raises(TooLargeError, match=r"decoding 2 frames .*--max-video-decode-seconds"):
            render(renderer, part)
        assert not pool.jobs
        assert renderer._resolver.stats.refused["estimate"] == 1


def test_only_frames_that_must_be_made_count(folder):
    each = estimate_cost("image", frame(0), LIMITED)
    media = MediaConfig(max_video_decode_seconds=6.5 * each)
    renderer = make_renderer(folder("qwen2_5_vl"), media=media)
    with pytest.raises(TooLargeError, match="decoding 10 frames"):
        render(renderer, film_part(range(10)), **ALL_FRAMES)
    kept = [render(renderer, film_part(range(count)), **ALL_FRAMES) for count in (6, 10)]
    assert [item.outcome for item in kept[1].items] == ["hit"] * 3 + ["miss"] * 2


def test_small_frames_of_a_gif_are_decoded_in_one_go(folder):
    """A job for each few of them would draw those before them anew."""
    pool = Counting(folder("qwen2_5_vl"))
    renderer = make_renderer(folder("qwen2_5_vl"), pool)
    assert render(renderer, gif_part(gif(range(40))), **ALL_FRAMES).items
    assert pool.decoded == [list(range(40))]


class FrameWork:
    """Decodes the frames of a `FilmFile` to their numbers, or fails where `broken` are among
    them."""

    def __init__(self, broken: Collection[int] = ()) -> None:
        self.broken = broken
        self.jobs: list[MediaJob] = []
        self.num_refused = 0
        self.has_begun = asyncio.Event()

    @property
    def decoded(self) -> list[list[int]]:
        return [job.options["frames"] for job in self.jobs]

    def count_refusal(self) -> None:
        self.num_refused += 1

    async def run_job(self, job):
        self.jobs.append(job)
        self.has_begun.set()
        await asyncio.sleep(0)
        if set(job.options["frames"]) & set(self.broken):
            raise UnprocessableMediaError("broken")
        numbers = np.array(job.options["frames"], np.uint8)
        levels = np.broadcast_to(numbers[:, None, None, None], (len(numbers), 2, 2, 3))
        arrays = {"frames": Array("uint8", levels.shape, levels.tobytes())}
        return Processed(ProcessedItem("video", arrays, Expansion(((0, 1),), 0)), 1.0, 0.0)


@given(
    data=st.data(),
    num_items=st.integers(1, 30),
    frames_of_item=st.integers(1, 3),
    side_by_side=st.integers(1, 9),
    most=st.integers(1, 40),
)
def test_every_item_of_a_file_gets_its_frames_and_none_is_decoded_twice(
    data, num_items, frames_of_item, side_by_side, most
):
    items = [
        tuple(range(at, at + frames_of_item))
        for at in range(0, num_items * frames_of_item, frames_of_item)
    ]
    needed = data.draw(st.lists(st.sampled_from(items), min_size=1, unique=True))
    broken = data.draw(st.sets(st.integers(0, items[-1][-1]), max_size=1))
    work = FrameWork(broken)
    index = FilmIndex(2, 2, 1.0, bytes(32 * (items[-1][-1] + 1)), (0,))
    layout = FilmLayout(tuple(map(FilmItem, items)), {"width": 2, "height": 2})

    async def scenario():
        film = FilmFile(work, b"GIF89a", index, layout, "", (10.0, 120.0))
        for item in needed:
            film.expect(item)
        slots = asyncio.Semaphore(side_by_side)

        async def load(item):
            async with slots:
                try:
                    return item, [bytes(each) for each in unpack_frames(await film.load(item))]
                except UnprocessableMediaError:
                    return item, None

        return await asyncio.gather(*[load(item) for item in needed])

    with mock.patch.multiple(
        "lookonce.render.media.film", FRAMES_AT_ONCE=1, BYTES_AT_ONCE=12 * most
    ):
        found = asyncio.run(asyncio.wait_for(scenario(), 30))
    decoded = [index for frames in work.decoded for index in frames]
    for item, frames in found:
        if frames is None:
            assert broken & set(decoded if side_by_side > 1 else item)
        else:
            assert frames == [bytes([number]) * 12 for number in item]
    if not broken & set(decoded):
        assert sorted(decoded) == sorted(index for item in needed for index in item)
        assert all(len(job.options["frames"]) <= max(most, frames_of_item) for job in work.jobs)


def small_film(work: FrameWork, num_items: int) -> FilmFile:
    """Items of a frame each, all of them expected; one job takes 16, each of 12 bytes."""
    items = [(number,) for number in range(num_items)]
    index = FilmIndex(2, 2, 1.0, bytes(32 * num_items), (0,))
    layout = FilmLayout(tuple(map(FilmItem, items)), {"width": 2, "height": 2})
    with mock.patch.multiple("lookonce.render.media.film", FRAMES_AT_ONCE=1, BYTES_AT_ONCE=12 * 16):
        film = FilmFile(work, b"GIF89a", index, layout, "", (10.0, 120.0))
    for item in items:
        film.expect(item)
    return film


def test_what_others_make_is_neither_decoded_nor_kept():
    work = FrameWork()

    async def scenario():
        film = small_film(work, 8)
        film.forget((2,))
        asked = asyncio.create_task(film.load((0,)))
        await work.has_begun.wait()
        film.forget((3,))  # while it is decoded
        await asked
        film.forget((4,))  # when it is made
        for number in (3, 4, 5):
            (made,) = unpack_frames(await film.load((number,)))
            assert bytes(made) == bytes([number]) * 12

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert work.decoded == [[0, 1, 3, 4, 5, 6, 7], [3], [4]]


def test_a_broken_frame_that_nobody_has_asked_for_fails_no_other():
    """Another request waits for an item of the same beginning."""
    work = FrameWork({5})

    async def scenario():
        film = small_film(work, 40)
        assert await film.load((0,))
        assert await film.load((1,))
        with pytest.raises(UnprocessableMediaError):
            await film.load((5,))

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert work.decoded == [list(range(16)), [0], [1], [5]]


def test_an_item_that_its_only_caller_leaves_is_not_decoded_for_another():
    work = FrameWork()

    async def scenario():
        film = small_film(work, 40)
        asked = [asyncio.create_task(film.load((number,))) for number in (0, 30)]
        await work.has_begun.wait()
        asked[1].cancel()
        for number in range(40):
            film.forget((number,))  # as its prompt does
        await asked[0]
        await asyncio.wait(asked)

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert work.decoded == [list(range(16))]


class MadeElsewhere:
    """Another API process of the server makes all items of `prompt` but the first one, while `pool`
    decodes that."""

    def __init__(self, prompt, pool) -> None:
        self.items = {item.key: item.item for item in prompt.items[1:]}
        self.pool = pool
        self.directory = None

    @asynccontextmanager
    async def claimed(self, key):
        made = self.items.get(key)
        if made is None:
            yield self.keep
            return
        await until(lambda: self.pool.decoded)
        self.directory.hint(key, made.nbytes, made.expansion)
        yield None

    async def keep(self, item):
        """It goes with its request."""


def test_a_prompt_keeps_no_frames_of_items_that_another_process_made(folder):
    part = gif_part(gif(range(8)))
    theirs = render(make_renderer(folder("qwen2_5_vl")), part, **ALL_FRAMES)
    pool = Counting(folder("qwen2_5_vl"))
    other = MadeElsewhere(theirs, pool)
    renderer = make_renderer(folder("qwen2_5_vl"), pool, claims=other)
    other.directory = renderer._resolver.directory
    prompt = render(renderer, part, **ALL_FRAMES)
    assert outcomes(prompt) == ["miss"] + ["shared"] * 3
    assert pool.decoded == [list(range(8))]
    asyncio.run(prompt.items[1].recover())
    assert pool.decoded[1:] == [[2, 3]], "its frames were kept"


class Stuck(PoolInProcess):
    """Decoding begins and never ends by itself."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.begun: list[list[int]] = []
        self.given_up: list[list[int]] = []
        self.has_begun = asyncio.Event()

    async def run(self, job):
        if "frames" not in job.options:
            return await super().run(job)
        self.begun.append(job.options["frames"])
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.append(job.options["frames"])
            raise


def test_frames_that_nobody_waits_for_are_not_decoded(folder):
    """A film's client leaves while its first frames are decoded."""
    pool = Stuck(folder("qwen2_5_vl"))
    renderer = make_renderer(folder("qwen2_5_vl"), pool)
    messages = [{"role": "user", "content": [gif_part(gif(range(40)))]}]

    async def scenario():
        asked = asyncio.create_task(
            renderer.render_chat(
                messages, options={"mm_processor_kwargs": {"do_sample_frames": False}}
            )
        )
        await pool.has_begun.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        for _ in range(20):
            await asyncio.sleep(0)
        return list(pool.given_up)  # the loop's end gives up what is left

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) == pool.begun
    assert len(pool.begun) == 1


# --- items ---------------------------------------------------------------------------------------


@given(data=st.binary(max_size=80), head=st.sampled_from([b"frames\0\0", b"levels\0\0", b""]))
def test_any_bytes_are_an_item_or_an_error(pool, data, head):
    """A client may send an item of a film to `/inference/v1/generate`."""
    for options in ({}, {"width": 28, "height": 28}):
        estimate_cost("video", head + data, LIMITED)
        with pytest.raises(UnprocessableMediaError):
            pool.processing.run(MediaJob("video", head + data, options))


# --- sizes by headers ----------------------------------------------------------------------------


@given(data=st.binary(max_size=64), head=st.sampled_from([b"\xff\xd8\xff", b"RIFF", b"GIF89a"]))
def test_any_bytes_have_a_size_or_none(data, head):
    size = picture_size(head + data)
    assert size is None or min(size) > 0


def test_limits_are_of_the_configuration(folder, pool):
    renderer = make_renderer(folder("qwen3_vl"), pool)
    renderer._films._max_frames = MediaConfig(max_video_frames=3).max_video_frames
    with pytest.raises(TooLargeError, match="4 frames; at most 3"):
        render(renderer, film_part(range(4)))


# --- files, where PyAV is installed -----------------------------------------------------------

needs_pyav = pytest.mark.skipif(find_spec("av") is None, reason="PyAV is not installed")


@pytest.mark.skipif(find_spec("av") is not None, reason="PyAV is installed")
def test_without_pyav_a_file_is_refused_and_says_what_helps(renderer):
    with pytest.raises(UnprocessableMediaError, match=r"lookonce\[film\]"):
        render(renderer, file_part(b"\0\0\0\x18ftypisom\0\0\0\0"))


@needs_pyav
@pytest.mark.parametrize(("container", "codec"), [("mp4", "mpeg4"), ("matroska", "mpeg4")])
def test_a_file_has_its_frames(container, codec):
    film = encoded_film(range(10), container=container, codec=codec)
    index = index_film(film, LIMITS)
    assert (index.width, index.height, index.num_frames) == (WIDTH + 6, HEIGHT + 4, 10)
    assert math.isclose(index.fps, 8.0, rel_tol=0.02)
    assert len({index.digests_of([n]) for n in range(10)}) == 10
    # Each alone is what it is among all: by seeking to its keyframe.
    every = decode_frames(film, range(10), 56, 28, 3)
    for number in (0, 3, 5, 9):
        (alone,) = decode_frames(film, [number], 56, 28, 3)
        np.testing.assert_array_equal(alone, every[number])


@needs_pyav
def test_a_longer_cut_of_a_stream_has_the_same_digests():
    short, long = (index_film(encoded_film(range(count)), LIMITS) for count in (8, 14))
    assert long.digests[: len(short.digests)] == short.digests


@needs_pyav
@pytest.mark.parametrize(
    ("film", "message"),
    [
        (lambda: encoded_film(range(6))[:-900], "readable film|broken"),
        (lambda: encoded_film(range(6))[:300], r"incomplete: the MP4 or MOV file has no index"),
        (lambda: encoded_film([]), "the film has no frames: it has no video stream"),
        (lambda: encoded_film(range(6), container="matroska")[:-900], "incomplete: it claims 0.8"),
        (lambda: encoded_film(range(3), rate=10000), "10000 frames per second; at most 1000"),
        (lambda: encoded_film([], frames=False), "sound alone"),
        (lambda: b"\0\0\0\x18ftypisom" + bytes(100), "no readable film"),
    ],
)
def test_a_bad_file_is_refused_and_named(renderer, film, message):
    with pytest.raises(UnprocessableMediaError, match=message) as refused:
        render(renderer, file_part(film()))
    assert refused.value.message.startswith("messages[0].content[0]")


@needs_pyav
def test_a_file_is_sampled_and_looked_at_once(renderer):
    part = file_part(encoded_film(range(16)))
    first = render(renderer, part)
    assert sum(item.num_frames or 0 for item in first.items) == 4
    again = render(renderer, part, mm_processor_kwargs={"num_frames": 4})
    assert [item.outcome for item in again.items] == ["hit"] * len(first.items)
