"""The statistic ``foreign``: leave-one-class-out calibration, what experts say of a class they pretend not to know.

For every class j that a site holds, its other experts c look at the site's own images of j as if j were unknown: real
images that are not c, where scraps are only made up. The table has the mean and the spread of those cosines for every
c, each class j weighing alike. A site with one class has no such images, and its table is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flyby.data.site import Site
from flyby.models import Network
from flyby.parcels.parcel import Manifest
from flyby.rng import generator
from flyby.statistics.calibration import cosines, picked_images
from flyby.statistics.extras import Entry, Extra, Sent

NEAR = 1 + 1e-3  # a cosine of float32 features may be a little over


@torch.no_grad()
def foreign(network: Network, site: Site, seed: int) -> dict[str, Tensor]:
    """``mean`` and ``std`` [C]: of the cosines of class c on the site's own images of its other classes."""
    images, labels = picked_images(network, site, generator(seed, site.id, "foreign"))
    network.eval()
    mean, std = leave_one_out(cosines(network, images), labels, len(site.class_names))
    return {"mean": mean.cpu(), "std": std.cpu()}


def leave_one_out(said: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mean and spread [C] of ``said`` [N, C] for every class c that is there, over the images of other classes."""
    member = (labels[:, None] == torch.arange(classes, device=labels.device)).double()  # [N, C]
    there = member.sum(0)
    means, squares = (member.T @ power / there.clamp_min(1)[:, None] for power in (said.double(), said.double() ** 2))
    others = (there > 0).double()[:, None] * (1 - torch.eye(classes, dtype=torch.float64, device=labels.device))
    count = others.sum(0)  # how many other classes each one was shown
    mean, square = ((others * table).sum(0) / count.clamp_min(1) for table in (means, squares))
    held = (there > 0) & (count > 0)
    spread = (square - mean**2).clamp_min(0).sqrt()
    return torch.where(held, mean, 0.0).float(), torch.where(held, spread, 0.0).float()


class Foreign(Extra):
    """Means of cosines lie in -1 .. 1, and their spread in 0 .. 1."""

    name = "foreign"
    cure = "train it with --set objective.send=[foreign]"

    def entries(self, manifest: Manifest, given: Sent) -> dict[str, Entry]:
        shape = (manifest.spec.classes,)
        return {
            "foreign.mean": Entry(torch.float32, shape, -NEAR, NEAR, axis=0),
            "foreign.std": Entry(torch.float32, shape, 0.0, NEAR, axis=0),
        }
