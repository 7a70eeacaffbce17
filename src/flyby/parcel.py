"""The parcel: what a participant sends, exactly once. One file holds a small JSON manifest and a safetensors payload.

========  ===================================================================================================================
bytes     content
========  ===================================================================================================================
8         magic ``89 46 4c 59 42 59 0d 0a``: not text, and damaged by any transfer that rewrites line ends
2         schema version, 1 (all numbers little-endian, unsigned)
2         flags, 0
4         length M of the manifest, at most 16 MiB
4         length S of the signature block, at most 64 KiB, 0 when unsigned
8         length P of the payload
M         the manifest: canonical JSON (sorted keys, no spaces), UTF-8
S         the signature block, opaque here
P         the payload: a complete safetensors file, whose ``__metadata__`` is ``{"manifest": SHA-256 of the manifest}``
========  ===================================================================================================================

The file ends there. The manifest holds the SHA-256 of every stored tensor and the payload holds the SHA-256 of the manifest, so that a
flipped bit anywhere before or after the signature block is noticed. Weights are stored as their codec says (``flyby.codecs``), extra
tensors unchanged under ``extra::NAME``; tensors lie in the order of falling item size, then name.

Reading treats the file as hostile: nothing in it is executed, every length is checked against the real size of the file before memory is
taken for it, and every failure is a :class:`ParcelError` that names the file.
"""

from __future__ import annotations

import hashlib
import io
import math
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from torch import Tensor

from flyby import files
from flyby.codecs import DTYPE_NAMES, DTYPES, MAX_DIMENSIONS, MAX_EXTENT, Entry, codec, header, parse_header, parse_json
from flyby.errors import BadInput
from flyby.ledger import Name
from flyby.models.networks import Network
from flyby.models.spec import ModelSpec, Shapes

MAGIC = b"\x89FLYBY\r\n"
SCHEMA = 1
EXTRA = "extra::"
MAX_BYTES = 4 << 30
MAX_JSON = 16 << 20
MAX_SIGNATURE = 64 << 10

_LENGTHS = struct.Struct("<HHIIQ")
_HEADER = len(MAGIC) + _LENGTHS.size
_OTHER_FILES = {
    b"\xff\xd8\xff": "a JPEG image", b"\x89PNG": "a PNG image", b"PK\x03\x04": "a zip archive or a PyTorch checkpoint",
    b"\x80\x02": "a pickle", b"\x1f\x8b": "a gzip archive", b"PAR1": "a Parquet file", b"\x89HDF": "an HDF5 file", b"{": "a JSON file",
    b"\x89FLYBY\n": "a parcel sent in text mode, which damages it: send it again in binary mode",
}  # fmt: skip


class ParcelError(BadInput):
    """A parcel cannot be read or made; the message names it and says why. Names in it may come from a stranger, so it is kept to one line
    of limited length without control characters."""

    def __init__(self, message: str) -> None:
        short = message if len(message) <= 1000 else f"{message[:1000]} ..."
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in short))


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


