"""IFFI, FAFI's server [Zeng et al., ICML 2025]: fuse features, fuse prototypes, compare.

F(x) = sum_k w_k f_k(x), p_c = sum_k v_kc p_c^(k), and the prediction is argmax_c F^(x) . p_c. The client weights w are
``size`` (n_k / N), ``uniform``, or ``noise`` (1 - cos(f_k(x), f_k(noise)), normalised over k: who sees more than noise
counts more); the prototype weights v are ``uniform`` (1 / K) or ``counts`` (n_kc / sum_k n_kc, so that a missing class
weighs nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.fusion.base import Fusion, FusionSettings, Server, weights_of
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec, Network
from flyby.models.heads import directions
from flyby.parcels.inbox import Inbox
from flyby.rng import generator


class IffiPredictor(Predictor):
    """Fused features against fused prototypes. ``shares`` [K] are the client weights; ``noise`` [K, d] the features of
    noise."""

    kind = "iffi"

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        class_names: Sequence[str],
        networks: Sequence[Network] | None = None,
        *,
        weights: str = "size",
        **tensors: Tensor,
    ) -> None:
        super().__init__(specs, class_names, networks, weights=weights)
        self.weights = weights
        dim, members = int(self.networks[0].feature_dim), len(self.specs)  # type: ignore[arg-type]
        self.register_buffer("prototypes", tensors.get("prototypes", torch.zeros(len(self.class_names), dim)))
        self.register_buffer("shares", tensors.get("shares", torch.zeros(members)))
        self.register_buffer("noise", tensors.get("noise", torch.zeros(members, dim)))

    prototypes: Tensor
    shares: Tensor
    noise: Tensor

    def voice(self, k: int, network: Network, features: Tensor) -> Tensor:
        return features.float()

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        features = torch.stack(tuple(voices))
        if self.weights == "noise":
            shares = (1 - F.cosine_similarity(features, self.noise[:, None], dim=2)).clamp_min(1e-6)
            shares = shares / shares.sum(0)
        else:
            shares = self.shares[:, None]
        fused = F.normalize((shares[:, :, None] * features).sum(0), dim=1)
        return fused @ self.prototypes.T


class IffiSettings(FusionSettings):
    weights: Literal["size", "uniform", "noise"] = Field(
        "size", description="how sites count: by their images, all alike, or by how little noise excites them"
    )
    prototypes: Literal["uniform", "counts"] = Field(
        "uniform", description="how sites count in a class's prototype: all alike, or by their images of it"
    )


class Iffi(Fusion):
    name = "iffi"
    paper = "FAFI: Zeng et al., ICML 2025"
    about = "fused features against fused prototypes"
    needs = frozenset({"weights", "class_counts", "prototypes"})
    settings_type = IffiSettings
    settings: IffiSettings

    def row_shares(self, parcels: Inbox) -> list[float]:
        return weights_of(parcels, "uniform")  # as prototypes are fused

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        parcels.same_features("iffi")
        networks = [item.network() for item in parcels]
        rows = torch.stack([directions(net) for net in networks])
        votes = (
            torch.full(rows.shape[:2], 1 / len(networks))
            if self.settings.prototypes == "uniform"
            else class_votes(parcels.counts).float()
        )
        shares = torch.tensor(weights_of(parcels, "size" if self.settings.weights == "size" else "uniform"))
        tensors: dict[str, Any] = {"prototypes": torch.einsum("kc,kcd->cd", votes, rows), "shares": shares}
        if self.settings.weights == "noise":
            pixels = parcels.manifests[0].spec.noise(64, generator(server.seed, "server", "noise"))
            with torch.no_grad():
                tensors["noise"] = torch.stack(
                    [net.features(net.spec.prepare(pixels)).float().mean(0) for net in networks]
                )
        return IffiPredictor(
            [m.spec for m in parcels.manifests], parcels.class_names, networks, weights=self.settings.weights, **tensors
        )


def class_votes(counts: Tensor) -> Tensor:
    """v_kc = n_kc / sum_k n_kc; a class nobody holds is divided evenly."""
    totals = counts.sum(0, keepdim=True)
    return torch.where(totals > 0, counts / totals.clamp_min(1e-12), 1 / len(counts))
