"""``flyby orient``: what a node does with the models it received, with no server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyby.commands.common import (
    Device,
    Export,
    GateOptions,
    Json,
    Seed,
    Set,
    Size,
    WatchOptions,
    grouped,
    note,
    note_absent,
    say,
)

if TYPE_CHECKING:
    from flyby.parcels.arrivals import Arrivals, Waiting


@grouped
def orient(
    *,
    own: Annotated[Path, typer.Option(help="This node's own .parcel.")],
    received: Annotated[Path, typer.Option(help="The folder of parcels from nodes it met.")],
    data: Annotated[str, typer.Option(help="This node's own images.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    method: Annotated[str, typer.Option(help="fol, fol-a, fol-n, fol-an or gossip.")] = "fol",
    watch: Annotated[bool, typer.Option("--watch", help="Wait until enough parcels lie in --received.")] = False,
    watching: WatchOptions,
    min_sites: Annotated[
        int | None, typer.Option(min=1, help="With --watch: so many neighbours are enough at the deadline.")
    ] = None,
    seed: Seed = 0,
    export: Export = True,
    entrance: GateOptions,
    device: Device = "auto",
    size: Size = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Personalise one real node's model from those it received, on its own data, with no server."""
    from flyby.files import sole_writer
    from flyby.parcels import parcel
    from flyby.parcels.gate import open_gate
    from flyby.runs.node import Wish, orient_folder

    waiting = watching.waiting(watch, min_sites)
    arrivals: list[Arrivals] = []

    def wait(waiting: Waiting) -> list[Path]:
        me = parcel.read_manifest(own).sender
        arrivals.append(
            waiting.gather(received, lambda path: open_gate(me, out, **entrance.looking).check(path).manifest)
        )
        return arrivals[0].files(rejected=entrance.quarantine is not None)

    with sole_writer(out):
        facts = orient_folder(
            Wish(own, data, out, method, size, settings or (), seed, device, export),
            partial(wait, waiting) if waiting else received,
            lambda me: open_gate(me, out, **entrance.words),
            entrance.ledger,
        )
    note_absent(arrivals[0] if arrivals else None, facts)
    note(facts["log"])
    chosen = ", ".join(facts["chosen"]) or "none but itself"
    text = f"{out}: {facts['node']} from {facts['used']} of {facts['received']} received models; in its ensemble:"
    say(facts, as_json, f"{text} {chosen}")
