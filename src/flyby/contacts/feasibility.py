"""Before any training: whom each node of a plan reaches when, in which codec, and whether FOL's schedule fits.

A pair is reached when both parcels are across, one after the other, in one window or in several of the pair. Each pair
is looked at by itself, as if no node were ever busy with another: a run on the plan brings as many peers or fewer.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flyby.contacts.plan import Contact, Plan
from flyby.contacts.transfer import LinkSettings, Load
from flyby.errors import BadInput

HOUR = 3600.0
# Of a parcel's bytes in fp32, where only those are known: one weight takes 4, 2, 1 and .5 bytes, and a scale of 4 bytes
# goes with every output channel (int8) or 32 weights (int4).
SHARES = {"fp32": 1.0, "fp16": 0.5, "int8": 0.253, "int4": 0.157}
MOST_NODES = 0.9  # a schedule "works" if so many of the nodes can follow it


@dataclass(frozen=True)
class Asked:
    """FOL's schedule: Q models at first, then as many as replace those that do not stay, in E rounds."""

    buffer: int = 29
    rounds: int = 3
    top: int = 10

    def __post_init__(self) -> None:
        if self.buffer < 1 or self.rounds < 1 or self.top < 1:
            raise BadInput("a schedule has at least one model (--buffer), one round (--rounds) and keeps one (--top)")
        if self.rounds > 1 and self.later < 1:
            raise BadInput(
                f"a node that keeps {self.top} of {self.buffer} has no room for new ones; make --buffer larger than"
                " --top, or --rounds 1"
            )

    @property
    def later(self) -> int:
        from flyby.meeting.collect import newcomers

        return newcomers(self.buffer, self.top)

    @property
    def counts(self) -> list[int]:
        return [self.buffer, *[self.later] * (self.rounds - 1)]

    @property
    def peers(self) -> int:
        return sum(self.counts)

    def rounds_of(self, peers: int) -> int:
        """How many rounds so many peers are enough for."""
        if peers < self.buffer:
            return 0
        return min(self.rounds, 1 + (peers - self.buffer) // self.later) if self.rounds > 1 else 1

    def __str__(self) -> str:
        return " + ".join(map(str, self.counts)) + (f" = {self.peers}" if self.rounds > 1 else "")


Reached = dict[str, list[tuple[float, str]]]  # of each node: when which peer is there, in the order of time


def reach(plan: Plan, size: float, link: LinkSettings) -> Reached:
    """When each node has each peer's parcel of ``size`` bytes, at the earliest."""
    found: Reached = {name: [] for name in plan.nodes}
    ground, load = set(plan.stations), Load((round(size), round(size)), link.chunk)
    for (a, b), windows in plan.pairs().items():
        if a in ground or b in ground:
            continue
        when = _across(windows, load, link)
        if when is not None:
            found[a].append((when, b))
            found[b].append((when, a))
    return {name: sorted(rows) for name, rows in found.items()}


def _across(windows: Sequence[Contact], load: Load, link: LinkSettings) -> float | None:
    """The second at which a load is through, chunk by chunk, or None."""
    done = 0
    for contact in windows:
        after = load.after(done if link.resume else 0, link.room(contact))
        if after == load.chunks:
            return link.until(contact, load.bytes(after) - load.bytes(done if link.resume else 0))
        done = after
    return None


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def _codec(name: str, size: float, got: Reached, asked: Asked, fits: float) -> dict[str, Any]:
    """One row of the table; ``fits``: the share of windows in which a whole exchange has room."""
    counts = [len(rows) for rows in got.values()]
    times = [rows[asked.buffer - 1][0] / HOUR for rows in got.values() if len(rows) >= asked.buffer]
    return {
        "codec": name,
        "bytes": round(size),
        "windows_that_fit": round(fits, 4),
        "peers": _spread(counts),
        "nodes_to_buffer": len(times),
        "hours_to_buffer": round(statistics.median(times), 3) if times else None,
        "nodes_all_rounds": sum(asked.rounds_of(count) == asked.rounds for count in counts),
        "most_rounds": max(asked.rounds_of(count) for count in counts),
        "floor": sorted(counts)[int((1 - MOST_NODES) * len(counts))],  # so many peers have 90 % of the nodes
    }


def feasibility(plan: Plan, sizes: Mapping[str, float], asked: Asked, link: LinkSettings) -> dict[str, Any]:
    """All facts of the report, as plain values; ``said`` are its sentences."""
    if len(plan.nodes) < 2:
        raise BadInput("the plan has one node; an exchange needs two")
    met = {name: _first_met(plan, name) for name in plan.nodes}
    got = {name: reach(plan, size, link) for name, size in sizes.items()}
    rooms = [link.room(contact) for contact in plan.between_nodes()]
    fits = {name: sum(room >= 2 * size for room in rooms) / max(1, len(rooms)) for name, size in sizes.items()}
    rows = [_codec(name, size, got[name], asked, fits[name]) for name, size in sizes.items()]
    news = [when for times in met.values() for when in times]
    facts: dict[str, Any] = {
        "plan": plan.digest,
        "nodes": len(plan.nodes),
        "stations": len(plan.stations),
        "hours": plan.hours,
        "contacts": len(plan.between_nodes()),
        "alone": list(plan.alone()),
        "met": _spread([len(times) for times in met.values()]),
        "last_new_hour": max(news) / HOUR if news else None,
        "asked": {"buffer": asked.buffer, "rounds": asked.rounds, "top": asked.top, "peers": asked.peers},
        "codecs": rows,
        "over_time": _over_time(plan, got),
        "per_node": {
            name: {
                "met": len(met[name]),
                "reached": {codec: len(got[codec][name]) for codec in sizes},
                "hours_to_buffer": {codec: _hour(got[codec][name], asked.buffer) for codec in sizes},
            }
            for name in plan.nodes
        },
    }
    facts["suggestion"] = _suggest(rows, asked)
    return {**facts, "said": _said(facts, asked)}


def _hour(rows: Sequence[tuple[float, str]], count: int) -> float | None:
    return round(rows[count - 1][0] / HOUR, 3) if len(rows) >= count else None


def _first_met(plan: Plan, name: str) -> list[float]:
    """When a node first meets each of its peers."""
    ground, first = set(plan.stations), dict[str, float]()
    for contact in plan.of(name):
        if contact.other(name) not in ground:
            first.setdefault(contact.other(name), contact.start)
    return sorted(first.values())


def _over_time(plan: Plan, got: Mapping[str, Reached], points: int = 49) -> dict[str, Any]:
    """Peers reached against hours: the least, the median and the most over nodes, per codec."""
    hours = [plan.hours * k / (points - 1) for k in range(points)]
    curves: dict[str, Any] = {"hours": hours}
    for codec, reached in got.items():
        times = [[when for when, _ in rows] for rows in reached.values()]
        counts = [[bisect.bisect_right(row, hour * HOUR) for row in times] for hour in hours]
        curves[codec] = {key: [_spread(row)[key] for row in counts] for key in ("least", "median", "most")}
    return curves


def _suggest(rows: Sequence[Mapping[str, Any]], asked: Asked) -> dict[str, Any] | None:
    """The schedule that 90 % of the nodes can follow, in the best codec that brings as many peers as any: the asked one
    where it fits, else one of its shape on as many peers as there are."""
    for row in rows:
        if row["floor"] >= asked.peers:
            return {"codec": row["codec"], "buffer": asked.buffer, "rounds": asked.rounds, "top": asked.top}
    most = max(row["floor"] for row in rows)
    if most == 0:
        return None
    codec = next(row["codec"] for row in rows if row["floor"] == most)
    if most < 2 * asked.rounds or asked.rounds == 1:
        return {"codec": codec, "buffer": most, "rounds": 1, "top": min(asked.top, most)}
    buffer = max(2, round(most * asked.buffer / asked.peers))
    later = (most - buffer) // (asked.rounds - 1)
    return {"codec": codec, "buffer": buffer, "rounds": asked.rounds, "top": max(1, buffer + 1 - later)}


def _said(facts: Mapping[str, Any], asked: Asked) -> list[str]:
    """The report in plain words."""
    rows, met, hours = facts["codecs"], facts["met"], facts["hours"]
    said = [
        f"{facts['nodes']} nodes, {facts['contacts']} contacts in {hours:g} h; a node meets {_range(met)} different"
        f" peers of {facts['nodes'] - 1}."
    ]
    last = facts["last_new_hour"]
    if last is not None and last <= hours / 2 and met["most"] < facts["nodes"] - 1:
        few = "few " if met["most"] <= facts["nodes"] / 4 else ""
        said.append(
            f"After hour {last:.1f} nobody meets anyone new: every node has the same {few}peers for ever, and waiting"
            " longer brings no more."
        )
    if facts["alone"]:
        names = facts["alone"]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        said.append(f"{len(names)} never meet anybody and keep their own model: {', '.join(names[:5])}{more}.")
    able = [row for row in rows if row["floor"] >= asked.peers]
    if able:
        said.append(f"The schedule {asked} works for 90 % of the nodes with {able[0]['codec']}.")
    elif met["most"] < asked.peers:
        said.append(
            f"The schedule {asked} is impossible here, in any codec: it needs {asked.peers} different peers per node,"
            f" and no node meets more than {met['most']:g}."
        )
    else:
        best = max(rows, key=lambda row: row["nodes_all_rounds"])
        said.append(
            f"The schedule {asked} works for {best['nodes_all_rounds']} of {facts['nodes']} nodes at the most (with"
            f" {best['codec']})."
        )
    return [*said, _advice(facts["suggestion"], able, rows)]


def _range(spread: Mapping[str, float]) -> str:
    if spread["least"] == spread["most"]:
        return f"{spread['least']:g}"
    return f"{spread['least']:g} to {spread['most']:g} (median {spread['median']:g})"


def _advice(found: Mapping[str, Any] | None, able: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> str:
    if found is None:
        if any(row["peers"]["most"] for row in rows):
            return "More than a tenth of the nodes get nobody's model; no schedule serves all. Look at longer ranges."
        return "No parcel gets across anywhere: send less (a head on a shared backbone), or faster, or meet for longer."
    words = f"--set orient.buffer={found['buffer']} --set orient.rounds={found['rounds']}"
    rounds = f"E = {found['rounds']} round{'s' if found['rounds'] > 1 else ''}"
    start = "Go ahead" if able else "What 90 % of the nodes can do"
    return (
        f"{start}: Q = {found['buffer']}, {rounds}, K = {found['top']}, codec {found['codec']} ({words} --set"
        f" orient.top={found['top']})."
    )
