"""nano's origin: training sees what the server will see, and makes a folder that answers."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch

from tests.support.nodes import engine_node
from tools.nano import folder
from tools.nano.batches import Answers, Towers, collate, varied
from tools.nano.dense import CLASSES, COLOURS, HEARD, cell_targets, token_targets
from tools.nano.encoding import IGNORED, ConversationEncoder, audio_tokens, mel, patches
from tools.nano.materials import collage
from tools.nano.training import TrainingPlan, schedule, train
from tools.nano.world.conversations import MIX, Materials
from tools.nano.world.numbers import number_scene
from tools.nano.world.scenes import CELL
from tools.nano.world.shapes import shape_scene
from tools.nano.world.sounds import make_sound
from tools.nano.world.talk import training_lines

MUTE = Materials(fonts=(), speaker=None, lines=training_lines())
PLAN = TrainingPlan(tower_steps=1, answer_steps=2, batch=3, collages=1, workers=0)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    from lookonce.config import NANO_FOLDER

    return AutoTokenizer.from_pretrained(NANO_FOLDER)


def test_pictures_are_bit_for_bit_what_hugging_face_s_processor_makes(nano_folder):
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(nano_folder, backend="pil")
    rng = random.Random(0)
    for scene in [shape_scene(rng), number_scene(rng, ()), collage(rng, ())]:
        theirs = processor(scene.image, return_tensors="pt")["pixel_values"]
        assert torch.equal(patches(scene.image), theirs)


def test_sounds_are_what_hugging_face_s_extractor_makes(nano_folder):
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(nano_folder)
    rng = random.Random(0)
    for sound in [make_sound(rng, None) for _ in range(4)]:
        theirs = extractor(
            sound.wave, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt"
        )
        frames = int(theirs["attention_mask"].sum())
        ours = mel(sound.wave)
        assert ours.shape == (128, frames)
        assert torch.allclose(ours, theirs["input_features"][0, :, :frames], atol=1e-5)


@pytest.mark.parametrize("make", MIX)
def test_a_conversation_s_tokens_are_the_chat_template_s(tokenizer, make):
    rng = random.Random(3)
    turns = make(rng, MUTE)
    example = ConversationEncoder(tokenizer).encode(turns)
    messages = []
    for turn in turns:
        media = [{"type": "image"}] * len(turn.pictures) + [{"type": "audio"}] * len(turn.sounds)
        content = [*media, {"type": "text", "text": turn.asked.question}]
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": turn.asked.answer})
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    for scene in example.pictures:
        cells = scene.image.width * scene.image.height // CELL**2
        text = text.replace(folder.IMAGE, "<cell>" * cells, 1)
    for sound in example.sounds:
        tokens = audio_tokens(mel(sound.wave).shape[1])
        text = text.replace(folder.AUDIO, "<moment>" * tokens, 1)
    text = text.replace("<cell>", folder.IMAGE).replace("<moment>", folder.AUDIO)
    assert example.token_ids == tokenizer.encode(text)
    said = [token for token in example.labels if token != IGNORED]
    answers = "".join(turn.asked.answer + folder.END for turn in turns)
    assert tokenizer.decode(said) == answers


def test_cells_are_told_what_they_show():
    rng = random.Random(1)
    for scene in [shape_scene(rng) for _ in range(30)]:
        columns = scene.image.width // CELL
        targets = cell_targets(scene).reshape(-1, columns, 3)
        for order, thing in enumerate(scene.things, 1):
            left, top, right, bottom = thing.box
            row, column = int((top + bottom) / 2 // CELL), int((left + right) / 2 // CELL)
            wanted = [CLASSES[thing.kind], COLOURS[thing.colour], order]
            assert targets[row, column].tolist() == wanted
        assert (targets[targets[..., 0] == 0][:, 1] == COLOURS[scene.background]).all()


def test_a_collage_says_nothing_about_order():
    scene = collage(random.Random(2), ())
    assert len(scene.things) > 3
    assert (cell_targets(scene)[:, 2] == IGNORED).all()


def test_moments_are_told_what_sounds():
    rng = random.Random(1)
    for sound in [make_sound(rng, None) for _ in range(30)]:
        targets = token_targets(sound)
        labels = {HEARD[segment.label] for segment in sound.segments}
        assert set(targets.tolist()) - {0} == labels
        assert len(targets) == audio_tokens(mel(sound.wave).shape[1])


def test_batches_are_pinned_by_their_seed(nano_folder):
    def first(seed: int) -> list[torch.Tensor]:
        streams = (
            Towers(MUTE, seed=seed, size=3),
            Answers(MUTE, nano_folder, seed=seed, size=3, collages=1),
        )
        batches = [next(iter(stream)) for stream in streams]
        return [part for b in batches for part in (b.token_ids, b.cells, b.patches, b.mel)]

    assert all(map(torch.equal, first(4), first(4)))
    assert not all(map(np.array_equal, first(4), first(5)))


def test_padding_is_no_part_of_a_batch(tokenizer):
    encoder, rng = ConversationEncoder(tokenizer), random.Random(5)
    examples = [encoder.encode(make(rng, MUTE)) for make in MIX]
    batch = collate(examples, pad=0)
    lengths = [len(example.token_ids) for example in examples]
    assert batch.attended.sum(1).tolist() == lengths
    assert (batch.labels[batch.attended == 0] == IGNORED).all()
    cells = int((batch.token_ids == tokenizer.convert_tokens_to_ids(folder.IMAGE)).sum())
    assert len(batch.cells) == cells == int(batch.grids.prod(1).sum()) // 4
    moments = int((batch.token_ids == tokenizer.convert_tokens_to_ids(folder.AUDIO)).sum())
    assert len(batch.moments) == moments


def test_careless_typing_changes_no_answer():
    rng = random.Random(6)
    for make in MIX:
        turns = make(rng, MUTE)
        typed = varied(rng, turns)
        assert [turn.asked.answer for turn in typed] == [turn.asked.answer for turn in turns]


def test_the_learning_rate_rises_and_falls():
    rates = [schedule(step, 600) for step in range(600)]
    assert rates.index(max(rates)) in range(55, 65)
    assert rates[0] < 0.05
    assert 0.02 <= rates[-1] < 0.03


def test_the_tokenizer_knows_spoken_words_and_spells_digits():
    texts = folder.texts_of(MUTE, seed=1, conversations=300)
    tokenizer = folder.make_tokenizer(texts)
    assert tokenizer.convert_ids_to_tokens(range(11)) == list(folder.SPECIALS)
    assert len(tokenizer) <= folder.VOCABULARY
    assert len(tokenizer.tokenize(" square")) == 1
    assert len(tokenizer.tokenize("472")) == 3
    assert tokenizer.decode(tokenizer.encode("HELLO wörld 你好")) == "HELLO wörld 你好"


def test_a_model_made_from_nothing_learns_and_answers(tmp_path):
    said: list[str] = []
    steps = train(tmp_path, MUTE, PLAN, texts=60, tell=said.append)
    assert [step.stage for step in steps] == ["towers"] + ["answers"] * 2
    answers = [step for step in steps if step.stage == "answers"]
    assert answers[-1].loss < answers[0].loss * 0.9
    assert all(np.isfinite(step.loss) for step in steps)
    assert said[0].endswith(f"towers 0: loss {steps[0].loss:.3f}")
    picture = {"type": "image_url", "image_url": {"url": RED_SQUARE}}
    content = [picture, {"type": "text", "text": "What is in the picture?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4}

    async def answered():
        async with engine_node(tmp_path) as node:
            return await node.ok("/v1/chat/completions", body)

    usage = asyncio.run(answered())["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 4
    assert usage["completion_tokens"] >= 1


RED_SQUARE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAABQAAAAUCAIAAAAC64paAAAAHElEQVR4nGP8z0A+YKJA76jmUc2jmkc1U0EzACKcASf2pQ6"
    "7AAAAAElFTkSuQmCC"
)
