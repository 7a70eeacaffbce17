"""Server rules that a minority of bad parcels can move only so far: medians and trimmed means, of weights or of
answers.

For every single weight the clients' values are sorted, floor(trim K) are dropped at each end and the rest is averaged:
``median`` drops all but the middle one (or two), ``trimmed`` a share [Yin et al., ICML 2018]. ``clipped`` is the mean
with every client's distance to that median cut down to the usual one: m + sum_k q_k min(1, t / ||theta_k - m||)
(theta_k - m), t = median_k ||theta_k - m||, tensor by tensor (one step of centred clipping [Karimireddy et al., ICML
2021]; the median stands where many rounds would have the last global model). ``ensemble-median`` and
``ensemble-trimmed`` do the same with the models' answers. None of them believes what a client says of its size.

Memory holds K copies of a portion of the weights; where there are more, the parcels are read several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import floor, prod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from flyby.errors import unknown
from flyby.fusion.base import Fusion, FusionSettings, Server
from flyby.fusion.predictor import Predictor, Single
from flyby.fusion.weights.layers import PORTION
from flyby.models import ModelSpec, Network
from flyby.models.shelf import Shelf
from flyby.parcels.inbox import Inbox

Piece = tuple[str, int, int]  # a tensor's name and the range of its numbers


def middle(values: Tensor, trim: float) -> Tensor:
    """The mean over dim 0 of what is left when floor(trim K) values are dropped at each end; .5 leaves the median."""
    count = len(values)
    drop = min(floor(trim * count + 1e-9), (count - 1) // 2)
    return values.sort(dim=0).values[drop : count - drop].mean(0)


def middle_of_those(said: Tensor, trim: float, held: Tensor) -> Tensor:
    """The same of what members say [K, N, C], for every class among those who know it (``held`` [K, C])."""
    count, rank = held.sum(0), torch.arange(len(held), device=held.device)[:, None]
    drop = torch.minimum((trim * count + 1e-9).floor().long(), (count - 1) // 2)
    kept = ((rank >= drop) & (rank < count - drop))[
        :, None
    ]  # no shape depends on who holds what, so it can be exported
    ordered = said.masked_fill(~held[:, None], torch.inf).sort(dim=0).values
    return ordered.masked_fill(~kept, 0.0).sum(0) / kept.sum(0).clamp_min(1)


def coordinatewise(parcels: Inbox, combine: Callable[[Tensor], Tensor], portion: int = PORTION) -> dict[str, Tensor]:
    """``combine`` [K, n] -> [n] over every weight and buffer; of counters such as num_batches_tracked the largest."""
    found: dict[str, Tensor] = {}
    for pieces in _portions(parcels.manifests[0].spec, max(1, portion // len(parcels))):
        values = [
            [item.weights[name].flatten()[start:stop].clone() for name, start, stop in pieces] for item in parcels
        ]
        for i, (name, start, stop) in enumerate(pieces):
            column = torch.stack([each[i] for each in values])
            answer = combine(column) if column.is_floating_point() else column.amax(0)
            whole = found.setdefault(name, torch.empty(_length(parcels.manifests[0].spec, name), dtype=answer.dtype))
            whole[start:stop] = answer
    return {name: value.reshape(parcels.manifests[0].spec.shapes()[name][0]) for name, value in found.items()}


def _length(spec: ModelSpec, name: str) -> int:
    return prod(spec.shapes()[name][0])


def _portions(spec: ModelSpec, size: int) -> Iterator[list[Piece]]:
    """All weights in order, in lists of at most so many bytes; a large tensor in pieces."""
    most = max(1, size // 8)
    pieces: list[Piece] = []
    room = most
    for name in spec.shapes():
        start, length = 0, _length(spec, name)
        while start < length:
            stop = min(length, start + room)
            pieces.append((name, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield pieces
                pieces, room = [], most
    if pieces:
        yield pieces


class Median(Fusion):
    """The coordinate-wise median of the clients' weights."""

    name = "median"
    paper = "Yin et al., ICML 2018"
    about = "coordinate-wise median of weights and BatchNorm buffers"

    def row_shares(self, parcels: Inbox) -> None:
        return None  # a mean would hand a liar's row on to all who do not know the class

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        parcels.same_spec(self.name)
        spec = parcels.manifests[0].spec
        network = spec.skeleton()
        network.load_state_dict(self.combined(parcels), assign=True)
        return Single([spec], parcels.class_names, [network])

    def combined(self, parcels: Inbox) -> dict[str, Tensor]:
        return coordinatewise(parcels, lambda values: middle(values, 0.5))


