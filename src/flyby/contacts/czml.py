"""CZML: a plan, where everybody is, and who exchanges when, for Cesium and what reads its files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from flyby.contacts.journal import Journal
from flyby.contacts.plan import Plan
from flyby.contacts.tracks import Tracks

SATELLITE, STATION, LINE = [0, 114, 178, 255], [213, 94, 0, 255], [0, 158, 115, 255]
FASTER = 600  # the clock's first speed: a day in two and a half minutes


def czml(plan: Plan, tracks: Tracks, journal: Journal | None = None) -> str:
    """One document: a packet per participant, and a line for every window (or exchange, where a journal names them)."""
    begin, end = _moment(plan.epoch, 0), _moment(plan.epoch, plan.seconds)
    clock = {"interval": f"{begin}/{end}", "currentTime": begin, "multiplier": FASTER}
    packets: list[dict[str, Any]] = [{"id": "document", "name": "flyby contacts", "version": "1.0", "clock": clock}]
    ground = set(plan.stations)
    for i, name in enumerate(tracks.names):
        if name in ground or name in plan.nodes:
            packets.append(_packet(plan, tracks, i, name in ground))
    drawn = set(tracks.names)
    for a, b, spans in _lines(plan, journal):
        if a in drawn and b in drawn:
            packets.append(_line(plan, a, b, spans))
    return json.dumps(packets, separators=(",", ":"), allow_nan=False)


def _moment(epoch: str, seconds: float) -> str:
    when = datetime.fromisoformat(epoch.rstrip("Z")) + timedelta(seconds=seconds)
    return when.isoformat(timespec="milliseconds") + "Z"


def _packet(plan: Plan, tracks: Tracks, place: int, station: bool) -> dict[str, Any]:
    known = np.isfinite(tracks.places[place]).all(-1)
    metres = (tracks.places[place][known] * 1000).round().tolist()
    moments = tracks.seconds[known].tolist()
    cartesian = metres[0] if station else [n for t, xyz in zip(moments, metres, strict=True) for n in (t, *xyz)]
    position: dict[str, Any] = {"referenceFrame": "FIXED", "cartesian": cartesian}
    if not station:
        position |= {"epoch": plan.epoch, "interpolationAlgorithm": "LAGRANGE", "interpolationDegree": 5}
    name, colour = tracks.names[place], {"rgba": STATION if station else SATELLITE}
    return {"id": name, "name": name, "position": position, "point": {"pixelSize": 7, "color": colour}}


def _lines(plan: Plan, journal: Journal | None) -> Iterator[tuple[str, str, list[tuple[float, float]]]]:
    if journal is None:
        for (a, b), windows in plan.pairs().items():
            yield a, b, [(one.start, one.end) for one in windows]
        return
    for e in journal.events:
        if e["event"] == "exchange":
            yield e["a"], e["b"], [(e["begun"], e["at"])]
        elif e["event"] == "deliver":
            yield e["node"], e["station"], [(max(0.0, e["at"] - 60), e["at"])]


def _line(plan: Plan, a: str, b: str, spans: Iterable[tuple[float, float]]) -> dict[str, Any]:
    shown = [f"{_moment(plan.epoch, start)}/{_moment(plan.epoch, end)}" for start, end in spans]
    words = {"width": 2, "arcType": "NONE", "material": {"solidColor": {"color": {"rgba": LINE}}}}
    ends = {"references": [f"{a}#position", f"{b}#position"]}
    return {"id": f"{a} and {b}", "availability": shown, "polyline": {**words, "positions": ends}}
