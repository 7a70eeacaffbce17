"""The ordinary script that ``flyby bench`` is measured against: a Dataset of images, random transforms one image at a
time with Pillow, a DataLoader with worker processes and pinned memory, float32, ``loss.item()`` for the running loss.
Nothing here is flyby's way of doing it.

The transforms are the usual ones (random resized crop, mirror, brightness, contrast, saturation, hue, greyscale), drawn
for every image from the generator that the DataLoader seeds in each worker. ``salt`` takes two views of every image and
adds the contrast between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flyby.models import Network

Pixels = npt.NDArray[np.uint8]
Transform = Callable[[Image.Image], Image.Image]


def chance() -> float:
    return float(torch.rand(()))


def between(low: float, high: float) -> float:
    return low + (high - low) * chance()


def crop_and_mirror(image: Image.Image, pad: int = 4) -> Image.Image:
    """A black border, a random crop of the old size, a random mirror: the usual augmentation of CIFAR-10."""
    padded = ImageOps.expand(image, pad)
    left, top = int(between(0, 2 * pad + 1)), int(between(0, 2 * pad + 1))
    image = padded.crop((left, top, left + image.width, top + image.height))
    return ImageOps.mirror(image) if chance() < 0.5 else image


def resized_crop(
    image: Image.Image, scale: tuple[float, float] = (0.2, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
) -> Image.Image:
    for _ in range(10):
        area = image.width * image.height * between(*scale)
        aspect = math.exp(between(math.log(ratio[0]), math.log(ratio[1])))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < width <= image.width and 0 < height <= image.height:
            left, top = int(between(0, image.width - width + 1)), int(between(0, image.height - height + 1))
            box = (left, top, left + width, top + height)
            return image.resize(image.size, Image.Resampling.BILINEAR, box=box)
    return image


def colour_jitter(image: Image.Image, strength: float = 0.4, hue: float = 0.1) -> Image.Image:
    for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = kind(image).enhance(between(1 - strength, 1 + strength))
    if image.mode == "RGB":
        h, s, v = image.convert("HSV").split()
        turned = (np.asarray(h).astype(np.int16) + round(between(-hue, hue) * 255)) % 256
        image = Image.merge("HSV", (Image.fromarray(turned.astype(np.uint8)), s, v)).convert("RGB")
    return image


def contrastive_view(image: Image.Image) -> Image.Image:
    image = resized_crop(image)
    if chance() < 0.5:
        image = ImageOps.mirror(image)
    if chance() < 0.8:
        image = colour_jitter(image)
    if chance() < 0.2:
        image = ImageOps.grayscale(image).convert(image.mode)
    return image


class Images(Dataset[tuple[Tensor, int]]):
    """uint8 images ``[n, H, W, C]`` in memory; an item is its ``views`` normalised views ``[views, C, H, W]`` and its
    label."""

    def __init__(
        self, images: Pixels, labels: npt.NDArray[np.int64], transform: Transform | None, views: int = 1
    ) -> None:
        self.images, self.labels, self.transform, self.views = images, labels, transform, views

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = self.images[index]
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        return torch.stack([self.view(image) for _ in range(self.views)]), int(self.labels[index])

    def view(self, image: Image.Image) -> Tensor:
        changed = np.asarray(self.transform(image) if self.transform else image, dtype=np.float32) / 255
        x = torch.from_numpy(changed if changed.ndim == 3 else changed[:, :, None]).permute(2, 0, 1)
        return (x - 0.5) / 0.25


def contrast(features: Tensor, labels: Tensor, tau: float = 0.07) -> Tensor:
    """Supervised contrast as it is usually written: the matrix of all pairs, a mask of positives, a mask against
    oneself."""
    similarity = features @ features.T / tau
    others = 1 - torch.eye(len(labels), device=labels.device)
    positives = (labels[:, None] == labels[None]).float() * others
    similarity = similarity - similarity.max(dim=1, keepdim=True).values.detach()
    log_chance = similarity - (similarity.exp() * others).sum(1, keepdim=True).log()
    return -((positives * log_chance).sum(1) / positives.sum(1).clamp(min=1)).mean()


class Script:
    """A model and its training loop; ``epoch`` passes over the data once and returns the mean loss."""

    def __init__(self, model: Network, data: Images, batch: int, device: str, workers: int, lr: float = 0.05) -> None:
        self.model, self.device = model.to(device), torch.device(device)
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=lr, momentum=0.9, weight_decay=5e-4)
        options: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
        self.loader = DataLoader(
            data,
            batch_size=batch,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            **options,
        )

    def loss(self, views: Tensor, labels: Tensor) -> Tensor:
        if views.shape[1] == 1:
            return F.cross_entropy(self.model(views[:, 0]), labels)
        labels = labels.repeat(views.shape[1])
        features = F.normalize(self.model.features(views.transpose(0, 1).flatten(0, 1)), dim=1)
        prototypes: Tensor = self.model.head.prototypes  # type: ignore[assignment]
        logits = features @ prototypes.T
        own = F.cross_entropy(prototypes @ prototypes.T, torch.arange(len(prototypes), device=self.device))
        return F.cross_entropy(logits, labels) + contrast(features, labels) + own + F.cross_entropy(logits, labels)

    def epoch(self) -> float:
        self.model.train()
        running = 0.0
        for views, labels in self.loader:
            loss = self.loss(views.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True))
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if views.shape[1] > 1:
                nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            running += loss.item()
        return running / len(self.loader)
