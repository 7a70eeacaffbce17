"""The decode cache: every source becomes one memory-mapped ``images.npy`` that all worker processes share.

An entry is a folder named by the hash of the source's content and the decode settings; it holds ``images.npy`` (uint8,
uint16 or float32 [N, H, W, C], the splits one after another), ``labels.npy`` and ``entry.json``. It appears whole or
not at all, and is rebuilt when its sizes are wrong. ``places.npy`` has where images were taken, where that is known.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from flyby import files
from flyby.data.dataset import Dataset, Sizes, content_digest
from flyby.data.photos import Extent, Frame, Pixels, Uneven, coloured, seen
from flyby.data.tiles import unusable
from flyby.errors import BadInput

log = logging.getLogger(__name__)
FORMAT = 3  # raise it when decoding or the layout changes: old entries are then simply never asked for
BROKEN_SHARE = 0.5  # more than so much of a source that cannot be decoded is no accident
STEP = 16  # images after which progress is told
CHUNK = 128  # small images that one thread decodes at a time,
CHUNK_PIXELS = 1 << 20  # and of larger ones so many pixels, so that what waits to be written stays small
# Measured on two cores (images a second, one thread / two): 32x32 JPEG 14k / 9k (threads fight for the interpreter),
# 64x64 10k / 9k,
# 128x128 4k / 8k (Pillow decodes outside the interpreter lock). So small images get one decoding thread and larger ones
# all cores.
SMALL = 64 * 64

# An encoded image, a file of one, an image already decoded, or nothing (which counts as broken).
Item = bytes | Path | Pixels | None


@dataclass(frozen=True)
class SourceSplit:
    """One split of a source before decoding: its labels, its images in blocks, and how to name row
    ``i`` to a person."""

    split: str
    labels: npt.NDArray[np.int64]
    blocks: Callable[[], Iterator[Sequence[Item]]]
    where: Callable[[int], str]
    groups: Sequence[str] | None = None
    places: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Contents:
    """All a source holds: its splits, its class names, and what an earlier reading of it found broken, and of sizes."""

    parts: Sequence[SourceSplit]
    class_names: Sequence[str]
    broken: Sequence[str] = ()
    sizes: Sizes | None = None


@dataclass(frozen=True)
class Form:
    """What images become: of ``size``, or as they are where that is None; but images that differ in size or are large
    become squares of ``fit`` pixels a side. ``channels`` makes photographs grey (1) or RGB (3) in any case."""

    size: Extent | None = None
    fit: int | None = None
    channels: int | None = None


@dataclass(frozen=True)
class Entry:
    """A decoded source in the cache: its splits as memory-mapped datasets, the images that could not be decoded, and
    the sizes they had."""

    splits: dict[str, Dataset]
    broken: tuple[str, ...]
    sizes: Sizes | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.splits.values())).images.shape[1:]


def root_of(cache: Path | None) -> Path:
    """The cache folder: the one given, else ``$FLYBY_CACHE``, else ``~/.cache/flyby``."""
    return Path(os.path.expanduser(cache or os.environ.get("FLYBY_CACHE") or "~/.cache/flyby")).absolute()


# -- the key


def key_of(hashes: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    """The key of an entry: a hash of the files' contents under their names within the source, and of the settings."""
    return files.digest({"format": FORMAT, "files": dict(hashes), "settings": dict(settings)}, 32)


def hashes_of(sources: Mapping[str, Path], root: Path, lenient: bool = False) -> dict[str, str]:
    """SHA-256 of every file; a file whose path, size and time are those of an earlier reading is not read again. With
    ``lenient`` one that cannot be read is no error yet: it will count as a broken image."""
    if not sources:
        return {}
    paths = {name: ascii(str(path.absolute())) for name, path in sources.items()}  # whatever bytes it is made of
    index = root / "index" / f"{files.digest(sorted(paths.values()), 32)}.json"
    known: dict[str, Any] = {}
    with contextlib.suppress(BadInput):
        loaded = files.read_json(index)
        known = loaded if isinstance(loaded, dict) else {}
    hashes: dict[str, str] = {}
    fresh: dict[str, Any] = {}
    for name, path in sources.items():
        try:
            stat = path.stat()
            stamp = [stat.st_size, stat.st_mtime_ns]
            memo = known.get(paths[name])
            if isinstance(memo, list) and len(memo) == 3 and memo[:2] == stamp and isinstance(memo[2], str):
                hashes[name] = memo[2]
            else:
                with path.open("rb") as file:
                    hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            if lenient:
                hashes[name] = "unreadable"
                continue
            raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
        # A file written this very moment could change again within one tick of the clock, unseen: remember it only once
        # it has settled.
        if time.time_ns() - stat.st_mtime_ns > 2_000_000_000:
            fresh[paths[name]] = [*stamp, hashes[name]]
    if fresh != known:
        with contextlib.suppress(BadInput):  # a cache that cannot be written only costs the time of hashing again
            files.write_text(index, json.dumps(fresh))
    return hashes


