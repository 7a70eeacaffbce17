"""Numbers from files that are not photographs: ``.npy`` and ``.npz`` arrays and TIFF tiles, of more than 8 bits and of
any number of channels. A header is believed only where the file is as long as it says."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from flyby.errors import BadInput
from flyby.names import printable

Array = npt.NDArray[Any]
MOST_CHANNELS = 64  # what a network's spec can have
LARGEST = 1e9  # numbers beyond it are no measurement, and their squares would leave the finite numbers
UNPACKED = 256 << 20  # bytes that any file may unpack to,
RATIO = 200  # and more only within so many times its own size
ALPHA = (1, 2)  # kinds of an extra sample of a TIFF that are transparency, and no channel
BITS, SAMPLES, EXTRA = 258, 277, 338  # TIFF tags
LITTLE, BIG, NUMPY = b"II", b"MM", b"\x93NUMPY"


def held(array: Array, what: str) -> Array:
    """Numbers as flyby holds them: uint8, uint16 or float32, in the machine's own order of bytes."""
    kind, width = array.dtype.kind, array.dtype.itemsize
    if array.dtype == np.uint8:
        return array
    if (kind, width) == ("u", 2):
        return array.astype(np.dtype("<u2"), copy=False)
    if kind == "f" or (kind, width) == ("i", 2):
        with np.errstate(over="ignore"):  # what no float32 can hold becomes infinite, and is refused as such
            return array.astype(np.dtype("<f4"), copy=False)
    raise BadInput(
        f"{what} is {array.dtype}; give uint8 pixels from 0 to 255, or uint16, int16 or float32 numbers in units of"
        " their own"
    )


def unusable(array: Array) -> int:
    """How many numbers are none: NaN (no data), infinite, or out of all proportion."""
    return 0 if array.dtype.kind != "f" else int((~(np.abs(array) <= LARGEST)).sum())


def check_channels(shape: tuple[int, ...], what: str) -> None:
    """Refuses a shape ``[..., H, W, C]`` whose channels stand first, or are too many."""
    height, width, channels = shape[-3:]
    if channels > MOST_CHANNELS or (channels > 4 and channels >= width > height):
        first = height < min(width, channels)
        turn = (0, 2, 3, 1) if len(shape) == 4 else (1, 2, 0)
        raise BadInput(
            f"{what} has its channels first ({list(shape)}); move them last with array.transpose{turn}"
            if first
            else f"{what} has {channels} channels ({list(shape)}); {MOST_CHANNELS} are the most, and they stand last"
        )


# -- arrays


