"""What answers are worth, in figures that a person may act on: accuracy with its interval, how far confidence can be
believed, and for each class what is found of it and what is taken for it by mistake.

All of them follow from shares ``[N, C]`` that add up to one, and true labels ``[N]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

BINS = 15
SURE = 1.959964  # standard errors: 95 % of a normal distribution lie within


def wilson(right: int, images: int, z: float = SURE) -> tuple[float, float]:
    """Wilson's score interval of a share [Wilson, JASA 1927]: all p with |right / n - p| <= z sqrt(p (1 - p) / n). It
    stays within 0 and 1, and says something even where all answers are right."""
    if images == 0:
        return 0.0, 1.0
    p, room = right / images, z * z / images
    middle = (p + room / 2) / (1 + room)
    half = z * math.sqrt(p * (1 - p) / images + room / (4 * images)) / (1 + room)
    return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))  # rounding leaves nobody outside


def ranked_auc(scores: Tensor, wanted: Tensor) -> float | None:
    """The area under the ROC curve by ranks: how often a wanted image scores above another, a tie counting half;
    (R - n (n + 1) / 2) / (n m) with R the sum of the n wanted ones' ranks among all. None where one side is empty."""
    n, m = int(wanted.sum()), int((~wanted).sum())
    if not n or not m:
        return None
    _, place, many = np.unique(scores.double().cpu().numpy(), return_inverse=True, return_counts=True)
    ranks = (many.cumsum() - (many - 1) / 2)[place]  # equal scores share the mean of their ranks
    return float((ranks[wanted.cpu().numpy()].sum() - n * (n + 1) / 2) / (n * m))


def calibration_error(sure: Tensor, right: Tensor, weights: Tensor, bins: int = BINS) -> float:
    """How far confidence and accuracy are apart, bin by bin of equal width, (lower, upper]; ``weights`` add up to
    one."""
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_of(sure, bins), weights * (sure - right))
    return float(gap.abs().sum())


def bin_of(sure: Tensor, bins: int = BINS) -> Tensor:
    return (sure * bins).ceil().long().clamp(1, bins) - 1


@dataclass(frozen=True)
class OfClass:
    """One class against the rest: ``sensitivity`` is the share of its images that are found, ``specificity`` the share
    of the others that are not taken for it, ``precision`` the share of right ones among all taken for it."""

    name: str
    images: int
    sensitivity: float | None
    specificity: float | None
    precision: float | None
    auc: float | None
    interval: tuple[float, float] | None  # of the sensitivity


@dataclass(frozen=True)
class Bin:
    """Answers of about one confidence: how many, how sure on average, and how many of them are right."""

    images: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Quality:
    """``confusion[i][j]`` images of class i were taken for class j."""

    images: int
    accuracy: float
    interval: tuple[float, float]
    confidence: float
    calibration_error: float
    log_loss: float
    classes: list[OfClass]
    confusion: list[list[int]]
    bins: list[Bin]

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "images": self.images,
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "mean_confidence": self.confidence,
            "calibration_error": self.calibration_error,
            "log_loss": self.log_loss,
            "classes": {one.name: {k: v for k, v in vars(one).items() if k != "name"} for one in self.classes},
            "confusion": self.confusion,
            "reliability": [vars(one) for one in self.bins],
        }


def quality_of(chances: Tensor, labels: Tensor, class_names: Sequence[str]) -> Quality:
    """All the figures."""
    shares, labels, count = chances.double().cpu(), labels.cpu(), len(class_names)
    sure, answer = shares.max(1)
    right, n = answer == labels, len(labels)
    confusion = torch.bincount(labels * count + answer, minlength=count * count).view(count, count)
    place = bin_of(sure)
    many = torch.bincount(place, minlength=BINS)
    mean = [torch.bincount(place, each.double(), BINS) / many.clamp_min(1) for each in (sure, right)]
    told = shares[torch.arange(n), labels].clamp_min(1e-12)
    return Quality(
        images=n,
        accuracy=float(right.double().mean()) if n else 0.0,
        interval=wilson(int(right.sum()), n),
        confidence=float(sure.mean()) if n else 0.0,
        calibration_error=calibration_error(sure, right.double(), torch.full_like(sure, 1 / max(1, n))),
        log_loss=float(-told.log().mean()) if n else 0.0,
        classes=[_of_class(c, name, shares[:, c], labels, confusion) for c, name in enumerate(class_names)],
        confusion=confusion.tolist(),
        bins=[Bin(int(k), float(s), float(a)) for k, s, a in zip(many, *mean, strict=True)],
    )


def _of_class(c: int, name: str, scores: Tensor, labels: Tensor, confusion: Tensor) -> OfClass:
    found, own, taken, all_ = int(confusion[c, c]), int(confusion[c].sum()), int(confusion[:, c].sum()), len(labels)
    return OfClass(
        name=name,
        images=own,
        sensitivity=found / own if own else None,
        specificity=1 - (taken - found) / (all_ - own) if all_ > own else None,
        precision=found / taken if taken else None,
        auc=ranked_auc(scores, labels == c),
        interval=wilson(found, own) if own else None,
    )


def summary(found: Quality) -> str:
    """The figures in two lines."""
    low, high = found.interval
    return (
        f"accuracy {found.accuracy:.4f} on {found.images:,} images (95 % interval {low:.4f} to {high:.4f})\n"
        f"mean confidence {found.confidence:.4f}, expected calibration error {found.calibration_error:.4f}, log-loss"
        f" {found.log_loss:.4f}"
    )


def by_class(found: Quality) -> list[str]:
    """A line per class that has images."""
    wide = max((len(one.name) for one in found.classes), default=0)
    wide, shown = min(max(wide, 5), 24), [one for one in found.classes if one.images]
    head = f"  {'class':<{wide}}  {'images':>6}  {'sensitivity':>11}  {'specificity':>11}  {'AUC':>6}"
    return [head] + [
        f"  {one.name[:wide]:<{wide}}  {one.images:>6,}  {_share(one.sensitivity):>11}  {_share(one.specificity):>11} "
        f" {_share(one.auc):>6}"
        for one in shown
    ]


def matrix(found: Quality, most: int = 10) -> list[str]:
    """The confusion matrix in plain text where it is small: a row per true class, a column per answer."""
    held = [c for c, one in enumerate(found.classes) if one.images or any(row[c] for row in found.confusion)]
    if not 2 <= len(held) <= most:
        return []
    names = [found.classes[c].name[:12] for c in held]
    wide = max(4, *(len(name) for name in names), *(len(str(found.confusion[r][c])) for r in held for c in held))
    lines = [" " * (wide + 4) + " ".join(f"{name:>{wide}}" for name in names) + "   <- taken for"]
    return lines + [
        f"  {names[i]:>{wide}}  " + " ".join(f"{found.confusion[r][c]:>{wide}}" for c in held)
        for i, r in enumerate(held)
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
