"""When two satellites, or a satellite and a ground station, can talk: exact windows out of sampled orbits.

With R the radius that a beam must clear (the Earth's and 80 km of air) and L_i = sqrt(r_i^2 - R^2) the way from
satellite i to where its beam grazes that sphere, i sees j iff ``x_i . x_j + L_i L_j >= R^2``, which is the same as
``|x_i - x_j| <= L_i + L_j``. Each rule (sight, range, elevation) is a smooth function g of time, >= 0 where it holds.
Between knots 60 s apart positions are cubics (Hermite; within 0.4 m of SGP4 at 550 km); on every 10 s g is a cubic
through its values and slopes, whose roots are the edges, and whose tops and bottoms show windows and gaps that fall
between two samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flyby.contacts.edges import Edges, Windows
from flyby.contacts.ground import TURN, Station, station_states
from flyby.contacts.orbits import EARTH, MU, Floats
from flyby.errors import BadInput

log = logging.getLogger(__name__)
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

GRAZE = EARTH + 80.0  # km from the Earth's middle that a beam between satellites must clear
SUBSTEPS = 6  # samples from one knot to the next
FEW = 100  # up to so many satellites all pairs are looked at, beyond a tree finds the near ones


class Movers(Protocol):
    """What moves on orbits: names, states as :meth:`flyby.contacts.orbits.Orbits.states`, and a radius that none goes
    below."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def lowest(self) -> float: ...

    @property
    def epoch(self) -> str: ...

    def states(self, seconds: Floats) -> tuple[Floats, Floats]: ...


def sights(x: Floats) -> Floats:
    """``x_i . x_j + L_i L_j - R^2`` for all pairs of ``x`` [n, 3], as one product of 4-vectors; >= 0: they see each
    other. nan for what is below R."""
    beyond = (x * x).sum(1) - GRAZE**2
    four = np.column_stack([x, np.sqrt(np.where(beyond >= 0, beyond, np.nan))])
    return np.asarray(four @ four.T - GRAZE**2)


@dataclass(frozen=True)
class Rules:
    """What makes a contact."""

    max_range: float | None = None  # km, between satellites
    least: float = 0.0  # seconds of the shortest contact
    terminals: int | None = None  # links of one satellite at a time
    step: float = 10.0  # seconds from sample to sample

    def __post_init__(self) -> None:
        if self.max_range is not None and not self.max_range > 0:
            raise BadInput(f"a range of {self.max_range} km reaches nobody; give a positive number")
        if not (1 <= self.step <= 60):
            raise BadInput(f"steps of {self.step} s are outside 1 to 60")
        if not self.least >= 0:
            raise BadInput(f"a shortest contact of {self.least} s is less than nothing; give 0 or more")
        if self.terminals is not None and self.terminals < 1:
            raise BadInput("a satellite with no terminal talks to nobody; give 1 or more")


@dataclass(frozen=True)
class _Span:
    """One interval between knots: states of everyone at its samples, as ``[3, who, sample]``."""

    begin: float
    end: float
    x: Floats
    v: Floats
    reach: Floats  # L, [who, sample]
    growth: Floats  # dL/dt


Rule = Callable[[_Span, Ints, Ints], tuple[Floats, Floats]]  # g and dg/dt of pairs, each [pair, sample]
Near = Callable[[_Span], tuple[Ints, Ints]]  # the pairs for which a rule may hold during a span, at least


def _apart(span: _Span, one: Ints, other: Ints) -> tuple[Floats, Floats]:
    """Squared distance and half its slope."""
    dx = span.x.take(one, 1) - span.x.take(other, 1)
    dv = span.v.take(one, 1) - span.v.take(other, 1)
    # By components: sums of three in one order, so that the same states give the same bits in both spans that share a
    # knot.
    return (
        dx[0] * dx[0] + dx[1] * dx[1] + dx[2] * dx[2],
        dx[0] * dv[0] + dx[1] * dv[1] + dx[2] * dv[2],
    )


def _in_range(most: float) -> Rule:
    def rule(span: _Span, one: Ints, other: Ints) -> tuple[Floats, Floats]:
        squared, slope = _apart(span, one, other)
        return most**2 - squared, -2 * slope

    return rule


def _in_sight(span: _Span, one: Ints, other: Ints) -> tuple[Floats, Floats]:
    squared, slope = _apart(span, one, other)
    reach = span.reach[one] + span.reach[other]
    return reach * reach - squared, 2 * (reach * (span.growth[one] + span.growth[other]) - slope)


