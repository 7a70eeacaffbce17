"""Wrong data, as people give it: every case is one sentence that says what is wrong and what to do, exit code 2 and no
traceback."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factories import NAMES, call, make_images, make_npz, make_parquet, make_tree, one_line, random_parcel
from flyby.parcels import parcel

IMAGES, LABELS = make_images(6), [0, 1, 2, 0, 1, 2]
Case = tuple[Callable[[Path], Sequence[object]], str]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBY_CACHE", str(tmp_path / "cache"))


def text(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


def good(here: Path) -> Path:
    return make_tree(here / "good", IMAGES, LABELS)


def model(here: Path) -> Path:
    parcel.write(random_parcel("a"), here / "a.parcel")
    return here / "a.parcel"


def train(here: Path, data: object, *words: object) -> Sequence[object]:
    return ("train", "--data", data, "--out", here / "new.parcel", "--epochs", 1, "-q", *words)


def tree(here: Path, images: Any, labels: Any, names: Sequence[str] = NAMES) -> Path:
    return make_tree(here / "d", images, labels, names)


def sites(here: Path) -> Path:
    for site in ("hospital-a", "hospital-b"):
        make_tree(here / "d" / site, IMAGES, LABELS)
    return here / "d"


def splits(here: Path, *names: str) -> Path:
    for name in names:
        make_tree(here / "d" / name, IMAGES, LABELS)
    return here / "d"


def table(here: Path, *lines: str, name: str = "t.csv") -> Path:
    good(here)
    return text(here / name, *lines)


def parquet(here: Path, labels: Any, names: Sequence[str] | None = NAMES, **words: Any) -> Path:
    make_parquet(here / "p", "train", IMAGES[: len(labels)], labels, names, **words)
    return here / "p"


def npz(here: Path, **arrays: Any) -> Path:
    return make_npz(here / "a.npz", **{"images": IMAGES, "labels": np.array(LABELS), **arrays})


def nothing(here: Path) -> Path:
    (here / "empty").mkdir()
    return here / "empty"


def two_parquets(here: Path) -> Path:
    for site in ("a", "b"):
        make_parquet(here / "p" / site, "train", IMAGES, LABELS)
    return here / "p"


def lacking_shard(here: Path) -> Path:
    make_parquet(here / "p", "train", IMAGES, LABELS, shards=3)[1].unlink()
    return here / "p"


def channels_first(here: Path) -> Path:
    for name in NAMES:
        (here / "d" / name).mkdir(parents=True)
        np.save(here / "d" / name / "a.npy", np.zeros((4, 16, 16), np.uint16))
    return here / "d"


def holes(here: Path) -> Path:
    for name in NAMES:
        (here / "d" / name).mkdir(parents=True)
        np.save(here / "d" / name / "a.npy", np.full((8, 8, 5), np.nan, np.float32))
    return here / "d"


CASES: dict[str, Case] = {
    # what --data names
    "a name near one": (lambda h: ("data", "digit"), "did you mean 'digits'"),
    "a name near none": (lambda h: ("data", "nothinglikeit"), "unknown data source"),
    "no such folder": (lambda h: ("data", h / "absent"), "does not exist"),
    "no such table": (lambda h: ("data", h / "absent.csv"), "does not exist"),
    "a file of words": (lambda h: ("data", text(h / "a.txt", "x")), "unknown kind"),
    "a photograph": (lambda h: ("data", text(h / "a.jpg", "x")), "unknown kind"),
    "an empty folder": (lambda h: ("data", nothing(h)), "is empty"),
    "a folder of files": (lambda h: ("data", text(h / "d" / "a.txt", "x").parent), "neither Parquet files nor class"),
    "loose images": (
        lambda h: ("data", (good(h) / "cat")),
        "neither Parquet files nor class folders, but images: if it is one class, name the folder above it",
    ),
    "empty class folders": (lambda h: ("data", tree(h, [], [])), "hold no images"),
    "the hub's name": (lambda h: ("data", "hf:"), "hf:"),
    # one level off
    "one level too high": (lambda h: ("data", sites(h)), "one level too high"),
    "one level too high, trained": (lambda h: train(h, sites(h)), "name one of them (--data"),
    "one level above one site": (lambda h: ("data", make_tree(h / "d" / "a", IMAGES, LABELS).parent), "d/a)"),
    "test and val alone": (
        lambda h: ("data", splits(h, "test", "val")),
        "none called train",
    ),
    "two validation splits": (
        lambda h: ("data", splits(h, "train", "val", "dev")),
        "two validation splits",
    ),
    # damaged images
    "all broken": (lambda h: ("data", tree(h, [b"x"] * 3, [0, 1, 2])), "all 3 images cannot be decoded"),
    "all broken, trained": (lambda h: train(h, tree(h, [b""] * 3, [0, 1, 2])), "all 3 images cannot be decoded"),
    "mostly broken": (lambda h: ("data", tree(h, [b"x", b"", b"y", *IMAGES[:2]], [0, 1, 2, 0, 1])), "more than half"),
    "broken, evaluated": (
        lambda h: ("evaluate", model(h), "--data", tree(h, [b"x"] * 3, [0, 1, 2], ("rows", "columns", "checks"))),
        "cannot be decoded",
    ),
    "broken, audited": (
        lambda h: ("audit", model(h), "--members", tree(h, [b"x"] * 3, [0, 1, 2]), "--others", good(h)),
        "cannot be decoded",
    ),
    "tiles with their channels first": (lambda h: ("data", channels_first(h)), "channels first"),
    "tiles with holes": (lambda h: ("data", holes(h)), "not finite"),
    "tiles and photographs": (
        lambda h: ("data", (channels_first(h), tree(h, IMAGES, LABELS))[1]),
        "channels first",
    ),
    # sizes and channels
    "size 0": (lambda h: ("data", good(h), "--size", 0), "between 1 and 4096"),
    "size 5000": (lambda h: train(h, good(h), "--size", 5000), "between 1 and 4096"),
    "size of words": (lambda h: train(h, good(h), "--size", "big"), "big"),
    "fit 0": (lambda h: train(h, good(h), "--set", "data.fit=0"), "data.fit"),
    "two channels": (lambda h: train(h, good(h), "--set", "data.channels=2"), "data.channels"),
    "evaluated at another size": (
        lambda h: ("evaluate", model(h), "--data", npz(h, class_names=random_names()), "--size", 16),
        "(8, 8)",
    ),
    # tables
    "an empty table": (lambda h: ("data", table(h)), "is empty"),
    "a table without a header": (lambda h: ("data", table(h, "a,b", "c,d")), "no column 'path'"),
    "a table without labels": (lambda h: ("data", table(h, "path,kind", "good/cat/00000.png,x")), "no column 'label'"),
    "a table with semicolons": (lambda h: ("data", table(h, "path;label")), "one column"),
    "a table of absent images": (lambda h: ("data", table(h, "path,label", "x.png,cat")), "1 of the 1 images"),
    "a table that leaves its folder": (
        lambda h: ("data", table(h, "path,label", "../x.png,cat")),
        "outside the folder",
    ),
    "a table of other folders": (lambda h: ("data", table(h, "path,label", "/x.png,cat")), "outside the folder"),
    "a row without a label": (lambda h: ("data", table(h, "path,label", "good/cat/00000.png,")), "line 2"),
    "a row too long": (lambda h: ("data", table(h, "path,label", "a,b,c")), "3 columns where the first has 2"),
    "an odd split": (lambda h: ("data", table(h, "path,label,split", "good/cat/00000.png,a,x")), "unknown split 'x'"),
    "two labels for one image": (
        lambda h: ("data", table(h, "path,label", "good/cat/00000.png,a", "good/cat/00000.png,b")),
        "lines 2 and 3",
    ),
    "a table of bytes": (lambda h: ("data", _bytes(h / "t.csv", b"\xff\xfe\x00")), "not UTF-8"),
    "a table for a column": (
        lambda h: train(h, table(h, "path,label", "good/cat/00000.png,a"), "--set", "data.column=user"),
        "no column 'user'",
    ),
    # Parquet
    "no Parquet": (lambda h: ("data", _bytes(h / "p" / "train.parquet", b"PAR1").parent), "not a readable Parquet"),
    "several Parquet sets": (lambda h: ("data", two_parquets(h)), "several Parquet datasets (a, b)"),
    "a shard lost": (lambda h: ("data", lacking_shard(h)), "names promise 3"),
    "labels that are fractions": (lambda h: ("data", parquet(h, [0.5, 1.5])), "holds double"),
    "a label too many": (lambda h: ("data", parquet(h, [0, 1, 3])), "label 3 at"),
    "a label lost": (lambda h: ("data", parquet(h, ["a", None], None)), "1 rows without a label"),
    "no label column": (
        lambda h: ("data", parquet(h, [0, 1], label_column="a", columns={"b": [1, 2]})),
        "no label column",
    ),
    "identifiers for labels": (lambda h: ("data", parquet(h, [0, 10**9], None)), "looks like an identifier"),
    # arrays
    "no archive": (lambda h: ("data", _bytes(h / "a.npz", b"PK")), "not a readable .npz"),
    "arrays under other names": (lambda h: ("data", make_npz(h / "a.npz", x=IMAGES)), "has the keys x"),
    "arrays of unlike length": (lambda h: ("data", npz(h, labels=np.array([0, 1]))), "for 6 images"),
    "arrays with channels first": (lambda h: ("data", npz(h, images=IMAGES.transpose(0, 3, 1, 2))), "channels first"),
    # test images of one's own
    "no test folder": (lambda h: train(h, good(h), "--test-dir", h / "absent"), "does not exist"),
    "an empty test folder": (lambda h: train(h, good(h), "--test-dir", nothing(h)), "is empty"),
    "tests of other classes": (
        lambda h: train(h, good(h), "--test-dir", make_tree(h / "t", IMAGES[:1], [0], ("fox",))),
        "classes that the training data does not know: fox",
    ),
    "tests of other classes, run": (
        lambda h: (
            *("run", "--data", good(h), "--test-dir", make_tree(h / "t", IMAGES[:1], [0], ("fox",)), "-q"),
            *("--out", h / "r", "--method", "local"),
        ),
        "does not know: fox",
    ),
    "broken tests": (
        lambda h: train(h, good(h), "--test-dir", make_tree(h / "t", [b"x"], [0], ("cat",))),
        "all 1 images cannot be decoded",
    ),
    # predictions
    "no image to see": (lambda h: ("predict", model(h), h / "absent.png"), "absent.png"),
}


def _bytes(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def random_names() -> Any:
    return np.array(random_parcel("a").manifest.class_names)


@pytest.mark.parametrize("case", CASES)
def test_wrong_data_is_one_sentence(tmp_path: Path, case: str) -> None:
    words, said = CASES[case]
    answer = call(*words(tmp_path))
    line = answer.err.rstrip("\n").split("\n")[-1] if "note:" in answer.err else "flyby: " + one_line(answer)
    assert answer.code == 2, answer.err
    assert line.startswith("flyby: ")
    assert said in line
    assert "Traceback" not in answer.err
    assert not (tmp_path / "new.parcel").exists()


def test_the_cases_are_many() -> None:
    assert len(CASES) >= 55


def test_a_few_broken_files_do_not_end_a_command(tmp_path: Path) -> None:
    data = make_tree(tmp_path / "d", [*IMAGES, b"junk"], [*LABELS, 0])
    answer = call("data", data, "--json")
    assert answer.code == 0, answer.err
    facts = json.loads(answer.out)
    assert facts["broken"] == ["cat/00006.png"]
    assert facts["classes"] == {"cat": 2, "dog": 2, "owl": 2}
    assert "note: 1 broken image(s) skipped: cat/00006.png" in answer.err
