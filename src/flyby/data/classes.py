"""Classes by name: lists of them put together, compared, fixed beforehand and renamed.

A class is its name. Sites hold different ones, in any order; wherever a parcel, a model and labelled images meet,
numbers are translated by name. Images whose classes are only numbered ("0", "1", ...) have no names to go by, so their
numbers are places in the other list where both are of one length.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import Part, Site
from flyby.errors import BadInput
from flyby.files import digest
from flyby.names import check_labels, natural, printable

log = logging.getLogger(__name__)

SHOWN = 5  # names in a sentence
TELLING = 5  # letters that two names must have, for one edit between them to look like a slip
COMPARED = 2000  # names at the most that are compared with each other
MOST_BYTES = 32 << 20  # of a file of names


def union(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """All names of some lists: the list itself where all are one, else sorted, so that no order decides."""
    known = list(dict.fromkeys(tuple(one) for one in lists))
    return known[0] if len(known) == 1 else tuple(sorted({name for one in known for name in one}, key=natural))


def places(names: Sequence[str], among: Sequence[str]) -> list[int]:
    """Where each of ``names`` stands ``among`` others; -1 where it does not."""
    at = {name: place for place, name in enumerate(among)}
    return [at.get(name, -1) for name in names]


def spread(values: Tensor, source: Sequence[int], dim: int = 0, fill: float = 0.0) -> Tensor:
    """The tensor with class c of ``dim`` taken from its place ``source[c]``, and ``fill`` where that is -1."""
    index = torch.tensor(source, dtype=torch.int64, device=values.device)
    picked = values.index_select(dim, index.clamp_min(0))
    shape = [1] * values.ndim
    shape[dim] = -1
    return picked.masked_fill((index < 0).view(shape), fill) if min(source) < 0 else picked


def is_numbered(names: Sequence[str]) -> bool:
    """Whether the names are only numbers from 0 on, as images without class names have them."""
    return list(names) == [str(place) for place in range(len(names))]


def some(names: Sequence[str]) -> str:
    """A few names for a sentence."""
    shown = ", ".join(printable(name if len(name) <= 40 else f"{name[:40]}...") for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# -- labelled images and a list of classes


@dataclass(frozen=True)
class Matched:
    """How the classes of labelled images stand to a list: ``to[i]`` is the place of their class i, or -1; ``left_out``
    how many images there are of each name that the list does not have; ``lacking`` the names of the list without
    images."""

    to: list[int]
    left_out: dict[str, int]
    lacking: list[str]

    def row(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"left_out": self.left_out, "lacking": self.lacking}

    def lines(self) -> list[str]:
        """For people: which images were left out, and which classes were not judged."""
        left = some([f"{name} ({n:,})" for name, n in self.left_out.items()])
        found = [f"left out {sum(self.left_out.values()):,} images of unknown classes: {left}"] if self.left_out else []
        return found + ([f"no images of: {some(self.lacking)}"] if self.lacking else [])


def match(own: Sequence[str], counts: Sequence[int], names: Sequence[str], by_place: bool = False) -> Matched:
    """Classes with ``counts`` of images against a list of ``names``. Numbers are places where both lists are of one
    length, or, with ``by_place``, where the list is as long at least."""
    numbers = is_numbered(own) != is_numbered(names) and len(own) == len(names)
    if numbers or (by_place and is_numbered(own) and not is_numbered(names) and len(own) <= len(names)):
        to = list(range(len(own)))
    else:
        to = places(own, names)
    left = {name: n for name, n, place in zip(own, counts, to, strict=True) if place < 0 and n > 0}
    there = {place for place, n in zip(to, counts, strict=True) if n > 0}
    return Matched(to, left, [name for place, name in enumerate(names) if place not in there])


def unknown_classes(left: Mapping[str, int], names: Sequence[str], what: str, owner: str, cure: str) -> BadInput:
    """Why labelled images cannot be used as they are: the names, how many images, what is known instead."""
    told = some([f"{name} ({n:,} images)" for name, n in left.items()])
    verb = "knows" if owner.startswith("no ") else "does not know"
    return BadInput(f"{what} has classes that {owner} {verb}: {told}; known are {some(names)}: {cure}")


def fitted(
    data: Dataset,
    names: Sequence[str],
    what: str = "the data",
    owner: str = "the model",
    cure: str = "rename them with --synonyms FILE (old: new), or leave their images out with --skip-unknown",
    *,
    skip: bool = False,
) -> tuple[Dataset, Matched]:
    """Labelled images with their labels as places in ``names``. Classes that are not among them are refused, or with
    ``skip`` left out."""
    found = match(data.class_names, data.counts(), names)
    if found.left_out and not skip:
        raise unknown_classes(found.left_out, names, what, owner, cure)
    return _moved(data, found, names, what), found


def fitted_bundle(bundle: DataBundle, names: Sequence[str], owner: str, *, skip: bool = False) -> DataBundle:
    """The same for all parts of a source."""
    fit = {
        key: None if data is None else fitted(data, names, bundle.name, owner, skip=skip)[0]
        for key, data in (("train", bundle.train), ("test", bundle.test), ("validation", bundle.validation))
    }
    return dataclasses.replace(bundle, **fit)  # type: ignore[arg-type]


def _moved(data: Dataset, found: Matched, names: Sequence[str], what: str) -> Dataset:
    if tuple(names) == data.class_names:
        return data
    name = digest([data.digest, list(names), found.to])
    labels = np.asarray(found.to, dtype=np.int64)[data.labels]
    if not found.left_out:
        return dataclasses.replace(data, labels=labels, class_names=tuple(names), digest=name)
    rows = np.flatnonzero(labels >= 0)
    if not len(rows):
        raise BadInput(f"{what} has no image of a class that is known; it has {some(list(found.left_out))}")
    groups = None if data.groups is None else tuple(data.groups[row] for row in rows)
    where = None if data.places is None else data.places[rows]
    return Dataset(data.images[rows], labels[rows], tuple(names), name, groups, where)


def part_for(part: Part, names: Sequence[str], own: Sequence[str]) -> tuple[Part, Tensor]:
    """Images whose labels are places in ``names``, for one who numbers the classes ``own``: those that it knows, with
    its numbers; and the numbers of all, -1 where it does not know the class."""
    if tuple(names) == tuple(own):
        return part, part.labels
    labels = torch.tensor(places(names, own), device=part.labels.device)[part.labels]
    known = labels >= 0
    return Part(part.images[known.to(part.images.device)], labels[known]), labels


# -- a list fixed beforehand, and other names


def prepared(bundle: DataBundle, synonyms: Mapping[str, str] | None, classes: Sequence[str] | None) -> DataBundle:
    """The same images with classes renamed, then numbered as a fixed list has them; a class with images that is not in
    the list is refused."""
    parts = {"train": bundle.train, "test": bundle.test, "validation": bundle.validation}
    if synonyms:
        check_synonyms(bundle.train.class_names, synonyms)
    for key, data in parts.items():
        if data is not None:
            data = renamed(data, synonyms) if synonyms else data
            parts[key] = listed(data, classes, bundle.name) if classes else data
    assert parts["train"] is not None
    return dataclasses.replace(bundle, train=parts["train"], test=parts["test"], validation=parts["validation"])


def after(names: Sequence[str], data: Dataset) -> tuple[str, ...]:
    """Another site's list of classes, and after it those of these images that it does not have."""
    more = match(data.class_names, data.counts(), names, by_place=True).left_out
    if more:
        log.info("note: classes that the other site does not have: %s", some(list(more)))
    return (*names, *more)


