"""What no dataset may bring in: names that are no text, headers that lie, class names that no parcel would take. One
sentence each, memory as large as the file, and never after the training."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from factories import NAMES, call, done, encode, make_images, make_npz, make_parquet, make_tree, one_line, random_parcel
from flyby.data import sources
from flyby.data.arrays import bundle_from
from flyby.errors import BadInput
from flyby.names import Label, check_labels
from flyby.parcels import parcel

LABELS = np.arange(6) % 3
LATIN = os.fsdecode(b"caf\xe9")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBY_CACHE", str(tmp_path / "cache"))


def rejected(name: str | Path, **options: Any) -> str:
    with pytest.raises(BadInput) as caught:
        sources.load(str(name), **options)
    str(caught.value).encode()  # no half of a character reaches a terminal
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- names that are no text


def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "tree", make_images(6), LABELS)
    plain = sources.load(str(root)).train.digest
    for i, path in enumerate(sorted(root.rglob("*.png"))):
        path.rename(path.with_name(f"{i}-{LATIN}.png"))
    assert sources.load(str(root)).train.digest == plain
    for broken in sorted(root.rglob("*.png"))[:4]:
        broken.write_bytes(b"no image")
    assert r"0-caf\udce9.png" in rejected(root)
    assert "caf" in one_line(call("data", root))


def test_a_class_folder_or_a_source_may_not(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "tree", make_images(6), LABELS, ("cat", "dog", LATIN))
    assert r"a class called 'caf\udce9'" in rejected(root)
    odd = make_tree(tmp_path / LATIN, make_images(6), LABELS)
    assert r"caf\udce9' cannot stand in a result" in rejected(odd)
    assert "caf" in one_line(call("train", "--data", odd, "--out", tmp_path / "a.parcel"))
    assert "cannot stand in a result" in rejected("a\0b")


def test_predict_takes_any_name(tmp_path: Path) -> None:
    parcel.write(random_parcel("a"), tmp_path / "a.parcel")
    image = tmp_path / f"{LATIN}.png"
    image.write_bytes(encode(make_images(1, (8, 8), 1)[0]))
    for words in ((), ("--json",)):
        done("predict", tmp_path / "a.parcel", image, *words).out.encode()
    assert "no image file" in one_line(call("predict", tmp_path / "a.parcel", tmp_path / f"{LATIN}.jpg"))


# -- headers that lie


def npy(header: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode("latin-1")
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text + body


def described(shape: str, descr: str = "'|u1'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"


def plain_npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def pickled() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


LIES: dict[str, bytes] = {
    "huge": npy(described("(1000000000000, 8, 8, 3)"), b"x" * 100),
    "negative": npy(described("(-6, -8, 8)"), b"x" * 384),
    "too many": npy(described("(7, 8, 8)"), b"x" * 384),
    "too few": npy(described("(5, 8, 8)"), b"x" * 384),
    "overflow": npy(described("(4611686018427387904, 4, 1)"), b"x"),
    "item": npy(described("(1,)", "'V4000000000'"), b"x"),
    "pickle": pickled(),
    "object": npy(described("(1,)", "'|O'"), b"cos\nsystem\n(S'true'\ntR."),
    "nested": npy(described("(1,)", "[('a', [('b', '|O')])]"), b"x" * 8),
    "deep": npy("(" * 9000 + ")" * 9000 + "\n"),
    "signs": npy(described("(" + "-" * 8000 + "6,)"), b"x" * 6),
    "nonsense": npy("}{\n"),
    "no dtype": npy(described("(6,)", "'|x1'"), b"x" * 6),
    "short": b"\x93NUM",
    "empty": b"",
    "version": npy(described("(6,)"), b"x" * 6, b"\x09\x00"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_array_is_refused_in_the_memory_of_its_file(tmp_path: Path, lie: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", LIES[lie])
        archive.writestr("labels.npy", plain_npy(LABELS))
    (tmp_path / "tree" / "a").mkdir(parents=True)
    (tmp_path / "tree" / "b").mkdir()
    (tmp_path / "tree" / "a" / "x.npy").write_bytes(LIES[lie])
    tracemalloc.start()
    try:
        assert "not a readable .npz" in rejected(tmp_path / "a.npz")
        assert "cannot be decoded" in rejected(tmp_path / "tree")
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()


def damaged(path: Path) -> None:
    np.savez_compressed(path, images=make_images(6), labels=LABELS)
    data = bytearray(path.read_bytes())
    data[80:400] = b"\xff" * 320
    path.write_bytes(data)


def bomb(path: Path) -> None:
    """A megabyte that unpacks to 272."""
    size = 17 << 24
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("images.npy", "w", force_zip64=True) as file:
            file.write(npy(described(f"({size // 64}, 8, 8)")))
            for _ in range(size >> 24):
                file.write(bytes(1 << 24))
        archive.writestr("labels.npy", plain_npy(LABELS))


def locked(path: Path) -> None:
    make_npz(path, images=make_images(6), labels=LABELS)
    data = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flag of an encrypted member
        start = 0
        while (start := data.find(mark, start)) >= 0:
            data[start + place] |= 1
            start += 4
    path.write_bytes(data)


@pytest.mark.parametrize("make", [damaged, bomb, locked, lambda path: path.write_bytes(b"PK\x03\x04")])
def test_a_damaged_archive_is_one_sentence(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "a.npz")
    tracemalloc.start()
    try:
        assert "a.npz" in rejected(tmp_path / "a.npz")
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()


def test_arrays_in_fortran_order_and_of_other_bytes_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    images = make_images(6)
    plain = sources.load(str(make_npz(tmp_path / "a.npz", images=images, labels=LABELS))).train.digest
    turned = make_npz(tmp_path / "b.npz", images=np.asfortranarray(images), labels=LABELS.astype(">i2"))
    assert sources.load(str(turned)).train.digest == plain
    np.savez_compressed(tmp_path / "c.npz", images=images, labels=LABELS, unused=np.zeros(9))
    assert sources.load(str(tmp_path / "c.npz")).train.digest == plain


def test_deep_json_in_parquet_metadata(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    (path,) = make_parquet(tmp_path / "p", "train", make_images(6), LABELS)
    deep = "[" * 200_000 + "]" * 200_000
    pq.write_table(pq.read_table(path).replace_schema_metadata({"huggingface": deep}), path)
    assert "nested too deep" in rejected(tmp_path / "p")


# -- class names that no parcel would take

BAD = {
    "control": "a\x07b",
    "line": "a\nb",
    "separator": "a\u2028b",
    "turned": "\u202egnp",
    "isolate": "\u2067x",
    "long": "x" * 257,
    "none": "",
    "half": "\ud800",
}
GOOD = ("a", "a b", "猫", "עברית", "x" * 256, "é", "a\u200db", "7", "[/x]")


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_bad_class_names_are_refused_before_any_training(tmp_path: Path, name: str) -> None:
    names, images = ("cat", name, "owl"), make_images(6)
    with pytest.raises(BadInput, match="a class called"):
        bundle_from(images, LABELS, names)
    if name != "\ud800":
        assert "a class called" in rejected(
            make_npz(tmp_path / "a.npz", images=images, labels=LABELS, class_names=names)
        )
    make_parquet(tmp_path / "p", "train", images, LABELS, names)
    assert "a class called" in rejected(tmp_path / "p")
    if name and len(name) < 256 and name != "\ud800":
        make_tree(tmp_path / "tree", images, LABELS, names)
        assert "a class called" in one_line(call("train", "--data", tmp_path / "tree", "--out", tmp_path / "a.parcel"))
    item = random_parcel("a")
    with pytest.raises(BadInput):
        parcel.make(weights=item.weights, **item.manifest.facts | {"class_names": names})


def test_too_many_names_and_names_given_twice(tmp_path: Path) -> None:
    twice = make_npz(tmp_path / "a.npz", images=make_images(6), labels=LABELS, class_names=np.array(["a", "b", "a"]))
    assert "the same name" in rejected(twice)
    item = random_parcel("a")
    with pytest.raises(BadInput, match="the same name"):
        parcel.make(weights=item.weights, **item.manifest.facts | {"class_names": ("a", "b", "a")})
    with pytest.raises(BadInput, match="100000 are the most"):
        check_labels([str(n) for n in range(100_001)], "it")
    with pytest.raises(BadInput, match="longer than 8 MB"):
        check_labels([f"{n:0250}" for n in range(40_000)], "it")


@given(st.one_of(st.text(max_size=5), st.text(alphabet="a\u202e\u2029\x1f\x9f ", max_size=300)))
def test_data_and_parcels_have_one_rule(name: str) -> None:
    try:
        TypeAdapter(Label).validate_python(name)
        taken = True
    except ValidationError:
        taken = False
    if taken:
        check_labels([name, name + "2"] if len(name) < 256 else [name], "it")
    else:
        with pytest.raises(BadInput):
            check_labels([name], "it")


@pytest.mark.parametrize("name", GOOD)
def test_good_class_names_go_all_the_way(tmp_path: Path, name: str) -> None:
    names = (*NAMES[:2], name)
    loaded = sources.load(
        str(make_npz(tmp_path / "a.npz", images=make_images(6), labels=LABELS, class_names=np.array(names)))
    )
    item = random_parcel("a")
    made = parcel.make(weights=item.weights, **item.manifest.facts | {"class_names": loaded.train.class_names})
    assert json.loads(made.manifest.to_bytes())["class_names"] == list(names)
