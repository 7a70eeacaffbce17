"""Standardised features, FedSRA's server rule [2026]: z-score what every client sees, add it up, nearest anchor wins.

z_k(x) = (f_k(x) - m_k) / s_k in every dimension; F(x) = sum_k sqrt(n_k) z_k(x); the prediction is argmax_c F^(x) . e_c
with the anchors e_c that all clients share. Where they share none, fused prototypes or head rows take their place:
p_c = sum_k v_kc p_c^(k), v by class counts. What m_k and s_k are moments of is the setting ``moments``:

- ``own``: the client's own images, which it measures and sends (the statistic ``moments``);
- ``unlabelled``: images that the server has (``--proxy``);
- ``batch``: the very images that are asked about. This is transductive: an answer depends on what else is asked, and a
  single image is refused.

Clients that know a shift show every image in all its ways: the score is then the mean over ways r of F_r^(x) . p_{c,r},
to which a client without one adds the same features and prototypes in every way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.data.dataset import Dataset
from flyby.errors import BadInput, unknown
from flyby.fusion.base import Fusion, FusionSettings, Server
from flyby.fusion.ensembles.experts import say_cost
from flyby.fusion.ensembles.iffi import class_votes
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec, Network
from flyby.models.heads import shown_directions
from flyby.parcels.inbox import Inbox
from flyby.statistics.catalogue import EXTRAS
from flyby.statistics.extras import sent
from flyby.statistics.moments import moments_of

Source = Literal["own", "unlabelled", "batch"]
FLOOR = 0.05  # of the mean spread: a feature that never moved on a client's images must not drown all others


def standardised(features: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(f - m) / s over the last dimension, with s at the least ``FLOOR`` of its mean over all features."""
    least = (FLOOR * std.mean(-1, keepdim=True)).clamp_min(1e-6)
    return (features - mean) / torch.maximum(std, least)


class StandardisedPredictor(Predictor):
    """``prototypes`` [R, C, d]; ``shares`` [K]; ``mean`` and ``std`` [K, d], which ``batch`` takes from the images."""

    kind = "standardised"
    shows = True

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        class_names: Sequence[str],
        networks: Sequence[Network] | None = None,
        *,
        moments: str = "own",
        ways: int = 1,
        **tensors: Tensor,
    ) -> None:
        if moments not in get_args(Source):
            raise unknown("source of moments", moments, get_args(Source))
        super().__init__(specs, class_names, networks, moments=moments, ways=ways)
        self.moments, self.least = moments, 2 if moments == "batch" else 1
        dim, members = int(self.networks[0].feature_dim), len(self.specs)  # type: ignore[arg-type]
        empty = {"prototypes": (ways, len(self.class_names), dim), "shares": (members,)}
        for name, shape in {**empty, "mean": (members, dim), "std": (members, dim)}.items():
            self.register_buffer(name, tensors.get(name, torch.zeros(shape)))

    prototypes: Tensor
    shares: Tensor
    mean: Tensor
    std: Tensor

    def voice(self, k: int, network: Network, features: Tensor) -> Tensor:
        return features.float()

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        if images.shape[0] < self.least:
            raise BadInput(
                "moments=batch takes its moments from the images asked about, and one image has none; ask about many at"
                " once, or fuse with moments=own or unlabelled"
            )
        ways = len(self.prototypes)
        each = [seen if seen.ndim == 3 else seen[:, None].expand(-1, ways, -1) for seen in voices]
        features = torch.stack(each)  # [K, N, R, d]
        if self.moments == "batch":
            mean, std = features.mean((1, 2)), features.std((1, 2), correction=0)
        else:
            mean, std = self.mean, self.std
        seen = standardised(features, mean[:, None, None], std[:, None, None])
        fused = F.normalize(torch.einsum("k,knrd->nrd", self.shares, seen), dim=2)
        return torch.einsum("nrd,rcd->nc", fused, self.prototypes) / ways


class StandardisedSettings(FusionSettings):
    moments: Source = Field(
        "own", description="of the client's own images, of unlabelled ones (--proxy), or of the batch (transductive)"
    )
    power: float = Field(0.5, ge=0, description="a client weighs n ** power")
    prototypes: Literal["uniform", "counts"] = Field("counts", description="how prototypes that differ are fused")
    images: int = Field(1024, ge=2, description="unlabelled images that are looked at, at the most")


class Standardised(Fusion):
    name = "standardised"
    paper = "FedSRA, 2026"
    about = "standardised features of all clients added up; the nearest anchor, or fused prototype, wins"
    needs = frozenset({"weights", "class_counts", "prototypes", "moments"})
    settings_type = StandardisedSettings
    settings: StandardisedSettings

    def __init__(self, settings: FusionSettings | None = None) -> None:
        super().__init__(settings)
        self.data_free = self.settings.moments != "unlabelled"

    @classmethod
    def needed(cls, settings: FusionSettings) -> frozenset[str]:
        assert isinstance(settings, StandardisedSettings)
        return cls.needs if settings.moments == "own" else cls.needs - {"moments"}

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        parcels.same_features(self.name)
        networks = [item.network() for item in parcels]
        counts = parcels.counts
        even = torch.full_like(counts, 1 / len(networks))
        votes = (class_votes(counts) if self.settings.prototypes == "counts" else even).float()
        rows = [shown_directions(network).float() for network in networks]
        ways = max(len(one) for one in rows)
        rows = [one.expand(ways, -1, -1) if len(one) == 1 else one for one in rows]
        shares = torch.tensor(parcels.samples, dtype=torch.float64) ** self.settings.power
        if not float(shares.sum()):
            raise BadInput("the parcels' sample counts add up to nothing, so nobody has a weight; use experts")
        tensors = {
            "prototypes": torch.einsum("kc,krcd->rcd", votes, torch.stack(rows)).contiguous(),
            "shares": (shares / shares.sum()).float(),
        }
        if self.settings.moments != "batch":
            each = self._moments(parcels, networks, server)
            tensors |= {
                name: torch.stack(column) for name, column in zip(("mean", "std"), zip(*each, strict=True), strict=True)
            }
        say_cost(parcels, server)
        specs = [m.spec for m in parcels.manifests]
        return StandardisedPredictor(
            specs, parcels.class_names, networks, moments=self.settings.moments, ways=ways, **tensors
        )

    def _moments(self, parcels: Inbox, networks: Sequence[Network], server: Server) -> list[tuple[Tensor, Tensor]]:
        """The mean and the spread of each client's features."""
        if self.settings.moments == "unlabelled":
            images = unlabelled(server.proxy, self.settings.images).to(server.device)
            return [tuple(one.cpu() for one in moments_of(net.to(server.device), images)) for net in networks]  # type: ignore[misc]
        tables = [sent(item, EXTRAS["moments"]) for item in parcels]
        return [(table["moments.mean"], table["moments.std"]) for table in tables]


def unlabelled(proxy: Dataset | None, most: int) -> Tensor:
    """At most so many of the proxy images, spread over all of them: a file may be sorted."""
    if proxy is None or len(proxy) < 2:
        raise BadInput("moments=unlabelled needs unlabelled images; name some with --proxy PATH, or take moments=own")
    images, _ = proxy.tensors()
    return images[:: -(-len(images) // most)]
