"""Plain supervised training: cross-entropy. FedAvg, ensembles, DENSE, Co-Boosting and FedLPA all start from it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.data.site import Site
from flyby.data.views import PLAIN, STANDARD, ViewSettings
from flyby.models import Network
from flyby.objectives.base import Batch, Objective, ObjectiveSettings, Terms, accuracy_of
from flyby.objectives.calibration import calibrate


class SupervisedSettings(ObjectiveSettings):
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    calibrate: bool = Field(True, description="send the scalars that experts-calibrated needs")


class Supervised(Objective):
    """Cross-entropy of a linear head."""

    name = "supervised"
    provides = frozenset({"weights", "class_counts", "prototypes", "calibration"})
    settings_type: ClassVar[type[ObjectiveSettings]] = SupervisedSettings
    settings: SupervisedSettings
    batch: ClassVar[int] = 64

    @classmethod
    def views(cls, size: tuple[int, int], mirror: bool) -> ViewSettings:
        """Shifts and flips for photographs; nothing for images so small that a shift by four pixels loses them."""
        if min(size) < 24:
            return PLAIN
        return STANDARD if mirror else STANDARD.model_copy(update={"flip": 0.0})

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        logits = model(batch.images)
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=self.settings.label_smoothing)
        return Terms(loss, {"train_accuracy": accuracy_of(logits, batch.labels)})

    def extras(self, model: Network, site: Site, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return (calibrate(model, site, seed) if self.settings.calibrate else {}), {}
