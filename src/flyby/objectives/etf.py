"""FedETF's client [Li et al., ICCV 2023]: a fixed simplex classifier with a learnable scale and balanced softmax.

L = CE(scale f^ A^T + log n, y): adding the log of the class counts asks rare classes for a larger margin; classes a
site lacks drop out of its softmax.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.data.site import Site
from flyby.errors import BadInput
from flyby.models import ModelSpec, Network
from flyby.models.anchors import simplex_etf
from flyby.objectives.base import Batch, ObjectiveSettings, Terms, accuracy_of
from flyby.objectives.supervised import Supervised


class BalancedEtfSettings(ObjectiveSettings):
    anchor_seed: int = Field(0, ge=0, description="all sites must use the same")


class BalancedEtf(Supervised):
    name = "etf"
    per_sample = False  # its loss uses the exact class counts
    paper = "FedETF: Li et al., ICCV 2023"
    provides = frozenset({"weights", "class_counts", "prototypes", "anchors", "calibration"})
    head = "etf"
    settings_type: ClassVar[type[ObjectiveSettings]] = BalancedEtfSettings
    settings: BalancedEtfSettings  # type: ignore[assignment]
    log_counts: Tensor

    @classmethod
    def adapt_spec(cls, spec: ModelSpec, settings: ObjectiveSettings) -> ModelSpec:
        if spec.backbone is not None and spec.backbone.tune == "head" and not spec.projector:
            raise BadInput(
                "a fixed classifier on a frozen backbone has nothing to learn; put a layer between them with --set"
                " model.projector=[128]"
            )
        return super().adapt_spec(spec, settings)

    def prepare(self, model: Network, site: Site, seed: int) -> None:
        anchors: Tensor = model.head.anchors  # type: ignore[assignment]
        anchors.copy_(simplex_etf(anchors.shape[0], anchors.shape[1], self.settings.anchor_seed))
        self.register_buffer("log_counts", torch.tensor(site.counts).float().log().to(anchors.device), persistent=False)

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        logits = model(batch.images).float()
        loss = F.cross_entropy(logits + self.log_counts, batch.labels)
        return Terms(loss, {"train_accuracy": accuracy_of(logits, batch.labels)})

    def extras(self, model: Network, site: Site, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().extras(model, site, seed)
        return tensors, facts | {"anchor_seed": self.settings.anchor_seed}
