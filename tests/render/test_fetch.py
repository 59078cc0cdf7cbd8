"""The fetcher: limits, redirects, single flight, and errors that reveal nothing to clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lookonce.errors import (
    BadRequestError,
    LookOnceError,
    MediaForbiddenError,
    QueueFullError,
    TooLargeError,
    UnprocessableMediaError,
)
from lookonce.render.media.address_guard import GuardedBackend, is_any
from lookonce.render.media.fetch import MAX_CONNECTIONS, MAX_FETCHES, MAX_REDIRECTS, Fetcher
from lookonce.render.media.fetch_cache import FetchCache
from lookonce.types.held_bytes import HeldBytes, TenantBytes, current_held_bytes
from tests.support.render.origin import Answer, Handler, Origin, Request, origin

BODY = b"picture" * 10


@asynccontextmanager
async def open_fetcher(
    *, max_bytes: int = 1000, timeout: float = 30.0, **options: object
) -> AsyncIterator[Fetcher]:
    """One that may fetch from loopback."""
    fetcher = Fetcher(
        timeout=timeout,
        max_bytes=max_bytes,
        backend=GuardedBackend(is_any),
        **options,  # type: ignore[arg-type]
    )
    try:
        yield fetcher
    finally:
        await fetcher.aclose()


def fetch(
    answers: dict[str, Answer | Handler], path: str = "/", **options: object
) -> tuple[bytes, Origin]:
    async def scenario() -> tuple[bytes, Origin]:
        async with origin(answers) as site, open_fetcher(**options) as fetcher:  # type: ignore[arg-type]
            return await fetcher.fetch(site.url(path)), site

    return asyncio.run(scenario())


def test_the_body_behind_a_url() -> None:
    body, site = fetch({"/cat.png?size=2": Answer(BODY)}, "/cat.png?size=2")
    assert body == BODY
    assert site.requests[0].headers["host"] == f"127.0.0.1:{site.port}"


class SlowHost:
    """Answers "/" at once, and so many other paths when it `may_answer`."""

    def __init__(self, num_paths: int) -> None:
        self.paths = [f"/{number}" for number in range(num_paths)]
        self.num_asked = 0
        self.full = asyncio.Event()
        """So many are asked as one tenant may ask."""
        self.may_answer = asyncio.Event()
        self.answers: dict[str, Answer | Handler] = dict.fromkeys(self.paths, self._answer)
        self.answers["/"] = Answer(BODY)

    def _answer(self, _request: Request) -> Answer:
        self.num_asked += 1
        if self.num_asked == MAX_FETCHES:
            self.full.set()
        return Answer(BODY, hold=self.may_answer)


def test_slow_hosts_of_one_tenant_take_no_connection_from_another() -> None:
    async def scenario() -> None:
        host = SlowHost(2 * MAX_CONNECTIONS)
        async with origin(host.answers) as site, open_fetcher() as fetcher:
            slow = [
                asyncio.create_task(fetcher.fetch(site.url(path), tenant="slow"))
                for path in host.paths
            ]
            await host.full.wait()
            async with asyncio.timeout(10):
                assert await fetcher.fetch(site.url(), tenant="other") == BODY
            assert host.num_asked == MAX_FETCHES
            host.may_answer.set()
            assert await asyncio.gather(*slow) == [BODY] * len(slow)

    asyncio.run(scenario())


def test_a_fetch_whose_client_leaves_gives_its_place_to_the_next() -> None:
    async def scenario() -> None:
        host = SlowHost(MAX_FETCHES + 8)
        async with origin(host.answers) as site, open_fetcher() as fetcher:
            slow = [asyncio.create_task(fetcher.fetch(site.url(path))) for path in host.paths]
            last = asyncio.create_task(fetcher.fetch(site.url()))
            await host.full.wait()
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
            assert await last == BODY
            host.may_answer.set()

    asyncio.run(scenario())


def test_nothing_compressed_is_asked_for() -> None:
    _, site = fetch({"/": Answer(BODY)})
    assert site.requests[0].headers["accept-encoding"] == "identity"


def test_a_fragment_stays_here() -> None:
    body, _ = fetch({"/a": Answer(BODY)}, "/a#part")
    assert body == BODY


def test_redirects_are_followed_to_the_body() -> None:
    answers: dict[str, Answer | Handler] = {
        "/": Answer(status=302, headers={"Location": "/next"}),
        "/next": Answer(status=308, headers={"Location": "last?x=1"}),
        "/last?x=1": Answer(BODY),
    }
    body, site = fetch(answers)
    assert body == BODY
    assert [request.path for request in site.requests] == ["/", "/next", "/last?x=1"]


def test_redirects_without_end_are_given_up() -> None:
    async def scenario() -> None:
        loop = Answer(status=302, headers={"Location": "/"})
        async with origin({"/": loop}) as site, open_fetcher() as fetcher:
            with pytest.raises(UnprocessableMediaError, match="redirects"):
                await fetcher.fetch(site.url())
            assert len(site.requests) == MAX_REDIRECTS + 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (Answer(status=404), UnprocessableMediaError, "answered 404"),
        (Answer(status=500), UnprocessableMediaError, "answered 500"),
        (Answer(status=304), UnprocessableMediaError, "answered 304"),
        (Answer(b""), UnprocessableMediaError, "empty"),
        (Answer(status=302), UnprocessableMediaError, "invalid redirect"),
        (
            Answer(status=302, headers={"Location": "http://host:port/"}),
            UnprocessableMediaError,
            "invalid redirect",
        ),
        (
            Answer(b"zip", headers={"Content-Encoding": "gzip"}),
            UnprocessableMediaError,
            "compressed",
        ),
        (Answer(bytes(1001)), TooLargeError, "larger than 1000 bytes"),
        (Answer(bytes(1001), declare_length=False), TooLargeError, "larger than 1000 bytes"),
        (
            Answer(b"x", headers={"Content-Length": "99999999999999999"}),
            TooLargeError,
            "larger than 1000 bytes",
        ),
        (
            Answer(b"short", headers={"Content-Length": "50"}),
            UnprocessableMediaError,
            "connection failed",
        ),
        (
            Answer(b"x", headers={"Content-Length": "lots"}),
            UnprocessableMediaError,
            "connection failed",
        ),
        (
            Answer(status=302, headers={"Location": "file:///etc/passwd"}),
            MediaForbiddenError,
            "http or https",
        ),
        (
            Answer(status=302, headers={"Location": "http://user:pass@example.com/"}),
            MediaForbiddenError,
            "credentials",
        ),
    ],
)
def test_answers_that_hold_no_media_are_refused(
    answer: Answer, error: type[LookOnceError], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        fetch({"/": answer})
    assert "127.0.0.1" not in raised.value.message


def test_a_body_of_exactly_the_limit_passes() -> None:
    assert fetch({"/": Answer(bytes(1000))})[0] == bytes(1000)


def test_what_has_come_counts_for_the_tenant_while_it_comes() -> None:
    async def scenario() -> None:
        of_all = TenantBytes(1500)
        with HeldBytes(of_all, "a") as held:
            current_held_bytes.set(held)
            async with origin({"/": Answer(bytes(1000))}) as site, open_fetcher() as fetcher:
                assert len(await fetcher.fetch(site.url("/"))) == 1000
                assert of_all.total == 0  # whoever holds it now, says so itself
                held.take(600)
                with pytest.raises(QueueFullError):
                    await fetcher.fetch(site.url("/"))
                assert of_all.total == 600

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("ftp://example.com/a", MediaForbiddenError),
        ("gopher://example.com/a", MediaForbiddenError),
        ("http://user@example.com/", MediaForbiddenError),
        ("http://good.example@127.0.0.1/", MediaForbiddenError),
        ("http://:secret@example.com/", MediaForbiddenError),
        ("http:///nothing", BadRequestError),
        ("http://", BadRequestError),
        ("http://[::1", BadRequestError),
        ("http://example.com:99999999/", BadRequestError),
        ("http://good.example\\@127.0.0.1/", BadRequestError),
        ("http://exa mple.com/", BadRequestError),
        ("http://example.com/\r\nX-Injected: 1", BadRequestError),
        ("http://example.com/\x00", BadRequestError),
        ("http://" + "a" * 70 + ".example/", UnprocessableMediaError),
    ],
)
def test_urls_that_are_not_plainly_http_are_refused(url: str, error: type[LookOnceError]) -> None:
    async def scenario() -> None:
        async with open_fetcher() as fetcher:
            with pytest.raises(error):
                await fetcher.fetch(url)

    asyncio.run(scenario())


def test_only_allowed_domains_are_fetched_from_on_every_hop() -> None:
    async def scenario() -> None:
        elsewhere = Answer(status=302, headers={"Location": "http://other.example/"})
        async with (
            origin({"/": Answer(BODY), "/away": elsewhere}) as site,
            open_fetcher(allowed_domains=("127.0.0.1",)) as fetcher,
        ):
            assert await fetcher.fetch(site.url()) == BODY
            for url in (
                site.url(host="localhost"),
                site.url("/away"),
                "http://127.0.0.1.evil.example/",
                "http://evil.example/?127.0.0.1",
            ):
                with pytest.raises(MediaForbiddenError, match="not one of the allowed"):
                    await fetcher.fetch(url)

    asyncio.run(scenario())


def test_a_domain_is_the_same_in_any_case_and_with_a_dot_at_its_end() -> None:
    async def scenario() -> None:
        backend = GuardedBackend(is_any, resolver=loopback)
        async with origin({"/": Answer(BODY)}) as site:
            fetcher = Fetcher(
                timeout=30, max_bytes=1000, allowed_domains=("Media.Example",), backend=backend
            )
            for host in ("media.example", "MEDIA.example", "media.example."):
                assert await fetcher.fetch(site.url(host=host)) == BODY
            await fetcher.aclose()

    asyncio.run(scenario())


async def loopback(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


def test_a_slow_origin_is_given_up() -> None:
    async def scenario() -> None:
        hold = asyncio.Event()
        async with origin({"/": Answer(BODY, hold=hold)}) as site:
            async with open_fetcher(timeout=0.05) as fetcher:
                with pytest.raises(UnprocessableMediaError, match=r"within 0.05 seconds"):
                    await fetcher.fetch(site.url())
            hold.set()

    asyncio.run(scenario())


def test_an_origin_that_does_not_answer_is_a_clean_error() -> None:
    async def scenario() -> None:
        async with origin({}) as site:
            gone = site.url()
        async with open_fetcher() as fetcher:
            with pytest.raises(UnprocessableMediaError) as raised:
                await fetcher.fetch(gone)
            assert raised.value.message == "the media could not be fetched: the connection failed"

    asyncio.run(scenario())


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert fetch({"/": Answer(BODY)})[0] == BODY


def test_concurrent_fetches_of_one_url_are_one_request() -> None:
    async def scenario() -> None:
        hold = asyncio.Event()
        async with (
            origin({"/": Answer(BODY, hold=hold)}) as site,
            open_fetcher() as fetcher,
        ):
            tasks = [asyncio.create_task(fetcher.fetch(site.url())) for _ in range(64)]
            await site.asked.wait()
            tasks[0].cancel()
            hold.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert results[1:] == [BODY] * 63
            assert isinstance(results[0], asyncio.CancelledError)
            assert len(site.requests) == 1
            assert fetcher.counts.fetched.total() == 1

    asyncio.run(scenario())


def test_a_failure_is_not_remembered() -> None:
    async def scenario() -> None:
        answers: dict[str, Answer | Handler] = {"/": Answer(status=503)}
        async with origin(answers) as site, open_fetcher() as fetcher:
            with pytest.raises(UnprocessableMediaError):
                await fetcher.fetch(site.url())
            answers["/"] = Answer(BODY)
            assert await fetcher.fetch(site.url()) == BODY

    asyncio.run(scenario())


class TestHeldBodies:
    """Bodies kept between fetches, as far as HTTP allows."""

    def run(self, answer: Answer | Handler, scopes: tuple[bytes, ...] = (b"", b"")) -> Fetcher:
        """Fetch one URL once per scope, always with the same result."""

        async def scenario() -> Fetcher:
            async with (
                origin({"/": answer}) as site,
                open_fetcher(cache=FetchCache(10_000)) as fetcher,
            ):
                for scope in scopes:
                    assert await fetcher.fetch(site.url(), scope) == BODY
                return fetcher

        return asyncio.run(scenario())

    def test_a_fresh_body_is_used_without_asking(self) -> None:
        counts = self.run(Answer(BODY, headers={"Cache-Control": "max-age=60"})).counts
        assert (counts.fetched.total(), counts.confirmed, counts.reused) == (1, 0, 1)

    def test_a_body_with_a_validator_is_confirmed_by_its_origin(self) -> None:
        def answer(request: Request) -> Answer:
            if request.headers.get("if-none-match") == '"v1"':
                return Answer(status=304)
            return Answer(BODY, headers={"ETag": '"v1"'})

        counts = self.run(answer).counts
        assert (counts.fetched.total(), counts.confirmed, counts.reused) == (1, 1, 0)

    @pytest.mark.parametrize(
        ("name", "values"),
        [("Cache-Control", ("no-store", "max-age=60")), ("Vary", ("*", "Accept"))],
    )
    def test_what_one_of_two_header_lines_forbids_is_not_kept(
        self, name: str, values: tuple[str, str]
    ) -> None:
        for first, second in (values, values[::-1]):
            lines = (("Cache-Control", "max-age=60"), (name, first), (name, second))
            assert self.run(Answer(BODY, more_headers=lines)).counts.fetched.total() == 2

    def test_a_validator_need_not_be_ascii(self) -> None:
        def answer(request: Request) -> Answer:
            if request.headers.get("if-none-match") == '"caf\xe9"':
                return Answer(status=304)
            return Answer(BODY, headers={"ETag": '"caf\xe9"'})

        assert self.run(answer).counts.confirmed == 1

    def test_a_confirmation_that_says_nothing_of_age_renews_it(self) -> None:
        def answer(request: Request) -> Answer:
            if "if-none-match" in request.headers:
                return Answer(status=304)
            return Answer(
                BODY, headers={"ETag": '"v1"', "Cache-Control": "max-age=60", "Age": "60"}
            )

        counts = self.run(answer, scopes=(b"", b"", b"")).counts
        assert (counts.fetched.total(), counts.confirmed, counts.reused) == (1, 1, 1)

    def test_a_304_about_other_content_is_no_answer_and_it_is_asked_for_again(self) -> None:
        asked = []

        def answer(request: Request) -> Answer:
            asked.append("if-none-match" in request.headers)
            if asked[-1]:
                return Answer(status=304, headers={"ETag": '"v2"'})
            return Answer(BODY, headers={"ETag": '"v1"'})

        counts = self.run(answer).counts
        assert asked == [False, True, False]
        assert (counts.fetched.total(), counts.confirmed, counts.reused) == (2, 0, 0)

    def test_last_modified_is_a_validator_too(self) -> None:
        date = "Wed, 21 Oct 2015 07:28:00 GMT"

        def answer(request: Request) -> Answer:
            if request.headers.get("if-modified-since") == date:
                return Answer(status=304)
            return Answer(BODY, headers={"Last-Modified": date})

        assert self.run(answer).counts.confirmed == 1

    def test_a_changed_body_replaces_the_held_one(self) -> None:
        async def scenario() -> None:
            bodies = [b"one", b"two"]

            def answer(request: Request) -> Answer:
                body = bodies.pop(0)
                return Answer(body, headers={"ETag": f'"{body.decode()}"'})

            async with (
                origin({"/": answer}) as site,
                open_fetcher(cache=FetchCache(10_000)) as fetcher,
            ):
                assert await fetcher.fetch(site.url()) == b"one"
                assert await fetcher.fetch(site.url()) == b"two"
                assert site.requests[1].headers["if-none-match"] == '"one"'

        asyncio.run(scenario())

    def test_scopes_do_not_share_bodies(self) -> None:
        answer = Answer(BODY, headers={"Cache-Control": "max-age=60"})
        counts = self.run(answer, scopes=(b"a", b"b", b"a")).counts
        assert (counts.fetched.total(), counts.reused) == (2, 1)

    def test_a_moved_redirect_is_noticed(self) -> None:
        async def scenario() -> None:
            fresh = {"Cache-Control": "max-age=60"}
            answers: dict[str, Answer | Handler] = {
                "/": Answer(status=302, headers={"Location": "/old"}),
                "/old": Answer(b"old", headers=fresh),
                "/new": Answer(b"new", headers=fresh),
            }
            async with (
                origin(answers) as site,
                open_fetcher(cache=FetchCache(10_000)) as fetcher,
            ):
                assert await fetcher.fetch(site.url()) == b"old"
                assert await fetcher.fetch(site.url()) == b"old"
                assert fetcher.counts.reused == 1
                answers["/"] = Answer(status=302, headers={"Location": "/new"})
                assert await fetcher.fetch(site.url()) == b"new"

        asyncio.run(scenario())