# -- entries


def peek(root: Path, key: str) -> Entry | None:
    """The entry ``key`` if the cache has it."""
    return _open(root / "decoded" / key)


def fetch(
    root: Path, key: str, read: Callable[[], Contents], *, form: Form | None = None, progress: str | None = None
) -> Entry:
    """The entry ``key``, from the cache or else decoded from ``read()`` into it; ``progress`` is the title of a
    progress bar, if any."""
    entry = peek(root, key)
    if entry is not None:
        return entry
    folder = writable(root) / "decoded" / key
    with _lock(folder):
        entry = _open(folder)  # another process may have built it while this one waited
        if entry is None:
            contents = read()
            try:
                with files.atomic_folder(folder) as tmp:
                    _write(tmp, contents, form or Form(), progress)
                    if _open(folder) is not None:
                        raise FileExistsError("built meanwhile")
            except OSError as error:
                # Not every system has the lock: two may then build at once, and the entry of whoever is first serves
                # both.
                entry = _open(folder)
                if entry is None:
                    raise BadInput(
                        f"cannot write the decode cache {folder.parent}: {error.strerror or error}; name another folder"
                        " in FLYBY_CACHE"
                    ) from error
            entry = entry or _open(folder)
    if entry is None:
        raise BadInput(
            f"the decode cache {folder.parent} loses what is written to it; name another folder in FLYBY_CACHE"
        )
    return entry


def _open(folder: Path) -> Entry | None:
    """A whole entry, or None where there is none or it is damaged."""
    try:
        meta = json.loads((folder / "entry.json").read_bytes())
        if any((folder / name).stat().st_size != size for name, size in meta["bytes"].items()):
            return None
        images = np.load(folder / "images.npy", mmap_mode="r", allow_pickle=False)
        labels = np.load(folder / "labels.npy", allow_pickle=False)
        places = np.load(folder / "places.npy", allow_pickle=False)
        splits = {}
        for name, split in meta["splits"].items():
            rows = slice(split["start"], split["stop"])
            groups = None if split["groups"] is None else tuple(split["groups"])
            there = None if np.isnan(places[rows]).any() else places[rows]
            names = tuple(meta["class_names"])
            splits[name] = Dataset(images[rows], labels[rows], names, split["digest"], groups, there)
        told = meta["sizes"]
        shapes = told and {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
        return Entry(splits, tuple(meta["broken"]), told and Sizes(**shapes))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, BadInput):
        return None


