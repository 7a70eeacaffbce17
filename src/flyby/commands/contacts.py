"""``flyby contacts``: plans of who can talk to whom when, and what they allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyby.commands.common import Json, Seed, grouped, say

if TYPE_CHECKING:
    from flyby.contacts.edges import Windows
    from flyby.contacts.ground import Station
    from flyby.contacts.orbits import Orbits

app = typer.Typer(
    help="Who can talk to whom, when: plans from orbits, from movers and of other tools, and what they allow.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[Path, typer.Option(help="The plan to write: CSV, or another format by its suffix.")]
Hours = Annotated[float, typer.Option(help="How far to look.")]
Start = Annotated[str | None, typer.Option(metavar="TIME", help="Second 0 of the plan, as 2026-03-01T12:00:00Z.")]
Satellites = Annotated[int, typer.Option(help="How many.")]
Rate = Annotated[
    str | None, typer.Option(metavar="RATE", help="Speed of a link, as 10Mbit/s or 300kB/s; else 10 Mbit/s.")
]


@dataclass(frozen=True)
class LinkOptions:
    """What makes a contact, and how fast it is."""

    max_range: Annotated[float | None, typer.Option(help="Longest link between satellites, km.")] = None
    min_seconds: Annotated[float, typer.Option(help="Shortest contact that counts.")] = 0.0
    terminals: Annotated[
        int | None, typer.Option(help="Links that a satellite can hold at a time; first come, first served.")
    ] = None
    step: Annotated[float, typer.Option(help="Seconds from sample to sample; edges are exact anyway.")] = 10.0
    rate: Rate = None
    power: Annotated[float | None, typer.Option(help="Link budget: watts sent.")] = None
    gain: Annotated[float, typer.Option(help="Link budget: dBi of each antenna.")] = 0.0
    temperature: Annotated[float, typer.Option(help="Link budget: kelvin of the receiving system.")] = 500.0
    frequency: Annotated[float, typer.Option(help="Link budget: MHz.")] = 2200.0
    bandwidth: Annotated[float, typer.Option(help="Link budget: MHz.")] = 1.0
    stations: Annotated[
        Path | None, typer.Option(help="Ground stations: CSV with name,latitude,longitude[,height][,mask].")
    ] = None
    mask: Annotated[float, typer.Option(help="Degrees above the horizon that a station needs.")] = 10.0
    positions: Annotated[
        Path | None, typer.Option(help="Also write where everybody is, for the globe of `flyby contacts show`.")
    ] = None

    def speed(self) -> float:
        from flyby.contacts.links import Budget, amount, rate_of

        claimed = None if self.rate is None else amount(self.rate, "the rate")
        budget = None
        if self.power is not None:
            mega = (1e6 * self.frequency, 1e6 * self.bandwidth)
            budget = Budget(self.power, self.gain, self.temperature, *mega)
        return rate_of(claimed, budget, self.max_range)

    def find(self, orbits: Orbits, seconds: float) -> tuple[Windows, dict[str, float], tuple[Station, ...]]:
        from flyby.contacts.ground import read_stations
        from flyby.contacts.windows import Rules, find

        stations = () if self.stations is None else read_stations(self.stations, self.mask)
        rules = Rules(self.max_range, self.min_seconds, self.terminals, self.step)
        windows, lost = find(orbits, seconds, rules, stations)
        return windows, lost, stations


def _written(orbits: Orbits, hours: float, options: LinkOptions, out: Path, as_json: bool) -> None:
    """Windows of satellites into a file, without a plan in memory where the file is CSV."""
    from flyby.contacts.formats import kind_of, write_plan
    from flyby.contacts.plan import write_lines

    kind, rate = kind_of(out, None), options.speed()
    windows, lost, stations = options.find(orbits, hours * 3600)
    names = tuple(station.name for station in stations)
    words = (orbits.names, names, rate, orbits.epoch, hours * 3600)
    if kind == "csv":
        from flyby.contacts.plan import Plan

        Plan(orbits.names, (), hours * 3600, names, orbits.epoch)  # whether the names can stand in one plan
        write_lines(out, windows.lines(*words))
    else:
        write_plan(windows.plan(*words), out)
    if options.positions is not None:
        from flyby.contacts.tracks import Tracks

        Tracks.of(orbits, hours * 3600, stations=stations).write(options.positions)
    between = windows.other < len(orbits.names)  # no station at the other end
    met = {*windows.one[between].tolist(), *windows.other[between].tolist()}
    alone = [name for i, name in enumerate(orbits.names) if i not in met]
    facts = {
        "plan": str(out),
        "nodes": len(orbits.names),
        "stations": len(names),
        "contacts": len(windows),
        "hours": hours,
        "epoch": orbits.epoch,
        "rate": rate,
        "alone": alone,
        "lost": lost,
    }
    text = f"{out}: {len(windows)} contacts of {len(orbits.names)} satellites"
    text += f" and {len(names)} stations" if names else ""
    text += f" in {hours:g} h from {orbits.epoch}, {rate:,.0f} bytes/s"
    text += f"\nnever meet anybody: {', '.join(alone)}" if alone else ""
    say(facts, as_json, text)


@app.command()
@grouped
def walker(
    out: Out,
    options: LinkOptions,
    satellites: Satellites = 70,
    planes: Annotated[int, typer.Option(help="Planes; each has equally many satellites.")] = 7,
    phasing: Annotated[int, typer.Option(help="F of T/P/F: how far neighbouring planes are shifted.")] = 1,
    altitude: Annotated[float, typer.Option(help="Km above the equator's radius.")] = 550.0,
    inclination: Annotated[float, typer.Option(help="Degrees.")] = 97.6,
    star: Annotated[bool, typer.Option("--star", help="Planes over half the equator (star), not all (delta).")] = False,
    hours: Hours = 24.0,
    start: Start = None,
    as_json: Json = False,
) -> None:
    """The plan of a Walker constellation T/P/F."""
    from flyby.contacts import walker as made
    from flyby.contacts.plan import EPOCH

    orbits = made.walker(satellites, planes, phasing, altitude, inclination, star, start or EPOCH)
    _written(orbits, hours, options, out, as_json)


@app.command("random")
@grouped
def random_(
    out: Out,
    options: LinkOptions,
    satellites: Satellites = 20,
    altitude: Annotated[str, typer.Option(metavar="LOW:HIGH", help="Km, drawn between the two.")] = "500:600",
    inclination: Annotated[str, typer.Option(metavar="LOW:HIGH", help="Degrees, drawn between the two.")] = "50:98",
    seed: Seed = 0,
    hours: Hours = 24.0,
    start: Start = None,
    as_json: Json = False,
) -> None:
    """The plan of satellites on random circles, as many small operators would make it together."""
    from flyby.contacts.plan import EPOCH
    from flyby.contacts.walker import random_shell

    bounds = _bounds(altitude, "altitude"), _bounds(inclination, "inclination")
    _written(random_shell(satellites, *bounds, seed, start or EPOCH), hours, options, out, as_json)


def _bounds(text: str, what: str) -> tuple[float, float]:
    from flyby.errors import BadInput

    low, _, high = text.partition(":")
    try:
        return float(low), float(high or low)
    except ValueError:
        raise BadInput(f"the {what} {text!r} is not understood; write it as 500:600") from None


@app.command()
@grouped
def windows(
    elements: Annotated[Path, typer.Argument(help="Element sets: OMM (CSV, JSON, XML) or TLE (two or three lines).")],
    out: Out,
    options: LinkOptions,
    hours: Hours = 24.0,
    start: Start = None,
    old: Annotated[bool, typer.Option("--old", help="Take element sets older than 30 days too.")] = False,
    as_json: Json = False,
) -> None:
    """The plan of real satellites, from their element sets; by default from the newest set's epoch on."""
    from flyby.contacts.elements import read_elements

    _written(read_elements(elements, start, old), hours, options, out, as_json)


