"""Anchors that all sites share without a word: a simplex drawn from one seed. AURORA is drawn towards it by a strength
that each site learns, FedETF classifies with it, FedSRA has nothing else (AURORA's anchor at infinite strength)."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from flyby.data.site import Site
from flyby.errors import BadInput
from flyby.models import ModelSpec, Network
from flyby.models.anchors import simplex_etf
from flyby.objectives.base import Objective, ObjectiveSettings


class AnchorSettings(ObjectiveSettings):
    anchor_seed: int = Field(0, ge=0, description="all sites must use the same")


class Anchored(Objective):
    """A local loss with such anchors; the parcel names their seed."""

    settings: AnchorSettings

    def anchors_for(self, rows: Tensor) -> Tensor:
        """The simplex [C, d] that belongs to one row per class in feature space, where those rows are."""
        return simplex_etf(rows.shape[0], rows.shape[1], self.settings.anchor_seed).to(rows.device)

    def fix_head(self, model: Network, scale: float | None = None, frame: Tensor | None = None) -> None:
        """Puts the anchors, or the given ones, into an ``etf`` head; ``scale`` is what its logits are multiplied by,
        then for good."""
        anchors: Tensor = model.head.anchors  # type: ignore[assignment]
        anchors.copy_(self.anchors_for(anchors) if frame is None else frame)
        if scale is not None:
            model.head.scale.requires_grad_(False).fill_(scale)  # type: ignore[operator]

    def extras(self, model: Network, site: Site, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().extras(model, site, seed)
        return tensors, facts | {"anchor_seed": self.settings.anchor_seed}


def learning(spec: ModelSpec) -> ModelSpec:
    """A spec whose head is fixed; BadInput where nothing else learns."""
    if spec.head_alone:
        raise BadInput(
            "a fixed classifier on a frozen backbone has nothing to learn; put a layer between them with --set"
            " model.projector=[128]"
        )
    return spec
