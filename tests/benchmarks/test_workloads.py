"""What the load generator sends."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from benchmarks import workloads
from benchmarks.pictures import encoded_picture
from benchmarks.report import Panel, write_shares
from benchmarks.workloads import RequestShape
from lookonce.errors import ConfigError

SHAPE = RequestShape("m", output_tokens=7, picture="512 JPEG")


def parts(body: bytes) -> tuple[str, list[str]]:
    """The question, and the URLs of the pictures."""
    (message,) = json.loads(body)["messages"]
    content = message["content"]
    if isinstance(content, str):
        return content, []
    return content[-1]["text"], [part["image_url"]["url"] for part in content[:-1]]


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_questions_are_all_new_and_answers_equally_long(name):
    work = workloads.WORKLOADS[name](SHAPE, 3, 2)
    assert (len(work.bodies), len(work.warm_up)) == (3, 2)
    bodies = [*work.bodies, *work.warm_up]
    assert len({parts(body)[0][:4] for body in bodies}) == 5
    assert all(json.loads(body)["max_tokens"] == 7 for body in bodies)
    assert all(json.loads(body)["ignore_eos"] is True for body in bodies)


def test_the_same_picture_is_shown_before():
    work = workloads.same(SHAPE, 3, 0)
    assert len({parts(body)[1][0] for body in [*work.bodies, *work.warm_up]}) == 1
    assert work.warm_up


def test_new_pictures_are_each_sent_once():
    work = workloads.new(RequestShape("m", pictures=2, picture="512 JPEG"), 3, 1)
    urls = [url for body in [*work.bodies, *work.warm_up] for url in parts(body)[1]]
    assert len(urls) == len(set(urls)) == 8


def test_another_first_number_makes_other_questions_and_pictures():
    other = RequestShape("m", picture="512 JPEG", first=50)
    one, two = (workloads.new(shape, 2, 0).bodies for shape in (SHAPE, other))
    assert not {parts(body)[0] for body in one} & {parts(body)[0] for body in two}
    assert not {parts(body)[1][0] for body in one} & {parts(body)[1][0] for body in two}


def test_a_folder_holds_questions_pictures_messages_and_bodies(tmp_path):
    (tmp_path / "a.txt").write_text("what?")
    (tmp_path / "b.txt").write_text("seen?")
    (tmp_path / "b.jpg").write_bytes(encoded_picture("512", "JPEG"))
    (tmp_path / "c.json").write_text('[{"role": "user", "content": "listed"}]')
    (tmp_path / "d.json").write_text('{"messages": [], "max_tokens": 3}')
    bodies = workloads.folder(SHAPE, tmp_path, 5, 1).bodies
    assert [parts(body)[0] for body in bodies[:3]] == ["what?", "seen?", "listed"]
    assert len(parts(bodies[1])[1]) == 1
    assert json.loads(bodies[3])["max_tokens"] == 3
    assert json.loads(bodies[3])["stream"] is True
    assert bodies[4] == bodies[0]


def test_an_empty_or_broken_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither"):
        workloads.folder(SHAPE, tmp_path, 1, 0)
    (tmp_path / "a.json").write_text("3")
    with pytest.raises(ConfigError, match=r"a\.json"):
        workloads.folder(SHAPE, tmp_path, 1, 0)


@pytest.mark.parametrize("picture", ["7 JPEG", "1024", "1024 GIF", ""])
def test_an_unknown_picture_is_refused(picture):
    with pytest.raises(ConfigError, match="--picture"):
        RequestShape("m", picture=picture)


def test_a_plot_is_an_svg_with_a_line_for_each_name(tmp_path):
    target = tmp_path / "out.svg"
    panels = [Panel("a < b", "ms", {"text": [3.0, 1.0], "none": []}), Panel("b", "ms", {})]
    write_shares(target, panels)
    svg = target.read_text()
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    assert svg.count('fill="none"') == 2
    assert "a &lt; b" in svg
