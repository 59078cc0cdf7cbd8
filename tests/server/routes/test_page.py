"""The web page's files: served whole, kept by browsers, and with nothing from outside in them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re

import pytest
from starlette.datastructures import Headers

from lookonce.server.routes.page import FOLDER, PageFiles

KEYS = {"api_key": ("secret",)}
NAMED = re.compile(
    r"(?:(?:href|src)=|addModule\()\"page/([^\"]+)\"|(?:from |import\()\"\./([^\"]+)\""
)
LIBRARY = re.compile(r"^(\S+): .*?\nSHA-256 (\w+)$", re.MULTILINE)


def test_the_page_is_served_without_a_key_and_while_draining(on_site):
    async def scenario(site):
        site.services.drain.begin()
        page = await site.client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "<title>LookOnce</title>" in page.text

    on_site(scenario, **KEYS)


def test_every_file_the_page_names_is_served_with_its_type(on_site):
    async def scenario(site):
        for name in named_files():
            response = await site.client.get(f"/page/{name}")
            assert response.status_code == 200, name
            kind = {
                "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml",
                "txt": "text/plain",
            }  # fmt: skip
            assert response.headers["content-type"].startswith(kind[name.rpartition(".")[2]])

    on_site(scenario, **KEYS)


def test_the_policy_lets_nothing_in_from_outside(on_site):
    async def scenario(site):
        for path in ("/", "/page/app.js"):
            headers = (await site.client.get(path)).headers
            policy = dict(d.split(" ", 1) for d in headers["content-security-policy"].split("; "))
            assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == "'self'"
            assert "http" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"

    on_site(scenario)


def test_a_browser_that_has_a_file_is_told_so(on_site):
    async def scenario(site):
        first = await site.client.get("/page/app.js")
        assert first.headers["cache-control"] == "no-cache"
        again = await site.client.get(
            "/page/app.js", headers={"If-None-Match": first.headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")
        other = await site.client.get(
            "/page/api.js", headers={"If-None-Match": first.headers["etag"]}
        )
        assert other.status_code == 200

    on_site(scenario)


def test_a_file_that_changed_is_sent_though_its_time_and_size_are_the_same(tmp_path):
    def etag(text: str) -> str:
        file = tmp_path / text / "app.js"
        file.parent.mkdir()
        file.write_text(text)
        os.utime(file, (1, 1))
        return PageFiles(file.parent).response("app.js", Headers()).headers["etag"]

    assert etag("one") != etag("two")


def test_a_browser_that_names_several_versions_is_told_of_its_own():
    files = PageFiles(FOLDER)
    etag = files.response("app.js", Headers()).headers["etag"]
    for known in (f'"other", {etag}', f"W/{etag}", "*"):
        again = files.response("app.js", Headers({"If-None-Match": known}))
        assert (again.status_code, again.headers["etag"]) == (304, etag)
        assert again.headers["content-security-policy"]
    assert files.response("app.js", Headers({"If-None-Match": '"other"'})).status_code == 200


def test_a_head_request_is_told_of_a_file_without_it(on_site):
    async def scenario(site):
        head = await site.client.head("/page/temml.js")
        whole = await site.client.get("/page/temml.js")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
        assert whole.content == (FOLDER / "temml.js").read_bytes()

    on_site(scenario)


def test_all_who_ask_for_a_file_share_what_they_have_not_read():
    """An answer that was not read held 64 KiB of its own, and a descriptor."""
    files = PageFiles(FOLDER)

    async def parts():
        sent = []

        async def send(message):
            if message["type"] == "http.response.body":
                sent.append(message["body"])

        await files.response("temml.js", Headers())({"type": "http", "method": "GET"}, None, send)
        return sent

    one, other = asyncio.run(parts()), asyncio.run(parts())
    assert b"".join(one) == (FOLDER / "temml.js").read_bytes()
    assert all(a is b for a, b in zip(one, other, strict=True))
    assert max(map(len, one)) <= 1 << 16


@pytest.mark.parametrize("name", ["nothing.js", "page.py", "..%2Fpage.py", "%2e%2e/page.py"])
def test_nothing_but_the_page_s_files_is_served(on_site, name):
    async def scenario(site):
        response = await site.client.get(f"/page/{name}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"

    on_site(scenario)


def test_no_file_names_an_address_outside():
    for name, text in page_files().items():
        if name in libraries() or name == "libraries.txt":
            continue  # those name the web in what they read, and the policy lets them load nothing
        text = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z0-9-]+\.[a-z]|@import", text), name


def test_scripts_never_write_markup_and_the_page_has_no_inline_script_or_style():
    for name, text in page_files().items():
        writes = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function"
        if name == "highlight.js":  # one function of it does, and the page calls another
            text = text.replace(".innerHTML=r.value", "", 1).replace(",e.innerHTML)", ")", 1)
        assert not re.search(writes, text), name
        if name not in libraries():  # which have ways to write markup that this page never takes
            assert not re.search(r"<script>|<style|\son[a-z]+=\"|style=\"", text), name


def test_every_script_and_style_is_used():
    used = named_files() | {"index.html", "docs.css"}  # the latter is of /docs
    assert {path.name for path in FOLDER.iterdir()} == used


def test_every_library_is_listed_as_it_was_published():
    assert set(libraries()) == {"highlight.js", "marked.js", "temml.js"}
    for name, digest in libraries().items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name


def libraries() -> dict[str, str]:
    """The SHA-256 of each library, by its file."""
    return dict(LIBRARY.findall((FOLDER / "libraries.txt").read_text()))


def page_files() -> dict[str, str]:
    """The text of every file of the page, by its name."""
    return {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}


def named_files() -> set[str]:
    """What index.html and the scripts name."""
    return {
        name
        for text in page_files().values()
        for pair in NAMED.findall(text)
        for name in pair
        if name
    }
