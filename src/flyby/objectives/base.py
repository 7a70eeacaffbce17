"""The seam ``Objective``: what a site minimises, and what it can say beside its weights.

An objective is an ``nn.Module``: its buffers are its whole memory (so a checkpoint holds it exactly), its parameters,
if it has any, are trained with the network's. ``train_site`` knows nothing more about it than this class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from flyby.data.site import Site
from flyby.data.views import ViewSettings
from flyby.models import ModelSpec, Network
from flyby.settings import Grown
from flyby.statistics.calibration import calibrate
from flyby.statistics.catalogue import computed, named


@dataclass(frozen=True)
class Batch:
    """Augmented images ``[V*B, C, H, W]`` and the labels of all of them ``[V*B]`` (view v of sample i is row v*B + i);
    ``plain`` are the images as the site has them ``[B, H, W, C]``, where somebody asks for those."""

    images: Tensor
    labels: Tensor
    views: int
    plain: Tensor | None = None


@dataclass
class Terms:
    """What a loss is made of. ``total`` is what the optimiser sees; ``parts`` are logged, as epoch means, under their
    names."""

    total: Tensor
    parts: dict[str, Tensor]


class ObjectiveSettings(Grown):
    """Base of every objective's settings: strict, unknown keys refused, so that a typing error is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    calibrate: bool = Field(True, description="send the three scalars per class that experts-calibrated needs")
    send: tuple[str, ...] = Field(
        (), description="further statistics for server rules that need them, e.g. [kfac], or [kfac:samples=2000]"
    )


class Objective(nn.Module):
    """A local loss. Subclasses set the class variables and write ``loss``; the other hooks do nothing by default."""

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    about: ClassVar[str] = ""  # one sentence, as `flyby methods` shows it
    provides: ClassVar[frozenset[str]] = frozenset({"weights", "class_counts"})
    head: ClassVar[str] = "linear"
    settings_type: ClassVar[type[ObjectiveSettings]] = ObjectiveSettings
    batch: ClassVar[int] = 64  # images per step, where the user has not chosen; see ``preferred_batch``
    trains: ClassVar[bool] = True  # where it does not, a site's epochs are 0
    one_class: ClassVar[bool] = False  # whether there is something to learn where the list has a single class
    per_sample: ClassVar[bool] = False  # whether the loss is a mean over images, each alone, as private training needs
    pictures: ClassVar[bool] = False  # whether the loss needs the images where a frozen backbone has looked at them
    sends: ClassVar[tuple[str, ...]] = ()  # statistics that it sends without being asked, each also in ``provides``
    training: bool

    def __init__(self, settings: ObjectiveSettings) -> None:
        super().__init__()
        self.settings = settings

    @classmethod
    def provided(cls, settings: ObjectiveSettings) -> frozenset[str]:
        """What a site sends under these settings: ``provides``, and the statistics it was asked to ``send``."""
        sent = {named(text)[0] for text in settings.send}
        return (cls.provides if settings.calibrate else cls.provides - {"calibration"}) | sent

    @classmethod
    def views(cls, size: tuple[int, int], mirror: bool) -> ViewSettings:
        """The augmentation this loss is meant for, where the user has not chosen another."""
        raise NotImplementedError

    @classmethod
    def defaults(cls, settings: ObjectiveSettings) -> dict[str, Any]:
        """Training settings this objective is published with, where the user has not chosen others."""
        return {}

    @classmethod
    def suited(cls, spec: ModelSpec) -> dict[str, Any]:
        """Settings of its own that suit such a network better than the usual ones, where the user has not chosen."""
        return {}

    @classmethod
    def preferred_batch(cls, settings: ObjectiveSettings) -> int:
        """Images per step where the user has not chosen; a small site takes fewer."""
        return cls.batch

    @classmethod
    def adapt_spec(cls, spec: ModelSpec, settings: ObjectiveSettings) -> ModelSpec:
        """The network this loss needs: the given architecture with the objective's head."""
        return spec.replace(head=cls.head)

    def fitted(self, spec: ModelSpec, site: Site, seed: int) -> ModelSpec:
        """The network for this very site, where the site's own images decide: called once, before it is built."""
        return spec

    @property
    def parameter_lr(self) -> float | None:
        """A constant learning rate for the objective's own parameters; None: the network's."""
        return None

    def prepare(self, model: Network, site: Site, seed: int) -> None:
        """Called once, before the first epoch (and before a checkpoint is loaded): anchors, class masks, start
        values."""

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        """The loss of one batch. ``progress`` in (0, 1] is the share of all epochs this one completes: a tensor, no
        host sync."""
        raise NotImplementedError

    def after_step(self, model: Network, terms: Terms, progress: Tensor) -> None:
        """Called after the optimiser's step; AURORA's sigma update lives here."""

    def epoch_state(self, model: Network) -> dict[str, Tensor]:
        """Scalars worth a line in metrics.jsonl at the end of an epoch (lambda, prototype norms)."""
        return {}

    def cure(self, bad: Sequence[str]) -> str:
        """What to try after a training in which the numbers named ``bad`` left the finite ones: one sentence."""
        return "Lower train.lr, or set train.clip=1"

    def extras(self, model: Network, site: Site, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What the parcel carries beside the weights: (tensors, small named facts). Statistics are stored as
        ``NAME.REST``."""
        tensors = calibrate(model, site, seed) if self.settings.calibrate and "calibration" in self.provides else {}
        for text in (*self.sends, *self.settings.send):
            tensors |= computed(text, model, site, seed)
        return tensors, {}


def accuracy_of(logits: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return (logits.detach().argmax(1) == labels).float().mean()
