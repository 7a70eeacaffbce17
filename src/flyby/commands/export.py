"""``flyby export``: a model for programs that have no flyby."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyby.commands.common import (
    Json,
    Licence,
    LimitOptions,
    ModelFolder,
    RequireSigned,
    TrustFile,
    answering_model,
    grouped,
    say,
)


@grouped
def export(
    *,
    model: ModelFolder,
    out: Annotated[Path, typer.Option(help="The folder to write: model.onnx, classes.json, run.py, README.md.")],
    licence: Licence = None,
    trust: TrustFile = None,
    require_signed: RequireSigned = False,
    allowed: LimitOptions,
    as_json: Json = False,
) -> None:
    """Write a model as ONNX, in a folder that needs no flyby: numpy, pillow and onnxruntime run it."""
    from flyby.deploy.onnx import check_free, export_folder
    from flyby.files import sole_writer
    from flyby.fusion.card import check_licence
    from flyby.fusion.predictor import card_in

    named = {} if licence is None else {"license": check_licence(licence)}
    check_free(out)
    predictor = answering_model(model, trust, require_signed, allowed)
    with sole_writer(out):
        files = export_folder(predictor, out, card_in(model) | named)
    size = sum((out / name).stat().st_size for name in files)
    facts = {"out": str(out), "kind": predictor.kind, "files": files, "bytes": size}
    say(facts, as_json, f"{out}: {', '.join(files)} ({size:,} bytes); try it: python {out / 'run.py'} IMAGE")
