"""The noun ``Site``: one participant's own train, validation and test data, as tensors on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flyby.data.dataset import DataBundle, Dataset
from flyby.data.splits import Split
from flyby.data.views import ViewSettings, augment
from flyby.rng import generator

# A replica is a gently changed copy: what a second pass of the same satellite over the same ground might give.
REPLICA_VIEWS = ViewSettings(crop="resized", scale=(0.7, 1.0), flip=0.5, jitter=(0.2, 0.2, 0.2, 0.0))


@dataclass(frozen=True)
class Part:
    """Some images (uint8, or float32 tiles, ``[n, H, W, C]``) and their labels (int64 ``[n]``), on one device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Part:
        return Part(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Site:
    """What one participant holds. ``counts`` are its training images per class; ``mirror`` says whether flips are
    harmless.

    ``origin`` is the digest of where its data came from: the split's hash, or the content of its own images. ``real``
    is a site outside any simulation, whose noise comes from the operating system.
    """

    id: str
    train: Part
    val: Part
    test: Part
    class_names: tuple[str, ...]
    mirror: bool = True
    origin: str = ""
    real: bool = False

    @property
    def counts(self) -> list[int]:
        return [int(v) for v in torch.bincount(self.train.labels, minlength=len(self.class_names)).tolist()]

    @property
    def size(self) -> tuple[int, int]:
        return int(self.train.images.shape[1]), int(self.train.images.shape[2])

    @property
    def channels(self) -> int:
        return int(self.train.images.shape[3])

    @property
    def pixels(self) -> str:
        """What its images are: uint8, or float32 tiles."""
        return str(self.train.images.dtype).removeprefix("torch.")

    def to(self, device: torch.device | str) -> Site:
        return replace(self, train=self.train.to(device), val=self.val.to(device), test=self.test.to(device))


def site_of(bundle: DataBundle, split: Split, name: str) -> Site:
    """One site of a split. Replicas are of its training images only: a copy of an image that chooses or judges would
    count it twice."""
    share, copies = split.shares[name], split.settings.replicas
    train, val, test = (part_of(bundle.train, indices) for indices in (share.train, share.val, share.test))
    if copies and len(train):
        made = [_replica(train.images, bundle.mirror, split.seed, name, "train", r) for r in range(copies)]
        train = Part(torch.cat([train.images, *made]), train.labels.repeat(copies + 1))
    return Site(name, train, val, test, bundle.train.class_names, bundle.mirror, origin=split.hash)


def _replica(images: Tensor, mirror: bool, *key: object) -> Tensor:
    settings = REPLICA_VIEWS if mirror else REPLICA_VIEWS.model_copy(update={"flip": 0.0})
    mean, std = torch.zeros(images.shape[3]), torch.ones(images.shape[3])
    if images.dtype != torch.uint8:  # tiles change in units of their own spread
        mean, std = images.mean((0, 1, 2)), images.std((0, 1, 2), correction=0).clamp(min=1e-6)
    x = augment(images, settings, mean, std, generator(*key, "replica")).permute(0, 2, 3, 1)
    return x * std + mean if images.dtype != torch.uint8 else x.mul(255).round().clamp_(0, 255).to(torch.uint8)


def whole_site(bundle: DataBundle, name: str, val: float = 0.0, seed: int = 0) -> Site:
    """A real site whose data is all its own: ``flyby train``. A validation split in the source, or a share of it, is
    held out."""
    from flyby.data.splits import hold_out
    from flyby.rng import legacy_numpy

    indices = np.arange(len(bundle.train))
    held = bundle.validation
    if held is None:
        share = hold_out(indices, bundle.train.labels, val, 0.0, legacy_numpy(seed, name, "hold-out"))
        train, validation = part_of(bundle.train, share.train), part_of(bundle.train, share.val)
    else:
        train, validation = part_of(bundle.train, indices), part_of(held)
    return Site(
        name,
        train,
        validation,
        part_of(bundle.test) if bundle.test is not None else part_of(bundle.train, indices[:0]),
        bundle.train.class_names,
        bundle.mirror,
        origin=bundle.train.digest,
        real=True,
    )


def part_of(
    data: Dataset, indices: Sequence[int] | np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None = None
) -> Part:
    return Part(*data.tensors(None if indices is None else np.asarray(indices, dtype=np.int64)))
