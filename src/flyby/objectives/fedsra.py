"""FedSRA's client [2026]: fixed anchors that all sites share, no learnable prototypes.

L = CE(f^ E^T / t, y) + w_con SupCon(f^; t_con) + w_pull (1 - cos(f, e_y)), with the simplex E of one seed, t = t_con =
.1 and both weights .5. A site of one class has nothing to tell apart, and minimises the last term alone. As published:
features of 256 dimensions, Adam, cosine, batch 128; its learning rate we do not know, 1e-3 is ours. Made for the server
rule ``standardised``, whose moments it sends.

Not published, and off by default: with a ``shift`` it is trained on (class, way), as :mod:`flyby.objectives.shifting`
has it, with one simplex of 4 C anchors e_{c,r}. A site that shows no ways takes those of images as they are, so that
all sites still share one geometry; where the features have no room for 4 C of them, nobody shows any.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.data.site import Site
from flyby.data.views import ViewSettings
from flyby.models import ModelSpec, Network
from flyby.models.anchors import simplex_etf
from flyby.models.heads import shown_directions
from flyby.models.shifts import WAYS
from flyby.objectives.anchored import Anchored, AnchorSettings, learning
from flyby.objectives.base import Batch, ObjectiveSettings, Terms, accuracy_of
from flyby.objectives.salt import Salt, supcon
from flyby.objectives.shifting import Found, Shifting, ShiftSettings

TRAIN = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0, "schedule": "cosine"}


class FedSraSettings(ShiftSettings, AnchorSettings):
    tau: float = Field(0.1, gt=0, description="temperature of the classification term")
    con: float = Field(0.5, ge=0, description="weight of the supervised contrast")
    con_tau: float = Field(0.1, gt=0, description="temperature of the supervised contrast")
    pull: float = Field(0.5, gt=0, description="weight of the pull towards the own anchor")
    dim: int = Field(256, ge=0, description="features after a linear layer; 0: those of the network itself")
    shift: Literal["turns", "patches", "colour", "none"] = Field(
        "none", description="as published none; else one of the four ways in which bearings shows images"
    )

    later = frozenset({"shift", "test", "most_classes"})


class FedSra(Shifting, Anchored):
    name = "fedsra"
    about = "features drawn to fixed anchors that all sites share, with contrast between classes"
    paper = "FedSRA, 2026"
    provides = frozenset({"weights", "class_counts", "prototypes", "anchors", "calibration", "moments"})
    sends = ("moments",)
    head = "etf"
    settings_type: ClassVar[type[ObjectiveSettings]] = FedSraSettings
    settings: FedSraSettings
    batch: ClassVar[int] = 128

    @classmethod
    def views(cls, size: tuple[int, int], mirror: bool) -> ViewSettings:
        return Salt.views(size, mirror)

    @classmethod
    def defaults(cls, settings: ObjectiveSettings) -> dict[str, Any]:
        return TRAIN

    @classmethod
    def adapt_spec(cls, spec: ModelSpec, settings: ObjectiveSettings) -> ModelSpec:
        assert isinstance(settings, FedSraSettings)
        projector = spec.projector or ((settings.dim,) if settings.dim else ())
        plain = learning(spec.replace(head=cls.head, projector=projector))
        return plain.replace(head=settings.shift) if ways_for(plain, settings) > 1 else plain

    def decided(self, spec: ModelSpec, site: Site, seed: int) -> Found:
        if self.settings.shift != "none" and ways_for(spec, self.settings) == 1:
            room = f"features of {spec.feature_dim()} dimensions have no room for {WAYS * spec.classes} anchors"
            return Found("none", room)
        return super().decided(spec, site, seed)

    def prepare(self, model: Network, site: Site, seed: int) -> None:
        rows, ways = shown_directions(model).flatten(0, 1), ways_for(model.spec, self.settings)
        frame = simplex_etf(ways * model.spec.classes, rows.shape[1], self.settings.anchor_seed)
        if model.head.shift:
            prototypes: Tensor = model.head.prototypes  # type: ignore[assignment]
            prototypes.requires_grad_(False).copy_(frame)
        else:
            self.fix_head(model, 1 / self.settings.tau, frame[: len(rows)])
        self.alone = sum(n > 0 for n in site.counts) == 1 and not model.head.shift

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        weights, batch = self.settings, self.in_ways(model, batch)
        anchors = shown_directions(model).flatten(0, 1)
        features = F.normalize(model.features(batch.images).float(), dim=1)
        with torch.autocast(features.device.type, enabled=False):  # small products, where bf16 would cost accuracy
            cosines = features @ anchors.T
            cls = F.cross_entropy(cosines / weights.tau, batch.labels)
            con = supcon(features, batch.labels, weights.con_tau, len(anchors))
            pull = 1 - cosines.gather(1, batch.labels[:, None]).mean()
        total = weights.pull * pull if self.alone else cls + weights.con * con + weights.pull * pull
        parts = {"cls": cls, "con": con, "pull": pull, "train_accuracy": accuracy_of(cosines, batch.labels)}
        return Terms(total, parts)


def ways_for(spec: ModelSpec, settings: FedSraSettings) -> int:
    """How many ways the anchors have, the same at every site: one where no shift is asked for, or where the features
    cannot hold a simplex of all ways."""
    return WAYS if settings.shift != "none" and spec.feature_dim() >= WAYS * spec.classes - 1 else 1
