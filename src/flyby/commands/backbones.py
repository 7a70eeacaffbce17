"""``flyby backbones``: the frozen networks that models may stand on, and how one gets onto this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from flyby.commands.common import Json, say


def backbones(
    source: Annotated[
        str | None, typer.Argument(metavar="[NAME|PATH]", help="Add this one: a name, or a parcel or model folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The backbones that are on this machine, or can be; with NAME or PATH: add that one."""
    from flyby.models.backbones import shelf
    from flyby.runs.backbones import backbone_at

    if source is not None:
        name, found = backbone_at(source)
        facts = {"name": name, **found.model_dump(mode="json")}
        of = f"{found.dim} features of images of {found.size[0]}x{found.size[1]}"
        say(facts, as_json, f"{name}: {of}, sha256 {found.sha256}")
        return
    rows = shelf()
    lines = [f"{row['name']:<22} {row['dim']:>5} features  {row['sha256'][:12]}  {row['state']}" for row in rows]
    say(rows, as_json, "\n".join(lines))
