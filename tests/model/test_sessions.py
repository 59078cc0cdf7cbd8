"""Live sessions drop tokens and begin their positions again, and plain Hugging Face, which does
neither, gets the same logits."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from lookonce.model.input_batch import InputBatch
from lookonce.model.key_rotation import KeyRotation, key_rotation
from lookonce.types.request import SessionOptions
from lookonce.types.step import DropTokens
from tests.support.model.live import LiveCase, LiveModel, converse, whole_logits
from tests.support.model.serving import reference_model

POSITIONS = 96
"""What the model is said to have been made for; sessions go far beyond."""
TURNS = 60
ERROR = 1e-3
"""Largest difference of logits, which reach several units, between a session and one forward."""


@pytest.fixture(scope="module")
def mistral(subjects, folder):
    """A random Mistral, all of whose layers attend in a window, and plain Hugging Face's."""
    loaded = subjects("mistral").loaded
    info = msgspec.structs.replace(loaded.info, max_model_len=POSITIONS, max_positions=POSITIONS)
    return loaded, info, reference_model(folder("mistral"), loaded.info)


def talk(loaded, info, *, turns: int = TURNS, **options) -> tuple[LiveModel, list[LiveCase]]:
    """Three sessions, each given one to nine tokens at a time."""
    random = np.random.default_rng(5)
    model = LiveModel(loaded, info, **options)
    prompts = [random.integers(10, 200, length).tolist() for length in (5, 11, 40)]
    cases = [LiveCase(model, str(index), prompt) for index, prompt in enumerate(prompts)]
    lengths = random.integers(1, 10, (len(cases), turns))
    converse(
        model,
        cases,
        turns,
        lambda case, turn: random.integers(10, 200, lengths[case, turn]).tolist(),
    )
    return model, cases


def errors(cases: list[LiveCase], reference) -> list[float]:
    return [float((case.logits - whole_logits(reference, case)).abs().max()) for case in cases]


def test_a_session_behind_its_window_computes_what_a_whole_forward_does(mistral) -> None:
    loaded, info, reference = mistral
    assert info.sliding_window > 0
    model, cases = talk(loaded, info)
    stats = model.scheduler.stats()
    assert stats["session_tokens_dropped_total"] > 500
    assert stats["session_reanchors_total"] > 3
    assert all(len(case.tokens) > 2 * POSITIONS for case in cases)
    assert max(errors(cases, reference)) < ERROR


def test_a_sessions_blocks_tokens_and_positions_do_not_grow(mistral) -> None:
    loaded, info, _ = mistral
    model, cases = talk(loaded, info)
    model.core.step()  # the runner is told what was dropped last
    for case in cases:
        sequence = model.state(case.name)
        assert len(sequence.tokens) < info.sliding_window + 2 * 4 + 10
        assert len(sequence.block_ids) <= info.sliding_window // 4 + 4
        assert len(sequence.request.features) == 0
        row = model.runner._batch.row_of(sequence.seq_id)
        assert sequence.request.session.shift == model.runner._batch.tail_deltas[row]
        assert sequence.request.session.num_dropped + len(sequence.tokens) == len(case.tokens)


@pytest.mark.parametrize("budget", [8, 32])
def test_chunks_of_any_size_behind_the_window_compute_the_same(mistral, budget: int) -> None:
    loaded, info, reference = mistral
    _, cases = talk(loaded, info, turns=20, budget=budget, block_size=8)
    assert max(errors(cases, reference)) < ERROR


# --- negative controls: each piece of handling broken on purpose must be seen ----------------


def test_a_window_that_ends_one_token_early_is_noticed(mistral) -> None:
    loaded, info, reference = mistral
    early = msgspec.structs.replace(info, sliding_window=info.sliding_window - 1)
    _, cases = talk(loaded, early)
    assert max(errors(cases, reference)) > 10 * ERROR


def test_keys_that_are_rotated_by_one_position_too_few_are_noticed(mistral, monkeypatch) -> None:
    loaded, info, reference = mistral
    back = KeyRotation.back
    monkeypatch.setattr(KeyRotation, "back", lambda self, keys, by: back(self, keys, by - 1))
    _, cases = talk(loaded, info)
    assert max(errors(cases, reference)) > 10 * ERROR


def test_keys_that_are_not_rotated_are_noticed(mistral, monkeypatch) -> None:
    loaded, info, reference = mistral
    monkeypatch.setattr(KeyRotation, "move", lambda *_: None)
    _, cases = talk(loaded, info)
    assert max(errors(cases, reference)) > 10 * ERROR


def test_positions_that_do_not_follow_what_was_dropped_are_noticed(mistral, monkeypatch) -> None:
    loaded, info, reference = mistral
    drop = InputBatch.drop

    def forgetful(self, change):
        rotated = drop(self, change)
        self.tail_deltas[self.row_of(change.seq_id)] = 0
        return rotated

    monkeypatch.setattr(InputBatch, "drop", forgetful)
    _, cases = talk(loaded, info)
    assert max(errors(cases, reference)) > 10 * ERROR


# --- compaction ---------------------------------------------------------------------------------


