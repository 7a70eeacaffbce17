"""Windows against geometry worked out by hand and against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flyby.contacts.edges import Edges, Windows
from flyby.contacts.ground import Station, gmst, station_states
from flyby.contacts.orbits import EARTH, MU, Floats, Orbits
from flyby.contacts.walker import random_shell, walker
from flyby.contacts.windows import GRAZE, Rules, find, sights
from flyby.errors import BadInput

pytest.importorskip("sgp4", reason="the extra space is not installed")
HOUR = 3600.0


class Circles:
    """Perfect circles in the plane of the equator, known in closed form; places in degrees at second 0."""

    def __init__(self, altitude: float, *degrees: float, dies: float = np.inf, back: bool = False) -> None:
        self.names = tuple(f"sat-{i}" for i in range(len(degrees)))
        self.epoch, self.dies = "2026-03-01T00:00:00Z", dies
        self.radius = self.lowest = EARTH + altitude
        self.rate = np.sqrt(MU / self.radius**3) * np.where(np.arange(len(degrees)) % 2 == back, 1, 1 - 2 * back)
        self.places = np.radians(degrees)

    def states(self, seconds: Floats) -> tuple[Floats, Floats]:
        angle = self.places[:, None] + np.atleast_1d(self.rate)[:, None] * seconds
        flat = np.zeros_like(angle)
        x = self.radius * np.stack([np.cos(angle), np.sin(angle), flat], 2)
        v = self.radius * self.rate[:, None, None] * np.stack([-np.sin(angle), np.cos(angle), flat], 2)
        x[0, seconds > self.dies] = np.nan
        return x, v


def rows(windows: Windows) -> list[tuple[int, int, float, float]]:
    return list(zip(*(c.tolist() for c in (windows.one, windows.other, windows.start, windows.end)), strict=True))


def test_by_hand_two_on_one_circle() -> None:
    """At 550 km two satellites see each other up to 2 acos(R / r) = 2 acos(6458.135 / 6928.135) = 42.45 degrees."""
    assert np.degrees(2 * np.arccos(6458.135 / 6928.135)) == pytest.approx(42.45, abs=0.01)
    for degrees, seen in ((180, False), (60, False), (42.5, False), (42.4, True), (10, True)):
        found, lost = find(Circles(550, 0, degrees), 2 * HOUR)
        assert rows(found) == ([(0, 1, 0.0, 2 * HOUR)] if seen else [])
        assert not lost


def test_by_hand_two_that_pass_each_other() -> None:
    """One flies the other way: the angle between them is |2 w t - 180| degrees, so they are in sight (42.45 degrees) or
    in range (2 r sin(angle / 2) <= 1000 km: 8.277 degrees) around t = pi / 2w, again after pi / w."""
    movers = Circles(550, 0, 180, back=True)
    w = np.sqrt(MU / movers.radius**3)
    sight, range_ = 2 * np.arccos(GRAZE / movers.radius), 2 * np.arcsin(500 / movers.radius)
    assert np.degrees(range_) == pytest.approx(8.277, abs=0.001)
    for rules, angle in ((Rules(), sight), (Rules(max_range=1000), range_), (Rules(max_range=5500), sight)):
        found, _ = find(movers, 1.5 * HOUR, rules)
        expected = [((k * np.pi - angle + np.pi) / (2 * w), (k * np.pi + angle + np.pi) / (2 * w)) for k in (0, 2)]
        assert rows(found) == [(0, 1, *(pytest.approx(t, abs=2e-3) for t in pair)) for pair in expected]
        assert len(found) >= 1


def test_a_short_window_between_two_samples_is_found_and_a_short_gap_too() -> None:
    """g = 1 - ((t - 5) / 2)^2 is >= 0 from 3 to 7 s, and its two samples at 0 and 10 s are not."""
    one, other = np.array([0]), np.array([1])
    t = np.array([[0.0, 10.0, 20.0]])
    g, slope = 1 - ((t - 5) / 2) ** 2, -(t - 5) / 2
    edges = Edges(2)
    edges.look(one, other, g, slope, (0.0, 20.0))
    assert rows(edges.windows()) == [(0, 1, pytest.approx(3), pytest.approx(7))]
    edges = Edges(2)
    edges.add(one, other, np.zeros(1), True)
    edges.look(one, other, -g, -slope, (0.0, 20.0))
    edges.add(one, other, np.array([20.0]), False)
    assert rows(edges.windows()) == [(0, 1, 0, pytest.approx(3)), (0, 1, pytest.approx(7), 20)]
    edges.look(one, other, g - 2, slope, (0.0, 20.0))  # the top stays below 0
    assert not len(edges.windows())


@settings(max_examples=50)
@given(arrays(np.float64, (6, 3), elements=st.floats(-40_000, 40_000)))
def test_sight_is_symmetric_and_is_a_segment_clear_of_the_sphere(x: Floats) -> None:
    g = sights(x)
    assert np.array_equal(g, g.T, equal_nan=True)
    for i, j in zip(*np.triu_indices(6, 1), strict=True):
        if np.isnan(g[i, j]):
            assert min(np.linalg.norm(x[i]), np.linalg.norm(x[j])) < GRAZE * (1 + 1e-9)
            continue
        d = x[j] - x[i]
        along = np.clip(-(x[i] @ d) / max(d @ d, 1e-9), 0, 1)  # the nearest point of the segment
        clear = np.linalg.norm(x[i] + along * d) - GRAZE
        if abs(clear) > 1e-3:
            assert (g[i, j] >= 0) == (clear > 0)


def holds(x: Floats, y: Floats, most: float | None) -> Floats:
    """Sight and range of places [n, 3] and [n, 3], by the formula as it stands."""
    far = [np.sqrt((z * z).sum(1) - GRAZE**2) for z in (x, y)]
    inside = (x * y).sum(1) + far[0] * far[1] >= GRAZE**2
    return inside if most is None else inside & (np.linalg.norm(x - y, axis=1) <= most)


@pytest.fixture(scope="module")
def shell() -> tuple[Orbits, Floats]:
    """Twenty satellites, and where they are in every second of six hours."""
    movers = random_shell(20, (450, 650), (40, 98), seed=3)
    return movers, movers.states(np.arange(0, 6 * HOUR + 1))[0]


def brute(movers: Orbits, x: Floats, most: float | None) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Windows by looking every second, each edge then halved down on SGP4 itself."""
    seconds = x.shape[1] - 1
    times = np.arange(0, seconds + 1, 1.0)
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for i, j in zip(*(c.tolist() for c in np.triu_indices(len(x), 1)), strict=True):
        seen = np.concatenate([[False], holds(x[i], x[j], most), [False]])
        edges = np.flatnonzero(seen[1:] != seen[:-1])
        low, high = times[np.maximum(edges - 1, 0)], times[np.minimum(edges, len(times) - 1)]
        pair = Orbits(movers.names[:2], (movers.records[i], movers.records[j]), movers.epoch)
        for _ in range(10 if edges.size else 0):
            middle = (low + high) / 2
            now = holds(*pair.states(middle)[0], most) == seen[edges + 1]
            low, high = np.where(now, low, middle), np.where(now, middle, high)
        exact = np.where(edges == 0, 0.0, np.where(edges == len(times), seconds, (low + high) / 2)).tolist()
        found[i, j] = list(zip(exact[::2], exact[1::2], strict=True))
    return found


