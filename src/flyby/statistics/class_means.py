"""The statistic ``class-means``: where a site's own images of each class lie in its feature space, for FedProto and
FedTGP.

m_c = (1 / n_c) sum over the site's training images of class c of f(x), unnormalised, seen as they are (no
augmentation). Classes the site lacks are not sent, so the rows tell which classes it holds; the mean of a class with
one image is that image's feature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyby.data.site import Site
from flyby.models import Network
from flyby.models.features import beyond, pieces_of, pooled_of
from flyby.parcels.parcel import Manifest
from flyby.statistics.extras import Entry, Extra, Sent, Sizes, rms


@torch.no_grad()
def class_means(network: Network, site: Site, seed: int) -> dict[str, Tensor]:
    """``means`` [H, d], one row for each of the H classes the site holds, and ``classes`` [H], which they are, in
    rising order."""
    device = next(network.parameters()).device
    classes = len(site.class_names)
    labels = site.train.labels.to(device)
    # A long sum: float32 would lose its last digits.
    sums = torch.zeros(classes, network.feature_dim, dtype=torch.float64, device=device)
    network.eval()
    pooled = pooled_of(network, site.train.images, site.id)
    start = 0
    for piece in pieces_of(network, site.train.images) if pooled is None else torch.split(pooled, 512):
        piece = piece.to(device)
        seen = network.features(network.spec.prepare(piece)) if pooled is None else beyond(network, piece)
        sums.index_add_(0, labels[start : start + len(piece)], seen.double())
        start += len(piece)
    counts = torch.bincount(labels, minlength=classes)
    held = counts.nonzero()[:, 0]
    return {"means": (sums[held] / counts[held, None]).float(), "classes": held}


class ClassMeans(Extra):
    """A mean in feature space for every class that the site holds. By themselves they classify: the nearest one is the
    answer."""

    name = "class-means"
    cure = "train it with --set objective.send=[class-means]"

    def entries(self, manifest: Manifest, given: Sent) -> dict[str, Entry]:
        classes, held = manifest.spec.classes, given.get("class-means.classes", torch.empty(0)).numel()
        return {
            "class-means.means": Entry(torch.float32, (held, manifest.spec.feature_dim())),
            "class-means.classes": Entry(torch.int64, (held,), 0, classes - 1),
        }

    def onto(self, manifest: Manifest, given: Sent, source: Sequence[int]) -> dict[str, Tensor]:
        rows = {c: row for row, c in enumerate(given["class-means.classes"].tolist())}
        held = [(new, rows[old]) for new, old in enumerate(source) if old in rows]
        picked = torch.tensor([row for _, row in held], dtype=torch.int64)
        classes = torch.tensor([new for new, _ in held], dtype=torch.int64)
        return {"class-means.means": given["class-means.means"][picked], "class-means.classes": classes}

    def agree(self, manifest: Manifest, given: Sent) -> str:
        rising = given["class-means.classes"].diff() > 0
        return "" if bool(rising.all()) else "class-means.classes does not rise"

    def sizes(self, manifest: Manifest, given: Sent) -> Sizes:
        return {"class-means.means": rms(given["class-means.means"])}

    @torch.no_grad()
    def answers(self, network: Network, given: Sent, images: Tensor) -> tuple[Tensor, Sequence[int]]:
        classes = given["class-means.classes"].to(images.device)
        means = given["class-means.means"].to(images.device)
        pieces = [network.features(network.spec.prepare(piece)).float() for piece in pieces_of(network, images)]
        return classes[torch.cdist(torch.cat(pieces), means).argmin(1)], classes.tolist()