@app.command()
def movers(
    file: Annotated[Path, typer.Argument(help="SUMO's FCD output (XML), or CSV with time,id,x,y[,z] in metres.")],
    out: Out,
    reach: Annotated[float, typer.Option("--range", help="Metres within which two can talk.")] = 300.0,
    gap: Annotated[float, typer.Option(help="Seconds of silence after which a mover is away.")] = 60.0,
    step: Annotated[float | None, typer.Option(help="Look only so often (seconds), where times are many.")] = None,
    rate: Rate = None,
    as_json: Json = False,
) -> None:
    """The plan of cars, drones or ships, from their positions over time."""
    from flyby.contacts.formats import write_plan
    from flyby.contacts.links import RATE, amount
    from flyby.contacts.movers import read_movers

    plan = read_movers(file, reach, RATE if rate is None else amount(rate, "the rate"), gap, step)
    write_plan(plan, out)
    facts = {"plan": str(out), "nodes": len(plan.nodes), "contacts": len(plan.contacts), "seconds": plan.seconds}
    facts["alone"] = list(plan.alone())
    text = f"{out}: {len(plan.contacts)} contacts of {len(plan.nodes)} movers in {plan.seconds:g} s"
    say(facts, as_json, text + (f"\nnever meet anybody: {', '.join(plan.alone())}" if plan.alone() else ""))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A plan.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The plan to write.")],
    source_format: Annotated[str | None, typer.Option("--from", help="csv, ion, hdtn or one; else by suffix.")] = None,
    target_format: Annotated[str | None, typer.Option("--to", help="csv, ion, hdtn or one; else by suffix.")] = None,
    rate: Rate = None,
    as_json: Json = False,
) -> None:
    """A plan in another format: flyby's CSV, ION (bytes/s), HDTN's JSON (bits/s), The ONE's events (no rates)."""
    from flyby.contacts.formats import kind_of, read_plan, write_plan
    from flyby.contacts.links import amount

    to = kind_of(target, target_format)
    plan = read_plan(source, source_format, None if rate is None else amount(rate, "the rate"))
    write_plan(plan, target, to)
    facts = {"plan": str(target), "format": to, "nodes": len(plan.nodes), "contacts": len(plan.contacts)}
    say(facts, as_json, f"{target}: {len(plan.contacts)} contacts of {len(plan.nodes)} nodes ({to})")


