"""A temperature: one number by which a site's model is less sure, or surer, of itself [Guo et al., ICML 2017].

Shares p become softmax(log p / T), so the answer never changes, only how sure it is. T is where the sum of -log p(true
class) over the site's held-out images and (log T - log usual)^2 is least: a few right answers make nobody certain, for
they say little about T, and then it is what is usual for the rule.

It travels as the small fact ``meta.temperature``, to four digits: one number over all held-out images together. The
fused one is exp of the mean of log T, each site weighing as its images do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor

from flyby.parcels.parcel import Manifest

NAME = "temperature"
LEAST, MOST = 0.01, 100.0  # what a receiver believes
FEWEST = 20  # held-out images to measure by
PULL = 1.0  # towards the usual T, in nats
STEPS = 20  # on each side of the best one so far


def temperature_of(chances: Tensor, labels: Tensor, usual: float = 1.0) -> float | None:
    """T for shares [N, C], where ``usual`` is its rule's; None where there are too few images, or of one class."""
    labels = labels.cpu()
    if len(labels) < FEWEST or len(set(labels.tolist())) < 2:
        return None
    logs = chances.double().cpu().clamp_min(1e-12).log()

    def cost(log_t: float) -> float:
        surprise = F.cross_entropy(logs / math.exp(log_t), labels, reduction="sum")
        return float(surprise) + PULL * (log_t - math.log(usual)) ** 2

    middle, half = (math.log(LEAST) + math.log(MOST)) / 2, (math.log(MOST) - math.log(LEAST)) / 2
    while half > 1e-5:
        tried = [middle + half * step / STEPS for step in range(-STEPS, STEPS + 1)]
        middle, half = min(tried, key=cost), half * 2 / STEPS
    return float(f"{min(max(math.exp(middle), LEAST), MOST):.4g}")


def told(manifest: Manifest) -> float | None:
    """The temperature that a parcel tells, where it is one."""
    value = manifest.meta.get(NAME)
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value <= MOST:
        return None
    return float(value)


def fused_temperature(manifests: Iterable[Manifest]) -> float | None:
    """That of the sites that tell one; None where nobody does."""
    return weighted([(value, max(1, m.samples)) for m in manifests if (value := told(m)) is not None])


def weighted(pairs: Sequence[tuple[float, int]]) -> float | None:
    """exp(sum_k n_k log T_k / sum_k n_k) of temperatures and images."""
    total = sum(n for _, n in pairs)
    return math.exp(sum(n * math.log(value) for value, n in pairs) / total) if pairs else None
