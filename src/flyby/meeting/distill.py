"""Regularised distillation, FOL's eq. 12: mean KL(softmax(A/T) || softmax(f/T)) + lambda ||theta+ - theta-||^2.

The teacher's logits A are those cached on the node's training images, so the student sees these images as they are; T =
4, no factor T^2 and lambda = .01 over the sum of squares of all trainable parameters, as printed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flyby.data.site import Part
from flyby.meeting.settings import OrientSettings
from flyby.meeting.stack import Stack, Tensors
from flyby.meeting.tuning import Penalty, Problem, cross_entropy
from flyby.objectives.kd import softened_kl


class Distilled(Problem):
    """Eq. 12 for one student (a stack of one) that starts at theta-. ``teacher`` are logits ``[N, C]`` of the training
    part, ``teacher_val`` of the validation part where ``watch: teacher`` asks for them."""

    augments = False

    def __init__(
        self, start: Stack, teacher: Tensor, settings: OrientSettings, teacher_val: Tensor | None = None
    ) -> None:
        super().__init__()
        self.settings = settings
        self.teacher, self.teacher_val = (
            teacher.to(start.device),
            (None if teacher_val is None else teacher_val.to(start.device)),
        )
        self.start = {name: t.detach().clone() for name, t in start.parameters.items()}

    def data_term(self, logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        return self._kl(logits, self.teacher[rows])

    def _kl(self, logits: Tensor, teacher: Tensor) -> Tensor:
        t = self.settings.temperature
        return softened_kl(logits, teacher, t).mean(1) * (t * t if self.settings.temperature_squared else 1.0)

    def penalty(self, parameters: Tensors) -> Penalty:
        if self.settings.anchor == 0:
            return None
        return self.settings.anchor * torch.stack(
            [(t - self.start[n]).square().sum() for n, t in parameters.items()]
        ).sum().unsqueeze(0)

    def watched(self, logits: Tensor, val: Part) -> Tensor:
        if self.settings.watch == "teacher" and self.teacher_val is not None:
            return self._kl(logits, self.teacher_val)
        return cross_entropy(logits, val.labels)

    def watched_penalty(self, parameters: Tensors) -> Penalty:
        return None

    def objective(self, stack: Stack, images: Tensor, rows: Tensor) -> Tensor:
        """Eq. 12 on some training images in evaluation mode, as one number: what Theorem 2 is about."""
        logits = stack.logits(stack.spec.prepare(images[rows]))
        penalty = self.penalty(stack.parameters)
        loss = self.data_term(logits, rows, rows).sum()
        return loss if penalty is None else loss + penalty.sum()
