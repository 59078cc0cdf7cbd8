"""What a transcription is asked for and what it answers: options, segments, words, events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lookonce.frontend.responses import ReuseReceipt, Usage
from lookonce.types.request import TokenLogprob

Task = Literal["transcribe", "translate"]
Granularity = Literal["segment", "word"]


@dataclass(frozen=True, slots=True)
class EncodedAudio:
    """An encoded sound (WAV, FLAC, Ogg or MP3); `param` names it in errors."""

    data: bytes | bytearray
    param: str = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """Thresholds of Whisper, and the temperatures to try where a text does not meet them.

    The defaults are those that transformers' documentation recommends.
    """

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """Those above the first attempt's are tried, in order."""
    compression_ratio_threshold: float = 1.35
    """A text that compresses better repeats itself."""
    logprob_threshold: float = -1.0
    """A text whose average log-probability is lower is doubtful."""
    no_speech_threshold: float = 0.6
    """A doubtful window where nobody speaks with at least this probability is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """How to transcribe."""

    language: str | None = None
    """ISO-639-1 code, or the language's English name; None: the model finds out."""
    prompt: str = ""
    """Text that the words may follow: names, spelling, style."""
    temperature: float = 0.0
    fallback: Fallback | None = None
    """When an encoder-decoder tries again, warmer; None: it never does."""
    task: Task = "transcribe"
    timestamps: frozenset[Granularity] = frozenset()
    logprobs: bool = False
    max_tokens: int | None = None
    """Most tokens that a chat model writes, a longer transcript fails; an encoder-decoder's windows
    limit themselves."""


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A stretch of the transcript; times in seconds from the file's start."""

    id: int
    seek: int
    """Frame of 10 ms where the window it was heard in begins."""
    start: float
    end: float
    text: str
    token_ids: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True)
class TranscriptWord:
    """A word with the time it was spoken, in seconds from the file's start."""

    word: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """More of the text."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class TranscriptDone:
    """The whole transcript; always the last event."""

    text: str
    language: str
    """English name of the language that was asked for or heard; empty where nobody knows."""
    duration_seconds: float
    segments: list[TranscriptSegment]
    """Of an encoder-decoder; one per window where it writes no timestamps."""
    words: list[TranscriptWord]
    """Empty where they were not asked for."""
    usage: Usage
    receipt: ReuseReceipt
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


TranscriptEvent = TranscriptDelta | TranscriptDone


class TrimmedText:
    """A text that comes in pieces, without white space at its ends."""

    def __init__(self) -> None:
        self.whole = ""
        self._spaces = ""

    def push(self, text: str) -> str:
        """What the text adds; white space at its end waits for what follows."""
        whole = self._spaces + text
        if not self.whole:
            whole = whole.lstrip()
        shown = whole.rstrip()
        self._spaces = whole[len(shown) :]
        self.whole += shown
        return shown


def language_code(language: str | None) -> str | None:
    """The ISO code of a code or an English name; the text itself where it is neither."""
    if not language:
        return None
    lowered = language.lower()
    return NAMED_CODES.get(lowered, lowered)


def language_name(code: str) -> str:
    """The English name of a language, or its code."""
    return LANGUAGES.get(code.lower(), code)


LANGUAGES: dict[str, str] = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian",
    "ko": "korean", "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish",
    "pl": "polish", "ca": "catalan", "nl": "dutch", "ar": "arabic", "sv": "swedish",
    "it": "italian", "id": "indonesian", "hi": "hindi", "fi": "finnish", "vi": "vietnamese",
    "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay", "cs": "czech",
    "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian",
    "la": "latin", "mi": "maori", "ml": "malayalam", "cy": "welsh", "sk": "slovak",
    "te": "telugu", "fa": "persian", "lv": "latvian", "bn": "bengali", "sr": "serbian",
    "az": "azerbaijani", "sl": "slovenian", "kn": "kannada", "et": "estonian",
    "mk": "macedonian", "br": "breton", "eu": "basque", "is": "icelandic", "hy": "armenian",
    "ne": "nepali", "mn": "mongolian", "bs": "bosnian", "kk": "kazakh", "sq": "albanian",
    "sw": "swahili", "gl": "galician", "mr": "marathi", "pa": "punjabi", "si": "sinhala",
    "km": "khmer", "sn": "shona", "yo": "yoruba", "so": "somali", "af": "afrikaans",
    "oc": "occitan", "ka": "georgian", "be": "belarusian", "tg": "tajik", "sd": "sindhi",
    "gu": "gujarati", "am": "amharic", "yi": "yiddish", "lo": "lao", "uz": "uzbek",
    "fo": "faroese", "ht": "haitian creole", "ps": "pashto", "tk": "turkmen", "nn": "nynorsk",
    "mt": "maltese", "sa": "sanskrit", "lb": "luxembourgish", "my": "myanmar", "bo": "tibetan",
    "tl": "tagalog", "mg": "malagasy", "as": "assamese", "tt": "tatar", "haw": "hawaiian",
    "ln": "lingala", "ha": "hausa", "ba": "bashkir", "jw": "javanese", "su": "sundanese",
    "yue": "cantonese",
}  # fmt: skip
"""ISO code → English name, as Whisper's tokenizer knows them."""
NAMED_CODES = {
    **{name: code for code, name in LANGUAGES.items()},
    "burmese": "my", "valencian": "ca", "flemish": "nl", "haitian": "ht", "letzeburgesch": "lb",
    "pushto": "ps", "panjabi": "pa", "moldavian": "ro", "moldovan": "ro", "sinhalese": "si",
    "castilian": "es", "mandarin": "zh",
}  # fmt: skip
"""English name → ISO code."""
