"""`lookonce chat`: one answer, or a conversation, by a model in this process or by a server.

TEXT on the command line, or piped in, is answered once: the answer goes to standard output, and
nothing else does. Without TEXT a terminal gets a conversation.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookonce.cli.conversation import (
    Conversation,
    Message,
    Terminal,
    history_file,
    media_parts,
    receipt_line,
)
from lookonce.config import EMBEDDED_MODELS, Options, resolve
from lookonce.errors import (
    BadRequestError,
    ConfigError,
    RequestFailedError,
    UnavailableError,
)
from lookonce.types.sampling import SamplingParams

if TYPE_CHECKING:
    import httpx

    from lookonce.llm import LLM, RequestOutput

MAX_PIPED_BYTES = 16 << 20
CONNECT_SECONDS = 10.0
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Question:
    """The command line. None for `max_tokens` or `temperature` is the model's default; None for
    `text` is a conversation."""

    text: str | None
    images: tuple[Path, ...] = ()
    sounds: tuple[Path, ...] = ()
    films: tuple[Path, ...] = ()
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    receipt: bool = False


def model_and_text(words: list[str]) -> tuple[str | None, str | None]:
    """MODEL and TEXT of a command line; None for what is not there. Raises `ConfigError`.

    A single word is MODEL if it is an embedded model, a folder that is there, or like a hub id.
    """
    match words:
        case []:
            return None, None
        case [word] if word in EMBEDDED_MODELS or Path(word).is_dir() or HUB_ID.fullmatch(word):
            return word, None
        case [text]:
            return None, text
        case [model, text]:
            return model, text
    raise ConfigError("chat takes MODEL and TEXT: put the text in quotes")


def piped_text() -> str | None:
    """What is piped in; None on a terminal. Raises `ConfigError` where it is empty or no text."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        text = sys.stdin.read(MAX_PIPED_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "it is closed"
        raise ConfigError(f"TEXT cannot be read from standard input: {reason}") from None
    if not text:
        raise ConfigError("TEXT is missing: type it in quotes, or pipe it in")
    return text


def run_chat(question: Question, options: Options) -> None:
    """Raises `ConfigError` before the model loads for a file that cannot be read, or an option that
    is out of range."""
    _check_sampling(question)
    media = _media(question)
    from lookonce.cli.preflight import check_machine

    check_machine(resolve(options))
    with ExitStack() as stack:
        _converse(question, media, LocalModel(_loaded(options, stack), question))


def run_chat_with_server(
    question: Question, url: str, model: str | None, api_key: str | None
) -> None:
    """The same with a running server; `model` None: the first one that it lists.

    Raises `UnavailableError` where none answers.
    """
    _check_sampling(question)
    media = _media(question)
    with open_client(url, api_key) as client:
        _converse(question, media, RemoteModel(client, url, model, question))


def _converse(question: Question, media: list[Message], answerer: LocalModel | RemoteModel) -> None:
    if question.text is None:
        terminal = Terminal(sys.stdout, sys.stderr, history_file())
        terminal.note(f"{answerer.name}. /help lists commands, Ctrl-D leaves.")
        conversation = Conversation(
            answerer, terminal, question.system, media, shows_receipt=question.receipt
        )
        try:
            conversation.run()
        finally:
            terminal.close()
        return
    system = [{"role": "system", "content": question.system}] if question.system else []
    content = [*media, {"type": "text", "text": question.text}]
    for text in answerer.stream([*system, {"role": "user", "content": content}]):
        sys.stdout.write(text)
        sys.stdout.flush()
    print()
    if question.receipt:
        print(receipt_line(answerer.receipt()), file=sys.stderr)


class LocalModel:
    """A model loaded by this process."""

    def __init__(self, llm: LLM, question: Question) -> None:
        self.name = llm.model_name
        self._llm = llm
        self._sampling = llm.default_sampling_params(**_asked_sampling(question))
        self._ended: RequestOutput | None = None

    def stream(self, messages: list[Message]) -> Iterator[str]:
        self._ended = None
        return self._llm.stream_chat(messages, self._sampling, on_finish=self._finish)

    def receipt(self) -> dict[str, Any] | None:
        import msgspec

        return None if self._ended is None else msgspec.to_builtins(self._ended.reuse_receipt)

    def _finish(self, output: RequestOutput) -> None:
        self._ended = output


