"""Which line of a study is better, and how surely: differences on the same splits with 95 % confidence intervals, and
how often one line is above another across settings.

The luck of a split moves all lines alike, so that two lines are compared where they were run on the same one: by a
paired t interval over seeds, mean(d) ± t_{.975, n-1} s / sqrt(n), and by a sign test over settings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flyby.errors import BadInput, unknown
from flyby.runs.answers import sign_test
from flyby.runs.paired import mean_error, p_said
from flyby.study.grid import Standing
from flyby.study.sheet import MISSING, Entry, Part, Sheet, Table, plain
from flyby.study.tables import Group, clients_of, grouped, rule_name

Column = tuple[float, str, str]  # alpha, attack, gate
Setting = tuple[Group, Column, int, str]  # with the seed, and the hash of the split
Line = dict[Setting, float]  # accuracies of one method and rule
MATRIX = 10  # lines that are all compared with one another; of more, each with the base


def t_quantile(freedom: int, share: float = 0.975) -> float:
    """The quantile of Student's t with so many degrees of freedom, by halving an interval."""
    low, high = 0.0, 1.0
    while t_share(high, freedom) < share:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def t_share(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0, by the finite sums there are for whole degrees of freedom [Abramowitz and Stegun, 26.7.3
    and 26.7.4]: with theta = atan(t / sqrt(nu)), A = sin(theta) (1 + cos^2 / 2 + 3 cos^4 / 8 + ...) for even nu, and
    A = (2 / pi) (theta + sin(theta) (cos + 2 cos^3 / 3 + ...)) for odd nu, up to cos^(nu - 2); P = (1 + A) / 2."""
    theta = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (power - 1) / power * cosine**2
    inside = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return (1 + inside) / 2


@dataclass(frozen=True)
class Gap:
    """The mean of paired differences and its 95 % confidence interval, which one difference alone does not have."""

    mean: float
    interval: tuple[float, float] | None
    n: int

    @classmethod
    def of(cls, after: Sequence[float], before: Sequence[float]) -> Gap:
        gaps = [a - b for a, b in zip(after, before, strict=True)]
        mean, error = mean_error(gaps)
        if error is None:
            return cls(mean, None, 1)
        half = t_quantile(len(gaps) - 1) * error
        return cls(mean, (mean - half, mean + half), len(gaps))

    def __str__(self) -> str:
        ends = f" [{100 * self.interval[0]:+.2f}, {100 * self.interval[1]:+.2f}]" if self.interval else ""
        return f"{100 * self.mean:+.2f}{ends} (n={self.n})"


@dataclass(frozen=True)
class Duel:
    """How often one line was above, below and level with another on the same split."""

    above: int
    below: int
    level: int

    @classmethod
    def of(cls, mine: Line, other: Line) -> Duel:
        gaps = [mine[setting] - other[setting] for setting in mine if setting in other]
        return cls(sum(g > 0 for g in gaps), sum(g < 0 for g in gaps), sum(g == 0 for g in gaps))

    @property
    def n(self) -> int:
        return self.above + self.below + self.level

    @property
    def p(self) -> float:
        """The sign test; level ones say nothing."""
        return sign_test(self.above, self.below)


def lines_of(now: Standing) -> dict[str, Line]:
    """Every ``METHOD/RULE`` of the study with its accuracies by setting, as the study lists them. Several draws of one
    rule on the same uploads are one value, their mean; what diverged has none."""
    found: dict[str, dict[Setting, list[float]]] = defaultdict(lambda: defaultdict(list))
    groups, _ = grouped(now)
    of = {cell.key: group for group, grid in groups.items() for cell in grid}
    for cell in now.cells:
        row = now.rows.get(cell.key)
        if row is not None and row["accuracy"] is not None:
            column = (cell.config.split.alpha, cell.attack, cell.admission)
            setting = (of[cell.key], column, cell.config.seed, row["split_hash"])
            found[f"{clients_of(cell)}/{rule_name(cell)}"][setting].append(row["accuracy"])
    return {name: {setting: fmean(values) for setting, values in line.items()} for name, line in found.items()}


def best_of(lines: dict[str, Line]) -> str:
    """The line with the highest mean among those that were run in the most settings."""
    most = max(map(len, lines.values()))
    return max((name for name in lines if len(lines[name]) == most), key=lambda name: fmean(lines[name].values()))


def named(asked: str, lines: dict[str, Line]) -> str:
    """The line that --against names: METHOD/RULE, or METHOD where it has one rule."""
    text = asked.replace(" ", "")
    found = [name for name in lines if name.replace(" ", "") == text or name.replace(" ", "").split("/")[0] == text]
    if len(found) > 1:
        raise BadInput(f"{asked} has several rules; name one, such as --against '{found[0]}'")
    if not found:
        raise unknown("line", asked, lines)
    return found[0]


def pairs(now: Standing, against: str | None = None) -> Sheet:
    """The paired comparison of a study: one part for each of its tables that has two seeds, and one across settings."""
    lines = lines_of(now)
    base = None if against is None else named(against, lines)
    if len(lines) < 2:
        raise BadInput(f"the rows of {now.name} are of one method and rule; there is nothing to compare")
    groups = sorted({setting[0] for line in lines.values() for setting in line})
    parts = []
    for group in groups:
        mine = _within(lines, lambda setting, group=group: setting[0] == group)
        if len(mine) > 1 and len({setting[2] for line in mine.values() for setting in line}) > 1:
            parts.append(Part(group.heading, [_gaps(mine, base, group.facts)]))
    end = [] if parts else ["No table has two seeds yet, so no difference has an interval."]
    parts.append(Part("Across settings", _duels(lines, base or best_of(lines))))
    return Sheet(f"{now.name}-pairs", f"{now.study.title}: paired comparison", "", parts, end)


def _within(lines: dict[str, Line], fits: Any) -> dict[str, Line]:
    """Of every line the settings that fit; a line without any is left out."""
    found = {name: {setting: v for setting, v in line.items() if fits(setting)} for name, line in lines.items()}
    return {name: line for name, line in found.items() if line}


def _gaps(lines: dict[str, Line], base: str | None, facts: dict[str, Any]) -> Table:
    """A line per method and rule, a column per alpha (and attack): the mean difference to the base."""
    columns = sorted({setting[1] for line in lines.values() for setting in line})
    by_column = [_within(lines, lambda setting, one=one: setting[1] == one) for one in columns]
    bases = [base if base in mine else None if base else best_of(mine) for mine in by_column]
    body = []
    for name in lines:
        entries = []
        for column, mine, other in zip(columns, by_column, bases, strict=True):
            told = _asked(name, column)
            shared = [s for s in mine.get(name, {}) if other and s in mine[other]]
            if name == other:
                mean = 100 * fmean(mine[name].values())
                entries.append(Entry(f"base: {mean:.2f}", facts={**told, "mean": mean, "n": len(mine[name])}))
            elif other and shared:
                gap = Gap.of([mine[name][s] for s in shared], [mine[other][s] for s in shared])
                low, high = (100 * end for end in gap.interval) if gap.interval else (None, None)
                told |= {"against": other, "difference": 100 * gap.mean, "low": low, "high": high, "n": gap.n}
                entries.append(Entry(str(gap), facts=told))
            else:
                entries.append(Entry(MISSING))
        body.append([Entry(name), *entries])
    whose = f"to {base}" if base else "to the best line of the column"
    below = [
        f"Mean difference {whose} in points of accuracy, over seeds on the same splits, with its 95 % confidence"
        " interval (paired t; n seeds). An interval that holds 0 decides nothing; nothing is corrected for many"
        " comparisons."
    ]
    below += [] if base else ["The best was chosen by these same figures, so its lead is rather too large."]
    heads = [_head(column, columns) for column in columns]
    return Table(["method / rule", *heads], "l" + "r" * len(heads), body, below=below, facts=facts)


def _asked(name: str, column: Column) -> dict[str, Any]:
    method, _, rule = name.partition("/")
    told = {"alpha": column[0], "method": method, "rule": rule, "attack": column[1], "admission": column[2]}
    return {key: value for key, value in told.items() if value != ""}


def _head(column: Column, columns: list[Column]) -> str:
    """What tells a column from the others."""
    alpha, attack, gate = column
    parts = [f"α = {alpha:g}"] if len({one[0] for one in columns}) > 1 or len(columns) == 1 else []
    parts += [attack or "none"] if len({one[1] for one in columns}) > 1 else []
    return ", ".join(parts + ([gate or "none"] if len({one[2] for one in columns}) > 1 else []))


def _duels(lines: dict[str, Line], base: str) -> list[Table]:
    """Every line against the base, and where they are few all against all."""
    body = []
    for name in lines:
        duel = Duel.of(lines[name], lines[base])
        if name == base or not duel.n:
            continue
        shared = [s for s in lines[name] if s in lines[base]]
        mean = 100 * fmean(lines[name][s] - lines[base][s] for s in shared)
        method, _, rule = name.partition("/")
        told = {"method": method, "rule": rule, "against": base, "difference": mean, "n": duel.n}
        told |= {"above": duel.above, "below": duel.below, "level": duel.level, "p": duel.p}
        numbers = plain(*(f"{n}" for n in (duel.n, duel.above, duel.below, duel.level)), p_said(duel.p))
        body.append([Entry(name), *numbers, Entry(f"{mean:+.2f}", facts=told)])
    heads = [f"against {base}", "settings", "above", "below", "level", "p", "mean difference"]
    below = [
        "A setting is one split: data, sites, alpha and seed (and attack). p is of a two-sided sign test, in which"
        " level ones are left out; settings of one seed share images, so it is rather too small, and nothing is"
        " corrected for many comparisons."
    ]
    tables = [Table(heads, "l" + "r" * 6, body, below=below)]
    if 2 < len(lines) <= MATRIX:
        tables.append(_matrix(lines))
    return tables


def _matrix(lines: dict[str, Line]) -> Table:
    body = []
    for name in lines:
        duels = [Duel.of(lines[name], lines[other]) if other != name else None for other in lines]
        body.append(
            plain(name, *(f"{one.above} of {one.n}, p {p_said(one.p)}" if one and one.n else "" for one in duels))
        )
    lead = "In how many settings the line is above the column, and p of the sign test."
    return Table(["method / rule", *lines], "l" + "r" * len(lines), body, lead=lead)
