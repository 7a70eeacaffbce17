"""Images from Python: numpy arrays, tensors and a torch ``Dataset`` become the ``DataBundle`` that a file of the same
images would give, with the same digest, so that splits and results of both are the same."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flyby import rng
from flyby.data.dataset import DataBundle, Dataset, content_digest
from flyby.data.photos import Pixels, flattened
from flyby.data.tiles import check_channels, held, unusable
from flyby.errors import BadInput, expect
from flyby.names import MOST_LABELS, check_labels

Labels = npt.NDArray[np.int64]
Pair = tuple[Any, Any]  # images and their labels, in any form that is taken here


def bundle_from(
    images: Any,
    labels: Any,
    class_names: Sequence[str] | None = None,
    *,
    name: str = "arrays",
    test: Pair | None = None,
    holdout: float = 0.0,
    groups: Sequence[object] | None = None,
    mirror: bool = True,
) -> DataBundle:
    """Images and labels as data to split and train on.

    Images are uint8 ``[N, H, W, C]`` or ``[N, H, W]``, or floats from 0 to 1; or tiles of uint16 numbers, or of floats
    in other than 1 or 3 channels, in units of their own. A tensor may have its channels first, as torch likes them.
    Labels are whole numbers from 0. ``test`` is another such pair, or ``holdout`` keeps that share of each class for
    testing; ``groups`` says whose each image is, for the split ``by-column``; ``mirror`` is false where a flipped image
    means something else.

    >>> data = bundle_from(np.zeros((4, 8, 8), np.uint8), [0, 1, 0, 1], ["cat", "dog"], holdout=0.5)
    >>> len(data.train), data.train.size, data.test.class_names
    (2, (8, 8), ('cat', 'dog'))
    """
    if test is not None and not (isinstance(test, tuple | list) and len(test) == 2):
        raise BadInput("test is a pair of images and their labels: test=(test_images, test_labels)")
    if isinstance(class_names, str):
        raise BadInput(
            f'class_names is a list with one name for each class, such as ["cat", "dog"], not {class_names!r}'
        )
    read = [_pair(images, labels, "")] + ([] if test is None else [_pair(*test, " of test")])
    if read[-1][0].shape[1:] != read[0][0].shape[1:]:
        shapes = " and ".join("x".join(map(str, x.shape[1:])) for x, _ in read)
        raise BadInput(f"training and test images must be alike; these are {shapes}")
    names = numbered(*(y for _, y in read)) if class_names is None else [str(one) for one in class_names]
    check_classes(names, name)
    if groups is not None and len(groups) != len(read[0][1]):
        raise BadInput(f"groups has {len(groups)} values for {len(read[0][1])} images; give one for each")
    check_holdout(holdout)
    train = _dataset(*read[0], names, groups)
    judged = None if test is None else _dataset(*read[1], names)
    if judged is None and holdout:
        held = held_out(train, holdout)
        train, judged = _rows(train, ~held), _rows(train, held)
    return DataBundle(name, train, judged, mirror=mirror)


def bundle_from_torch(
    data: Iterable[Pair],
    class_names: Sequence[str] | None = None,
    *,
    name: str = "",
    test: Iterable[Pair] | None = None,
    holdout: float = 0.0,
    mirror: bool = True,
) -> DataBundle:
    """A torch ``Dataset`` of (image, label) pairs, read once into memory. An image is a Pillow image, an array or a
    tensor; what a random transform of the dataset draws now stays as it is, so leave augmentation to training.
    Class names are those of the dataset (``classes``) where it has some."""
    known = getattr(data, "classes", None)
    names = class_names if class_names is not None else known if isinstance(known, Sequence) else None
    held = None if test is None else _read(test)
    title = name or type(data).__name__
    return bundle_from(*_read(data), names, name=title, test=held, holdout=holdout, mirror=mirror)


def _pair(images: Any, labels: Any, word: str) -> tuple[Pixels, Labels]:
    pixels = as_pixels(_plain(images, f"images{word}"), f"images{word}")
    if not len(pixels):
        raise BadInput(f"images{word} is empty; give at least one image")
    if bad := unusable(pixels):
        raise BadInput(f"images{word} holds {bad} numbers that are not finite (no data?); fill them in")
    return pixels, as_labels(_plain(labels, f"labels{word}"), len(pixels), f"labels{word}")


def _read(data: Iterable[Pair]) -> tuple[Pixels, list[int]]:
    images: list[Pixels] = []
    labels: list[int] = []
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise BadInput(
            f"{data!r} is no data: give a name or a path as --data takes it, images and labels, or a torch Dataset"
        )
    # By number where it has a length: most datasets never say that they are at their end.
    source: Any = data
    for row, item in enumerate((source[i] for i in range(len(source))) if hasattr(source, "__len__") else source):
        try:
            image, label = item
            labels.append(operator.index(label))
        except (TypeError, ValueError):
            raise BadInput(
                f"item {row} of the dataset is not an (image, label) pair with a whole number for its label"
            ) from None
        images.append(_image(image, f"image {row} of the dataset"))
        if images[-1].shape != images[0].shape:
            shapes = " and ".join("x".join(map(str, one.shape)) for one in (images[0], images[-1]))
            raise BadInput(f"images 0 and {row} of the dataset are {shapes}; give all of them one size and one mode")
    if not images:
        raise BadInput("the dataset holds no images")
    return np.stack(images), labels


def _image(image: Any, what: str) -> Pixels:
    from PIL import Image

    array = np.asarray(flattened(image))[None] if isinstance(image, Image.Image) else _plain(image, what, one=True)
    pixels: Pixels = as_pixels(array, what)[0]
    return pixels


def _plain(values: Any, what: str, one: bool = False) -> npt.NDArray[Any]:
    """Anything array-like as an array on the host; tensors of images with their channels last."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
        values = values[None] if one else values
        few = values.ndim == 4 and (values.shape[1] in (1, 3) or values.shape[1] < min(values.shape[2:]))
        if few and values.shape[3] not in (1, 3):
            values = values.permute(0, 2, 3, 1)
        return np.ascontiguousarray(values.numpy())
    try:
        array = np.asarray(values)
    except ValueError:
        raise BadInput(f"{what} do not all have one shape; give one array") from None
    return array[None] if one else array


