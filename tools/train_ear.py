"""Makes a model like nano-ear from nothing: speech, training, word error rate.

    tools/train_ear.py model work              hours on a CPU; minutes with --device cuda
    tools/train_ear.py model work --steps 20   shows that it works, not a model to use

Speech comes from espeak-ng's library (`apt-get install espeak-ng`). `work` keeps the speech and the
state of the training: the same command goes on where one was ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, VoxtralRealtimeForConditionalGeneration

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from any folder

from tools.ear.hearing import edits, transcribe
from tools.ear.sentences import sentence
from tools.ear.speech import HELD_OUT_VOICES, any_voice, heard
from tools.ear.training import EarPlan, train

SAVE_EACH_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument("work", type=Path, help="a folder for speech and state")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heard", type=int, default=200, help="held-out sentences at the end")
    for field in dataclasses.fields(EarPlan):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default)
    chosen = parser.parse_args()
    plan = EarPlan(**{f.name: getattr(chosen, f.name) for f in dataclasses.fields(EarPlan)})
    torch.set_num_threads(chosen.threads)
    if plan.steps:
        train(chosen.target, chosen.work, plan, tell, save_each=SAVE_EACH_SECONDS)
    if chosen.heard:
        wrong, words = errors(chosen.target, chosen.heard)
        tell(f"word error rate {wrong / words:.3f}: {wrong} of {words} words, held-out voices")


def errors(folder: Path, sentences: int) -> tuple[int, int]:
    """Edits between what was said and heard, and words said, of held-out voices and sentences."""
    model = VoxtralRealtimeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rng, wrong, words = random.Random("held out"), 0, 0
    for _ in range(sentences):
        said = sentence(rng, held_out=True)
        spoken = heard(rng, any_voice(rng, said, HELD_OUT_VOICES), before=0.3, after=0.3)
        wrong += edits(said, transcribe(model.eval(), tokenizer, spoken.wave))
        words += len(said)
    return wrong, words


def tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
