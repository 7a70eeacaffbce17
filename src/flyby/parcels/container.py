"""The parcel's file, byte by byte: a small JSON manifest and a safetensors payload behind a header of lengths.

========  ==========================================================================================================
bytes     content
========  ==========================================================================================================
8         magic ``89 46 4c 59 42 59 0d 0a``: not text, and damaged by any transfer that rewrites line ends
2         schema version, 1 (all numbers little-endian, unsigned)
2         flags, 0
4         length M of the manifest, at most 16 MiB
4         length S of the signature block, at most 64 KiB, 0 when unsigned
8         length P of the payload
M         the manifest: canonical JSON (sorted keys, no spaces), UTF-8
S         the signature block, opaque here
P         the payload: a whole safetensors file; its ``__metadata__`` is ``{"manifest": SHA-256 of the manifest}``
========  ==========================================================================================================

The file ends there. The manifest holds the SHA-256 of every stored tensor and the payload holds the SHA-256 of the
manifest, so that a flipped bit anywhere before or after the signature block is noticed. What the manifest says is
``flyby.parcels.parcel``'s to know; here it is text.

Reading treats the file as hostile: nothing in it is executed, every length is checked against the real size of the file
before memory is taken for it, and every failure is a :class:`ParcelError` that names the file.
"""

from __future__ import annotations

import hashlib
import io
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flyby.errors import BadInput
from flyby.names import printable
from flyby.parcels.codecs import DTYPES, Shape, Span, finite, header, parse_header

MAGIC = b"\x89FLYBY\r\n"
SCHEMA = 1
MAX_BYTES = 4 << 30
MAX_JSON = 16 << 20
MAX_SIGNATURE = 64 << 10

_LENGTHS = struct.Struct("<HHIIQ")
_HEADER = len(MAGIC) + _LENGTHS.size
_OTHER_FILES = {
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89PNG": "a PNG image",
    b"PK\x03\x04": "a zip archive or a PyTorch checkpoint",
    b"\x80\x02": "a pickle",
    b"\x1f\x8b": "a gzip archive",
    b"PAR1": "a Parquet file",
    b"\x89HDF": "an HDF5 file",
    b"{": "a JSON file",
    b"\x89FLYBY\n": "a parcel sent in text mode, which damages it: send it again in binary mode",
}


class ParcelError(BadInput):
    """A parcel cannot be read or made; the message names it and says why. Names in it may come from a stranger, so it
    is kept to one line of limited length without control characters."""

    def __init__(self, message: str) -> None:
        short = message if len(message) <= 1000 else f"{message[:1000]} ..."
        super().__init__(printable(short))


class NotAParcel(ParcelError):
    """The file is something else."""


class Truncated(ParcelError):
    """The file ends before its content does."""


class SchemaMismatch(ParcelError):
    """The file is a parcel of a schema that this version cannot read."""


class Corrupt(ParcelError):
    """The file contradicts itself: hashes, lengths, offsets or JSON."""


class WrongShape(ParcelError):
    """The tensors are not those of the model that the manifest describes."""


class NotFinite(ParcelError):
    """A tensor holds NaN or infinity."""


class TooLarge(ParcelError):
    """The file, a part of it, or what it decodes to is larger than allowed."""


