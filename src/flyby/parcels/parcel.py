"""The parcel: what a participant sends, exactly once. One file holds a small JSON manifest and a safetensors payload.

The file's bytes are laid out and read in ``flyby.parcels.container``. Weights are stored as their codec says
(``flyby.parcels.codecs``), extra tensors unchanged under ``extra::NAME``; tensors lie in the order of falling item
size, then name. A reader believes nothing: the manifest is parsed under limits, the stored tensors must be those that
the codec makes of the manifest's network, and every value must be finite.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Self, TypedDict, Unpack

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from torch import Tensor

from flyby import files
from flyby.errors import BadInput
from flyby.models.spec import ModelSpec, Network, Shapes
from flyby.names import Label, Name, printable
from flyby.parcels import container
from flyby.parcels.codecs import DTYPE_NAMES, DTYPES, MAX_DIMENSIONS, MAX_EXTENT, Span, codec, parse_json
from flyby.parcels.container import (
    MAGIC,
    MAX_BYTES,
    Corrupt,
    NotAParcel,
    NotFinite,
    ParcelError,
    SchemaMismatch,
    TooLarge,
    Truncated,
    WrongShape,
)
from flyby.settings import sentence

__all__ = [
    "Parcel",
    "Manifest",
    "TensorInfo",
    "Facts",
    "make",
    "read",
    "write",
    "to_bytes",
    "from_bytes",
    "read_manifest",
    "decoded_bytes",
    "EXTRA",
    "MAGIC",
    "MAX_BYTES",
    "ParcelError",
    "NotAParcel",
    "Truncated",
    "SchemaMismatch",
    "Corrupt",
    "WrongShape",
    "NotFinite",
    "TooLarge",
]

EXTRA = "extra::"
MAX_TENSORS = 1 << 14
PARSED, SMALL = 512, 16 << 10  # manifests that are known for a while, and the bytes of text of the longest one
_PARSED: dict[bytes, Manifest] = {}


class TensorInfo(BaseModel):
    """One stored tensor: its safetensors dtype, its shape and the SHA-256 of its bytes."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    dtype: Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_EXTENT)], ...], Field(max_length=MAX_DIMENSIONS)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


Count = Annotated[int, Field(ge=0, le=2**53)]
ExtraName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


class Manifest(BaseModel):
    """What a parcel says about itself. ``meta`` holds small named facts that a fusion rule may need, scalars or lists
    of them; ``provenance`` says how the model was trained. Neither holds times, hosts or paths: the same training gives
    the same bytes. ``counts`` is None where they are not shared, and may be noisy or a plain held-or-not (1 or 0) where
    a site prefers that."""

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
        if len(set(self.class_names)) < len(self.class_names):
            raise ValueError("two of its classes have the same name")
        if self.counts is not None and len(self.counts) != self.spec.classes:
            raise ValueError(f"{len(self.counts)} class counts for a model of {self.spec.classes} classes")
        if self.counts is not None and self.counts_kind == "exact" and sum(self.counts) != self.samples:
            raise ValueError(f"the class counts add up to {sum(self.counts)}, not to the {self.samples} samples")
        if list(self.extras) != sorted(set(self.extras)):
            raise ValueError("the names of the extras must be sorted and different")
        # Here and not in the type: pydantic would collect a complaint for each of many bad values.
        for name, fact in self.meta.items():
            if any(isinstance(value, dict | list) for value in (fact if isinstance(fact, list) else [fact])):
                raise ValueError(
                    f"meta.{name} must be a scalar or a list of scalars; larger things belong in extras or provenance"
                )
        return self

    @property
    def facts(self) -> Facts:
        """What the sender says, as :func:`make` takes it: for a parcel that is made of this one."""
        return {
            "sender": self.sender,
            "method": self.method,
            "spec": self.spec,
            "class_names": self.class_names,
            "samples": self.samples,
            "counts": self.counts,
            "counts_kind": self.counts_kind,
            "codec": self.codec,
            "meta": self.meta,
            "provenance": self.provenance,
        }

    def to_bytes(self) -> bytes:
        """Canonical JSON: what the file holds, and what a signature is taken over. The spec's defaults are left out, so
        that a setting that a later flyby adds to networks changes no byte of an older parcel."""
        return files.canonical(
            self.model_dump(mode="json") | {"spec": self.spec.model_dump(mode="json", exclude_defaults=True)}
        )

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest. It covers the hash of every tensor, so it names the whole content (not the
        signature)."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def weights_digest(self) -> str:
        """The SHA-256 of what names the weights alone, whoever sends them and whatever travels beside: the same for a
        copy."""
        hashes = sorted(info.sha256 for name, info in self.tensors.items() if not name.startswith(EXTRA))
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def content_digest(self, reads: Collection[str]) -> str:
        """The same of what a rule ``reads``: the weights, or where it does not look at them the kinds of extras that
        it does, since frozen networks are all alike."""
        kinds = sorted(set(reads) & {name.partition(".")[0] for name in self.extras})
        if "weights" in reads or not kinds:
            return self.weights_digest
        found = sorted((n, t.sha256) for n, t in self.tensors.items() if n.startswith(EXTRA))
        named = [sha for name, sha in found if name.removeprefix(EXTRA).partition(".")[0] in kinds]
        return hashlib.sha256("".join(named).encode()).hexdigest()

    @property
    def sites(self) -> int:
        """How many sites it speaks for: one, or all those of a region whose sums were put together."""
        told = self.meta.get("sites", 1)
        return told if type(told) is int and 1 <= told <= 2**53 else 1


