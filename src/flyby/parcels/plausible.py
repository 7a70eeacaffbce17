"""Whether a model can be what it says it is: norms, answers and accuracy, as functions of a parcel.
``flyby.parcels.gate`` decides by them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from flyby.data.site import Part
from flyby.errors import BadInput
from flyby.models.cost import Limits, at_once
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.rng import generator

PROBE = 32  # noise images on which every network must answer
FEWEST = 8  # labelled images by which a model can be judged at all
# Share of what is above chance. Random weights reach a few hundredths more than chance: images of a class are alike.
KNOWN = 0.2
OTHERS = 3  # models of the same architecture without which a median says nothing
# They follow a site's images, a variance even with the square of their contrast.
STATISTICS = ("running_mean", "running_var")


# What a gate asks of a parcel's extras, given labelled images or none: BadInput where they cannot be what they say,
# else root mean squares to compare with those of others (``flyby.statistics`` knows every kind).
Beside = Callable[[Parcel, Part | None, torch.device | str], Mapping[str, float]]


class Policy(Limits):
    """The limits of a gate: those of every stranger's network, and its own. The norm bounds are several times what
    honest sites showed at their most uneven (docs/signing.md)."""

    max_bytes: Annotated[int, Field(gt=0)] = parcel.MAX_BYTES
    max_parcels: Annotated[int, Field(gt=0)] = 10_000
    max_total: Annotated[int, Field(gt=0)] = 64 << 30
    require_signed: bool = False
    max_rms: Annotated[float, Field(gt=0)] = 1e4
    max_logit: Annotated[float, Field(gt=0)] = 1e4
    total_factor: Annotated[float, Field(gt=1)] = 5.0
    tensor_factor: Annotated[float, Field(gt=1)] = 10.0
    statistics_factor: Annotated[float, Field(gt=1)] = 100.0
    tensor_floor: Annotated[float, Field(ge=0)] = 0.05
    cost_factor: Annotated[int, Field(gt=1)] = 16
    cost_floor: Annotated[int, Field(gt=0)] = 64 << 20


class Norms(NamedTuple):
    """The Euclidean norm of all weights, and the root mean square of each tensor of them."""

    total: float
    rms: dict[str, float]


def norms(item: Parcel, label: str, policy: Policy) -> Norms:
    """The norms of a parcel's weights; a tensor, of the extras too, that is beyond the absolute bound is BadInput."""
    rms: dict[str, float] = {}
    squares = 0.0
    for name, tensor in [*item.weights.items(), *((parcel.EXTRA + n, t) for n, t in item.extras.items())]:
        if tensor.is_floating_point() and tensor.numel():
            # In pieces: in float64 a half float is four times as large.
            pieces = torch.split(tensor.reshape(-1), 1 << 18)
            norm = math.hypot(*(float(torch.linalg.vector_norm(piece, dtype=torch.float64)) for piece in pieces))
            value = norm / math.sqrt(tensor.numel())
            if not value <= policy.max_rms:
                raise BadInput(
                    f"{label}: tensor {name!r} has a root mean square of {value:.3g}, beyond {policy.max_rms:g}; train"
                    " it again"
                )
            if name in item.weights:
                rms[name] = value
                squares += norm**2
    return Norms(math.sqrt(squares), rms)


def outliers(group: Mapping[str, Norms], policy: Policy) -> dict[str, str]:
    """Of models of one architecture, those whose norms are far above the median of the others, and why. Less than half
    can be liars at that."""
    if len(group) <= OTHERS:
        return {}
    found: dict[str, str] = {}
    totals = sorted(one.total for one in group.values())
    by_tensor = {name: sorted(one.rms[name] for one in group.values()) for name in next(iter(group.values())).rms}
    for key, one in group.items():
        typical = _median_of_others(totals, one.total)
        if one.total > policy.total_factor * typical:
            found[key] = f"the norm of its weights is {one.total:.3g} where others have {typical:.3g}"
        for name, value in one.rms.items():
            factor = policy.statistics_factor if name.endswith(STATISTICS) else policy.tensor_factor
            typical = _median_of_others(by_tensor[name], value)
            if key not in found and value > factor * max(typical, policy.tensor_floor):
                found[key] = f"tensor {name!r} has a root mean square of {value:.3g} where others have {typical:.3g}"
    return found


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    place, rest = bisect.bisect_left(ordered, own), len(ordered) - 1
    low, high = (rest - 1) // 2, rest // 2
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2


@torch.no_grad()
def answers(item: Parcel, images: Tensor | None, device: torch.device | str, policy: Policy) -> Tensor:
    """The classes that a parcel's network gives to images, or to seeded noise where there are none; its logits must be
    finite and within range on both."""
    spec, network = item.manifest.spec, item.network(device, shared=True)
    few = at_once(spec, 256)
    noise = spec.noise(min(PROBE, few), generator("admission", "probe"))
    classes = torch.empty(0)
    for batch in [noise] if images is None else [noise, images]:
        logits = torch.cat([network(spec.prepare(piece.to(device))).float().cpu() for piece in torch.split(batch, few)])
        within = float(logits.abs().max()) <= policy.max_logit  # NaN is not below anything
        if logits.shape[1:] != (spec.classes,) or not within:
            raise BadInput(f"its answers are not finite or beyond {policy.max_logit:g}; its training diverged")
        classes = logits.argmax(1)
    return classes


class Judgement(NamedTuple):
    """Whether a model knows clearly more than chance of the classes it claims: its mean recall over them, and on how
    many images."""

    passes: bool
    recall: float
    judged: int

    @property
    def reason(self) -> str:
        return (
            f"it knows no more than chance of the classes it claims (recall {self.recall:.2f} on {self.judged} images)"
        )


def judge(
    right: Tensor, labels: Tensor, counts: Sequence[int] | None, classes: int, *, lenient: bool = False
) -> Judgement:
    """A model is let through if its recall over the P classes that it claims and the images show beats chance, 1/P, by
    a fifth of what there is above it and by two standard errors. Recall is the plain mean over classes or the mean
    weighted by its counts, whichever is better: a site with 99 images of one class and one of another has learned the
    one. ``lenient`` also lets through what cannot be judged fairly: a model of whose training images less than half are
    of classes that are shown; and without exact counts one class known is enough."""
    claimed = [c for c in range(classes) if counts is None or counts[c] > 0]
    shown = [c for c in claimed if bool((labels == c).any())]
    recalls = torch.tensor([float(right[labels == c].double().mean()) for c in shown], dtype=torch.float64)
    judged = sum(int((labels == c).sum()) for c in shown)
    if judged < FEWEST or classes < 2:  # who knows one class has nothing to tell it from
        return Judgement(True, float(recalls.mean()) if shown else math.nan, judged)
    weights = torch.tensor([1 if counts is None else counts[c] for c in shown], dtype=torch.float64)
    best = max(float(recalls.mean()), float((recalls * weights).sum() / weights.sum()))
    if lenient and (counts is None or max(counts) <= 1):
        best = max(best, float(recalls.max()))
    chance = 1 / (len(shown) if len(shown) > 1 else classes)
    margin = max(KNOWN * (1 - chance), 2 * math.sqrt(chance * (1 - chance) / judged))
    unseen = lenient and counts is not None and 2 * float(weights.sum()) < sum(counts)
    return Judgement(best > chance + margin or unseen, best, judged)
