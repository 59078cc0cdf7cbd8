"""Tokenizers that tests build: the kinds that the shipped folders do not have."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from lookonce.config import NANO_FOLDER
from lookonce.render.prompt.tokenizer import Tokenizer

WORDS = ("▁the", "▁cat", "▁a", "s", "▁", "t", "h", "e", "c", "a", "!", "é")


@lru_cache
def nano_tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO_FOLDER)


def spaced_tokenizer() -> Tokenizer:
    """In SentencePiece's style: words carry their space, unknown characters become bytes.

    Ids: `<s>` 0, `</s>` 1, `<image>` 2, the 256 bytes from 3 on, then `WORDS`.
    """
    specials = ["<s>", "</s>", "<image>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: number for number, token in enumerate([*specials, *byte_tokens, *WORDS])}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("ca", "t"), ("▁", "cat")]
    for token in ("th", "the", "ca", "cat"):
        vocab[token] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
