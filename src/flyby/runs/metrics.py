"""How alike the clients are: prototypes, weights and features, measured from parcels. Nothing here is sent or chosen
by.

AURORA prints one number, `g_protos_std`, whose printed values cannot follow from its own definition (they exceed 1); so
there are three: ``proto_consistency`` is the definition, ``proto_matrix_std`` what was printed, ``inter_client_std``
the plain spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from flyby.models.heads import directions
from flyby.parcels.parcel import Parcel
from flyby.rng import generator


def proto_consistency(prototypes: Tensor, counts: Tensor) -> float | None:
    """Mean over classes held by two clients or more of sqrt(mean_k ||p^_c^(k) - mean||^2), p^ = p/||p|| ([K, C, d], [K,
    C]); lower is closer."""
    unit = F.normalize(prototypes.double(), dim=2)
    spreads = []
    for c in range(unit.shape[1]):
        mine = unit[counts[:, c] > 0, c]
        if len(mine) >= 2:
            spreads.append((mine - mine.mean(0)).square().sum(1).mean().sqrt())
    return float(torch.stack(spreads).mean()) if spreads else None


def proto_matrix_std(prototypes: Tensor) -> float:
    """Standard deviation of all entries of the clients' mean prototype matrix."""
    return float(prototypes.double().mean(0).std())


def inter_client_std(prototypes: Tensor) -> float:
    """Standard deviation over clients of each entry of the prototype matrices, averaged over entries."""
    return float(prototypes.double().std(0, correction=0).mean())


def drift(parcels: Sequence[Parcel], seed: int) -> float:
    """Mean distance of the clients' weights from their common start, relative to the start's norm."""
    start = parcels[0].manifest.spec.build(generator(seed, "shared", "init"))
    names = [name for name, _ in start.named_parameters()]
    origin = torch.cat([start.get_parameter(name).detach().flatten() for name in names])
    moved = [torch.cat([p.weights[name].flatten() for name in names]) - origin for p in parcels]
    return float(torch.stack([m.norm() for m in moved]).mean() / origin.norm())


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear centred kernel alignment of two feature sets [n, d] of the same images: 1 the same up to rotation and
    scale, 0 unrelated."""
    x, y = (_unit(features.double() - features.double().mean(0)) for features in (x, y))
    return float((y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm()).clamp_min(1e-12))


def _unit(x: Tensor) -> Tensor:
    """Scaled to norm 1 (features that are all alike stay 0), so that the floor in a denominator means the same at every
    scale."""
    return torch.div(x, x.norm().clamp_min(torch.finfo(x.dtype).tiny))


def feature_agreement(features: Sequence[Tensor]) -> float:
    """Mean linear CKA over all pairs of clients, from the features [n, d] that each gives the same images."""
    pairs = list(combinations(features, 2))
    return sum(linear_cka(a, b) for a, b in pairs) / max(1, len(pairs))


def consistency(parcels: Sequence[Parcel], features: Sequence[Tensor], seed: int | None) -> dict[str, float]:
    """All measures that apply: prototypes where every client has some of one width, drift where all share one
    architecture and the start of this ``seed`` (None: they do not). ``features`` are what each client's network makes
    of a probe that none of them trained on."""
    if len(parcels) < 2:
        return {}
    found: dict[str, float | None] = {"feature_agreement": feature_agreement(features)}
    if len({p.manifest.spec for p in parcels}) == 1:
        if seed is not None:
            found["drift"] = drift(parcels, seed)
        if parcels[0].manifest.spec.head == "prototype" and all(p.manifest.counts for p in parcels):
            prototypes = torch.stack([directions(p.network()) for p in parcels])
            counts = torch.tensor([p.manifest.counts for p in parcels])
            found |= {
                "proto_consistency": proto_consistency(prototypes, counts),
                "proto_matrix_std": proto_matrix_std(prototypes),
                "inter_client_std": inter_client_std(prototypes),
            }
    return {name: value for name, value in found.items() if value is not None}