def read_npz(path: Path, wanted: Iterable[str]) -> tuple[dict[str, Array], list[str]]:
    """Those of the ``wanted`` arrays that an ``.npz`` has, and the names of all. No more is read than is there, and
    nothing is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            found = [name for name in wanted if name in inside]
            _check_unpacked(path, sum(inside[name].file_size for name in found), path.stat().st_size)
            arrays = {}
            for name in found:
                with archive.open(inside[name]) as file:
                    arrays[name] = _read_array(file, inside[name].file_size)
            return arrays, list(inside)
    except BadInput:
        raise
    except Exception as error:  # a damaged archive fails in any way at all (zlib.error, RuntimeError, EOFError ...)
        reason = printable(f"{error or type(error).__name__}"[:200])
        raise BadInput(f"{printable(str(path))} is not a readable .npz of plain arrays ({reason})") from error


def _read_array(file: IO[bytes], size: int) -> Array:
    """The array in an open ``.npy`` of ``size`` bytes."""
    version = np.lib.format.read_magic(file)
    head = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if head is None:
        raise ValueError(f"its arrays have the format {version}")
    shape, fortran, dtype = head(file)
    if dtype.hasobject or dtype.kind not in "biufUS":
        raise ValueError(f"it holds {dtype}, where numbers or text are wanted")
    length, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or length != there:
        raise ValueError(f"its header says {list(shape)} of {dtype}, {length} bytes, and {there} are there")
    array = np.frombuffer(file.read(length), dtype=dtype)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def _check_unpacked(path: Path | str, unpacked: int, size: int) -> None:
    if unpacked > max(UNPACKED, RATIO * size):
        raise BadInput(
            f"{printable(str(path))} has {size} bytes and claims to unpack to {unpacked}; write it again with less"
            " compression if you trust it"
        )


# -- tiles


def is_tile(item: bytes | Path) -> bool:
    """Whether this encoded image holds more than 8 bits, or channels that are no colours: only TIFF and ``.npy`` do."""
    if isinstance(item, Path):
        if item.suffix.lower() not in (".tif", ".tiff"):  # photographs are not opened twice
            return item.suffix.lower() == ".npy"
        with item.open("rb") as file:
            start = file.read(4)
    else:
        if item.startswith(NUMPY):
            return True
        start = item[:4]
    if start not in (LITTLE + b"*\0", BIG + b"\0*", LITTLE + b"+\0", BIG + b"\0+"):
        return False
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(item if isinstance(item, Path) else io.BytesIO(item)) as image:
            tags: Any = getattr(image, "tag_v2", {})
            bits, extra = tags.get(BITS, (1,)), tags.get(EXTRA, ())
            return max(bits) > 8 or any(kind not in ALPHA for kind in extra) or tags.get(SAMPLES, 1) > 4
    except UnidentifiedImageError:
        return True  # whole perhaps, but of a kind that Pillow does not know


def read_tile(item: bytes | Path, what: str = "") -> Array:
    """A tile ``[H, W, C]`` of uint8, uint16 or float32 numbers, from a ``.npy`` or a TIFF."""
    what = what or (printable(str(item)) if isinstance(item, Path) else "a tile")
    if isinstance(item, Path) and item.suffix.lower() == ".npy":
        with item.open("rb") as file:
            array = _read_array(file, item.stat().st_size)
    elif isinstance(item, bytes) and item.startswith(NUMPY):
        array = _read_array(io.BytesIO(item), len(item))
    else:
        array = _read_tiff(item, what)
    array = array[:, :, None] if array.ndim == 2 else array
    if array.ndim != 3 or 0 in array.shape:
        raise BadInput(f"{what} has the shape {list(array.shape)}; a tile is [H, W] or [H, W, C]")
    check_channels(array.shape, what)
    return held(array, what)


def tile_numbers(item: bytes) -> int:
    """How many numbers a TIFF says that it unpacks to; none of them is. 0 where it cannot be read here anyway."""
    try:
        import tifffile
    except ImportError:
        return 0
    with tifffile.TiffFile(io.BytesIO(item)) as file:
        return int(file.series[0].size)


def _read_tiff(item: bytes | Path, what: str) -> Array:
    try:
        import tifffile
    except ImportError:
        raise BadInput(
            f"{what} is a TIFF of more than 8 bits or of other channels than RGB; to read it install: pip install"
            " 'flyby[tiff]'"
        ) from None
    with tifffile.TiffFile(item if isinstance(item, Path) else io.BytesIO(item)) as file:
        series = file.series[0]
        size = item.stat().st_size if isinstance(item, Path) else len(item)
        _check_unpacked(what, series.nbytes, size)
        try:
            array: Array = series.asarray()
        except ValueError as error:
            if "imagecodecs" not in str(error):
                raise
            raise BadInput(
                f"{what} is compressed in a way that needs one more package; install it with: pip install imagecodecs"
            ) from None
        if array.ndim != 3:
            return array
        # Where a file does not say which axis is which, bands are fewer than rows and columns.
        known = [place for place, axis in enumerate(series.axes) if axis in "SC"]
        return np.moveaxis(array, known[0] if len(known) == 1 else int(np.argmin(array.shape)), -1)


def middle(extent: tuple[int, int], size: tuple[int, int]) -> tuple[float, float, float, float] | None:
    """The largest part in the middle of an image of (H, W) that has the shape of ``size``, as Pillow's box (left, top,
    right, bottom); None where that is the whole."""
    (height, width), (h, w) = extent, size
    if height * w == width * h:
        return None
    scale = min(height / h, width / w)
    top, left = max(0.0, height - scale * h) / 2, max(0.0, width - scale * w) / 2
    return (left, top, width - left, height - top)


def resized(tile: Array, size: tuple[int, int]) -> Array:
    """The middle of a tile at another (H, W), bilinear, each channel alone, in the numbers it came in."""
    from PIL import Image

    if tile.shape[:2] == size:
        return tile
    deep, box = tile.dtype != np.uint8, middle((tile.shape[0], tile.shape[1]), size)
    bands = [
        np.asarray(
            Image.fromarray(tile[:, :, band].astype(np.float32) if deep else tile[:, :, band]).resize(
                size[::-1], Image.Resampling.BILINEAR, box=box
            )
        )
        for band in range(tile.shape[2])
    ]
    stacked = np.stack(bands, axis=2)
    return np.rint(stacked).astype(tile.dtype) if tile.dtype == np.uint16 else stacked