@dataclass(frozen=True, eq=False)
class Parcel:
    """A manifest and the decoded tensors: ``weights`` are the state dict of ``manifest.spec``'s network (float32 or
    integers), ``extras`` whatever else the method shares. Tensors are not to be changed in place: :func:`to_bytes`
    refuses what no longer fits the manifest.
    """

    manifest: Manifest
    weights: dict[str, Tensor]
    extras: dict[str, Tensor]
    signature: bytes = b""
    revised: bool = False  # whether a rule put other weights in their place

    @property
    def size(self) -> int:
        """How many bytes cross: the size of the file."""
        head, entries = _head(self.manifest, self.signature)
        return len(head) + max((entry.end for entry in entries.values()), default=0)

    @property
    def digest(self) -> str:
        return self.manifest.digest

    def __repr__(self) -> str:
        m = self.manifest
        return f"<Parcel of {m.sender}: {m.spec.name} by {m.method} from {m.samples:,} images, {self.size:,} bytes>"

    def _repr_html_(self) -> str:
        m, held = self.manifest, dict(zip(self.manifest.class_names, self.manifest.counts or (), strict=False))
        facts = {"sender": m.sender, "method": m.method, "model": m.spec.name, "images": f"{m.samples:,}"}
        facts["classes"] = ", ".join(f"{name}: {count}" for name, count in held.items() if count) or "not shared"
        facts |= {"extras": ", ".join(m.extras) or "none", "size": f"{self.size:,} bytes"}
        rows = (f"<tr><th>{name}</th><td>{escape(printable(value))}</td></tr>" for name, value in facts.items())
        return f"<table>{''.join(rows)}</table>"

    def network(self, device: torch.device | str = "cpu", *, shared: bool = False) -> Network:
        """The sender's network, rebuilt from the spec (code never travels), in eval mode. ``shared`` leaves its weights
        in the parcel's own memory, for a network that is only to answer."""
        network = self.manifest.spec.skeleton()
        weights = {name: value if shared else value.clone() for name, value in self.weights.items()}
        network.load_state_dict(weights, strict=True, assign=True)
        network.identity = "" if self.revised else self.digest
        return network.to(device).eval()


class Facts(TypedDict):
    """What a sender says about its upload: a manifest without its tensors (see :class:`Manifest`)."""

    sender: str
    method: str
    spec: ModelSpec
    class_names: Iterable[str]
    samples: int
    counts: NotRequired[Iterable[int] | None]
    counts_kind: NotRequired[str]
    codec: NotRequired[str]
    meta: NotRequired[Mapping[str, Any]]
    provenance: NotRequired[Mapping[str, Any]]


