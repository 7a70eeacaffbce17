"""The local losses, by name."""

from __future__ import annotations

from flyby.objectives.base import Batch, Objective, ObjectiveSettings, Terms
from flyby.objectives.supervised import Supervised

OBJECTIVES: dict[str, type[Objective]] = {o.name: o for o in (Supervised,)}

__all__ = ["OBJECTIVES", "Batch", "Objective", "ObjectiveSettings", "Supervised", "Terms"]
