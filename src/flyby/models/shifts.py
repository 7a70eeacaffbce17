"""Shifts: four ways to show an image that a network can learn to tell apart, so that one class becomes four.

``turns`` are quarter turns, ``patches`` swap the halves of an image (left and right, top and bottom, both), ``colour``
makes its negative, moves its channels on by one, or both. Way 0 is always the image as it is. Which of them means
anything depends on the images: aerial ones have no up, and cells no left.
"""

from __future__ import annotations

import torch
from torch import Tensor

WAYS = 4
SHIFTS = ("turns", "patches", "colour")


def shifted(images: Tensor, shift: str, way: int) -> Tensor:
    """Prepared images ``[..., C, H, W]``, all shown in one of the ``WAYS``; the same number and size of them."""
    if way == 0:
        return images
    height, width = images.shape[-2:]
    if shift == "turns":
        return images.rot90(way, (-2, -1))
    if shift == "patches":
        return images.roll((way // 2 * (height // 2), way % 2 * (width // 2)), (-2, -1))
    if shift == "colour":
        moved = images.roll(way % 2, -3)
        return -moved if way // 2 else moved
    raise ValueError(f"no shift is called {shift!r}")


def spread(images: Tensor, shift: str, views: int) -> Tensor:
    """A batch of views ``[V * B, C, H, W]`` in which image i of every view is shown in way i mod ``WAYS``. Batches are
    drawn in a random order, so every image meets all ways, and nothing need be drawn here."""
    shown = images.clone()
    count = len(images) // views
    for start in range(0, len(images), count):  # each view is counted from its own first image
        seen, changed = images[start : start + count], shown[start : start + count]
        for way in range(1, WAYS):
            changed[way::WAYS] = shifted(seen[way::WAYS], shift, way)
    return shown


def ways_of(count: int, views: int, device: torch.device) -> Tensor:
    """The way in which each image of such a batch is shown: ``[count]``, i mod ``WAYS`` within each view."""
    return (torch.arange(count // views, device=device) % WAYS).repeat(views)
