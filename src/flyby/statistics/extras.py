"""What may travel beside weights, and what it must look like: one declaration for each kind of extra.

A kind says which tensors belong to it, of which type and shape and in which range (for this network and these classes),
which dimension runs over the classes, how they must agree with each other, what linear algebra must hold, what its
numbers are compared with those of other sites by, and what they make of labelled images. Rules read extras through
:func:`sent` alone, so none meets a tensor that was not checked; a gate asks :func:`examine` before anything is fused.
Extras of other kinds are never read, and so they are let in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flyby.data.classes import spread
from flyby.data.site import Part
from flyby.errors import BadInput
from flyby.models import Network
from flyby.parcels import plausible
from flyby.parcels.codecs import DTYPE_NAMES
from flyby.parcels.parcel import Manifest, Parcel

LARGEST = 1e9  # beyond every honest number, and its square is still one
# Rounding to float16 moves an eigenvalue by about 2^-11 of the longest row; this is eight times that.
ROUNDING = 2.0**-8

Sent = Mapping[str, Tensor]
Sizes = dict[str, float]


@dataclass(frozen=True)
class Entry:
    """One tensor of an extra: its type, its shape and the range of its numbers; ``axis`` is the dimension that runs
    over the classes, if one does, along which it is put into another order of them (0 for a class that the sender does
    not know)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float = -LARGEST
    high: float = LARGEST
    axis: int | None = None


class Extra(ABC):
    """One kind of extra. Its tensors are called ``NAME`` or ``NAME.REST``, and are passed on by those whole names."""

    name: ClassVar[str]
    cure: ClassVar[str]  # what to do where a parcel does not have it
    counts: ClassVar[bool] = False  # whether it tells how many images of each class there are, exactly

    def onto(self, manifest: Manifest, given: Sent, source: Sequence[int]) -> dict[str, Tensor]:
        """The same for another list of classes, of which class c is the sender's ``source[c]``, or none (-1): along
        the ``axis`` that each entry declares."""
        entries = self.entries(manifest, given)
        axes = {name: entries[name].axis if name in entries else None for name in given}
        return {
            name: value if (axis := axes[name]) is None else spread(value, source, axis)
            for name, value in given.items()
        }

    @abstractmethod
    def entries(self, manifest: Manifest, given: Sent) -> dict[str, Entry]:
        """All the tensors that belong to it, no more and no fewer. Where the sender may choose (a rank, a precision),
        ``given`` shows what it chose."""

    def agree(self, manifest: Manifest, given: Sent) -> str:
        """What is wrong with numbers that are each in range; empty where nothing is."""
        return ""

    def sound(self, manifest: Manifest, given: Sent) -> str:
        """The same, for what takes linear algebra to see: asked once, by the gate, where the rule will use it."""
        return ""

    def sizes(self, manifest: Manifest, given: Sent) -> Sizes:
        """Root mean squares that are compared with those of other sites with the same network."""
        return {}

    def answers(self, network: Network, given: Sent, images: Tensor) -> tuple[Tensor, Sequence[int]] | None:
        """The classes [N] that the extra alone gives to images, and those it claims to know; None where it has no
        opinion."""
        return None


def given(item: Parcel, kind: Extra) -> dict[str, Tensor]:
    """The parcel's tensors that call themselves this kind."""
    return {name: value for name, value in item.extras.items() if name == kind.name or name.startswith(f"{kind.name}.")}


def sent(item: Parcel, kind: Extra) -> dict[str, Tensor]:
    """The tensors of one kind that a parcel carries, each of the declared type, shape and range; else BadInput."""
    tensors, manifest = given(item, kind), item.manifest
    if not tensors:
        raise BadInput(f"{manifest.sender} sent no {kind.name}; {kind.cure}")
    try:
        wrong = _misfit(kind.entries(manifest, tensors), tensors) or kind.agree(manifest, tensors)
    except BadInput as error:  # its description is no description
        wrong = str(error)
    if wrong:
        raise BadInput(_refusal(item, kind, wrong))
    return tensors


def examine(item: Parcel, kind: Extra, used: bool, validation: Part | None, device: torch.device | str) -> Sizes:
    """What a gate asks of one kind of extra: BadInput where it cannot be what it says, else its sizes. Algebra and
    images only where a rule will have it ``used``."""
    tensors, manifest = sent(item, kind), item.manifest
    wrong = kind.sound(manifest, tensors) if used else ""
    if wrong:
        raise BadInput(_refusal(item, kind, wrong))
    if used and validation is not None:
        found = kind.answers(item.network(device), tensors, validation.images.to(device))
        if found is not None:
            labels, (answers, claimed) = validation.labels.cpu(), found
            told = manifest.counts or [1] * manifest.spec.classes
            counts = [max(1, told[c]) if c in claimed else 0 for c in range(manifest.spec.classes)]
            judged = plausible.judge(answers.cpu() == labels, labels, counts, manifest.spec.classes, lenient=True)
            if not judged.passes:
                raise BadInput(_refusal(item, kind, judged.reason))
    return kind.sizes(manifest, tensors)


def _refusal(item: Parcel, kind: Extra, wrong: str) -> str:
    return f"the {kind.name} that {item.manifest.sender} sent cannot be used: {wrong}; ask it to train again"


def _misfit(entries: Mapping[str, Entry], tensors: Sent) -> str:
    for name in sorted(entries.keys() | tensors.keys()):
        if name not in tensors:
            return f"there is no {name}"
        if name not in entries:
            return f"{name} is no part of it"
        entry, tensor = entries[name], tensors[name]
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            return f"{name} is {_form(tensor.dtype, tensor.shape)} and must be {_form(entry.dtype, entry.shape)}"
        if not tensor.numel():
            return f"{name} is empty"
        low, high = (float(value) for value in torch.aminmax(tensor))
        if not (entry.low <= low and high <= entry.high):  # NaN is within nothing
            return f"{name} has numbers outside {entry.low:g} .. {entry.high:g}"
    return ""


def _form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{DTYPE_NAMES.get(dtype, str(dtype))} {list(shape)}"


def rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def positive(matrices: Tensor, unit: float | None = None) -> bool:
    """Whether symmetric matrices ``[groups, n, n]`` have no eigenvalue below zero, but for rounding of numbers of size
    ``unit`` (by default: the longest row)."""
    longest = matrices.norm(dim=2).amax(1) if unit is None else torch.full((len(matrices),), unit)
    scaled = matrices / (ROUNDING * longest).clamp_min(torch.finfo(matrices.dtype).tiny)[:, None, None]
    scaled.diagonal(dim1=1, dim2=2).add_(1.0)
    return not bool(torch.linalg.cholesky_ex(scaled).info.any())