def head(manifest: bytes, signature: bytes, stored: Mapping[str, tuple[str, Shape]]) -> tuple[bytes, dict[str, Span]]:
    """Everything before the first tensor, and the order of the tensors; the payload's header is a function of the
    manifest."""
    table, entries = header(stored, {"manifest": hashlib.sha256(manifest).hexdigest()})
    payload = 8 + len(table) + max((entry.end for entry in entries.values()), default=0)
    lengths = _LENGTHS.pack(SCHEMA, 0, len(manifest), len(signature), payload)
    return b"".join((MAGIC, lengths, manifest, signature, struct.pack("<Q", len(table)), table)), entries


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes as they stand in the file."""
    array: np.ndarray[Any, Any] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.data


# Reading, from the outside inwards: file, header, table of tensors, tensors


@contextmanager
def opened(path: Path | str) -> Iterator[tuple[io.BufferedIOBase, int]]:
    """A regular file and its size; what the system has against it becomes a ParcelError."""
    path = Path(path)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ParcelError(f"{path} is a folder; name one .parcel file in it")
        if not stat.S_ISREG(status.st_mode):  # a pipe would block for ever
            raise ParcelError(f"{path} is not a regular file; copy the parcel to disk first")
        with path.open("rb") as file:
            yield file, status.st_size
    except FileNotFoundError:
        raise ParcelError(f"{path} does not exist; check the name") from None
    except (OSError, ValueError) as error:
        raise ParcelError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


class Start(NamedTuple):
    """What stands before the payload: the manifest as text, the signature block, and the length of the payload that
    follows."""

    manifest: bytes
    signature: bytes
    payload_length: int


def read_start(file: io.BufferedIOBase, size: int, label: str, max_bytes: int | None = None) -> Start:
    """Everything before the payload. No length is believed before it is compared with the size of the file and its own
    limit."""
    if max_bytes is not None and size > max_bytes:
        raise TooLarge(
            f"{label} has {size} bytes, more than the {max_bytes} allowed; raise max_bytes if you trust its sender"
        )
    start = file.read(_HEADER)
    magic = start[: len(MAGIC)]
    if not start:
        raise Truncated(f"{label} is empty; ask for the parcel again")
    if not MAGIC.startswith(magic):
        guess = next(
            (f"; it looks like {kind}" for prefix, kind in _OTHER_FILES.items() if start.startswith(prefix)), ""
        )
        raise NotAParcel(f"{label} is not a parcel{guess}")
    if len(start) < _HEADER:
        raise Truncated(f"{label} ends within its header; ask for the parcel again")
    version, flags, manifest_length, signature_length, payload_length = _LENGTHS.unpack_from(start, len(MAGIC))
    if version != SCHEMA or flags:
        written = f"parcel schema {version}" + (f" with flags {flags:#x}" if flags else "")
        raise SchemaMismatch(
            f"{label} has {written} and this flyby reads schema {SCHEMA}; use the flyby version that wrote it"
        )
    if manifest_length > MAX_JSON or signature_length > MAX_SIGNATURE:
        sizes = f"a manifest of {manifest_length} and a signature of {signature_length} bytes"
        raise TooLarge(
            f"{label} claims {sizes}, where {MAX_JSON} and {MAX_SIGNATURE} are allowed; ask for the parcel again"
        )
    claimed = _HEADER + manifest_length + signature_length + payload_length
    if claimed > size:
        raise Truncated(f"{label} has {size} of the {claimed} bytes that its header claims; ask for the parcel again")
    if claimed < size:
        raise Corrupt(f"{label} has {size - claimed} bytes after its end; ask for the parcel again")
    text = bytes(_exactly(file, manifest_length, label))
    return Start(text, bytes(_exactly(file, signature_length, label)), payload_length)


def _exactly(file: io.BufferedIOBase, length: int, label: str) -> bytearray:
    buffer = bytearray(length)
    if file.readinto(buffer) != length:
        raise Truncated(f"{label} became shorter while it was read; ask for the parcel again")
    return buffer


def read_table(file: io.BufferedIOBase, payload_length: int, label: str, manifest_digest: str) -> dict[str, Span]:
    """The header of the safetensors payload: the tensors in file order."""
    if payload_length < 8:
        raise Corrupt(f"{label}: its payload of {payload_length} bytes is too short for safetensors")
    (length,) = struct.unpack("<Q", _exactly(file, 8, label))
    if length > min(MAX_JSON, payload_length - 8):
        raise Corrupt(
            f"{label}: its payload claims a header of {length} bytes, beyond {min(MAX_JSON, payload_length - 8)}"
        )
    with blame(f"{label}: its payload's header cannot be used", Corrupt):
        metadata, entries = parse_header(bytes(_exactly(file, length, label)), payload_length - 8 - length)
    if metadata != {"manifest": manifest_digest}:
        raise Corrupt(
            f"{label}: its payload does not belong to its manifest (the SHA-256 differs); ask for the parcel again"
        )
    return entries


def read_tensor(file: io.BufferedIOBase, label: str, name: str, entry: Span, sha256: str) -> Tensor:
    """One tensor, whose bytes must have the hash that the manifest gives and whose values must be finite."""
    buffer = _exactly(file, entry.end - entry.start, label)
    if hashlib.sha256(buffer).hexdigest() != sha256:
        raise Corrupt(
            f"{label}: the bytes of tensor {name!r} are not those that were sent (the SHA-256 differs); ask for the"
            " parcel again"
        )
    if entry.dtype == "BOOL" and buffer.strip(b"\0\1"):
        raise Corrupt(f"{label}: tensor {name!r} holds booleans other than 0 and 1")
    dtype = DTYPES[entry.dtype]
    tensor = (
        torch.frombuffer(buffer, dtype=dtype).reshape(entry.shape) if buffer else torch.empty(entry.shape, dtype=dtype)
    )
    check_finite(label, name, tensor)
    return tensor


def check_finite(label: str, name: str, tensor: Tensor) -> None:
    """Refuses a tensor with NaN or infinity in it."""
    if not finite(tensor):
        raise NotFinite(
            f"{label}: tensor {name!r} holds NaN or infinity; its training diverged, so train it again or leave it out"
        )


@contextmanager
def blame(label: str, kind: type[ParcelError]) -> Iterator[None]:
    """What another module has against a part of the parcel becomes a ParcelError, which names the parcel."""
    try:
        yield
    except ParcelError:
        raise
    except BadInput as error:
        raise kind(f"{label}: {error}") from None
