"""One-shot FedAvg [McMahan et al., AISTATS 2017] and plain ensembles.

FedAvg: theta = sum_k (n_k / N) theta_k, over parameters AND BatchNorm buffers. Parcels are streamed: memory holds the
sum and one parcel, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from flyby.data.dataset import Dataset
from flyby.data.site import Part
from flyby.errors import BadInput
from flyby.fusion.base import Fusion, FusionSettings, Server, labelled, weights_of
from flyby.fusion.predictor import Ensemble, Predictor, Single
from flyby.models import Network
from flyby.models.features import pieces_of
from flyby.parcels.inbox import Inbox, unshifted


class AverageSettings(FusionSettings):
    weights: Literal["size", "uniform"] = Field("size", description="how sites count: by their images, or all alike")
    recalibrate: bool = Field(False, description="re-estimate BatchNorm statistics on unlabelled proxy data")


class FedAvg(Fusion):
    """The sample-weighted mean of all weights and buffers."""

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017"
    about = "sample-weighted mean of weights and BatchNorm buffers"
    settings_type = AverageSettings
    settings: AverageSettings

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        if len({m.spec for m in parcels.manifests}) > 1:  # sites that fell back to no shift are still of one kind
            parcels = Inbox(unshifted(item) for item in parcels)
        parcels.same_spec("fedavg")
        total: dict[str, Tensor] = {}
        stream = iter(parcels)
        for share in weights_of(parcels, self.settings.weights):
            _add(total, next(stream).weights, share)  # nothing here holds a parcel while the next one is read
        spec = parcels.manifests[0].spec
        network = spec.skeleton()
        network.load_state_dict(total, assign=True)
        if self.settings.recalibrate:
            if server.proxy is None or len(server.proxy) == 0:
                raise BadInput("fusion.recalibrate needs unlabelled images; give them with --proxy PATH")
            recalibrate(network, (spec.prepare(images) for images in _even_batches(server.proxy)))
        return Single([spec], parcels.class_names, [network])


def _add(total: dict[str, Tensor], weights: dict[str, Tensor], share: float) -> None:
    for name, value in weights.items():
        if not value.is_floating_point():  # counters such as num_batches_tracked: the largest
            total[name] = torch.maximum(total[name], value) if name in total else value.clone()
        elif name in total:
            total[name].add_(value, alpha=share)
        else:
            total[name] = value * share


def _even_batches(proxy: Dataset, most: int = 256) -> Iterator[Tensor]:
    """Batches of nearly one size: each counts the same in the average, so a remainder of one image must not be a
    batch."""
    for rows in np.array_split(np.arange(len(proxy)), -(-len(proxy) // most)):
        yield torch.from_numpy(np.array(proxy.images[rows]))


@torch.no_grad()
def recalibrate(network: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set every BatchNorm's running statistics to the cumulative average over ``batches``."""
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d | nn.BatchNorm1d)]
    momenta = [m.momentum for m in norms]
    for m in norms:
        m.reset_running_stats()
        m.momentum = None
    network.train()
    for x in batches:
        network(x)
    network.eval()
    for m, momentum in zip(norms, momenta, strict=True):
        m.momentum = momentum


class EnsembleSettings(FusionSettings):
    mean: Literal["logits", "probabilities"] = Field(
        "probabilities", description="what is averaged: probabilities, or logits"
    )
    weights: Literal["size", "uniform", "learned"] = Field(
        "uniform", description="learned: those under which labelled --proxy images are likeliest; for probabilities"
    )


class EnsembleFusion(Fusion):
    """All models kept; their outputs averaged."""

    name = "ensemble"
    about = "mean of all models' probabilities (or logits); architectures may differ"
    heterogeneous = True
    softmax = True
    settings_type = EnsembleSettings
    settings: EnsembleSettings

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        networks, learned = parcels.networks(), self.settings.weights == "learned"
        specs = [m.spec for m in parcels.manifests]
        judges = self._judges(parcels, server) if learned else None
        shares = likeliest(networks, judges) if judges else weights_of(parcels, self.settings.weights)
        mean, held = self.settings.mean, parcels.held
        return Ensemble(specs, parcels.class_names, networks, mean=mean, weights=shares, held=held)

    def _judges(self, parcels: Inbox, server: Server) -> Part:
        if self.settings.mean == "logits":
            raise BadInput("fusion.weights=learned is for the mean of probabilities; leave out fusion.mean=logits")
        if server.proxy is None or len(server.proxy) == 0:
            raise BadInput(
                "fusion.weights=learned needs images with labels that can be believed; give them with --proxy PATH"
            )
        return labelled(server.proxy, parcels)


@torch.no_grad()
def likeliest(networks: Iterable[Network], judges: Part, steps: int = 10_000) -> list[float]:
    """The weights w on the simplex with the largest sum_n log sum_k w_k p_k(y_n | x_n), by expectation maximisation:
    w_k <- mean_n of client k's share in what the mixture says of the right class. The problem is convex, and every step
    climbs."""
    told = []
    for network in networks:
        scores = torch.cat([network(network.spec.prepare(part)) for part in pieces_of(network, judges.images)])
        told.append(scores.double().log_softmax(1).gather(1, judges.labels[:, None])[:, 0])
    each = torch.stack(told)  # [K, N]
    weights = torch.full((len(each),), 1 / len(each), dtype=torch.float64)
    for _ in range(steps):
        before, weights = weights, (each + weights.log()[:, None]).softmax(0).mean(1)
        if float((weights - before).abs().max()) < 1e-7:
            break
    return [float(w) for w in weights]