def _risen(stations: Sequence[Station], epoch: str, satellites: int) -> Rule:
    """The satellite ``one`` stands at or above the mask of the station ``other``: sin(elevation) - sin(mask)."""
    masks = np.sin(np.radians([station.mask for station in stations]))[:, None]

    def rule(span: _Span, one: Ints, other: Ints) -> tuple[Floats, Floats]:
        samples = span.x.shape[2]
        where, speed, up, turn = station_states(stations, epoch, np.linspace(span.begin, span.end, samples))
        at = other - satellites
        d, v = span.x.take(one, 1) - where.take(at, 1), span.v.take(one, 1) - speed.take(at, 1)
        up, turn = up.take(at, 1), turn.take(at, 1)
        far = np.sqrt((d * d).sum(0))
        high = (up * d).sum(0) / far
        slope = ((turn * d).sum(0) + (up * v).sum(0) - high * (d * v).sum(0) / far) / far
        return high - masks[at], slope

    return rule


def find(
    movers: Movers, seconds: float, rules: Rules | None = None, stations: Sequence[Station] = ()
) -> tuple[Windows, dict[str, float]]:
    """All windows of ``[0, seconds]``, pairs as indices into the satellites' names and then the stations'; and of those
    satellites that are lost (decayed, or below the air's edge), since when."""
    rules, n = rules or Rules(), len(movers.names)
    if not (np.isfinite(seconds) and seconds > 0):
        raise BadInput(f"{seconds / 3600:g} hours hold no contact; give a positive number")
    deepest = np.sqrt(max(movers.lowest**2 - GRAZE**2, 0.0))
    sight, range_ = rules.max_range is None or rules.max_range > 2 * deepest, rules.max_range is not None
    most = rules.max_range or 0.0
    between: list[Rule] = [rule for rule, on in ((_in_sight, sight), (_in_range(most), range_)) if on]
    near = _near_in_sky(lambda span: max(most, 2 * float(np.nanmax(span.reach, initial=0.0)) if sight else 0.0))
    kinds = [(rule, near, Edges(n)) for rule in between]
    if stations:
        low = _near_ground(stations, movers.epoch, n)
        kinds.append((_risen(stations, movers.epoch, n), low, Edges(n + len(stations))))
    lost = np.full(n, np.inf)
    last, before, ground = None, np.zeros(n + len(stations), bool), np.ones(len(stations), bool)
    for span, alive in _spans(movers, seconds, rules.step):
        lost[~alive] = np.minimum(lost[~alive], span.begin)
        everyone = np.concatenate([alive, ground])
        for rule, near, edges in kinds:
            _turn(last, span, before, everyone, rule, near, edges)
            one, other = near(span)
            edges.look(one, other, *rule(span, one, other), (span.begin, span.end))
        last, before = _shut(span), everyone
    for rule, near, edges in kinds:
        _turn(last, None, before, np.zeros_like(before), rule, near, edges)
    found = [edges.windows() for *_, edges in kinds]
    sky = found[0] if len(between) == 1 else found[0].both(found[1])
    made = sky.joined(found[-1]) if stations else sky
    gone = {movers.names[i]: float(lost[i]) for i in np.flatnonzero(np.isfinite(lost))}
    for name, since in gone.items():
        log.warning("%s is lost from second %.0f on (decayed, or no orbit): no contacts from there", name, since)
    return made.kept(rules.least, rules.terminals, n, seconds), gone


