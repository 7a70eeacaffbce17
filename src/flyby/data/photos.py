"""One image: opened, turned upright, made grey or RGB, and given its size while it is decoded, so that no photograph
is ever held at full resolution for longer than its own decoding."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flyby.data.tiles import is_tile, middle, read_tile, resized
from flyby.errors import BadInput

if TYPE_CHECKING:
    from PIL import Image

Pixels = npt.NDArray[Any]  # uint8, uint16 or float32
Extent = tuple[int, int]  # height and width
FIT = 64  # pixels a side of images that are mixed or large, where nobody names a size
SMALL = 128  # pixels that the longer side of an image may have to be taken as it is
DRAFT = 256  # a JPEG is read at a half, a quarter or an eighth where that leaves so many pixels, and twice the wanted
ORIENTATION = 0x0112


class Uneven(Exception):
    """Images that were to be taken as they are differ in size, or are large."""


@dataclass
class Frame:
    """The size that images get: ``size``, or their own (None). With ``even`` their own must be one and small."""

    size: Extent | None = None
    even: bool = False
    first: Extent | None = None

    def target(self, extent: Extent) -> Extent | None:
        """What an image of this size becomes; None: it stays as it is."""
        if self.size is None and self.even:
            self.first = self.first or extent
            if extent != self.first or max(extent) > SMALL:
                raise Uneven
        return self.size


def decode(item: bytes | Path | Pixels, size: Extent | None = None) -> Pixels:
    """One image [H, W, C]: a photograph as uint8, C = 1 for grey and 3 for colour, upright, transparency on black; a
    tile in the numbers it came in. With a ``size`` (H, W) as much of its middle as has that shape is kept."""
    return seen(item, Frame(size))[0]


def seen(item: bytes | Path | Pixels, frame: Frame) -> tuple[Pixels, Extent]:
    """One image as the frame wants it, and the size it had."""
    from PIL import Image

    if isinstance(item, np.ndarray) or is_tile(item):
        tile = item if isinstance(item, np.ndarray) else read_tile(item)
        extent = (int(tile.shape[0]), int(tile.shape[1]))
        size = frame.target(extent)
        return (tile if size is None else resized(tile, size)), extent
    with Image.open(io.BytesIO(item) if isinstance(item, bytes) else item) as opened:
        turn = orientation(opened)
        extent = opened.size if turn > 4 else (opened.height, opened.width)
        size = frame.target(extent)
        if size is not None:
            _shrink_early(opened, size if turn <= 4 else size[::-1])
        flat = flattened(upright(opened, turn))
        if size is not None:
            flat = flat.resize(size[::-1], Image.Resampling.BILINEAR, box=middle((flat.height, flat.width), size))
        pixels: Pixels = np.asarray(flat)
        return (pixels if pixels.ndim == 3 else pixels[:, :, None]), extent


def _shrink_early(opened: Image.Image, size: Extent) -> None:
    """Have a JPEG of a large photograph decoded at a fraction of its size; other kinds cannot."""
    opened.draft(None, (max(2 * size[1], DRAFT), max(2 * size[0], DRAFT)))


def orientation(image: Image.Image) -> int:
    """How a camera was held, 1 to 8 as EXIF numbers it; 1, upright, where nothing readable says so."""
    if image.format == "TIFF":
        return 1  # Pillow turns those itself
    try:
        found = int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # metadata may be damaged in any way where the picture is whole
        return 1
    return found if 1 <= found <= 8 else 1


def upright(image: Image.Image, turn: int) -> Image.Image:
    from PIL.Image import Transpose

    ways = (
        *(Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM, Transpose.TRANSPOSE),
        *(Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90),
    )
    return image if turn == 1 else image.transpose(ways[turn - 2])


def flattened(image: Image.Image) -> Image.Image:
    """The image in mode L or RGB: palettes looked up, 16-bit grey scaled to 8, transparency laid on black."""
    from PIL import Image

    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    grey = image.mode in ("1", "L", "LA", "La")
    plain, alpha = ("L", "LA") if grey else ("RGB", "RGBA")
    if "transparency" in image.info or image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        image = image.convert(alpha)
        black = Image.new(plain, image.size)
        black.paste(image.convert(plain), mask=image.getchannel("A"))
        return black
    return image if image.mode == plain else image.convert(plain)


def coloured(pixels: Pixels, channels: int, where: str) -> Pixels:
    """A photograph in so many channels, 1 or 3; what is no photograph must have them already."""
    from PIL import Image

    if pixels.shape[2] == channels:
        return pixels
    if {pixels.shape[2], channels} != {1, 3} or pixels.dtype != np.uint8:
        raise BadInput(
            f"{where} holds {pixels.dtype} in {pixels.shape[2]} channels where {channels} are wanted; give images of"
            " that kind"
        )
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    return np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]
