"""``flyby fuse``: what the server does, with parcels that are here or still to arrive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyby.commands.common import (
    Device,
    Export,
    GateOptions,
    Json,
    Licence,
    Set,
    WatchOptions,
    grouped,
    note,
    note_absent,
    say,
)
from flyby.commands.reports import fuse_report
from flyby.errors import BadInput

if TYPE_CHECKING:
    from flyby.parcels.gate import Gate
    from flyby.runs.server import Order

    Done = tuple[dict[str, Any], str, Gate]


@grouped
def fuse(
    *,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write; with --add and --remove by default the model's own.")
    ] = None,
    parcels: Annotated[
        list[Path] | None, typer.Argument(help="The .parcel files, one per site; or the model to add to.")
    ] = None,
    add: Annotated[
        list[Path] | None,
        typer.Option(metavar="PARCEL", help="Put a late site into a model of closed form (repeatable)."),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE|PARCEL", help="Take a site out of such a model exactly, without the others (repeatable)."
        ),
    ] = None,
    region: Annotated[
        Path | None,
        typer.Option("--partial", metavar="PARCEL", help="Only add up the sites' sums, into one parcel of a region."),
    ] = None,
    names: Annotated[bool, typer.Option(help="With --partial: say who is in it, or only how many.")] = True,
    revealed: Annotated[
        list[Path] | None,
        typer.Option(
            help="Seeds towards a site of a masked round that did not send: `flyby keys reveal` (repeatable)."
        ),
    ] = None,
    watch: Annotated[
        Path | None,
        typer.Option(metavar="INBOX", help="Wait until enough parcels lie in this folder, instead of naming them."),
    ] = None,
    watching: WatchOptions,
    fusion: Annotated[
        str | None, typer.Option(help="The server rule; by default that of the method the parcels were trained by.")
    ] = None,
    compact: Annotated[
        bool,
        typer.Option(
            "--compact", help="Distil what the rule gives into one network, on --proxy images or on synthetic ones."
        ),
    ] = False,
    proxy: Annotated[str | None, typer.Option(help="Unlabelled images, for rules that can use some.")] = None,
    seed: Annotated[int, typer.Option(help="For rules that draw.")] = 0,
    export: Export = True,
    validation: Annotated[
        str | None,
        typer.Option(
            help="Labelled images to judge parcels and their fusion by: refuse what knows no more than chance."
        ),
    ] = None,
    keep_bad: Annotated[
        bool, typer.Option("--keep-bad", help="Keep a fused model that is no better than chance on --validation.")
    ] = False,
    min_sites: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Go on without refused parcels if so many are left; by default all must do. With --watch: go on as"
            " soon as so many have come, unless --expect says more.",
        ),
    ] = None,
    licence: Licence = None,
    entrance: GateOptions,
    device: Device = "auto",
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Fuse parcels into one model: a folder that evaluate, predict and plain PyTorch can load."""
    from flyby.runs.server import Order

    changes, given = bool(add or remove), parcels or []
    if compact and (region is not None or changes):
        raise BadInput("--compact makes a new model; it does not go with --partial, --add or --remove")
    if sum((watch is not None, region is not None, changes)) > 1:
        raise BadInput("--watch, --partial, and --add or --remove are three different things; give one of them")
    if region is not None and (out is not None or not given):
        raise BadInput("name the .parcel files to add up; --partial itself says what is written, without --out")
    if changes and len(given) != 1:
        raise BadInput("name the one model folder to change: flyby fuse --add late.parcel global/")
    target = region or out or (given[0] if changes else None)
    if target is None:
        raise BadInput("name the folder to write with --out")
    order = Order(target, fusion, settings or (), proxy, validation, min_sites, seed, export, device, keep_bad)
    order = replace(order, revealed=revealed or (), compact=compact, licence=licence)
    if region is not None:
        facts, text, gate = _add_up(given, order, entrance, names)
    elif changes:
        facts, text, gate = _change(given[0], add or [], remove or [], order, entrance)
    else:
        facts, text, gate = _fuse(given, watch, watching, order, entrance)
        fuse_report(facts, gate)
    note([*(one.line for one in gate.refused), *gate.notes])
    say(facts, as_json, _holders(facts.get("classes")) + text)


def _holders(held: dict[str, dict[str, int | None]] | None) -> str:
    """Who holds what, where the sites name different classes."""
    from flyby.fusion.alignment import table

    return "" if held is None else "\n".join(["images by class and site:", *table(held), ""])


def _fuse(parcels: list[Path], watch: Path | None, watching: WatchOptions, order: Order, entrance: GateOptions) -> Done:
    from flyby.files import sole_writer
    from flyby.parcels.gate import open_gate
    from flyby.runs.server import SERVER, fuse_parcels

    waiting = watching.waiting(watch is not None, order.min_sites if watch else None)
    if (watch is None) is not bool(parcels):
        raise BadInput("name the .parcel files, or the folder in which they arrive with --watch INBOX, and not both")
    out = order.out
    order = replace(order, min_sites=waiting.quorum.least) if waiting else order
    with sole_writer(out):
        order.check()
        came = (
            waiting.gather(watch, lambda path: open_gate(SERVER, out, **entrance.looking).check(path).manifest)
            if watch and waiting
            else None
        )
        gate = open_gate(SERVER, out, **entrance.words)
        paths = came.files(rejected=entrance.quarantine is not None) if came else parcels
        facts = fuse_parcels(paths, order, gate, entrance.ledger)
    note_absent(came, facts)
    text = f"{out}: {facts['kind']} from {facts['sites']} sites ({facts['bytes_up']:,} bytes received); try it: flyby"
    return facts, f"{text} evaluate {out} --data PATH" + _compared(facts.get("compact")), gate


def _compared(found: dict[str, Any] | None) -> str:
    """Student and teacher, a line each: accuracy where it is known, size and time."""
    lines = []
    for who, one in (found or {}).items():
        known = f"accuracy {one['accuracy']:.4f}, " if "accuracy" in one else ""
        networks = f"{one['networks']} network{'s' if one['networks'] > 1 else ''}"
        lines.append(f"\n{who}: {known}{networks}, {one['bytes'] / 1e6:.1f} MB, {one['ms_per_image']:.3f} ms per image")
    return "".join(lines)


def _add_up(parcels: list[Path], order: Order, entrance: GateOptions, names: bool) -> Done:
    """``--partial``: the sums of some sites as one parcel."""
    from flyby.files import sole_writer
    from flyby.parcels.gate import open_gate
    from flyby.runs.server import make_region

    region = order.out
    with sole_writer(region):
        gate = open_gate(region.stem, None, **entrance.words)
        facts = make_region(parcels, region, order, gate, names=names, ledger=entrance.ledger)
    text = f"{region}: {facts['sites']} sites in {facts['bytes']:,} bytes; send it on, or sign it: flyby sign"
    return facts, text, gate


def _change(model: Path, add: list[Path], remove: list[str], order: Order, entrance: GateOptions) -> Done:
    """``--add`` and ``--remove``: a model of closed form with other sites."""
    from flyby.files import sole_writer
    from flyby.parcels.gate import open_gate
    from flyby.runs.server import SERVER, change_model

    with sole_writer(order.out):
        gate = open_gate(SERVER, None, **entrance.words)
        facts = change_model(model, add, remove, order, gate, entrance.ledger)
    return facts, f"{order.out}: {facts['kind']} of {facts['sites']} sites now", gate
