"""`lookonce chat`: conversations on a terminal, and answers of servers."""

from __future__ import annotations

import io
import json
import sys

import httpx
import pytest

from lookonce.cli.chat import Question, RemoteModel, model_and_text, open_client, piped_text
from lookonce.cli.conversation import Conversation, Terminal, receipt_line
from lookonce.errors import ConfigError, RequestFailedError, UnavailableError
from tests.support.drawing import encoded, picture

RECEIPT = {
    "prompt_tokens": 40,
    "prefix_cached_tokens": 32,
    "external_cached_tokens": 0,
    "items": [
        {"modality": "image", "hash": "0123456789abcdef", "processor": "hit", "encoder": "skipped"}
    ],
}


class FakeConsole:
    """Types lines, of which ^C is Ctrl-C; at their end it is Ctrl-D."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.prompts: list[str] = []
        self.written = ""
        self.notes: list[str] = []

    def read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self.lines:
            raise EOFError
        if (line := self.lines.pop(0)) == "^C":
            raise KeyboardInterrupt
        return line

    def write(self, text: str) -> None:
        self.written += text

    def note(self, text: str) -> None:
        self.notes.append(text)


class Echo:
    """Says how many messages it got; to `stop` it is interrupted, to `fail` it fails."""

    name = "echo"

    def __init__(self) -> None:
        self.seen: list[list[dict]] = []
        self.num_closed = 0

    def stream(self, messages):
        self.seen.append(json.loads(json.dumps(messages)))
        try:
            asked = messages[-1]["content"]
            if asked == "fail":
                raise RequestFailedError("it failed")
            if asked == "stop at once":
                raise KeyboardInterrupt
            yield f"{len(messages)} "
            if asked == "stop":
                raise KeyboardInterrupt
            yield "messages"
        finally:
            self.num_closed += 1

    def receipt(self):
        return RECEIPT


def conversation(*lines: str) -> tuple[Conversation, FakeConsole, Echo]:
    console, answerer = FakeConsole(*lines), Echo()
    talk = Conversation(answerer, console)
    talk.run()
    return talk, console, answerer


def test_a_message_goes_with_all_that_was_said():
    _, console, echo = conversation("one", "two")
    assert console.written == "1 messages\n3 messages\n"
    assert [m["content"] for m in echo.seen[1]] == ["one", "1 messages", "two"]


def test_messages_of_several_lines():
    _, console, echo = conversation(
        "one \\", "two", '"""three', "", "four", '"""', '"""five"""', ""
    )
    assert [seen[-1]["content"] for seen in echo.seen] == ["one \ntwo", "three\n\nfour", "five"]
    assert console.prompts.count("... ") == 4


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said_of_it():
    talk, console, echo = conversation("stop", "^C", "on")
    assert console.written == "1 \n3 messages\n"
    assert [m["content"] for m in echo.seen[1]] == ["stop", "1 ", "on"]
    assert console.notes[:2] == ["(stopped)", "(Ctrl-D leaves)"]
    assert echo.num_closed == 2
    assert len(talk.messages) == 4


@pytest.mark.parametrize("question", ["fail", "stop at once"])
def test_a_question_without_an_answer_is_not_kept(question):
    talk, console, echo = conversation(question, "on")
    assert [m["content"] for m in echo.seen[1]] == ["on"]
    assert len(talk.messages) == 2
    assert console.notes[0] in ("lookonce: it failed", "(stopped; the question is withdrawn)")


def test_files_go_with_the_next_message_alone(tmp_path):
    image, sound = tmp_path / "a b.png", tmp_path / "s.wav"
    image.write_bytes(encoded(picture(("green", "triangle"))))
    sound.write_bytes(b"RIFF")
    lines = [f"/image '{image}'", f"/audio {sound}", f"/film {sound}", "what?", "and?"]
    _, console, echo = conversation(*lines)
    kinds = [part["type"] for part in echo.seen[0][0]["content"]]
    assert kinds == ["image_url", "audio_url", "video_url", "text"]
    assert echo.seen[0][0]["content"][0]["image_url"]["url"].startswith(
        "data:image/png;base64,iVBO"
    )
    assert echo.seen[1][2]["content"] == "and?"
    assert console.notes[0] == "(a b.png: shown with the next message)"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/image /nowhere.png", "/image: /nowhere.png: No such file"),
        (f"/image {__file__}", "is not a picture"),
        ("/image", "/image needs a file"),
        ("/image 'a", "/image: No closing quotation"),
        ("/audio /nowhere.wav", "/audio: /nowhere.wav: No such file"),
        ("/dance", "there is no command /dance; /help lists them"),
    ],
)
def test_a_mistake_in_a_command_is_one_line_and_the_conversation_goes_on(line, said):
    _, console, echo = conversation(line, "on")
    assert said in console.notes[0]
    assert console.notes[0].startswith("lookonce: ")
    assert len(echo.seen) == 1


def test_a_system_prompt_begins_a_new_conversation_and_new_keeps_it():
    _, _, echo = conversation("one", "/system Be brief.", "two", "/new", "three", "/system", "four")
    roles = [[message["role"] for message in seen] for seen in echo.seen]
    assert roles == [["user"], ["system", "user"], ["system", "user"], ["user"]]


def test_receipts_are_said_when_asked_for_and_quit_leaves():
    _, console, echo = conversation("one", "/receipt", "two", "/receipt", "three", "/quit", "four")
    line = "(32 of 40 prompt tokens reused; image 01234567: processor hit, encoder skipped)"
    assert console.notes == ["(receipts on)", line, "(receipts off)"]
    assert len(echo.seen) == 3
    assert receipt_line(None) == "(no receipt)"


def test_the_history_is_kept_and_nobody_else_may_read_it(tmp_path, monkeypatch):
    readline = pytest.importorskip("readline")
    readline.clear_history()
    file = tmp_path / "state" / "history"
    Terminal(io.StringIO(), io.StringIO(), file)
    readline.add_history("what was asked")
    Terminal(io.StringIO(), io.StringIO(), file).close()
    assert "what was asked" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    readline.clear_history()


def test_prompts_do_not_go_where_answers_go(monkeypatch):
    answers, notes = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("typed\n"))
    assert Terminal(answers, notes, None).read(">>> ") == "typed"
    assert (answers.getvalue(), notes.getvalue()) == ("", ">>> ")


# --- the command line -----------------------------------------------------------------------------


def test_one_word_is_a_model_where_it_can_be_one(tmp_path):
    assert model_and_text([]) == (None, None)
    assert model_and_text(["nano"]) == ("nano", None)
    assert model_and_text([str(tmp_path)]) == (str(tmp_path), None)
    assert model_and_text(["Qwen/Qwen3-VL-2B-Instruct"]) == ("Qwen/Qwen3-VL-2B-Instruct", None)
    assert model_and_text(["Hello there"]) == (None, "Hello there")
    assert model_and_text(["nano", "Hello"]) == ("nano", "Hello")


class Terminals(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_piped_in_is_the_question(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is\nthis?\n"))
    assert piped_text() == "What is\nthis?"
    monkeypatch.setattr(sys, "stdin", Terminals("never read"))
    assert piped_text() is None
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    with pytest.raises(ConfigError, match="TEXT is missing"):
        piped_text()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        piped_text()


# --- servers --------------------------------------------------------------------------------------


def event(**chunk) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(text: str) -> dict:
    return {"delta": {"content": text}}


def remote(answer, model=None) -> RemoteModel:
    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://there")
    return RemoteModel(client, "http://there", model, Question("", temperature=0.0))


def test_a_server_answers_with_its_first_model_and_a_receipt():
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}, {"id": "other"}]})
        bodies.append(json.loads(request.content))
        first, last = event(choices=[delta("a ")]), event(choices=[], reuse_receipt=RECEIPT)
        comment = b": still there\n\n"
        content = first + comment + event(choices=[delta("cat")]) + last + b"data: [DONE]\n\n"
        return httpx.Response(200, content=content)

    model = remote(answer)
    messages = [{"role": "user", "content": "What?"}]
    assert list(model.stream(messages)) == ["a ", "cat"]
    assert model.receipt() == RECEIPT
    assert bodies == [{"model": "m", "messages": messages, "stream": True, "temperature": 0.0}]


@pytest.mark.parametrize(
    ("response", "error", "said"),
    [
        (httpx.Response(404, json={"error": {"message": "no m"}}), RequestFailedError, "no m"),
        (httpx.Response(502, text="<html>"), RequestFailedError, "status 502"),
        (
            httpx.Response(200, content=event(error={"message": "ended"})),
            RequestFailedError,
            "ended",
        ),
        (httpx.Response(200, content=b"data: {]\n\n"), UnavailableError, "no chunk of a chat"),
        (httpx.Response(200, content=b"data: [1]\n\n"), UnavailableError, "no chunk of a chat"),
    ],
)
def test_what_a_server_refuses_is_said_in_its_words(response, error, said):
    model = remote(lambda _: response, model="m")
    with pytest.raises(error, match=said):
        list(model.stream([]))


@pytest.mark.parametrize("body", [{"data": []}, [], {"models": 1}])
def test_a_server_of_another_kind_is_told_apart(body):
    with pytest.raises(UnavailableError, match="lists no models"):
        remote(lambda _: httpx.Response(200, json=body))


@pytest.mark.parametrize("url", ["here", "ftp://here", "http://", "127.0.0.1:8000"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="--url"):
        open_client(url, None)


def test_a_url_may_end_as_openai_s_clients_want_it():
    with open_client("https://there:1/a/v1/", "key") as client:
        assert str(client.build_request("GET", "/v1/models").url) == "https://there:1/a/v1/models"
        assert client.headers["Authorization"] == "Bearer key"
