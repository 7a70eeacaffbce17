"""The one loop behind fine-tuning, pruning, post-tuning and distillation: SGD on a stack of models, each with its own
early stopping.

``Problem`` says what is minimised. After every epoch each model's validation loss is looked at once; the weights of its
best epoch (the state before the first counts too) are kept, a model that has not improved for ``patience`` epochs
leaves the stack, and nothing inside an epoch waits for the device.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyby.data.site import Part, Site
from flyby.data.views import PLAIN, ViewSettings, augment
from flyby.meeting.settings import OrientSettings
from flyby.meeting.stack import Stack, Tensors, full
from flyby.models.cost import at_once
from flyby.objectives.supervised import Supervised
from flyby.rng import generator
from flyby.training.graphs import Captured, one_shape
from flyby.training.steps import autocast, batches, precision_of

Penalty = Tensor | None
EVALUATION_BATCH = 256


class Problem:
    """Plain cross-entropy on the node's own data: eqs. 4 and 6. The other problems change one thing each."""

    extra: Tensors  # further leaves, stacked, learned beside the weights
    learns_weights = True
    augments = True

    def __init__(self) -> None:
        self.extra = {}

    def effective(self, parameters: Tensors) -> Tensors:
        """The parameters the network runs with."""
        return parameters

    def penalty(self, parameters: Tensors) -> Penalty:
        """``[M]``: what is added to the data term, and to the validation loss that is watched."""
        return None

    def data_term(self, logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """``[M]`` from logits ``[M, B, C]``; ``rows`` are the batch's places in the training data."""
        return cross_entropy(logits, labels)

    def watched(self, logits: Tensor, val: Part) -> Tensor:
        """``[M]``: the data term of the validation loss, from all logits of the validation part."""
        return cross_entropy(logits, val.labels)

    def watched_penalty(self, parameters: Tensors) -> Penalty:
        return self.penalty(parameters)

    def project(self) -> None:
        """Called after each step, without gradients."""

    def take(self, rows: Tensor) -> Problem:
        """The same problem for some of the models."""
        return self


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each model: ``[M, B, C]`` to ``[M]``."""
    models, batch, classes = logits.shape
    losses = F.cross_entropy(logits.reshape(-1, classes), labels.repeat(models), reduction="none")
    return losses.view(models, batch).mean(1)


@dataclass(frozen=True)
class Budget:
    """How long a stage may train: at most ``epochs``, each of one pass over the data or of ``steps``, and no further
    epoch after the moment ``until`` (of ``time.perf_counter``)."""

    epochs: int
    steps: int | None = None
    until: float = math.inf


@dataclass
class Tuned:
    """What a training stage leaves: the best state of each model in one stack, further leaves likewise, and its
    history."""

    stack: Stack
    extra: Tensors
    epochs: list[int]
    best_epochs: list[int]
    val_losses: list[float]
    history: list[dict[str, Any]] = field(default_factory=list)


class Sgd:
    """Momentum SGD on stacked leaves, as torch's: v <- m v + g + d w, w <- w - lr v. Decay acts on matrices and
    filters, as elsewhere in flyby."""

    def __init__(self, weights: Tensors, extra: Tensors, settings: OrientSettings) -> None:
        self.settings = settings
        self.leaves = [*weights.values(), *extra.values()]
        self.decayed = [i for i, t in enumerate(weights.values()) if t.ndim >= 3 and settings.weight_decay]
        self.velocity = [torch.zeros_like(t) for t in self.leaves]

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...]) -> None:
        moved = list(gradients)
        if self.decayed:
            grown = torch._foreach_add(
                [moved[i] for i in self.decayed],
                [self.leaves[i] for i in self.decayed],
                alpha=self.settings.weight_decay,
            )
            for i, gradient in zip(self.decayed, grown, strict=True):
                moved[i] = gradient
        torch._foreach_mul_(self.velocity, self.settings.momentum)
        torch._foreach_add_(self.velocity, moved)
        torch._foreach_add_(self.leaves, self.velocity, alpha=-self.settings.lr)


class Stepper:
    """One training step of a stack, as it is or replayed as a CUDA graph."""

    def __init__(self, stack: Stack, problem: Problem, settings: OrientSettings) -> None:
        self.stack, self.problem, self.settings = stack, problem, settings
        weights = stack.parameters if problem.learns_weights else {}
        self.optimizer = Sgd(weights, problem.extra, settings)
        self.precision = precision_of(settings.precision, stack.spec, stack.device)
        replays = settings.graph and stack.device.type == "cuda"
        self.captured = Captured() if replays else None
        self.captured_look = Captured() if replays else None
        self.total = torch.zeros(len(stack), device=stack.device)
        self.seen = torch.zeros(len(stack), device=stack.device)

    def __call__(self, x: Tensor, labels: Tensor, rows: Tensor) -> None:
        if self.captured is None:
            self._step(x, labels, rows)
        else:
            self.captured(self._step, x, labels, rows)

    def _step(self, x: Tensor, labels: Tensor, rows: Tensor) -> None:
        stack, problem = self.stack, self.problem
        with autocast(self.precision, stack.device, cached=False):
            logits = full(stack.logits(x, problem.effective(stack.parameters), training=True))
        losses = problem.data_term(logits, labels, rows)
        penalty = problem.penalty(stack.parameters)
        losses = losses if penalty is None else losses + penalty
        # Every model's loss depends on its own tensors only, so the sum's gradient is each one's own.
        gradients = torch.autograd.grad(losses.sum(), self.optimizer.leaves)
        self.optimizer.step(gradients)
        with torch.no_grad():
            problem.project()
            self.total += losses.detach()

    def look(self, val: Part) -> list[float]:
        """The watched loss of each model; one wait for the device."""
        if self.captured_look is None:
            self._look(val)
        else:
            self.captured_look(partial(self._look, val))
        return [v if math.isfinite(v) else math.inf for v in self.seen.tolist()]

    @torch.no_grad()
    def _look(self, val: Part) -> None:
        stack, problem = self.stack, self.problem
        losses = problem.watched(
            stack_logits(stack, val.images, self.settings, problem.effective(stack.parameters)), val
        )
        penalty = problem.watched_penalty(stack.parameters)
        self.seen.copy_(losses if penalty is None else losses + penalty)


def tune(
    stack: Stack,
    problem: Problem,
    site: Site,
    settings: OrientSettings,
    budget: Budget | int,
    key: tuple[object, ...],
    label: str = "",
) -> Tuned:
    """Train a stack within a budget (a number is epochs) and give back the best state of each model. ``site``'s data
    must be on the stack's device; everything random follows from ``key``, and is the same for every model of the
    node."""
    budget = Budget(budget) if isinstance(budget, int) else budget
    device, train, spec = stack.device, site.train, stack.spec
    mean, std = spec.statistics(device)
    views = views_of(site, settings) if problem.augments else PLAIN
    best, extra = Stack(spec, {**clone(stack.parameters)}, clone(stack.buffers), stack.backend), clone(problem.extra)
    step = Stepper(stack, problem, settings)
    losses = step.look(site.val)
    alive, lowest, best_epochs, ran = list(range(len(stack))), list(losses), [0] * len(stack), [0] * len(stack)
    history: list[dict[str, Any]] = []
    going = alive
    for epoch in range(1, budget.epochs + 1):
        rng = generator(*key, "views", epoch, device=device)
        step.total.zero_()
        order = epoch_order(len(train), settings.batch, (*key, "order", epoch), budget.steps, device)
        with one_shape():
            for rows in order:
                step(augment(train.images[rows], views, mean, std, rng), train.labels[rows], rows)
        losses = step.look(site.val)
        means = (step.total / len(order)).tolist()
        history.append(
            {
                "stage": label,
                "epoch": epoch,
                "models": len(going),
                "loss": sum(means[m] for m in going) / len(going),
                "val_loss": finite_mean([losses[m] for m in going]),
            }
        )
        better = [m for m in going if losses[m] < lowest[alive[m]]]
        for m in better:
            lowest[alive[m]], best_epochs[alive[m]] = losses[m], epoch
        keep_best(best, extra, stack, problem, better, [alive[m] for m in better])
        for m in going:
            ran[alive[m]] = epoch
        going = [m for m in going if epoch - best_epochs[alive[m]] < settings.patience]
        if not going or time.perf_counter() > budget.until:
            break
        # A recorded step is for so many models: where there is one, those that stopped are carried along until half
        # have, since a new recording costs more.
        if len(going) < len(alive) and (step.captured is None or 2 * len(going) <= len(alive)):
            rows = torch.tensor(going, device=device)
            velocity = [v[rows] for v in step.optimizer.velocity]
            stack, problem, alive = stack.take(rows), problem.take(rows), [alive[m] for m in going]
            step = Stepper(stack, problem, settings)
            step.optimizer.velocity = velocity
            going = list(range(len(alive)))
    return Tuned(best, extra, ran, best_epochs, lowest, history)


def epoch_order(
    samples: int, batch: int, key: tuple[object, ...], steps: int | None, device: torch.device
) -> list[Tensor]:
    """The batches of one epoch: of one pass, or as many as there are ``steps``, over as many passes as that takes."""
    order: list[Tensor] = []
    for again in itertools.count():
        if order and len(order) >= (steps or 0):
            break
        order += batches(samples, batch, generator(*key, *([again] if again else [])), device)
    return order[:steps]


@torch.no_grad()
def keep_best(best: Stack, extra: Tensors, stack: Stack, problem: Problem, rows: list[int], whose: list[int]) -> None:
    if not rows:
        return
    source, target = torch.tensor(rows, device=stack.device), torch.tensor(whose, device=stack.device)
    for kept, now in ((best.parameters, stack.parameters), (best.buffers, stack.buffers), (extra, problem.extra)):
        for name, tensor in kept.items():
            tensor.detach().index_copy_(0, target, now[name].detach()[source])


@torch.no_grad()
def stack_logits(stack: Stack, images: Tensor, settings: OrientSettings, parameters: Tensors | None = None) -> Tensor:
    """Logits ``[M, N, C]`` in evaluation mode, in pieces."""
    pieces, precision = [], precision_of(settings.precision, stack.spec, stack.device)
    for piece in torch.split(images, at_once(stack.spec, EVALUATION_BATCH)):
        with autocast(precision, stack.device, cached=False):
            pieces.append(full(stack.logits(stack.spec.prepare(piece), parameters)))
    return torch.cat(pieces, dim=1)


def views_of(site: Site, settings: OrientSettings) -> ViewSettings:
    views = settings.views if settings.views is not None else Supervised.views(site.size, site.mirror)
    return views.model_copy(update={"views": 1})


def clone(tensors: Tensors) -> Tensors:
    return {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in tensors.items()}


def finite_mean(values: list[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None
