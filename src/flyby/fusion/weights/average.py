"""One-shot FedAvg [McMahan et al., AISTATS 2017] and plain ensembles.

FedAvg: theta = sum_k (n_k / N) theta_k, over parameters AND BatchNorm buffers; leaving the buffers out is why published
one-shot FedAvg often reads like chance. Parcels are streamed: memory holds the sum and one parcel, however many there
are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from flyby.data.dataset import Dataset
from flyby.errors import BadInput
from flyby.fusion.base import Fusion, FusionSettings, Server, weights_of
from flyby.fusion.predictor import Ensemble, Predictor, Single
from flyby.parcels.inbox import Inbox, unshifted


class AverageSettings(FusionSettings):
    weights: Literal["size", "uniform"] = "size"
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
    mean: Literal["logits", "probabilities"] = "probabilities"
    weights: Literal["size", "uniform"] = "uniform"


class EnsembleFusion(Fusion):
    """All models kept; their outputs averaged."""

    name = "ensemble"
    about = "mean of all models' probabilities (or logits); architectures may differ"
    heterogeneous = True
    settings_type = EnsembleSettings
    settings: EnsembleSettings

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        networks = parcels.networks()
        specs = [m.spec for m in parcels.manifests]
        return Ensemble(
            specs,
            parcels.class_names,
            networks,
            mean=self.settings.mean,
            weights=weights_of(parcels, self.settings.weights),
        )
