"""Data sources and the decode cache: what is read is what was written, once, and every bad input says what to do."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from factories import NAMES, WAIT, encode, make_images, make_npz, make_parquet, make_tree
from flyby.data import cache as store
from flyby.data import folders, photos, sources
from flyby.data.dataset import DataBundle
from flyby.data.settings import DataSettings
from flyby.errors import BadInput

LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1])
REAL = Path(os.environ.get("FLYBY_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing may be decoded."""

    def fail(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(store, "_write", fail)
    monkeypatch.setattr(store, "seen", fail)


def rejected(name: str | Path, **options: Any) -> str:
    with pytest.raises(BadInput) as caught:
        sources.load(str(name), **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- digits


def test_digits_are_scikit_learns_scaled_to_bytes() -> None:
    from sklearn.datasets import load_digits

    bundle = sources.load("digits")
    assert bundle.train.images.shape == (1797, 8, 8, 1)
    assert bundle.train.images.dtype == np.uint8
    assert isinstance(bundle.train.images, np.memmap)
    assert (bundle.test, bundle.validation, bundle.mirror, bundle.broken) == (None, None, False, ())
    assert bundle.train.class_names == tuple("0123456789")
    reference = load_digits()
    assert np.array_equal(bundle.train.labels, reference.target)
    # 16 -> 255, 8 -> 127.5 -> 128 (to even), 0 -> 0, 5 -> 79.6875 -> 80
    for grey, byte in ((16, 255), (8, 128), (0, 0), (5, 80)):
        assert set(bundle.train.images[:, :, :, 0][reference.images == grey]) == {byte}


def test_digits_at_their_own_size_stay_as_they_are() -> None:
    assert sources.load("digits", size=8).train.digest == sources.load("digits").train.digest


def test_digits_32_is_digits_at_size_32() -> None:
    small, large = sources.load("digits"), sources.load("digits-32")
    assert large.train.images.shape == (1797, 32, 32, 3)
    assert large.train.digest == sources.load("digits", size=32).train.digest != small.train.digest
    expected = Image.fromarray(small.train.images[7, :, :, 0]).resize((32, 32), Image.Resampling.BILINEAR)
    for channel in range(3):
        assert np.array_equal(large.train.images[7, :, :, channel], np.asarray(expected))


# -- Parquet


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("place", [".", "data", "plain_text"])
def test_parquet_shards_come_back_in_order(home: Path, kind: str, raw: bool, place: str) -> None:
    images, test = make_images(8), make_images(3, seed=1)
    make_parquet(home / place, "train", images, LABELS, shards=3, raw=raw, kind=kind)
    make_parquet(home / place, "test", test, [2, 1, 0], raw=raw, kind=kind)
    bundle = sources.load(str(home))
    assert np.array_equal(bundle.train.images, images)
    assert np.array_equal(bundle.train.labels, LABELS)
    assert bundle.test is not None
    assert np.array_equal(bundle.test.images, test)
    assert bundle.test.labels.tolist() == [2, 1, 0]
    assert bundle.train.class_names == NAMES
    assert bundle.validation is None
    assert bundle.mirror


def test_more_than_ten_shards_are_ordered_by_number(home: Path) -> None:
    images, labels = make_images(12), np.arange(12) % 3
    make_parquet(home, "train", images, labels, shards=12)
    assert np.array_equal(sources.load(str(home)).train.images, images)


def test_jpeg_is_decoded_as_pillow_does(home: Path) -> None:
    images = make_images(2, (16, 16))
    make_parquet(home, "train", images, [0, 1], kind="JPEG")
    expected = np.asarray(Image.open(io.BytesIO(encode(images[1], "JPEG"))))
    assert np.array_equal(sources.load(str(home)).train.images[1], expected)


@pytest.mark.parametrize("split", ["validation", "valid", "val", "dev"])
def test_validation_has_many_names(home: Path, split: str) -> None:
    make_parquet(home, "train", make_images(8), LABELS)
    make_parquet(home, split, make_images(2), [0, 1], file="{split}.parquet")
    bundle = sources.load(str(home))
    assert bundle.validation is not None
    assert len(bundle.validation) == 2
    assert bundle.test is None


def test_split_folders_of_parquet_files(home: Path) -> None:
    make_parquet(home / "train", "x", make_images(8), LABELS, file="{shard:04d}.parquet", shards=2)
    make_parquet(home / "test", "x", make_images(2), [0, 1], file="{shard:04d}.parquet")
    bundle = sources.load(str(home))
    assert len(bundle.train) == 8
    assert bundle.test is not None
    assert len(bundle.test) == 2


def test_a_single_split_is_train_whatever_its_name(home: Path) -> None:
    make_parquet(home, "test", make_images(8), LABELS)
    bundle = sources.load(str(home))
    assert len(bundle.train) == 8
    assert bundle.test is None


def test_a_single_parquet_file_is_a_source(home: Path) -> None:
    (path,) = make_parquet(home, "site-a", make_images(8), LABELS, file="{split}.parquet")
    assert len(sources.load(str(path)).train) == 8


@pytest.mark.parametrize(("image", "label"), [("img", "labels"), ("image", "fine_label"), ("photo", "kind_of_animal")])
def test_columns_by_other_names(home: Path, image: str, label: str) -> None:
    make_parquet(home, "train", make_images(8), LABELS, image_column=image, label_column=label)
    bundle = sources.load(str(home))
    assert bundle.train.labels.tolist() == LABELS.tolist()
    assert bundle.train.class_names == NAMES


def test_classes_without_names_are_numbered_over_all_splits(home: Path) -> None:
    make_parquet(home, "train", make_images(2), [0, 1], None)
    make_parquet(home, "test", make_images(2), [3, 0], None)
    assert sources.load(str(home)).train.class_names == ("0", "1", "2", "3")


def test_a_site_may_hold_one_of_the_named_classes(home: Path) -> None:
    make_parquet(home, "train", make_images(4), [1, 1, 1, 1])
    assert sources.load(str(home)).train.counts() == [0, 4, 0]


def test_a_column_becomes_groups(home: Path) -> None:
    make_parquet(home, "train", make_images(8), LABELS, columns={"user": [7, 7, 8, 8, 9, 9, 7, 7]}, shards=2)
    make_parquet(home, "test", make_images(2), [0, 1])
    bundle = sources.load(str(home), column="user")
    assert bundle.train.groups == ("7", "7", "8", "8", "9", "9", "7", "7")
    assert bundle.test is not None
    assert bundle.test.groups is None
    plain = sources.load(str(home))
    assert plain.train.groups is None
    assert plain.train.digest == bundle.train.digest
    message = rejected(home, column="site")
    assert "'site'" in message
    assert "image, label, user" in message


# -- class folders


def test_class_folders(home: Path) -> None:
    images = make_images(8)
    make_tree(home, images, LABELS)
    (home / "cat" / "notes.txt").write_text("not an image")
    (home / ".hidden").mkdir()
    bundle = sources.load(str(home))
    order = np.argsort(LABELS, kind="stable")  # class by class, files by name
    assert np.array_equal(bundle.train.images, images[order])
    assert bundle.train.labels.tolist() == sorted(LABELS.tolist())
    assert bundle.train.class_names == NAMES
    assert "'user'" in rejected(home, column="user")


def test_split_class_folders_share_their_names_and_may_lack_a_class(home: Path) -> None:
    make_tree(home / "train", make_images(4), [0, 0, 2, 2])
    make_tree(home / "val", make_images(1), [1])
    make_tree(home / "test", make_images(2), [0, 1], ("cat", "zebra"))
    bundle = sources.load(str(home))
    assert bundle.train.class_names == ("cat", "dog", "owl", "zebra")
    assert bundle.train.counts() == [2, 0, 2, 0]
    assert bundle.test is not None
    assert bundle.test.counts() == [1, 0, 0, 1]
    assert bundle.validation is not None
    assert bundle.validation.counts() == [0, 1, 0, 0]


def test_classes_may_be_called_train_and_test(home: Path) -> None:
    make_tree(home, make_images(4), [0, 1, 2, 2], ("boat", "test", "train"))
    assert sources.load(str(home)).train.class_names == ("boat", "test", "train")


def test_a_new_empty_class_folder_is_a_new_class(home: Path) -> None:
    make_tree(home, make_images(4), [0, 1, 1, 0], ("cat", "dog"))
    assert sources.load(str(home)).train.classes == 2
    (home / "emu").mkdir()
    assert sources.load(str(home)).train.class_names == ("cat", "dog", "emu")


# -- npz


def test_npz(home: Path) -> None:
    images = make_images(8, channels=1)
    groups = np.array(["a", "b"] * 4)
    path = make_npz(
        home / "a.npz",
        images=images[:, :, :, 0],
        labels=LABELS.astype(np.uint8),
        class_names=np.array(NAMES),
        groups=groups,
    )
    bundle = sources.load(str(path), column="groups")
    assert np.array_equal(bundle.train.images, images)
    assert isinstance(bundle.train.images, np.memmap)
    assert bundle.train.class_names == NAMES
    assert bundle.train.groups == ("a", "b") * 4
    assert "'site'" in rejected(path, column="site")


def test_npz_with_a_test_split(home: Path) -> None:
    x, y = make_images(8), make_images(4, seed=1)
    path = make_npz(home / "a.npz", x_train=x, y_train=LABELS[:, None], x_test=y, y_test=np.array([0, 1, 2, 0]))
    bundle = sources.load(str(path), size=4)
    assert bundle.test is not None
    assert (bundle.train.images.shape, bundle.test.images.shape) == ((8, 4, 4, 3), (4, 4, 4, 3))
    expected = Image.fromarray(x[5]).resize((4, 4), Image.Resampling.BILINEAR)
    assert np.array_equal(bundle.train.images[5], np.asarray(expected))
    assert bundle.train.class_names == ("0", "1", "2")
    alone = sources.load(str(make_npz(home / "b.npz", x_test=y, y_test=np.array([0, 1, 2, 0]))), holdout=0.0)
    assert alone.test is None, "images to judge a model by need no others beside them"
    assert np.array_equal(alone.train.images, y)


# -- what a pixel becomes


def test_mixed_sizes_become_squares_of_64_and_of_what_is_asked_for(home: Path) -> None:
    big, small = make_images(1, (16, 12))[0], make_images(1, (8, 8))[0]
    make_parquet(home, "train", [big, small, big], [0, 1, 2])
    assert sources.load(str(home)).train.size == (64, 64)
    bundle = sources.load(str(home), size=6)
    assert bundle.train.size == (6, 6)
    # The middle 12x12 of 16x12: rows 2 to 14.
    expected = Image.fromarray(big).resize((6, 6), Image.Resampling.BILINEAR, box=(0, 2, 12, 14))
    assert np.array_equal(bundle.train.images[0], np.asarray(expected))
    plain = Image.fromarray(small).resize((6, 6), Image.Resampling.BILINEAR)
    assert np.array_equal(bundle.train.images[1], np.asarray(plain))


def test_grey_stays_grey_and_joins_colour_as_rgb(home: Path) -> None:
    grey, colour = make_images(3, channels=1), make_images(1)
    make_parquet(home / "g", "train", grey, [0, 1, 2])
    assert np.array_equal(sources.load(str(home / "g")).train.images, grey)
    for name, order in (("a", [grey[0], grey[1], colour[0]]), ("b", [colour[0], grey[0], grey[1]])):
        make_parquet(home / name, "train", order, [0, 1, 2])
        found = sources.load(str(home / name)).train.images
        assert found.shape == (3, 8, 8, 3)
        for got, given_ in zip(found, order, strict=True):
            assert np.array_equal(got, np.broadcast_to(given_, (8, 8, 3)))


def png(picture: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", **options)
    return buffer.getvalue()


def test_transparency_lies_on_black() -> None:
    clear = np.full((2, 2, 4), 200, np.uint8)
    clear[:, :, 3] = [[0, 255], [51, 255]]
    # 200 * 51 / 255 = 40
    assert photos.decode(png(Image.fromarray(clear)))[:, :, 1].tolist() == [[0, 200], [40, 200]]
    faint = photos.decode(png(Image.fromarray(clear[:, :, 2:])))
    assert faint.shape == (2, 2, 1)
    assert faint[:, :, 0].tolist() == [[0, 200], [40, 200]]


def test_palettes_bits_and_deep_grey() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert photos.decode(png(palette)).tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert photos.decode(png(palette, transparency=1)).tolist() == [[[10, 20, 30], [0, 0, 0]]]
    bits = Image.new("1", (2, 1))
    bits.putpixel((1, 0), 1)
    assert photos.decode(png(bits)).tolist() == [[[0], [255]]]
    deep = Image.fromarray(np.array([[0, 256, 65535]], np.uint16))
    assert photos.decode(png(deep)).tolist() == [[[0], [1], [255]]]


def test_photographs_are_turned_upright() -> None:
    picture = Image.fromarray(make_images(1, (8, 16))[0])
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held turned by a quarter
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", exif=exif)
    assert photos.decode(buffer.getvalue()).shape == (16, 8, 3)


def test_read_images_for_prediction(tmp_path: Path) -> None:
    colour, grey = make_images(1, (10, 6))[0], make_images(1, (4, 4), 1)[0]
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, image in zip(paths, (colour, grey), strict=True):
        path.write_bytes(encode(image))
    both = sources.read_images(paths, 3, (4, 5))
    assert both.shape == (2, 4, 5, 3)
    # Of 10x6 the middle 4.8x6 has the shape of 4x5.
    middle = Image.fromarray(colour).resize((5, 4), Image.Resampling.BILINEAR, box=(0, 2.6, 6, 7.4))
    assert np.array_equal(both[0], np.asarray(middle))
    assert np.array_equal(sources.read_images([paths[0].read_bytes()], 3, (4, 5))[0], both[0])
    assert np.array_equal(both[1][:, :, 0], both[1][:, :, 2])
    assert np.array_equal(sources.read_images(paths[1:], 1, (4, 4))[0], grey)
    assert sources.read_images(paths[:1], 1, (4, 4)).shape == (1, 4, 4, 1)
    paths[0].write_bytes(b"not an image")
    with pytest.raises(BadInput, match=r"a\.png cannot be decoded"):
        sources.read_images(paths, 3, (4, 4))
    with pytest.raises(BadInput, match=r"no image file .*c\.png"):
        sources.read_images([tmp_path / "c.png"], 3, (4, 4))
    with pytest.raises(BadInput, match=r"b\.png holds uint8 in 1 channels where the model takes uint8 in 2"):
        sources.read_images(paths[1:], 2, (4, 4))


# -- broken images


def test_half_a_percent_broken_is_skipped_and_named(home: Path) -> None:
    images = make_images(400)
    data: list[Any] = [encode(image) for image in images]
    data[17] = data[17][:60]
    data[301] = None
    make_parquet(home, "train", data, np.arange(400) % 3, shards=2, columns={"user": [f"u{i}" for i in range(400)]})
    bundle = sources.load(str(home), column="user")
    assert bundle.broken == ("train-00000-of-00002.parquet:17", "train-00001-of-00002.parquet:101")
    kept = np.delete(np.arange(400), [17, 301])
    assert np.array_equal(bundle.train.images, images[kept])
    assert np.array_equal(bundle.train.labels, kept % 3)
    assert bundle.train.groups == tuple(f"u{i}" for i in kept)
    assert sources.load(str(home), column="user", holdout=0.1).broken == bundle.broken


def test_more_than_half_broken_is_refused(home: Path) -> None:
    data = [encode(image) for image in make_images(100)]
    for row in range(3, 54):
        data[row] = b"junk"
    make_tree(home, data, [0] * 100)
    message = rejected(home)
    assert "more than half of the 100 images cannot be decoded" in message
    assert "(first: cat/00003.png, cat/00004.png, cat/00005.png)" in message
    left = [path.suffix for path in (home.parent / "cache" / "decoded").iterdir()]
    assert left == [".lock"], "nothing is left of a refused source"
    (home / "cat" / "00003.png").write_bytes(encode(make_images(1)[0]))
    assert len(sources.load(str(home)).broken) == 50


def test_exactly_one_percent_broken_is_borne(home: Path) -> None:
    data = [encode(image) for image in make_images(100)]
    data[0] = b"junk"
    make_parquet(home, "train", data, np.arange(100) % 3)
    assert sources.load(str(home)).broken == ("train-00000-of-00001.parquet:0",)


def test_all_broken_is_refused(home: Path) -> None:
    make_parquet(home, "train", [b"junk"] * 2, [0, 1])
    assert "(first: train-00000-of-00001.parquet:0, train-00000-of-00001.parquet:1)" in rejected(home)


# -- holdout


def test_holdout_is_stratified_ordered_and_repeatable(home: Path) -> None:
    labels = np.array([0] * 30 + [1] * 25 + [2] * 1)
    images = make_images(56)
    path = make_npz(home / "a.npz", images=images, labels=labels, groups=np.arange(56))
    bundle = sources.load(str(path), holdout=0.1, column="groups")
    assert bundle.test is not None
    assert bundle.test.counts() == [3, 3, 0]  # .1 * 30 = 3, .1 * 25 = 2.5 -> 3, and a lone image stays
    train, test = ([int(g) for g in part.groups or ()] for part in (bundle.train, bundle.test))
    assert train == sorted(train)
    assert test == sorted(test)
    assert sorted(train + test) == list(range(56))
    assert np.array_equal(bundle.train.images, images[train])
    assert np.array_equal(bundle.test.images, images[test])
    assert isinstance(bundle.test.images, np.memmap)
    elsewhere = sources.load(str(path), holdout=0.1, cache=home.parent / "other")
    assert elsewhere.test is not None
    assert elsewhere.test.digest == bundle.test.digest


def test_holdout_leaves_a_real_test_split_alone(home: Path) -> None:
    make_parquet(home, "train", make_images(8), LABELS)
    make_parquet(home, "test", make_images(2, seed=1), [0, 1])
    with_, without = sources.load(str(home), holdout=0.5), sources.load(str(home))
    assert with_.test is not None
    assert without.test is not None
    assert (with_.train.digest, with_.test.digest) == (without.train.digest, without.test.digest)


def test_holdout_keeps_validation(home: Path) -> None:
    make_parquet(home, "train", make_images(8), LABELS)
    make_parquet(home, "val", make_images(2, seed=1), [0, 1])
    plain, held = sources.load(str(home)), sources.load(str(home), holdout=0.3)
    assert plain.validation is not None
    assert held.validation is not None
    assert held.test is not None
    assert held.validation.digest == plain.validation.digest
    assert (len(held.train), len(held.test)) == (5, 3)


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=60), share=st.floats(0.01, 0.99))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_holdout_properties(labels: list[int], share: float) -> None:
    values = np.array(labels)
    images = np.arange(len(values), dtype=np.uint8)[:, None, None, None]
    entry = store.Entry({"train": sources.store.Dataset(images, values, tuple("abcde"), "0" * 16)}, ())
    parts = {part.split: part for part in sources._hold_out(entry, share).parts}
    rows = {split: [int(item[0, 0, 0]) for block in part.blocks() for item in block] for split, part in parts.items()}  # type: ignore[index]
    assert sorted(row for part in rows.values() for row in part) == list(range(len(values)))
    for split, held in rows.items():
        assert held == sorted(held)
        assert parts[split].labels.tolist() == values[held].tolist()
    for label in range(5):
        total, test = int((values == label).sum()), int((values[rows.get("test", [])] == label).sum())
        if total < 2:
            assert test == 0
        else:
            assert 1 <= test <= total - 1
            assert abs(test - share * total) <= 0.5 + 1e-9 or test in (1, total - 1)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_holdout_is_a_share(share: float) -> None:
    assert "data.holdout" in rejected("digits", holdout=share)


# -- the cache


def test_the_second_load_decodes_nothing_wherever_the_data_lies(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_parquet(home / "a", "train", make_images(8), LABELS)
    first = sources.load(str(home / "a"))
    refuse(monkeypatch)
    again = sources.load(str(home / "a"))
    assert np.array_equal(again.train.images, first.train.images)
    (home / "a").rename(home / "b")
    assert sources.load(str(home / "b")).train.digest == first.train.digest
    with pytest.raises(AssertionError, match="decoded again"):
        sources.load(str(home / "b"), size=4)


def test_a_changed_file_is_read_again(home: Path) -> None:
    (path,) = make_parquet(home, "train", make_images(8), LABELS)
    first = sources.load(str(home))
    make_parquet(home, "train", make_images(8, seed=1), LABELS)
    assert path.exists()
    assert sources.load(str(home)).train.digest != first.train.digest


def test_contents_are_hashed_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = make_parquet(home, "train", make_images(8), LABELS)
    read: list[int] = []
    real = store.hashlib.file_digest
    monkeypatch.setattr(store.hashlib, "file_digest", lambda *a: read.append(1) or real(*a))  # type: ignore[func-returns-value]
    sources.load(str(home))
    sources.load(str(home))
    assert len(read) == 2, "a file just written may still change within a clock tick, so it is hashed again"
    old = time.time() - 60
    os.utime(path, (old, old))
    sources.load(str(home))
    sources.load(str(home))
    assert len(read) == 3
    os.utime(path, (old + 1, old + 1))
    sources.load(str(home))
    assert len(read) == 4


def test_the_index_may_be_damaged(home: Path, tmp_path: Path) -> None:
    (path,) = make_parquet(home, "train", make_images(8), LABELS)
    os.utime(path, (1e9, 1e9))
    first = sources.load(str(home))
    (index,) = (tmp_path / "cache" / "index").glob("*.json")
    for text in ("{", "[]", "{}", f'{{"{path}": 3}}'):
        index.write_text(text)
        assert sources.load(str(home)).train.digest == first.train.digest


def test_the_digest_is_of_the_content_alone(home: Path) -> None:
    images = make_images(8)
    order = np.argsort(LABELS, kind="stable")
    make_parquet(home / "p", "train", images[order], LABELS[order])
    make_tree(home / "t", images, LABELS)
    path = make_npz(home / "n.npz", images=images[order], labels=LABELS[order], class_names=np.array(NAMES))
    digests = {sources.load(str(name)).train.digest for name in (home / "p", home / "t", path)}
    assert len(digests) == 1
    (digest,) = digests
    assert len(digest) == 16
    assert int(digest, 16) >= 0
    labels = LABELS[order].copy()
    labels[0] = 1
    variants = [
        make_npz(home / "l.npz", images=images[order], labels=labels, class_names=np.array(NAMES)),
        make_npz(
            home / "c.npz", images=images[order], labels=LABELS[order], class_names=np.array(["cat", "dog", "emu"])
        ),
        make_npz(
            home / "s.npz", images=images[order].reshape(8, 4, 16, 3), labels=LABELS[order], class_names=np.array(NAMES)
        ),
    ]
    assert len({digest, *(sources.load(str(path)).train.digest for path in variants)}) == 4


@pytest.mark.parametrize("victim", ["images.npy", "labels.npy", "entry.json"])
@pytest.mark.parametrize("harm", ["truncate", "remove"])
def test_a_damaged_entry_is_rebuilt(home: Path, tmp_path: Path, victim: str, harm: str) -> None:
    images = make_images(8)
    make_parquet(home, "train", images, LABELS)
    sources.load(str(home))
    (entry,) = (tmp_path / "cache" / "decoded").glob("[!.]*")
    if harm == "remove":
        (entry / victim).unlink()
    else:
        os.truncate(entry / victim, (entry / victim).stat().st_size - 1)
    bundle = sources.load(str(home))
    assert np.array_equal(bundle.train.images, images)
    assert bundle.train.labels.tolist() == LABELS.tolist()
    assert (entry / victim).exists()


def test_leftovers_of_a_killed_process_are_cleared(home: Path, tmp_path: Path) -> None:
    make_parquet(home, "train", make_images(8), LABELS)
    sources.load(str(home))
    (entry,) = (tmp_path / "cache" / "decoded").glob("[!.]*")
    stale = entry.parent / f".{entry.name}.abc.part"
    stale.mkdir()
    os.truncate(entry / "images.npy", 0)
    sources.load(str(home))
    assert not stale.exists()


def _race(folder: str, cache: str, gate: Any, answers: Any) -> None:
    gate.wait()
    bundle = sources.load(folder, cache=Path(cache), holdout=0.2)
    assert bundle.test is not None
    answers.put((bundle.train.digest, bundle.test.digest, int(bundle.train.images.sum())))


@pytest.mark.parametrize("locks", [True, False])
def test_racing_processes_agree(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    make_parquet(home, "train", make_images(300), np.arange(300) % 3)
    if not locks:
        monkeypatch.setitem(sys.modules, "fcntl", None)
    log, real = tmp_path / "log", store._write

    def logged(*options: Any) -> None:
        with log.open("a") as file:
            file.write("x")
        real(*options)

    monkeypatch.setattr(store, "_write", logged)
    context = multiprocessing.get_context("fork")
    gate, answers = context.Barrier(4), context.Queue()
    workers = [
        context.Process(target=_race, args=(str(home), str(tmp_path / "shared"), gate, answers)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=WAIT) for _ in workers]
    for worker in workers:
        worker.join(WAIT)
    assert len(set(found)) == 1
    assert [worker.exitcode for worker in workers] == [0] * 4
    entries = tmp_path / "shared" / "decoded"
    assert len(list(entries.glob("[!.]*"))) == 2, "the whole and the held-out entry, each once"
    assert not list(entries.glob(".*.part"))
    if locks:
        assert log.read_text() == "xx", "whoever waits for the lock does not decode again"


def test_an_unwritable_cache_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path / "tmp"))
    bundle = sources.load("digits", cache=blocker / "cache")
    assert len(bundle.train) == 1797
    (warning,) = caplog.messages
    assert warning.startswith("warning: the cache folder")
    assert str(tmp_path / "tmp") in warning
    refuse(monkeypatch)
    assert sources.load("digits", cache=blocker / "cache").train.digest == bundle.train.digest


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write", full)
    assert "No space left on device; name another folder in FLYBY_CACHE" in rejected("digits")


def test_the_cache_is_found_by_argument_then_environment_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.root_of(tmp_path / "mine") == tmp_path / "mine"
    assert store.root_of(None) == tmp_path / "cache"
    monkeypatch.delenv("FLYBY_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.root_of(None) == tmp_path / ".cache" / "flyby"


def test_progress_is_one_line_off_a_terminal(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flyby")
    make_parquet(home, "train", make_images(8), LABELS)
    sources.load(str(home), progress=True)
    assert caplog.messages == [f"decoding 8 images of {home} into the cache (once)"]
    caplog.clear()
    sources.load(str(home), progress=True)
    assert caplog.messages == []


def test_progress_is_a_bar_on_a_terminal(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_parquet(home, "train", make_images(300), np.arange(300) % 3)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    sources.load(str(home), progress=True)
    captured = capsys.readouterr()
    assert "decoding" in captured.err
    assert captured.out == ""


# -- bad input


def test_unknown_names_are_met_with_near_ones(home: Path) -> None:
    assert "did you mean 'digits'" in rejected("digit")
    assert rejected("nothing-like-it").count("FOLDER") == 1, "though two kinds of source are folders"
    assert "digits-32" in rejected("nothing-like-it")
    assert "does not exist" in rejected(home / "absent")
    assert "does not exist" in rejected("absent.npz")
    (home / "a.txt").write_text("")
    assert "unknown kind" in rejected(home / "a.txt")
    assert "between 1 and 4096" in rejected("digits", size=0)
    assert "does not say who wrote" in rejected("digits", column="user")


def test_a_name_of_flybys_own_is_no_folder_that_happens_to_be_there(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(home / "digits", make_images(8), LABELS)
    make_tree(home / "mine", make_images(8), LABELS)
    monkeypatch.chdir(home)
    assert DataSettings(name="digits", test="digits-32").absolute() == DataSettings(name="digits", test="digits-32")
    assert DataSettings(name="mine", test="digits").absolute() == DataSettings(name=str(home / "mine"), test="digits")


def test_folders_without_data(home: Path) -> None:
    assert "is empty" in rejected(home)
    (home / "readme.txt").write_text("")
    assert "neither Parquet files nor class folders" in rejected(home)
    make_tree(home, [], [])
    assert "hold no images" in rejected(home)
    make_tree(home / "cat" / "deep", make_images(1), [0], ("x",))
    assert len(sources.load(str(home)).train) == 1, "folders within a class folder belong to the class"


def test_a_site_may_hold_one_class_and_no_name_twice(home: Path) -> None:
    assert sources.load(str(make_tree(home / "t", make_images(2), [0, 0], ("cat",)))).train.class_names == ("cat",)
    make_parquet(home / "p", "train", make_images(2), [0, 0], None)
    assert sources.load(str(home / "p")).train.class_names == ("0",)
    make_parquet(home / "q", "train", make_images(2), [0, 1], ("cat", "cat"))
    assert "the same name" in rejected(home / "q")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"images": make_images(8).astype(np.float32)}, "float32; give uint8"),
        ({"images": make_images(8)[0, :, :, 0]}, r"the shape \[8, 8\]"),
        ({"images": make_images(8).transpose(0, 3, 1, 2)}, "channels first"),
        ({"labels": LABELS.astype(float)}, "whole numbers"),
        ({"labels": np.full(8, np.nan)}, "whole numbers"),
        ({"labels": LABELS[:7]}, r"the shape \[7\] for 8 images"),
        ({"labels": LABELS + 1}, r"label 3 at images\[2\]"),
        ({"labels": LABELS - 1}, r"label -1 at images\[0\]"),
        ({"labels": np.array([None] * 8, dtype=object)}, "not a readable .npz"),
        ({"images": np.zeros((0, 8, 8, 3), np.uint8), "labels": np.zeros(0, int)}, "no images to train on"),
    ],
)
def test_bad_npz(home: Path, change: dict[str, Any], said: str) -> None:
    path = make_npz(
        home / "a.npz", **{"images": make_images(8), "labels": LABELS, "class_names": np.array(NAMES), **change}
    )
    with pytest.raises(BadInput, match=said):
        sources.load(str(path))


def test_npz_keys(home: Path) -> None:
    assert "has the keys pixels" in rejected(make_npz(home / "a.npz", pixels=make_images(2)))
    assert "y_train" in rejected(make_npz(home / "b.npz", x_train=make_images(2)))
    train = {"x_train": make_images(2), "y_train": np.array([0, 1])}
    assert "has the keys" in rejected(make_npz(home / "c.npz", **train, x_test=make_images(2)))
    grey = {"x_test": make_images(2, channels=1), "y_test": np.array([0, 1])}
    assert "channel counts" in rejected(make_npz(home / "d.npz", **train, **grey))
    (home / "e.npz").write_bytes(b"PK but not really")
    assert "not a readable .npz" in rejected(home / "e.npz")


def test_bad_parquet_columns(home: Path) -> None:
    images = make_images(3)
    make_parquet(home / "a", "train", images, [0.0, 1.0, float("nan")])
    assert "holds double; labels must be whole numbers" in rejected(home / "a")
    make_parquet(home / "b", "train", images, [b"x", b"y", b"z"])
    assert "holds binary; labels must be whole numbers from 0, or class names" in rejected(home / "b")
    make_parquet(home / "c", "train", images, [0, 1, 3])
    assert "label 3 at train-00000-of-00001.parquet:2 (train), outside 0..2" in rejected(home / "c")
    make_parquet(home / "d", "train", images, [0, 1, None])
    assert "1 rows without a label" in rejected(home / "d")
    make_parquet(home / "e", "train", images, [0, 1, 2], label_column="a", columns={"b": [1, 2, 3]})
    assert "no label column" in rejected(home / "e")
    make_parquet(home / "f", "train", images, [0, 1, 2], columns={"user": ["a", None, "b"]})
    assert "1 rows without a 'user'" in rejected(home / "f", column="user")
    make_parquet(home / "g", "train", images, [0, 1, 2])
    make_parquet(home / "g", "test", images, [0, 1, 2], ("dog", "cat", "owl"))
    assert "disagree about the class names" in rejected(home / "g")


def test_identifiers_are_not_classes(home: Path) -> None:
    make_parquet(home, "train", make_images(2), [5, 10**12], None)
    assert "looks like an identifier" in rejected(home)


def test_an_empty_test_split_is_none(home: Path) -> None:
    make_parquet(home, "train", make_images(8), LABELS)
    make_parquet(home, "test", [], np.zeros(0, np.int64))
    assert sources.load(str(home)).test is None
    held = sources.load(str(home), holdout=0.3).test
    assert held is not None
    assert len(held) == 3


def test_a_folder_that_may_not_be_listed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders, "folders", denied)
    assert "Permission denied" in rejected(home)


