"""The report's figures; how they are called stands in :mod:`flyby.drawing`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flyby.drawing import (
    ACCENT,
    INK,
    LETTER,
    MUTED,
    NARROW,
    PALETTE,
    QUIET,
    Drawing,
    Floats,
    canvas,
    clean,
    place_axes,
    room,
    wide,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEGEND_LIMIT = 10

_GUIDE: dict[str, Any] = {"color": QUIET, "linestyle": (0, (5, 4)), "linewidth": 1.3}


@dataclass(frozen=True)
class Panel:
    """One small plot of lines over epochs, or over what ``across`` says: ``lines`` maps a name to its (epoch, value)
    points; ``guide`` is a faint dashed reference, straight from its first to its last point, which leaves the
    frame where showing all of it would flatten the lines; ``low`` is where per cent begin (0, 50 or 80), ``log`` asks
    for a logarithmic axis."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    percent: bool = False
    low: int = 0
    from_zero: bool = True
    guide: Sequence[tuple[float, float]] = ()
    guide_label: str = ""
    log: bool = False
    across: str = "epoch"


@Drawing
def run_bars(
    names: Sequence[str], percents: Sequence[float], spans: Sequence[tuple[float, float] | None] = ()
) -> Figure:
    """One horizontal bar per run, the best in the accent colour, each with its number and its interval, if known."""
    labels = [clean(name, 28 if wide() > NARROW else 16) for name in names]
    left = room(labels)
    figure = canvas(30 * len(labels) + 34)
    axes = place_axes(figure, left, 4, wide() - left - (60 if wide() > NARROW else 44), 30 * len(labels))
    rows = range(len(labels))
    for row, percent in zip(rows, percents, strict=True):
        best = f"{percent:.1f}" == f"{max(percents):.1f}"  # runs that print alike are alike
        axes.barh(row, percent, height=0.62, color=ACCENT if best else QUIET)
        ends = spans[row] if spans else None
        if ends is not None:
            axes.plot(ends, (row, row), color=INK, linewidth=1.2, marker="|", markersize=6)
        axes.annotate(
            f"{percent:.1f}",
            (max(percent, ends[1]) if ends else percent, row),
            (6, 0),
            "data",
            "offset points",
            va="center",
            weight="bold" if best else "normal",
        )
    per_cent(axes, labels)
    return figure


def per_cent(axes: Axes, labels: Sequence[str]) -> None:
    """Lying bars with these names, from 0 to 100 %."""
    axes.set_yticks(range(len(labels)), labels, color=INK)
    axes.set(xlim=(0, 100), ylim=(len(labels) - 0.5, -0.5))
    axes.set_xticks(range(0, 101, 20), [f"{tick} %" for tick in range(0, 101, 20)])
    axes.grid(axis="x")
    axes.spines["bottom"].set_visible(False)


@Drawing
def class_bars(names: Sequence[str], percents: Sequence[float]) -> Figure:
    """One column a class from 0 to 100 %; a class that was never tested (NaN) has no column."""
    labels = [clean(name, 16) for name in names]
    pitch = min((wide() - 60) / len(labels), 78)
    turned = max(map(len, labels)) * LETTER > pitch
    step = max(1, math.ceil(13 / pitch)) if turned else 1
    foot = room(labels) + 6 if turned else 28
    figure = canvas(24 + 190 + foot)
    axes = place_axes(figure, 48, 24, pitch * len(labels), 190)
    axes.bar(range(len(labels)), np.nan_to_num(np.asarray(percents, dtype=np.float64)), width=0.72, color=ACCENT)
    if pitch >= 28:
        for place, percent in enumerate(percents):
            text = f"{percent:.0f}" if math.isfinite(percent) else "–"
            axes.annotate(
                text, (place, percent if math.isfinite(percent) else 0), (0, 4), "data", "offset points", ha="center"
            )
    axes.set_xticks(
        range(0, len(labels), step), labels[::step], rotation=90 if turned else 0, fontsize=12 if pitch > 13 else 10
    )
    axes.set(xlim=(-0.6, len(labels) - 0.4), ylim=(0, 100))
    axes.set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    return figure