def _spans(movers: Movers, seconds: float, step: float) -> Iterator[tuple[_Span, Bools]]:
    """The intervals between knots, each with who is alive at both its ends. The last may be shorter."""
    long = step * SUBSTEPS
    knots = np.append(np.arange(0.0, seconds - 1e-6, long), seconds)
    u = np.linspace(0, 1, SUBSTEPS + 1)
    values = np.stack([(2 * u - 3) * u * u + 1, ((u - 2) * u + 1) * u, (3 - 2 * u) * u * u, (u - 1) * u * u])
    slopes = np.stack([6 * u * (u - 1), (3 * u - 4) * u + 1, 6 * u * (1 - u), (3 * u - 2) * u])
    block = max(2, min(256, 200_000 // len(movers.names)))
    gone = np.zeros((len(movers.names), 1), bool)
    for first in range(0, len(knots) - 1, block):
        times = knots[first : first + block + 1]
        x, v = movers.states(times)
        gone = ~((x * x).sum(2) > GRAZE**2) | gone[:, -1:]  # nan too
        gone = np.logical_or.accumulate(gone, axis=1)  # what has decayed does not come back
        x[gone], v[gone] = np.nan, np.nan
        for k, (begin, end) in enumerate(zip(times[:-1].tolist(), times[1:].tolist(), strict=True)):
            h = end - begin
            ends = np.stack([x[:, k], h * v[:, k], x[:, k + 1], h * v[:, k + 1]])
            rows = ends.reshape(4, -1).T  # [who * 3, 4]
            shape = (len(x), 3, SUBSTEPS + 1)
            place, speed = (rows @ values).reshape(shape), (rows @ slopes / h).reshape(shape)
            place, speed = place.transpose(1, 0, 2).copy(), speed.transpose(1, 0, 2).copy()
            reach = np.sqrt(np.maximum((place * place).sum(0) - GRAZE**2, 1e-6))
            yield _Span(begin, end, place, speed, reach, (place * speed).sum(0) / reach), ~(gone[:, k] | gone[:, k + 1])


def _cut(span: _Span, sample: slice) -> _Span:
    return _Span(span.begin, span.end, *(part[..., sample] for part in (span.x, span.v, span.reach, span.growth)))


def _shut(span: _Span) -> _Span:
    """The moment at which a span ends."""
    return replace(_cut(span, slice(-1, None)), begin=span.end)


def _open(span: _Span) -> _Span:
    return replace(_cut(span, slice(0, 1)), end=span.begin)


def _turn(
    last: _Span | None, span: _Span | None, before: Bools, after: Bools, rule: Rule, near: Near, edges: Edges
) -> None:
    """Where satellites come (all at second 0) or go (all at the end, a lost one in between), their windows open or
    shut at the knot."""
    for moment, were, are, up in ((last, after, before, False), (span and _open(span), before, after, True)):
        if moment is not None and (are & ~were).any():
            one, other = near(moment)
            new = (are[one] & are[other]) & ~(were[one] & were[other])
            one, other = one[new], other[new]
            holds = rule(moment, one, other)[0][:, 0] >= 0
            edges.add(one[holds], other[holds], np.full(int(holds.sum()), moment.end), up)


def _near_in_sky(limits: Callable[[_Span], float]) -> Near:
    """Pairs that may come within a limit during a span: first by where they are in its middle and how fast anyone is,
    then as if they flew straight on, which gravity bends by a few km."""

    def near(span: _Span) -> tuple[Ints, Ints]:
        middle, half = span.x.shape[2] // 2, (span.end - span.begin) / 2
        x, v = span.x[:, :, middle], span.v[:, :, middle]
        radius, speed = np.sqrt((x * x).sum(0)), np.sqrt((v * v).sum(0))
        limit = limits(span)
        cut = limit + 2.04 * half * float(np.nanmax(speed, initial=0.0))
        one, other = near_pairs(x, cut)
        dx, dv = x.take(one, 1) - x.take(other, 1), v.take(one, 1) - v.take(other, 1)
        fast = (dv * dv).sum(0)
        along = (dx * dv).sum(0)
        when = np.clip(-along / np.where(fast > 0, fast, 1.0), -half, half)
        bend = 1.1 * MU / float(np.nanmin(radius, initial=np.inf)) ** 2 * half**2
        keep = (dx * dx).sum(0) + when * (2 * along + when * fast) <= (limit + bend + 0.01) ** 2
        return one[keep], other[keep]

    return near


def near_pairs(x: Floats, cut: float) -> tuple[Ints, Ints]:
    """All pairs (one < other) of the places ``x`` [3, n] that are at most ``cut`` apart, and perhaps more; none with
    nan."""
    alive = np.flatnonzero(np.isfinite(x).all(0))
    if len(alive) <= FEW:
        one, other = _all_pairs(len(alive))
    else:
        from scipy.spatial import cKDTree  # type: ignore[import-untyped]

        one, other = cKDTree(x[:, alive].T).query_pairs(cut, output_type="ndarray").T
    return alive[one], alive[other]


@lru_cache(4)
def _all_pairs(n: int) -> tuple[Ints, Ints]:
    return np.triu_indices(n, 1)


def _near_ground(stations: Sequence[Station], epoch: str, satellites: int) -> Near:
    """Satellites that may rise above a station's horizon during a span."""

    def near(span: _Span) -> tuple[Ints, Ints]:
        middle, half = (span.begin + span.end) / 2, (span.end - span.begin) / 2
        where, _, up, _ = station_states(stations, epoch, np.array([middle]))
        x, v = span.x[:, :, span.x.shape[2] // 2], span.v[:, :, span.v.shape[2] // 2]
        high = x.T @ up[:, :, 0] - (where * up)[:, :, 0].sum(0)
        # The satellite's own way, and the station's horizon that turns below it.
        moves = 1.05 * half * (np.sqrt((v * v).sum(0)) + TURN * np.sqrt((x * x).sum(0)))
        one, at = np.nonzero(high + moves[:, None] >= 0)
        return one, at + satellites

    return near
