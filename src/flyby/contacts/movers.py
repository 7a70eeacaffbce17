"""Contacts of whatever moves: positions over time, and who comes within range of whom.

Positions are SUMO's floating car data (``sumo --fcd-output``) or a CSV table with the columns time,id,x,y[,z], in
metres. Between two reports a mover goes straight, so that a squared distance is a quadratic in time, and its roots are
the edges of windows; before its first report, after its last and in long silences it is not there.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flyby.contacts.edges import Floats, Ints, Windows
from flyby.contacts.plan import EPOCH, Plan
from flyby.contacts.safe_xml import elements
from flyby.contacts.windows import near_pairs
from flyby.errors import BadInput
from flyby.names import as_name, printable

Report = tuple[str, str, float, tuple[float, float, float]]  # where it stands, who, when, at which place
MOST_TIMES = 200_000


def read_movers(path: Path | str, reach: float, rate: float, gap: float = 60.0, step: float | None = None) -> Plan:
    """A plan of all contacts nearer than ``reach`` metres. A mover silent for longer than ``gap`` seconds is away;
    ``step`` looks at positions only so often."""
    path = Path(path)
    for what, value in (("range", reach), ("gap", gap), ("step", 1.0 if step is None else step)):
        if not (math.isfinite(value) and value > 0):
            raise BadInput(f"a {what} of {value} is nothing; give a positive number")
    reports = _fcd(path) if _is_xml(path) else _table(path)
    names, series = _series(reports, path)
    begin = min(float(times[0]) for times, _ in series)
    seconds = max(float(times[-1]) for times, _ in series) - begin
    if seconds <= 0:
        raise BadInput(f"{path} has reports of one moment only; contacts need time to pass")
    union = np.unique(np.concatenate([times for times, _ in series])) - begin
    grid = union if step is None else np.append(np.arange(0.0, seconds, step), seconds)
    if len(grid) > MOST_TIMES:
        raise BadInput(f"{path} has {len(grid)} different times; look less often, with --step 1 or more")
    found = _contacts([(times - begin, places) for times, places in series], grid, reach, gap)
    return found.kept(0.0, None, len(names), seconds).plan(names, (), rate, EPOCH, seconds)


def _is_xml(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})") from None


def _fcd(path: Path) -> Iterator[Report]:
    now, inside = "", False
    for line, tag, given, text in elements(path):
        if tag == "timestep":
            now, inside = given.get("time", ""), text is None
        elif inside and text is None and tag in ("vehicle", "person", "container"):
            yield _report(f"{path}, line {line}", {"time": now, **given})


def _table(path: Path) -> Iterator[Report]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            for row in reader:
                yield _report(f"{path}, line {reader.line_num}", row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} is not a readable CSV file ({error})") from None


def _report(where: str, row: dict[str, str]) -> Report:
    try:
        numbers = [float(row[key]) for key in ("time", "x", "y")] + [float(row.get("z") or 0.0)]
        if not all(map(math.isfinite, numbers)) or not row["id"]:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise BadInput(f"{where}: a report needs id, and finite numbers for time, x and y (and z)") from None
    return where, row["id"], numbers[0], (numbers[1], numbers[2], numbers[3])


def _series(reports: Iterator[Report], path: Path) -> tuple[tuple[str, ...], list[tuple[Floats, Floats]]]:
    """Each mover's times and places, its reports put in order."""
    kept: dict[str, tuple[array[float], array[float]]] = {}
    for _, who, moment, place in reports:
        times, places = kept.setdefault(who, (array("d"), array("d")))
        times.append(moment)
        places.extend(place)
    names = tuple(as_name(who) for who in kept)
    if len(names) < 2:
        raise BadInput(f"{path} has {len(names)} movers; contacts need two")
    made = []
    for who, (stamps, spots) in kept.items():
        when, where = np.array(stamps), np.array(spots).reshape(-1, 3)
        order = np.argsort(when, kind="stable")
        if (np.diff(when[order]) == 0).any():
            raise BadInput(f"{path} has {printable(who)} at two places at one time; keep one report")
        made.append((when[order], where[order]))
    return names, made


def _contacts(series: list[tuple[Floats, Floats]], grid: Floats, reach: float, gap: float) -> Windows:
    """Windows of all pairs, out of pieces from one time of the grid to the next."""
    block = max(1, 2_000_000 // len(series))
    one, other, start, end = ([] for _ in range(4))  # type: tuple[list[Ints], list[Ints], list[Floats], list[Floats]]
    for first in range(0, len(grid) - 1, block):
        times = grid[first : first + block + 1]
        middles = (times[:-1] + times[1:]) / 2
        places, between = (np.stack([_at(*row, at, gap) for row in series]) for at in (times, middles))
        for k in range(len(times) - 1):
            away = np.isnan(between[:, k, :1])  # reports at both ends, and a silence between them
            i, j, low, high = _pieces(np.where(away, np.nan, places[:, k]), places[:, k + 1], reach)
            h = times[k + 1] - times[k]
            one.append(i)
            other.append(j)
            start.append(np.where(low <= 0, times[k], times[k] + low * h))
            end.append(np.where(high >= 1, times[k + 1], times[k] + high * h))
    return _merged(*(np.concatenate(column) for column in (one, other, start, end)))  # type: ignore[arg-type]


def _at(when: Floats, where: Floats, times: Floats, gap: float) -> Floats:
    """Places at ``times``, nan where the mover is away."""
    after = np.clip(np.searchsorted(when, times, side="left"), 0, len(when) - 1)
    before = np.clip(np.searchsorted(when, times, side="right") - 1, 0, len(when) - 1)
    away = (times < when[0]) | (times > when[-1]) | (when[after] - when[before] > gap)
    found = np.column_stack([np.interp(times, when, where[:, axis]) for axis in range(3)])
    found[away] = np.nan
    return found


def _pieces(x: Floats, y: Floats, reach: float) -> tuple[Ints, Ints, Floats, Floats]:
    """Pairs in range while all go straight from x to y, and from which part of the way to which."""
    ways = np.sqrt(((y - x) ** 2).sum(1))
    i, j = near_pairs(((x + y) / 2).T, reach + float(np.nanmax(ways, initial=0.0)) + 1e-6)
    d, w = x[i] - x[j], (y - x)[i] - (y - x)[j]
    a, b, c = (w * w).sum(1), (d * w).sum(1), (d * d).sum(1) - reach**2
    root = b * b - a * c
    still = a < 1e-18
    with np.errstate(invalid="ignore", divide="ignore"):
        half = np.sqrt(np.where(root >= 0, root, np.nan))
        low, high = np.where(still, 0.0, (-b - half) / a), np.where(still, 1.0, (-b + half) / a)
        low, high = np.maximum(low, 0.0), np.minimum(high, 1.0)
        good = np.where(still, c <= 0, high >= low)
    return i[good], j[good], low[good], high[good]


def _merged(one: Ints, other: Ints, start: Floats, end: Floats) -> Windows:
    """Pieces that touch are one window."""
    order = np.lexsort((start, other, one))
    one, other, start, end = one[order], other[order], start[order], end[order]
    new = np.ones(len(one), bool)
    new[1:] = (one[1:] != one[:-1]) | (other[1:] != other[:-1]) | (start[1:] > end[:-1] + 1e-9)
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(one)) - 1 if len(one) else first
    return Windows(one[first], other[first], start[first], end[last])
