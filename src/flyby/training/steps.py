"""One epoch of training: its batches, the step, and what is measured after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flyby.data.site import Part
from flyby.machine import halves_well
from flyby.models import ModelSpec, Network
from flyby.models.cost import cost_of
from flyby.models.networks import ARCHITECTURES
from flyby.objectives.base import Batch, Objective
from flyby.training.average import Average
from flyby.training.graphs import Captured, one_shape
from flyby.training.settings import Precision, TrainSettings

WORTH_COMPILING = 4_000_000  # views of 32x32 pixels
WORTH_HALVING = 5_000_000  # multiply-adds per image, on a CPU
_expected: ContextVar[Mapping[int, int]] = ContextVar("views by batch", default={})  # noqa: B039


class Step:
    """What is done with a batch: views, loss, gradient, update, and the sums of the loss's terms. On a GPU it is
    replayed as one graph. ``view`` turns images into ``views`` augmented copies of each, drawn from ``rng``;
    ``average`` follows the weights, where there is one."""

    def __init__(
        self,
        model: Network,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        train: Part,
        view: Callable[[Tensor], Tensor],
        settings: TrainSettings,
        views: int,
        rng: torch.Generator | None = None,
    ) -> None:
        self.model, self.objective, self.optimizer, self.train, self.view = model, objective, optimizer, train, view
        self.settings, self.views = settings, views
        self.average: Average | None = None
        self.size: tuple[int, int] | None = None  # None: that of the images
        self.device = train.images.device
        self.progress = torch.zeros((), device=self.device)
        self.names: list[str] = []
        self.steps = 0
        self.totals = torch.zeros(0, device=self.device)
        self.rngs = () if rng is None else (rng,)
        self.captured = self._recorder()
        self.trainable = [[p for p in module.parameters() if p.requires_grad] for module in (model, objective)]

    def _recorder(self) -> Captured | None:
        recorded = self.device.type == "cuda" and self.settings.compile != "off"
        return Captured(self.rngs) if recorded else None

    def enter(self, view: Callable[[Tensor], Tensor], views: int, size: tuple[int, int] | None) -> None:
        """Another phase: other views, or images of another size. What was recorded before does not serve it."""
        self.view, self.views, self.size, self.captured = view, views, size, self._recorder()

    def __call__(self, rows: Tensor) -> None:
        self.steps += 1
        if self.captured is None:
            self.take(rows)
        else:
            self.captured(self.take, rows)

    def take(self, rows: Tensor) -> None:
        plain = self.train.images[rows]
        images = self.view(plain)
        if self.size is not None:
            images = F.adaptive_avg_pool2d(images, self.size)
        batch = Batch(images, self.train.labels[rows].repeat(self.views), self.views, plain)
        with autocast(self.settings.precision, self.device):
            terms = self.objective.loss(self.model, batch, self.progress)
        self.optimizer.zero_grad(set_to_none=True)
        terms.total.backward()  # type: ignore[no-untyped-call]
        if self.settings.clip is not None:
            for parameters in self.trainable:  # the objective's own parameters are clipped by themselves
                nn.utils.clip_grad_norm_(parameters, self.settings.clip)
        self.optimizer.step()
        self.objective.after_step(self.model, terms, self.progress)
        if self.average is not None:
            self.average.update()
        values = torch.stack([terms.total.detach().float(), *(p.detach().float() for p in terms.parts.values())])
        if not self.names:
            self.names, self.totals = ["loss", *terms.parts], torch.zeros_like(values)
        self.totals.add_(values)

    def means(self) -> dict[str, float]:
        """The mean of every loss term over the epoch, read from the device once."""
        return dict(zip(self.names, (self.totals / self.steps).tolist(), strict=True))


def one_epoch(step: Step, order: Iterator[Tensor], progress: float) -> None:
    """The hot loop: one pass over the data. Nothing in it waits for the device."""
    step.progress.fill_(progress)
    step.totals.zero_()
    step.steps = 0
    with one_shape():
        for rows in order:
            step(rows)


def batches(
    samples: int, batch: int, rng: torch.Generator, device: torch.device | str = "cpu", least: int = 2
) -> Iterator[Tensor]:
    """Rows of one epoch, all of one length: a fresh permutation, its beginning repeated to fill the last batch (of
    ``least`` rows at the least: BatchNorm needs 2)."""
    batch = max(least, min(batch, samples))
    steps = math.ceil(samples / batch)
    order = torch.randperm(samples, generator=rng)
    order = order[torch.arange(steps * batch) % samples].view(steps, batch).to(device)
    yield from order.unbind(0)


def autocast(precision: str, device: torch.device, cached: bool = True) -> AbstractContextManager[Any]:
    """bf16 where it is asked for, or where ``auto`` meets a GPU. ``cached`` is false where a graph will replay the
    steps: a cast that was remembered would not be replayed."""
    if halved(precision, device):
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cached)
    return nullcontext()


def halved(precision: str, device: torch.device) -> bool:
    """Whether convolutions and matrix products are in bfloat16."""
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")


def precision_of(asked: Precision, spec: ModelSpec, device: torch.device) -> Precision:
    """``precision_for`` a network of a spec. What stands on a frozen backbone keeps to float32."""
    counts = asked == "auto" and device.type == "cpu" and spec.backbone is None
    return precision_for(asked, cost_of(spec).multiply_adds if counts else 0, device)


def precision_for(asked: Precision, multiply_adds: int, device: torch.device) -> Precision:
    """What ``auto`` means for a network that learns and has so many multiply-adds per image: bf16 also on a CPU that
    has it in hardware, where the network is large enough to gain."""
    if asked != "auto" or device.type != "cpu":
        return asked
    return "bf16" if multiply_adds >= WORTH_HALVING and halves_well() else "fp32"


@contextmanager
def expecting(views: Mapping[int, int]) -> Iterator[None]:
    """In here so many views will be seen in batches of each size, by all sites of this process together."""
    before = _expected.set(views)
    try:
        yield
    finally:
        _expected.reset(before)


def fully_compiled(
    settings: TrainSettings, spec: ModelSpec, device: torch.device, views: float = math.inf, batch: int = 0
) -> bool:
    """Whether the network itself is compiled, once for all sites of a process whose batches are alike. ``auto``: where
    the architecture is worth it and so many ``views`` will be seen, by this site or by all that share its batch:
    compiling takes half a minute, and saves a quarter of every step (BatchNorm and what is around it in fewer
    passes)."""
    if spec.backbone is not None:
        return False
    views = max(views, _expected.get().get(batch, 0))
    long = views * spec.size[0] * spec.size[1] / 1024 >= WORTH_COMPILING and ARCHITECTURES[spec.name].worth_compiling
    return device.type == "cuda" and (settings.compile == "full" or (settings.compile == "auto" and long))


def finite(*modules: nn.Module) -> bool:
    """Whether every floating number of the modules is finite: a last step can throw the weights out after a finite
    loss."""
    tensors = [t for module in modules for t in module.state_dict().values() if t.is_floating_point()]
    return bool(nn.utils.get_total_norm(tensors, norm_type=math.inf).isfinite())


@torch.no_grad()
def evaluate_part(model: Network, part: Part, precision: str, device: torch.device) -> dict[str, float]:
    """Mean cross-entropy and accuracy on a part of a site's own data."""
    model.eval()
    loss, right = torch.zeros((), device=device), torch.zeros((), device=device)
    for images, labels in zip(torch.split(part.images, 512), torch.split(part.labels, 512), strict=True):
        with autocast(precision, device):
            logits = model(model.prepare(images)).float()
        loss += F.cross_entropy(logits, labels, reduction="sum")
        right += (logits.argmax(1) == labels).sum()
    return {"val_loss": float(loss) / len(part), "val_accuracy": float(right) / len(part)}
