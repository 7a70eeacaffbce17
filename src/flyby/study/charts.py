"""A study as figures: accuracy against alpha with a line per method and rule, or bars where there is one alpha. What
has several runs has their standard deviation as an error bar; cells without a row are not drawn."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from flyby.drawing import ACCENT, INK, NARROW, PALETTE, QUIET, Drawing, canvas, clean, place_axes, room, wide
from flyby.errors import BadInput
from flyby.files import write_bytes, write_text
from flyby.report.figures import per_cent
from flyby.study.grid import Standing
from flyby.study.tables import Group, Shown, grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW = 7  # lines that one panel can tell apart by colour; of more, every method has a panel of its own
Point = tuple[float, float | None]  # mean and standard deviation, in per cent
Curves = Mapping[str, Mapping[float, Point]]  # by the name of a line, and by alpha


@dataclass(frozen=True)
class Chart:
    """One figure: how its file is called, what it says, and its points by method and rule."""

    stem: str
    title: str
    lines: Mapping[tuple[str, str], Mapping[float, Point]]

    @property
    def alphas(self) -> list[float]:
        return sorted({alpha for line in self.lines.values() for alpha in line})

    def drawn(self) -> tuple[Drawing[Any], tuple[Any, ...]]:
        """The drawing and what it is called with."""
        names = _names([*self.lines])
        if len(self.alphas) == 1:
            return bars, (names, [next(iter(line.values())) for line in self.lines.values()], self.title)
        if len(names) <= FEW:
            panel = dict(zip(names, self.lines.values(), strict=True))
            return against_alpha, ({"": panel}, self.alphas, self.title)
        panels: dict[str, dict[str, Mapping[float, Point]]] = defaultdict(dict)
        for (method, rule), line in self.lines.items():
            panels[method][rule] = line
        return against_alpha, (panels, self.alphas, self.title)

    @property
    def spoken(self) -> str:
        told = [
            f"{method} {rule} " + ", ".join(f"{mean:.1f} % at {alpha:g}" for alpha, (mean, _) in sorted(line.items()))
            for (method, rule), line in self.lines.items()
        ]
        return f"{self.title}: " + "; ".join(told)


def charts(now: Standing) -> list[Chart]:
    """One figure per table; studies of attacks have none."""
    groups, _ = grouped(now)
    found = []
    for group in sorted(groups):
        shown = Shown(now, groups[group], group)
        if shown.attacked:
            continue
        values: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for cell in shown.cells:
            if (accuracy := now.rows[cell.key]["accuracy"]) is not None:
                values[shown.line[cell.key]][cell.config.split.alpha].append(100 * accuracy)
        lines = {
            line: {a: (fmean(v), stdev(v) if len(v) > 1 else None) for a, v in sorted(values[line].items())}
            for line in shown.lines
            if line in values
        }
        if lines:
            found.append(Chart(_stem(now.name, group, list(groups)), group.heading.replace("`", ""), lines))
    if not found:
        raise BadInput(f"no figure can be drawn of {now.name}: its rows are of attacks, or none has an accuracy")
    return found


def write_charts(now: Standing, folder: Path) -> list[Path]:
    """Every figure as SVG and as PDF."""
    paths = []
    for chart in charts(now):
        draw, words = chart.drawn()
        paths += [folder / f"{chart.stem}.svg", folder / f"{chart.stem}.pdf"]
        write_text(paths[-2], on_paper(draw(chart.stem, chart.spoken, *words)))
        write_bytes(paths[-1], draw.pdf(*words))
    return paths


def on_paper(svg: str) -> str:
    """The text of a file: on white paper, for in a page that is dark its letters would be lost."""
    return re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="#ffffff"/>', svg, count=1) + "\n"


def _stem(name: str, group: Group, groups: list[Group]) -> str:
    """The study's name, and of its tables that which tells this one from the others."""
    units = ("", "", "-clients", "", "-epochs")
    parts = [
        f"{value}{unit}"
        for i, (value, unit) in enumerate(zip(group, units, strict=True))
        if len({other[i] for other in groups}) > 1
    ]
    return "-".join([name, *(re.sub(r"[^\w.-]+", "-", part).strip("-.") for part in parts)])


def _names(lines: list[tuple[str, str]]) -> list[str]:
    """What tells lines apart: the method, the rule, or both."""
    methods, rules = ({line[i] for line in lines} for i in (0, 1))
    if len(methods) == len(lines):
        return [method for method, _ in lines]
    return [rule if len(methods) == 1 and len(rules) == len(lines) else f"{method} / {rule}" for method, rule in lines]


