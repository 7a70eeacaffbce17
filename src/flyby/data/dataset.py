"""The noun ``Dataset``: images, labels, class names."""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)
BROKEN_SHARE = 0.01  # of all images: more that are broken are said even with --quiet


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
class Sizes:
    """What sizes images had before they were given one: how many there were, and the smallest and the largest as
    (height, width). ``asked`` says whether somebody named the size they got."""

    images: int
    kinds: int
    smallest: tuple[int, int]
    largest: tuple[int, int]
    asked: bool = False

    def line(self, size: tuple[int, int]) -> str:
        """One line for people, who say width x height."""
        low, high, new = (f"{width}x{height}" for height, width in (self.smallest, self.largest, size))
        had = low if self.kinds == 1 else f"{self.kinds} sizes (from {low} to {high})"
        done = f"short side to {size[0]}, centre {new} kept" if size[0] == size[1] else f"resized, centre {new} kept"
        if self.kinds == 1 and self.smallest[0] * size[1] == self.smallest[1] * size[0]:
            done = f"resized to {new}"
        return f"{self.images} images of {had}: {done}" + ("" if self.asked else "; --size chooses another")


def holding(names: Sequence[str], counts: Sequence[int], most: int = 12) -> str:
    """How many images of which class, in one line: of many classes those with the most and with the fewest."""
    said = f"{len(names)} {'class' if len(names) == 1 else 'classes'}"
    if len(names) <= most:
        return f"{said}: {', '.join(f'{name} {count}' for name, count in zip(names, counts, strict=True))}"
    order = sorted(range(len(names)), key=lambda i: (-counts[i], i))
    ends = (", ".join(f"{names[i]} {counts[i]}" for i in part) for part in (order[:3], order[-3:]))
    empty = sum(not count for count in counts)
    none = f"; {empty} of them without images" if empty else ""
    return f"{said}, {sum(counts)} images: most {next(ends)}; fewest {next(ends)}{none}"


@dataclass(frozen=True)
class DataBundle:
    """What a ``--data`` argument names: training images, test images where there are any, and what was wrong with the
    rest.

    ``test`` is never used to choose anything. ``mirror`` says whether a flipped image still means the same; ``sizes``
    are those that images had before, where they were given another one.
    """

    name: str
    train: Dataset
    test: Dataset | None = None
    validation: Dataset | None = None
    mirror: bool = True
    broken: tuple[str, ...] = field(default=())
    sizes: Sizes | None = None

    @property
    def notes(self) -> list[str]:
        """What people should know of how the images were read, a line each."""
        lines = [] if self.sizes is None else [self.sizes.line(self.train.size)]
        if self.broken:
            rest = f" and {len(self.broken) - 3} more" if len(self.broken) > 3 else ""
            lines.append(f"{len(self.broken)} broken image(s) skipped: {', '.join(self.broken[:3])}{rest}")
        return lines

    def tell(self, classes: bool = True) -> None:
        """Say in the log, before anything is trained, how the images were read and which classes they are of."""
        parts = [part for part in (self.train, self.validation, self.test) if part is not None]
        many = len(self.broken) > BROKEN_SHARE * (len(self.broken) + sum(map(len, parts)))
        for line in self.notes:
            log.log(logging.WARNING if many and "broken" in line else logging.INFO, "note: %s", line)
        if classes:
            log.info("%s", holding(self.train.class_names, self.train.counts()))