def as_pixels(images: npt.NDArray[Any], what: str) -> Pixels:
    """Pixels as flyby holds them, ``[N, H, W, C]``: floats from 0 to 1 in 1 or 3 channels are photographs and become
    uint8; other numbers stay as they are. ``what`` names them in an error."""
    if images.ndim not in (3, 4) or 0 in images.shape[1:]:
        raise BadInput(f"{what} has the shape {list(images.shape)}; give [N, H, W] or [N, H, W, C]")
    images = images[:, :, :, None] if images.ndim == 3 else images
    if images.shape[1] in (1, 3) and images.shape[3] > 4:
        raise BadInput(
            f"{what} has its channels first ({list(images.shape)}); move them last with images.transpose(0, 2, 3, 1)"
        )
    check_channels(images.shape, what)
    if np.issubdtype(images.dtype, np.floating) and images.shape[3] in (1, 3):
        low, high = (float(images.min()), float(images.max())) if images.size else (0.0, 0.0)
        if not 0.0 <= low <= high <= 1.0:
            raise BadInput(
                f"{what} is {images.dtype}; give uint8 pixels from 0 to 255, or numbers from 0 to 1 as they are before"
                f" any normalisation (these lie between {low:g} and {high:g}); tiles in units of their own can be .npy"
                " files in class folders"
            )
        return np.asarray(np.rint(images * 255.0), dtype=np.uint8)
    return held(images, what)


def as_labels(labels: npt.NDArray[Any], count: int, what: str) -> Labels:
    """One whole number for each of ``count`` images."""
    if not np.issubdtype(labels.dtype, np.integer):
        raise BadInput(f"{what} is {labels.dtype}; give whole numbers from 0, one for each image")
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.shape != (count,):
        raise BadInput(f"{what} has the shape {list(labels.shape)} for {count} images; give one label for each")
    return labels.astype(np.int64)


def numbered(*labels: Labels) -> list[str]:
    """Class names for images that come without: the labels themselves."""
    count = max(int(part.max(initial=-1)) for part in labels) + 1
    if (least := min(int(part.min(initial=0)) for part in labels)) < 0:
        raise BadInput(f"there is a label {least}; number the classes from 0")
    if count > MOST_LABELS:
        raise BadInput(
            f"label {count - 1} looks like an identifier rather than a class; number the classes from 0 or give their"
            " names"
        )
    return [str(label) for label in range(count)]


def check_classes(names: Sequence[str], what: str) -> None:
    if not names:
        raise BadInput(f"{what} names no class; give its images at least one")
    check_labels(names, what)


def check_holdout(share: float) -> None:
    expect(share, (int, float), "data.holdout is a share such as .2")
    if not 0.0 <= share < 1.0:
        raise BadInput(
            f"data.holdout is the share of images kept for testing and must be at least 0 and below 1, not {share}"
        )


def held_out(train: Dataset, share: float) -> npt.NDArray[np.bool_]:
    """Which images are kept for testing: ``share`` of each class, drawn by the content's own digest."""
    draw = rng.legacy_numpy("holdout", train.digest)
    chosen = np.zeros(len(train), dtype=bool)
    for label in range(train.classes):
        rows = np.flatnonzero(train.labels == label)
        if len(rows) >= 2:
            count = min(max(1, int(share * len(rows) + 0.5)), len(rows) - 1)
            chosen[draw.permutation(rows)[:count]] = True
    return chosen


def _dataset(images: Pixels, labels: Labels, names: Sequence[str], groups: Sequence[object] | None = None) -> Dataset:
    images = np.ascontiguousarray(images)
    digest = content_digest(hashlib.sha256(images.data), labels, images.shape, names, images.dtype)
    return Dataset(images, labels, tuple(names), digest, None if groups is None else tuple(str(one) for one in groups))


def _rows(data: Dataset, rows: npt.NDArray[np.bool_]) -> Dataset:
    groups = None if data.groups is None else [one for one, kept in zip(data.groups, rows, strict=True) if kept]
    return _dataset(data.images[rows], data.labels[rows], data.class_names, groups)
