"""``flyby evaluate``: the accuracy of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from flyby.commands.common import (
    Device,
    Json,
    LimitOptions,
    ModelFolder,
    RequireSigned,
    Size,
    TrustFile,
    grouped,
    say,
)


@grouped
def evaluate(
    *,
    model: ModelFolder,
    data: Annotated[str, typer.Option(help="Labelled images; the test split where there is one.")],
    size: Size = None,
    trust: TrustFile = None,
    require_signed: RequireSigned = False,
    allowed: LimitOptions,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Accuracy of a model on labelled data, overall and per class."""
    from flyby.data.sources import load
    from flyby.fusion import load_predictor
    from flyby.fusion.evaluation import accuracy, evaluate_dataset, per_class
    from flyby.machine import pick_device
    from flyby.parcels.signing import Trust

    predictor = load_predictor(model, Trust.load(trust) if trust else None, require_signed, allowed.limits)
    bundle = load(data, size=size, holdout=None)
    judged = bundle.test or bundle.train
    scores, part = evaluate_dataset(predictor, judged, pick_device(device))
    by_class = dict(zip(judged.class_names, per_class(scores, part.labels, judged.classes), strict=True))
    facts = {
        "model": str(model),
        "data": data,
        "images": len(judged),
        "accuracy": accuracy(scores, part.labels),
        "per_class": by_class,
    }
    lines = [
        f"accuracy {facts['accuracy']:.4f} on {len(judged)} images",
        *(f"  {n:<20} {a:.4f}" for n, a in by_class.items() if a is not None),
    ]
    say(facts, as_json, "\n".join(lines))
