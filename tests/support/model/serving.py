"""Drives cases through the engine core, in process, and compares with Hugging Face."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from lookonce.config import ModelConfig, SchedulerConfig
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.scheduler import Scheduler
from lookonce.core.scheduler_state import SchedulerState
from lookonce.core.state_snapshots import StateSnapshots
from lookonce.engine.process.adapters import EngineAdapters
from lookonce.engine.process.engine_core import EngineCore
from lookonce.engine.process.load_engine import load_adapters
from lookonce.model.attention.backend import AttentionBackend
from lookonce.model.attention.select import select_backend
from lookonce.model.decode_graphs import Capture
from lookonce.model.loader import LoadedModel, load_model, media_adapters
from lookonce.model.lora import LoRAAdapter
from lookonce.model.runner import Runner
from lookonce.model.step_inputs import StepInputs
from lookonce.render.families.registry import media_examples
from lookonce.types.media import Modality
from lookonce.types.model import (
    NEEDED_PACKAGES,
    ONE_IN_A_PROMPT,
    ONE_SOUND_IN_A_PROMPT,
    ModelInfo,
)
from lookonce.types.request import GenerateRequest, PromptLogprob
from lookonce.types.sampling import SamplingParams
from lookonce.types.step import StepPlan, StepResult
from tests.support.core.engine import OVERLAPPED
from tests.support.device import DEVICE
from tests.support.model.cases import MAX_LOGIT_ERROR, Case, CaseMaker, Part, array, picture, sound
from tests.support.model.chats import PoolInProcess, chat_case
from tests.support.render import hugging_face

NUM_TOKENS = 24
NEAR_TIE = MAX_LOGIT_ERROR
"""Logit gap between the two best tokens below which two computations may differ."""
BF16_ROUNDINGS = 4
"""Of the largest logit: what several layers may add up to."""

TEXT = "Tell me about this please "
NEED_PICTURES = ("paligemma",)
"""Types whose processor takes no prompt without one."""
PlanEdit = Callable[[StepPlan], StepPlan]


@dataclasses.dataclass
class Answer:
    token_ids: list[int]
    logits: torch.Tensor
    """[tokens, V], what each token was chosen from."""


@dataclasses.dataclass
class Subject:
    """One folder, loaded for us, with cases and Hugging Face's own answers to them."""

    loaded: LoadedModel
    cases: list[Case]
    expected: list[Answer]


@dataclasses.dataclass
class Served:
    answers: list[Answer]
    stats: dict[str, float]
    scored: dict[int, list[PromptLogprob]]
    """By case: log-probabilities of its prompt, where they were asked for."""
    reasons: list[str]
    """Why each answer ended."""


