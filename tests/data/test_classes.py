"""Lists of classes by name: put together, compared with images, fixed beforehand, renamed; names that look alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import flyby
from flyby.data.arrays import bundle_from
from flyby.data.classes import (
    fitted,
    fitted_bundle,
    is_numbered,
    listed_site,
    lookalikes,
    match,
    part_for,
    prepared,
    read_list,
    read_synonyms,
    renamed,
    spread,
    union,
)
from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import Part, whole_site
from flyby.errors import BadInput
from flyby.fusion.alignment import class_list
from flyby.models import ModelSpec
from flyby.parcels import parcel


def data(*names: str, labels: tuple[int, ...] | None = None) -> Dataset:
    """One image per label, whose first pixel is the label."""
    given = np.array(range(len(names)) if labels is None else labels)
    images = np.zeros((len(given), 8, 8, 1), np.uint8)
    images[:, 0, 0, 0] = given
    return Dataset(images, given, names, "some")


def test_a_union_is_one_list_or_sorted_as_people_sort() -> None:
    assert union([("b", "a"), ("b", "a")]) == ("b", "a")
    assert union([("b", "a"), ("a", "b")]) == ("a", "b")
    assert union([("10", "9"), ("1", "2")]) == ("1", "2", "9", "10")


def test_numbers_go_to_the_places_of_their_names() -> None:
    assert spread(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [1, -1, 0], 1, 9.0).tolist() == [[2, 9, 1], [4, 9, 3]]
    assert spread(torch.tensor([5, 6]), [1, 0]).tolist() == [6, 5]
    part = Part(torch.arange(3)[:, None], torch.tensor([0, 1, 2]))
    known, labels = part_for(part, ("cat", "dog", "fox"), ("fox", "cat"))
    assert known.labels.tolist() == [1, 0]
    assert known.images[:, 0].tolist() == [0, 2]
    assert labels.tolist() == [1, -1, 0]


def test_images_are_numbered_by_the_names_of_their_classes() -> None:
    moved, found = fitted(data("dog", "horse", "cat"), ("cat", "dog", "emu", "horse"))
    assert moved.labels.tolist() == [1, 3, 0]
    assert found.lacking == ["emu"]
    assert found.lines() == ["no images of: emu"]
    with pytest.raises(BadInput, match=r"does not know: Pferd \(2 images\); known are cat, dog: .*--skip-unknown"):
        fitted(data("cat", "Pferd", labels=(0, 1, 1)), ("cat", "dog"))
    kept, left = fitted(data("cat", "Pferd", labels=(1, 0, 1)), ("cat", "dog"), skip=True)
    assert (len(kept), kept.images[0, 0, 0, 0], left.left_out) == (1, 0, {"Pferd": 2})
    assert left.lines()[0] == "left out 2 images of unknown classes: Pferd (2)"
    fitted(data("cat", "empty", labels=(0,)), ("cat", "dog"))  # a class folder without images harms nobody
    with pytest.raises(BadInput, match="no image of a class that is known"):
        fitted(data("x", "y"), ("cat", "dog"), skip=True)


def test_classes_that_are_only_numbered_keep_their_places() -> None:
    assert is_numbered(("0", "1", "2"))
    assert not is_numbered(("1", "2"))
    assert match(("0", "1"), (1, 1), ("cat", "dog")).to == [0, 1]
    assert match(("cat", "dog"), (1, 1), ("0", "1")).to == [0, 1]
    assert match(("0", "1"), (1, 1), ("0", "1", "2")).to == [0, 1]
    assert match(("0", "1"), (1, 1), ("cat", "dog", "emu")).to == [-1, -1]
    assert match(("0", "1"), (1, 1), ("cat", "dog", "emu"), by_place=True).to == [0, 1]
    same = data("0", "1")
    assert fitted(same, ("0", "1"))[0] is same


def test_a_list_is_fixed_beforehand_and_names_are_changed_first() -> None:
    bundle = DataBundle("here", data("Pferd", "cat", "horse"), test=data("cat", "horse"))
    made = prepared(bundle, {"Pferd": "horse"}, ("cat", "dog", "horse"))
    assert made.train.class_names == ("cat", "dog", "horse")
    assert made.train.labels.tolist() == [2, 0, 2]
    assert made.train.counts() == [1, 0, 2]
    assert made.test is not None
    assert made.test.labels.tolist() == [0, 2]
    assert made.train.digest != bundle.train.digest
    with pytest.raises(BadInput, match=r"here has classes that the list of --classes does not know: Pferd.*add them"):
        prepared(bundle, None, ("cat", "dog", "horse"))
    both = renamed(data("Pferd", "cat", "horse"), {"Pferd": "horse"})
    assert (both.class_names, both.labels.tolist()) == (("horse", "cat"), [0, 1, 0])
    fit = fitted_bundle(bundle, ("cat", "horse", "Pferd"), "the model")
    assert fit.train.labels.tolist() == [2, 0, 1]


def test_a_site_in_memory_is_trained_over_the_list() -> None:
    bundle = bundle_from(
        np.zeros((4, 8, 8, 1), np.uint8), np.array([0, 1, 0, 1]), class_names=["dog", "ant"], holdout=0.0
    )
    site = whole_site(bundle, "a")
    moved = listed_site(site, ("ant", "bee", "dog"))
    assert moved.train.labels.tolist() == [2, 0, 2, 0]
    assert moved.counts == [2, 0, 2]
    made = flyby.train(site, "fedavg", model="mlp", epochs=1, classes=["ant", "bee", "dog"], device="cpu")
    assert (made.manifest.class_names, made.manifest.counts) == (("ant", "bee", "dog"), (2, 0, 2))
    with pytest.raises(BadInput, match="the list of classes does not know: ant"):
        listed_site(site, ("dog", "bee"))


def test_lists_and_synonyms_are_read_from_files(tmp_path: Path) -> None:
    names = tmp_path / "list.txt"
    names.write_text("\ufeff# all sites\ncat\n\n wild dog \n", encoding="utf-8")
    assert class_list(names) == read_list(names) == ("cat", "wild dog")
    pairs = tmp_path / "map.yaml"
    pairs.write_text("---\nPferd: horse\n'Hund': \"dog\"\n# no more\nmellanoma: melanoma\n")
    assert read_synonyms(pairs) == {"Pferd": "horse", "Hund": "dog", "mellanoma": "melanoma"}
    spec = ModelSpec(name="mlp", classes=2, channels=1, size=(8, 8), widths={"fc1": 2, "fc2": 2})
    weights = spec.build().state_dict()
    facts = {"sender": "a", "method": "fedavg", "spec": spec, "class_names": ("dog", "cat"), "samples": 0}
    parcel.write(parcel.make(weights=weights, **facts), tmp_path / "a.parcel")  # type: ignore[arg-type]
    assert class_list(tmp_path / "a.parcel") == ("dog", "cat")
    (tmp_path / "global").mkdir()
    (tmp_path / "global" / "model.json").write_text('{"class_names": ["x", "y"]}')
    assert class_list(tmp_path / "global") == ("x", "y")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no class"),
        ("cat\ncat\n", "two classes the same name"),
        ("a\x07b\n", "rename it"),
    ],
)
def test_a_list_that_will_not_do_is_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(BadInput, match=says):
        read_list(tmp_path / "list.txt")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Pferd\n", "line 1 .* write old: new"),
        ("Pferd: horse\nPferd: pony\n", "two names"),
        ("a: b\nb: c\n", "and that again"),
    ],
)
def test_synonyms_that_will_not_do_are_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "map.txt").write_text(text)
    with pytest.raises(BadInput, match=says):
        read_synonyms(tmp_path / "map.txt")


def test_files_that_are_not_there_or_no_text_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no file"):
        read_list(tmp_path / "none.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00cat")
    with pytest.raises(BadInput, match="cannot be read as UTF-8"):
        read_synonyms(tmp_path / "bytes.txt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.json").write_text("{}")
    with pytest.raises(BadInput, match="names no classes"):
        class_list(tmp_path / "folder")


def test_names_that_look_like_one_word_are_told() -> None:
    assert lookalikes([("Horse", "cat"), ("horse", "cat")]) == [("Horse", "horse")]
    assert lookalikes([("mellanoma",), ("melanoma",)]) == [("melanoma", "mellanoma")]
    assert lookalikes([("fire truck",), ("fire_truck",)]) == [("fire truck", "fire_truck")]
    assert lookalikes([("horse",), ("hosre",)]) == []  # two letters changed
    assert lookalikes([("horse", "house"), ("horse",)]) == []  # who has both says that they are two
    assert lookalikes([("class 1",), ("class 2",)]) == []
    assert lookalikes([("cat",), ("rat",)]) == []
    many = [tuple(f"word{i}a" for i in range(300)), tuple(f"word{i}b" for i in range(300))]
    assert len(lookalikes(many)) == 300
    assert lookalikes([tuple(f"{i}x" for i in range(6000)), ("a",)]) == []  # so many are not compared
