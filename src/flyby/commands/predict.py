"""``flyby predict``: what a model sees in image files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyby.commands.common import Device, Json, LimitOptions, ModelFolder, RequireSigned, TrustFile, grouped, say


@grouped
def predict(
    *,
    model: ModelFolder,
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    trust: TrustFile = None,
    require_signed: RequireSigned = False,
    allowed: LimitOptions,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Say what is in some images."""
    import torch

    from flyby.data.sources import read_images
    from flyby.fusion import load_predictor
    from flyby.fusion.evaluation import scores_of
    from flyby.machine import pick_device
    from flyby.parcels.signing import Trust

    predictor = load_predictor(model, Trust.load(trust) if trust else None, require_signed, allowed.limits)
    pixels = torch.from_numpy(read_images(images, predictor.channels, predictor.size, predictor.pixels))
    chances = predictor.chances(scores_of(predictor, pixels, pick_device(device)))
    rows = [
        {"image": str(path), "class": predictor.class_names[int(p.argmax())], "probability": float(p.max())}
        for path, p in zip(images, chances, strict=True)
    ]
    say(rows, as_json, "\n".join(f"{r['image']}: {r['class']} ({r['probability']:.2f})" for r in rows))