def make(
    *, weights: Mapping[str, Tensor], extras: Mapping[str, Tensor] | None = None, **facts: Unpack[Facts]
) -> Parcel:
    """A parcel from a trained network's state dict. Its weights are those a reader will get, after the codec, so that a
    simulation sees what a real server would see. All tensors are copied."""
    label, codec, counts = f"parcel of {facts['sender']!r}", facts.get("codec", "fp32"), facts.get("counts")
    shapes = _shapes(label, facts["spec"])
    own = {name: _own(tensor, as_weight=True) for name, tensor in weights.items()}
    shared = {name: _own(extra) for name, extra in sorted((extras or {}).items())}
    exact = {
        name: (shape, torch.float32 if dtype.is_floating_point else dtype) for name, (shape, dtype) in shapes.items()
    }
    _check_same(label, exact, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()})
    for name, tensor in [*own.items(), *shared.items()]:
        container.check_finite(label, name, tensor)
    stored = _encode(label, codec, own, shared)
    try:
        fields = {
            **facts,
            "schema_version": container.SCHEMA,
            "spec": facts["spec"].model_dump(mode="json"),
            "class_names": list(facts["class_names"]),
            "counts": None if counts is None else list(counts),
            "extras": list(shared),
            "tensors": {name: _describe(label, name, tensor) for name, tensor in stored.items()},
        }
        manifest = _parse_manifest(label, files.canonical(fields), ours=True)
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
    """Reads and checks a parcel: structure, hashes, shapes against the spec, and finite values. ``max_bytes`` limits
    the file and also the weights that it decodes to."""
    with container.opened(path) as (file, size):
        return _read(file, size, str(path), max_bytes)


def read_manifest(path: Path | str) -> Manifest:
    """The manifest alone, without reading a tensor. The size of the file, the manifest and the payload's header are
    checked."""
    return read_start(path)[2]


def read_start(path: Path | str) -> tuple[bytes, bytes, Manifest]:
    """(manifest as text, signature block, manifest), all from one reading and checked as :func:`read_manifest` does."""
    with container.opened(path) as (file, size):
        start, manifest, _ = _read_head(file, size, str(path))
    return start.manifest, start.signature, manifest


def decoded_bytes(manifest: Manifest) -> int:
    """The memory that a parcel takes when it is read: its weights, as a codec gives them back, and its extras."""
    extras = [info for name, info in manifest.tensors.items() if name.startswith(EXTRA)]
    weights = _weight_bytes(_shapes(f"parcel of {manifest.sender!r}", manifest.spec))
    return weights + sum(math.prod(info.shape) * DTYPES[info.dtype].itemsize for info in extras)


# Writing


def _own(tensor: Tensor, as_weight: bool = False) -> Tensor:
    """A contiguous copy on the CPU, which later training cannot change; weights that are floats become float32."""
    dtype = torch.float32 if as_weight and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype).clone(memory_format=torch.contiguous_format)


def _describe(label: str, name: str, tensor: Tensor) -> dict[str, Any]:
    if tensor.dtype not in DTYPE_NAMES:
        raise ParcelError(
            f"{label}: {name} is {tensor.dtype}, which cannot be stored; convert it to a plain float or integer type"
        )
    return {
        "dtype": DTYPE_NAMES[tensor.dtype],
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(container.raw(tensor)).hexdigest(),
    }


