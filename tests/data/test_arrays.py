"""Images from Python: what arrays, tensors and torch datasets become, and one sentence for what cannot be taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from factories import make_images, make_npz
from flyby.data import sources
from flyby.data.arrays import bundle_from, bundle_from_torch
from flyby.data.splits import SplitSettings, make_split
from flyby.errors import BadInput

COUNT = 24
LABELS = np.arange(COUNT) % 3
COLOUR, GREY = make_images(COUNT, (6, 5)), make_images(COUNT, (6, 5), channels=1)


def refused(*args: Any, **more: Any) -> str:
    with pytest.raises(BadInput) as caught:
        bundle_from(*args, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("holdout", [0.0, 0.25])
def test_arrays_are_what_a_file_of_them_would_be(tmp_path: Path, holdout: float) -> None:
    path = make_npz(tmp_path / "a.npz", images=COLOUR, labels=LABELS, class_names=np.array(["cat", "dog", "owl"]))
    filed = sources.load(str(path), holdout=holdout, cache=tmp_path / "cache")
    made = bundle_from(COLOUR, LABELS, ["cat", "dog", "owl"], holdout=holdout)
    for mine, theirs in ((made.train, filed.train), (made.test, filed.test)):
        assert (mine is None) == (theirs is None) == (holdout == 0 and mine is not made.train)
        if mine is not None and theirs is not None:
            assert mine.digest == theirs.digest
            assert mine.class_names == theirs.class_names
            assert np.array_equal(mine.images, theirs.images)
            assert np.array_equal(mine.labels, theirs.labels)
    settings = SplitSettings(clients=2, name="iid")
    assert make_split(made.train, settings).hash == make_split(filed.train, settings).hash


def channels_first(images: Any) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (COLOUR, COLOUR),
        (GREY[:, :, :, 0], GREY),
        (torch.from_numpy(COLOUR), COLOUR),
        (channels_first(COLOUR), COLOUR),
        (channels_first(GREY), GREY),
        (channels_first(COLOUR).float() / 255, COLOUR),
        (torch.from_numpy(GREY[:, :, :, 0]).double() / 255, GREY),
        (COLOUR.astype(np.float32) / 255, COLOUR),
        (list(COLOUR), COLOUR),
    ],
)
def test_every_form_of_the_same_images(images: Any, expected: np.ndarray[Any, Any]) -> None:
    made = bundle_from(images, LABELS)
    assert np.array_equal(made.train.images, expected)
    assert made.train.digest == bundle_from(expected, torch.from_numpy(LABELS)).train.digest
    assert made.train.class_names == ("0", "1", "2")
    assert (made.name, made.test) == ("arrays", None)


def test_test_images_and_groups() -> None:
    made = bundle_from(COLOUR, LABELS, test=(COLOUR[:4], [0, 1, 2, 3]), groups=LABELS, mirror=False, name="mine")
    assert made.test is not None
    assert (len(made.train), len(made.test), made.mirror, made.name) == (COUNT, 4, False, "mine")
    assert made.train.class_names == made.test.class_names == ("0", "1", "2", "3")
    assert made.train.groups == tuple(str(n) for n in LABELS)
    held = bundle_from(COLOUR, LABELS, groups=LABELS, holdout=0.5)
    assert held.train.groups == tuple(str(n) for n in held.train.labels)


def test_what_cannot_be_taken_is_one_sentence() -> None:
    assert "images is float32; give uint8 pixels" in refused(COLOUR.astype(np.float32), LABELS)
    assert "between -1 and 1" in refused(np.linspace(-1, 1, COUNT * 9).reshape(COUNT, 3, 3), LABELS)
    assert "float64" in refused(np.full((COUNT, 2, 2), np.nan), LABELS)
    assert "images is int64; give uint8" in refused(COLOUR.astype(np.int64), LABELS)
    assert "has the shape [24, 90]" in refused(COLOUR.reshape(COUNT, -1), LABELS)
    assert "channels first" in refused(COLOUR.transpose(0, 3, 1, 2), LABELS)
    assert "do not all have one shape" in refused([COLOUR[0], GREY[0]], [0, 1])
    assert "images is empty" in refused(COLOUR[:0], [])
    assert "labels has the shape [23]" in refused(COLOUR, LABELS[1:])
    assert "labels is float64" in refused(COLOUR, LABELS.astype(float))
    assert "outside 0..2" in refused(COLOUR, LABELS - 1, ["a", "b", "c"])
    assert "looks like an identifier" in refused(COLOUR, LABELS * 10**6)
    assert "the same name" in refused(COLOUR, LABELS, ["a", "b", "a"])
    assert "these are 6x5x3 and 6x5x1" in refused(COLOUR, LABELS, test=(GREY, LABELS))
    assert "labels of test" in refused(COLOUR, LABELS, test=(COLOUR, LABELS[1:]))
    assert "groups has 2 values for 24 images" in refused(COLOUR, LABELS, groups=["a", "b"])
    assert "below 1, not 1.5" in refused(COLOUR, LABELS, holdout=1.5)


class Items(Dataset[Any]):
    """A dataset of ready items; like many, it never says that it is at its end."""

    def __init__(self, items: list[Any], classes: list[str] | None = None) -> None:
        self.items = items
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index % len(self.items)]


@pytest.mark.parametrize("form", ["pillow", "array", "tensor", "floats", "index"])
def test_a_torch_dataset(form: str) -> None:
    forms: dict[str, Any] = {
        "pillow": Image.fromarray,
        "array": lambda image: image,
        "tensor": lambda image: torch.from_numpy(image).permute(2, 0, 1),
        "floats": lambda image: torch.from_numpy(image).permute(2, 0, 1) / 255,
        "index": lambda image: image,
    }
    number = torch.tensor if form == "index" else int
    data = Items([(forms[form](x), number(int(y))) for x, y in zip(COLOUR, LABELS, strict=True)], ["cat", "dog", "owl"])
    made = bundle_from_torch(data, holdout=0.25)
    same = bundle_from(COLOUR, LABELS, ["cat", "dog", "owl"], holdout=0.25)
    assert made.test is not None
    assert same.test is not None
    assert (made.train.digest, made.test.digest, made.name) == (same.train.digest, same.test.digest, "Items")


def test_grey_pictures_and_other_datasets() -> None:
    data = Items([(Image.fromarray(x[:, :, 0]), int(y)) for x, y in zip(GREY, LABELS, strict=True)])
    made = bundle_from_torch(data, ["a", "b", "c"], test=data, name="grey")
    assert np.array_equal(made.train.images, GREY)
    assert made.test is not None
    assert (made.test.digest, made.name) == (made.train.digest, "grey")
    pairs = TensorDataset(channels_first(COLOUR), torch.from_numpy(LABELS))
    assert bundle_from_torch(pairs).train.digest == bundle_from(COLOUR, LABELS).train.digest
    stream = iter(list(zip(COLOUR, LABELS, strict=True)))
    assert bundle_from_torch(stream).train.digest == bundle_from(COLOUR, LABELS).train.digest


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "holds no images"),
        ([COLOUR[0]], r"item 0 .* is not an \(image, label\) pair"),
        ([(COLOUR[0], 0), (COLOUR[1], "dog")], "item 1"),
        ([(COLOUR[0], 0), (GREY[1], 1)], "images 0 and 1 of the dataset are 6x5x3 and 6x5x1"),
        ([(torch.randn(3, 6, 5), 0)], "image 0 of the dataset is float32"),
    ],
)
def test_a_torch_dataset_that_cannot_be_taken(items: list[Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        bundle_from_torch(Items(items))
