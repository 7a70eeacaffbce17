"""A folder of class folders: which classes and images it holds, and whether it was named one level too high."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from flyby.errors import BadInput
from flyby.names import check_labels, printable

# The names that a split goes by, and the part it plays.
SPLITS = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
IMAGE_FILES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".npy"})
Held = TypeVar("Held")


class Tree(NamedTuple):
    """The classes of a folder, where each split lies, and the images of each split with their classes."""

    classes: list[str]
    splits: dict[str, Path]
    images: dict[str, list[tuple[int, Path]]]


def tree_of(root: Path, nested: bool) -> Tree:
    """What a folder of class folders holds. ``nested`` takes folders in class folders for parts of the class without
    asking."""
    inside = folders(root)
    named = [folder for folder in inside if folder.name.lower() in SPLITS and folders(folder)]
    if any(folder.name.lower() == "train" for folder in named) or (named and len(named) == len(inside)):
        splits = as_splits({folder.name: folder for folder in named}, root)
    else:
        splits = {"train": root}
    classes = sorted({folder.name for split in splits.values() for folder in folders(split)})
    check_labels(classes, str(root))  # a name that is no text could not stand in the cache's key either
    if not classes:
        what = "is empty" if not any(root.iterdir()) else "holds neither Parquet files nor class folders"
        what += ", but images: if it is one class, name the folder above it" if _own_images(root) else ""
        raise BadInput(
            f"the folder {root} {what}; give FOLDER/CLASS/*.png, FOLDER/train-00000-of-00001.parquet, or a table of"
            " path,label"
        )
    if not nested:
        for top in splits.values():
            _check_level(top)
    images = {
        split: [(i, path) for i, name in enumerate(classes) for path in image_files(top / name)]
        for split, top in splits.items()
    }
    return Tree(classes, splits, images)


def _check_level(root: Path) -> None:
    """Refuse a folder of sites, or one above the class folders: it would train on the names of the sites."""
    tops = folders(root)
    within = {top.name: [one.name for one in folders(top) if _holds_image(one)] for top in tops}
    within = {name: below for name, below in within.items() if below}
    if len(within) < len(tops) or any(_own_images(top) for top in tops):
        return
    shared = set.intersection(*map(set, within.values()))
    sites = len(within) > 1 and shared
    above = len(within) == 1 and len(shared) > 1
    if sites or above:
        first, below = next(iter(within.items()))
        seen = f"{', '.join(below[:3])}{' ...' if len(below) > 3 else ''}"
        raise BadInput(
            f"{root} looks one level too high: its folders hold folders of images again ({first}: {seen}), so the"
            f" classes would be {', '.join(list(within)[:3])}{' ...' if len(within) > 3 else ''}; name one of them"
            f" (--data {root / first}), or --set data.nested=true if they are the classes"
        )


def _own_images(folder: Path) -> bool:
    return any(path.suffix.lower() in IMAGE_FILES and not path.name.startswith(".") for path in folder.iterdir())


def _holds_image(folder: Path) -> bool:
    return any(path.suffix.lower() in IMAGE_FILES for path in folder.rglob("*"))


def within(path: Path, root: Path) -> str:
    """A file's name within the source, for people and for JSON: bytes that are no text are written as escapes."""
    return printable(path.relative_to(root).as_posix())


def folders(folder: Path) -> list[Path]:
    return (
        sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        if folder.is_dir()
        else []
    )


def image_files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_FILES and not path.name.startswith("."))
    return sorted(path for path in found if path.is_file())


def as_splits(found: Mapping[str, Held], name: str | Path) -> dict[str, Held]:
    """The splits by their role; a source with a single split trains on it, whatever it is called."""
    splits: dict[str, Held] = {}
    for split, held in found.items():
        role = SPLITS.get(split.lower())
        if role in splits:
            raise BadInput(f"{name} has two {role} splits ({', '.join(found)}); keep one of them")
        if role is not None:
            splits[role] = held
    if "train" in splits:
        return splits
    if len(found) != 1:
        raise BadInput(f"{name} has the splits {', '.join(found)} but none called train; rename the one to train on")
    return {"train": next(iter(found.values()))}