@torch.no_grad()
def compacted_logits(
    reference, rotation: KeyRotation, case: LiveCase, drops, opening=None, delta: int = 0
) -> torch.Tensor:
    """Plain Hugging Face with a cache of its own, from which the same tokens are cut out.

    `drops`: (tokens of the session computed by then, index, number) of each cut. `opening` are the
    inputs of a prompt with pictures, after which positions are indices plus `delta`.
    """
    cache, computed, gone, found = None, 0, 0, []
    if opening is not None:
        output = reference(**opening, use_cache=True)
        cache, computed = output.past_key_values, case.sampled_after[0]
        last = output.logits[0, -1].float()
    axes = (3, 1, -1) if opening is not None else (1, -1)
    for stop in sorted({*case.sampled_after, *(length for length, _, _ in drops)}):
        if stop > computed:
            ids = torch.tensor([case.tokens[computed:stop]])
            positions = torch.arange(computed, stop).expand(axes) - gone + delta
            output = reference(ids, position_ids=positions, past_key_values=cache, use_cache=True)
            cache, computed = output.past_key_values, stop
            last = output.logits[0, -1].float()
        if stop in case.sampled_after:
            found.append(last)
        for _, start, count in [drop for drop in drops if drop[0] == stop]:
            for layer in cache.layers:
                kept = rotation.back(layer.keys[:, :, start + count :], count + delta)
                layer.keys = torch.cat((layer.keys[:, :, :start], kept), dim=2)
                layer.values = torch.cat(
                    (layer.values[:, :, :start], layer.values[:, :, start + count :]), dim=2
                )
            gone, delta = gone + count, 0
    return torch.stack(found)


class Noted:
    """Notes what a session's runner is told to drop, as `compacted_logits` takes it."""

    def __init__(self) -> None:
        self.drops: list[tuple[int, int, int]] = []

    def watch(self, model: LiveModel, case: LiveCase) -> None:
        self._model, self._case = model, case

    def __call__(self, plan):
        for change in plan.extended:
            if isinstance(change, DropTokens):
                session = self._model.state(self._case.name).request.session
                before = session.num_dropped - change.num_tokens + change.length
                computed = before - 1  # the last sampled token is not
                self.drops.append((computed, change.start, change.num_tokens))
        return plan


def test_compaction_keeps_the_beginning_and_the_newest_part(subjects, folder) -> None:
    loaded = subjects("llama").loaded
    info = msgspec.structs.replace(loaded.info, max_model_len=64, max_positions=64)
    noted = Noted()
    model = LiveModel(loaded, info, edit=noted)
    random = np.random.default_rng(6)
    prompt = random.integers(10, 200, 7).tolist()
    case = LiveCase(model, "live", prompt, SessionOptions(overflow="compact"))
    noted.watch(model, case)
    converse(model, [case], 40, lambda *_: random.integers(10, 200, 4).tolist())
    drops = noted.drops
    said = [d.session.compacted for d in model.deltas if d.session and d.session.compacted]
    assert said == [count for _, _, count in drops]
    assert len(said) >= 2
    assert {start for _, start, _ in drops} == {8}, "the prompt stays, in whole blocks"
    reference = reference_model(folder("llama"), loaded.info)
    rotation = key_rotation(loaded.family)
    expected = compacted_logits(reference, rotation, case, drops)
    assert float((case.logits - expected).abs().max()) < ERROR
    assert len(model.state("live").tokens) < 64


def test_a_shared_prefix_stays_as_it_is_when_a_session_rotates_its_keys(subjects, folder) -> None:
    """Another request holds blocks of the session; the session moves its keys to new ones."""
    loaded = subjects("llama").loaded
    info = msgspec.structs.replace(loaded.info, max_model_len=64, max_positions=64)
    model = LiveModel(loaded, info)
    prompt = np.random.default_rng(7).integers(10, 200, 40).tolist()
    options = SessionOptions(overflow="compact", keep_tokens=4)
    first = LiveCase(model, "first", prompt, options)
    model.run()
    first.take_answer()
    second = LiveCase(model, "second", prompt)
    model.run()
    second.take_answer()
    assert model.scheduler.stats()["prefix_cache_hits_total"] >= 36
    first.extend(list(range(20, 36)))
    second.extend([20, 21, 22])
    model.run()
    first.take_answer()
    second.take_answer()
    assert model.scheduler.stats()["session_compactions_total"] == 1
    reference = reference_model(folder("llama"), loaded.info)
    assert max(errors([second], reference)) < ERROR


def test_only_models_of_distances_are_compacted(subjects) -> None:
    assert key_rotation(subjects("llama").loaded.family) is not None
    assert subjects("gemma3").loaded.info.relative_positions is False
    assert subjects("gemma3").loaded.info.sliding_window == 0


def test_pictures_of_models_with_mrope_are_compacted_too(subjects, folder) -> None:
    """Tokens after pictures stand at smaller positions than their indices, until a compaction."""
    subject = subjects("qwen2_5_vl")
    loaded, whole = subject.loaded, next(c for c in subject.cases if c.features)
    length = len(whole.token_ids) + 60
    info = msgspec.structs.replace(loaded.info, max_model_len=length, max_positions=length)
    noted = Noted()
    model = LiveModel(loaded, info, budget=length, num_blocks=512, edit=noted)
    options = SessionOptions(overflow="compact", keep_tokens=4)
    prompt, items = whole.token_ids.tolist(), dict(whole.items)
    case = LiveCase(model, "p", prompt, options, features=whole.features, items=items)
    noted.watch(model, case)
    model.run()
    row = model.runner._batch.row_of(model.state("p").seq_id)
    delta = int(model.runner._batch.tail_deltas[row])
    assert delta < 0
    random = np.random.default_rng(8)
    converse(model, [case], 30, lambda *_: random.integers(10, 200, 4).tolist())
    assert len(noted.drops) >= 1
    assert model.runner._batch.tail_deltas[row] == 0
    reference = reference_model(folder("qwen2_5_vl"), loaded.info)
    rotation = key_rotation(loaded.family)
    expected = compacted_logits(reference, rotation, case, noted.drops, whole.reference, delta)
    assert float((case.logits - expected).abs().max()) < ERROR
