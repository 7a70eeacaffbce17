"""How tensors are stored in a parcel: the codecs, with the most that each may change a weight, and the safetensors
header.

======  =======================================================  ==========================================
name    a float tensor is stored as                              worst error of one value ``x``
======  =======================================================  ==========================================
fp32    ``name`` float32                                         none
fp16    ``name`` float16                                         ``2^-11 |x|`` (``2^-25`` below ``2^-14``)
bf16    ``name`` bfloat16                                        ``2^-8 |x|`` (``2^-134`` below ``2^-126``)
int8    ``name`` int8 ``[out, ...]``                             ``scale / 2``, ``scale = max|row| / 127``
        and ``name::scale`` float32 ``[out]``
int4    ``name`` uint8 ``[out, ceil(row / 2)]``, two to a byte,  ``scale / 2``, ``scale = max|group| / 7``
        and ``name::scale`` float32 ``[out, ceil(row / 32)]``
======  =======================================================  ==========================================

A *row* is what belongs to one output channel (dim 0), flattened; a *group* is 32 neighbours in a row (the last may be
shorter). The integer codecs are symmetric and leave floats with fewer than two dimensions (biases, batch-norm
statistics) in float32; integer and boolean tensors are stored unchanged by every codec. A row whose scale would fall
below float32's normal range (``max|row| < 1.5e-36``) is stored as zeros.

Scales keep 17 of float32's 24 significant bits, which moves the bounds above by less than one part in 2^15 and makes
every product ``q * scale`` exact. Encoding a decoded tensor therefore gives the same bytes again: a parcel read and
written back is the same file.

The header of a safetensors file comes from a stranger, so it is parsed here, under limits, before any tensor is
touched.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flyby.errors import BadInput, unknown

Shape = tuple[int, ...]
Layout = dict[str, tuple[torch.dtype, Shape]]

GROUP = 32
TILE = 1 << 15  # groups that are decoded at a time
SCALE = "::scale"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_DIMENSIONS = 16
MAX_EXTENT = 1 << 48
# Commas bound the number of values in a JSON text; a few megabytes of them would become gigabytes of Python objects.
MAX_VALUES = 1 << 18


def finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor infinity: its least and its largest number tell, a tenth of isfinite's time."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    least, largest = tensor.aminmax()
    return bool(least.isfinite() & largest.isfinite())


class Codec(Protocol):
    """Turns one tensor into stored tensors and back. ``layout`` says what is stored for a tensor, from its shape and
    dtype alone, so that a reader can check a file's sizes before it reads a single value. ``encode`` takes a contiguous
    tensor: finite float32 values, or integers."""

    def layout(self, name: str, dtype: torch.dtype, shape: Shape) -> Layout: ...

    def encode(self, name: str, tensor: Tensor) -> dict[str, Tensor]: ...

    def decode(self, name: str, stored: Mapping[str, Tensor], shape: Shape) -> Tensor: ...


class Cast:
    """Stores floats in another float type: exact for float32, rounded to nearest for the shorter ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def layout(self, name: str, dtype: torch.dtype, shape: Shape) -> Layout:
        return {name: (self.dtype if dtype.is_floating_point else dtype, shape)}

    def encode(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not tensor.is_floating_point():
            return {name: tensor}
        stored = tensor.to(self.dtype)
        if not finite(stored):
            kind = str(self.dtype).removeprefix("torch.")
            largest, limit = float(tensor.abs().max()), torch.finfo(self.dtype).max
            raise BadInput(
                f"tensor {name!r} holds {largest:.4g}, beyond {kind}'s largest value {limit:.4g}; use codec fp32"
            )
        return {name: stored}

    def decode(self, name: str, stored: Mapping[str, Tensor], shape: Shape) -> Tensor:
        tensor = stored[name]
        return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


class Int8:
    """One signed byte per value and one scale per output channel: ``x ~ q * scale`` with ``q`` in -127..127."""

    def layout(self, name: str, dtype: torch.dtype, shape: Shape) -> Layout:
        if not _quantised(dtype, shape):
            return _exact(name, dtype, shape)
        return {name: (torch.int8, shape), name + SCALE: (torch.float32, shape[:1])}

    def encode(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not _quantised(tensor.dtype, tuple(tensor.shape)):
            return {name: tensor}
        quantised, scale = _quantise(tensor.reshape(tensor.shape[0], -1), 127)
        return {name: quantised.reshape(tensor.shape), name + SCALE: scale}

    def decode(self, name: str, stored: Mapping[str, Tensor], shape: Shape) -> Tensor:
        if name + SCALE not in stored:
            return stored[name]
        quantised, scale = stored[name], _checked_scale(name, stored)
        if int(quantised.min()) < -127:
            raise BadInput(f"tensor {name!r} holds -128, outside int8's range of -127..127")
        return quantised.to(torch.float32).mul_(scale.reshape(-1, *[1] * (len(shape) - 1)))


class Int4:
    """Half a byte per value and one scale for every 32: ``x ~ q * scale`` with ``q`` in -7..7, stored as ``q + 8``, the
    earlier value in the low half of the byte; a row of odd length ends with a half that means zero."""

    def layout(self, name: str, dtype: torch.dtype, shape: Shape) -> Layout:
        if not _quantised(dtype, shape):
            return _exact(name, dtype, shape)
        out, row = shape[0], math.prod(shape[1:])
        return {name: (torch.uint8, (out, -(-row // 2))), name + SCALE: (torch.float32, (out, -(-row // GROUP)))}

    def encode(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not _quantised(tensor.dtype, tuple(tensor.shape)):
            return {name: tensor}
        out = tensor.shape[0]
        rows = tensor.reshape(out, -1)
        width = rows.shape[1]
        groups = torch.nn.functional.pad(rows, (0, -width % GROUP)).reshape(out, -1, GROUP)
        quantised, scale = _quantise(groups, 7)
        halves = (quantised + 8).to(torch.uint8).reshape(out, -1)[:, : width + width % 2]
        return {name: halves[:, 0::2] | (halves[:, 1::2] << 4), name + SCALE: scale}

    def decode(self, name: str, stored: Mapping[str, Tensor], shape: Shape) -> Tensor:
        if name + SCALE not in stored:
            return stored[name]
        packed, scale = stored[name], _checked_scale(name, stored)
        width = math.prod(shape[1:])
        values = torch.empty(shape[0], width)
        # In tiles of whole groups: the memory of a reader is bounded by what it decodes.
        tall, wide = min(shape[0], TILE), GROUP * max(1, TILE // min(shape[0], TILE))
        for row, column in itertools.product(range(0, shape[0], tall), range(0, width, wide)):
            bytes_of = packed[row : row + tall, column // 2 : (column + wide) // 2]
            halves = torch.stack((bytes_of & 15, bytes_of >> 4), dim=-1).flatten(1)
            place = values[row : row + tall, column : column + wide]
            used = place.shape[1]
            if int(halves.min()) == 0 or bool((halves[:, used:] != 8).any()):
                raise BadInput(f"tensor {name!r} holds a value outside int4's range of -7..7 or a used padding half")
            scales = scale[row : row + tall, column // GROUP : (column + wide) // GROUP]
            place.copy_(halves[:, :used]).sub_(8).mul_(scales.repeat_interleave(GROUP, dim=1)[:, :used])
        return values.reshape(shape)


CODECS: dict[str, Codec] = {
    "fp32": Cast(torch.float32),
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
    "int8": Int8(),
    "int4": Int4(),
}


def codec(name: str) -> Codec:
    """The codec of that name; an unknown name is an error that lists the known ones."""
    if name not in CODECS:
        raise unknown("codec", name, CODECS)
    return CODECS[name]


def _quantised(dtype: torch.dtype, shape: Shape) -> bool:
    return dtype.is_floating_point and len(shape) >= 2 and math.prod(shape) > 0


def _exact(name: str, dtype: torch.dtype, shape: Shape) -> Layout:
    return {name: (torch.float32 if dtype.is_floating_point else dtype, shape)}


def _quantise(values: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """(int8 values in -levels..levels, float32 scales): one scale for all of the last dimension."""
    wide = values.to(torch.float64)
    scale = (wide.abs().amax(dim=-1) / levels).to(torch.float32)
    # Seven low bits cleared: q * scale then fits float32's 24 bits exactly, and encoding a decoded tensor finds the
    # same scale.
    scale = (scale.view(torch.int32) & ~0x7F).view(torch.float32)
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    step = torch.where(scale > 0, scale, 1.0).to(torch.float64).unsqueeze(-1)
    return (wide / step).round().clamp(-levels, levels).to(torch.int8), scale


def _checked_scale(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    scale = stored[name + SCALE]
    if not bool((scale >= 0).all()):
        raise BadInput(f"tensor {name + SCALE!r} holds a negative or undefined scale")
    return scale


# The safetensors header


class Span(NamedTuple):
    """Where a stored tensor lies: ``start`` and ``end`` count from the first byte after the header."""

    dtype: str
    shape: Shape
    start: int
    end: int


def header(tensors: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Span]]:
    """A safetensors header for tensors of these dtypes and shapes, and where each goes: by falling item size, which
    keeps all of them aligned, then by name."""
    entries: dict[str, Span] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0]].itemsize, name)):
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = Span(dtype, shape, start, end)
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    table |= {
        name: {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.end]}
        for name, e in entries.items()
    }
    text = json.dumps(table, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), entries


def parse_header(text: bytes, length: int) -> tuple[Any, dict[str, Span]]:
    """(metadata, tensors in the order of the file), if the tensors fill the ``length`` bytes after the header without
    gap or overlap."""
    table = parse_json(text)
    metadata = table.pop("__metadata__", None)
    entries = sorted(((name, _entry(name, value)) for name, value in table.items()), key=lambda item: item[1][2:])
    end = 0
    for name, entry in entries:
        if entry.start != end:
            raise BadInput(f"tensor {name!r} starts at byte {entry.start}, not at {end}, where the one before it ends")
        end = entry.end
    if end != length:
        raise BadInput(f"the tensors take {end} bytes of {length}")
    return metadata, dict(entries)


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object from a stranger: no key stands twice, every number is finite, and there are not too many values."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    if text.count(b",") > MAX_VALUES:
        raise BadInput(f"it holds more than {MAX_VALUES} values")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"it is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadInput("it is not a JSON object")
    return value


def _entry(name: str, value: Any) -> Span:
    def sizes(numbers: Any) -> bool:
        return (
            isinstance(numbers, list)
            and len(numbers) <= MAX_DIMENSIONS
            and all(type(n) is int and 0 <= n < MAX_EXTENT for n in numbers)
        )

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadInput(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadInput(f"tensor {name!r} has an unknown dtype")
    # A zero among huge extents would hide an overflow of torch's strides.
    if not sizes(shape) or math.prod(max(n, 1) for n in shape) >= 1 << 56:
        raise BadInput(f"tensor {name!r} has an impossible shape")
    if not sizes(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype].itemsize:
        raise BadInput(f"tensor {name!r} of {dtype} {shape} does not fit its offsets")
    return Span(dtype, tuple(shape), offsets[0], offsets[1])