@pytest.mark.parametrize("most", [None, 1500.0, 4800.0])
def test_six_hours_against_brute_force(most: float | None, shell: tuple[Orbits, Floats]) -> None:
    """None missed; an edge is off by less than .01 s (99 of 100). 4,800 km: sight and range both bind."""
    movers, places = shell
    found, _ = find(movers, 6 * HOUR, Rules(max_range=most))
    ours: dict[tuple[int, int], list[list[float]]] = {}
    for i, j, start, end in rows(found):
        ours.setdefault((i, j), []).append([start, end])
    theirs = brute(movers, places, most)
    off = []
    for pair, windows in theirs.items():
        for start, end in windows:
            near = [w for w in ours.get(pair, []) if w[0] < end + 1 and w[1] > start - 1]
            assert len(near) == 1, f"{pair} {start} {end}: missed"
            ours[pair].remove(near[0])
            off += [abs(near[0][0] - start), abs(near[0][1] - end)]
    extra = [w for windows in ours.values() for w in windows]
    assert all(end - start < 1 for start, end in extra)  # shorter than the brute force looks
    assert len(off) > 250
    assert np.quantile(off, 0.99) < 0.01  # 1.6 ms, of which the brute force has one
    assert max(off) < 0.1


def test_a_tree_finds_the_pairs_that_all_pairs_find(monkeypatch: pytest.MonkeyPatch) -> None:
    movers = random_shell(60, (500, 600), (50, 98), seed=1)
    dense, _ = find(movers, HOUR, Rules(max_range=2000))
    monkeypatch.setattr("flyby.contacts.windows.FEW", 1)
    assert rows(find(movers, HOUR, Rules(max_range=2000))[0]) == rows(dense)
    assert len(dense) > 100


def test_a_lost_satellite_is_named_and_its_windows_shut() -> None:
    movers = Circles(550, 0, 10, 20, dies=1000.0)
    found, lost = find(movers, HOUR)
    assert find(movers, 999.99951)[0].end.max() == 999.99951  # no edge is rounded to after the end
    assert lost == {"sat-0": 960.0}  # the last knot at which it is there
    assert rows(found) == [(0, 1, 0.0, 960.0), (0, 2, 0.0, 960.0), (1, 2, 0.0, HOUR)]


