"""Heads: what turns features ``[B, d]`` into logits ``[B, C]``.

A head is one class with ``(feature_dim, classes, scaled)`` and one line in :data:`HEADS`. It says which of its tensors
have a row per class, so that networks of sites with different classes can be put into one order of them.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flyby.models.anchors import simplex_etf
from flyby.models.shifts import WAYS
from flyby.registry import Registry

INITIAL_SCALE = 16.0
NEVER = -1e3  # the logit of a class that a network does not know: no chance at all, and still a number


class Head(nn.Module):
    """A classifier on features. ``initialise`` sets every tensor it has; ``takes_scale``: whether a spec's
    ``logit_scale`` means anything to it; ``shift``: which one it was trained to tell the ways of, if any; ``rows``: the
    tensors whose first dimension are the classes, and how often it runs through them."""

    takes_scale = False
    shift: ClassVar[str] = ""
    rows: ClassVar[dict[str, int]] = {}
    absent: Tensor

    def lack(self, classes: int) -> None:
        """Has room for saying which classes it does not know (``absent``): their logits are then ``NEVER``."""
        self.register_buffer("absent", torch.zeros(classes, dtype=torch.bool))
        self.register_forward_hook(_silent)

    def initialise(self, generator: torch.Generator) -> None:
        raise NotImplementedError


def _silent(head: nn.Module, given: object, logits: Tensor) -> Tensor:
    return logits.masked_fill(head.absent, NEVER)  # type: ignore[arg-type]


class LinearHead(Head, nn.Linear):
    """``logits = f W^T + b``, with torch's usual initialisation."""

    rows: ClassVar[dict[str, int]] = {"weight": 1, "bias": 1}

    def __init__(self, feature_dim: int, classes: int, scaled: bool) -> None:
        nn.Linear.__init__(self, feature_dim, classes)

    def initialise(self, generator: torch.Generator) -> None:
        uniform_fan_in(self, generator)


class PrototypeHead(Head):
    """``logits = f/||f|| P^T``, prototypes ``P [C, d]`` learnable and first ~ N(0, 1); times a learnable ``scale`` if
    the spec says so."""

    takes_scale = True
    rows: ClassVar[dict[str, int]] = {"prototypes": 1}

    def __init__(self, feature_dim: int, classes: int, scaled: bool) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.empty(classes, feature_dim))
        self.scale: nn.Parameter | None
        self.register_parameter("scale", nn.Parameter(torch.empty(())) if scaled else None)

    def initialise(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.prototypes, generator=generator)
        if self.scale is not None:
            nn.init.constant_(self.scale, INITIAL_SCALE)

    def forward(self, features: Tensor) -> Tensor:
        logits = F.normalize(features, dim=1) @ self.prototypes.T
        return logits if self.scale is None else logits * self.scale


class EtfHead(Head):
    """``logits = scale * f/||f|| A^T`` with fixed simplex anchors ``A [C, d]`` and a learnable scale [FedETF, ICCV
    2023]."""

    rows: ClassVar[dict[str, int]] = {"anchors": 1}

    def __init__(self, feature_dim: int, classes: int, scaled: bool) -> None:
        super().__init__()
        self.register_buffer("anchors", torch.empty(classes, feature_dim))
        self.scale = nn.Parameter(torch.empty(()))

    anchors: Tensor

    def initialise(self, generator: torch.Generator) -> None:
        self.anchors.copy_(simplex_etf(self.anchors.shape[0], self.anchors.shape[1], 0))
        nn.init.constant_(self.scale, INITIAL_SCALE)

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * (F.normalize(features, dim=1) @ self.anchors.T)


class TurnsHead(PrototypeHead):
    """Prototypes ``[4 C, d]``, those of way r from row r C on; ``logits`` are those of images as they are (way 0)."""

    takes_scale = False
    shift = "turns"
    rows: ClassVar[dict[str, int]] = {"prototypes": WAYS}

    def __init__(self, feature_dim: int, classes: int, scaled: bool) -> None:
        super().__init__(feature_dim, WAYS * classes, scaled)
        self.classes = classes

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=1) @ self.prototypes[: self.classes].T


class PatchesHead(TurnsHead):
    shift = "patches"


class ColourHead(TurnsHead):
    shift = "colour"


HEADS: Registry[type[Head]] = Registry(
    "head",
    {
        "linear": LinearHead,
        "prototype": PrototypeHead,
        "etf": EtfHead,
        **{head.shift: head for head in (TurnsHead, PatchesHead, ColourHead)},
    },
)


def uniform_fan_in(layer: nn.Linear | nn.Conv2d, generator: torch.Generator) -> None:
    """Torch's default for linear and convolution layers, weights and bias ~ U(+-1/sqrt(fan_in)), but from a given
    generator."""
    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
    if layer.bias is not None:
        bound = 1 / math.sqrt(layer.weight[0].numel())
        nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


def directions(network: nn.Module) -> Tensor:
    """One row ``[d]`` per class that stands for it in feature space: the head's prototypes, anchors or linear rows; of
    a head that knows a shift, those of images as they are."""
    return shown_directions(network)[0]


def shown_directions(network: nn.Module) -> Tensor:
    """The same for every way of the head's shift, ``[R, C, d]``; R is 1 where it knows none."""
    head = network.head
    for name in ("prototypes", "anchors", "weight"):
        rows = getattr(head, name, None)
        if isinstance(rows, Tensor):
            ways = WAYS if getattr(head, "shift", "") else 1
            return rows.detach().reshape(ways, len(rows) // ways, -1)
    raise TypeError(f"no class directions in a {type(head).__name__}")


def cosine(network: nn.Module, features: Tensor) -> Tensor:
    """What an expert says of each class, [N, C]: cos(f(x), direction of c) from features [N, d]; from those of every
    way, [N, R, d], the mean over r of cos(f(way r of x), direction of c in way r)."""
    return between(features, shown_directions(network))


def between(features: Tensor, rows: Tensor) -> Tensor:
    """The same from directions ``[R, C, d]``. Features of one way alone meet the directions of images as they are."""
    if features.ndim == 2:
        return F.normalize(features.float(), dim=1) @ F.normalize(rows[0].float(), dim=1).T
    seen, rows = F.normalize(features.float(), dim=2), F.normalize(rows.float(), dim=2)
    return torch.einsum("nrd,rcd->nc", seen, rows) / len(rows)
