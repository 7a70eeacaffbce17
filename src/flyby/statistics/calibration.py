"""What an expert knows about its own certainty, measured at the site on its own images: three scalars per class.

For every class a site holds: the mean cosine between features and class direction on its own images of that class, and
its mean and spread on scraps, inputs that are of no class (two of its images mixed, halves of two joined, patches
shuffled). Whoever cannot tell a class from scraps should say nothing about it. No image, and nothing computed from a
single image, leaves the site. Which scraps serve best was chosen on validation images held out of the training data
(docs/experts.md has the table).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyby.data.site import Site
from flyby.models import Network
from flyby.models.features import Rows, pieces_of
from flyby.models.heads import cosine
from flyby.parcels.parcel import Manifest
from flyby.rng import generator
from flyby.statistics.extras import Entry, Extra, Sent

PER_CLASS = 200
LEAST_GAP = 1e-3
OWN, SCRAP, SPREAD = 0, 1, 2  # rows of the `calibration` tensor [3, C]; 0 where a class is not held


@torch.no_grad()
def cosines(network: Network, images: Rows) -> Tensor:
    """What the network, as an expert, says of each class of images [N, H, W, C]: [N, classes]."""
    pieces = pieces_of(network, images)
    return torch.cat([cosine(network, network.shown(network.spec.prepare(piece))) for piece in pieces])


class Scraps:
    """Inputs of no class, three for every image: its mean with another, its left half beside another's right, its
    patches shuffled. They are made where they are asked for: those of many large images would fill the memory."""

    def __init__(self, images: Tensor, rng: torch.Generator) -> None:
        self.images = images
        order = torch.randperm(len(images), generator=rng).to(images.device)
        self.other = torch.empty_like(order)
        self.other[order] = order.roll(1)  # one cycle through all: nobody is paired with itself unless it is alone
        self.tall, self.wide = (max(1, side // 4) for side in images.shape[1:3])
        self.order = patch_orders(images, self.tall, self.wide, rng)

    def __len__(self) -> int:
        return 3 * len(self.images)

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(len(self))
        found, n = [], len(self.images)
        for make in (self._mixed, self._joined, self._shuffled):
            found.append(make(slice(min(max(start, 0), n), min(max(stop, 0), n))))
            start, stop = start - n, stop - n
        return torch.cat(found)

    def _mixed(self, rows: slice) -> Tensor:
        one, two = self.images[rows], self.images[self.other[rows]]
        return (one + two) / 2 if one.is_floating_point() else ((one.short() + two.short()) // 2).to(torch.uint8)

    def _joined(self, rows: slice) -> Tensor:
        half = self.images.shape[2] // 2
        return torch.cat((self.images[rows, :, :half], self.images[self.other[rows]][:, :, half:]), dim=2)

    def _shuffled(self, rows: slice) -> Tensor:
        return shuffle_patches(self.images[rows], self.tall, self.wide, self.order[rows])


def scraps(images: Tensor, rng: torch.Generator) -> Tensor:
    """All of them at once."""
    return Scraps(images, rng)[:]


def patch_orders(images: Tensor, tall: int, wide: int, rng: torch.Generator) -> Tensor:
    """An order for the ``tall`` x ``wide`` patches of each image."""
    n, height, width = images.shape[:3]
    return torch.rand(n, (height // tall) * (width // wide), generator=rng).argsort(1).to(images.device)


def shuffle_patches(images: Tensor, tall: int, wide: int, order: Tensor) -> Tensor:
    """Every image with its ``tall`` x ``wide`` patches in an order of its own; a remainder at the edges stays in
    place."""
    n, height, width, channels = images.shape
    rows, columns = height // tall, width // wide
    grid = images[:, : rows * tall, : columns * wide].reshape(n, rows, tall, columns, wide, channels)
    patches = grid.permute(0, 1, 3, 2, 4, 5).reshape(n, rows * columns, tall, wide, channels)
    patches = patches[torch.arange(n, device=images.device)[:, None], order].reshape(
        n, rows, columns, tall, wide, channels
    )
    shuffled = images.clone()
    shuffled[:, : rows * tall, : columns * wide] = patches.permute(0, 1, 3, 2, 4, 5).reshape(
        n, rows * tall, columns * wide, channels
    )
    return shuffled


def picked_images(network: Network, site: Site, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """At most ``PER_CLASS`` of the site's own images of each class, and their labels, where the network is."""
    device = next(network.parameters()).device
    labels = site.train.labels.cpu()
    held = [c for c, n in enumerate(site.counts) if n > 0]
    picked = torch.cat(
        [(rows := (labels == c).nonzero()[:, 0])[torch.randperm(len(rows), generator=rng)[:PER_CLASS]] for c in held]
    )
    return site.train.images[picked.to(site.train.images.device)].to(device), labels[picked].to(device)


@torch.no_grad()
def calibrate(network: Network, site: Site, seed: int) -> dict[str, Tensor]:
    """The ``calibration`` extra [3, C]: each held class's mean cosine on the site's own images of it; its mean and
    spread on scraps."""
    rng = generator(seed, site.id, "calibration")
    images, labels = picked_images(network, site, rng)
    network.eval()
    real, unreal = cosines(network, images), cosines(network, Scraps(images, rng))
    table = torch.zeros(3, len(site.class_names))
    for c in sorted(set(labels.tolist())):
        table[OWN, c], table[SCRAP, c] = real[labels == c, c].mean(), unreal[:, c].mean()
        table[SPREAD, c] = unreal[:, c].std(correction=0)
    return {"calibration": table}


def calibrated(cosine: Tensor, table: Tensor, reliability: bool = True) -> Tensor:
    """r clip((cos - m-) / (m+ - m-), 0, 1.2) from ``table`` [K, 3, C] = (m+, m-, s-); 0 where own images do not score
    above scraps. Without ``reliability`` r is 1."""
    own, scrap, spread = table[:, None, OWN], table[:, None, SCRAP], table[:, None, SPREAD]
    gap = (own - scrap).clamp_min(LEAST_GAP)
    stands_out = gap / spread.clamp_min(LEAST_GAP)
    said = ((cosine - scrap) / gap).clamp(0.0, 1.2)
    said = (stands_out / (1 + stands_out)).sqrt() * said if reliability else said
    return said.masked_fill(own - scrap < LEAST_GAP, 0.0)


class Calibration(Extra):
    """Means of cosines lie in -1 .. 1, and their spread in 0 .. 1."""

    name = "calibration"
    cure = "use --fusion experts"

    def entries(self, manifest: Manifest, given: Sent) -> dict[str, Entry]:
        near = 1 + 1e-3  # a cosine of float32 features may be a little over
        return {"calibration": Entry(torch.float32, (3, manifest.spec.classes), -near, near, axis=1)}

    def agree(self, manifest: Manifest, given: Sent) -> str:
        return "" if bool((given["calibration"][SPREAD] >= 0).all()) else "a spread is negative"

    def answers(self, network: Network, given: Sent, images: Tensor) -> tuple[Tensor, Sequence[int]]:
        table = given["calibration"].to(images.device)
        seen = cosines(network, images)
        held = (table != 0).any(0)
        said = calibrated(seen[None], table[None])[0] + LEAST_GAP * seen
        return said.masked_fill(~held, -torch.inf).argmax(1), held.nonzero()[:, 0].tolist()