class TrimSettings(FusionSettings):
    trim: float = Field(0.2, ge=0, le=0.5, description="share of the values dropped at each end")


class Trimmed(Median):
    """The coordinate-wise trimmed mean: bears up to the share ``trim`` of bad clients."""

    name = "trimmed"
    about = "coordinate-wise mean of weights, the largest and the smallest left out"
    settings_type = TrimSettings
    settings: TrimSettings

    def combined(self, parcels: Inbox) -> dict[str, Tensor]:
        return coordinatewise(parcels, lambda values: middle(values, self.settings.trim))


class Clipped(Median):
    """The mean of all weights, nobody further from the median than the median client is."""

    name = "clipped"
    paper = "Karimireddy et al., ICML 2021"
    about = "mean of weights, each client's distance to the median cut down to the usual one"

    def combined(self, parcels: Inbox) -> dict[str, Tensor]:
        centre = super().combined(parcels)
        floats = [name for name, value in centre.items() if value.is_floating_point()]
        far = [[(item.weights[name] - centre[name]).norm() for name in floats] for item in parcels]
        away = torch.stack([torch.stack(each) for each in far])  # [K, tensors]
        shares = (middle(away, 0.5) / away.clamp_min(1e-30)).clamp(max=1) / len(parcels)
        answer = {name: value.clone() for name, value in centre.items()}
        for item, share in zip(parcels, shares, strict=True):
            for name, q in zip(floats, share, strict=True):
                answer[name] += q * (item.weights[name] - centre[name])
        return answer


class RobustEnsemble(Predictor):
    """All models kept; of their answers about an image and a class the trimmed mean. Returns log-scores."""

    kind = "robust-ensemble"
    streams = True

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        class_names: Sequence[str],
        networks: Sequence[Network] | Shelf | None = None,
        *,
        mean: str = "probabilities",
        trim: float = 0.5,
        held: Tensor | None = None,
    ) -> None:
        if mean not in ("logits", "probabilities"):
            raise unknown("ensemble mean", mean, ("logits", "probabilities"))
        super().__init__(specs, class_names, networks, mean=mean, trim=trim)
        self.mean, self.trim = mean, trim
        self.hold(held)

    def voice(self, k: int, network: Network, features: Tensor) -> Tensor:
        logits = super().voice(k, network, features)
        return logits if self.mean == "logits" else logits.softmax(-1)

    def combine(self, voices: Sequence[Tensor], images: Tensor) -> Tensor:
        said = torch.stack(tuple(voices))
        scores = middle(said, self.trim) if self.held is None else middle_of_those(said, self.trim, self.held)
        return scores if self.mean == "logits" else scores.clamp_min(1e-12).log()


class EnsembleMedianSettings(FusionSettings):
    mean: Literal["logits", "probabilities"] = Field(
        "probabilities", description="what the median is taken of: probabilities, or logits"
    )


class EnsembleMedian(Fusion):
    """All models kept; the median of what they say about each class."""

    name = "ensemble-median"
    about = "median of all models' probabilities (or logits); architectures may differ"
    heterogeneous = True
    settings_type = EnsembleMedianSettings
    settings: EnsembleMedianSettings
    softmax = True
    trim = 0.5

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        specs = [m.spec for m in parcels.manifests]
        trim = getattr(self.settings, "trim", self.trim)
        networks, held = parcels.networks(), parcels.held
        return RobustEnsemble(specs, parcels.class_names, networks, mean=self.settings.mean, trim=trim, held=held)


class EnsembleTrimmedSettings(EnsembleMedianSettings, TrimSettings):
    pass


class EnsembleTrimmed(EnsembleMedian):
    name = "ensemble-trimmed"
    about = "mean of all models' probabilities, the largest and the smallest left out"
    settings_type = EnsembleTrimmedSettings
