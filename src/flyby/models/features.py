"""Features of a frozen backbone, computed once per image (``flyby.models.rows``): a second run, another method, another
split or a resumed training over the same images reads them instead. Where its last stage is tuned, what comes before
that is kept.

What they are known by is the hash of the backbone's weights, the size and the normalisation it is given images in, the
kind of device, and the image itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from flyby.data.site import Part
from flyby.models.cost import at_once, shape_through
from flyby.models.rows import rows_of
from flyby.models.spec import Network
from flyby.models.tune import Tuned

log = logging.getLogger(__name__)

# Images that a backbone is given together: a CPU is as fast with few, and few are not many to fill up a piece with.
PIECE, MANY = 16, 512
MOST = 4 << 30  # bytes that are held of one set of images; where it would be more, they are looked at every time


class Rows(Protocol):
    """Images, or what makes them piece by piece."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Tensor: ...


def pieces_of(network: Network, images: Rows) -> Iterator[Tensor]:
    """Images in pieces that a network answers at once; on a backbone it makes pieces of its own."""
    device = next(network.parameters()).device
    size = 512 if network.spec.backbone is not None else at_once(network.spec, 512, device)
    for start in range(0, max(1, len(images)), size):
        yield images[start : start + size]


@torch.no_grad()
def features_of(network: Network, images: Tensor, label: str = "", pooled: Tensor | None = None) -> Tensor:
    """``network.features`` of a site's images ``[N, H, W, C]``, in pieces: float32 ``[N, d]`` on the network's device.
    Those of a frozen backbone come from the cache where they are known; ``pooled`` is what it gave where the caller
    has that. ``label`` says whose images they are."""
    device = next(network.parameters()).device
    pooled = pooled_of(network, images, label) if pooled is None else pooled
    if pooled is None:
        pieces = torch.split(images, at_once(network.spec, 512, device))
        return torch.cat([network.features(network.prepare(piece.to(device))).float() for piece in pieces])
    size = at_once(network.spec, 512, device) if isinstance(network.backbone, Tuned) else max(1, len(pooled))
    return torch.cat([beyond(network, piece.to(device)) for piece in torch.split(pooled, size)])


def beyond(network: Network, pooled: Tensor) -> Tensor:
    """The network's features ``[N, d]`` from what :func:`pooled_of` gave."""
    seen = network.backbone.tail(pooled) if isinstance(network.backbone, Tuned) else pooled
    return network.projector(seen)  # type: ignore[no-any-return]


@torch.no_grad()
def shown_of(network: Network, images: Tensor) -> Tensor:
    """The same in every way of the shift that the network knows, ``[N, R, d]``; plain ``[N, d]`` where it knows
    none."""
    if not network.head.shift:
        return features_of(network, images)
    device = next(network.parameters()).device
    pieces = torch.split(images, at_once(network.spec, 512, device))
    return torch.cat([network.shown(network.prepare(piece.to(device))).float() for piece in pieces])


@torch.no_grad()
def pooled_of(network: Network, images: Tensor, label: str = "") -> Tensor | None:
    """What the frozen part of the network's backbone makes of images: float32 ``[N, dim]``, or ``[N, channels, height,
    width]`` before a tuned stage, on the host, from the cache or computed and kept there. None where there is no such
    part, or it makes too much of them."""
    if network.spec.backbone is None or not network.spec.backbone.keeps:
        return None
    frozen: nn.Module = network.backbone
    shape: tuple[int, ...] = (network.spec.backbone.dim,)
    if isinstance(network.backbone, Tuned):
        frozen = network.backbone.frozen
        shape = shape_through(frozen, network.spec)
        if (size := 4 * len(images) * math.prod(shape)) > MOST:
            log.info("what the backbone makes of %d images takes %s bytes and is not kept", len(images), f"{size:,}")
            return None
    device = next(network.parameters()).device
    mean, std = (v.tolist() for v in network.statistics("cpu"))
    # A GPU rounds otherwise, so that its features are other numbers; which of its kind it is matters less.
    family = [network.spec.backbone.model_dump(mode="json"), mean, std, device.type]

    def look(piece: Tensor) -> Tensor:
        seen: Tensor = frozen(network.prepare(piece.to(device)))
        return seen.cpu()

    piece = at_once(network.spec, PIECE if device.type == "cpu" else MANY, device)
    return rows_of(family, images, look, shape, piece, label)


class OverFeatures(Network):
    """A network's own layers alone, to be trained over what the frozen part of its backbone gave before. The layers are
    the network's, so what they learn is learned there too. "Images" here are features ``[N, 1, 1, dim]``, or, before a
    tuned stage that takes maps (not ``flat``), those: ``[N, height, width, channels]``."""

    def __init__(self, network: Network, flat: bool = True) -> None:
        nn.Module.__init__(self)
        self.spec, self.feature_dim, self.identity = network.spec, network.feature_dim, ""
        start = nn.Flatten() if flat else nn.Identity()
        self.backbone = Tuned(start, network.backbone.tail) if isinstance(network.backbone, Tuned) else start
        self.projector, self.head = network.projector, network.head

    def prepare(self, images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2)

    def statistics(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, device=device), torch.ones(1, device=device)


def looked_at(network: Network, parts: tuple[Part, ...], label: str) -> tuple[Network, tuple[Part, ...]]:
    """What is left to train of a network, and parts of a site's data with what the frozen part of its backbone makes of
    images in their place: an epoch then costs no more than what learns. Both as they are where nothing is kept."""
    seen: list[Part] = []
    flat = False
    for part in parts:
        pooled = pooled_of(network, part.images, label)
        if pooled is None:
            return network, parts
        flat = pooled.ndim == 2
        seen.append(Part((pooled[:, :, None, None] if flat else pooled).permute(0, 2, 3, 1), part.labels))
    return OverFeatures(network, flat), tuple(seen)
