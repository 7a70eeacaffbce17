"""Drawings of the sections that a server rule adds to a report: it hands over data, and they are drawn here."""

from __future__ import annotations

import base64
import binascii
import io
import math

import numpy as np
from numpy.typing import NDArray

WIDE = 720  # pixels that a sheet of small images is magnified to, in whole steps


def pictures(value: object) -> str:
    """Small images side by side, as an SVG around one PNG. ``value`` is a section's ``images``: ``shape`` [n, height,
    width, channels], ``columns`` and ``pixels``, the base64 of uint8 numbers; anything else is not drawn."""
    from PIL import Image

    found = _images(value)
    if found is None:
        return ""
    images, columns = found
    count, height, width, _ = images.shape
    rows, columns = -(-count // columns), min(columns, count)
    sheet = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, 3), 255, dtype=np.uint8)
    for i, picture in enumerate(images):
        top, left = i // columns * (height + 1) + 1, i % columns * (width + 1) + 1
        sheet[top : top + height, left : left + width] = picture
    file = io.BytesIO()
    Image.fromarray(sheet).save(file, "PNG")
    scale = max(1, WIDE // sheet.shape[1])
    across, down = sheet.shape[1] * scale, sheet.shape[0] * scale
    data = base64.b64encode(file.getvalue()).decode()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" width="{across}" height="{down}"'
        f' role="img" aria-label="{count} synthetic images"><image width="{across}" height="{down}"'
        f' style="image-rendering:pixelated" href="data:image/png;base64,{data}"/></svg>'
    )


def _images(value: object) -> tuple[NDArray[np.uint8], int] | None:
    """The images [n, height, width, 3] and how many stand in a row, where a file says that in the form above."""
    if not isinstance(value, dict):
        return None
    shape, columns, pixels = value.get("shape"), value.get("columns"), value.get("pixels")
    numbers = [*shape, columns] if isinstance(shape, list) else []
    if len(numbers) != 5 or not all(isinstance(n, int) and n > 0 for n in numbers) or not isinstance(pixels, str):
        return None
    try:
        raw = base64.b64decode(pixels, validate=True)
    except (binascii.Error, ValueError):
        return None
    if len(raw) != math.prod(numbers[:4]):
        return None
    images = np.frombuffer(raw, dtype=np.uint8).reshape(numbers[:4])
    channels = 3 if images.shape[3] >= 3 else 1
    return np.broadcast_to(images[..., :channels], (*images.shape[:3], 3)), numbers[4]
