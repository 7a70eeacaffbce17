"""``flyby audit``: what one upload gives away about the images it was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from flyby.commands.common import Device, Json, ModelSize, NameOptions, grouped, note, say
from flyby.errors import BadInput


@grouped
def audit(
    *,
    model: Annotated[
        Path, typer.Argument(help="A .parcel, a fused folder, or a run folder, whose own split is then used.")
    ],
    members: Annotated[str | None, typer.Option(help="Data whose training images the model was trained on.")] = None,
    others: Annotated[
        str | None, typer.Option(help="Data of the same kind that it was not: its test images, or all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For the bootstrap.")] = 0,
    size: ModelSize = None,
    naming: NameOptions,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Membership inference: how well a model alone tells the images it was trained on from others."""
    from flyby.machine import pick_device
    from flyby.study.audit import audit_model, audit_run, is_run

    if members is not None and others is not None:
        facts = audit_model(
            model,
            members,
            others,
            size=size,
            device=pick_device(device),
            seed=seed,
            rename=naming.renamed,
            skip=naming.skip_unknown,
        )
        facts["notes"] += _never_seen(model, facts["members"])
        note(facts["notes"])
        say(facts, as_json, "\n".join(_lines(facts)))
    elif members is None and others is None and is_run(model):
        found = dict(audit_run(model, device=pick_device(device), seed=seed))
        say(
            found,
            as_json,
            "\n".join(
                line for name, facts in found.items() for line in (f"{name}:", *(f"  {x}" for x in _lines(facts)))
            ),
        )
    else:
        raise BadInput(
            "name --members (images the model was trained on) and --others (images it was not); a run folder needs"
            " neither"
        )


def _never_seen(model: Path, members: int) -> list[str]:
    """That a parcel was trained on fewer images than are taken for its members."""
    from flyby.parcels.parcel import read_manifest

    learned = read_manifest(model).samples if model.is_file() else 0
    if not 0 < learned < members:
        return []
    return [
        f"{model} was trained on {learned} images, and {members} are taken for its members: those it held out"
        " make it look safer than it is; name those it was trained on, or audit one trained with --holdout 0"
    ]


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    accuracy = facts["accuracy"]
    left_out = (
        f"; {facts['left_out']} images of classes that only one side has are left out" if facts["left_out"] else ""
    )
    yield (
        f"{facts['members']} members (accuracy {accuracy['members']:.4f}), {facts['others']} others"
        f" ({accuracy['others']:.4f}){left_out}"
    )
    yield f"{'attack':<12} {'AUC':>6}  {'95 % interval':<15} {'TPR at 1 % FPR':>15} {'at 0.1 %':>10}"
    for name, found in facts["attacks"].items():
        rates = (
            "-" if rate is None else f"{rate:.4f}" for rate in (found["tpr_at_1_percent"], found["tpr_at_0.1_percent"])
        )
        yield "{:<12} {:6.4f}  {:.4f} - {:.4f} {:>15} {:>10}".format(
            name, found["auc"], found["low"], found["high"], *rates
        )
    yield facts["verdict"]
    if facts.get("bound") is not None:
        yield f"The noise on the sums allows no attack an AUC above {facts['bound']:.4f}, in the mean over the noise."