class CapturingRunner(Runner):
    """Keeps the logits every token was sampled from, by sequence; edits plans before it runs."""

    def __init__(self, *args: Any, edit: PlanEdit, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.captured: dict[int, list[torch.Tensor]] = {}
        self._edit = edit
        self.own_adapters: EngineAdapters | None = None
        """Of a model that is published with adapters for its media."""

    def execute(self, plan: StepPlan) -> StepResult:
        return super().execute(self._edit(plan))

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        for new in plan.new:  # preempted: a token that was under way is drawn again
            del self.captured.get(new.seq_id, [])[len(new.token_ids) - new.num_prompt_tokens :]
        return super().begin(self._edit(plan))

    def logits(
        self, inputs: StepInputs, seq_ids: Sequence[int], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = super().logits(inputs, seq_ids, hidden)
        for seq_id, row in zip(seq_ids, logits, strict=True):
            self.captured.setdefault(seq_id, []).append(row.clone())
        return logits


def make_subject(folder: Path) -> Subject:
    loaded = load_model(ModelConfig(folder=str(folder), served_name="test", device=DEVICE))
    maker = CaseMaker(folder, loaded.family.config)
    cases = text_cases(maker) if not loaded.info.modalities else media_cases(maker)
    return Subject(loaded, cases, expected_answers(folder, loaded.info, cases))


def make_general_subject(folder: Path) -> Subject:
    """Of a type with media and no family of its own; items are from the renderer, and what plain
    Hugging Face gets of each prompt is from its whole processor."""
    loaded = load_general(folder)
    cases = general_cases(folder, loaded.info.modalities)
    for case in cases:
        assert case.token_ids.tolist() == case.reference["input_ids"][0].tolist()
    return Subject(loaded, cases, expected_answers(folder, loaded.info, cases))


def missing_library(kind: str) -> str | None:
    """A library that transformers needs for a type with media, or for a variant of one, and that
    is not installed."""
    model_type, *_ = kind.split("-")
    needed = (package for package, types in NEEDED_PACKAGES.items() if model_type in types)
    return next((package for package in needed if find_spec(package) is None), None)


def load_general(folder: Path, **options: Any) -> LoadedModel:
    config = ModelConfig(folder=str(folder), served_name="test", device=DEVICE, **options)
    return load_model(config, None, partial(media_examples, folder, config.dtype))


def general_cases(folder: Path, modalities: Sequence[Modality]) -> list[Case]:
    """As `media_cases`, in a client's messages."""
    pool, kind = PoolInProcess(folder), hugging_face.model_type(folder)
    chats: list[tuple[Part, ...]] = []
    media = {"image": pictures(), "audio": sounds()}
    modalities = [modality for modality in modalities if modality in media]  # films: test_film
    for modality in modalities:
        one, two, three = media[modality]
        first = ("See: ", one, " what is it?")
        without = (TEXT,) if kind not in NEED_PICTURES else ("See ", two)
        limited = modality == "audio" and kind in ONE_SOUND_IN_A_PROMPT
        one_alone = limited or kind in ONE_IN_A_PROMPT
        several = (two,) if one_alone else (two, " and B ", three, " or ", one)
        chats += [first, without, ("A", *several, " which?"), first]
    if len(modalities) > 1:
        chats.append(("Both ", media["image"][1], " and ", media["audio"][1], " now"))
    return [chat_case(folder, chat, pool) for chat in chats]


def text_cases(maker: CaseMaker) -> list[Case]:
    return [maker.case(TEXT * 3), maker.case("Hi"), maker.case(TEXT * 3 + "now"), maker.case(TEXT)]


def media_cases(maker: CaseMaker) -> list[Case]:
    """One item; none; several of which one came before; the first prompt again, word for word."""
    media = pictures() if maker.sees else sounds()
    first = ("See: ", media[0], " what is it?")
    several = ("A", media[1], " and B ", media[2], media[0], " which?")
    cases = [maker.case(*first), maker.case(TEXT), maker.case(*several), maker.case(*first)]
    if maker.sees and maker.hears:
        one, two, three = sounds()
        two = two if maker.short_among_long else sound(2, 1.3)
        both = (picture(4), "and", two, "then", three, "ok")
        cases += [maker.case("Hear ", one, " what?"), maker.case(*both)]
    return cases


def pictures() -> list[Image.Image]:
    return [picture(1), picture(2, 90, 140), picture(3, 200, 60)]


def sounds() -> list[np.ndarray]:
    return [sound(1), sound(2, 0.3), sound(3, 2.2)]


def expected_answers(folder: Path, info: ModelInfo, cases: list[Case]) -> list[Answer]:
    """Greedy tokens and logits of plain Hugging Face `generate`, one prompt at a time, fp32, always
    on a CPU."""
    models: dict[str, Any] = {}
    answers = []
    for case in cases:
        name = adapter_of(folder, info.model_type, case)
        if name not in models:
            models[name] = reference_model(folder, info)
            if name:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # PEFT of transformers
                    models[name] = PeftModel.from_pretrained(models[name], folder / name).eval()
        answers += answers_of(models[name], [case])
    return answers


OWN_ADAPTERS: dict[str, dict[Modality, str]] = {
    "phi4_multimodal": {"image": "vision-lora", "audio": "speech-lora"},
    "qwen2_audio": {"audio": "ears"},  # of test_media_adapters.py
}
"""Type → media → the folder of the adapter for prompts with them. Told here anew, and not by what
is tested."""


def adapter_of(folder: Path, model_type: str, case: Case) -> str:
    """The name of the folder of the adapter that a prompt wants; empty: none."""
    named = OWN_ADAPTERS.get(model_type, {})
    wanted = [name for modality, name in named.items() if modality in modalities_of(case)]
    return wanted[0] if wanted and (folder / wanted[0]).is_dir() else ""


def modalities_of(case: Case) -> set[Modality]:
    return {feature.modality for feature in case.features}


def answers_of(model: Any, cases: Sequence[Case]) -> list[Answer]:
    """Greedy tokens and logits of a plain Hugging Face model, one prompt at a time."""
    return [_reference_answer(model, case) for case in cases]


def reference_model(folder: Path, info: ModelInfo) -> Any:
    """Plain Hugging Face's, fp32; it never stops by itself."""
    auto = AutoModelForMultimodalLM if info.modalities else AutoModelForCausalLM
    if info.modalities and info.model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        auto = AutoModelForSeq2SeqLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def reference_prompt_logits(model: Any, case: Case) -> torch.Tensor:
    """[P, V] after each token of the prompt."""
    _forget_prompt_before(model)
    with torch.no_grad():
        logits: torch.Tensor = model(**case.reference).logits[0].float()
    return logits


def _forget_prompt_before(model: Any) -> None:
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None


def _reference_answer(model: Any, case: Case) -> Answer:
    _forget_prompt_before(model)
    with torch.no_grad():
        found = model.generate(
            **case.reference,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = found.sequences[0, len(case.token_ids) :].tolist()
    return Answer(tokens, torch.cat(found.logits).float())


def make_core(
    loaded: LoadedModel,
    *,
    budget: int,
    num_blocks: int = 256,
    block_size: int = 4,
    backend: AttentionBackend | None = None,
    info: ModelInfo | None = None,
    edit: PlanEdit = lambda plan: plan,
    num_snapshots: int = 32,
    adapters: Sequence[LoRAAdapter] = (),
    overlapped: bool = OVERLAPPED,
    decode_sizes: Sequence[int] = (),
    capture: Capture | None = None,
    encoder_cache: tuple[int, int] = (1 << 20, 0),
) -> tuple[EngineCore, CapturingRunner]:
    """`info` is what the scheduler believes of the model, `edit` changes plans on their way to the
    runner: both are for taking a piece of handling away. `overlapped`: plan ahead of results.
    `encoder_cache`: bytes for encoder outputs on the device, and in host memory.
    """
    on_device, on_host = encoder_cache
    info = info or loaded.info
    own = media_adapters(loaded.info.name, loaded.info.model_type)
    scheduler = Scheduler(
        SchedulerState(
            BlockPool(num_blocks, block_size),
            EncoderCache(on_device, info.encoder_row_bytes, on_host),
            prefix_caching=True,
            snapshots=StateSnapshots(num_snapshots, info.state_bytes) if info.state_bytes else None,
        ),
        info,
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget),
    )
    runner = CapturingRunner(
        loaded,
        kv_pages=loaded.kv_pages(num_blocks + bool(decode_sizes), block_size),
        decode_sizes=decode_sizes,
        capture=capture,
        backend=backend
        or select_backend(loaded.device, loaded.family.attention_features(loaded.dtype)),
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        edit=edit,
        num_snapshots=num_snapshots,
        adapters=bool(adapters or own),
    )
    runner.capture()
    runner.own_adapters = load_adapters(loaded, runner, None, own)
    for adapter in adapters:
        assert runner.lora is not None
        runner.lora.loaded = runner.lora.loaded.with_adapter(adapter)
    return EngineCore(scheduler, runner, overlapped=overlapped), runner


def serve(
    loaded: LoadedModel,
    cases: Sequence[Case],
    *,
    prompt_logprobs: Mapping[int, int] = MappingProxyType({}),
    num_tokens: int | None = NUM_TOKENS,
    adapted: Mapping[int, LoRAAdapter] = MappingProxyType({}),
    apart: bool = False,
    **options: Any,
) -> Served:
    """Answers of an `EngineCore` to all cases; one arrives every step: prefills and decodes mix.
    `apart`: each arrives when the one before has its answer.

    `prompt_logprobs`: by case, how many of the likeliest it asks for beside its prompt's tokens.
    `adapted`: by case, the adapter that it is computed with. `options` are those of `make_core`.
    """
    longest = max(len(case.token_ids) for case in cases) + NUM_TOKENS
    room = {"num_blocks": max(256, 2 * longest // options.get("block_size", 4))}
    core, runner = make_core(loaded, adapters=list(adapted.values()), **room | options)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(cases))}
    reasons: dict[str, str] = {}
    scored: dict[int, list[PromptLogprob]] = {}
    waiting = list(enumerate(cases))
    while waiting or core.has_work:
        if waiting and not (apart and core.has_work):
            index, case = waiting.pop(0)
            request = _request(index, case, prompt_logprobs.get(index), num_tokens)
            if index in adapted:
                identity = adapted[index].identity
                request = msgspec.structs.replace(request, adapter=identity)
            elif runner.own_adapters is not None:
                own = runner.own_adapters.own(modalities_of(case))
                request = msgspec.structs.replace(request, adapter=own)
            core.add(request, case.items)
        output = core.step()
        for delta in output.deltas if output else ():
            assert delta.error is None, delta.error
            tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                reasons[delta.request_id] = delta.finish_reason
            if delta.prompt_logprobs is not None:
                scored[int(delta.request_id)] = delta.prompt_logprobs
    core.check_integrity()
    answers = [Answer(tokens[str(i)], _logits(runner, i)) for i in range(len(cases))]
    return Served(answers, core.stats(), scored, [reasons[str(i)] for i in range(len(cases))])


def _logits(runner: CapturingRunner, seq_id: int) -> torch.Tensor:
    """[tokens, V] on the host."""
    return torch.stack(runner.captured[seq_id]).cpu()


def answers(served: Served) -> list[list[int]]:
    """The tokens of each answer."""
    return [answer.token_ids for answer in served.answers]


def loaded_with_cases(folder: Path, device: str = "cpu") -> tuple[LoadedModel, list[Case]]:
    loaded = load_model(ModelConfig(folder=str(folder), served_name="test", device=device))
    maker = CaseMaker(folder, loaded.family.config)
    return loaded, media_cases(maker) if maker.sees or maker.hears else text_cases(maker)


def fork(loaded: LoadedModel, case: Case, samples: int, **options: Any) -> list[Answer]:
    """Several greedy samples of one request. `options` are those of `make_core`."""
    core, runner = make_core(loaded, **options)
    tokens: list[list[int]] = [[] for _ in range(samples)]
    request = _request(0, case, None, NUM_TOKENS)
    sampling = msgspec.structs.replace(request.sampling, n=samples)
    core.add(msgspec.structs.replace(request, sampling=sampling), case.items)
    while core.has_work:
        output = core.step()
        for delta in output.deltas if output else ():
            assert delta.error is None, delta.error
            tokens[delta.index] += delta.token_ids
    core.check_integrity()
    logits = [_logits(runner, seq_id) for seq_id in sorted(runner.captured)]
    return [Answer(*pair) for pair in zip(tokens, logits, strict=True)]


def _request(
    index: int, case: Case, prompt_logprobs: int | None, num_tokens: int | None
) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(index),
        scope=bytes(32),
        prompt=array(case.token_ids),
        features=case.features,
        sampling=SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            prompt_logprobs=prompt_logprobs,
        ),
        arrival=0.0,
    )


