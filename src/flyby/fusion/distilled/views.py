"""What a server may do to its images before it asks about them: shifts and mirror images, and blends of two.

Shifts and flips pick pixels, they do not interpolate: every pixel of a view comes from at most one of the image, so the
gradient of a view at the image is exact, and on a GPU the same twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flyby.parcels.inbox import Inbox


def site_views(parcels: Inbox) -> tuple[int, bool]:
    """(pixels to shift by, whether to mirror), as all sites trained by what their parcels say: a network that never saw
    a shifted or a mirrored digit has nothing to teach about one. Shifts are by an eighth of the side, 4 of 32 pixels.
    """

    def views(provenance: object) -> dict[str, object]:
        found = provenance.get("views") if isinstance(provenance, dict) else None
        return found if isinstance(found, dict) else {}

    each = [views(m.provenance) for m in parcels.manifests]
    crops = all(one.get("crop", "none") != "none" for one in each)
    flips = all(isinstance(flip := one.get("flip"), int | float) and flip > 0 for one in each)
    return min(parcels.manifests[0].spec.size) // 8 if crops else 0, flips


def crop_and_flip(x: Tensor, pad: int, flip: bool, rng: torch.Generator) -> Tensor:
    """Images [N, C, H, W] each shifted by up to ``pad`` pixels either way over a black border, and half of them
    mirrored."""
    n, _, height, width = x.shape
    shift = torch.randint(-pad, pad + 1, (2, n, 1), generator=rng, device=x.device)
    rows = torch.arange(height, device=x.device) + shift[0]
    columns = torch.arange(width, device=x.device) + shift[1]
    if flip:
        turned = torch.rand((n, 1), generator=rng, device=x.device) < 0.5
        columns = torch.where(turned, columns.flip(1), columns)
    for dim, places in ((2, rows), (3, columns)):
        shape = [n, 1, 1, 1]
        shape[dim] = -1
        places = places.view(shape)
        inside = (places >= 0) & (places < x.shape[dim])
        x = x.gather(dim, places.clamp(0, x.shape[dim] - 1).expand(-1, x.shape[1], height, width)) * inside
    return x


def blend(x: Tensor, share: float, rng: torch.Generator) -> Tensor:
    """The first ``share`` of a shuffled batch, each mixed with its opposite in the batch: l x_i + (1 - l) x_j, l ~ U(0,
    1); the others as they are."""
    n = round(share * len(x))
    if n == 0:
        return x
    part = torch.rand((n, 1, 1, 1), generator=rng, device=x.device)
    return torch.cat((part * x[:n] + (1 - part) * x.flip(0)[:n], x[n:]))