def _encode(
    label: str, codec_name: str, weights: Mapping[str, Tensor], extras: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    stored = {EXTRA + name: tensor for name, tensor in extras.items()}
    with container.blame(label, ParcelError):
        for name, tensor in weights.items():
            stored |= codec(codec_name).encode(name, tensor)
    return stored


def _head(manifest: Manifest, signature: bytes) -> tuple[bytes, dict[str, Span]]:
    return container.head(
        manifest.to_bytes(), signature, {name: (info.dtype, info.shape) for name, info in manifest.tensors.items()}
    )


def _chunks(parcel: Parcel) -> Iterator[bytes | memoryview]:
    manifest = parcel.manifest
    label = f"parcel of {manifest.sender!r}"
    stored = _encode(label, manifest.codec, parcel.weights, parcel.extras)
    if stored.keys() != manifest.tensors.keys():
        raise Corrupt(
            f"{label}: its tensors are not those of its manifest; use flyby.parcels.parcel.make for a changed model"
        )
    head, entries = _head(manifest, parcel.signature)
    yield head
    for name in entries:
        if _describe(label, name, stored[name])["sha256"] != manifest.tensors[name].sha256:
            raise Corrupt(
                f"{label}: {name} was changed after the parcel was made; use flyby.parcels.parcel.make for a changed"
                " model"
            )
        yield container.raw(stored[name])


# Reading


def _read(file: io.BufferedIOBase, size: int, label: str, max_bytes: int) -> Parcel:
    start, manifest, entries = _read_head(file, size, label, max_bytes)
    shapes = _shapes(label, manifest.spec)
    _check_stored(label, manifest, shapes)
    decoded = _weight_bytes(shapes)
    if decoded > max_bytes:
        raise TooLarge(
            f"{label} decodes to {decoded} bytes, more than the {max_bytes} allowed; raise max_bytes if you trust its"
            " sender"
        )
    stored = {
        name: container.read_tensor(file, label, name, entry, manifest.tensors[name].sha256)
        for name, entry in entries.items()
    }
    extras = {name: stored.pop(EXTRA + name) for name in manifest.extras}
    return Parcel(manifest, _decode(label, manifest.codec, shapes, stored), extras, start.signature)


def _read_head(
    file: io.BufferedIOBase, size: int, label: str, max_bytes: int | None = None
) -> tuple[container.Start, Manifest, dict[str, Span]]:
    """Everything before the first tensor: as it stands there, the manifest, and a table of tensors that agrees with
    it."""
    start = container.read_start(file, size, label, max_bytes)
    manifest = _parse_manifest(label, start.manifest)
    entries = container.read_table(file, start.payload_length, label, hashlib.sha256(start.manifest).hexdigest())
    promised = {name: (info.dtype, info.shape) for name, info in manifest.tensors.items()}
    found = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    if promised != found:
        name = min(name for name in promised.keys() | found.keys() if promised.get(name) != found.get(name))
        raise Corrupt(
            f"{label}: its manifest says {promised.get(name)} of tensor {name!r} and its payload {found.get(name)}"
        )
    return start, manifest, entries


def _parse_manifest(label: str, text: bytes, ours: bool = False) -> Manifest:
    """A gate, an inbox and a rule each read a parcel, so what was parsed once is known for a while."""
    if not ours and text in _PARSED:
        return _PARSED[text]
    with container.blame(f"{label}: its manifest cannot be used", Corrupt):
        if len(text) > container.MAX_JSON:
            raise TooLarge(
                f"{label}: its manifest has {len(text)} bytes, more than the {container.MAX_JSON} allowed; keep large"
                " things in extras"
            )
        tensors = parse_json(text).get("tensors")
        # Pydantic would collect complaints about all of them: 0.6 GB of 3 MB.
        if isinstance(tensors, dict) and len(tensors) > MAX_TENSORS:
            raise BadInput(f"it describes {len(tensors)} tensors, more than the {MAX_TENSORS} that a parcel may have")
        try:
            manifest = Manifest.model_validate_json(text)
            canonical = ours or manifest.to_bytes() == text
        except ValidationError as error:
            raise BadInput(sentence(error)) from None
        except (ValueError, RecursionError) as error:
            raise BadInput(str(error)) from None
        if not canonical:
            raise BadInput("it is not canonical JSON; write parcels with flyby.parcels.parcel.write")
    if len(text) <= SMALL:
        while len(_PARSED) >= PARSED:
            _PARSED.pop(next(iter(_PARSED)), None)
        _PARSED[text] = manifest
    return manifest


# What makers and readers both check


def _shapes(label: str, spec: ModelSpec) -> Shapes:
    try:
        return {name: (tuple(shape), dtype) for name, (shape, dtype) in spec.shapes().items()}
    except Exception as error:  # whatever a hostile spec does to the builder, it is the parcel's fault
        raise WrongShape(f"{label}: no network can be built from its spec ({error})") from None


def _weight_bytes(shapes: Shapes) -> int:
    return sum(
        math.prod(shape) * (4 if dtype.is_floating_point else dtype.itemsize) for shape, dtype in shapes.values()
    )


def _check_stored(label: str, manifest: Manifest, shapes: Shapes) -> None:
    """The stored tensors are exactly those that the codec makes of the spec's network, and the extras."""
    with container.blame(label, ParcelError):
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


def _decode(label: str, codec_name: str, shapes: Shapes, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights; what was stored of each is let go as soon as it is decoded, so that only one is there twice."""
    weights = {}
    for name, (shape, _) in shapes.items():
        with container.blame(label, Corrupt):
            weights[name] = codec(codec_name).decode(name, stored, shape)
        if stored.pop(name) is not weights[name]:
            container.check_finite(label, name, weights[name])  # a byte times a large scale may overflow
    return weights
