"""Regularised distillation, FOL's eq. 12: mean KL(softmax(A/T) || softmax(f/T)) + lambda ||theta+ - theta-||^2.

The teacher's logits A are those cached on the node's training images, so the student sees these images as they are; T =
4, no factor T^2 and lambda = .01 over the sum of squares of all trainable parameters, as printed. ``fol-plus`` (ours)
multiplies the KL by T^2 (at T = 4 its gradient is too weak without), adds the labels' cross-entropy,
and trains on a pool of views: the teacher has answered each of them once, so that what it says fits what the student
sees, at the cost of one pass of all members over the pool.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flyby.data.site import Part, Site
from flyby.data.views import ViewSettings, augment
from flyby.meeting.settings import OrientSettings
from flyby.meeting.stack import Stack, Tensors
from flyby.meeting.tuning import Penalty, Problem, views_of
from flyby.models import ModelSpec
from flyby.objectives.kd import softened_kl
from flyby.rng import generator

UNKNOWN = -1  # the label of an image without one
TINY = ViewSettings(crop="pad", pad=1)  # where a shift by four pixels would lose the image
CLOSER = {
    "crop": "resized",
    "scale": (0.5, 1.0),
}  # larger ones need more than a shift to tell the student something new


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
        return self._loss(logits, self.teacher[rows], labels)

    def _loss(self, logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        t, share = self.settings.temperature, self.settings.label_loss
        kl = softened_kl(logits, teacher, t).mean(1) * (t * t if self.settings.temperature_squared else 1.0)
        return kl + share * labelled_loss(logits, labels) if share else kl

    def penalty(self, parameters: Tensors) -> Penalty:
        if self.settings.anchor == 0:
            return None
        return self.settings.anchor * torch.stack(
            [(t - self.start[n]).square().sum() for n, t in parameters.items()]
        ).sum().unsqueeze(0)

    def watched(self, logits: Tensor, val: Part) -> Tensor:
        if self.settings.watch == "teacher" and self.teacher_val is not None:
            return self._loss(logits, self.teacher_val, val.labels)
        return labelled_loss(logits, val.labels)

    def watched_penalty(self, parameters: Tensors) -> Penalty:
        return None

    def objective(self, stack: Stack, images: Tensor, rows: Tensor) -> Tensor:
        """Eq. 12 on some training images in evaluation mode, as one number: what Theorem 2 is about."""
        logits = stack.logits(stack.spec.prepare(images[rows]))
        penalty = self.penalty(stack.parameters)
        loss = self.data_term(logits, torch.full_like(rows, UNKNOWN), rows).sum()
        return loss if penalty is None else loss + penalty.sum()


def labelled_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each model over the images that have a label: ``[M, B, C]`` to ``[M]``."""
    losses = F.cross_entropy(
        logits.transpose(1, 2), labels.expand(len(logits), -1), reduction="none", ignore_index=UNKNOWN
    )
    return losses.sum(1) / (labels != UNKNOWN).sum().clamp_min(1)


def study_material(
    site: Site, spec: ModelSpec, settings: OrientSettings, unlabelled: Tensor | None, key: tuple[object, ...]
) -> Part:
    """What the student learns from: the training images and those without labels, as they are or with so many
    views of each beside them."""
    images, labels = site.train.images, site.train.labels
    if unlabelled is not None and len(unlabelled):
        unknown = torch.full((len(unlabelled),), UNKNOWN, dtype=labels.dtype, device=labels.device)
        images, labels = torch.cat([images, unlabelled.to(images)]), torch.cat([labels, unknown])
    if settings.pool:
        views = pool_views(site, settings)
        pieces = [redrawn(images, views, spec, (*key, "pool", i)) for i in range(settings.pool)]
        told = labels
        if settings.mix:
            pieces = [blended(piece, (*key, "mix", i)) for i, piece in enumerate(pieces)]
            told = torch.full_like(labels, UNKNOWN)
        images, labels = torch.cat([images, *pieces]), torch.cat([labels, told.repeat(settings.pool)])
    return Part(images, labels)


def pool_views(site: Site, settings: OrientSettings) -> ViewSettings:
    if settings.pool_views is not None:
        return settings.pool_views.model_copy(update={"views": 1})
    if settings.views is None and min(site.size) < 24:
        return TINY
    return views_of(site, settings).model_copy(update=CLOSER if settings.views is None else {})


def blended(images: Tensor, key: tuple[object, ...]) -> Tensor:
    """Each image with another one shining through it, in a share of its own from 0 to 1."""
    rng = generator(*key, device=images.device)
    other = torch.randperm(len(images), generator=rng, device=images.device)
    share = torch.rand(len(images), 1, 1, 1, generator=rng, device=images.device)
    both = share * images + (1 - share) * images[other]
    return both if images.is_floating_point() else both.round().to(images)


def redrawn(images: Tensor, views: ViewSettings, spec: ModelSpec, key: tuple[object, ...]) -> Tensor:
    """One augmented copy of each image, in the images' own kind of number."""
    mean, std = spec.statistics(images.device)
    rng = generator(*key, device=images.device)
    drawn = [augment(piece, views, mean, std, rng) for piece in torch.split(images, 1024)]
    raw = torch.cat([x.permute(0, 2, 3, 1) * std + mean for x in drawn])
    return raw.to(images) if images.is_floating_point() else raw.mul(255).round().clamp(0, 255).to(images)


def epoch_steps(images: int, settings: OrientSettings) -> int:
    """Steps of an epoch of distillation: a pass over so many training images (whatever the pool), more where
    ``distill_steps`` asks for more."""
    a_pass = math.ceil(images / max(2, min(settings.batch, images)))
    return max(a_pass, math.ceil(settings.distill_steps / max(1, settings.stage_epochs("distill"))))
