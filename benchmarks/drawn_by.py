"""Does the teacher that draws the images have to be the one that teaches on them? DENSE with the class term of its
synthesis asked of the mean of logits, and all else of another teacher, judged on the sites' held-out images.

    python benchmarks/drawn_by.py RUN --teacher experts-calibrated [--by-logits] [--epochs 30] [--out rows.jsonl]

RUN is the folder of a finished run whose parcels are kept (``flyby study distil-cifar10-small`` leaves some).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flyby.api import Model
from flyby.data.splits import Split
from flyby.fusion.base import Server
from flyby.fusion.distilled.dense import Dense, DenseSettings
from flyby.fusion.distilled.distill import Learner
from flyby.fusion.distilled.synthesis import Pool
from flyby.fusion.distilled.teachers import Teachers, mix
from flyby.parcels.inbox import Inbox
from flyby.runs.config import RunConfig, data_of
from flyby.runs.folder import Run
from flyby.settings import build


class DrawnByLogits(Dense):
    def _objective(
        self, pool: Pool, teachers: Teachers, learner: Learner
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def objective(x: Tensor, said: Tensor, labels: Tensor) -> Tensor:
            drawn = self.class_term(mix(pool.weights, said[..., : teachers.classes]), labels)
            apart = self.adversarial(learner.scores(x, said), teachers.answer(pool.weights, said))
            return self.settings.ce * drawn + self.settings.adv * apart

        return objective


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--teacher", default="logits")
    parser.add_argument("--by-logits", action="store_true", help="the mean of logits draws, --teacher teaches")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the server")
    parser.add_argument("--out", type=Path, help="the row is added to this file")
    words = parser.parse_args()
    run = Run(words.run)
    config = build(RunConfig, {k: v for k, v in run.asked().items() if k != "resolved"}, str(run.config))
    split, train = Split.load(run.split), data_of(config).load().train
    held = torch.tensor(sorted(int(i) for share in split.shares.values() for i in share.val))
    judged = dataclasses.replace(train, images=train.images[held], labels=train.labels[held])
    rule = (DrawnByLogits if words.by_logits else Dense)(
        DenseSettings(
            epochs=words.epochs, steps=words.steps, generator_width=32, lr=0.02, passes=3, teacher=words.teacher
        )
    )
    began = time.perf_counter()
    made = rule.fuse(Inbox([run.parcel(name) for name in split.shares]), Server(None, words.seed, torch.device("cpu")))
    row = {"teacher": words.teacher, "drawn_by": "logits" if words.by_logits else words.teacher, "run": words.run.name}
    row |= {"epochs": words.epochs, "seed": words.seed, "images": len(held)}
    row |= {"held_out": Model(made, device="cpu", card={}).evaluate(judged).accuracy}
    row |= {"seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps(row))
    if words.out is not None:
        with words.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
