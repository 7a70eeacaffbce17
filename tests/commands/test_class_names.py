"""The command line where sites and test images name their classes differently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from factories import call, done, make_tree, one_line
from flyby.data.dataset import Dataset
from flyby.errors import BadInput
from flyby.fusion import load_predictor
from flyby.fusion.evaluation import accuracy, evaluate_dataset

ALL = ("cat", "dog", "fox", "horse")
RIDGE = ("--method", "ridge", "--model", "mlp", "--holdout", 0)


def pictures(own: tuple[str, ...], seed: int, each: int = 10) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 60, (each * len(own), 8, 8, 1))
    labels = [place for place in range(len(own)) for _ in range(each)]
    for image, label in zip(images, labels, strict=True):
        image[2 * ALL.index(own[label]) : 2 * ALL.index(own[label]) + 2] += 180
    return images.astype(np.uint8), labels


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites of different classes, fused by ridge; and labelled images of all classes."""
    top = tmp_path_factory.mktemp("classes")
    for seed, (name, own) in enumerate({"a": ("cat", "dog", "horse"), "b": ("dog", "fox")}.items()):
        make_tree(top / name, *pictures(own, seed), own)
        done("train", "--data", top / name, *RIDGE, "--out", top / f"{name}.parcel")
    make_tree(top / "test", *pictures(ALL, 9, 5), ALL)
    done("fuse", top / "a.parcel", top / "b.parcel", "--out", top / "global", "--no-export")
    return top


def test_fuse_says_who_holds_what(place: Path, tmp_path: Path) -> None:
    said = done("fuse", place / "a.parcel", place / "b.parcel", "--out", tmp_path / "model", "--no-export")
    lines = said.out.splitlines()
    assert lines[0] == "images by class and site:"
    assert [line.split() for line in lines[1:6]] == [
        ["class", "a", "b"],
        ["cat", "10", "-"],
        ["dog", "10", "10"],
        ["fox", "-", "10"],
        ["horse", "10", "-"],
    ]
    told = json.loads(
        done("fuse", place / "a.parcel", place / "b.parcel", "--out", tmp_path / "two", "--no-export", "--json").out
    )
    assert told["classes"]["dog"] == {"a": 10, "b": 10}


def test_evaluate_goes_by_name(place: Path, tmp_path: Path) -> None:
    """The same images with a class renamed are not silently wrong: refused, renamed back, or left out."""
    words = ("evaluate", place / "global", "--no-report", "--json", "--data")
    told = json.loads(done(*words, place / "test").out)
    assert told["accuracy"] > 0.9
    assert told["lacking"] == []
    other = tmp_path / "other"
    shutil.copytree(place / "test", other)
    (other / "horse").rename(other / "Aferd")  # now the first of the sorted folders: every number moves
    refused = one_line(call(*words, other))
    assert "does not know: Aferd (5 images); known are cat, dog, fox, horse" in refused
    (tmp_path / "map.txt").write_text("Aferd: horse\n")
    again = json.loads(done(*words, other, "--synonyms", tmp_path / "map.txt").out)
    assert again["accuracy"] == told["accuracy"]
    left = json.loads(done(*words, other, "--skip-unknown").out)
    assert (left["images"], left["left_out"], left["lacking"]) == (15, {"Aferd": 5}, ["horse"])
    shutil.rmtree(other / "cat")
    assert "no images of: cat, horse" in done(*[w for w in words if w != "--json"], other, "--skip-unknown").out


def test_numbers_without_names_are_still_places(place: Path) -> None:
    images, labels = pictures(ALL, 9, 5)
    scores, part = evaluate_dataset(
        load_predictor(place / "global"), Dataset(images, np.array(labels), ("0", "1", "2", "3"), "x")
    )
    assert accuracy(scores, part.labels) > 0.9
    with pytest.raises(BadInput, match="does not know: 0"):
        evaluate_dataset(load_predictor(place / "global"), Dataset(images[:5], np.array(labels[:5]), ("0", "1"), "x"))


def test_train_takes_a_list_and_synonyms(place: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("\n".join(ALL))
    words = ("train", "--data", place / "b", *RIDGE, "--no-report", "--json", "--force")
    out = ("--out", tmp_path / "b.parcel")
    assert json.loads(done(*words, *out, "--classes", tmp_path / "list.txt").out)["counts"] == [0, 10, 10, 0]
    refused = one_line(call(*words, *out, "--classes", place / "a.parcel"))
    assert "does not know: fox (10 images); known are cat, dog, horse" in refused
    (tmp_path / "map.yaml").write_text("fox: horse\n")
    renamed = done(*words, *out, "--classes", place / "a.parcel", "--synonyms", tmp_path / "map.yaml")
    assert json.loads(renamed.out)["counts"] == [0, 10, 10]
    listed = done("fuse", place / "a.parcel", tmp_path / "b.parcel", "--out", tmp_path / "model", "--no-export")
    assert "images by class" not in listed.out


def test_a_late_site_brings_a_new_class_and_validation_goes_by_name(place: Path, tmp_path: Path) -> None:
    done("fuse", place / "a.parcel", "--out", tmp_path / "model", "--no-export")
    done("fuse", "--add", place / "b.parcel", tmp_path / "model", "--no-export")
    assert load_predictor(tmp_path / "model").class_names == ALL
    whole = json.loads(
        done(
            *("fuse", place / "a.parcel", place / "b.parcel", "--out", tmp_path / "judged", "--no-export", "--json"),
            *("--validation", place / "test"),
        ).out
    )
    assert whole["validation"]["accuracy"] > 0.9
    assert whole["validation"]["best_site_accuracy"] <= 0.75
    done("fuse", "--remove", "b", tmp_path / "model", "--no-export")
    assert load_predictor(tmp_path / "model").class_names == ("cat", "dog", "horse")
    audit = ("audit", place / "global", "--members", place / "a", "--others", place / "test", "--json")
    assert json.loads(done(*audit).out)["members"] == 30


def test_names_that_look_alike_are_noted(place: Path, tmp_path: Path) -> None:
    make_tree(tmp_path / "c", *pictures(("horse", "cat"), 4), ("Horse", "cat"))
    done("train", "--data", tmp_path / "c", *RIDGE, "--out", tmp_path / "c.parcel")
    said = done("fuse", place / "a.parcel", tmp_path / "c.parcel", "--out", tmp_path / "model", "--no-export")
    assert "note: Horse and horse look like the same class" in said.err
    assert "--synonyms" in said.err
