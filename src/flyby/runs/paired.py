"""Whether one model is better than another at the same nodes: mean, standard error, and a paired test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, sqrt
from statistics import fmean, stdev

import numpy as np

EXACT = 36  # pairs whose sign flips are all counted; above, their sum is as good as normal


def mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error, which one value alone does not have."""
    return fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None


def p_said(p: float) -> str:
    """A chance as tables have it."""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


@dataclass(frozen=True)
class Paired:
    """Differences at the same nodes: their mean, its standard error, how likely a mean as far from 0 is if each
    difference might as well have had the other sign, and how many rose and fell."""

    mean: float
    error: float | None
    p: float
    up: int
    down: int

    @classmethod
    def of(cls, after: Sequence[float], before: Sequence[float]) -> Paired:
        gaps = [a - b for a, b in zip(after, before, strict=True)]
        mean, error = mean_error(gaps)
        return cls(mean, error, sign_flip(gaps), sum(g > 0 for g in gaps), sum(g < 0 for g in gaps))


def sign_flip(gaps: Sequence[float]) -> float:
    """The share of all 2^n ways to choose the signs of n differences whose sum is at least as far from 0 as this one's.

    Counted, and not drawn: the sums of one half of the differences are sorted, and those of the other look up how many
    of them they need. Differences of 0 change nothing and are left out.
    """
    sizes = np.abs([g for g in gaps if g])
    seen = abs(sum(gaps))
    if not len(sizes):
        return 1.0
    if len(sizes) > EXACT:
        return float(erfc(seen / sqrt(2 * float((sizes**2).sum()))))
    edge = seen - 1e-9 * float(sizes.sum())  # sums in another order differ in their last digits
    left, right = (_sums(half) for half in (sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]))
    left.sort()
    above = len(left) - np.searchsorted(left, edge - right)
    below = np.searchsorted(left, -edge - right, side="right")
    return float(min(1.0, (above.sum() + below.sum()) / (len(left) * len(right))))


def _sums(
    sizes: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    found = np.zeros(1)
    for size in sizes:
        found = np.concatenate([found + size, found - size])
    return found