class TensorInfo(BaseModel):
    """One stored tensor: its safetensors dtype, its shape and the SHA-256 of its bytes."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    dtype: Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_EXTENT)], ...], Field(max_length=MAX_DIMENSIONS)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


Count = Annotated[int, Field(ge=0, le=2**53)]
Label = Annotated[str, Field(pattern=r"^[^\p{Cc}]{1,256}$")]
ExtraName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


class Manifest(BaseModel):
    """What a parcel says about itself. ``meta`` holds small named facts that a fusion rule may need, scalars or lists of them;
    ``provenance`` says how the model was trained. Neither holds times, hosts or paths: the same training gives the same bytes. ``counts`` is
    None where they are not shared, and may be noisy or a plain held-or-not (1 or 0) where a site prefers that."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    schema_version: Literal[1] = 1
    sender: Name
    method: Label
    spec: ModelSpec
    class_names: tuple[Label, ...]
    samples: Count
    counts: tuple[Count, ...] | None = None
    counts_kind: Literal["exact", "noisy", "binary"] = "exact"
    codec: Label = "fp32"
    extras: tuple[ExtraName, ...] = ()
    tensors: dict[str, TensorInfo]
    meta: dict[str, JsonValue] = {}
    provenance: dict[str, JsonValue] = {}

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if len(self.class_names) != self.spec.classes:
            raise ValueError(f"{len(self.class_names)} class names for a model of {self.spec.classes} classes")
        if self.counts is not None and len(self.counts) != self.spec.classes:
            raise ValueError(f"{len(self.counts)} class counts for a model of {self.spec.classes} classes")
        if self.counts is not None and self.counts_kind == "exact" and sum(self.counts) != self.samples:
            raise ValueError(f"the class counts add up to {sum(self.counts)}, not to the {self.samples} samples")
        if list(self.extras) != sorted(set(self.extras)):
            raise ValueError("the names of the extras must be sorted and different")
        for name, fact in self.meta.items():  # here and not in the type: pydantic would collect a complaint for each of many bad values
            if any(isinstance(value, dict | list) for value in (fact if isinstance(fact, list) else [fact])):
                raise ValueError(f"meta.{name} must be a scalar or a list of scalars; larger things belong in extras or provenance")
        return self

    def to_bytes(self) -> bytes:
        """Canonical JSON: what the file holds, and what a signature is taken over."""
        return files.canonical(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest. It covers the hash of every tensor, so it names the whole content (not the signature)."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Parcel:
    """A manifest and the decoded tensors: ``weights`` are the state dict of ``manifest.spec``'s network (float32 or integers), ``extras``
    whatever else the method shares. Tensors are not to be changed in place: :func:`to_bytes` refuses what no longer fits the manifest."""

    manifest: Manifest
    weights: dict[str, Tensor]
    extras: dict[str, Tensor]
    signature: bytes = b""

    @property
    def size(self) -> int:
        """How many bytes cross: the size of the file."""
        head, entries = _head(self.manifest, self.signature)
        return len(head) + max((entry.end for entry in entries.values()), default=0)

    @property
    def digest(self) -> str:
        return self.manifest.digest

    def network(self, device: torch.device | str = "cpu") -> Network:
        """The sender's network, rebuilt from the spec (code never travels), in eval mode."""
        network = self.manifest.spec.build()
        network.load_state_dict(self.weights, strict=True)
        return network.to(device).eval()


def make(
    *,
    sender: str,
    method: str,
    spec: ModelSpec,
    class_names: Iterable[str],
    weights: Mapping[str, Tensor],
    samples: int,
    counts: Iterable[int] | None = None,
    counts_kind: str = "exact",
    extras: Mapping[str, Tensor] | None = None,
    codec: str = "fp32",
    meta: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Parcel:
    """A parcel from a trained network's state dict. Its weights are those a reader will get, after the codec, so that a simulation sees
    what a real server would see. All tensors are copied."""
    label = f"parcel of {sender!r}"
    shapes = _shapes(label, spec)
    own = {name: _own(tensor, as_weight=True) for name, tensor in weights.items()}
    shared = {name: _own(extra) for name, extra in sorted((extras or {}).items())}
    exact = {name: (shape, torch.float32 if dtype.is_floating_point else dtype) for name, (shape, dtype) in shapes.items()}
    _check_same(label, exact, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()})
    for name, tensor in [*own.items(), *shared.items()]:
        _check_finite(label, name, tensor)
    stored = _encode(label, codec, own, shared)
    try:
        fields = {
            "schema_version": SCHEMA, "sender": sender, "method": method, "spec": spec.model_dump(mode="json"),
            "class_names": list(class_names), "samples": samples, "counts": None if counts is None else list(counts), "counts_kind": counts_kind,
            "codec": codec, "extras": list(shared), "tensors": {name: _describe(label, name, tensor) for name, tensor in stored.items()},
            "meta": dict(meta or {}), "provenance": dict(provenance or {}),
        }  # fmt: skip
        manifest = _parse_manifest(label, files.canonical(fields))
    except Corrupt as error:
        raise ParcelError(str(error)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ParcelError(f"{label}: its manifest may hold plain JSON values only ({error})") from None
    return Parcel(manifest, _decode(label, codec, shapes, stored), shared)


def to_bytes(parcel: Parcel) -> bytes:
    """The file as bytes; the same parcel always gives the same bytes."""
    return b"".join(_chunks(parcel))


def write(parcel: Parcel, path: Path | str) -> int:
    """Writes the file, whole or not at all, and returns its size in bytes."""
    with files.atomic_open(path) as file:
        return sum(file.write(chunk) for chunk in _chunks(parcel))


def from_bytes(data: bytes, *, name: str = "parcel", max_bytes: int = MAX_BYTES) -> Parcel:
    """A parcel from bytes that came by some other way than a file; ``name`` stands in error messages."""
    return _read(io.BytesIO(data), len(data), name, max_bytes)


def read(path: Path | str, *, max_bytes: int = MAX_BYTES) -> Parcel:
    """Reads and checks a parcel: structure, hashes, shapes against the spec, and finite values. ``max_bytes`` limits the file and also the
    weights that it decodes to."""
    with _opened(path) as (file, size):
        return _read(file, size, str(path), max_bytes)


def read_manifest(path: Path | str) -> Manifest:
    """The manifest alone, without reading a tensor. The size of the file, the manifest and the payload's header are checked."""
    with _opened(path) as (file, size):
        return _read_head(file, size, str(path))[0]


# Writing


def _own(tensor: Tensor, as_weight: bool = False) -> Tensor:
    """A contiguous copy on the CPU, which later training cannot change; weights that are floats become float32."""
    dtype = torch.float32 if as_weight and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype).clone(memory_format=torch.contiguous_format)


def _raw(tensor: Tensor) -> memoryview:
    array: np.ndarray[Any, Any] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.data


def _describe(label: str, name: str, tensor: Tensor) -> dict[str, Any]:
    if tensor.dtype not in DTYPE_NAMES:
        raise ParcelError(f"{label}: {name} is {tensor.dtype}, which cannot be stored; convert it to a plain float or integer type")
    return {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "sha256": hashlib.sha256(_raw(tensor)).hexdigest()}


def _encode(label: str, codec_name: str, weights: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored = {EXTRA + name: tensor for name, tensor in extras.items()}
    with _blame(label, ParcelError):
        for name, tensor in weights.items():
            stored |= codec(codec_name).encode(name, tensor)
    return stored


def _head(manifest: Manifest, signature: bytes) -> tuple[bytes, dict[str, Entry]]:
    """Everything before the first tensor, and the order of the tensors; the payload's header is a function of the manifest."""
    text = manifest.to_bytes()
    stored = {name: (info.dtype, info.shape) for name, info in manifest.tensors.items()}
    table, entries = header(stored, {"manifest": hashlib.sha256(text).hexdigest()})
    payload = 8 + len(table) + max((entry.end for entry in entries.values()), default=0)
    lengths = _LENGTHS.pack(SCHEMA, 0, len(text), len(signature), payload)
    return b"".join((MAGIC, lengths, text, signature, struct.pack("<Q", len(table)), table)), entries


def _chunks(parcel: Parcel) -> Iterator[bytes | memoryview]:
    manifest = parcel.manifest
    label = f"parcel of {manifest.sender!r}"
    stored = _encode(label, manifest.codec, parcel.weights, parcel.extras)
    if stored.keys() != manifest.tensors.keys():
        raise Corrupt(f"{label}: its tensors are not those of its manifest; use flyby.parcel.make for a changed model")
    head, entries = _head(manifest, parcel.signature)
    yield head
    for name in entries:
        if _describe(label, name, stored[name])["sha256"] != manifest.tensors[name].sha256:
            raise Corrupt(f"{label}: {name} was changed after the parcel was made; use flyby.parcel.make for a changed model")
        yield _raw(stored[name])


# Reading, from the outside inwards: file, header, manifest, table of tensors, tensors


@contextmanager
def _blame(label: str, kind: type[ParcelError]) -> Iterator[None]:
    """What another module has against a part of the parcel becomes an error of this module, which names the parcel."""
    try:
        yield
    except ParcelError:
        raise
    except BadInput as error:
        raise kind(f"{label}: {error}") from None


@contextmanager
def _opened(path: Path | str) -> Iterator[tuple[io.BufferedIOBase, int]]:
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


def _read(file: io.BufferedIOBase, size: int, label: str, max_bytes: int) -> Parcel:
    manifest, signature, entries = _read_head(file, size, label, max_bytes)
    shapes = _shapes(label, manifest.spec)
    _check_stored(label, manifest, shapes)
    decoded = sum(math.prod(shape) * (4 if dtype.is_floating_point else dtype.itemsize) for shape, dtype in shapes.values())
    if decoded > max_bytes:
        raise TooLarge(f"{label} decodes to {decoded} bytes, more than the {max_bytes} allowed; raise max_bytes if you trust its sender")
    stored = {name: _read_tensor(file, label, name, entry, manifest.tensors[name].sha256) for name, entry in entries.items()}
    weights = _decode(label, manifest.codec, shapes, stored)
    return Parcel(manifest, weights, {name: stored[EXTRA + name] for name in manifest.extras}, signature)


def _read_head(file: io.BufferedIOBase, size: int, label: str, max_bytes: int | None = None) -> tuple[Manifest, bytes, dict[str, Entry]]:
    """Everything before the first tensor. No length is believed before it is compared with the size of the file and its own limit."""
    if max_bytes is not None and size > max_bytes:
        raise TooLarge(f"{label} has {size} bytes, more than the {max_bytes} allowed; raise max_bytes if you trust its sender")
    start = file.read(_HEADER)
    magic = start[: len(MAGIC)]
    if not start:
        raise Truncated(f"{label} is empty; ask for the parcel again")
    if not MAGIC.startswith(magic):
        guess = next((f"; it looks like {kind}" for prefix, kind in _OTHER_FILES.items() if start.startswith(prefix)), "")
        raise NotAParcel(f"{label} is not a parcel{guess}")
    if len(start) < _HEADER:
        raise Truncated(f"{label} ends within its header; ask for the parcel again")
    version, flags, manifest_length, signature_length, payload_length = _LENGTHS.unpack_from(start, len(MAGIC))
    if version != SCHEMA or flags:
        written = f"parcel schema {version}" + (f" with flags {flags:#x}" if flags else "")
        raise SchemaMismatch(f"{label} has {written} and this flyby reads schema {SCHEMA}; use the flyby version that wrote it")
    if manifest_length > MAX_JSON or signature_length > MAX_SIGNATURE:
        sizes = f"a manifest of {manifest_length} and a signature of {signature_length} bytes"
        raise TooLarge(f"{label} claims {sizes}, where {MAX_JSON} and {MAX_SIGNATURE} are allowed; ask for the parcel again")
    claimed = _HEADER + manifest_length + signature_length + payload_length
    if claimed > size:
        raise Truncated(f"{label} has {size} of the {claimed} bytes that its header claims; ask for the parcel again")
    if claimed < size:
        raise Corrupt(f"{label} has {size - claimed} bytes after its end; ask for the parcel again")
    text = _exactly(file, manifest_length, label)
    signature = bytes(_exactly(file, signature_length, label))
    manifest = _parse_manifest(label, bytes(text))
    entries = _read_table(file, payload_length, label, hashlib.sha256(text).hexdigest())
    promised = {name: (info.dtype, info.shape) for name, info in manifest.tensors.items()}
    found = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    if promised != found:
        name = min(name for name in promised.keys() | found.keys() if promised.get(name) != found.get(name))
        raise Corrupt(f"{label}: its manifest says {promised.get(name)} of tensor {name!r} and its payload {found.get(name)}")
    return manifest, signature, entries


def _exactly(file: io.BufferedIOBase, length: int, label: str) -> bytearray:
    buffer = bytearray(length)
    if file.readinto(buffer) != length:
        raise Truncated(f"{label} became shorter while it was read; ask for the parcel again")
    return buffer


def _parse_manifest(label: str, text: bytes) -> Manifest:
    with _blame(f"{label}: its manifest cannot be used", Corrupt):
        if len(text) > MAX_JSON:
            raise TooLarge(f"{label}: its manifest has {len(text)} bytes, more than the {MAX_JSON} allowed; keep large things in extras")
        parse_json(text)
        try:
            manifest = Manifest.model_validate_json(text)
            canonical = manifest.to_bytes() == text
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise BadInput((f"{where}: " if where else "") + first["msg"].removeprefix("Value error, ")) from None
        except (ValueError, RecursionError) as error:
            raise BadInput(str(error)) from None
        if not canonical:
            raise BadInput("it is not canonical JSON; write parcels with flyby.parcel.write")
    return manifest


def _read_table(file: io.BufferedIOBase, payload_length: int, label: str, manifest_digest: str) -> dict[str, Entry]:
    """The header of the safetensors payload: the tensors in file order."""
    if payload_length < 8:
        raise Corrupt(f"{label}: its payload of {payload_length} bytes is too short for safetensors")
    (length,) = struct.unpack("<Q", _exactly(file, 8, label))
    if length > min(MAX_JSON, payload_length - 8):
        raise Corrupt(f"{label}: its payload claims a header of {length} bytes, beyond {min(MAX_JSON, payload_length - 8)}")
    with _blame(f"{label}: its payload's header cannot be used", Corrupt):
        metadata, entries = parse_header(bytes(_exactly(file, length, label)), payload_length - 8 - length)
    if metadata != {"manifest": manifest_digest}:
        raise Corrupt(f"{label}: its payload does not belong to its manifest (the SHA-256 differs); ask for the parcel again")
    return entries


def _read_tensor(file: io.BufferedIOBase, label: str, name: str, entry: Entry, sha256: str) -> Tensor:
    buffer = _exactly(file, entry.end - entry.start, label)
    if hashlib.sha256(buffer).hexdigest() != sha256:
        raise Corrupt(f"{label}: the bytes of tensor {name!r} are not those that were sent (the SHA-256 differs); ask for the parcel again")
    if entry.dtype == "BOOL" and buffer.strip(b"\0\1"):
        raise Corrupt(f"{label}: tensor {name!r} holds booleans other than 0 and 1")
    dtype = DTYPES[entry.dtype]
    tensor = torch.frombuffer(buffer, dtype=dtype).reshape(entry.shape) if buffer else torch.empty(entry.shape, dtype=dtype)
    _check_finite(label, name, tensor)
    return tensor


# What makers and readers both check


def _shapes(label: str, spec: ModelSpec) -> Shapes:
    try:
        return {name: (tuple(shape), dtype) for name, (shape, dtype) in spec.shapes().items()}
    except Exception as error:  # whatever a hostile spec does to the builder, it is the parcel's fault
        raise WrongShape(f"{label}: no network can be built from its spec ({error})") from None


def _check_stored(label: str, manifest: Manifest, shapes: Shapes) -> None:
    """The stored tensors are exactly those that the codec makes of the spec's network, and the extras."""
    with _blame(label, ParcelError):
        layouts = [codec(manifest.codec).layout(name, dtype, shape) for name, (shape, dtype) in shapes.items()]
    expected = {name: (DTYPE_NAMES[dtype], shape) for layout in layouts for name, (dtype, shape) in layout.items()}
    found = {name: (info.dtype, info.shape) for name, info in manifest.tensors.items() if not name.startswith(EXTRA)}
    _check_same(label, expected, found)
    extras = sorted(name.removeprefix(EXTRA) for name in manifest.tensors if name.startswith(EXTRA))
    if extras != list(manifest.extras):
        raise WrongShape(f"{label} names the extras {list(manifest.extras)} and holds {extras}")


def _check_same(label: str, expected: Mapping[str, object], found: Mapping[str, object]) -> None:
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise WrongShape(f"{label} lacks the tensor {name!r} of its model")
        if name not in expected:
            raise WrongShape(f"{label} has a tensor {name!r} that its model does not have")
        if expected[name] != found[name]:
            raise WrongShape(f"{label}: tensor {name!r} is {found[name]} where its model has {expected[name]}")


def _check_finite(label: str, name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise NotFinite(f"{label}: tensor {name!r} holds NaN or infinity; its training diverged, so train it again or leave it out")


def _decode(label: str, codec_name: str, shapes: Shapes, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = {}
    for name, (shape, _) in shapes.items():
        with _blame(label, Corrupt):
            weights[name] = codec(codec_name).decode(name, stored, shape)
        if weights[name] is not stored[name]:
            _check_finite(label, name, weights[name])  # a byte times a large scale may overflow
    return weights
