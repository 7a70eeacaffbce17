"""What the rules that work on weights share: each layer as all sites have it, with its statistics, and parcels revised
on their way in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from flyby.parcels.codecs import DTYPES
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import EXTRA, Parcel
from flyby.statistics.catalogue import EXTRAS
from flyby.statistics.extras import sent
from flyby.statistics.kfac import Layer, join, matrix_layers, under

PORTION = 2**31  # bytes of statistics held at once; where there are more, the parcels are read several times


@dataclass(frozen=True)
class Gathered:
    """One layer as all sites have it: its matrices [W | b], ``[groups, outputs, inputs]``, and its statistics as they
    were sent."""

    name: str
    layer: Layer
    matrices: list[Tensor]
    statistics: list[dict[str, Tensor]]

    @property
    def bytes(self) -> int:
        """The bytes of the statistics at the site that sends the most."""
        return max(sum(tensor.nbytes for tensor in each.values()) for each in self.statistics)


def layer_by_layer(parcels: Inbox, statistic: str) -> Iterator[Gathered]:
    """Every linear and convolution layer in turn. Memory holds the statistics, as they were sent, of as many layers as
    fit ``PORTION``."""
    layers = matrix_layers(parcels.manifests[0].spec.skeleton())
    for names in _portions(parcels, statistic, list(layers)):
        gathered = {name: Gathered(name, layers[name], [], []) for name in names}
        for item in parcels:
            statistics = sent(item, EXTRAS[statistic])
            for name, layer in gathered.items():
                layer.matrices.append(join(item.weights, name, layer.layer))
                layer.statistics.append(under(f"{statistic}.{name}", statistics))
        while names:
            yield gathered.pop(names.pop(0))


def _portions(parcels: Inbox, statistic: str, names: list[str]) -> Iterator[list[str]]:
    portion: list[str] = []
    total = 0
    for name in names:
        start = f"{EXTRA}{statistic}.{name}."
        infos = [info for m in parcels.manifests for key, info in m.tensors.items() if key.startswith(start)]
        size = sum(math.prod(info.shape) * DTYPES[info.dtype].itemsize for info in infos)
        if portion and total + size > PORTION:
            yield portion
            portion, total = [], 0
        portion.append(name)
        total += size
    yield portion


def weighted(shares: Sequence[float], tensors: Iterable[Tensor]) -> Tensor:
    """sum_k q_k T_k, holding one T_k at a time."""
    terms = zip(shares, tensors, strict=True)
    q, first = next(terms)
    total = q * first
    for q, tensor in terms:
        total.add_(tensor, alpha=q)
    return total


class Revised(Inbox):
    """The same parcels, with their weights changed on their way in, so that ``fedavg`` finishes what another rule
    began."""

    def __init__(self, parcels: Inbox, revise: Callable[[Parcel], dict[str, Tensor]]) -> None:
        self.manifests, self.sources = parcels.manifests, parcels.sources
        self._parcels, self._revise = parcels, revise

    def read(self, place: int) -> Parcel:
        item = self._parcels.read(place)
        return dataclasses.replace(item, weights=self._revise(item), revised=True)
