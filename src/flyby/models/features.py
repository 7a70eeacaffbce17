"""Features of a frozen backbone, computed once: kept in the cache folder by what they are of.

An entry is ``features/KEY.npy``, float32 ``[N, dim]``, where the key is a hash of the backbone's weights, the size and
the normalisation it is given images in, and the images themselves. So a second run, another method or a resumed
training over the same images reads them instead.
"""

from __future__ import annotations

import hashlib
import io
import logging
import time
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from flyby.data.cache import root_of, writable
from flyby.errors import BadInput
from flyby.files import digest, write_bytes
from flyby.models.cost import at_once
from flyby.models.spec import Network

log = logging.getLogger(__name__)
PIECE = 256  # images that are prepared together
SPEAK_SECONDS = 5.0
FORMAT = 1


@torch.no_grad()
def features_of(network: Network, images: Tensor, label: str = "") -> Tensor:
    """``network.features`` of a site's images ``[N, H, W, C]``, in pieces: float32 ``[N, d]`` on the network's device.
    Those of a frozen backbone come from the cache where they are known. ``label`` says whose images they are."""
    device = next(network.parameters()).device
    pooled = pooled_of(network, images, label)
    if pooled is None:
        pieces = torch.split(images, at_once(network.spec, 512))
        return torch.cat([network.features(network.prepare(piece.to(device))).float() for piece in pieces])
    found: Tensor = network.projector(pooled.to(device))
    return found


@torch.no_grad()
def shown_of(network: Network, images: Tensor) -> Tensor:
    """The same in every way of the shift that the network knows, ``[N, R, d]``; plain ``[N, d]`` where it knows
    none."""
    if not network.head.shift:
        return features_of(network, images)
    device = next(network.parameters()).device
    pieces = torch.split(images, at_once(network.spec, 512))
    return torch.cat([network.shown(network.prepare(piece.to(device))).float() for piece in pieces])


@torch.no_grad()
def pooled_of(network: Network, images: Tensor, label: str = "") -> Tensor | None:
    """What the network's frozen backbone makes of images: float32 ``[N, dim]`` on the host, from the cache or computed
    and kept there. None where the network has no frozen backbone."""
    if network.spec.backbone is None:
        return None
    key = _key(network, images)
    path = writable(root_of(None)) / "features" / f"{key}.npy"
    shape = (len(images), network.spec.backbone.dim)
    with suppress(OSError, ValueError):
        kept = np.load(path, allow_pickle=False)
        if kept.shape == shape and kept.dtype == np.float32:
            return torch.from_numpy(kept)
    made = _computed(network, images, label)
    buffer = io.BytesIO()
    np.save(buffer, made.numpy(), allow_pickle=False)
    with suppress(BadInput):  # a cache that cannot be written only costs the time of computing again
        write_bytes(path, buffer.getvalue())
    return made


def _key(network: Network, images: Tensor) -> str:
    backbone = network.spec.backbone
    assert backbone is not None
    pixels = hashlib.sha256(images.cpu().contiguous().numpy().data).hexdigest()
    mean, std = (v.tolist() for v in network.statistics("cpu"))
    # A GPU rounds otherwise, so that its features are other bytes; which of its kind it is matters less.
    where = next(network.parameters()).device.type
    facts = [FORMAT, backbone.model_dump(mode="json"), mean, std, list(images.shape), str(images.dtype), pixels, where]
    return digest(facts, 32)


def _computed(network: Network, images: Tensor, label: str) -> Tensor:
    device = next(network.parameters()).device
    started = spoken = time.perf_counter()
    size = at_once(network.spec, PIECE)
    made, done = torch.empty(len(images), network.backbone.named.backbone.dim), 0  # type: ignore[union-attr, arg-type]
    for piece in torch.split(images, size):
        made[done : done + len(piece)] = network.backbone(network.prepare(piece.to(device))).cpu()
        done += len(piece)
        if (now := time.perf_counter()) - spoken > SPEAK_SECONDS and done < len(images):
            spoken, left = now, (now - started) / done * (len(images) - done)
            of = f"features of {label}" if label else "features"
            log.info("%s: %d of %d images, about %.0f s left", of, done, len(images), left)
    if not bool(made.isfinite().all()):
        bad = int((~made.isfinite().all(1)).nonzero()[0, 0])
        raise BadInput(
            f"the backbone {network.spec.name} gives numbers that are not finite for image {bad}"
            f"{f' of {label}' if label else ''}; look at that image, or choose another backbone"
        )
    return made


class OverFeatures(Network):
    """A network's projector and head alone, to be trained over features that its frozen backbone gave before. The
    layers are the network's own, so what they learn is learned there too; "images" here are features ``[N, 1, 1,
    dim]``."""

    def __init__(self, network: Network) -> None:
        nn.Module.__init__(self)
        self.spec, self.feature_dim, self.identity = network.spec, network.feature_dim, ""
        self.backbone, self.projector, self.head = nn.Flatten(), network.projector, network.head

    def prepare(self, images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2)

    def statistics(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, device=device), torch.ones(1, device=device)
