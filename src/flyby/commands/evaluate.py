"""``flyby evaluate``: the accuracy of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from flyby.commands.common import (
    Device,
    Json,
    LimitOptions,
    ModelFolder,
    ModelSize,
    NameOptions,
    RequireSigned,
    TrustFile,
    answering_model,
    grouped,
    note,
    say,
)
from flyby.commands.reports import evaluate_report


@grouped
def evaluate(
    *,
    model: ModelFolder,
    data: Annotated[str, typer.Option(help="Labelled images; the test split where there is one.")],
    size: ModelSize = None,
    naming: NameOptions,
    trust: TrustFile = None,
    require_signed: RequireSigned = False,
    allowed: LimitOptions,
    device: Device = "auto",
    report: Annotated[bool, typer.Option(help="Also write a page with figures and images beside the model.")] = True,
    card: Annotated[bool, typer.Option("--card", help="Put the result onto the model's card, its README.md.")] = False,
    as_json: Json = False,
) -> None:
    """What a model is worth on labelled data: accuracy with its interval, each class, and how far to believe it."""
    from flyby.data.classes import fitted
    from flyby.data.sources import Reading, load
    from flyby.fusion.card import check_open, noted
    from flyby.fusion.evaluation import evaluate_dataset
    from flyby.fusion.predictor import model_folder
    from flyby.machine import pick_device

    if card:
        check_open(model)
    predictor = answering_model(model, trust, require_signed, allowed)
    bundle = load(data, size=size or predictor.size, reading=Reading(channels=predictor.channels), holdout=None)
    bundle = naming.renamed(bundle)
    judged, named = fitted(bundle.test or bundle.train, predictor.class_names, data, skip=naming.skip_unknown)
    scores, part = evaluate_dataset(predictor, judged, pick_device(device))
    note(bundle.notes)
    facts, lines = evaluate_report(model, predictor, scores, part, data, report)
    if card:
        noted(model_folder(model), facts)
    say({**facts, **named.row()}, as_json, "\n".join([*lines, *named.lines()]))
