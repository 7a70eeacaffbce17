"""Where images come from: everything ``--data`` can name, read into one ``DataBundle`` through the decode cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flyby.data import cache as store
from flyby.data import parquet
from flyby.data.arrays import as_labels, as_pixels, check_classes, check_holdout, held_out, numbered
from flyby.data.cache import Contents, Form, Item, SourceSplit
from flyby.data.dataset import DataBundle
from flyby.data.folders import IMAGE_FILES, as_splits, tree_of, within
from flyby.data.parquet import BLOCK
from flyby.data.photos import FIT, Extent, Pixels, coloured, decode
from flyby.data.places import from_names
from flyby.data.table import SUFFIXES, read_table
from flyby.data.tiles import read_npz, unusable
from flyby.errors import BadInput, unknown
from flyby.files import digest
from flyby.names import printable
from flyby.registry import Registry

ORDER = ("train", "validation", "test")
NPZ = {"train": ("x_train", "y_train"), "validation": ("x_val", "y_val"), "test": ("x_test", "y_test")}


# Names of sources in which something is written: a mirror image of a 2 is no 2.
WRITTEN = re.compile(r"(svhn|[ekq]?mnist|usps|digits)([-_.].*)?")


@dataclass(frozen=True)
class Source:
    """A named source before it is read: the files whose content is its identity, and how to read them."""

    files: Mapping[str, Path]  # by name within the source, so that moving it changes nothing
    settings: Mapping[str, Any]
    read: Callable[[], Contents]
    size: int | Extent | None
    mirror: bool = True
    holdout: float = 0.0  # the share for testing where the caller leaves it to the source
    fits: bool = False  # images that differ in size or are large get a common, smaller one
    lenient: bool = False  # each file is one image, and one that cannot be read is a broken image


@dataclass(frozen=True)
class Reading:
    """How images are read beside their size: ``fit`` is the size of those that are mixed or large (None: 64 pixels a
    side), ``channels`` makes photographs grey (1) or RGB (3), and ``nested`` takes folders in class folders for parts
    of the class."""

    fit: int | None = None
    channels: int | None = None
    nested: bool = False


def catalogue() -> list[dict[str, str]]:
    """The kinds of source there are: a name, the form it takes after ``--data``, and one line about it."""
    named = [(name, name, " ".join((source.__doc__ or "").split())) for name, source in SOURCES.items()]
    files = (
        (
            "parquet",
            "FOLDER",
            (
                "Parquet image files in the Hugging Face layout: train-00000-of-00001.parquet, test-..., columns image"
                " and label"
            ),
        ),
        (
            "folders",
            "FOLDER",
            (
                "a folder of class folders: FOLDER/CLASS/*.png, or FOLDER/train/CLASS/* and FOLDER/test/CLASS/*; .npy"
                " and .tif tiles may have any channels, 16 bits or floats"
            ),
        ),
        (
            "table",
            "FILE.csv",
            (
                "a CSV or TSV of images: columns path (from the table's own folder) and label, perhaps split; images"
                " of any size, as in folders"
            ),
        ),
        (
            "npz",
            "FILE.npz",
            (
                "numpy arrays: images and labels, or x_train, y_train, x_test, y_test; uint8, uint16 or float32,"
                " [N, H, W] or [N, H, W, C]"
            ),
        ),
        (
            "hub",
            "hf:OWNER/NAME",
            "a Parquet dataset on the Hugging Face hub (hf:OWNER/NAME/CONFIG if it has several); needs flyby[hub]",
        ),
    )
    return [{"name": name, "form": form, "note": note} for name, form, note in (*named, *files)]


def load(
    name: str,
    *,
    size: int | Extent | None = None,
    reading: Reading | None = None,
    holdout: float | None = 0.0,
    column: str | None = None,
    cache: Path | None = None,
    progress: bool = False,
) -> DataBundle:
    """The images that ``name`` stands for, decoded once and memory-mapped from then on.

    ``size`` is what every image becomes, pixels a side or (height, width): resized with its aspect kept, and as much of
    its middle as fills that. Without one, images of one small size stay as they are, and others get that of
    ``reading``. ``holdout`` keeps that share of each class as test images where the source has none (None: as the
    source itself says); ``column`` is the column of a natural user or site, kept as ``Dataset.groups``; ``cache`` is
    where decoded images are kept.
    """
    size, reading = _checked_size(size), reading or Reading()
    check_holdout(holdout or 0.0)
    if printable(name) != name:
        raise BadInput(f"'{printable(name)}' cannot stand in a result; give the data a name of plain UTF-8 text")
    root = store.root_of(cache)
    try:
        source = _find(name, size, column, root, reading.nested)
    except OSError as error:
        raise BadInput(f"cannot read {name}: {error.strerror or error}") from error
    key, entry = _entry(name, source, reading, (column, root, progress))
    holdout = source.holdout if holdout is None else holdout
    if holdout > 0 and not len(entry.splits.get("test", ())):
        # A copy in the new order rather than a selection, so that both parts are memory maps too.
        whole = entry
        entry = store.fetch(root, store.key_of({}, {"of": key, "holdout": holdout}), lambda: _hold_out(whole, holdout))
    splits = {split: data for split, data in entry.splits.items() if len(data)}
    if "train" not in splits:
        raise BadInput(f"none of the training images of {name} can be decoded (first: {', '.join(entry.broken[:3])})")
    sizes = None if entry.sizes is None else replace(entry.sizes, asked=size is not None)
    mirror = source.mirror and not written(name)
    return DataBundle(name, splits["train"], splits.get("test"), splits.get("validation"), mirror, entry.broken, sizes)


def _checked_size(size: int | Extent | None) -> Extent | None:
    sides = (size, size) if isinstance(size, int) else size
    if sides is not None and not all(1 <= side <= 4096 for side in sides):
        raise BadInput(f"data.size must lie between 1 and 4096 pixels, not {size}")
    return sides


def _entry(name: str, source: Source, reading: Reading, rest: tuple[str | None, Path, bool]) -> tuple[str, store.Entry]:
    """The decoded source, with its key: as it lies in the cache, or else decoded now."""
    column, root, progress = rest
    hashes = store.hashes_of(source.files, root, source.lenient)
    size = _checked_size(source.size)
    fit = (reading.fit or FIT) if source.fits and size is None else None

    def key_of(form: Form) -> str:
        return store.key_of(hashes, {**source.settings, **asdict(form), "column": column})

    if source.fits and size is not None:  # read without that wish it may have come out as wished
        key = key_of(Form(None, FIT))
        entry = store.peek(root, key)
        if entry is not None and entry.shape[:2] == size and reading.channels in (None, entry.shape[2]):
            return key, entry
    form, title = Form(size, fit, reading.channels), name if progress else None
    key = key_of(form)
    return key, store.fetch(root, key, lambda: _checked(name, source.read()), form=form, progress=title)


def written(name: str) -> bool:
    """Whether a source's name (of a folder or file, or the parts of a hub name) says that its images are of digits or
    letters."""
    parts = Path(name.lower()).parts[-1:] if not name.startswith("hf:") else name[3:].lower().split("/")
    return any(WRITTEN.fullmatch(part) for part in parts)


def read_images(
    paths: Sequence[Path | bytes], channels: int, size: Extent, kind: Literal["uint8", "float32"] = "uint8"
) -> Pixels:
    """Single image files, or the bytes of some, as uint8 or float32 [n, H, W, C], each the middle of what it shows at
    ``size`` (H, W); photographs are made grey or RGB as ``channels`` says."""
    images = np.empty((len(paths), *size, channels), dtype=kind)
    for row, path in enumerate(paths):
        images[row] = read_image(path, channels, size, kind)
    return images


def read_image(path: Path | bytes, channels: int, size: Extent, kind: Literal["uint8", "float32"] = "uint8") -> Pixels:
    """One of :func:`read_images`, or one whose bytes are at hand."""
    shown = "the image" if isinstance(path, bytes) else printable(str(path))
    if isinstance(path, Path) and not path.is_file():
        raise BadInput(f"there is no image file {shown}")
    try:
        pixels = decode(path, size)
    except BadInput:
        raise
    except Exception as error:  # a damaged file makes Pillow's readers fail in any way at all
        raise BadInput(f"{shown} cannot be decoded as an image; is it a whole PNG, JPEG, TIFF or .npy?") from error
    grey = kind == "uint8" and {pixels.shape[2], channels} == {1, 3}
    if (pixels.dtype != np.uint8) != (kind != "uint8") or (pixels.shape[2] != channels and not grey):
        raise BadInput(
            f"{shown} holds {pixels.dtype} in {pixels.shape[2]} channels where the model takes {kind} in {channels}"
        )
    if bad := unusable(pixels):
        raise BadInput(f"{shown} holds {bad} numbers that are not finite (no data?); fill them in")
    return coloured(pixels, channels, shown).astype(kind, copy=False)


def _find(name: str, sides: Extent | None, column: str | None, root: Path, nested: bool) -> Source:
    """The source that a name stands for. One with a name of its own makes of a square size what it likes."""
    if sides is not None and sides[0] != sides[1]:
        return replace(_find(name, None, column, root, nested), size=sides)
    size = None if sides is None else sides[0]
    if name in SOURCES:
        return SOURCES[name](size, column)
    if name.startswith("hf:"):
        return _parquet(_download(name, root), name, size, column)
    path = Path(name).expanduser()
    if not path.exists():
        if re.search(r"[/\\.~]", name):
            raise BadInput(
                f"{name} does not exist; name a folder, an .npz or .csv file, or a source that `flyby data` lists"
            )
        raise unknown("data source", name, [row["form"] for row in catalogue()])
    if path.is_file():
        if path.suffix == ".npz":
            return _npz(path, size, column)
        if path.suffix == ".parquet":
            return _parquet(path, name, size, column)
        if path.suffix.lower() in SUFFIXES:
            return _table(path, size, column)
        raise BadInput(f"{name} is a file of an unknown kind; give an .npz, .parquet, .csv or .tsv, or a folder")
    if parquet.find(path, name):
        return _parquet(path, name, size, column)
    return _tree(path, size, column, nested)


def _checked(name: str, contents: Contents) -> Contents:
    """What must hold of every source before its images are decoded."""
    names = contents.class_names
    if not any(part.split == "train" and len(part.labels) for part in contents.parts):
        raise BadInput(f"{name} holds no images to train on")
    check_classes(names, name)
    for part in contents.parts:
        wrong = np.flatnonzero((part.labels < 0) | (part.labels >= len(names)))
        if len(wrong):
            row = int(wrong[0])
            raise BadInput(
                f"{name} has label {part.labels[row]} at {part.where(row)} ({part.split}), outside 0..{len(names) - 1},"
                f" the range of its {len(names)} class names"
            )
    return contents


def _hold_out(entry: store.Entry, share: float) -> Contents:
    """The same images with ``share`` of each class moved from train to test, drawn by the content's own digest; order
    is kept."""
    train = entry.splits["train"]
    chosen = held_out(train, share)
    parts = []
    for split, data, picked in (
        ("train", train, np.flatnonzero(~chosen)),
        *((name, data, np.arange(len(data))) for name, data in entry.splits.items() if name == "validation"),
        ("test", train, np.flatnonzero(chosen)),
    ):
        if len(picked):
            groups = None if data.groups is None else [data.groups[row] for row in picked]
            places = None if data.places is None else data.places[picked]
            blocks = _array_blocks(data.images, picked)
            parts.append(SourceSplit(split, data.labels[picked], blocks, str, groups, places))
    return Contents(parts, train.class_names, entry.broken, entry.sizes)


def _array_blocks(images: Pixels, rows: npt.NDArray[np.int64] | None = None) -> Callable[[], Iterator[Sequence[Item]]]:
    def blocks() -> Iterator[Sequence[Item]]:
        for start in range(0, len(images) if rows is None else len(rows), BLOCK):
            stop = start + BLOCK
            yield list(images[start:stop] if rows is None else images[rows[start:stop]])

    return blocks


# -- digits


def digits(size: int | None, column: str | None) -> Source:
    """1,797 handwritten digits, 8x8 grey, 10 classes; comes with scikit-learn, no test split"""
    if column is not None:
        raise BadInput(f"digits has no column {column!r}: it does not say who wrote which digit")
    size = None if size == 8 else size  # their own size: as they are, grey

    def read() -> Contents:
        from sklearn.datasets import load_digits

        data = load_digits()
        images = np.round(data.images * (255 / 16)).astype(np.uint8)[:, :, :, None]
        if size is not None:  # three channels, so that a network for photographs takes them
            images = np.stack([np.repeat(decode(image, (size, size)), 3, axis=2) for image in images])
        labels = data.target.astype(np.int64)
        return Contents([SourceSplit("train", labels, _array_blocks(images), str)], [str(digit) for digit in range(10)])

    return Source({}, {"kind": "digits"}, read, size, mirror=False, holdout=0.2)


def digits_32(size: int | None, column: str | None) -> Source:
    """the same digits up-sampled to 32x32 RGB, for networks made for photographs"""
    return digits(32 if size is None else size, column)


# What ``--data NAME`` means without looking at the disk: the size and the column that are asked for, to a source.
SOURCES: Registry[Callable[[int | None, str | None], Source]] = Registry(
    "data source", {"digits": digits, "digits-32": digits_32}, group="flyby.data"
)


# -- npz


def _npz(path: Path, size: int | None, column: str | None) -> Source:
    def read() -> Contents:
        wanted = {"images", "labels", "class_names", *(key for pair in NPZ.values() for key in pair)}
        arrays, found = read_npz(path, wanted | ({column} if column is not None else set()))
        alone = NPZ["test"] if {"x_test"} == {x for x, _ in NPZ.values() if x in arrays} else ("images", "labels")
        keys = {"train": alone} if alone[0] in arrays else NPZ  # images to judge by need no others beside them
        parts = []
        for split, (x, y) in keys.items():
            if x in arrays and y in arrays:
                parts.append(_npz_part(path, split, x, arrays[x], y, arrays[y]))
            elif split == "train" or x in arrays or y in arrays:
                raise BadInput(
                    f"{path} has the keys {printable(', '.join(found)[:200]) or '(none)'}; give images and labels, or"
                    " x_train and y_train"
                )
        if column is not None:
            groups = arrays.get(column)
            if groups is None or groups.shape != parts[0].labels.shape:
                raise BadInput(
                    f"{path} has no array {column!r} with one value for each training image; add one (say, groups) or"
                    " name no column"
                )
            parts[0] = replace(parts[0], groups=[str(value) for value in groups.tolist()])
        depths = {arrays[x].shape[3] if arrays[x].ndim == 4 else 1 for x, _ in keys.values() if x in arrays}
        if len(depths) > 1:
            raise BadInput(f"{path} has training and test images with different channel counts ({sorted(depths)})")
        given = arrays.get("class_names")
        names = None if given is None else [str(name) for name in given.ravel().tolist()]
        return Contents(parts, numbered(*(part.labels for part in parts)) if names is None else names)

    return Source({"npz": path}, {"kind": "npz"}, read, size)


def _npz_part(
    path: Path, split: str, x: str, images: npt.NDArray[Any], y: str, labels: npt.NDArray[Any]
) -> SourceSplit:
    pixels = as_pixels(images, f"{x} in {path}")
    known = as_labels(labels, len(pixels), f"{y} in {path}")
    return SourceSplit(split, known, _array_blocks(pixels), lambda row: f"{x}[{row}]")


# -- a folder of class folders, or a table of images


def _tree(root: Path, size: int | None, column: str | None, nested: bool) -> Source:
    tree = tree_of(root, nested)
    if column is not None:
        raise BadInput(
            f"the class folders in {root} have no column {column!r}; only Parquet, .npz and .csv sources have columns"
        )

    def read() -> Contents:
        if not tree.images["train"]:
            raise BadInput(
                f"the class folders in {tree.splits['train']} hold no images (looked for"
                f" {', '.join(sorted(IMAGE_FILES))})"
            )
        rows = {split: [(i, path, "") for i, path in tree.images[split]] for split in tree.images}
        return Contents([_listed(root, split, rows[split]) for split in ORDER if rows.get(split)], tree.classes)

    listed = {within(path, root): path for rows in tree.images.values() for _, path in rows}
    roles = {split: top.relative_to(root).as_posix() for split, top in tree.splits.items()}
    words = {"kind": "folders", "classes": tree.classes, "splits": roles}
    return Source(listed, words, read, size, fits=True, lenient=True)


def _table(path: Path, size: int | None, column: str | None) -> Source:
    table = read_table(path, column)
    number = {name: place for place, name in enumerate(table.classes)}
    rows = {
        split: [(number[row.label], row.path, row.group) for row in table.rows[split]]
        for split in ORDER
        if split in table.rows
    }

    def read() -> Contents:
        return Contents([_listed(path.parent, split, held, column) for split, held in rows.items()], table.classes)

    listed = {within(row.path, path.parent): row.path for held in table.rows.values() for row in held}
    order = [[split, [[label, within(one, path.parent), whose] for label, one, whose in rows[split]]] for split in rows]
    words = {"kind": "table", "classes": table.classes, "rows": digest(order)}
    return Source(listed, words, read, size, fits=True, lenient=True)


def _listed(root: Path, split: str, rows: list[tuple[int, Path, str]], column: str | None = None) -> SourceSplit:
    """One split of images that are files: their classes, where they lie, and whose they are."""
    paths = [path for _, path, _ in rows]
    labels = np.array([label for label, _, _ in rows], dtype=np.int64)
    places, groups = from_names([path.name for path in paths]), [group for *_, group in rows]
    whose = groups if column is not None else None
    return SourceSplit(split, labels, lambda: iter([paths]), lambda row: within(paths[row], root), whose, places)


# -- Parquet


def _parquet(root: Path, name: str, size: int | None, column: str | None) -> Source:
    shards = as_splits(parquet.shards(root, name), name)

    def read() -> Contents:
        known = parquet.words((path for role in ORDER for path in shards.get(role, ())), column)
        parts, names = [], [known] if known else []
        for role in ORDER:
            if role in shards:
                part, named = parquet.read_part(role, shards[role], column, known)
                parts.append(part)
                names += named if not known else []
        if any(other != names[0] for other in names):
            raise BadInput(
                f"the Parquet files of {name} disagree about the class names; write them all with the same features"
            )
        return Contents(parts, numbered(*(part.labels for part in parts)) if not names else names[0])

    return Source(
        {f"{role}/{printable(path.name)}": path for role, paths in shards.items() for path in paths},
        {"kind": "parquet"},
        read,
        size,
        fits=True,
    )


# -- the Hugging Face hub


def _download(name: str, root: Path) -> Path:
    """The folder in the cache with the Parquet files of ``hf:OWNER/NAME[/CONFIG]``; the hub's own cache resumes and
    works offline."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise BadInput(f"{name} needs the hub client; install it with: pip install 'flyby[hub]'") from None
    words = name.removeprefix("hf:").split("/")
    if not all(words) or len(words) > 3:
        raise BadInput(f"{name} is not of the form hf:OWNER/NAME or hf:OWNER/NAME/CONFIG")
    config = words[2] if len(words) == 3 else ""
    try:
        folder = snapshot_download(
            repo_id="/".join(words[:2]),
            repo_type="dataset",
            allow_patterns=f"{config}/*.parquet" if config else "*.parquet",
            cache_dir=str(store.writable(root) / "hub"),
        )
    except (
        Exception
    ) as error:  # the client's errors come from several libraries, and all mean that the dataset is not here
        raise BadInput(f"cannot fetch {name}: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
    return Path(folder) / config
