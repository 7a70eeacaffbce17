"""A temperature: one number by which a site's model is less sure, or surer, of itself [Guo et al., ICML 2017].

Shares p become softmax(log p / T), so the answer never changes, only how sure it is. T is where held-out images of the
site are least surprised, and their labels are softened as Platt did: with n of them, the true class has (n + 1) / (n +
2), since a few right answers do not make anybody certain. The loss is convex in 1 / T, so its slope is bisected.

It travels as the small fact ``meta.temperature``, to four digits: one number over all held-out images together. The
fused one is exp of the mean of log T, each site weighing as its images do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from flyby.parcels.parcel import Manifest

NAME = "temperature"
LEAST, MOST = 0.01, 100.0  # what a receiver believes
FEWEST = 20  # held-out images to measure by


def temperature_of(chances: Tensor, labels: Tensor) -> float | None:
    """T for shares [N, C]; None where there are too few images, or of fewer than two classes."""
    held = torch.tensor(sorted(set(labels.tolist())))
    n = len(labels)
    if n < FEWEST or len(held) < 2:
        return None
    logs, place = chances.double().cpu().clamp_min(1e-12).log(), torch.searchsorted(held, labels.cpu())
    # A class that the site does not hold has no softened share: nothing here can say how rare it is.
    soft = torch.full((n, len(held)), 1 / ((n + 2) * (len(held) - 1)), dtype=torch.float64)
    soft[torch.arange(n), place] = (n + 1) / (n + 2)
    target = torch.zeros_like(logs).index_add_(1, held, soft)

    def slope(beta: float) -> float:
        return float((((beta * logs).softmax(1) - target) * logs).sum(1).mean())

    low, high = 1 / MOST, 1 / LEAST
    for _ in range(60):
        beta = math.sqrt(low * high)
        low, high = (beta, high) if slope(beta) < 0 else (low, beta)
    return float(f"{1 / math.sqrt(low * high):.4g}")


def told(manifest: Manifest) -> float | None:
    """The temperature that a parcel tells, where it is one."""
    value = manifest.meta.get(NAME)
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value <= MOST:
        return None
    return float(value)


def fused_temperature(manifests: Iterable[Manifest]) -> float | None:
    """exp(sum_k n_k log T_k / sum_k n_k) over the sites that tell one; None where nobody does."""
    pairs = [(value, max(1, m.samples)) for m in manifests if (value := told(m)) is not None]
    total = sum(n for _, n in pairs)
    return math.exp(sum(n * math.log(value) for value, n in pairs) / total) if pairs else None
