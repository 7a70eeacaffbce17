"""FedETF's client [Li et al., ICCV 2023]: a fixed simplex classifier with a learnable scale and balanced softmax.

L = CE(scale f^ A^T + log n, y): adding the log of the class counts asks rare classes for a larger margin; classes a
site lacks drop out of its softmax.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from flyby.data.site import Site
from flyby.models import ModelSpec, Network
from flyby.objectives.anchored import Anchored, AnchorSettings, learning
from flyby.objectives.base import Batch, ObjectiveSettings, Terms, accuracy_of
from flyby.objectives.supervised import Supervised


class BalancedEtf(Anchored, Supervised):
    name = "etf"
    about = "a fixed simplex classifier with a learnable scale and balanced softmax"
    per_sample = False  # its loss uses the exact class counts
    paper = "FedETF: Li et al., ICCV 2023"
    provides = frozenset({"weights", "class_counts", "prototypes", "anchors", "calibration"})
    head = "etf"
    settings_type: ClassVar[type[ObjectiveSettings]] = AnchorSettings
    settings: AnchorSettings  # type: ignore[assignment]
    log_counts: Tensor

    @classmethod
    def adapt_spec(cls, spec: ModelSpec, settings: ObjectiveSettings) -> ModelSpec:
        return learning(super().adapt_spec(spec, settings))

    def prepare(self, model: Network, site: Site, seed: int) -> None:
        self.fix_head(model)
        device = next(model.parameters()).device
        self.register_buffer("log_counts", torch.tensor(site.counts).float().log().to(device), persistent=False)

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        logits = model(batch.images).float()
        loss = F.cross_entropy(logits + self.log_counts, batch.labels)
        return Terms(loss, {"train_accuracy": accuracy_of(logits, batch.labels)})