def test_parquet_without_images(home: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", "b"], "label": [0, 1]}), home / "train.parquet")
    message = rejected(home)
    assert "no image column" in message
    assert "text, label" in message


def test_bad_parquet_files(home: Path) -> None:
    (home / "a").mkdir()
    (home / "a" / "train.parquet").write_bytes(b"PAR1 nonsense PAR1")
    assert "not a readable Parquet file" in rejected(home / "a")
    make_parquet(home / "b", "train", make_images(8), LABELS, shards=3)[1].unlink()
    assert "2 files of its train split where their names promise 3" in rejected(home / "b")
    make_parquet(home / "c", "test", make_images(8), LABELS)
    make_parquet(home / "c", "val", make_images(8), LABELS)
    assert "none called train" in rejected(home / "c")
    make_parquet(home / "d" / "one", "train", make_images(8), LABELS)
    make_parquet(home / "d" / "two", "train", make_images(8), LABELS)
    assert "several Parquet datasets (one, two)" in rejected(home / "d")
    for split in ("train", "val", "dev"):
        make_parquet(home / "e", split, make_images(8), LABELS)
    assert "two validation splits" in rejected(home / "e")


# -- the hub


def test_the_hub_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'flyby[hub]'" in rejected("hf:someone/animals")


def test_the_hub_downloads_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(**options: Any) -> str:
        asked.update(options)
        if options["repo_id"] == "someone/absent":
            raise RuntimeError("404: no such dataset\nand more")
        folder = Path(options["cache_dir"]) / "snapshot"
        make_parquet(folder / "plain", "train", make_images(8), LABELS)
        return str(folder)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    for name in ("hf:someone/animals", "hf:someone/animals/plain"):
        bundle = sources.load(name)
        assert isinstance(bundle, DataBundle)
        assert len(bundle.train) == 8
        assert asked["repo_id"] == "someone/animals"
        assert asked["repo_type"] == "dataset"
        assert asked["cache_dir"] == str(tmp_path / "cache" / "hub")
    assert asked["allow_patterns"] == "plain/*.parquet"
    assert rejected("hf:someone/absent") == "cannot fetch hf:someone/absent: 404: no such dataset"
    assert "not of the form" in rejected("hf:")


def test_the_catalogue_names_every_kind() -> None:
    rows = sources.catalogue()
    assert {row["name"] for row in rows} == {"digits", "digits-32", "parquet", "folders", "table", "npz", "hub"}
    assert all(set(row) == {"name", "form", "note"} and "\n" not in row["note"] for row in rows)


def test_importing_is_cheap() -> None:
    import subprocess

    code = (
        "import sys, flyby.data.sources; print([m for m in ('PIL', 'pyarrow', 'sklearn', 'rich') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# -- the real thing


@pytest.mark.skipif(not (REAL / "hurricane").is_dir(), reason="the hurricane images are not here (set FLYBY_TEST_DATA)")
def test_real_photographs(tmp_path: Path) -> None:
    bundle = sources.load(str(REAL / "hurricane"), size=32)
    assert bundle.test is not None
    assert bundle.validation is not None
    assert (len(bundle.train), len(bundle.validation), len(bundle.test)) == (10_000, 2_000, 2_000)
    assert bundle.train.images.shape[1:] == (32, 32, 3)
    assert bundle.train.class_names == ("no_damage", "damage")
    assert bundle.train.counts() == [5000, 5000]
    assert bundle.broken == ()
    start = time.perf_counter()
    assert sources.load(str(REAL / "hurricane"), size=32).train.digest == bundle.train.digest
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("svhn", True),
        ("/data/SVHN", True),
        ("x/svhn-small", True),
        ("mnist.npz", True),
        ("emnist_letters", True),
        ("hf:ufldl-stanford/svhn/cropped_digits", True),
        ("cifar10", False),
        ("svhn/cats", False),
        ("fashion-mnist", False),
        ("pathmnist.npz", False),
    ],
)
def test_what_is_written_is_not_mirrored(name: str, said: bool) -> None:
    assert sources.written(name) is said


def test_mirror_is_the_sources_word_or_the_users(tmp_path: Path) -> None:
    images, labels = make_images(12, (8, 8)), np.arange(12) % 3
    for name, mirror in (("svhn.npz", False), ("cats.npz", True)):
        path = str(make_npz(tmp_path / name, images=images, labels=labels))
        assert DataSettings(name=path).load().mirror is mirror
        assert DataSettings(name=path, mirror=not mirror).load().mirror is not mirror
    assert "mirror" not in DataSettings().model_dump(), "runs of before keep their names"
