"""The local losses, by name."""

from __future__ import annotations

from flyby.objectives.aurora import Aurora
from flyby.objectives.base import Batch, Objective, ObjectiveSettings, Terms
from flyby.objectives.bearings import Bearings
from flyby.objectives.cvae import Cvae
from flyby.objectives.etf import BalancedEtf
from flyby.objectives.fedsra import FedSra
from flyby.objectives.frozen import Frozen
from flyby.objectives.salt import Salt
from flyby.objectives.supervised import Supervised
from flyby.registry import Registry

OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective",
    {o.name: o for o in (Supervised, Salt, Aurora, FedSra, Bearings, BalancedEtf, Cvae, Frozen)},
    group="flyby.objectives",
)

__all__ = [
    "OBJECTIVES",
    "Aurora",
    "BalancedEtf",
    "Batch",
    "Bearings",
    "FedSra",
    "Frozen",
    "Objective",
    "ObjectiveSettings",
    "Salt",
    "Supervised",
    "Terms",
]
