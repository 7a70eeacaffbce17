"""AURORA: SALT plus an anchor all sites share, with a strength each site learns (see ``weighting``).

L_align = mean over the classes a site holds of the squared distance between its prototypes and a fixed simplex (element
mean; ``align_reduction: sum`` is the paper's sum over dimensions). FAFI, FAFI+Annealing and all ablations are values of
``weighting``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flyby.data.site import Site
from flyby.models import ModelSpec, Network
from flyby.objectives.anchored import Anchored, AnchorSettings
from flyby.objectives.base import Batch, ObjectiveSettings, Terms
from flyby.objectives.salt import Salt, SaltSettings
from flyby.objectives.weighting import WEIGHTINGS, Weighting, WeightingSettings
from flyby.rng import generator


class AuroraSettings(SaltSettings, WeightingSettings, AnchorSettings):
    align_reduction: Literal["mean", "sum"] = Field(
        "mean", description="a prototype's squared distance to its anchor: mean over dimensions, or the paper's sum"
    )
    align_classes: Literal["site", "batch"] = Field(
        "site", description="align the classes the site holds, or those in the batch"
    )
    proto_init: Literal["normal", "etf"] = Field(
        "normal", description="etf starts at the anchors and adds a learnable logit scale"
    )
    freeze_missing: bool = Field(False, description="keep the prototypes of classes the site lacks where they began")


class Aurora(Anchored, Salt):
    """AURORA's client. Its extra state is two scalars and their two velocities. Of every epoch it logs the largest
    lambda (``lambda_peak``) and in what share of the steps it was above ``lambda_max`` (``lambda_bound``), which is
    where the stability term bites if there is one."""

    name = "aurora"
    about = "SALT, and prototypes drawn to anchors that all sites share, by a strength each site learns"
    paper = "AURORA"
    provides = Salt.provides | {"anchors"}
    settings_type: ClassVar[type[ObjectiveSettings]] = AuroraSettings
    settings: AuroraSettings
    weighting: Weighting
    anchors: Tensor
    held: Tensor
    start: Tensor
    peak: Tensor

    def __init__(self, settings: ObjectiveSettings) -> None:
        assert isinstance(settings, AuroraSettings)
        as_run = settings.preset == "as-run"
        filled = {
            "anneal_on": settings.anneal_on or ("data" if as_run else "log"),
            "sigma_init": settings.sigma_init or ("entropy" if as_run else "zero"),
        }
        super().__init__(settings.model_copy(update=filled))

    @classmethod
    def adapt_spec(cls, spec: ModelSpec, settings: ObjectiveSettings) -> ModelSpec:
        assert isinstance(settings, AuroraSettings)
        # Unit-norm logits put a floor under the cross-entropy, so prototypes that start at the anchors come with a
        # scale.
        return spec.replace(head=cls.head, logit_scale=settings.proto_init == "etf")

    def prepare(self, model: Network, site: Site, seed: int) -> None:
        prototypes: Tensor = model.head.prototypes  # type: ignore[assignment]
        device = prototypes.device
        anchors = self.anchors_for(prototypes)
        counts = torch.tensor(site.counts, dtype=torch.float64)
        if self.settings.proto_init == "etf":
            noise = torch.randn(prototypes.shape, generator=generator(self.settings.anchor_seed, "proto-init")) * 0.01
            prototypes.data.copy_(anchors + noise.to(device))
        self.weighting = WEIGHTINGS[self.settings.weighting](self.settings, first_log_sigma(self.settings, counts)).to(
            device
        )
        # Anchors and masks are rebuilt from the seed and the data; only the weighting's scalars are memory.
        self.register_buffer("anchors", anchors, persistent=False)
        self.register_buffer("held", (counts > 0).float().to(device), persistent=False)
        self.register_buffer("start", prototypes.detach().clone(), persistent=False)
        self.register_buffer("peak", torch.zeros((), device=device), persistent=False)

    def align_loss(self, prototypes: Tensor, labels: Tensor) -> Tensor:
        """L_align over the classes the site holds (or the batch shows); prototypes are not normalised, anchors are unit
        vectors."""
        present = self.held
        if self.settings.align_classes == "batch":
            present = (labels[:, None] == torch.arange(len(present), device=labels.device)).any(0).float()
        squares = (prototypes.float() - self.anchors).square()
        per_class = squares.mean(1) if self.settings.align_reduction == "mean" else squares.sum(1)
        return (per_class * present).sum() / present.sum()

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        prototypes: Tensor = model.head.prototypes  # type: ignore[assignment]
        local, parts = self.local_terms(model, batch)
        align = self.align_loss(prototypes, batch.labels)
        total, strength = self.weighting.weigh(local, align, progress, prototypes)
        self._seen = (local.detach(), align.detach())
        self.peak.copy_(torch.maximum(self.peak, strength))
        return Terms(
            total,
            {
                "loss_local": local,
                "loss_align": align,
                "lambda": strength,
                "lambda_align": strength * align.detach(),
                "lambda_bound": strength > self.settings.lambda_max,
                **parts,
            },
        )

    def after_step(self, model: Network, terms: Terms, progress: Tensor) -> None:
        self.weighting.update(*self._seen, progress)
        if self.settings.freeze_missing:
            prototypes: Tensor = model.head.prototypes  # type: ignore[assignment]
            prototypes.data.copy_(torch.where(self.held[:, None] > 0, prototypes.data, self.start))

    def epoch_state(self, model: Network) -> dict[str, Tensor]:
        peak = self.peak.clone()
        self.peak.zero_()
        return self.weighting.state() | {"lambda_peak": peak} | super().epoch_state(model)

    def cure(self, bad: Sequence[str]) -> str:
        if any(name == "lambda" or name.startswith(("lambda_", "l_")) for name in bad):
            return "Set objective.lambda_cap=50, or another objective.weighting"
        return super().cure(bad)

    def extras(self, model: Network, site: Site, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().extras(model, site, seed)
        return tensors, facts | {name: float(value) for name, value in self.weighting.state().items()}


def first_log_sigma(settings: AuroraSettings, counts: Tensor) -> float:
    """l_local at the start: 0, or log of .1 + (H / log2 C)(15 - .1), with H the entropy of the site's classes in
    bits."""
    if settings.sigma_init != "entropy":
        return 0.0
    share = counts[counts > 0] / counts.sum()
    entropy = float(-(share * share.log2()).sum())
    return math.log(0.1 + entropy / math.log2(len(counts)) * (15 - 0.1))