def check_synonyms(names: Sequence[str], synonyms: Mapping[str, str]) -> None:
    """Say it where none of the names is there: a mapping may serve several sites, so that is no mistake by itself."""
    if not set(names) & set(synonyms):
        log.warning("note: none of the names in --synonyms is a class here; the classes are %s", some(list(names)))


def renamed(data: Dataset, synonyms: Mapping[str, str]) -> Dataset:
    """The same images under other class names; two names may become one. The order of first appearance is kept."""
    names = tuple(dict.fromkeys(synonyms.get(name, name) for name in data.class_names))
    if names == data.class_names:
        return data
    check_labels(names, "--synonyms")
    to = [names.index(synonyms.get(name, name)) for name in data.class_names]
    labels = np.asarray(to, dtype=np.int64)[data.labels]
    return dataclasses.replace(data, labels=labels, class_names=names, digest=digest([data.digest, list(names), to]))


def listed(data: Dataset, classes: Sequence[str], what: str) -> Dataset:
    """The same images numbered as the list has their classes."""
    found = match(data.class_names, data.counts(), classes, by_place=True)
    if found.left_out:
        raise unknown_classes(found.left_out, classes, what, "the list of --classes", CURE)
    return _moved(data, found, classes, what)


CURE = "add them to the list, or rename them with --synonyms FILE (old: new)"


