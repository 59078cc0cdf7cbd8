"""Documents through OpenAI's client and Anthropic's route, against the real server."""

from __future__ import annotations

import openai
import pytest

from tests.support.documents import data_url, encrypted_pdf, file_part, line, pdf, red_circle

SQUARE = (42, 42)
"""Points: at 144 dots per inch the size of nano's pictures."""
QUESTION = {"type": "text", "text": "What shape is red?"}
COUNTED = (
    "document_pages_total:rendered",
    "document_pages_total:held",
    "media_decodes_total:image",
    "encoder_runs_total",
)


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def small(text):
    """A line that fits on a page of `SQUARE`."""
    return line(text, top=20, size=6)


def ask(client, *parts):
    messages = [{"role": "user", "content": [*parts, QUESTION]}]
    return client.chat.completions.create(
        model="nano", messages=messages, temperature=0, max_tokens=8
    )


class Work:
    """What the server did since it was asked last."""

    def __init__(self, server):
        self.server = server
        self.before = server.metrics()

    def done(self):
        """Pages rendered and held, pictures decoded, encoder runs."""
        now = self.server.metrics()
        moved = tuple(now[name] - self.before.get(name, 0) for name in COUNTED)
        self.before = now
        return moved


def test_a_page_is_looked_at_once_whatever_document_and_route_it_comes_by(server, client):
    circle = red_circle(radius=14)
    one = pdf(circle, small("only one"), size=SQUARE)
    other = pdf(small("another"), circle, size=SQUARE)
    work = Work(server)
    first = ask(client, file_part(one, filename="one.pdf"))
    assert first.usage.prompt_tokens_details.image_tokens == 18
    assert work.done() == (2, 0, 2, 2)
    again = ask(client, file_part(one, filename="one.pdf"))
    assert again.choices[0].message.content == first.choices[0].message.content
    assert work.done() == (0, 2, 0, 0)
    response = client.responses.create(
        model="nano",
        max_output_tokens=8,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_file", "file_data": data_url(one), "filename": "one.pdf"},
                    {"type": "input_text", "text": QUESTION["text"]},
                ],
            }
        ],
    )
    assert response.usage.input_tokens == first.usage.prompt_tokens
    assert work.done() == (0, 2, 0, 0)
    ask(client, file_part(other, filename="other.pdf"))
    assert work.done() == (2, 0, 1, 1)


def test_anthropic_s_documents_are_the_same_pages(server):
    data = pdf(red_circle(), small("for anthropic"), size=SQUARE)
    url = data_url(data)
    source = {"type": "base64", "media_type": "application/pdf", "data": url.partition(",")[2]}
    document = {"type": "document", "source": source, "title": "a.pdf", "context": "A report."}
    body = {"model": "nano", "messages": [{"role": "user", "content": [document, QUESTION]}]}
    work = Work(server)
    counted = server.post("/v1/messages/count_tokens", body).json()
    assert work.done()[:2] == (2, 0)
    answer = server.post("/v1/messages", {**body, "max_tokens": 8}).json()
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
    assert work.done()[:2] == (0, 2)


def test_a_text_file_is_in_the_prompt_as_text(server, client):
    part = file_part(b"alpha beta", "text/plain", filename="notes.txt")
    asked = {"messages": [{"role": "user", "content": [part, QUESTION]}]}
    tokens = server.post("/tokenize", asked).json()["tokens"]
    prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert "[notes.txt]\nalpha beta\nWhat" in prompt
    assert ask(client, part).usage.prompt_tokens == len(tokens)


BAD = {
    "truncated": (file_part(pdf(line("x"))[:200]), 422, "broken or incomplete"),
    "encrypted": (file_part(encrypted_pdf()), 422, "encrypted"),
    "no pages": (file_part(pdf()), 422, "has no pages"),
    "many pages": (file_part(pdf(*[line("x")] * 10_000)), 413, "10000 pages; at most 100"),
    "200 inches": (file_part(pdf(line("x"), size=(14_400, 14_400))), 413, "200 x 200 inches"),
    "not utf-8": (file_part(b"caf\xe9", "text/plain"), 422, "byte 3 is not UTF-8"),
    "not a pdf": (file_part(b"hello"), 422, "not a PDF"),
    "wrong type": (file_part(b"x", "application/zip"), 400, "application/zip"),
    "file id": ({"type": "file", "file": {"file_id": "file-7"}}, 400, "no files are kept"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused_by_name_and_harms_nobody(client, name):
    part, status, words = BAD[name]
    with pytest.raises(openai.APIStatusError) as refused:
        ask(client, QUESTION, part)
    assert refused.value.status_code == status
    assert refused.value.param == "messages[0].content[1]"
    message = refused.value.body["message"]
    assert words in message
    assert message.count("messages[0].content[1]") == 1
    if part["type"] == "file" and "file_data" in part["file"]:
        item = {"type": "input_file", **part["file"]}
        with pytest.raises(openai.APIStatusError) as refused:
            client.responses.create(model="nano", input=[{"role": "user", "content": [item]}])
        assert (refused.value.status_code, refused.value.param) == (status, "input[0].content[0]")


def test_anthropic_s_errors_name_the_block(server):
    source = {"type": "base64", "media_type": "application/pdf", "data": "aGVsbG8="}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "sunny"}
    document = {"type": "document", "source": source, "context": "A report."}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    body = {
        "model": "nano",
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, document]},
        ],
    }
    error = server.post("/v1/messages", body).json()["error"]
    assert error["message"].startswith("messages[2].content[1]: the file is not a PDF")
