"""Satellites as SGP4 moves them, and how old their element sets may be.

Hoots and Roehrich, Spacetrack Report No. 3 (1980); Vallado, Crawford, Hujsak and Kelso, Revisiting Spacetrack Report
No. 3 (2006). Positions are in km, velocities in km/s, in the frame TEME, which turns with nothing on the ground.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyby.contacts.plan import utc
from flyby.errors import BadInput
from flyby.names import as_name, printable

log = logging.getLogger(__name__)
Floats = NDArray[np.float64]

DAY = 86_400.0
EARTH, MU = 6378.135, 398_600.8  # km and km^3/s^2 of WGS 72, on which element sets are made
WARN_DAYS, MOST_DAYS = 7.0, 30.0  # ages of an element set: errors of kilometres, and of no use for windows
_DAY_0 = 2_433_281.5  # the Julian day that sgp4init counts from


def sgp4() -> Any:
    """The module sgp4.api, where the extra is there."""
    try:
        import sgp4.api
    except ImportError:
        raise BadInput("orbits need the extra 'space'; give: pip install 'flyby[space]'") from None
    return sgp4.api


def julian(epoch: str) -> tuple[float, float]:
    """A time in UTC as a Julian day and the part of the day after it."""
    when = datetime.fromisoformat(utc(epoch).rstrip("Z"))
    midnight = when.replace(hour=0, minute=0, second=0, microsecond=0)
    return when.toordinal() + 1_721_424.5, (when - midnight) / timedelta(days=1)


def calendar(days: float) -> str:
    """The whole second (UTC) before a Julian day with its part."""
    return utc((datetime(2000, 1, 1) + timedelta(days=days - 2_451_544.5)).isoformat(timespec="seconds"))


@dataclass(frozen=True)
class Elements:
    """The mean elements of one orbit, as SGP4 takes them; angles in degrees."""

    epoch: str
    inclination: float
    node: float  # right ascension of the ascending node
    eccentricity: float
    perigee: float  # argument of
    anomaly: float  # mean
    motion: float  # revolutions per day
    drag: float = 0.0  # B*

    def record(self) -> Any:
        """The Satrec of these elements; its catalogue number is 0, as real ones outgrow what a Satrec takes."""
        api = sgp4()
        day, part = julian(self.epoch)
        angles = np.radians([self.perigee, self.inclination, self.anomaly, self.node]) % (2 * np.pi)
        made = api.Satrec()
        motion = self.motion * 2 * np.pi / 1440
        perigee, inclination, anomaly, node = angles.tolist()
        shape = (self.eccentricity, perigee, inclination, anomaly, motion, node)
        made.sgp4init(api.WGS72, "i", 0, day - _DAY_0 + part, self.drag, 0.0, 0.0, *shape)
        return made


def circular(epoch: str, altitude: float, inclination: float, node: float, anomaly: float) -> Elements:
    """A circle at ``altitude`` km above the equator's radius."""
    radius = EARTH + altitude
    motion = DAY / (2 * np.pi) * np.sqrt(MU / radius**3)
    return Elements(epoch, inclination, node % 360, 0.0, 0.0, anomaly % 360, float(motion))


@dataclass(frozen=True)
class Orbits:
    """Satellites with names of their own, and the time that second 0 is."""

    names: tuple[str, ...]
    records: tuple[Any, ...]
    epoch: str

    @property
    def lowest(self) -> float:
        """Km from the Earth's middle that no satellite goes below by much: SGP4 moves it by some 10 km more."""
        return float(min(record.a * (1 - record.ecco) for record in self.records)) * EARTH - 50

    def states(self, seconds: Floats) -> tuple[Floats, Floats]:
        """Positions and velocities, each ``[satellite, time, 3]``; nan where SGP4 has no answer (decayed)."""
        day, part = julian(self.epoch)
        parts = part + np.asarray(seconds, dtype=np.float64) / DAY
        errors, x, v = sgp4().SatrecArray(self.records).sgp4(np.full(len(parts), day), parts)
        bad = errors > 0
        x[bad], v[bad] = np.nan, np.nan
        return x, v


def unique(names: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Names that the house takes, from (name, catalogue number): where two share a name, the number follows it."""
    rows = [(as_name(name.strip()), number) for name, number in names]
    counts: dict[str, int] = {}
    seen: set[str] = set()
    for name, number in rows:
        if number in seen:
            raise BadInput(f"two element sets have the number {printable(number)}; keep the newer one")
        seen.add(number)
        counts[name] = counts.get(name, 0) + 1
    made = tuple(f"{name}-{number}" if counts[name] > 1 else name for name, number in rows)
    if len(set(made)) < len(made):
        twice = next(name for name in made if made.count(name) > 1)
        raise BadInput(f"two satellites are called {twice!r}; give each a name of its own")
    return made


def orbits(names: Iterable[tuple[str, str]], records: Iterable[Any], start: str | None, old: bool = False) -> Orbits:
    """Named satellites from ``start`` on (by default from their newest epoch), unless their element sets are too old
    for it."""
    called, held = unique(names), tuple(records)
    if not held:
        raise BadInput("there is no element set in the file; give OMM (CSV, JSON or XML) or TLE")
    epochs = np.array([record.jdsatepoch + record.jdsatepochF for record in held])
    begin = calendar(float(epochs.max())) if start is None else utc(start)
    day, part = julian(begin)
    ages = np.abs(day + part - epochs)
    worst = int(ages.argmax())
    aged = f"{called[worst]}'s element set is {ages[worst]:.0f} days from the start {begin}"
    if ages[worst] > MOST_DAYS and not old:
        raise BadInput(f"{aged}, and {MOST_DAYS:.0f} are the most; get newer ones, or allow it with --old")
    if ages[worst] > WARN_DAYS:
        log.warning("%s; %d are older than %.0f: windows may be minutes off", aged, sum(ages > WARN_DAYS), WARN_DAYS)
    return Orbits(called, held, begin)