def listed_site(site: Site, classes: Sequence[str]) -> Site:
    """The same for a site that is in memory already."""
    names = tuple(classes)
    check_labels(names, "the list of classes")
    found = match(site.class_names, site.counts, names, by_place=True)
    if found.left_out:
        raise unknown_classes(found.left_out, names, site.id, "the list of classes", CURE)
    to = torch.tensor(found.to)

    def moved(part: Part) -> Part:
        labels = to.to(part.labels.device)[part.labels]
        if bool((labels < 0).any()):
            raise BadInput(f"{site.id} has validation or test images of classes that the list does not have; {CURE}")
        return Part(part.images, labels)

    train, val, test = (moved(part) for part in (site.train, site.val, site.test))
    origin = digest([site.origin, list(names)])
    return dataclasses.replace(site, train=train, val=val, test=test, class_names=names, origin=origin)


def read_list(path: Path) -> tuple[str, ...]:
    """Class names from a text file, one on each line; empty lines and lines that begin with # are passed over."""
    lines = (line.strip() for line in _text(path).splitlines())
    names = tuple(line for line in lines if line and not line.startswith("#"))
    if not names:
        raise BadInput(f"{path} names no class; write one name on each line")
    check_labels(names, str(path))
    return names


def read_synonyms(path: Path) -> dict[str, str]:
    """A mapping ``old: new`` from a text or YAML file, one on each line."""
    found: dict[str, str] = {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#") or text == "---":
            continue
        old, colon, new = (part.strip() for part in text.partition(": "))
        old, new = _unquoted(old), _unquoted(new)
        if not colon or not old or not new:
            raise BadInput(f"line {number} of {path} is no pair of names; write old: new, as in Pferd: horse")
        if found.get(old, new) != new:
            raise BadInput(f"{path} gives {printable(old)!r} two names, {found[old]} and {new}; give it one")
        found[old] = new
    chained = [old for old, new in found.items() if found.get(new, new) != new]
    if chained:
        raise BadInput(f"{path} renames {chained[0]} to {found[chained[0]]}, and that again; name the last one at once")
    check_labels(list(dict.fromkeys(found.values())), str(path))
    return found


def _unquoted(name: str) -> str:
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "'\"" else name


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadInput(f"{path} is too large for a file of names")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}; write one name on each line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read as UTF-8 text ({type(error).__name__})") from None


# -- names that look alike


def lookalikes(lists: Iterable[Sequence[str]]) -> list[tuple[str, str]]:
    """Pairs of names that may be one word: the same but for case, spaces and marks, or one slip of a letter apart. Who
    has both says that they are two."""
    known = list(dict.fromkeys(tuple(one) for one in lists))
    holders: dict[str, set[int]] = {}
    for place, one in enumerate(known):
        for name in one:
            holders.setdefault(name, set()).add(place)
    if len(holders) > COMPARED:
        return []
    near: dict[str, list[str]] = {}
    for name, where in holders.items():
        if len(where) < len(known):
            word = _plain(name)
            for key in {word, *(word[:i] + word[i + 1 :] for i in range(len(word)) if len(word) >= TELLING)}:
                near.setdefault(key, []).append(name)
    pairs = {tuple(sorted(pair, key=natural)) for group in near.values() for pair in combinations(group, 2)}
    found = [(a, b) for a, b in pairs if not holders[a] & holders[b] and _slip(_plain(a), _plain(b))]
    return sorted(found, key=lambda pair: natural(pair[0]))


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.casefold())


def _slip(a: str, b: str) -> bool:
    """Equal, or one letter (no digit) put in, left out or changed."""
    if a == b:
        return True
    a, b = sorted((a, b), key=len)
    if len(b) - len(a) > 1 or len(a) < TELLING - 1:
        return False
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    if any(text[at : at + 1].isdigit() for text in (a, b)):
        return False
    return a[at + 1 :] == b[at + 1 :] if len(a) == len(b) else a[at:] == b[at + 1 :]