def writable(root: Path) -> Path:
    """The cache folder itself, or one for this user under the temporary folder where it cannot be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        user = os.getuid() if hasattr(os, "getuid") else 0
        # The same folder for all of this user's processes, so that they share it; but not one that somebody else laid
        # out.
        spare = Path(tempfile.gettempdir()) / f"flyby-cache-{user}"
        try:
            spare.mkdir(mode=0o700, exist_ok=True)
            mine = not spare.is_symlink() and (not hasattr(os, "getuid") or spare.stat().st_uid == user)
        except OSError:
            mine = False
        spare = spare if mine else Path(tempfile.mkdtemp(prefix="flyby-cache-"))
        log.warning(
            "warning: the cache folder %s cannot be written (%s); using %s", root, error.strerror or error, spare
        )
        return spare


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One builder at a time for an entry; where the system has no such lock, ``atomic_folder`` alone keeps the entry
    whole."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            folder.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(files.open_lock(folder.parent / f".{folder.name}.lock")), fcntl.LOCK_EX)
            # Left by a killed process: nobody else builds this entry now.
            for stale in folder.parent.glob(f".{folder.name}.*/"):
                shutil.rmtree(stale, ignore_errors=True)
        yield


# -- building an entry


class _Colour(Exception):
    """A colour image in a set that began with grey ones."""


@dataclass
class _Writer:
    """Streams decoded images into ``images.npy`` in order and takes the content hash on the way."""

    file: BinaryIO
    channels: int | None
    frame: Frame
    forced: bool = False  # every photograph gets these channels
    height: int = 0
    width: int = 0
    count: int = 0
    first: str = ""
    hash: Any = field(default_factory=hashlib.sha256)
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.uint8))
    holes: list[tuple[str, int]] = field(default_factory=list)  # tiles with numbers that are none, and how many

    def add(self, image: Pixels, part: SourceSplit, row: int) -> None:
        if self.forced and self.channels is not None:
            image = coloured(image, self.channels, part.where(row))
        height, width, channels = image.shape
        if not self.count:
            self.height, self.width, self.first = height, width, part.where(row)
            self.channels, self.dtype = self.channels or channels, image.dtype
            self.file.write(self.header())
        if (height, width) != (self.height, self.width):
            if self.frame.even:
                raise Uneven
            raise BadInput(
                f"images differ in size ({self.first} is {self.height}x{self.width}, {part.where(row)} is"
                f" {height}x{width}); give them one size with --size 64, all sites the same"
            )
        if image.dtype != self.dtype:
            raise BadInput(
                f"tiles differ in kind ({self.first} is {self.dtype}, {part.where(row)} is {image.dtype}); write them"
                " all alike"
            )
        if channels != self.channels:
            if {channels, self.channels} != {1, 3} or self.dtype != np.uint8:
                raise BadInput(
                    f"images differ in channels ({self.first} has {self.channels}, {part.where(row)} has {channels});"
                    " write them all alike"
                )
            if self.channels == 1:
                raise _Colour
            image = np.repeat(image, 3, axis=2)
        if bad := unusable(image):
            self.holes.append((part.where(row), bad))
        raw = np.ascontiguousarray(image).data
        self.file.write(raw)
        self.hash.update(raw)
        self.count += 1

    def check(self) -> None:
        """Refuse tiles without data here and there: what to put in its place, only their owner knows."""
        if self.holes:
            raise BadInput(
                f"{len(self.holes)} of {self.count} tiles hold numbers that are not finite (no data?), the first"
                f" {self.holes[0][0]} with {self.holes[0][1]} of them, {sum(bad for _, bad in self.holes)} in all; fill"
                " them in, or leave those tiles out"
            )

    def header(self) -> bytes:
        # numpy pads the header so that the first axis can grow in place, so the count may be written in at the end.
        buffer = io.BytesIO()
        shape = (self.count, self.height, self.width, self.channels)
        np.lib.format.write_array_header_1_0(buffer, {"descr": self.dtype.str, "fortran_order": False, "shape": shape})
        return buffer.getvalue()


def _write(folder: Path, contents: Contents, form: Form, progress: str | None) -> None:
    frame, channels = Frame(form.size, form.size is None and form.fit is not None), form.channels
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")  # odd metadata, which change no pixel
        for again in (False, True, True):  # rare, and early where it is common: cheaper than looking at all twice
            try:
                _write_as(folder, contents, frame, (channels, form.channels is not None), (progress, again))
                break
            except _Colour:
                channels = 3
            except Uneven:
                assert form.fit is not None
                frame = Frame((form.fit, form.fit))


def _write_as(
    folder: Path, contents: Contents, frame: Frame, depth: tuple[int | None, bool], told: tuple[str | None, bool]
) -> None:
    total = sum(len(part.labels) for part in contents.parts)
    broken, extents = list(contents.broken), Counter[Extent]()
    labels: list[npt.NDArray[np.int64]] = []
    places: list[npt.NDArray[np.float64]] = []
    splits: dict[str, Any] = {}
    with (folder / "images.npy").open("wb") as file, _told(total, *told) as advance:
        writer = _Writer(file, depth[0], frame, depth[1])
        for part in contents.parts:
            start, kept = writer.count, []
            writer.hash = hashlib.sha256()
            for row, found in enumerate(_decoded(part, frame)):
                if found is None:
                    broken.append(part.where(row))
                    _check_broken(broken[len(contents.broken) :], total, max(2, BROKEN_SHARE * total))
                else:
                    writer.add(found[0], part, row)
                    extents[found[1]] += 1
                    kept.append(row)
                if row % STEP == STEP - 1:
                    advance(STEP)
            labels.append(part.labels[kept].astype("<i8"))
            places.append(np.full((len(kept), 2), np.nan) if part.places is None else part.places[kept])
            shape = (len(kept), writer.height, writer.width, writer.channels)
            groups = None if part.groups is None else [part.groups[row] for row in kept]
            splits[part.split] = {
                "start": start,
                "stop": writer.count,
                "digest": content_digest(writer.hash, labels[-1], shape, contents.class_names, writer.dtype),
                "groups": groups,
            }
        _check_broken(broken[len(contents.broken) :], total, BROKEN_SHARE * total)
        writer.check()
        file.seek(0)
        file.write(writer.header())
        file.flush()
        os.fsync(file.fileno())
    np.save(folder / "labels.npy", np.concatenate(labels), allow_pickle=False)
    np.save(folder / "places.npy", np.concatenate(places), allow_pickle=False)
    lengths = {name: (folder / name).stat().st_size for name in ("images.npy", "labels.npy", "places.npy")}
    sizes = contents.sizes or _sizes(extents, frame)
    facts = {"bytes": lengths, "splits": splits, "class_names": list(contents.class_names), "broken": broken}
    files.write_json(folder / "entry.json", {**facts, "sizes": sizes and asdict(sizes)})


def _sizes(extents: Counter[Extent], frame: Frame) -> Sizes | None:
    """What sizes the images had; None where they keep theirs."""
    if frame.size is None or set(extents) == {frame.size}:
        return None
    order = sorted(extents, key=lambda extent: (extent[0] * extent[1], extent))
    return Sizes(extents.total(), len(order), order[0], order[-1])


def _check_broken(broken: Sequence[str], total: int, most: float) -> None:
    if len(broken) > most:  # no use to go on; the three to be named are known
        share = f"all {total}" if len(broken) == total else f"more than half of the {total}"
        raise BadInput(
            f"{share} images cannot be decoded (first: {', '.join(broken[:3])}); mend or remove them, or check that the"
            " source is what you meant"
        )


def _decoded(part: SourceSplit, frame: Frame) -> Iterator[tuple[Pixels, Extent] | None]:
    """The part's images in order, decoded ahead by threads within a bounded window, with the sizes they had; None for a
    broken one."""
    pixels = SMALL if frame.size is None else frame.size[0] * frame.size[1]
    length = max(1, min(CHUNK, CHUNK_PIXELS // pixels))
    chunks = (block[i : i + length] for block in part.blocks() for i in range(0, len(block), length))
    first = next(chunks, None)
    if first is None:
        return
    probe = _attempt(first[0], frame)
    workers = 1 if probe is not None and probe[1][0] * probe[1][1] <= SMALL else os.cpu_count() or 1
    waiting: deque[Future[list[tuple[Pixels, Extent] | None]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            waiting.append(pool.submit(_attempts, first, frame))
            for chunk in chunks:
                waiting.append(pool.submit(_attempts, chunk, frame))
                if len(waiting) > 2 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _attempts(items: Iterable[Item], frame: Frame) -> list[tuple[Pixels, Extent] | None]:
    return [_attempt(item, frame) for item in items]


def _attempt(item: Item, frame: Frame) -> tuple[Pixels, Extent] | None:
    try:
        return None if item is None else seen(item, frame)
    except (BadInput, Uneven):
        raise  # whole, but not to be had
    except Exception:  # a damaged file makes Pillow's readers fail in any way at all (OSError, SyntaxError ...)
        return None


@contextlib.contextmanager
def _told(total: int, title: str | None, again: bool) -> Iterator[Callable[[int], None]]:
    """Progress of decoding: a bar, or one plain line the first time; nothing without a title."""
    with contextlib.nullcontext() if title is None else bar(total, f"decoding {title}") as advance:
        if title is not None and advance is None and not again:
            log.info("decoding %d images of %s into the cache (once)", total, title)
        yield advance or (lambda _: None)


bars: list[str] = []  # the progress bars that stand on the terminal now: a second one would spoil the first


@contextlib.contextmanager
def bar(total: int, title: str) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on stderr, to be told of each step; None where that is no terminal, another bar stands there, or
    this is a worker."""
    if not sys.stderr.isatty() or bars or multiprocessing.parent_process() is not None:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars.append(title)
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(title, total=total)
            yield lambda n: progress.advance(task, n)
    finally:
        bars.remove(title)
