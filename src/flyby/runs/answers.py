"""Which test images a run had right, so that two runs can be compared image by image; and what that comparison says.

Of n images that two models judged, b were right with the first alone and c with the second alone. If neither were
better, each of these b + c would be a toss of a coin: McNemar's exact test [McNemar 1947; a sign test]. The difference
of the accuracies is (b - c) / n. Its interval is that of Clopper and Pearson for the coin, t = P(first | one alone),
laid out as (b + c) / n (2 t - 1): it leaves out 0 where the test's p is below 5 %, and only there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from flyby.files import read_json, write_json
from flyby.runs.paired import p_said
from flyby.settings import build

TAIL = 0.025  # on either side of an interval of 95 %


class Answers(BaseModel):
    """``right.json``: a bit per test image, 1 where the run's model had it right, as hex digits (eight images in two of
    them, the first in the highest bit); and the images' digest, by which another run on the same ones is known."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    images: str
    count: int = Field(ge=1)
    right: str = Field(pattern="^([0-9a-f]{2})+$")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(self.right) != 2 * -(-self.count // 8):
            raise ValueError(f"{self.count} images need {2 * -(-self.count // 8)} hex digits, not {len(self.right)}")
        return self

    @classmethod
    def of(cls, images: str, right: Tensor) -> Self:
        bits = right.cpu().numpy().astype(bool)
        return cls(images=images, count=len(bits), right=np.packbits(bits).tobytes().hex())

    def save(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> Answers | None:
        """None where an older flyby made the run, or where it has no one model that all images were shown to."""
        return build(Answers, read_json(path), str(path)) if path.exists() else None

    def bits(self) -> npt.NDArray[np.bool_]:
        packed = np.frombuffer(bytes.fromhex(self.right), dtype=np.uint8)
        return np.unpackbits(packed, count=self.count).astype(bool)


@dataclass(frozen=True)
class Discord:
    """Of the ``images`` that two models judged, how many one alone had right."""

    first: int
    second: int
    images: int

    @classmethod
    def of(cls, one: Answers | None, other: Answers | None) -> Discord | None:
        """None where one of them is not known, or where they judged other images."""
        if one is None or other is None or (one.images, one.count) != (other.images, other.count):
            return None
        mine, theirs = one.bits(), other.bits()
        return cls(int((mine & ~theirs).sum()), int((theirs & ~mine).sum()), one.count)

    @property
    def difference(self) -> float:
        return (self.first - self.second) / self.images

    @property
    def p(self) -> float:
        return sign_test(self.first, self.second)

    def interval(self) -> tuple[float, float]:
        """Of the difference of the accuracies, 95 %."""
        tosses = self.first + self.second
        low, high = coin(self.first, tosses)
        return tosses / self.images * (2 * low - 1), tosses / self.images * (2 * high - 1)

    def facts(self) -> dict[str, Any]:
        low, high = self.interval()
        return {
            "difference": 100 * self.difference,
            "difference_low": 100 * low,
            "difference_high": 100 * high,
            "p": self.p,
            "right_alone": self.first,
            "wrong_alone": self.second,
        }

    def __str__(self) -> str:
        low, high = self.interval()
        shown = f"{100 * self.difference:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
        return f"{shown}, {self.first} : {self.second}, p {p_said(self.p)}"


def sign_test(above: int, below: int) -> float:
    """How likely a score as uneven is if above and below were tosses of a coin:
    2 sum_{k >= max} C(n, k) / 2^n, at the most 1."""
    n, term, total = above + below, 1, 0
    for k in range(min(above, below) + 1):  # C(n, k) = C(n, n - k), from the short end
        total += term
        term = term * (n - k) // (k + 1)
    return min(1.0, 2 * total / 2**n) if n else 1.0


def coin(heads: int, tosses: int) -> tuple[float, float]:
    """Clopper and Pearson's interval for a coin: the t at which so many heads or more, and so many or fewer, have a
    chance of 2.5 %, by halving; all of 0 to 1 where it was never tossed."""
    low = 0.0 if heads == 0 else _where(lambda t: at_least(heads, tosses, t) > TAIL)
    high = 1.0 if heads == tosses else _where(lambda t: at_least(heads + 1, tosses, t) > 1 - TAIL)
    return low, high


def at_least(heads: int, tosses: int, t: float) -> float:
    """P(so many heads or more) of a coin with heads at t."""
    k = np.arange(heads, tosses + 1)
    return float(np.exp(_choices(tosses)[heads:] + k * math.log(t) + (tosses - k) * math.log1p(-t)).sum())


@lru_cache(maxsize=8)
def _choices(n: int) -> npt.NDArray[np.float64]:
    """log C(n, k) for all k."""
    factorial = np.array([math.lgamma(k + 1) for k in range(n + 1)])
    return np.asarray(factorial[n] - factorial - factorial[::-1])


def _where(holds: Callable[[float], bool]) -> float:
    """The t in 0..1 from which on something holds."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return (low + high) / 2
