"""Texts are tokenized by chunks only where that gives the ids of the whole text."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from functools import lru_cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from lookonce.config import NANO_FOLDER
from lookonce.errors import BadRequestError
from lookonce.render.families.registry import load_family
from lookonce.render.prompt import token_cache
from lookonce.render.prompt.encoder import ChatOptions, PromptEncoder, template_sources
from lookonce.render.prompt.token_cache import (
    ENTRY_BYTES,
    CachingTokenizer,
    TextSplitter,
    TokenCache,
    cut_tokens,
)
from lookonce.render.prompt.tokenizer import Tokenizer
from tests.support.model_folders.make import KINDS
from tests.support.render.tokenizers import nano_tokenizer, spaced_tokenizer

SCOPE = b"s" * 32
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ("<|start|>", "<|end|>", "[INST]")
CORPUS = (
    "the cat's of 12345 the DON'T we'll e\u0301 été \u00a0 \n\n x, y. 你好 the cat   of <|start|>"
)


def bpe(pre_tokenizer, *, normalizer=None, added=(), post=None, dropout=None) -> Tokenizer:
    """A byte-level BPE whose merges join whatever its pre-tokenizer leaves in one piece."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\0", "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    from tokenizers import trainers

    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([CORPUS] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Backend(models.BPE(vocab=model["vocab"], merges=merges, dropout=dropout))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    if post is not None:
        backend.post_processor = post
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    backend.add_tokens(list(added))
    return Tokenizer(backend)


def split_then_bytes(pattern, **named) -> Tokenizer:
    return bpe(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        **named,
    )


def metaspace(scheme: str) -> Tokenizer:
    vocab = {token: n for n, token in enumerate(["<unk>", "▁", *"thecas<|rnd>", "▁t", "th", "▁th"])}
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    return Tokenizer(backend)


BOS = processors.TemplateProcessing(
    single="<|start|> $A <|end|>", special_tokens=[("<|start|>", 1), ("<|end|>", 2)]
)
AT_SPACES = {
    "gpt2": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix space": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "gpt2 written out": lambda: split_then_bytes(GPT2),
    "llama3": lambda: split_then_bytes(LLAMA3, post=BOS),
    "qwen3": lambda: split_then_bytes(QWEN3, normalizer=normalizers.NFC()),
    "o200k": lambda: split_then_bytes(O200K),
    "nano": nano_tokenizer,
    "loose tokens": lambda: split_then_bytes(
        LLAMA3, added=[AddedToken("  ", normalized=False), AddedToken(" the", normalized=True)]
    ),
}
AT_TOKENS = {
    "spaced": spaced_tokenizer,
    "first": lambda: metaspace("first"),
    "always": lambda: metaspace("always"),
    "whole parts": lambda: bpe(pre_tokenizers.ByteLevel(False, use_regex=False)),
    "NFKC": lambda: split_then_bytes(LLAMA3, normalizer=normalizers.NFKC()),
    "token with a space": lambda: split_then_bytes(LLAMA3, added=[AddedToken("the cat")]),
    "token that strips": lambda: split_then_bytes(
        LLAMA3, added=[AddedToken("<r>", rstrip=True, normalized=False)]
    ),
    "unknown pattern": lambda: split_then_bytes(r"\w+ \w+|\s+|."),
}
OFF = {
    "strips to the left": lambda: _flagged(lstrip=True),
    "whole words only": lambda: _flagged(single_word=True),
    "dropout": lambda: bpe(pre_tokenizers.ByteLevel(False), dropout=0.5),
    "specials as text": lambda: _specials_as_text(),
}


def _flagged(**flags) -> Tokenizer:
    backend = metaspace("never").backend
    described = json.loads(backend.to_str())
    for added in described["added_tokens"]:
        added.update(flags)
    return Tokenizer(Backend.from_str(json.dumps(described)))


def _specials_as_text() -> Tokenizer:
    tokenizer = bpe(pre_tokenizers.ByteLevel(False))
    tokenizer.backend.encode_special_tokens = True
    return tokenizer


_made: dict[str, Tokenizer] = {}


def made(name: str) -> Tokenizer:
    if name not in _made:
        _made[name] = {**AT_SPACES, **AT_TOKENS, **OFF}[name]()
    return _made[name]


PIECES = st.sampled_from(
    [
        *SPECIALS, "<|im_start|>", "<|im_end|>", "<s>", "<image>", "<r>", "<|sta", "rt|>", "[",
        "\n",
        " ", "  ", "   ", "\t", "\r\n", "\u00a0", "\u3000", "the", " the", "the cat", "cat", "'s",
        "DON'T", "1", "1234567", " 12", ",", ". ", "?!", "e\u0301", "\u0301", " \u0301", "你好",
        "。",
        "🙂", "été", "▁", "\x00", "/", "\u1fef", "ﷺ", "A",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=40).map("".join)


@contextmanager
def short_chunks():
    """Cut wherever it is allowed, so that short texts show it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "MIN_TEXT", 0)
        patch.setattr(token_cache, "MIN_CHUNK", 1)
        patch.setattr(token_cache, "MAX_CHUNK", 4)
        patch.setattr(token_cache, "LONG_PART", 2)
        yield


def outcome(encode, text):
    try:
        return encode(text)
    except BadRequestError as error:
        return error.message


@pytest.mark.parametrize("name", [*AT_SPACES, *AT_TOKENS, *sorted(OFF.keys() - {"dropout"})])
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), special=st.booleans())
@example(texts=["a  the <|start|>  x <|end|>\n the"], special=True)
@example(
    texts=["e\u0301 \u0301 the cat\u00a0 ", "e\u0301 \u0301 the cat\u00a0 <|start|>"], special=False
)
def test_ids_equal_those_of_the_whole_text(name, texts, special):
    tokenizer, cache = made(name), TokenCache()
    caching = CachingTokenizer(tokenizer)

    def ours(text):
        return caching.encode(text, cache, SCOPE, add_special_tokens=special).tolist()

    def whole(text):
        return tokenizer.encode(text, add_special_tokens=special)

    with short_chunks():
        for text in (*texts, "".join(texts), *texts):
            assert outcome(ours, text) == outcome(whole, text)


@pytest.mark.parametrize("name", AT_SPACES)
def test_known_patterns_may_be_cut_at_spaces(name):
    splitter = TextSplitter.of(made(name))
    assert splitter is not None
    assert splitter.at_spaces
    assert splitter.tokens


@pytest.mark.parametrize("name", AT_TOKENS)
def test_others_are_cut_at_added_tokens_only(name):
    splitter = TextSplitter.of(made(name))
    assert splitter is not None
    assert not splitter.at_spaces
    assert splitter.tokens


@pytest.mark.parametrize("name", OFF)
def test_tokenizers_whose_pieces_cross_are_left_alone(name):
    assert TextSplitter.of(made(name)) is None
    assert not CachingTokenizer(made(name)).cuts_texts


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("whole parts", "the cat of the cat"),
        ("NFKC", "the ﷺ cat"),
        ("token with a space", "see the cat"),
        ("token that strips", "<r> the"),
    ],
)
def test_a_cut_at_any_space_would_change_the_ids(name, text):
    """The control: what the proof refuses really differs for some tokenizers."""
    tokenizer = made(name)
    words = text.split(" ")
    chunks = [words[0], *(f" {word}" for word in words[1:])]
    apart = [
        token for chunk in chunks for token in tokenizer.encode(chunk, add_special_tokens=False)
    ]
    if name == "NFKC":
        assert " " in normalizers.NFKC().normalize_str("ﷺ")
    else:
        assert apart != tokenizer.encode(text, add_special_tokens=False)


def test_a_cut_before_a_token_that_strips_would_change_the_ids():
    tokenizer = made("strips to the left")
    chunks = ["the  ", "<|end|>"]
    apart = [
        token for chunk in chunks for token in tokenizer.encode(chunk, add_special_tokens=False)
    ]
    assert apart != tokenizer.encode("the  <|end|>", add_special_tokens=False)


@pytest.mark.parametrize("kind", [*KINDS, "nano"])
def test_every_shipped_kind_of_tokenizer_is_cut_and_keeps_its_ids(kind, folder):
    tokenizer, cache = Tokenizer.load(folder(kind)), TokenCache()
    caching = CachingTokenizer(tokenizer)
    assert caching.cuts_texts
    specials = " ".join(tokenizer.added_tokens.values())
    text = f"{specials}\n" + "Grüße, 你好 🙂  12,345 words.\n\n" * 60 + specials + CORPUS * 30
    for special in (False, True, False, True):
        ids = caching.encode(text, cache, SCOPE, add_special_tokens=special)
        assert ids.tolist() == tokenizer.encode(text, add_special_tokens=special)
    assert cache.hits
    assert len(cache) > 3


def test_a_token_that_another_one_reaches_into_begins_no_chunk():
    added = [
        AddedToken(text, normalized=False)
        for text in ("<a>", "|<a>", "<b>(", "(c)", "<d>", "<d>>", "\n", "\n\n", "word")
    ]
    assert set(cut_tokens(added)) == {"|<a>", "<b>(", "<d>", "<d>>"}


def test_chunks_join_to_the_text():
    splitter = TextSplitter.of(nano_tokenizer())
    text = "<|im_start|>user\n" + "word " * 1000 + "x" * 3000 + " y<|im_end|>\n<|im_start|>"
    chunks = list(splitter.split(text))
    assert "".join(chunks) == text
    assert len(chunks) > 4


# --- what is reused ------------------------------------------------------------------------------


def encode(caching, cache, text, scope=SCOPE):
    return caching.encode(text, cache, scope, add_special_tokens=False)


def test_a_known_text_is_not_tokenized_again():
    caching, cache, text = CachingTokenizer(nano_tokenizer()), TokenCache(), "some words " * 300
    first = encode(caching, cache, text)
    assert (cache.queries, cache.hits) == (len(first), 0)
    assert encode(caching, cache, text).tolist() == first.tolist()
    assert (cache.queries, cache.hits) == (2 * len(first), len(first))


def test_a_text_that_comes_again_as_it_is_is_not_even_cut(monkeypatch):
    caching, cache, text = CachingTokenizer(nano_tokenizer()), TokenCache(), "some words " * 300
    first = encode(caching, cache, text)
    encode(caching, cache, text)
    monkeypatch.setattr(TextSplitter, "split", lambda self, text: pytest.fail("was cut"))
    assert encode(caching, cache, text).tolist() == first.tolist()
    specials = caching.encode(text, cache, SCOPE, add_special_tokens=True).tolist()
    assert specials == nano_tokenizer().encode(text, add_special_tokens=True)


def test_a_text_that_grows_is_tokenized_from_its_last_chunk_on():
    caching, cache = CachingTokenizer(nano_tokenizer()), TokenCache()
    text = "<|im_start|>user\n" + "".join(f"{number} more words; " for number in range(400))
    encode(caching, cache, text)
    before = cache.queries
    whole = encode(caching, cache, text + "and the end")
    new = cache.queries - before - cache.hits
    assert len(whole) == cache.queries - before
    assert 0 < new < len(nano_tokenizer().encode("x " * token_cache.MAX_CHUNK))


def test_a_message_is_found_again_behind_another_beginning():
    caching, cache = CachingTokenizer(nano_tokenizer()), TokenCache()
    message = "<|im_start|>user\n" + "words to be read " * 200 + "<|im_end|>\n"
    encode(caching, cache, message)
    encode(caching, cache, "<|im_start|>system\n" + "Be brief. " * 20 + "<|im_end|>\n" + message)
    assert cache.hits >= len(nano_tokenizer().encode(message))


def test_tenants_share_no_entries():
    caching, cache, text = CachingTokenizer(nano_tokenizer()), TokenCache(), "some words " * 300
    encode(caching, cache, text)
    encode(caching, cache, text, scope=b"t" * 32)
    assert cache.hits == 0


def test_the_cache_stays_within_its_bytes_and_keeps_what_was_used_last():
    caching, text = CachingTokenizer(nano_tokenizer()), "some words " * 100
    size = TokenCache()
    encode(caching, size, text)
    cache = TokenCache(3 * size.nbytes)
    for number in range(20):
        encode(caching, cache, text)
        encode(caching, cache, f"{number} {text}")
        assert cache.nbytes <= 3 * size.nbytes
    assert cache.hits >= 19 * len(nano_tokenizer().encode(text))


def test_a_chunk_larger_than_the_cache_is_not_kept():
    caching, cache = CachingTokenizer(nano_tokenizer()), TokenCache(ENTRY_BYTES)
    encode(caching, cache, "some words " * 300)
    assert (len(cache), cache.nbytes) == (0, 0)


def test_short_texts_and_texts_without_a_cache_are_tokenized_whole():
    caching, cache = CachingTokenizer(nano_tokenizer()), TokenCache()
    encode(caching, cache, "short")
    assert len(cache) == 0
    assert encode(caching, None, "long " * 1000).tolist() == nano_tokenizer().encode("long " * 1000)


def test_a_lone_surrogate_is_the_client_s_mistake_in_long_texts_too():
    with pytest.raises(BadRequestError, match="surrogate"):
        encode(CachingTokenizer(nano_tokenizer()), TokenCache(), "long " * 1000 + "\ud800")


# --- whole chats ---------------------------------------------------------------------------------

MARKERS = st.sampled_from(
    [
        "<|IMAGE|>",
        "<|vision_bos|>",
        "<|im_start|>",
        "<|im_end|>\n",
        "<|im_start|>system\n",
        "\ue000",
    ]
)
WRITTEN = st.lists(MARKERS | PIECES, max_size=12).map("".join)
CONTENTS = WRITTEN | st.lists(
    st.just({"type": "image"}) | WRITTEN.map(lambda said: {"type": "text", "text": said}),
    max_size=4,
)
CHATS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), CONTENTS), min_size=1, max_size=5
).map(lambda said: [{"role": role, "content": content} for role, content in said])


@lru_cache
def nano_encoder() -> PromptEncoder:
    family = load_family(NANO_FOLDER, "float32")
    return PromptEncoder(nano_tokenizer(), template_sources(NANO_FOLDER, nano_tokenizer()), family)


@settings(max_examples=80, deadline=None)
@given(CHATS)
def test_a_chat_has_the_ids_that_it_has_without_a_cache(conversation):
    encoder, cache, options = nano_encoder(), TokenCache(), ChatOptions()
    plain = asyncio.run(encoder.encode_chat(conversation, options))
    with short_chunks():
        for _ in range(2):
            cached = asyncio.run(
                encoder.encode_chat(conversation, options, cache=cache, scope=SCOPE)
            )
            assert cached.token_ids == plain.token_ids
            assert cached.text == plain.text
    assert cache.hits >= len(plain.token_ids)
