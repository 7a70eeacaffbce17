"""README's first page, word for word, with three sites of photographs as they are out there: other sizes, grey, with an
alpha channel, turned by EXIF, broken files, other classes at each site and one class at the last."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from factories import WAIT, done
from flyby.models.lite import lite_file

ROOT = Path(__file__).parents[2]
# Parts of two photographs that come with scikit-learn: which one, left, top, right, bottom.
SCENES = {
    "flower": (1, 170, 85, 445, 360),
    "leaves": (1, 0, 60, 165, 360),
    "pagoda": (0, 60, 60, 350, 390),
    "sky": (0, 345, 0, 600, 180),
    "trees": (0, 330, 270, 640, 427),
}
SITES = {
    "hospital-a": {"flower": 24, "pagoda": 24, "trees": 20},
    "hospital-b": {"leaves": 20, "pagoda": 16, "sky": 4},
    "hospital-c": {"sky": 24},
    "test-images": {"flower": 12, "leaves": 12, "pagoda": 12, "sky": 12},
}
TURNED = 6  # EXIF: a viewer turns it a quarter clockwise

pytestmark = pytest.mark.skipif(lite_file("efficientnet-lite0") is None, reason="needs the extra backbones")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three hospitals and test images beside each other."""
    from sklearn.datasets import load_sample_images

    root, photos = tmp_path_factory.mktemp("hospitals"), load_sample_images().images
    draw = np.random.default_rng(0)
    for site, classes in SITES.items():
        for name, count in classes.items():
            folder = root / site / name
            folder.mkdir(parents=True)
            for number in range(count):
                _photograph(photos, name, draw, number).save(*_way(folder, number), **_exif(number))
    (root / "hospital-a" / "flower" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not an image")
    (root / "hospital-b" / "sky" / "empty.png").touch()
    (root / "hospital-c" / "notes.txt").write_text("taken in May")
    cut = BytesIO()
    Image.fromarray(photos[0][:200, :200]).save(cut, "JPEG")
    (root / "hospital-c" / "sky" / "cut.jpg").write_bytes(cut.getvalue()[:900])
    return root


def _photograph(photos: list[np.ndarray], name: str, draw: np.random.Generator, number: int) -> Image.Image:
    which, left, top, right, bottom = SCENES[name]
    side = int(draw.integers(80, min(140, right - left, bottom - top)))
    x, y = int(draw.integers(left, right - side + 1)), int(draw.integers(top, bottom - side + 1))
    image = Image.fromarray(photos[which][y : y + side, x : x + side])
    image = image.resize((int(draw.integers(96, 400)), int(draw.integers(96, 400))))
    if number % 8 == 3:
        image = image.convert("L")
    elif number % 8 == 5:
        image.putalpha(200)
    elif number % 8 == 7:
        image = image.transpose(Image.Transpose.ROTATE_90)  # as the sensor lay; EXIF says how to hold it
    return image


def _way(folder: Path, number: int) -> tuple[Path, str]:
    kind = "PNG" if number % 8 == 5 else "JPEG"
    return folder / f"{number:03d}.{'png' if kind == 'PNG' else 'JPG'}", kind


def _exif(number: int) -> dict[str, Image.Exif]:
    if number % 8 != 7:
        return {}
    exif = Image.Exif()
    exif[0x0112] = TURNED
    return {"exif": exif}


def commands() -> list[list[str]]:
    """The words of the first block of commands with own images in the README."""
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^## Your own images.*?^```\n(.*?)^```$", text, flags=re.S | re.M)
    lines = [line.partition("#")[0].split() for line in block.splitlines()]
    return [words[1:] for words in lines if words[:1] == ["flyby"]]


def test_own_photographs_at_three_sites_to_a_served_model(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    began, told = time.monotonic(), {}
    *steps, serving = commands()
    assert [words[0] for words in steps] == ["train", "train", "train", "fuse", "evaluate", "predict"]
    for number, words in enumerate(steps):
        answer = done(*words)
        told[words[0] + str(number)] = answer.out + answer.err
    assert "flower 24" in told["train0"], "classes and counts are always shown"
    assert "broken.jpg" in told["train0"]
    assert "empty.png" in told["train1"]
    assert "cut.jpg" in told["train2"]
    judged = done("evaluate", "global/", "--data", "test-images/", "--json").out
    facts = json.loads(judged)
    assert facts["accuracy"] > 0.85, facts
    assert serving == ["serve", "global/"]
    assert served(place) == "flower"
    assert time.monotonic() - began < 300


def served(place: Path) -> str:
    """What the page's own interface says of a photograph."""
    server = subprocess.Popen(
        [sys.executable, "-m", "flyby", "serve", "global/", "--port", "0"],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert server.stdout is not None
        address = next(found[0] for line in server.stdout if (found := re.findall(r"http://[0-9.:]+", line)))
        image = (place / "test-images" / "flower" / "000.JPG").read_bytes()
        with urllib.request.urlopen(f"{address}/predict", data=image, timeout=WAIT) as answer:
            return str(json.loads(answer.read())["class"])
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(WAIT) in (0, 130)
