"""A conversation on a terminal: what is typed, the commands, and what was said so far.

It knows nothing of how answers are made: `Answerer` is the model in this process or a server.
"""

from __future__ import annotations

import base64
import mimetypes
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from lookonce.errors import ConfigError, LookOnceError

Message = dict[str, Any]
HISTORY_LINES = 1000
BLOCK = '"""'
HELP = f"""\
/image FILE ...   show pictures with the next message; /audio and /film likewise
/system [TEXT]    set the system prompt, or remove it, and begin again
/receipt          say under each answer what was reused; again: no longer
/new              begin again, with the same system prompt
/help             this list
/quit             leave; Ctrl-D does so, too
A line that ends with \\ goes on in the next one, and so do lines between two {BLOCK}.
Ctrl-C stops an answer; what was said of it stays in the conversation."""


class Answerer(Protocol):
    """What answers a conversation."""

    name: str
    """Of the model."""

    def stream(self, messages: list[Message]) -> Iterator[str]:
        """The answer's text as it comes; closing the iterator ends the answer.

        Raises `LookOnceError`.
        """
        ...

    def receipt(self) -> dict[str, Any] | None:
        """The reuse receipt of the last answer that ended; None where there is none."""
        ...


class Console(Protocol):
    """Where lines come from and text goes to."""

    def read(self, prompt: str) -> str:
        """One line. Raises `EOFError` at the end, `KeyboardInterrupt` at Ctrl-C."""
        ...

    def write(self, text: str) -> None: ...

    def note(self, text: str) -> None:
        """One line that is no part of an answer."""
        ...


class Terminal:
    """Standard input and output, with readline's editing and a history in a file."""

    def __init__(self, output: TextIO, notes: TextIO, history: Path | None) -> None:
        self._output, self._notes, self._history = output, notes, history
        self._readline = _readline(history)

    def read(self, prompt: str) -> str:
        if self._readline is not None and self._output.isatty():
            return input(prompt)
        self._notes.write(prompt)
        self._notes.flush()
        return input()

    def write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()

    def note(self, text: str) -> None:
        self._output.flush()
        print(text, file=self._notes, flush=True)

    def close(self) -> None:
        """Save the history, readable by this user alone."""
        if self._readline is None or self._history is None:
            return
        with suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self._history, os.O_WRONLY | os.O_CREAT, 0o600))
            self._readline.set_history_length(HISTORY_LINES)
            self._readline.write_history_file(self._history)


def history_file() -> Path:
    """Where XDG keeps the state of programs."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "lookonce" / "chat_history"


def _readline(history: Path | None) -> Any:
    """Python's module, set up; None where this Python has none."""
    try:
        import readline
    except ImportError:
        return None
    if history is not None:
        with suppress(OSError):
            readline.read_history_file(history)
    readline.set_completer_delims(" \t\n")
    readline.set_completer(_completed)
    readline.parse_and_bind("tab: complete")
    return readline


def _completed(word: str, state: int) -> str | None:
    """readline's `state`-th completion of a command or a path."""
    if word.startswith("/") and "/" not in word[1:]:
        found = [f"/{name}" for name in sorted(COMMANDS) if f"/{name}".startswith(word)]
    else:
        found = []
    if not found:
        folder, _, start = word.rpartition("/")
        place = Path(folder or ("/" if word.startswith("/") else "."))
        with suppress(OSError):
            for path in sorted(place.expanduser().iterdir()):
                if path.name.startswith(start):
                    found.append(word[: len(word) - len(start)] + path.name + "/" * path.is_dir())
    return found[state] if state < len(found) else None


