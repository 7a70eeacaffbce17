"""The drawings of what a server rule hands to the report."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
import pytest

from flyby.report.sections import pictures


def images(channels: int, count: int = 20) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (count, 5, 7, channels), dtype=np.uint8)


def as_section(found: np.ndarray[Any, np.dtype[np.uint8]], columns: int = 16) -> dict[str, Any]:
    return {
        "shape": list(found.shape),
        "columns": columns,
        "pixels": base64.b64encode(found.tobytes()).decode(),
    }


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_the_grid_shows_the_images(channels: int) -> None:
    from PIL import Image

    svg = pictures(as_section(images(channels)))
    assert 'aria-label="20 synthetic images"' in svg
    found = re.search(r'href="data:image/png;base64,([^"]+)"', svg)
    assert found
    sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode(found[1]))))
    assert sheet.shape == (2 * 6 + 1, 16 * 8 + 1, 3)
    seen = 3 if channels >= 3 else 1
    assert np.array_equal(sheet[7:12, 1:8], np.broadcast_to(images(channels)[16][..., :seen], (5, 7, 3)))


def test_a_row_is_no_longer_than_the_images() -> None:
    assert 'viewBox="0 0 700 196"' in pictures(as_section(images(1, 3)))  # 25 x 7 pixels, 28 times as large


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [20, 5, 7]},
        {"shape": [21, 5, 7, 1]},
        {"shape": [0, 5, 7, 1], "pixels": ""},
        {"shape": [20.0, 5, 7, 1]},
        {"shape": "20571"},
        {"columns": 0},
        {"columns": None},
        {"pixels": "<svg>"},
        {"pixels": 3},
    ],
)
def test_what_is_not_such_a_value_is_not_drawn(change: dict[str, Any]) -> None:
    assert pictures(as_section(images(1)) | change) == ""
    assert pictures(None) == pictures([]) == ""
