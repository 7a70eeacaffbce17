"""What a network makes of images, a row of numbers for each, computed once: kept in the cache folder image by image.

The folder ``features/FAMILY`` is of one network and one way of giving it images. It holds blocks of two files:
``BLOCK.names.npy`` has a hash of every image's bytes, ``BLOCK.rows.npy`` what was made of them. So an image is looked
at once on a machine, whatever site, split or run it comes in next, and what was looked at before an interruption stays
known. Images are always given in pieces of one size, the last one filled up: so the row of an image does not depend on
who was looked at beside it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyby.data.cache import bar, root_of, writable
from flyby.errors import BadInput
from flyby.files import atomic_open, digest

log = logging.getLogger(__name__)
BLOCK = 64 << 20  # bytes of rows that are computed before they are put on disk
SPEAK_SECONDS = 5.0
FORMAT = 2
DAMAGE = (OSError, ValueError, EOFError)  # what a file that is not whole makes numpy say

Look = Callable[[Tensor], Tensor]  # a piece of images, wherever they are, to rows on the host


@torch.no_grad()
def rows_of(family: Sequence[Any], images: Tensor, look: Look, shape: Sequence[int], piece: int, label: str) -> Tensor:
    """float32 ``[N, *shape]`` on the host: what ``look`` makes of images ``[N, H, W, C]``, ``piece`` of them at a time.
    ``family`` are plain facts that name the network and all else that the rows depend on; ``label`` says whose images
    these are, to people."""
    facts = [FORMAT, *family, list(images.shape[1:]), str(images.dtype)]
    folder = writable(root_of(None)) / "features" / digest(facts, 32)
    pixels = images.cpu().contiguous().numpy()
    names = [hashlib.sha256(image.data).digest()[:16] for image in pixels]
    made = torch.empty(len(names), *shape)
    shelf = _shelf(folder, tuple(shape))
    unknown = shelf.fill(made, names)
    first = {names[place]: place for place in reversed(unknown)}  # of equal images one is looked at
    todo, whose = sorted(first.values()), f" of {label}" if label else ""
    step = max(1, BLOCK // (4 * max(1, made[:1].numel()) * piece)) * piece
    with _told(len(todo), f"features{whose}") as tell:
        for start in range(0, len(todo), step):
            block = todo[start : start + step]
            for at in range(0, len(block), piece):
                rows = block[at : at + piece]
                full = torch.as_tensor(rows + rows[:1] * (piece - len(rows)))
                made[torch.as_tensor(rows)] = look(images[full.to(images.device)])[: len(rows)]
                tell(len(rows))
            _check(made, block, whose)
            shelf.put([names[row] for row in block], made[torch.as_tensor(block)])
    for place in unknown:
        if (original := first[names[place]]) != place:
            made[place] = made[original]
    return made


@contextmanager
def _told(total: int, title: str) -> Iterator[Callable[[int], None]]:
    """Progress of looking: a bar on a terminal, elsewhere a line after some seconds, then ever more seldom."""
    started, spoken, wait, done = time.perf_counter(), time.perf_counter(), SPEAK_SECONDS, 0

    def tell(more: int) -> None:
        nonlocal spoken, wait, done
        done, now = done + more, time.perf_counter()
        if advance is not None:
            advance(more)
        elif now - spoken > wait and done < total:
            spoken, wait, left = now, min(2 * wait, 60.0), (now - started) / done * (total - done)
            log.info("%s: %d of %d images, about %.0f s left", title, done, total, left)

    with bar(total, title) if total and log.isEnabledFor(logging.INFO) else nullcontext() as advance:
        yield tell


def _check(made: Tensor, block: list[int], whose: str) -> None:
    sound = made[torch.as_tensor(block)].flatten(1).isfinite().all(1)
    if not bool(sound.all()):
        bad = block[int((~sound).nonzero()[0, 0])]
        raise BadInput(
            f"the backbone gives numbers that are not finite for image {bad}{whose}; look at that image, or choose"
            " another backbone"
        )


class Shelf:
    """The blocks of one family on this machine's disk, and where in them each known image is."""

    def __init__(self, folder: Path, shape: tuple[int, ...]) -> None:
        self.folder, self.shape = folder, shape
        self.places: dict[bytes, tuple[Path, int]] = {}
        self.listed: set[str] = set()

    def fill(self, made: Tensor, names: Sequence[bytes]) -> list[int]:
        """Puts the known rows into ``made``; the places of those that are not known."""
        if not self.places.keys() >= set(names):
            self._list()
        wanted: dict[Path, list[tuple[int, int]]] = {}
        unknown = []
        for place, name in enumerate(names):
            home = self.places.get(name)
            if home is None:
                unknown.append(place)
            else:
                wanted.setdefault(home[0], []).append((place, home[1]))
        for path, pairs in wanted.items():
            into, rows = (list(column) for column in zip(*pairs, strict=True))
            try:
                kept = self._open(path, max(rows) + 1)
                made[torch.as_tensor(into)] = torch.from_numpy(kept[rows])
            except DAMAGE:  # taken away or damaged: as if it had never been known
                self.places = {name: home for name, home in self.places.items() if home[0] != path}
                unknown += into
        return sorted(unknown)

    def put(self, names: Sequence[bytes], rows: Tensor) -> None:
        block = hashlib.sha256(b"".join(names)).hexdigest()[:32]
        table = np.frombuffer(b"".join(names), dtype=np.uint8).reshape(len(names), 16)
        with suppress(BadInput):  # a cache that cannot be written only costs the time of computing again
            for kind, values in (("rows", rows.numpy()), ("names", table)):  # the names last: they say that rows are
                with atomic_open(self.folder / f"{block}.{kind}.npy") as file:
                    np.save(file, values, allow_pickle=False)
            self._learn(self.folder / f"{block}.names.npy", table)

    def _learn(self, path: Path, table: np.ndarray[Any, Any]) -> None:
        rows = path.with_name(path.name.replace(".names.", ".rows."))
        self._open(rows, len(table))
        self.listed.add(path.name)
        self.places |= {name.tobytes(): (rows, row) for row, name in enumerate(table)}

    def _list(self) -> None:
        """Learn of blocks that this process or another has put here since."""
        for path in sorted(self.folder.glob("*.names.npy")):
            with suppress(*DAMAGE):  # a damaged block is not known, and is written again
                if path.name not in self.listed:
                    table = np.load(path, allow_pickle=False)
                    if table.dtype == np.uint8 and table.ndim == 2 and table.shape[1] == 16:
                        self._learn(path, table)

    def _open(self, path: Path, least: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        kept: np.ndarray[Any, np.dtype[np.float32]] = np.load(path, mmap_mode="r", allow_pickle=False)
        if kept.dtype != np.float32 or kept.shape[1:] != self.shape or len(kept) < least:
            raise ValueError("it is of other rows")
        return kept


@functools.lru_cache(maxsize=8)
def _shelf(folder: Path, shape: tuple[int, ...]) -> Shelf:
    return Shelf(folder, shape)
