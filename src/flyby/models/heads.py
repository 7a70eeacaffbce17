"""Heads: what turns features ``[B, d]`` into logits ``[B, C]``.

A head is one class with ``(feature_dim, classes, scaled)`` and one line in :data:`HEADS`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flyby.models.anchors import simplex_etf
from flyby.registry import Registry

INITIAL_SCALE = 16.0


class Head(nn.Module):
    """A classifier on features. ``initialise`` sets every tensor it has; ``takes_scale``: whether a spec's
    ``logit_scale`` means anything to it."""

    takes_scale = False

    def initialise(self, generator: torch.Generator) -> None:
        raise NotImplementedError


class LinearHead(Head, nn.Linear):
    """``logits = f W^T + b``, with torch's usual initialisation."""

    def __init__(self, feature_dim: int, classes: int, scaled: bool) -> None:
        nn.Linear.__init__(self, feature_dim, classes)

    def initialise(self, generator: torch.Generator) -> None:
        uniform_fan_in(self, generator)


class PrototypeHead(Head):
    """``logits = f/||f|| P^T``, prototypes ``P [C, d]`` learnable and first ~ N(0, 1); times a learnable ``scale`` if
    the spec says so."""

    takes_scale = True

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


HEADS: Registry[type[Head]] = Registry("head", {"linear": LinearHead, "prototype": PrototypeHead, "etf": EtfHead})


def uniform_fan_in(layer: nn.Linear | nn.Conv2d, generator: torch.Generator) -> None:
    """Torch's default for linear and convolution layers, weights and bias ~ U(+-1/sqrt(fan_in)), but from a given
    generator."""
    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
    if layer.bias is not None:
        bound = 1 / math.sqrt(layer.weight[0].numel())
        nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


def directions(network: nn.Module) -> Tensor:
    """One row ``[d]`` per class that stands for it in feature space: the head's prototypes, anchors or linear rows."""
    for name in ("prototypes", "anchors", "weight"):
        rows = getattr(network.head, name, None)
        if isinstance(rows, Tensor):
            return rows.detach()
    raise TypeError(f"no class directions in a {type(network.head).__name__}")
