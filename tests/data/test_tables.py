"""Images named by a CSV or TSV file: what it says is what is read, and what it gets wrong is one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from factories import NAMES, encode, make_images, make_tree
from flyby.data import sources
from flyby.errors import BadInput

IMAGES = make_images(6)
LABELS = [0, 1, 2, 0, 1, 2]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Six images in one folder, 0.png to 5.png, and a table beside it."""
    (tmp_path / "d" / "pixels").mkdir(parents=True)
    for i, image in enumerate(IMAGES):
        (tmp_path / "d" / "pixels" / f"{i}.png").write_bytes(encode(image))
    return tmp_path / "d"


def rows(separator: str = ",") -> list[str]:
    return [f"pixels/{i}.png{separator}{NAMES[label]}" for i, label in enumerate(LABELS)]


def write(home: Path, *lines: str, name: str = "images.csv") -> Path:
    (home / name).write_text("\n".join(lines) + "\n")
    return home / name


def rejected(table: Path, column: str | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        sources.load(str(table), column=column)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("header", ["path,label", "Label , Path", "filename,class", "image,label", None])
def test_a_table_names_its_images(home: Path, header: str | None) -> None:
    lines = [",".join(reversed(row.split(","))) for row in rows()] if header == "Label , Path" else rows()
    bundle = sources.load(str(write(home, *([header] if header else []), *lines)))
    assert np.array_equal(bundle.train.images, IMAGES)
    assert bundle.train.class_names == NAMES
    assert bundle.train.labels.tolist() == LABELS


def test_a_table_and_folders_of_the_same_images_are_the_same_data(home: Path) -> None:
    order = np.argsort(LABELS, kind="stable")
    folders = make_tree(home / "tree", IMAGES, LABELS)
    table = write(home, "path,label", *(rows()[i] for i in order))
    assert sources.load(str(table)).train.digest == sources.load(str(folders)).train.digest


def test_tabs_splits_groups_quotes_and_marks(home: Path) -> None:
    parts = ["train", "train", "train", "Test", "val", "train"]
    lines = [f"{row}\t{part}\tu{i}" for i, (row, part) in enumerate(zip(rows("\t"), parts, strict=True))]
    table = write(home, "\ufeffpath\tlabel\tsplit\tuser", *lines, "", name="images.TSV")
    bundle = sources.load(str(table), column="user")
    assert bundle.train.groups == ("u0", "u1", "u2", "u5")
    assert bundle.test is not None
    assert bundle.validation is not None
    assert (bundle.train.labels.tolist(), bundle.test.labels.tolist()) == ([0, 1, 2, 2], [0])
    assert bundle.validation.labels.tolist() == [1]
    quoted = write(home, 'path,label,"note"', '"pixels/0.png","big, cat","a ""b"""', "pixels/1.png,dog,", name="q.csv")
    assert sources.load(str(quoted)).train.class_names == ("big, cat", "dog")


def test_other_rows_are_other_data(home: Path) -> None:
    first = sources.load(str(write(home, "path,label", *rows()))).train.digest
    assert sources.load(str(write(home, "path,label", *rows()[::-1]))).train.digest != first
    changed = [*rows()[:5], "pixels/5.png,emu"]
    assert sources.load(str(write(home, "path,label", *changed))).train.class_names == ("cat", "dog", "emu", "owl")


def test_paths_are_from_the_folder_of_the_table(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write(home, "path,label", f"{home / 'pixels' / '0.png'},cat", "./pixels/1.png,dog")
    monkeypatch.chdir(home)
    assert len(sources.load("images.csv").train) == 2
    assert len(sources.load(str(table)).train) == 2


def test_an_image_named_again_counts_once(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    once = sources.load(str(write(home, "path,label", *rows())))
    again = sources.load(str(write(home, "path,label", *rows(), "./pixels/0.png,cat", rows()[2], name="again.csv")))
    assert again.train.labels.tolist() == once.train.labels.tolist()
    assert "again.csv names images again in 2 of its lines; each counts once" in caplog.text
    owners = write(home, "path,label,user", "pixels/0.png,cat,u0", "pixels/1.png,dog,u1", "pixels/0.png,cat,u1")
    assert "lines 2 and 4 of" in (said := rejected(owners, column="user"))
    assert "name the same image (cat, train, u0; cat, train, u1)" in said
    assert len(sources.load(str(owners)).train) == 2, "who they are is not asked here"


def test_broken_images_of_a_table_are_named(home: Path) -> None:
    (home / "pixels" / "3.png").write_bytes(b"junk")
    assert sources.load(str(write(home, "path,label", *rows()))).broken == ("pixels/3.png",)


WRONG: dict[str, tuple[list[str], str]] = {
    "empty": ([], "is empty; give rows of path,label"),
    "header only": (["path,label"], "names no images to train on"),
    "no header, no images": (["a,b", "c,d"], "no column 'path': its first line is a, b"),
    "no label column": (["path,kind", "pixels/0.png,cat"], "no column 'label': its first line is path, kind"),
    "no path column": (["label,where", "cat,pixels/0.png"], "no column 'path'"),
    "one column": (["path", "pixels/0.png"], "has one column (path)"),
    "semicolons": (["path;label", "pixels/0.png;cat"], "has one column (path;label)"),
    "no label": (["path,label", "pixels/0.png,"], "line 2 of"),
    "no path": (["path,label", "pixels/0.png,cat", ",dog"], "line 3 of"),
    "too many columns": (["path,label", "pixels/0.png,cat,dog"], "has 3 columns where the first has 2; quote"),
    "missing": ([*rows(), "pixels/9.png,cat"], "1 of the 7 images that"),
    "a folder": (["path,label", "pixels,cat"], "not there (first: line 2"),
    "outside": (["path,label", "../secret.png,cat"], "outside the folder of the table"),
    "hidden outside": (["path,label", "pixels/../../secret.png,cat"], "outside the folder of the table"),
    "absolute": (["path,label", "/etc/hostname,cat"], "'/etc/hostname', outside the folder of the table"),
    "unknown split": (["path,label,split", "pixels/0.png,cat,trian"], "unknown split 'trian'; did you mean 'train'"),
    "no split": (["path,label,split", "pixels/0.png,cat,"], "unknown split ''"),
    "only test": (["path,label,split", "pixels/0.png,cat,test"], "names no images to train on"),
    "two labels": ([*rows(), "pixels/0.png,dog"], "lines 1 and 7 of"),
    "train and test": (["path,label,split", "pixels/0.png,cat,train", "pixels/0.png,cat,test"], "name the same image"),
    "bad class": (["path,label", f"pixels/0.png,{'x' * 300}"], "a class called"),
    "open quote": (["path,label", '"pixels/0.png,cat'], "is not a readable table"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_table_gets_wrong_is_one_sentence(home: Path, case: str) -> None:
    lines, said = WRONG[case]
    assert said in rejected(write(home, *lines))


def test_what_is_no_table(home: Path) -> None:
    (home / "a.csv").write_bytes(b"\xff\xfe\x00p")
    assert "not a readable table (not UTF-8)" in rejected(home / "a.csv")
    assert "does not exist" in rejected(home / "absent.csv")
    assert "no column 'user'; its columns are path, label" in rejected(write(home, *rows()), column="user")
    (home / "folder.csv").mkdir()
    assert "is empty" in rejected(home / "folder.csv"), "a folder is a folder, whatever it is called"
