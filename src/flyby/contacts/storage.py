"""What a node holds between rounds, and what it drops when there is no room for all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Evict = Literal["age", "score", "diversity"]


@dataclass(frozen=True)
class Held:
    """A model that a node received: whose, which version of it, made and received when (seconds), by which way."""

    origin: str
    version: int
    codec: str
    bytes: int
    made: float
    received: float
    counts: tuple[int, ...] = ()


Score = Callable[[str, Held], float]  # what a node thinks of a model that it holds: higher is better


def weakest(node: str, held: Sequence[Held], how: Evict, score: Score | None = None) -> Held:
    """The one to drop. ``age``: whose version is the oldest. ``score``: the worst on the node's validation images.
    ``diversity``: of the two whose classes are most alike, the one whose version is older. What is equal is decided by
    the time of arrival, the earliest first, and then by name."""
    last = {one: (one.made, one.received, one.origin) for one in held}
    if how == "score" and score is not None:
        worth = {one: score(node, one) for one in held}
        return min(held, key=lambda one: (worth[one], last[one]))
    if how == "diversity" and len(held) > 1:
        near = {one: max(_alike(one, other) for other in held if other is not one) for one in held}
        return min(held, key=lambda one: (-near[one], last[one]))
    return min(held, key=lambda one: last[one])


def _alike(one: Held, other: Held) -> float:
    """The cosine between two models' class counts; 0 where somebody does not tell them."""
    a, b = one.counts, other.counts
    if not a or len(a) != len(b) or not any(a) or not any(b):
        return 0.0
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
