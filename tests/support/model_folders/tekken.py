"""A small tekken.json, Mistral's tokenizer file: a token for each byte, and special ones."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
)
NUM_SPECIALS = 40


def write_tekken(path: Path, version: str, **fields: Any) -> None:
    """`fields` are further parts of the file, e.g. `image`."""
    content = {
        "config": {
            "pattern": r"\p{L}+|\p{N}|[^\p{L}\p{N}]",
            "num_vocab_tokens": 256,
            "default_vocab_size": 256 + NUM_SPECIALS,
            "default_num_special_tokens": NUM_SPECIALS,
            "version": version,
        },
        "vocab": [
            {
                "rank": byte,
                "token_bytes": base64.b64encode(bytes([byte])).decode(),
                "token_str": None,
            }
            for byte in range(256)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(SPECIALS)
        ],
        **fields,
    }
    path.write_text(json.dumps(content), encoding="utf-8")
