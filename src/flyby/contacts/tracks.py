"""Where everybody is, over a plan: positions in the frame that turns with the Earth, for pictures. A CSV file of them
may stand beside a plan (``seconds,name,x,y,z`` in km)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flyby.contacts.ground import Station, gmst, station_states
from flyby.contacts.orbits import Floats, Orbits
from flyby.contacts.plan import write_lines
from flyby.errors import BadInput
from flyby.names import printable

COLUMNS = ("seconds", "name", "x", "y", "z")
STEP = 180.0  # seconds between two positions: a low orbit moves by 11 degrees, which a spline follows to the kilometre


@dataclass(frozen=True)
class Tracks:
    """``places[i, t]`` is where ``names[i]`` is at ``seconds[t]``, in km; nan where nobody knows."""

    names: tuple[str, ...]
    seconds: Floats
    places: Floats

    @classmethod
    def of(cls, orbits: Orbits, seconds: float, step: float = STEP, stations: Sequence[Station] = ()) -> Tracks:
        """Satellites, and stations beside them, every ``step`` seconds; the last moment may be later than asked."""
        moments = np.arange(0, seconds + step, step)
        places, _ = orbits.states(moments)
        names = orbits.names
        if stations:
            ground = np.moveaxis(station_states(stations, orbits.epoch, moments)[0], 0, -1)
            places, names = np.concatenate([places, ground]), (*names, *(one.name for one in stations))
        turn = gmst(orbits.epoch, moments)
        cos, sin = np.cos(turn), np.sin(turn)
        x, y = places[..., 0], places[..., 1]
        return cls(names, moments, np.stack([cos * x + sin * y, cos * y - sin * x, places[..., 2]], axis=-1))

    def write(self, path: Path | str) -> None:
        rows = (
            f"{second:g},{name},{x:.1f},{y:.1f},{z:.1f}\n"
            for t, second in enumerate(self.seconds)
            for name, (x, y, z) in zip(self.names, self.places[:, t].tolist(), strict=True)
        )
        write_lines(path, (line for group in ([",".join(COLUMNS) + "\n"], rows) for line in group))

    @classmethod
    def read(cls, path: Path | str) -> Tracks:
        try:
            with open(path, encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file, skipinitialspace=True))
            found = [(float(r["seconds"]), str(r["name"]), tuple(float(r[c]) for c in "xyz")) for r in rows]
        except FileNotFoundError:
            raise BadInput(f"{path} does not exist") from None
        except (OSError, UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError) as error:
            said = printable(f"{type(error).__name__}: {error}")
            raise BadInput(f"{path} holds no positions ({said}); its first line is {','.join(COLUMNS)}") from None
        names = tuple(dict.fromkeys(name for _, name, _ in found))
        seconds = np.unique([second for second, _, _ in found])
        if len(seconds) < 2 or not np.allclose(np.diff(seconds), seconds[1] - seconds[0]):
            raise BadInput(f"{path} needs positions at even steps of time, at least two of them")
        places = np.full((len(names), len(seconds), 3), np.nan)
        who, when = {name: i for i, name in enumerate(names)}, {float(s): t for t, s in enumerate(seconds)}
        for second, name, place in found:
            places[who[name], when[second]] = place
        return cls(names, seconds, places)
