"""Generated constellations: Walker's delta and star patterns, and random shells.

Walker, Satellite constellations, Journal of the British Interplanetary Society 37 (1984): T satellites in P planes
with phasing F; plane p's node is at p * 360 / P degrees (star: 180 / P), and satellite s of it at s * 360 / (T / P) +
p * F * 360 / T degrees.
"""

from __future__ import annotations

import numpy as np

from flyby.contacts.orbits import Elements, Orbits, circular
from flyby.contacts.plan import EPOCH, utc
from flyby.errors import BadInput
from flyby.rng import legacy_numpy

LOWEST, HIGHEST = 160.0, 100_000.0  # km: below, SGP4's circles soon touch the air


def _named(elements: list[Elements], epoch: str) -> Orbits:
    width = len(str(len(elements) - 1))
    names = tuple(f"sat-{i:0{width}}" for i in range(len(elements)))
    return Orbits(names, tuple(one.record() for one in elements), utc(epoch))


def _check(satellites: int, altitude: float, inclination: float) -> None:
    if not 2 <= satellites <= 100_000:
        raise BadInput(f"{satellites} satellites make no constellation; give 2 to 100000")
    if not LOWEST <= altitude <= HIGHEST:
        raise BadInput(f"an altitude of {altitude} km is outside {LOWEST:.0f} to {HIGHEST:.0f}")
    if not 0 <= inclination <= 180:
        raise BadInput(f"an inclination of {inclination} degrees is outside 0 to 180")


def walker(
    satellites: int,
    planes: int,
    phasing: int,
    altitude: float,
    inclination: float,
    star: bool = False,
    epoch: str = EPOCH,
) -> Orbits:
    """Walker's pattern ``inclination: satellites/planes/phasing`` at ``altitude`` km."""
    _check(satellites, altitude, inclination)
    if planes < 1 or satellites % planes:
        raise BadInput(f"{satellites} satellites cannot be shared evenly by {planes} planes; change one of the two")
    if not 0 <= phasing < planes:
        raise BadInput(f"a phasing of {phasing} is outside 0 to {planes - 1} (planes - 1)")
    each, spread = satellites // planes, 180.0 if star else 360.0
    return _named(
        [
            circular(epoch, altitude, inclination, p * spread / planes, s * 360 / each + p * phasing * 360 / satellites)
            for p in range(planes)
            for s in range(each)
        ],
        epoch,
    )


def random_shell(
    satellites: int, altitude: tuple[float, float], inclination: tuple[float, float], seed: int, epoch: str = EPOCH
) -> Orbits:
    """Circles with everything drawn: altitude and inclination between two numbers each, node and place on the circle
    anywhere."""
    for height, angle in zip(altitude, inclination, strict=True):
        _check(satellites, height, angle)
    if altitude[0] > altitude[1] or inclination[0] > inclination[1]:
        raise BadInput("give the lower altitude and inclination first, as 500:600 and 50:98")
    rng = legacy_numpy(seed, "shell", satellites)
    lows, highs = np.array([altitude[0], inclination[0], 0, 0]), np.array([altitude[1], inclination[1], 360, 360])
    drawn = lows + (highs - lows) * rng.random_sample((satellites, 4))
    return _named([circular(epoch, *row) for row in drawn.tolist()], epoch)
