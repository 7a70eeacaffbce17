"""DENSE [Zhang et al., NeurIPS 2022]: the clients' ensemble is distilled on images a generator makes from the ensemble
alone.

Each server epoch a fresh generator is trained on L = CE(t, y) + L_BN + L_adv, with t = mean_k f_k(x) and L_adv =
-mean[1(argmax s != argmax t) KL(p_t || p_s)]: images that the ensemble is sure of, that look like the clients' data to
their BatchNorm layers, and that the student still gets wrong. They join a growing pool; the student then takes one pass
over it. Images are shifted and mirrored before teacher and student, in synthesis and in every pass, as far as the sites
did so with theirs. Two hundred epochs of 256 images in batches of 256 are the published 20,100 steps on 51,200 images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.fusion.base import FusionSettings, Server
from flyby.fusion.distilled.distill import Distillation, DistillSettings, Learner
from flyby.fusion.distilled.synthesis import Pool, Synthesis, SynthesisSettings, as_unit
from flyby.fusion.distilled.teachers import Teachers
from flyby.fusion.predictor import Predictor
from flyby.objectives.kd import softened_kl
from flyby.parcels.inbox import Inbox


class DenseSettings(DistillSettings, SynthesisSettings):
    augment: bool = Field(
        True,
        description=(
            "shift and mirror images as the sites did theirs, in synthesis and in every pass, with the teacher asked"
            " again"
        ),
    )


class Dense(Distillation):
    """Data-free distillation; ``class_term`` and ``adversarial`` are the two terms that rules of
    this kind differ in."""

    name = "dense"
    paper = "DENSE: Zhang et al., NeurIPS 2022"
    about = "ensemble distilled on images from a generator that only ever saw the clients' models"
    synthetic = True
    settings_type: ClassVar[type[FusionSettings]] = DenseSettings
    settings: DenseSettings
    workshop: Synthesis | None = None

    def class_term(self, teacher: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(teacher, labels)

    def adversarial(self, student: Tensor, teacher: Tensor) -> Tensor:
        return masked_disagreement(student, teacher, self.settings.adv_temperature)

    def grow(self, pool: Pool, teachers: Teachers, learner: Learner, seed: int, epoch: int) -> dict[str, float]:
        if self.workshop is None or self.workshop.teachers is not teachers:
            self.workshop = Synthesis(
                teachers,
                teachers.classes,
                self._objective(pool, teachers, learner),
                self.settings,
                self.settings.augment,
            )
        images, labels, noted = self.workshop.make(seed, "server", epoch)
        said = teachers.say(as_unit(images))
        pool.add(images, labels, said)
        return noted | {"recognised": float((teachers.answer(pool.weights, said).argmax(1) == labels).float().mean())}

    def _objective(
        self, pool: Pool, teachers: Teachers, learner: Learner
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        s = self.settings

        def objective(x: Tensor, said: Tensor, labels: Tensor) -> Tensor:
            teacher = teachers.answer(pool.weights, said)
            loss = s.ce * self.class_term(teacher, labels)
            return loss + s.adv * self.adversarial(learner.scores(x, said), teacher) if s.adv else loss

        return objective

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        try:
            return super().combine(parcels, server)
        finally:
            self.workshop = None


def masked_disagreement(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """-mean[1(argmax s != argmax t) KL(p_t || p_s)]; the mean is over all samples, also those that agree."""
    differs = (student.argmax(1) != teacher.argmax(1)).float()
    return -(differs * softened_kl(student, teacher, temperature)).mean()
