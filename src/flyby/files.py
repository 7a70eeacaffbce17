"""Files that are either whole or absent: everything flyby writes appears by atomic rename.

``canonical`` is the one JSON form that hashes and (later) signatures are taken over.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, BinaryIO, Generic, TypeVar

from flyby.errors import BadInput

T = TypeVar("T")


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no spaces and no NaN: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()


def digest(value: Any, length: int = 16) -> str:
    """The first ``length`` hex digits of the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value)).hexdigest()[:length]


FULL = (errno.ENOSPC, errno.EDQUOT)
MARK = r"\.[a-z0-9_]{8}\.(part|old)"  # as tempfile ends the names of what is not whole yet


def unwritable(path: Path | str, error: OSError) -> BadInput:
    """What the system has against writing ``path``, as one sentence; a full disk says how to go on."""
    if error.errno in FULL:
        folder = Path(path).absolute().parent
        while re.fullmatch(rf"\..*{MARK}", folder.name):  # one that is being built, and gone by now
            folder = folder.parent
        return BadInput(
            f"no room left on the disk of {folder} ({os.strerror(error.errno)}), so"
            f" {Path(path).name} was not written; make room and give the same command again (flyby run: with --resume),"
            " it goes on from what is there"
        )
    return BadInput(f"cannot write {path}: {error.strerror or error}")


@contextmanager
def atomic_open(path: Path | str) -> Iterator[BinaryIO]:
    """A binary file that takes its name only when the block ends without an error."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, tmp = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(tmp, 0o666 & ~_umask())
        os.replace(tmp, path)
    except BaseException as error:
        Path(tmp).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise unwritable(path, error) from error
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_bytes(path: Path | str, data: bytes) -> None:
    with atomic_open(path) as file:
        file.write(data)


def write_text(path: Path | str, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path | str, value: Any) -> None:
    """Indented JSON for people to read; floats keep their shortest exact form."""
    write_text(path, json.dumps(value, indent=1, sort_keys=False, allow_nan=False, ensure_ascii=False) + "\n")


def plain(value: Any) -> Any:
    """The same value for a JSON file: what is not a finite number becomes null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path | str) -> Any:
    path = Path(path)
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not readable JSON ({error})") from None


class Latest(Generic[T]):
    """A file as ``load`` reads it: read once, and again only when it has changed, as its inode, size and times say."""

    def __init__(self, load: Callable[[Path], T]) -> None:
        self._load = load
        self._kept: dict[Path, tuple[object, T]] = {}

    def __call__(self, path: Path) -> T:
        try:
            now = path.stat()
        except OSError:
            return self._load(path)  # which says what is wrong with it
        key, stamp = path.absolute(), (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        if key not in self._kept or self._kept[key][0] != stamp:
            self._kept[key] = stamp, self._load(path)
        return self._kept[key][1]


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """A folder built under a temporary name beside its place and renamed into it; an old one is replaced whole."""
    path = Path(path)
    if path.is_symlink():
        raise BadInput(f"{path} is a link, and a link is not written through; name the folder itself")
    if path.exists() and not path.is_dir():
        raise BadInput(f"{path} is a file; name a folder for the output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tmp = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        os.chmod(tmp, 0o777 & ~_umask())
        yield tmp
        if path.exists() and not _exchange(tmp, path):
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
            os.replace(path, old / path.name)
            os.replace(tmp, path)
            shutil.rmtree(old, ignore_errors=True)
        elif not path.exists():
            os.replace(tmp, path)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _exchange(left: Path, right: Path) -> bool:
    """Swap two folders in one step, so that a kill leaves either the old or the new one in its place. Linux can, on
    most file systems."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, TypeError, AttributeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(left.absolute()), here, os.fsencode(right.absolute()), exchange) == 0)


def open_lock(path: Path) -> IO[bytes]:
    """A lock file, made if it is not there and never emptied: what its name leads to may be somebody else's. A link, a
    pipe or a device in its place is refused."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ESPIPE):
            raise BadInput(f"{path} is not a plain file, so it cannot be a lock; take it away") from None
        raise
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise BadInput(f"{path} is not a plain file, so it cannot be a lock; take it away")
    return handle


@contextmanager
def sole_writer(path: Path | str, patience: float = 0.0) -> Iterator[None]:
    """One process per output file or folder: a second one that would write the same waits for so many seconds, and is
    then told so. What a killed one left of it is taken away."""
    path = Path(path)
    lock = path.parent / f".{path.name}.lock"
    new = not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _taken(lock, path, time.monotonic() + patience)
    except OSError as error:
        raise unwritable(path, error) from error
    with handle:
        try:
            # No other output's; a folder that is built inside one that is built has both their marks.
            name = re.escape(path.name)
            left = re.compile(rf"\.{name}{MARK}|\.\.{name}{MARK}{MARK}")
            sweep(entry for entry in path.parent.iterdir() if left.fullmatch(entry.name))
            yield
        finally:
            lock.unlink(missing_ok=True)
            if new:
                with suppress(OSError):
                    path.parent.rmdir()


def _taken(lock: Path, path: Path, until: float) -> IO[bytes]:
    """The lock file, held; asked for again until it is free or the time is over."""
    while True:
        handle = open_lock(lock)
        try:
            take_lock(handle, lock, path)
            return handle
        except BadInput:
            handle.close()
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)


def take_lock(handle: IO[Any], lock: Path, output: Path) -> None:
    """Hold the open lock file, or refuse because somebody else does. A file system without locks is
    used without one."""
    import fcntl

    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        if not lock.exists() or not os.path.samestat(os.fstat(handle.fileno()), lock.stat()):
            raise BlockingIOError  # its owner was just taking it away
    except OSError:
        raise BadInput(
            f"another flyby process is working in {output}; wait for it, or name another folder with --out"
        ) from None


def strangers(folder: Path, own: Iterable[str]) -> list[str]:
    """Names in a folder that no pattern says are ours; what a killed process left of such a file is ours, too."""
    patterns = [pattern for one in own for pattern in (one, f".{one}.????????.part")]
    return sorted(path.name for path in folder.iterdir() if not any(fnmatchcase(path.name, one) for one in patterns))


def sweep(leftovers: Iterable[Path]) -> None:
    """Take away what killed processes left half-written; whoever calls knows that nobody is writing it."""
    for path in sorted(leftovers, reverse=True):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def file_digest(path: Path | str) -> str:
    """SHA-256 of a file's bytes, in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_name(text: str, most: int = 100) -> str:
    """A file name from any other, which may be long or no text at all: its plain letters, and a digest where some were
    lost."""
    kept = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:most].lstrip(".")
    mark = hashlib.sha256(os.fsencode(text)).hexdigest()[:12]
    return kept if kept == text else f"{kept}-{mark}"


def moved(path: Path, target: Path, most: int) -> bool:
    """Move a stranger's file: renamed where both are on one disk, else copied, unless it holds more than ``most`` bytes
    or says that it holds what it does not (a sparse file would be written out in full)."""
    try:
        os.rename(path, target)
        return True
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise unwritable(target, error) from None
    there = path.stat()
    if there.st_size > min(most, 2 * 512 * there.st_blocks + 4096):
        return False
    try:
        shutil.move(path, target)
    except OSError as error:
        raise unwritable(target, error) from None
    return True