@dataclass(slots=True)
class Conversation:
    """Messages so far, and the media that go with the next one."""

    answerer: Answerer
    console: Console
    system: str | None = None
    pending: list[Message] = field(default_factory=list)
    shows_receipt: bool = False
    messages: list[Message] = field(default_factory=list)

    def run(self) -> None:
        """Until Ctrl-D or /quit. A request that fails is said, and the conversation goes on."""
        while True:
            try:
                text = read_message(self.console)
            except EOFError:
                self.console.note("")
                return
            except KeyboardInterrupt:
                self.console.note("(Ctrl-D leaves)")
                continue
            try:
                if text.startswith("/"):
                    if self._command(text):
                        return
                elif text:
                    self.ask(text)
            except LookOnceError as error:
                self.console.note(f"lookonce: {error.message}")

    def ask(self, text: str) -> None:
        """Send a message, and write the answer as it comes.

        A question without an answer is taken out of the conversation. Raises `LookOnceError`.
        """
        question = {"role": "user", "content": [*self.pending, {"type": "text", "text": text}]}
        if not self.pending:
            question["content"] = text
        system = [{"role": "system", "content": self.system}] if self.system else []
        said: list[str] = []
        stopped = False
        try:
            with closing(self.answerer.stream([*system, *self.messages, question])) as texts:  # type: ignore[type-var]
                for piece in texts:
                    said.append(piece)
                    self.console.write(piece)
        except KeyboardInterrupt:
            stopped = True
        finally:
            self.pending = []
            if answer := "".join(said):
                self.messages += [question, {"role": "assistant", "content": answer}]
                self.console.write("\n")
        if stopped:
            self.console.note("(stopped)" if said else "(stopped; the question is withdrawn)")
        elif self.shows_receipt:
            self.console.note(receipt_line(self.answerer.receipt()))

    def _command(self, line: str) -> bool:
        """Whether to leave. Raises `ConfigError`."""
        name, _, rest = line[1:].partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            raise ConfigError(f"there is no command /{name}; /help lists them")
        command(self, rest.strip())
        return name == "quit"

    def attach(self, kind: str, files: str) -> None:
        """Show files with the next message. Raises `ConfigError` naming the file."""
        try:
            paths = [Path(path).expanduser() for path in shlex.split(files)]
        except ValueError as error:
            raise ConfigError(f"/{kind}: {error}") from None
        if not paths:
            raise ConfigError(f"/{kind} needs a file")
        self.pending += media_parts(f"/{kind}", kind, paths)
        names = ", ".join(path.name for path in paths)
        self.console.note(f"({names}: shown with the next message)")

    def instruct(self, text: str) -> None:
        """Set the system prompt, and begin again."""
        self.system = text or None
        self.forget()

    def toggle_receipt(self, _: str) -> None:
        self.shows_receipt = not self.shows_receipt
        self.console.note("(receipts on)" if self.shows_receipt else "(receipts off)")

    def forget(self, _: str = "") -> None:
        """Begin again."""
        self.messages.clear()
        self.pending = []
        self.console.note("(a new conversation)")


COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "image": lambda conversation, rest: conversation.attach("image", rest),
    "audio": lambda conversation, rest: conversation.attach("audio", rest),
    "film": lambda conversation, rest: conversation.attach("film", rest),
    "system": Conversation.instruct,
    "receipt": Conversation.toggle_receipt,
    "new": Conversation.forget,
    "help": lambda conversation, _: conversation.console.note(HELP),
    "quit": lambda *_: None,
}


def read_message(console: Console) -> str:
    """One message: a line, lines that end with a backslash and the one after them, or a block."""
    line = console.read(">>> ")
    if line.strip().startswith(BLOCK):
        return _block(console, line.strip()[len(BLOCK) :])
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(console.read("... "))
    return "\n".join(lines).strip()


def _block(console: Console, line: str) -> str:
    lines: list[str] = []
    while not line.rstrip().endswith(BLOCK):
        lines.append(line)
        line = console.read("... ")
    return "\n".join([*lines, line.rstrip()[: -len(BLOCK)]]).strip()


PART_TYPES = {"image": "image_url", "audio": "audio_url", "film": "video_url"}


def media_parts(option: str, kind: str, paths: Iterable[Path]) -> list[Message]:
    """Parts of a message with the files' content. Raises `ConfigError` naming option and file."""
    parts = []
    for path in paths:
        if kind == "image":
            check_picture(option, path)
        part_type = PART_TYPES[kind]
        parts.append({"type": part_type, part_type: {"url": _data_url(option, path)}})
    return parts


def check_picture(option: str, path: Path) -> None:
    """Whether it is a picture, by its header. Raises `ConfigError`."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path):
            pass
    except UnidentifiedImageError:
        raise ConfigError(f"{option}: {path} is not a picture") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{option}: {path}: {reason}") from None


def _data_url(option: str, path: Path) -> str:
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{option}: {path}: {reason}") from None
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{data}"


def receipt_line(receipt: dict[str, Any] | None) -> str:
    """A reuse receipt in words."""
    if receipt is None:
        return "(no receipt)"
    cached = receipt["prefix_cached_tokens"] + receipt["external_cached_tokens"]
    items = [
        f"{item['modality']} {item['hash'][:8]}: processor {item['processor']}, "
        f"encoder {item['encoder']}"
        for item in receipt["items"]
    ]
    tokens = f"{cached} of {receipt['prompt_tokens']} prompt tokens reused"
    return f"({'; '.join([tokens, *items])})"
