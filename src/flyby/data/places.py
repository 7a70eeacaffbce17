"""Where on Earth images were taken: coordinates from file names, regions of a map, and blocks of ground.

Tiles that lie side by side show the same ground. Where some of them are trained on and others judge, accuracy says how
well the ground was remembered; so a site's region, and the blocks it is judged on, are cut from the map.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.float64]  # [N, 2]: longitude and latitude in degrees
Indices = npt.NDArray[np.int64]
Random = np.random.RandomState

EARTH_KM = 6371.0088
BLOCKS_KM = tuple(16 / 2**halved for halved in range(12))
# Two numbers with decimals, longitude first: -73.99,45.12.jpg or -95.06_29.82.jpeg.
NAMED = re.compile(r"(-?\d{1,3}\.\d+)[,_](-?\d{1,2}\.\d+)")


def from_names(names: Sequence[str | None]) -> Places | None:
    """The places that file names tell; None where not all of them do."""
    found = np.empty((len(names), 2))
    for row, name in enumerate(names):
        told = NAMED.fullmatch((name or "").replace("\\", "/").rsplit("/", 1)[-1].rpartition(".")[0])
        if told is None:
            return None
        found[row] = float(told[1]), float(told[2])
    return found if len(found) and bool((np.abs(found) <= (180, 90)).all()) else None


def on_map(places: Places) -> Places:
    """Kilometres east and north on a flat map whose scale is right at the places' middle latitude. Longitudes count
    from their middle, so that a map may lie across the date line."""
    longitude, latitude = places.T
    around = np.angle(np.exp(1j * np.radians(longitude)).mean(), deg=True) if len(places) else 0.0
    east = (longitude - around + 180) % 360 - 180
    middle = np.radians((latitude.min() + latitude.max()) / 2) if len(places) else 0.0
    degree = np.radians(1) * EARTH_KM
    return np.column_stack([east * degree * np.cos(middle), latitude * degree])


def in_space(places: Places) -> Places:
    """Points of a ball in kilometres: straight lines between them are as good as distances, for neighbours."""
    longitude, latitude = np.radians(places).T
    flat = np.cos(latitude)
    return EARTH_KM * np.column_stack([flat * np.cos(longitude), flat * np.sin(longitude), np.sin(latitude)])


def nearest(places: Places, others: Places, block: int = 512) -> tuple[Places, Indices]:
    """For each place the distance in km to the nearest of the others (infinite where there are none), and which."""
    here, there = in_space(places), in_space(others)
    far, which = np.full(len(here), np.inf), np.zeros(len(here), dtype=np.int64)
    if len(there):
        for start in range(0, len(here), block):
            piece = here[start : start + block]
            gaps = ((piece[:, None] - there[None]) ** 2).sum(2) if len(there) < 64 else _gaps(piece, there)
            which[start : start + block] = gaps.argmin(1)
        far = np.sqrt(((here - there[which]) ** 2).sum(1))
    return far, which


def _gaps(a: Places, b: Places) -> Places:
    """Squared distances without a table of differences; good to some metres, which is enough to find who is nearest."""
    middle = b.mean(0)
    a, b = a - middle, b - middle
    return np.asarray((a * a).sum(1)[:, None] - 2 * a @ b.T + (b * b).sum(1))


def regions(places: Places, count: int, rng: Random) -> list[Indices]:
    """The map cut into ``count`` regions of as even a number of images as can be: in two across its longer side, and
    each part again. The cuts run along axes that the seed turns. Images of exactly one place stay together."""
    turn, (east, north) = rng.uniform(0, np.pi), on_map(places).T
    # Written out: a matrix product may round equal places differently.
    turned = np.column_stack([np.cos(turn) * east + np.sin(turn) * north, np.cos(turn) * north - np.sin(turn) * east])
    return list(_bisect(turned, np.arange(len(places)), count))


def _bisect(points: Places, rows: Indices, count: int) -> Iterator[Indices]:
    if count == 1:
        yield np.sort(rows)
        return
    axis = int(np.argmax(np.ptp(points[rows], axis=0))) if len(rows) else 0
    rows = rows[np.lexsort((rows, points[rows, 1 - axis], points[rows, axis]))]
    first = count // 2
    cut = len(rows) * first // count
    # Between two different places, as near to the wanted cut as there is such a gap.
    gaps = np.flatnonzero((points[rows[1:]] != points[rows[:-1]]).any(1)) + 1
    if len(gaps):
        cut = int(gaps[np.argmin(np.abs(gaps - cut))])
    yield from _bisect(points, rows[:cut], first)
    yield from _bisect(points, rows[cut:], count - first)


def parts_by_block(
    places: Places, labels: Indices, shares: Sequence[float], km: float | None, rng: Random
) -> tuple[Indices, float]:
    """Which part each image belongs to: 0 for the rest, 1, 2 .. for parts that hold about these ``shares`` of every
    class; a block of ground goes into one part, whole. Without ``km``: the largest blocks of :data:`BLOCKS_KM` with
    which every part gets at least half of what it should of every class. Also the size of the blocks."""
    state = rng.get_state()
    for size in BLOCKS_KM if km is None else (km,):
        rng.set_state(state)
        found, missing = _dealt(blocks(places, size, rng), labels, shares, rng)
        if (missing <= 0.5).all():
            break
    return found, size


def _dealt(block: Indices, labels: Indices, shares: Sequence[float], rng: Random) -> tuple[Indices, Places]:
    """Blocks in random order, each to the part that it brings nearest to its shares of the classes, or to the rest; and
    what share of its images a part then misses of each class (classes with fewer than two images for it do not
    count)."""
    held = np.zeros((int(block.max()) + 1, int(labels.max()) + 1))
    np.add.at(held, (block, labels), 1)
    wanted = np.outer(shares, held.sum(0))
    left, part = wanted.copy(), np.zeros(len(held), dtype=np.int64)
    for place in rng.permutation(len(held)):
        gain = (left**2).sum(1) - ((left - held[place]) ** 2).sum(1)
        best = int(np.argmax(gain))
        if gain[best] > 0:
            part[place] = best + 1
            left[best] -= held[place]
    return part[block], np.where(wanted >= 2, left / np.maximum(wanted, 1), 0.0)


def blocks(places: Places, km: float, rng: Random) -> Indices:
    """The number of the square of ``km`` kilometres that each place lies in, on a grid that the seed shifts."""
    cells = np.floor(on_map(places) / km + rng.uniform(0, 1, 2)).astype(np.int64)
    return np.asarray(np.unique(cells, axis=0, return_inverse=True)[1]).reshape(-1).astype(np.int64)
