"""What gpt-oss writes in harmony format: a thought, an answer, a call; and a template of it."""

from __future__ import annotations

TEMPLATE = "{{ tools }}<|start|><|channel|><|message|>"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello!"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