@dataclasses.dataclass
class Difference:
    near_ties: int
    """Answers that part from the reference at a gap of a near tie."""
    wrong: int
    """Answers that part from it at a larger gap."""
    max_logit_error: float
    """Over all tokens up to where an answer parts, the parting one included."""


def compare(
    answers: Sequence[Answer], expected: Sequence[Answer], near_tie: float = NEAR_TIE
) -> Difference:
    """`near_tie`: the logit gap below which the two best tokens are one."""
    total = Difference(0, 0, 0.0)
    for ours, theirs in zip(answers, expected, strict=True):
        assert len(ours.token_ids) == len(theirs.token_ids)
        same = np.array(ours.token_ids) == np.array(theirs.token_ids)
        parted = int(same.argmin()) if not same.all() else len(same) - 1
        error = (ours.logits - theirs.logits)[: parted + 1].abs().max()
        total.max_logit_error = max(total.max_logit_error, float(error))
        if not same.all():
            best, second = theirs.logits[parted].topk(2).values.tolist()
            total.near_ties += best - second < near_tie
            total.wrong += best - second >= near_tie
    return total


def assert_parity(served: Served, expected: Sequence[Answer]) -> None:
    """No answer parts from the reference, and no logit differs by more than rounding."""
    difference = compare(served.answers, expected)
    assert difference.wrong == 0
    largest = max(1.0, *(float(answer.logits.abs().max()) for answer in expected))
    assert difference.max_logit_error < MAX_LOGIT_ERROR * largest, difference


def assert_same_in_bfloat16(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """No logit differs by more than rounding, up to where an answer parts at a near tie: libraries
    multiply other numbers of rows in another order."""
    largest = max(float(answer.logits.abs().max()) for answer in expected)
    rounding = BF16_ROUNDINGS * torch.finfo(torch.bfloat16).eps * largest
    difference = compare(answers, expected, near_tie=2 * rounding)
    assert difference.wrong == 0, difference
    assert difference.max_logit_error <= rounding, difference


def blocks_for_preemption(cases: Sequence[Case], block_size: int) -> int:
    """KV blocks in which two prompts fit, but not their answers."""
    lengths = [len(case.token_ids) for case in cases]
    return max((max(lengths) + NUM_TOKENS) // block_size + 1, sum(lengths) // block_size + 4)
