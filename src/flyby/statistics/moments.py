"""The statistic ``moments``: the mean and the spread of each feature over a site's own images, for ``standardised``.

Features are raw (neither normalised nor augmented); those of a network that knows a shift are taken in all its ways
together. ``moments:of=scraps`` measures on inputs of no class instead (see ``calibration``). Two numbers a dimension,
each a mean over all images: nothing is sent of a single one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flyby.data.site import Site
from flyby.errors import unknown
from flyby.models import Network
from flyby.models.features import shown_of
from flyby.parcels.parcel import Manifest
from flyby.rng import generator
from flyby.statistics.calibration import scraps
from flyby.statistics.extras import Entry, Extra, Sent, Sizes, rms

MOST = 4096  # images; more change nothing that a rule could see


def moments(network: Network, site: Site, seed: int, *, of: Literal["own", "scraps"] = "own") -> dict[str, Tensor]:
    """``mean`` and ``std`` [d] of the features of the site's own images (of at most ``MOST``, drawn from the seed)."""
    if of not in ("own", "scraps"):
        raise unknown("source of moments", of, ("own", "scraps"))
    rng = generator(seed, site.id, "moments")
    picked = torch.randperm(len(site.train), generator=rng)[:MOST].to(site.train.images.device)
    images = site.train.images[picked]
    mean, std = moments_of(network, scraps(images, rng) if of == "scraps" else images)
    return {"mean": mean, "std": std}


@torch.no_grad()
def moments_of(network: Network, images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [d] of each feature over images [N, H, W, C], and over the ways of a shift."""
    network.eval()
    seen = shown_of(network, images).flatten(0, -2).double()  # a long sum
    return seen.mean(0).float(), seen.std(0, correction=0).float()


class Moments(Extra):
    """No spread is negative."""

    name = "moments"
    cure = "train it with --set objective.send=[moments], or take fusion.moments=unlabelled"

    def entries(self, manifest: Manifest, given: Sent) -> dict[str, Entry]:
        shape = (manifest.spec.skeleton().feature_dim,)
        return {"moments.mean": Entry(torch.float32, shape), "moments.std": Entry(torch.float32, shape, 0.0)}

    def sizes(self, manifest: Manifest, given: Sent) -> Sizes:
        return {name: rms(given[name]) for name in ("moments.mean", "moments.std")}
