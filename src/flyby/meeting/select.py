"""Top-K selection, FOL's Algorithm 2: by validation accuracy (eq. 7), ties at the cutoff by cosine similarity to the
own model (eq. 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def top_k(scores: Sequence[float], k: int, closeness: Callable[[int], float]) -> list[int]:
    """Places of the K best. All above the K-th score are in; those equal to it fill what is left, the closest to the
    own model first.

    ``closeness(place)`` is asked only for the tied, and only where they are more than the room left; the order of
    ``scores`` decides what even that leaves equal.
    """
    k = min(k, len(scores))
    if k == 0:
        return []
    ranked = sorted(range(len(scores)), key=lambda place: -scores[place])
    cutoff = scores[ranked[k - 1]]
    above = [place for place in ranked if scores[place] > cutoff]
    tied = [place for place in ranked if scores[place] == cutoff]
    if len(above) + len(tied) > k:
        near = {place: closeness(place) for place in tied}
        tied.sort(key=lambda place: -near[place])
    return above + tied[: k - len(above)]
