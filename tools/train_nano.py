"""Makes a model like nano from nothing: tokenizer, random weights, training, evaluation.

    tools/train_nano.py model                 hours on a CPU; minutes with --device cuda
    tools/train_nano.py model --smoke         a minute: shows that it works, not a model to use

Speech needs espeak-ng (`apt-get install espeak-ng`), and more fonts come with `fonts-dejavu`.
Without them their examples are left out, and a line says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that it runs from any folder

from benchmarks.nano import evaluate, report_of
from lookonce.llm import LLM
from tools.nano.materials import training_materials
from tools.nano.training import TrainingPlan, TrainingStep, train
from tools.nano.world.conversations import heldout_materials

SMOKE = TrainingPlan(tower_steps=12, answer_steps=60, batch=8, collages=1, workers=0)
RECORDINGS_PER_WORD = 40


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument("--smoke", action="store_true", help="few steps, no speech")
    parser.add_argument("--conversations", type=int, default=300, help="asked at the end")
    for field in dataclasses.fields(TrainingPlan):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), help=f"[{field.default}]")
    chosen = parser.parse_args()
    given = {f.name: getattr(chosen, f.name) for f in dataclasses.fields(TrainingPlan)}
    plan = dataclasses.replace(
        SMOKE if chosen.smoke else TrainingPlan(),
        **{k: v for k, v in given.items() if v is not None},
    )
    recordings = 0 if chosen.smoke else RECORDINGS_PER_WORD
    materials = training_materials(seed=plan.seed, recordings_per_word=recordings)
    if materials.speaker is None:
        print("no speech" + ("" if chosen.smoke else ": espeak-ng is not installed"))
    texts = 300 if chosen.smoke else 4000
    steps = train(chosen.target, materials, plan, texts=texts, tell=tell)
    print(summary(steps))
    with LLM(str(chosen.target)) as llm:
        answered = evaluate(llm, 10 if chosen.smoke else chosen.conversations, seed=plan.seed)
    report_of(answered, heldout_materials()).show()


def tell(line: str) -> None:
    print(line, flush=True)


def summary(steps: list[TrainingStep]) -> str:
    answers = [step for step in steps if step.stage == "answers"]
    few = max(1, len(answers) // 10)
    first = sum(step.loss for step in answers[:few]) / few
    last = sum(step.loss for step in answers[-few:]) / few
    return f"loss of answers: {first:.3f} at first, {last:.3f} at last"


if __name__ == "__main__":
    main()
