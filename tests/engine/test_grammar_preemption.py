"""A grammar outlives preemption: what was said is remembered, and what follows conforms."""

from __future__ import annotations

import re

from lookonce.config import KVConfig
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types.sampling import Grammar, SamplingParams
from tests.support.core.builders import request
from tests.support.engine.loading import build, settings

PATTERN = r"([0-9]{3}-){8}[a-c]"
SAMPLING = SamplingParams(
    n=2, temperature=1.0, seed=5, max_tokens=100, grammar=Grammar(kind="regex", source=PATTERN)
)
PROMPTS = {f"r{number}": [5 + number] * 20 for number in range(3)}


def texts(folder, cache_bytes, groups):
    """What each sample of each request says, the requests of a group at once; preemptions."""
    core, preprocessor = build(settings(folder, kv=KVConfig(cache_bytes=cache_bytes)))
    tokenizer, said = Tokenizer.load(folder), {}
    for group in groups:
        for name in group:
            asked = preprocessor.preprocess(request(name, PROMPTS[name], sampling=SAMPLING), {})
            asked.grammar = preprocessor.compile_grammar(SAMPLING.grammar)
            core.take_in(asked)
        while (output := core.step()) is not None:
            for delta in output.deltas:
                said.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
                assert delta.finish_reason in (None, "stop")
    core.check_integrity()
    return {key: tokenizer.decode(ids) for key, ids in said.items()}, core.stats()


def test_a_crowd_that_is_preempted_says_what_each_says_alone(folder):
    llama = folder("llama")
    alone, _ = texts(llama, 1 << 20, [[name] for name in PROMPTS])
    crowd, stats = texts(llama, 160 << 10, [list(PROMPTS)])
    assert stats["num_preemptions_total"] > 0
    assert len(crowd) == 6
    assert all(re.fullmatch(PATTERN, text) for text in crowd.values())
    assert crowd == alone
