"""Edges of windows, collected interval by interval, solved in blocks, and put together to windows."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyby.contacts.plan import Contact, Plan, header, meet, row

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

HALVINGS = 20  # of at most 10 s: an edge is solved to 10 microseconds
BLOCK = 200_000  # cubics that are solved at a time


def _cubic(four: Floats) -> Floats:
    """The coefficients of cubics on [0, 1] from both values and both slopes."""
    p, q, m, n = four
    return np.stack([p, m, 3 * (q - p) - 2 * m - n, 2 * (p - q) + m + n])


def _value(c: Floats, u: Floats) -> Floats:
    return np.asarray(((c[3] * u + c[2]) * u + c[1]) * u + c[0])


def _root(c: Floats, low: Floats, high: Floats, up: Bools) -> Floats:
    """Where a cubic passes 0 between two places, upwards or downwards, by halving."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        beyond = (_value(c, middle) >= 0) == up
        high, low = np.where(beyond, middle, high), np.where(beyond, low, middle)
    return (low + high) / 2


class Edges:
    """Where windows of pairs begin and end. ``size``: how many take part; a pair's key is one * size + other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pieces: list[tuple[Ints, Floats, Floats, Floats]] = []  # key, begin, length, four numbers of a cubic
        self._waiting = 0
        self._solved: tuple[list[tuple[Ints, Floats]], list[tuple[Ints, Floats]]] = ([], [])  # ends, beginnings

    def add(self, one: Ints, other: Ints, times: Floats, up: bool) -> None:
        """Edges that need no solving."""
        self._solved[up].append((one * self.size + other, times))

    def look(self, one: Ints, other: Ints, g: Floats, slope: Floats, span: tuple[float, float]) -> None:
        """Note the steps of one interval in which an edge is, or may be hidden between two samples of one sign: there
        the slopes point to 0 from both sides. ``g`` and ``slope`` (per second) are [pair, sample]."""
        h = (span[1] - span[0]) / (g.shape[1] - 1)
        holds, rises = g >= 0, slope > 0
        left, right = holds[:, :-1], holds[:, 1:]
        turns = (rises[:, :-1] != rises[:, 1:]) & (rises[:, :-1] != left)
        rows, steps = np.nonzero((left != right) | turns)
        if not rows.size:
            return
        after = steps + 1
        four = np.stack([g[rows, steps], g[rows, after], h * slope[rows, steps], h * slope[rows, after]])
        keys = one[rows] * self.size + other[rows]
        self._pieces.append((keys, span[0] + h * steps, np.full(rows.size, h), four))
        self._waiting += rows.size
        if self._waiting >= BLOCK:
            self._solve()

    def _solve(self) -> None:
        if not self._pieces:
            return
        keys, begins, lengths = (np.concatenate([piece[k] for piece in self._pieces]) for k in range(3))
        four = np.concatenate([piece[3] for piece in self._pieces], axis=1)
        self._pieces, self._waiting = [], 0
        held = four[0] >= 0
        plain = held != (four[1] >= 0)
        c = _cubic(four)
        zero, full = np.zeros(len(keys)), np.ones(len(keys))
        # A hidden one: the turning point is where the slope, a quadratic, passes 0; it counts if g has the other sign.
        slope = np.stack([c[1], 2 * c[2], 3 * c[3], zero])
        turn = np.where(plain, full, _root(slope, zero, full, held))
        hidden = ~plain & ((_value(c, turn) >= 0) != held)
        for mask, low, high, up in ((plain | hidden, zero, turn, ~held), (hidden, turn, full, held)):
            at = begins[mask] + lengths[mask] * _root(c[:, mask], low[mask], high[mask], up[mask])
            for way in (False, True):
                chosen = up[mask] == way
                self._solved[way].append((keys[mask][chosen], at[chosen]))

    def windows(self) -> Windows:
        self._solve()
        (ends, end), (starts, start) = (self._sorted(way) for way in (False, True))
        if not np.array_equal(ends, starts) or (end < start).any():
            raise AssertionError("windows do not close; this is a mistake in flyby")
        return Windows(starts // self.size, starts % self.size, start, end)

    def _sorted(self, way: bool) -> tuple[Ints, Floats]:
        keys = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in self._solved[way])])
        times = np.concatenate([np.empty(0), *(times for _, times in self._solved[way])])
        self._solved[way].clear()
        order = np.lexsort((times, keys))
        return keys[order], times[order]


@dataclass(frozen=True)
class Windows:
    """Windows of pairs as columns: a few bytes each, where a Contact takes a hundred."""

    one: Ints
    other: Ints
    start: Floats
    end: Floats

    def __len__(self) -> int:
        return len(self.start)

    def _take(self, chosen: Ints | Bools) -> Windows:
        return Windows(self.one[chosen], self.other[chosen], self.start[chosen], self.end[chosen])

    def joined(self, more: Windows) -> Windows:
        pairs = ((self.one, more.one), (self.other, more.other), (self.start, more.start), (self.end, more.end))
        return Windows(*(np.concatenate(pair) for pair in pairs))  # type: ignore[arg-type]

    def both(self, more: Windows) -> Windows:
        """When both have the pair: a sweep over all beginnings (+1) and ends (-1), pair by pair."""
        size = int(max(self.other.max(initial=0), more.other.max(initial=0))) + 1
        keys = np.concatenate([w.one * size + w.other for w in (self, more) for _ in range(2)])
        times = np.concatenate([self.start, self.end, more.start, more.end])
        steps = np.repeat([1, -1, 1, -1], [len(self), len(self), len(more), len(more)])
        order = np.lexsort((steps, times, keys))  # ends first
        keys, times = keys[order], times[order]
        begins = np.flatnonzero(np.cumsum(steps[order]) == 2)
        return Windows(keys[begins] // size, keys[begins] % size, times[begins], times[begins + 1])

    def kept(self, least: float, terminals: int | None, satellites: int, until: float = np.inf) -> Windows:
        """In the order of time, times in whole milliseconds (none after ``until``), without those that are too short;
        with ``terminals`` no satellite has more links at a time."""
        made = Windows(self.one, self.other, np.round(self.start, 3), np.minimum(np.round(self.end, 3), until))
        made = made._take(np.lexsort((made.other, made.one, made.end, made.start)))
        if terminals is not None:
            made = made._take((made.end - made.start) > 0)._served(terminals, satellites)
        long = made.end - made.start
        return made._take((long > 0) & (long >= least - 1e-9))

    def _served(self, terminals: int, satellites: int) -> Windows:
        """First come, first served: a window takes one terminal at each end as soon as both have one, and keeps them
        until it closes; while it waits its beginning is lost. Stations serve everyone."""
        free = [terminals] * satellites
        waiting: dict[int, list[int]] = {}
        releases: list[tuple[float, int]] = []
        start, end = self.start.copy(), self.end
        taken = np.zeros(len(self), bool)
        ends = [
            [i for i in pair if i < satellites] for pair in zip(self.one.tolist(), self.other.tolist(), strict=True)
        ]

        def take(k: int, now: float) -> bool:
            if taken[k] or end[k] <= now or not all(free[i] for i in ends[k]):
                return False
            for i in ends[k]:
                free[i] -= 1
            start[k], taken[k] = now, True
            heapq.heappush(releases, (float(end[k]), k))
            return True

        def release(until: float) -> None:
            while releases and releases[0][0] <= until:
                now, k = heapq.heappop(releases)
                for i in ends[k]:
                    free[i] += 1
                for other in sorted({w for i in ends[k] for w in waiting.get(i, ())}):
                    take(other, now)
                for i in ends[k]:
                    waiting[i] = [w for w in waiting.get(i, ()) if not taken[w] and end[w] > now]

        for k, now in enumerate(self.start.tolist()):
            release(now)
            if not take(k, now):
                for i in ends[k]:
                    waiting.setdefault(i, []).append(k)
        release(np.inf)
        chosen = np.flatnonzero(taken)
        made = Windows(self.one[chosen], self.other[chosen], start[chosen], end[chosen])
        return made._take(np.lexsort((made.other, made.one, made.end, made.start)))

    def contacts(self, names: Sequence[str], rate: float) -> Iterator[Contact]:
        for i, j, start, end in zip(*(c.tolist() for c in (self.one, self.other, self.start, self.end)), strict=True):
            yield meet(start, end, names[i], names[j], rate)

    def plan(self, nodes: Sequence[str], stations: Sequence[str], rate: float, epoch: str, seconds: float) -> Plan:
        made = tuple(self.contacts((*nodes, *stations), rate))
        return Plan(tuple(nodes), made, seconds, tuple(stations), epoch)

    def lines(
        self, nodes: Sequence[str], stations: Sequence[str], rate: float, epoch: str, seconds: float
    ) -> Iterator[str]:
        """The plan's file, without the plan in memory."""
        yield from header(nodes, stations, epoch, seconds)
        names, block = (*nodes, *stations), 50_000
        for k in range(0, len(self), block):
            yield from map(row, self._take(np.arange(k, min(k + block, len(self)))).contacts(names, rate))
