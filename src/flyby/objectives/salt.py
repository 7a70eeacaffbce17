"""SALT, FAFI's local loss [Zeng et al., ICML 2025]: classification, contrast and prototypes over two views of every
image.

L_local = w_cls CE(f^ P^T, y) + w_con SupCon(f^) + w_self CE(P P^T, 1..C) + w_feat CE(f^ P^T / tau_p, y), with f^ =
f/||f|| and learnable prototypes P [C, d]. As released the first and last terms are equal; both are kept, with weights
of their own.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.data.views import SALT, ViewSettings
from flyby.models import ModelSpec, Network
from flyby.objectives.base import Batch, Objective, ObjectiveSettings, Terms, accuracy_of

TRAIN = {"lr": 0.05, "momentum": 0.9, "clip": 1.0, "optimizer": "sgd"}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {**TRAIN, "weight_decay": 5e-4, "schedule": "cosine"},
    "as-run": {**TRAIN, "weight_decay": 0.0, "schedule": "constant"},
    # The same loss in fewer epochs: Adam, and four times as many steps. docs/best.md has what each of the two gains.
    "fast": {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0, "schedule": "cosine"},
    # Prototypes alone on frozen features. Of unit features the loss curves by 1 at most (two cross-entropies, each by a
    # half), so 3 is still stable under this momentum, and at .05 the prototypes have hardly moved after 20 epochs.
    "head": {**TRAIN, "lr": 3.0, "weight_decay": 5e-4, "schedule": "cosine"},
}
BATCHES = {"fast": 128, "head": 128}


class SaltSettings(ObjectiveSettings):
    cls: float = Field(1.0, ge=0, description="weight of the classification term")
    con: float = Field(1.0, ge=0, description="weight of the supervised contrast")
    proto_self: float = Field(1.0, ge=0, description="weight of the prototypes' contrast among themselves")
    proto_feat: float = Field(1.0, ge=0, description="weight of the features' contrast to prototypes")
    tau: float = Field(0.07, gt=0, description="temperature of the supervised contrast")
    proto_tau: float = Field(1.0, gt=0, description="temperature of proto_feat")
    preset: Literal["paper", "as-run", "fast", "head"] = Field(
        "paper", description="training settings where none are given; on a frozen backbone without a projector: head"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="of the two terms that tell classes apart")

    later = frozenset({"label_smoothing"})


def supcon(features: Tensor, labels: Tensor, tau: float, classes: int) -> Tensor:
    """Supervised contrast over unit features ``[n, d]``: the mean over all anchors i of -mean_p log softmax_{a !=
    i}(f_i.f_a / tau)_p.

    Positives p share i's label; anchors without one contribute 0. The sum over positives is taken through class sums,
    so the only n x n matrix is that of the similarities.
    """
    features = features.float()
    similarity = (features @ features.T) / tau
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    # The least number and not -inf: a lone anchor has nothing to be compared with, and its gradient must be 0, not NaN.
    normaliser = similarity.masked_fill(itself, torch.finfo(similarity.dtype).min).logsumexp(1)
    member = (labels[:, None] == torch.arange(classes, device=labels.device)).float()
    others = member.sum(0)[labels] - 1
    positive = (((member.T @ features)[labels] - features) * features).sum(1) / tau
    return torch.where(others > 0, normaliser - positive / others.clamp_min(1), 0.0).mean()


class Salt(Objective):
    """FAFI's client: SALT on learnable prototypes, no anchor."""

    name = "salt"
    about = "classification, contrast and learnable prototypes over two views of every image"
    paper = "FAFI: Zeng et al., ICML 2025"
    provides = frozenset({"weights", "class_counts", "prototypes", "calibration"})
    head = "prototype"
    settings_type: ClassVar[type[ObjectiveSettings]] = SaltSettings
    settings: SaltSettings
    batch: ClassVar[int] = 512

    @classmethod
    def views(cls, size: tuple[int, int], mirror: bool) -> ViewSettings:
        return SALT if mirror else SALT.model_copy(update={"flip": 0.0})

    @classmethod
    def defaults(cls, settings: ObjectiveSettings) -> dict[str, Any]:
        assert isinstance(settings, SaltSettings)
        return PRESETS[settings.preset]

    @classmethod
    def suited(cls, spec: ModelSpec) -> dict[str, Any]:
        return {"preset": "head"} if spec.head_alone else {}

    @classmethod
    def preferred_batch(cls, settings: ObjectiveSettings) -> int:
        assert isinstance(settings, SaltSettings)
        return BATCHES.get(settings.preset, cls.batch)

    def local_terms(self, model: Network, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """L_local and its four terms, each as it enters the sum but without its weight."""
        weights, head = self.settings, model.head
        prototypes: Tensor = head.prototypes  # type: ignore[assignment]
        features = F.normalize(model.features(batch.images).float(), dim=1)
        # A few small products, where bf16 would cost accuracy and win nothing.
        with torch.autocast(features.device.type, enabled=False):
            similarity = features @ prototypes.T
            logits = similarity if head.scale is None else similarity * head.scale  # type: ignore[operator]
            smooth = weights.label_smoothing
            cls = F.cross_entropy(logits, batch.labels, label_smoothing=smooth)
            # Where the head has a scale both terms are of scaled cosines: unit prototypes alone cannot be sure of any.
            scaled, same = logits / weights.proto_tau, weights.proto_tau == 1.0
            feat = cls if same else F.cross_entropy(scaled, batch.labels, label_smoothing=smooth)
            own = F.cross_entropy(prototypes @ prototypes.T, torch.arange(len(prototypes), device=prototypes.device))
            con = supcon(features, batch.labels, weights.tau, len(prototypes))
        total = weights.cls * cls + weights.con * con + weights.proto_self * own + weights.proto_feat * feat
        return total, {
            "cls": cls,
            "con": con,
            "proto_self": own,
            "proto_feat": feat,
            "train_accuracy": accuracy_of(logits, batch.labels),
        }

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        return Terms(*self.local_terms(model, batch))

    def epoch_state(self, model: Network) -> dict[str, Tensor]:
        norms = model.head.prototypes.detach().norm(dim=1)  # type: ignore[operator]
        return {
            "proto_norms": norms,
            "proto_norm": norms.mean(),
            "proto_norm_min": norms.min(),
            "proto_norm_max": norms.max(),
        }
