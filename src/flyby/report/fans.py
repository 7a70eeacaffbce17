"""Values that change by steps over the hours of a plan, at many nodes: fans of their quantiles, and who leads when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flyby.drawing import LETTER, PALETTE, WIDTH, Drawing, Floats, canvas, clean, place_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Steps = Sequence[tuple[float, float]]  # (hour, value from then on)
POINTS = 240  # a fan needs no more than so many moments


def at_hours(steps: Steps, hours: Floats) -> Floats:
    """The values at these hours; before the first step, its value."""
    moments, values = np.array([h for h, _ in steps]), np.array([v for _, v in steps])
    return np.asarray(values[np.clip(np.searchsorted(moments, hours, side="right") - 1, 0, None)])


def spread(nodes: Mapping[str, Steps], hours: Floats) -> Floats:
    """``[node, hour]``."""
    return np.stack([at_hours(steps, hours) for steps in nodes.values()])


def mean_at(nodes: Mapping[str, Steps], hour: float) -> float:
    return float(spread(nodes, np.array([hour])).mean())


@Drawing
def fan(groups: Mapping[str, Mapping[str, Steps]], end: float, title: str, percent: bool = False) -> Figure:
    """A fan per group: the mean of per cents, the median of counts as a line; half of its nodes as a band, which of
    counts only the last group has, since theirs lie on each other."""
    figure = canvas(336)
    axes = place_axes(figure, 56, 30, WIDTH - 60 - 150, 250)
    hours = np.linspace(0, end, POINTS)
    low, high = np.inf, -np.inf
    marks: list[tuple[float, str, str]] = []
    for (name, nodes), colour in zip(groups.items(), PALETTE, strict=False):
        values = spread(nodes, hours) * (100 if percent else 1)
        middle = values.mean(0) if percent else np.median(values, 0)
        band = np.percentile(values, (25, 75), axis=0)
        if percent or len(marks) == len(groups) - 1:
            axes.fill_between(hours, band[0], band[1], color=colour, alpha=0.22, linewidth=0, step="post")
        low, high = min(low, float(band[0].min())), max(high, float(band[1].max()))
        axes.step(hours, middle, where="post", color=colour, linewidth=2.4)
        low, high = min(low, float(middle.min())), max(high, float(middle.max()))
        marks.append((float(middle[-1]), clean(name, 18), colour))
    margin = 0.06 * max(high - low, 1e-9)
    axes.set(xlim=(0, end), ylim=(low - margin if percent else 0, high + margin))
    axes.set_title(title)
    axes.set_xlabel("hours")
    axes.grid(axis="y")
    if percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    _name(axes, marks, 250)
    return figure


def _name(axes: object, marks: list[tuple[float, str, str]], height: float) -> None:
    """Names at the ends of the lines, apart enough to be read."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    low, high = axes.get_ylim()
    gap, last = (high - low) * 2.2 * LETTER / height, -np.inf
    for value, name, colour in sorted(marks):
        last = max(value, last + gap)
        axes.annotate(
            f"{name}  {value:.4g}",
            (1, last),
            (8, 0),
            ("axes fraction", "data"),
            "offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )


def leads(groups: Mapping[str, Mapping[str, Steps]], end: float, enough: float = 0.001) -> list[tuple[float, str]]:
    """Who has the highest mean from when on: (hour, name), a new one only where it leads by ``enough``."""
    hours = np.linspace(0, end, POINTS)
    means = {name: spread(nodes, hours).mean(0) for name, nodes in groups.items()}
    found: list[tuple[float, str]] = []
    for i, hour in enumerate(hours):
        ranked = sorted(means, key=lambda name: -means[name][i])
        clear = len(ranked) == 1 or means[ranked[0]][i] - means[ranked[1]][i] > enough
        if clear and (not found or found[-1][1] != ranked[0]):
            found.append((float(hour), ranked[0]))
    return found
