"""Files that are either whole or absent: everything flyby writes appears by atomic rename.

``canonical`` is the one JSON form that hashes and (later) signatures are taken over.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from flyby.errors import BadInput


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no spaces and no NaN: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()


def digest(value: Any, length: int = 16) -> str:
    """The first ``length`` hex digits of the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value)).hexdigest()[:length]


@contextmanager
def atomic_open(path: Path | str) -> Iterator[BinaryIO]:
    """A binary file that takes its name only when the block ends without an error."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, tmp = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error
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
            raise BadInput(f"cannot write {path}: {error.strerror or error}") from error
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


def read_json(path: Path | str) -> Any:
    path = Path(path)
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not readable JSON ({error})") from None


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """A folder built under a temporary name beside its place and renamed into it; an old one is replaced whole."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise BadInput(f"{path} is a file; name a folder for the output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tmp = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error
    try:
        os.chmod(tmp, 0o777 & ~_umask())
        yield tmp
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
            os.replace(path, old / path.name)
            os.replace(tmp, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(tmp, path)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def file_digest(path: Path | str) -> str:
    """SHA-256 of a file's bytes, in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
