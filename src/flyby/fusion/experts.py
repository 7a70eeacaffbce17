"""Experts, flyby's own server rule: whoever has seen a class speaks for it.

score_c(x) = sum_k v_kc a_kc(x), with v_kc = n_kc / sum_k n_kc the share of class c that client k holds and a_kc(x) what client k
says about c. No weight and no prototype is averaged across feature spaces, so architectures and heads may differ.

An expert must also know what it does not know: a client with one class finds that class everywhere. ``experts-calibrated`` uses
a_kc(x) = clip((cos_kc(x) - m-_kc) / (m+_kc - m-_kc), 0, 1.2), with the client's own mean cosine on images of the class (m+) and on
scraps (m-), and 0 where the two differ by less than .02; its shares are v_kc ~ sqrt(n_kc), between a vote by size and one voice each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.data.dataset import Dataset
from flyby.errors import BadInput
from flyby.fusion.base import Fusion, FusionSettings, Inbox
from flyby.fusion.iffi import class_votes
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec, Network
from flyby.models.heads import directions

LEAST_GAP = 0.02
Form = Literal["cosine", "softmax", "gate", "calibrated"]


class ExpertsPredictor(Predictor):
    """All networks kept. ``votes`` [K, C] are the shares v; ``calibration`` [K, R, C] each client's own statistics."""

    kind = "experts"

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        class_names: Sequence[str],
        networks: Sequence[Network] | None = None,
        *,
        form: str = "cosine",
        sharpness: float = 16.0,
        votes: Tensor | None = None,
        calibration: Tensor | None = None,
    ) -> None:
        super().__init__(specs, class_names, networks, form=form, sharpness=sharpness)
        self.form, self.sharpness = form, sharpness
        shape = (len(self.specs), len(self.class_names))
        self.register_buffer("votes", torch.zeros(shape) if votes is None else votes)
        self.register_buffer("calibration", torch.zeros(shape[0], 2, shape[1]) if calibration is None else calibration)

    votes: Tensor
    calibration: Tensor

    def cosines(self, images: Tensor) -> Tensor:
        """cos(f_k(x), direction of class c at client k): [K, N, C]."""
        each = []
        for net, x in self.members(images):
            each.append(F.normalize(net.features(x).float(), dim=1) @ F.normalize(directions(net).float(), dim=1).T)
        return torch.stack(each)

    def forward(self, images: Tensor) -> Tensor:
        cosine = self.cosines(images)
        held = (self.votes > 0)[:, None]
        if self.form == "cosine":
            said = cosine
        elif self.form == "softmax":
            said = (self.sharpness * cosine).masked_fill(~held, float("-inf")).softmax(2)
        elif self.form == "gate":
            best = cosine.masked_fill(~held, -1.0).amax(2)
            said = cosine * (self.sharpness * best).softmax(0)[:, :, None] * len(cosine)
        else:
            said = calibrated(cosine, self.calibration)
        return torch.einsum("kc,knc->nc", self.votes, said)


def calibrated(cosine: Tensor, table: Tensor) -> Tensor:
    """clip((cos - m-) / (m+ - m-), 0, 1.2) from ``table`` [K, 2, C] = (m+, m-); 0 where they do not differ."""
    own, scrap = table[:, None, 0], table[:, None, 1]
    gap = own - scrap
    return torch.where(gap < LEAST_GAP, 0.0, ((cosine - scrap) / gap.clamp_min(LEAST_GAP)).clamp(0, 1.2))


class ExpertsSettings(FusionSettings):
    sharpness: float = Field(16.0, gt=0, description="inverse temperature of the softmax and gate forms")
    power: float | None = Field(None, ge=0, description="v_kc ~ n_kc ** power; default 1, and .5 for experts-calibrated")


class Experts(Fusion):
    name = "experts"
    paper = "flyby"
    about = "whoever has seen a class speaks for it, by the cosine to its prototype"
    needs = frozenset({"weights", "class_counts", "prototypes"})
    heterogeneous = True
    form: Form = "cosine"
    power = 1.0
    settings_type = ExpertsSettings
    settings: ExpertsSettings

    def fuse(self, parcels: Inbox, *, proxy: Dataset | None = None, seed: int = 0, device: torch.device | str = "cpu") -> Predictor:
        networks, tables = [], []
        for item in parcels:
            networks.append(item.network())
            if "calibration" in self.needs:
                if "calibration" not in item.extras:
                    raise BadInput(f"{item.manifest.sender} sent no calibration scalars, which {self.name} needs; use --fusion experts")
                tables.append(item.extras["calibration"])
        return ExpertsPredictor(
            [m.spec for m in parcels.manifests], parcels.class_names, networks, form=self.form, sharpness=self.settings.sharpness,
            votes=class_votes(parcels.counts ** (self.power if self.settings.power is None else self.settings.power)).float(), calibration=torch.stack(tables) if tables else None,
        )  # fmt: skip


class ExpertsSoftmax(Experts):
    name = "experts-softmax"
    about = "experts on the softmax of their cosines over the classes they hold"
    form: Form = "softmax"


class ExpertsGate(Experts):
    name = "experts-gate"
    about = "experts weighed by how close their best class is"
    form: Form = "gate"


class ExpertsCalibrated(Experts):
    name = "experts-calibrated"
    about = "experts that know what they do not know: cosines calibrated at each site"
    needs = frozenset({"weights", "class_counts", "prototypes", "calibration"})
    form: Form = "calibrated"
    power = 0.5
