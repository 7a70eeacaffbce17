"""``flyby orient``: what a node does with the models it received, with no server."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyby.commands.common import (
    Device,
    Export,
    GateOptions,
    Json,
    ModelSize,
    NameOptions,
    Set,
    WatchOptions,
    grouped,
    note,
    note_absent,
    say,
)
from flyby.commands.reports import Oriented

if TYPE_CHECKING:
    from flyby.parcels.arrivals import Arrivals, Waiting
    from flyby.runs.node import Look


@grouped
def orient(
    *,
    own: Annotated[
        Path | None, typer.Option(help="This node's own .parcel; with --node in the first round only.")
    ] = None,
    received: Annotated[Path, typer.Option(help="The folder of parcels from nodes it met.")],
    data: Annotated[str, typer.Option(help="This node's own images.")],
    out: Annotated[Path | None, typer.Option(help="The model folder to write; with --node by default in it.")] = None,
    node: Annotated[
        Path | None, typer.Option(help="The folder of a node that lives from round to round (made in the first).")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="With --node: take a newer model of a neighbour met before, and count it.")
    ] = False,
    method: Annotated[str | None, typer.Option(help="fol (the first time), fol-plus, fol-n, gossip ...")] = None,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept", help="Fly the new model only if its validation log-loss is lower by a standard error."
        ),
    ] = False,
    unlabelled: Annotated[
        Path | None, typer.Option(help="A folder of own images without labels: the student learns from them as well.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="How long the round may take; what it does not reach is left out.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Wait until enough parcels lie in --received.")] = False,
    watching: WatchOptions,
    min_sites: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --watch: go on as soon as so many neighbours have come, unless --expect says more."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Everything random follows from it; 0 the first time.")] = None,
    export: Export = True,
    naming: NameOptions,
    entrance: GateOptions,
    device: Device = "auto",
    size: ModelSize = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Personalise one real node's model from those it received, on its own data, with no server. With --node it goes on
    next time from what it has: what is not named again stays as it was."""
    from flyby.files import sole_writer
    from flyby.parcels.gate import open_gate
    from flyby.runs.node import Wish, orient_folder

    waiting = watching.waiting(watch, min_sites)
    arrivals: list[Arrivals] = []

    def wait(waiting: Waiting, look: Look) -> list[Path]:
        arrivals.append(waiting.gather(received, look))
        return arrivals[0].files(rejected=entrance.quarantine is not None)

    seen, words = Oriented(device), ["accept=1"] if accept else []
    words += [f"seconds={seconds}"] if seconds is not None else []
    words += settings or []  # --set has the last word
    with ExitStack() as locks:
        for folder in (node, out):
            if folder is not None:
                locks.enter_context(sole_writer(folder))
        facts = orient_folder(
            replace(
                Wish(data, own, node, out, method, size, words, seed, device, export, unlabelled, again),
                rename=naming.renamed,
                skip_unknown=naming.skip_unknown,
                seen=seen,
            ),
            partial(wait, waiting) if waiting else received,
            lambda me: open_gate(me, out if node is None else None, **entrance.words),
            entrance.ledger,
        )
    note_absent(arrivals[0] if arrivals else None, facts)
    note(facts["log"])
    seen.report(facts, node or Path(facts["out"]))
    say(facts, as_json, _story(facts, node))


def _story(facts: dict[str, Any], node: Path | None) -> str:
    """The round for people: who came, what it changed, where the model is."""
    again = f" ({len(facts['again'])} again)" if facts["again"] else ""
    came = f"{len(facts['new'])} new{again}, {len(facts['refused'])} refused"
    came += f", {len(facts['seen'])} seen before" if facts["seen"] else ""
    start = f"{facts['out']}: {facts['node']}, round {facts['round']}"
    if facts.get("nothing_new"):
        return f"{start} stands: nothing new came ({came}), and the images are those of that round"
    chosen = ", ".join("its own" if name == "self" else name for name in facts["chosen"]) or "none but its own"
    lines = [f"{start}: {came}; {facts['used']} neighbours in use, in its ensemble: {chosen}"]
    lines += [f"kept for the next round: {', '.join(facts['kept']) or 'nobody'}"] if node else []
    before, after = facts["before"], facts["after"]
    if after:
        moved = f"accuracy {100 * before['accuracy']:.1f} -> {100 * after['accuracy']:.1f} %"
        if interval := facts.get("interval"):
            moved += f" (95 % interval {100 * interval[0]:.1f} to {100 * interval[1]:.1f})"
        moved += f", log-loss {before['log_loss']:.3f} -> {after['log_loss']:.3f}"
        lines.append(f"on its {facts['images']['val']} validation images: {moved}")
    end = f"its model is of round {facts['version']}" if facts["version"] else "its model is the one it came with"
    if facts["accept"]:
        end += ": the new one was accepted" if facts["accept"]["accepted"] else ": the new one was not accepted"
    more = [f"more about it, for this node only: {facts['report']}"] if facts.get("report") else []
    return "\n".join([*lines, end, *more])
