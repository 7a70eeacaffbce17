"""The noun ``Dataset``: images, labels, class names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from flyby.errors import BadInput
from flyby.files import canonical

if TYPE_CHECKING:
    from hashlib import _Hash


@dataclass(frozen=True)
class Dataset:
    """Images ``[N, H, W, C]`` (often a memory map), labels ``int64 [N]``, and what the labels mean.

    Images are uint8 photographs, or tiles of uint16 or float32 numbers in units of their own (see ``pixels``).

    ``digest`` is a hash of the content; ``groups`` is a natural user or site column where the source has one;
    ``places`` are the images' longitudes and latitudes ``float64 [N, 2]`` where all are known.
    """

    images: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    digest: str
    groups: tuple[str, ...] | None = None
    places: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        n = len(self.labels)
        if self.images.ndim != 4 or len(self.images) != n:
            raise BadInput(f"images must be [N, H, W, C] with one label each; got {self.images.shape} for {n} labels")
        if n and (self.labels.min() < 0 or self.labels.max() >= len(self.class_names)):
            bad = int(self.labels.min()) if self.labels.min() < 0 else int(self.labels.max())
            raise BadInput(
                f"label {bad} is outside 0..{len(self.class_names) - 1}, the range of the {len(self.class_names)} class"
                " names"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def channels(self) -> int:
        return int(self.images.shape[3])

    @property
    def pixels(self) -> Literal["uint8", "float32"]:
        """What a network is given: bytes, or any numbers (16-bit ones too, which float32 holds exactly)."""
        return "uint8" if self.images.dtype == np.uint8 else "float32"

    @property
    def size(self) -> tuple[int, int]:
        return int(self.images.shape[1]), int(self.images.shape[2])

    def counts(self, indices: npt.NDArray[np.int64] | None = None) -> list[int]:
        """How many samples of each class, among ``indices`` or all."""
        labels = self.labels if indices is None else self.labels[indices]
        return [int(v) for v in np.bincount(labels, minlength=self.classes)]

    def tensors(
        self, indices: npt.NDArray[np.int64] | None = None, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(images [n, H, W, C] of ``pixels``, labels int64 [n]) on a device; only the rows asked for are read from
        disk."""
        picked = [
            np.array(column) if indices is None else np.asarray(column[indices])
            for column in (self.images, self.labels)
        ]
        picked[0] = picked[0].astype(self.pixels, copy=False)
        return torch.from_numpy(picked[0]).to(device), torch.from_numpy(picked[1]).to(device)


def channel_statistics(
    data: Dataset, rows: npt.NDArray[np.int64] | None = None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in the tiles' own units, to four digits (more would tell more about
    single images); 1 for a channel that never changes. Read in pieces, so that memory does not follow the data."""
    rows = np.arange(len(data)) if rows is None else rows
    count, mean, spread = 0, np.zeros(data.channels), np.zeros(data.channels)
    for start in range(0, len(rows), 256):
        piece = data.images[rows[start : start + 256]].reshape(-1, data.channels).astype(np.float64)
        part, apart = piece.mean(axis=0), piece.mean(axis=0) - mean
        spread += ((piece - part) ** 2).sum(axis=0) + apart**2 * (count * len(piece) / (count + len(piece)))
        count += len(piece)
        mean += apart * (len(piece) / count)
    std = np.sqrt(spread / max(1, count))
    return (
        tuple(float(f"{value:.4g}") for value in mean),
        tuple(float(f"{value:.4g}") if value > 1e-6 else 1.0 for value in std),
    )


def content_digest(
    pixels: _Hash,
    labels: npt.NDArray[np.int64],
    shape: Sequence[int | None],
    class_names: Sequence[str],
    dtype: np.dtype[Any],
) -> str:
    """The name of a dataset's content, from a SHA-256 that has taken in its pixels as they lie ([N, H, W, C])."""
    pixels.update(labels.astype("<i8").tobytes())
    kind = {} if dtype == np.uint8 else {"dtype": dtype.str}
    pixels.update(canonical({"shape": list(shape), "class_names": list(class_names), **kind}))
    return pixels.hexdigest()[:16]


@dataclass(frozen=True)
class DataBundle:
    """What a ``--data`` argument names: training images, test images where there are any, and what was wrong with the
    rest.

    ``test`` is never used to choose anything. ``mirror`` says whether a flipped image still means the same.
    """

    name: str
    train: Dataset
    test: Dataset | None = None
    validation: Dataset | None = None
    mirror: bool = True
    broken: tuple[str, ...] = field(default=())
