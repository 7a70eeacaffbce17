"""Plain supervised training: cross-entropy. FedAvg, ensembles, DENSE, Co-Boosting and FedLPA all start from it."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.data.views import PLAIN, STANDARD, ViewSettings
from flyby.models import Network
from flyby.objectives.base import Batch, Objective, ObjectiveSettings, Terms, accuracy_of


class SupervisedSettings(ObjectiveSettings):
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of every label that is spread over all classes")


class Supervised(Objective):
    """Cross-entropy of a linear head."""

    name = "supervised"
    about = "cross-entropy of a linear head"
    provides = frozenset({"weights", "class_counts", "prototypes", "calibration"})
    settings_type: ClassVar[type[ObjectiveSettings]] = SupervisedSettings
    settings: SupervisedSettings
    batch: ClassVar[int] = 64
    per_sample = True

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