@app.command()
def feasibility(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, in any format that convert reads.")],
    size: Annotated[str | None, typer.Option(help="Bytes of a parcel in fp32, as 45MB.")] = None,
    parcel: Annotated[Path | None, typer.Option(help="A parcel: its size in every codec.")] = None,
    buffer: Annotated[int, typer.Option(help="Q: neighbour models of the first round.")] = 29,
    rounds: Annotated[int, typer.Option(help="E: rounds.")] = 3,
    top: Annotated[int, typer.Option(help="K: models that stay after a round.")] = 10,
    acquisition: Annotated[float | None, typer.Option(help="Seconds of a window until the first byte crosses.")] = None,
    rate: Rate = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="Also a line per node.")] = False,
    as_json: Json = False,
) -> None:
    """Before any training: whom each node reaches when, in which codec FOL's schedule fits, and what would."""
    from flyby.contacts.feasibility import Asked
    from flyby.contacts.feasibility import feasibility as facts_of
    from flyby.contacts.formats import read_plan
    from flyby.contacts.links import amount
    from flyby.contacts.transfer import LinkSettings
    from flyby.settings import build

    asked, sizes = Asked(buffer, rounds, top), _sizes(size, parcel)
    link = build(LinkSettings, {} if acquisition is None else {"acquisition": acquisition}, "the link")
    plan = read_plan(file, None, None if rate is None else amount(rate, "the rate"))
    facts = facts_of(plan, sizes, asked, link)
    say(facts, as_json, _table(facts, nodes))


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, in any format that convert reads.")],
    out: Annotated[Path, typer.Option(help="The page to write: one HTML file, which opens offline.")],
    journal: Annotated[
        Path | None, typer.Option(help="What a run made of the plan: the journal.jsonl in its folder.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="Bytes of a parcel in fp32, as 45MB; a journal knows them.")] = None,
    positions: Annotated[Path | None, typer.Option(help="Where everybody is: a file that --positions wrote.")] = None,
    elements: Annotated[Path | None, typer.Option(help="The element sets of the plan, instead of positions.")] = None,
    stations: Annotated[Path | None, typer.Option(help="With --elements: the ground stations of the plan.")] = None,
    czml: Annotated[Path | None, typer.Option(help="Also write a CZML file, for Cesium.")] = None,
    as_json: Json = False,
) -> None:
    """A plan to look at: a globe on which it happens, peers against hours, and every pair's windows."""
    from flyby.contacts.formats import read_plan
    from flyby.contacts.links import amount
    from flyby.errors import BadInput
    from flyby.files import write_text
    from flyby.report.show import View, tracks_of, write_page

    plan = read_plan(file)
    tracks = tracks_of(plan, positions, elements, stations)
    view = View.of(plan, None if size is None else round(amount(size, "the size")), journal, tracks)
    if czml is not None:
        from flyby.contacts.czml import czml as document

        if tracks is None:
            raise BadInput("CZML shows where everybody is; give --positions FILE or --elements FILE")
        write_text(czml, document(plan, tracks, view.journal))
    write_page(view, out, file.stem)
    facts = {"page": str(out), "globe": tracks is not None, "czml": None if czml is None else str(czml)}
    say(facts, as_json, f"{out}" + ("" if tracks else " (without a globe: give --positions FILE or --elements FILE)"))


def _sizes(size: str | None, parcel: Path | None) -> dict[str, float]:
    """Bytes of a parcel by codec."""
    from flyby.contacts.feasibility import SHARES
    from flyby.contacts.links import amount
    from flyby.errors import BadInput

    if (size is None) == (parcel is None):
        raise BadInput("how large is a parcel? give --size 45MB, or --parcel FILE")
    if size is not None:
        whole = amount(size, "the size")
        return {codec: share * whole for codec, share in SHARES.items()}
    from flyby.parcels.parcel import read
    from flyby.runs.crossing import encoded

    assert parcel is not None
    item = read(parcel)
    return {codec: encoded(item, codec).size for codec in SHARES}


def _table(facts: dict[str, Any], nodes: bool) -> str:
    """The report for people."""
    asked, everyone = facts["asked"], f" of {facts['nodes']}"
    heads = ("codec", "bytes", "windows that fit", "peers reached", f"reach Q={asked['buffer']}", "median h to Q")
    table = [(*heads, f"do E={asked['rounds']}")]
    for row in facts["codecs"]:
        hours = row["hours_to_buffer"]
        share, peers = f"{row['windows_that_fit']:.0%}", " .. ".join(f"{value:g}" for value in row["peers"].values())
        counts = f"{row['nodes_to_buffer']}{everyone}", "-" if hours is None else f"{hours:.1f}"
        table.append((row["codec"], f"{row['bytes']:,}", share, peers, *counts, f"{row['nodes_all_rounds']}{everyone}"))
    curve, best = facts["over_time"], facts["codecs"][-1]["codec"]
    lines = [*facts["said"], "", *_columns(table), "", f"peers by hour ({best}; least .. median .. most over nodes)"]
    for k in range(0, len(curve["hours"]), 8):
        three = " .. ".join(f"{curve[best][key][k]:g}" for key in ("least", "median", "most"))
        lines.append(f"  {curve['hours'][k]:6.1f}  {three}")
    if nodes:
        codecs = [row["codec"] for row in facts["codecs"]]
        rows = [("node", "meets", *(f"{codec}: peers, h to Q" for codec in codecs))]
        for name, one in facts["per_node"].items():
            cells = (_cell(one["reached"][codec], one["hours_to_buffer"][codec]) for codec in codecs)
            rows.append((name, str(one["met"]), *cells))
        lines += ["", *_columns(rows)]
    return "\n".join(lines)


def _cell(peers: int, hours: float | None) -> str:
    return f"{peers}, {'-' if hours is None else f'{hours:.1f}'}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, wide, strict=True)) for row in rows]
