"""Ground stations: where they are on the turning Earth, and how high a satellite must stand for them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flyby.contacts.orbits import DAY, Floats, julian
from flyby.errors import BadInput
from flyby.names import check_name, printable

AXIS, FLATNESS = 6378.137, 1 / 298.257223563  # WGS 84: km, and the ellipsoid's flattening
TURN = 7.292115146706979e-5  # radians per second of the Earth


@dataclass(frozen=True)
class Station:
    """A place on the ground: degrees, metres above the ellipsoid, and the least elevation in degrees."""

    name: str
    latitude: float
    longitude: float
    height: float = 0.0
    mask: float = 10.0

    def __post_init__(self) -> None:
        check_name(self.name)
        for what, value, low, high in (
            ("latitude", self.latitude, -90, 90),
            ("longitude", self.longitude, -180, 360),
            ("height", self.height, -500, 10_000),
            ("elevation mask", self.mask, 0, 89),
        ):
            if not low <= value <= high:
                raise BadInput(f"station {self.name} has a {what} of {value}, outside {low} to {high}")


def gmst(epoch: str, seconds: Floats) -> Floats:
    """Greenwich mean sidereal time in radians (IAU 1982), UT1 taken as UTC."""
    day, part = julian(epoch)
    t = (day - 2_451_545.0 + part + np.asarray(seconds) / DAY) / 36_525
    said = 67_310.54841 + t * (876_600 * 3600 + 8_640_184.812866 + t * (0.093104 - 6.2e-6 * t))
    return np.asarray(said % DAY * (2 * np.pi / DAY))


def station_states(stations: Sequence[Station], epoch: str, seconds: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Positions (km), velocities, the ellipsoid's normals and how these turn, each ``[3, station, time]``, in the frame
    of the satellites."""
    lat, lon = np.radians([s.latitude for s in stations])[:, None], np.radians([s.longitude for s in stations])[:, None]
    height = np.array([s.height for s in stations])[:, None] / 1000
    angle = gmst(epoch, seconds) + lon
    cos, sin = np.cos(angle), np.sin(angle)
    squared = FLATNESS * (2 - FLATNESS)
    curve = AXIS / np.sqrt(1 - squared * np.sin(lat) ** 2)
    flat, up = (curve + height) * np.cos(lat), (curve * (1 - squared) + height) * np.sin(lat)
    place = np.stack([flat * cos, flat * sin, np.broadcast_to(up, cos.shape)])
    normal = np.stack([np.cos(lat) * cos, np.cos(lat) * sin, np.broadcast_to(np.sin(lat), cos.shape)])

    def turned(a: Floats) -> Floats:
        return TURN * np.stack([-a[1], a[0], np.zeros_like(a[2])])

    return place, turned(place), normal, turned(normal)


def read_stations(path: Path | str, mask: float = 10.0) -> tuple[Station, ...]:
    """Stations of a CSV file with the columns name, latitude, longitude and, where wanted, height (m) and mask."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} is not a readable CSV file ({error})") from None
    made = []
    for number, row in enumerate(rows, start=2):
        try:
            place = float(row["latitude"]), float(row["longitude"])
            made.append(Station(row["name"], *place, float(row.get("height") or 0), float(row.get("mask") or mask)))
        except (KeyError, TypeError, ValueError) as error:
            said = printable(str(error))
            raise BadInput(f"{path}, line {number}: needs name,latitude,longitude[,height][,mask] ({said})") from None
    if not made:
        raise BadInput(f"{path} names no station; its first line is name,latitude,longitude")
    return tuple(made)