class RemoteModel:
    """A model behind an OpenAI-compatible server: LookOnce, or another, which sends no receipts."""

    def __init__(
        self, client: httpx.Client, url: str, model: str | None, question: Question
    ) -> None:
        """`model` None: the first one that the server lists. Raises `UnavailableError`."""
        self._client = client
        self._url = url
        self._sampling = _asked_sampling(question)
        self._receipt: dict[str, Any] | None = None
        self.name = model or self._first_model()

    def stream(self, messages: list[Message]) -> Iterator[str]:
        import httpx

        self._receipt = None
        body = {"model": self.name, "messages": messages, "stream": True, **self._sampling}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise RequestFailedError(_refusal(response))
                yield from self._texts(response.iter_lines())
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self._url}: {_reason(error)}") from None

    def receipt(self) -> dict[str, Any] | None:
        return self._receipt

    def _texts(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            kind, _, data = line.partition(":")
            if kind != "data" or data.strip() == "[DONE]":
                continue
            try:
                chunk = json.loads(data)
                if error := chunk.get("error"):
                    raise RequestFailedError(str(error["message"]))
                self._receipt = chunk.get("reuse_receipt") or self._receipt
                for choice in chunk.get("choices", ())[:1]:
                    if text := choice["delta"].get("content"):
                        yield text
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UnavailableError(f"{self._url} sent no chunk of a chat") from None

    def _first_model(self) -> str:
        import httpx

        try:
            response = self._client.get("/v1/models")
            if response.status_code != 200:
                raise RequestFailedError(_refusal(response))
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise UnavailableError(f"no server answers on {self._url}: {_reason(error)}") from None
        except (ValueError, LookupError, TypeError):
            raise UnavailableError(f"{self._url} lists no models as OpenAI's API does") from None


def open_client(url: str, api_key: str | None) -> httpx.Client:
    """`url` may end with /v1, and may be unix:PATH. Raises `ConfigError`."""
    import httpx

    headers = {"X-Reuse-Receipt": "1"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    timeout = httpx.Timeout(CONNECT_SECONDS, read=None)
    if url.startswith("unix:"):
        transport = httpx.HTTPTransport(uds=url.removeprefix("unix:"))
        return httpx.Client(
            transport=transport, base_url="http://localhost", headers=headers, timeout=timeout
        )
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url: {error}") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise ConfigError(f"--url must be http://HOST:PORT, https://HOST or unix:PATH, got {url!r}")
    try:
        return httpx.Client(base_url=base, headers=headers, timeout=timeout)
    except UnicodeEncodeError:
        raise ConfigError("--api-key has characters that no header can have") from None


def _refusal(response: httpx.Response) -> str:
    """The message of an error response."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {response.status_code}"


def _reason(error: Exception) -> str:
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


def _loaded(options: Options, stack: ExitStack) -> LLM:
    from rich.console import Console

    from lookonce.cli.serve import LoadingBar
    from lookonce.llm import LLM  # slow: what was typed is checked first

    options = dataclasses.replace(options, log_level="warning")  # a terminal shows answers
    typed = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    bar = LoadingBar(Console(stderr=True), options.model)
    with bar:
        llm = stack.enter_context(LLM(**typed, on_loading=bar.update))
        bar.finish()
    return llm


def _check_sampling(question: Question) -> None:
    try:
        SamplingParams(**_asked_sampling(question))
    except BadRequestError as error:
        raise ConfigError(f"--{(error.param or '').replace('_', '-')}: {error.message}") from None


def _asked_sampling(question: Question) -> dict[str, Any]:
    asked = {"max_tokens": question.max_tokens, "temperature": question.temperature}
    return {name: value for name, value in asked.items() if value is not None}


def _media(question: Question) -> list[Message]:
    """Media before the text, as in the training of most models. Raises `ConfigError`."""
    return [
        *media_parts("--image", "image", question.images),
        *media_parts("--audio", "audio", question.sounds),
        *media_parts("--film", "film", question.films),
    ]
