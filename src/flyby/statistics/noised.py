"""One Gaussian noise per site makes sums of features differentially private, and what a receiver may believe of them.

Features are shortened to a ``norm`` r that was fixed without looking at the images. An image with feature x and class y
adds (e_y, x in row y, x x^T) to (n, S, B). Scaled to

    v = (sqrt(p_n) e_y,  sqrt(p_S) x / r,  sqrt(p_B) x x^T / r^2),        p_n + p_S + p_B = 1,

its Euclidean norm is at most 1, since ||x x^T||_F = ||x||^2 <= r^2. So the sum of all v changes by at most 1 where one
image contributes nothing (*zero-out*, as in ``flyby.training.privacy``), and noise N(0, z^2) on each coordinate is
(epsilon, delta)-private for the z of :func:`multiplier`. Of B the upper triangle is sent. In Frobenius' norm each pair
off the diagonal counts twice, so sqrt(2) B_ij is the coordinate: off the diagonal the noise is less by sqrt(2) than on
it. (Noise of one size on the plain triangle has sensitivity 1 too, for x along an axis, and would be larger for
nothing.) The number of images is public, exact counts of classes are not: no class is left out by them.

Noise of standard deviation s on the diagonal has eigenvalues up to about s sqrt(2 D). B less the scatter of the class
means can thus have negative ones: :func:`settled` sets these to 0 and adds a ``FLOOR`` of the noise's own radius.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Self

import torch
from torch import Tensor

from flyby.errors import BadInput

# Of the squared sensitivity: counts, S, B. Few counts are told, and they need no more than to be about right.
SHARES = (0.02, 0.49, 0.49)
FLOOR = 0.25  # of the noise's radius, added to every eigenvalue
TOLD = 2.0  # standard deviations of its noise that the count of a class must have to be taken for one that is there
SIGMAS = 8.0  # beyond what chance brings: one in 10^15
MOST = 1e3  # z beyond which noise is only an excuse: epsilon below 0.002 at delta 1e-5

Draw = Callable[[int], Tensor]


def delta_of(epsilon: float, z: float) -> float:
    """The delta of noise z on what changes by 1 [Balle and Wang, ICML 2018, theorem 8; exact]: Phi(1 / 2z - epsilon z)
    - e^epsilon Phi(-1 / 2z - epsilon z)."""
    first, second = (
        float(torch.special.log_ndtr(torch.tensor(sign / (2 * z) - epsilon * z, dtype=torch.float64)))
        for sign in (1, -1)
    )
    return math.exp(first) - math.exp(min(0.0, epsilon + second))


@lru_cache(maxsize=64)
def multiplier(epsilon: float, delta: float) -> float:
    """The least z that is (epsilon, delta)-private, from above."""
    low, high = 1e-4, 1e6
    if delta_of(epsilon, high) > delta:
        raise BadInput(
            f"no amount of noise gives epsilon {epsilon:g} at delta {delta:g}; raise one of them (train.dp_epsilon)"
        )
    while high / low > 1 + 1e-12:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if delta_of(epsilon, middle) > delta else (low, middle)
    return high


class Noise(NamedTuple):
    """What is public of noised sums: of how many ``images`` they are, the root mean square ``norm`` that their features
    have at the most, and the noise's standard deviation on a count, on a number of S and on the diagonal of B."""

    images: float
    norm: float
    counts: float = 0.0
    first: float = 0.0
    second: float = 0.0

    @classmethod
    def planned(cls, images: int, norm: float, z: float) -> Self:
        scale = [z / math.sqrt(share) for share in SHARES]
        return cls(float(images), norm, scale[0], scale[1] * norm, scale[2] * norm**2)

    def joined(self, other: Noise, sign: int = 1) -> Noise:
        """That of two sums together, each with its own noise; with ``sign`` -1 that of the first without the second."""
        images = self.images + sign * other.images
        square = (self.images * self.norm**2 + sign * other.images * other.norm**2) / max(1.0, images)
        deviations = (math.sqrt(max(0.0, a * a + sign * b * b)) for a, b in zip(self[2:], other[2:], strict=True))
        return Noise(images, math.sqrt(max(0.0, square)), *deviations)

    def radius(self, width: int) -> float:
        """The largest eigenvalue that the noise of B has, about."""
        return self.second * math.sqrt(2 * width)

    def added(self, counts: Tensor, first: Tensor, second: Tensor, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """(n, S, B) with noise; ``draw`` gives uniform numbers in (0, 1). Counts are rounded."""

        def normal(count: int) -> Tensor:
            drawn: Tensor = torch.special.ndtri(draw(count))
            return drawn.to(first)

        width = first.shape[1]
        rows, columns = torch.triu_indices(width, width, device=first.device)
        triangle = self.second * normal(len(rows)) * (1 + (rows == columns)).to(first).div(2).sqrt()
        noise = torch.zeros_like(second)
        noise[rows, columns] = noise[columns, rows] = triangle
        blurred = counts + self.counts * normal(len(counts))
        return blurred.round().long(), first + self.first * normal(first.numel()).view_as(first), second + noise

    # -- what a receiver sees

    def unlikely(self, counts: Tensor, first: Tensor, squares: Tensor, sites: int) -> str:
        """What numbers that are said to have this noise cannot be, in words; ``squares`` is the diagonal of B."""
        classes, width = first.shape
        one = Noise.planned(1, self.norm, MOST * math.sqrt(sites))
        if any(own > most for own, most in zip(self[2:], one[2:], strict=True)):
            return "it says that it has more noise than any epsilon asks for"
        if not self.images >= 1:
            return "it says that it is of no image"
        room = SIGMAS * self.counts
        if bool((counts < -room - 1).any()) or bool((counts > self.images + room + 1).any()):
            return f"its counts are not those of {self.images:.0f} images, its noise aside"
        if abs(float(counts.double().sum()) - self.images) > room * math.sqrt(classes) + classes:
            return f"its counts do not add up to {self.images:.0f} images, its noise aside"
        most = self.images * self.norm + self.first * (math.sqrt(width) + SIGMAS)
        if bool((first.norm(dim=1) > most * (1 + 1e-6)).any()):
            return "its sums are larger than its images could make them, its noise aside"
        trace, room = float(squares.sum()), SIGMAS * self.second * math.sqrt(width)
        if not -room - 1e-6 <= trace <= (self.images * self.norm**2 + room) * (1 + 1e-6):
            return "its squares are larger than its images could make them, or negative, its noise aside"
        return ""

    def slack(self, mean: Tensor, classes: int) -> float:
        """How far below 0 noise can bring an eigenvalue of B - s s^T / N, for s / N = ``mean``."""
        root = math.sqrt(len(mean)) + SIGMAS
        step = self.first * math.sqrt(classes) * root  # the length of the noise of s
        return self.second * (math.sqrt(2) * root) + 2 * float(mean.norm()) * step + step**2 / self.images

    def settled(
        self, counts: Tensor, first: Tensor, second: Tensor, told: float = TOLD
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(n, S, B) that could be those of images: no class that may be noise alone (its count less than ``told``
        standard deviations), and a scatter about class means without negative eigenvalues."""
        there = counts >= max(1.0, told * self.counts)
        counts, first = counts.masked_fill(~there, 0), first.masked_fill(~there[:, None], 0.0)
        means = first / counts.clamp_min(1)[:, None]
        between = first.T @ means
        values, vectors = torch.linalg.eigh(second - (between + between.T) / 2)
        kept = values.clamp_min(0.0) + FLOOR * self.radius(first.shape[1])
        return counts, first, (vectors * kept) @ vectors.T + (between + between.T) / 2
