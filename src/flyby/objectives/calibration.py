"""What an expert knows about its own certainty, measured at the site on its own images: a few scalars a class.

For every class a site holds: the mean and spread of its score on images of that class, and on scraps, inputs that are of no
class (its own images with patches shuffled, two images mixed, noise). Whoever cannot tell a class from scraps should say nothing
about it. No image, and nothing computed from a single image, leaves the site.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flyby.data.site import Site
from flyby.models import Network
from flyby.models.heads import directions
from flyby.rng import generator

PER_CLASS = 200
# Rows of the `calibration` tensor [len(ROWS), C]; 0 where a class is not held.
ROWS = ("own_mean", "own_std", "scrap_mean", "scrap_std", "other_mean", "other_std")


@torch.no_grad()
def cosines(network: Network, images: Tensor) -> Tensor:
    """cos(f(x), direction of c) for uint8 images [N, H, W, C]: [N, classes]."""
    rows = F.normalize(directions(network).float(), dim=1)
    spec = network.spec
    return torch.cat([F.normalize(network.features(spec.prepare(piece)).float(), dim=1) @ rows.T for piece in torch.split(images, 512)])


def scraps(images: Tensor, rng: torch.Generator) -> Tensor:
    """Inputs of no class, three for every image given: patches shuffled, a mean with another image upside down, noise."""
    n, height, width, channels = images.shape
    tall, wide = max(1, height // 4), max(1, width // 4)
    rows, columns = height // tall, width // wide
    cut = images[:, : rows * tall, : columns * wide].reshape(n, rows, tall, columns, wide, channels)
    cut = cut.permute(0, 1, 3, 2, 4, 5).reshape(n, rows * columns, tall, wide, channels)
    order = torch.rand(n, rows * columns, generator=rng).argsort(1).to(images.device)
    cut = cut[torch.arange(n, device=images.device)[:, None], order].reshape(n, rows, columns, tall, wide, channels)
    shuffled = images.clone()
    shuffled[:, : rows * tall, : columns * wide] = cut.permute(0, 1, 3, 2, 4, 5).reshape(n, rows * tall, columns * wide, channels)
    other = images[torch.randperm(n, generator=rng).to(images.device)].flip(1)
    mixed = ((images.short() + other.short()) // 2).to(torch.uint8)
    noise = torch.randint(0, 256, images.shape, generator=rng, dtype=torch.uint8).to(images.device)
    return torch.cat((shuffled, mixed, noise))


@torch.no_grad()
def calibrate(network: Network, site: Site, seed: int) -> dict[str, Tensor]:
    """The ``calibration`` extra: statistics of the cosine of each held class on own, other and no class's images."""
    device = next(network.parameters()).device
    rng = generator(seed, site.id, "calibration")
    labels = site.train.labels.cpu()
    held = [c for c, n in enumerate(site.counts) if n > 0]
    picked = torch.cat([(rows := (labels == c).nonzero()[:, 0])[torch.randperm(len(rows), generator=rng)[:PER_CLASS]] for c in held])
    images, labels = site.train.images[picked.to(site.train.images.device)].to(device), labels[picked].to(device)
    network.eval()
    real, unreal = cosines(network, images), cosines(network, scraps(images, rng))
    table = torch.zeros(len(ROWS), len(site.class_names))
    for c in held:
        for i, values in enumerate((real[labels == c, c], unreal[:, c], real[labels != c, c])):
            if len(values):
                table[2 * i, c], table[2 * i + 1, c] = values.mean(), values.std(correction=0)
    return {"calibration": table}