@Drawing
def curves(panels: Sequence[Panel], height: float = 220) -> Figure:
    """Panels of lines side by side. Up to ten lines are told apart by colour and dash; more become a faint bundle with
    its median."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    told = len(names) <= LEGEND_LIMIT
    looks: list[dict[str, Any]] = [
        {"color": PALETTE[i % len(PALETTE)], "linestyle": "-" if i < len(PALETTE) else "--"} for i in range(len(names))
    ]
    bundle: dict[str, Any] = {"color": QUIET, "linewidth": 0.8, "alpha": 0.7}
    keys = (
        [(clean(name, 20), Line2D([], [], **look)) for name, look in zip(names, looks, strict=True)]
        if told and len(names) > 1
        else []
    )
    keys += [(panel.guide_label, Line2D([], [], **_GUIDE)) for panel in panels if panel.guide]
    widths = [room([label]) + 40 for label, _ in keys]
    per_row = len(keys) if sum(widths) <= wide() - 40 else max(1, int((wide() - 40) // max(widths)))
    foot = 22 * math.ceil(len(keys) / per_row) + 8 if keys else 0
    gap, tall = 52, height + 70
    across = max(2, len(panels)) if wide() > NARROW else 1
    each = (wide() - 6 - gap * across) / across
    figure = canvas(tall * math.ceil(len(panels) / across) + foot)
    for place, panel in enumerate(panels):
        row, column = divmod(place, across)
        axes = place_axes(figure, (gap + each) * column + gap - 8, tall * row + 30, each, height)
        if panel.guide:
            (start, high), (end, low) = panel.guide[0], panel.guide[-1]  # in small steps: a logarithmic axis bends it
            axes.plot(np.linspace(start, end, 200), np.linspace(high, low, 200), **_GUIDE, zorder=1)
        for name, look in zip(names, looks, strict=True):
            points = _thinned(panel.lines.get(name, ()), max(40, 4000 // len(names)))
            axes.plot(
                *points.T,
                **(look if told else bundle),
                marker="o" if len(points) <= 10 else "",
                markersize=3.5 if told else 2,
            )
        if not told:
            axes.plot(*_thinned(_median(panel.lines), 400).T, color=ACCENT, linewidth=2.4)
        _finish(axes, panel)
    if keys:
        labels, handles = zip(*keys, strict=True)
        where: dict[str, Any] = {
            "loc": "lower left",
            "bbox_to_anchor": ((gap - 8) / wide(), 0),
            "borderpad": 0,
            "borderaxespad": 0,
        }
        figure.legend(handles, labels, ncols=per_row, frameon=False, handlelength=1.6, columnspacing=1.6, **where)
    return figure


def _finish(axes: Axes, panel: Panel) -> None:
    """Titles, ticks and limits of one panel: whole epochs, per cent from 0 to 100, everything else from 0 where nothing
    is negative."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    epochs = {epoch for points in panel.lines.values() for epoch, _ in points}
    axes.set_title(panel.title)
    axes.set_xlabel(panel.across)
    axes.grid(axis="y")
    if len(epochs) > 1:  # a guide may begin before the lines do
        margin = 0.02 * (max(epochs) - min(epochs))
        axes.set_xlim(min(epochs) - margin, max(epochs) + margin)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if len(epochs) <= 8:
        axes.set_xticks(sorted(epochs))
    if panel.percent:
        ticks = range(panel.low, 101, {0: 25, 50: 10}.get(panel.low, 5))
        axes.set_ylim(panel.low, 100 + (100 - panel.low) / 50)
        axes.set_yticks(ticks, [f"{tick} %" for tick in ticks])
    elif panel.log:
        least = min((value for points in panel.lines.values() for _, value in points if value > 0), default=1.0)
        axes.set_yscale("log")
        axes.set_ylim(bottom=least / 1.5)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:g}" if value < 1e4 else f"1e{math.log10(value):.0f}")
        )
        axes.set_title(f"{panel.title} (log scale)")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        if panel.from_zero and axes.dataLim.y0 >= 0:
            axes.set_ylim(bottom=0)
        _makeroom(axes, panel)


def _makeroom(axes: Axes, panel: Panel) -> None:
    """Give the lines three fifths of the height where the guide would leave them less than half, and say where the
    guide comes from."""
    highest = max((value for points in panel.lines.values() for _, value in points), default=0.0)
    start = max(panel.guide, key=lambda point: point[1], default=(0.0, 0.0))
    if highest <= 0 or start[1] <= 2 * highest:
        return
    top = highest / 0.6
    axes.set_ylim(top=top)
    end = min(panel.guide, key=lambda point: point[1])
    leaves = start[0] + (end[0] - start[0]) * (start[1] - top) / (start[1] - end[1])
    axes.annotate(
        f"↖ from {start[1]:.3g}",
        (leaves, top),
        (-4, -3),
        "data",
        "offset points",
        ha="right",
        va="top",
        fontsize=11,
        color=MUTED,
    )


def _thinned(points: Sequence[tuple[float, float]] | Floats, most: int) -> Floats:
    """At most ``most`` of the points, evenly spread, first and last kept: a line needs no more than the pixels it
    covers."""
    array = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    if len(array) <= most:
        return array
    return np.asarray(array[np.unique(np.linspace(0, len(array) - 1, most).round().astype(int))])


def _median(lines: Mapping[str, Sequence[tuple[float, float]]]) -> Floats:
    at: dict[float, list[float]] = {}
    for points in lines.values():
        for epoch, value in points:
            if math.isfinite(value):
                at.setdefault(epoch, []).append(value)
    return np.array([(epoch, float(np.median(at[epoch]))) for epoch in sorted(at)], dtype=np.float64).reshape(-1, 2)
