"""A method from outside the package: the server takes the median of the sites' weights [Yin et al., ICML 2018].

For each single weight, the sites' values theta_1 .. theta_K are sorted, the share ``trim`` is dropped at each end, and
the rest is averaged: ``trim`` 0.5 leaves the median, 0 the plain mean. One site with wild weights can then do little
harm.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from flyby.fusion import Fusion, FusionSettings, Inbox, Predictor, Server
from flyby.fusion.predictor import Single
from flyby.runs.methods import Method


class MedianSettings(FusionSettings):
    """What ``--set fusion.trim=0.2`` may say; anything else is refused with one sentence."""

    trim: float = Field(0.5, ge=0, le=0.5, description="share of the values dropped at each end")


class Median(Fusion):
    """The coordinate-wise (trimmed) median of the sites' weights."""

    name = "middle"
    paper = "Yin et al., ICML 2018"
    about = "coordinate-wise median of weights and BatchNorm buffers"
    settings_type = MedianSettings
    settings: MedianSettings

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        parcels.same_spec(self.name)
        sent = [parcel.weights for parcel in parcels]
        spec = parcels.manifests[0].spec
        network = spec.build()
        network.load_state_dict(
            {name: middle(torch.stack([weights[name] for weights in sent]), self.settings.trim) for name in sent[0]}
        )
        return Single([spec], parcels.class_names, [network])


def middle(values: Tensor, trim: float) -> Tensor:
    """The trimmed mean over dim 0; counters such as BatchNorm's num_batches_tracked give their largest value."""
    if not values.is_floating_point():
        return values.amax(0)
    sites = len(values)
    drop = min(int(trim * sites), (sites - 1) // 2)
    return values.sort(dim=0).values[drop : sites - drop].mean(0)


MINE = Method("mine", "supervised", "middle", "cross-entropy at the sites, median of their weights", Median.paper)