def _short(name: str, most: int) -> str:
    """A long name without its middle: rules differ in their last settings."""
    text = clean(name)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - most + most // 2 + 1 :]}"


@Drawing
def bars(names: Sequence[str], points: Sequence[Point], title: str) -> Figure:
    """A bar per method and rule with its number and, of several runs, their standard deviation; the best is in the
    accent colour."""
    labels = [_short(name, 48 if wide() > NARROW else 18) for name in names]
    left, tall, head = room(labels), 24 * len(labels), 30
    figure = canvas(head + tall + 30)
    figure.text(8 / wide(), 1 - 18 / (72 * figure.get_figheight()), clean(title, int(wide() / 7)))
    axes = place_axes(figure, left, head, wide() - left - 60, tall)
    best = f"{max(mean for mean, _ in points):.1f}"
    for row, (mean, std) in enumerate(points):
        mine = f"{mean:.1f}" == best
        axes.barh(row, mean, height=0.62, color=ACCENT if mine else QUIET)
        if std is not None:
            axes.plot((mean - std, mean + std), (row, row), color=INK, linewidth=1.2, marker="|", markersize=6)
        where: dict[str, Any] = {"va": "center", "weight": "bold" if mine else "normal"}
        axes.annotate(f"{mean:.1f}", (mean + (std or 0.0), row), (6, 0), "data", "offset points", **where)
    per_cent(axes, labels)
    return figure


@Drawing
def against_alpha(panels: Mapping[str, Curves], alphas: Sequence[float], title: str) -> Figure:
    """Panels of accuracy against alpha, one under another where there is little room. Alphas stand at even steps; one
    name has one colour in all panels."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    looks: dict[str, dict[str, Any]] = {
        name: {"color": PALETTE[i % len(PALETTE)], "linestyle": ("-", "--", ":")[i // len(PALETTE) % 3]}
        for i, name in enumerate(names)
    }
    labels = [_short(name, 44) for name in names]
    per_row = max(1, int((wide() - 40) // (room(labels) + 40)))
    foot = 22 * math.ceil(len(names) / per_row) + 8
    across = min(3, len(panels)) if wide() > NARROW else 1
    gap, head, tall, height = 52, 24, 310, 240
    each = (wide() - 6 - gap * across) / across
    figure = canvas(head + tall * math.ceil(len(panels) / across) + foot)
    figure.text(8 / wide(), 1 - 16 / (72 * figure.get_figheight()), clean(title, int(wide() / 7)))
    points = [point for curves in panels.values() for line in curves.values() for point in line.values()]
    ends = [mean + side * (std or 0.0) for mean, std in points for side in (-1, 1)]
    low, high = max(0, 10 * math.floor(min(ends) / 10)), min(100, 10 * math.ceil(max(ends) / 10))
    for place, (name_of, curves) in enumerate(panels.items()):
        row, column = divmod(place, across)
        axes = place_axes(figure, (gap + each) * column + gap - 8, head + tall * row + 30, each, height)
        for name, line in curves.items():
            _curve(axes, line, alphas, looks[name])
        axes.set(ylim=(low, high + 1), xlim=(-0.2, len(alphas) - 0.8))
        axes.set_title(clean(name_of, 40))
        axes.set_xlabel("alpha")
        axes.set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
        axes.set_ylabel("accuracy, %" if column == 0 else "", labelpad=2)
        axes.grid(axis="y")
    handles = [Line2D([], [], marker="o", markersize=3.5, **looks[name]) for name in names]
    place_of: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": ((gap - 8) / wide(), 0)}
    figure.legend(
        *(handles, labels), ncols=per_row, frameon=False, handlelength=1.8, borderpad=0, borderaxespad=0, **place_of
    )
    return figure


def _curve(axes: Axes, line: Mapping[float, Point], alphas: Sequence[float], look: dict[str, Any]) -> None:
    """One line with its error bars; where a cell is missing the line is broken."""
    places = range(len(alphas))
    means = [line[a][0] if a in line else math.nan for a in alphas]
    axes.plot(places, means, marker="o", markersize=3.5, **look)
    spread = [(i, *line[a]) for i, a in enumerate(alphas) if a in line and line[a][1] is not None]
    if spread:
        at, middle, error = zip(*spread, strict=True)
        axes.errorbar(at, middle, error, fmt="none", ecolor=look["color"], elinewidth=1.1, capsize=2.5)