def test_short_windows_are_left_out_and_terminals_are_served_in_order() -> None:
    def of(*windows: tuple[int, int, float, float]) -> Windows:
        one, other, start, end = (np.array(column) for column in zip(*windows, strict=True))
        return Windows(one, other, start.astype(float), end.astype(float))

    given_ = of((0, 1, 0, 10), (0, 2, 5, 30), (1, 2, 20, 40), (0, 3, 0, 100))
    assert len(given_.kept(25, None, 4)) == 2
    # 3 is a station and serves everyone, yet takes a terminal of 0: 0-1 was first and has it until 10, then 0-3 (which
    # came before 0-2); 1-2 finds both free.
    assert rows(given_.kept(0, 1, 3)) == [(0, 1, 0, 10), (0, 3, 10, 100), (1, 2, 20, 40)]
    assert rows(given_.kept(0, 3, 3)) == rows(given_.kept(0, None, 3))
    assert len(given_.kept(0, 1, 3).kept(50, None, 3)) == 1


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=8), st.data())
def test_both_is_where_both_hold(ends: list[tuple[float, float]], data: st.DataObject) -> None:
    def windows(cuts: list[float]) -> Windows:
        cuts = sorted(set(cuts))[: len(set(cuts)) // 2 * 2]
        start, end = np.array(cuts[::2]), np.array(cuts[1::2])
        return Windows(np.zeros(len(start), int), np.ones(len(start), int), start, end)

    first, second = windows([e[0] for e in ends]), windows([e[1] for e in ends])
    met = first.both(second)
    for t in data.draw(st.lists(st.floats(0, 100), max_size=20)):
        held = [bool(((w.start < t) & (t < w.end)).any()) for w in (first, second, met)]
        if not any(t in (*w.start, *w.end) for w in (first, second)):
            assert held[2] == (held[0] and held[1])


def test_sidereal_time_and_a_station_s_place() -> None:
    from sgp4.propagation import gstime

    assert gmst("2026-03-01T12:00:00Z", np.array([0.0]))[0] == pytest.approx(gstime(2461101.0), abs=1e-9)
    pole, equator = Station("pole", 90, 0), Station("equator", 0, 0, height=1000)
    x, v, up, _ = station_states((pole, equator), "2026-03-01T12:00:00Z", np.array([0.0, 1.0]))
    assert x[:, 0, 0] == pytest.approx([0, 0, 6356.752], abs=1e-3)
    assert np.linalg.norm(x[:, 1, 0]) == pytest.approx(6379.137)
    assert v[:, 1, 0] == pytest.approx(x[:, 1, 1] - x[:, 1, 0], abs=1e-4)
    assert up[:, 1, 0] == pytest.approx(x[:, 1, 0] / 6379.137)


def test_a_station_against_the_elevation_looked_at_every_second() -> None:
    movers, place = walker(8, 2, 1, 600, 80, epoch="2026-03-01T00:00:00Z"), Station("kiruna", 67.9, 21.1, 400, mask=7)
    found, _ = find(movers, 3 * HOUR, stations=(place,))
    times = np.arange(0, 3 * HOUR + 1, 1.0)
    x = movers.states(times)[0]
    at, _, up, _ = station_states((place,), movers.epoch, times)
    d = x - at[:, 0].T
    high = np.degrees(np.arcsin((d * up[:, 0].T).sum(2) / np.linalg.norm(d, axis=2)))
    seconds = {i: float((high[i] >= 7).sum()) for i in range(8)}
    for i in range(8):
        mine = [end - start for one, other, start, end in rows(found) if (one, other) == (i, 8)]
        assert sum(mine) == pytest.approx(seconds[i], abs=1.0 * len(mine) + 1e-6)
    assert sum(seconds.values()) > 500


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"max_range": 0.0}, "reaches nobody"),
        ({"max_range": -5.0}, "reaches nobody"),
        ({"step": 0.0}, "outside 1 to 60"),
        ({"least": -1.0}, "less than nothing"),
        ({"terminals": 0}, "no terminal"),
    ],
)
def test_bad_rules_get_one_line(words: dict[str, float], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        Rules(**words)  # type: ignore[arg-type]


def test_bad_constellations_get_one_line() -> None:
    for numbers, said in (
        ((70, 8, 1, 550, 97), "evenly"),
        ((70, 7, 7, 550, 97), "phasing"),
        ((70, 7, 1, 50, 97), "altitude"),
        ((70, 7, 1, 550, 190), "inclination"),
        ((1, 1, 0, 550, 97), "no constellation"),
    ):
        with pytest.raises(BadInput, match=said):
            walker(*numbers)
    with pytest.raises(BadInput, match="lower altitude"):
        random_shell(5, (600, 500), (50, 60), 0)
    with pytest.raises(BadInput, match="positive"):
        find(Circles(550, 0, 10), 0.0)
    with pytest.raises(BadInput, match="latitude"):
        Station("x", 95, 0)
