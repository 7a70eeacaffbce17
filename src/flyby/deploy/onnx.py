"""A model as a folder that needs no flyby: ``model.onnx`` (images in, probabilities out), ``classes.json``, a short
``run.py`` that reads images as flyby does, and a card."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flyby.errors import BadInput
from flyby.files import atomic_folder, strangers, write_json, write_text
from flyby.fusion.card import card_of
from flyby.fusion.predictor import Predictor, temperature_said
from flyby.machine import versions

FILES = ("README.md", "classes.json", "model.onnx", "model.onnx.data", "run.py")
OPSET = 18  # the first whose Resize may smooth as it shrinks, which backbones need

PHOTOGRAPH = """\
def pixels(path):  # upright, transparency on black, the middle in the shape of the model's images
    image = Image.open(path)
    image.draft(None, (max(2 * model["width"], 256), max(2 * model["height"], 256)))  # a large JPEG is read smaller
    image = ImageOps.exif_transpose(image).convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image).convert(model["mode"])
    image = ImageOps.fit(image, (model["width"], model["height"]), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(model["height"], model["width"], -1)
"""
TILE = """\
def pixels(path):  # a tile in the numbers that the model was trained on, height x width x channels
    return np.load(path, allow_pickle=False).astype(model["pixels"])
"""
RUN = """\
# python run.py IMAGE...   needs numpy, pillow and onnxruntime: pip install numpy pillow onnxruntime
import json, os, pathlib, sys
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reports to its maker otherwise
import numpy as np, onnxruntime{imports}

here = pathlib.Path(__file__).parent
model = json.loads((here / "classes.json").read_text(encoding="utf-8"))
session = onnxruntime.InferenceSession(here / "model.onnx")

{pixels}
images = {{}}
for path in sys.argv[1:]:
    try:
        images[path] = pixels(path)
    except Exception as error:
        print(f"{{path}} cannot be read: {{error}}", file=sys.stderr)
if not images:
    sys.exit("name images that can be read: python run.py IMAGE...")
shares = session.run(None, {{"images": np.stack(list(images.values()))}})[0]
for path, share in zip(images, shares):
    print(f"{{path}}: {{model['classes'][share.argmax()]}} ({{share.max():.2f}})")
"""
USE = """## How to use it

This folder needs neither flyby nor PyTorch:

```
pip install numpy pillow onnxruntime
python run.py IMAGE...
```

`model.onnx` takes `images`, {pixels} N x {height} x {width} x {channels} (any N{least}), and gives `probabilities`,
float32 N x {classes}; the names of the classes stand in `classes.json`, in that order. `run.py` shows how images are
read: turned upright as their camera says, the middle cut to shape, resized."""


class Shares(nn.Module):
    """A predictor that answers with probabilities."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.predictor = predictor

    def forward(self, images: Tensor) -> Tensor:
        return self.predictor.chances(self.predictor(images))


def write_onnx(predictor: Predictor, path: Path) -> None:
    """``model.onnx``: ``images`` [N, H, W, C] as they are, any N, to ``probabilities`` [N, classes]."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise BadInput(
            "to write ONNX takes onnx and onnxscript; install them with: pip install 'flyby[onnx]'"
        ) from None
    if predictor.shelf is not None:
        raise BadInput(
            f"this model's {len(predictor.specs)} networks are too many to be held at once, so they cannot be one file;"
            " distil them into one first: flyby fuse --compact"
        )
    for name in ("torch.onnx", "torch.export"):
        logging.getLogger(name).setLevel(logging.ERROR)
    module = Shares(predictor.eval().cpu()).eval()
    example = torch.zeros((2, *predictor.size, predictor.channels), dtype=getattr(torch, predictor.pixels))
    batch = torch.export.Dim("batch", min=predictor.least, max=4096)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module(example)  # a frozen backbone is read now: under the export's eyes no file can be
        try:
            made = torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                input_names=["images"],
                output_names=["probabilities"],
                dynamic_shapes=({0: batch},),
                opset_version=OPSET,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            why = (str(error.__cause__ or error).splitlines() or [""])[0][:200]
            raise BadInput(
                f"the rule {predictor.kind!r} does something that ONNX has no word for ({why}); use model.pt2, or"
                " distil it into one network: flyby fuse --compact"
            ) from error
    assert made is not None
    made.save(path)


def export_folder(predictor: Predictor, folder: Path, card: Mapping[str, Any]) -> list[str]:
    """Write the whole folder; the names of its files."""
    (height, width), channels = predictor.size, predictor.channels
    facts = {"classes": list(predictor.class_names), "height": height, "width": width, "channels": channels}
    photograph = predictor.pixels == "uint8" and channels in (1, 3)
    facts |= {"pixels": predictor.pixels} | ({"mode": "L" if channels == 1 else "RGB"} if photograph else {})
    run = RUN.format(
        imports="\nfrom PIL import Image, ImageOps" if photograph else "", pixels=PHOTOGRAPH if photograph else TILE
    )
    least = f"; at least {predictor.least} at once" if predictor.least > 1 else ""
    how = {"height": height, "width": width, "channels": channels, "pixels": predictor.pixels, "least": least}
    config = {
        "kind": predictor.kind,
        "specs": [spec.model_dump(mode="json") for spec in predictor.specs],
        "class_names": facts["classes"],
        "card": {"versions": versions(), **card},
        **temperature_said(predictor),
    }
    with atomic_folder(folder) as tmp:
        write_onnx(predictor, tmp / "model.onnx")
        write_json(tmp / "classes.json", facts)
        write_text(tmp / "run.py", run)
        write_text(tmp / "README.md", card_of(config, load=USE.format(classes=len(predictor.class_names), **how)))
        return sorted(path.name for path in tmp.iterdir())


def check_free(folder: Path) -> None:
    """An exported folder is written whole, in place of an older one: nothing else may be lost so."""
    if folder.is_dir() and (strange := strangers(folder, FILES)):
        raise BadInput(
            f"{folder} holds something else than an exported model ({strange[0]!r}); name a new folder with --out"
        )
