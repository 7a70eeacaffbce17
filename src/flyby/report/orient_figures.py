"""FOL's figure: every node as a line from its local accuracy to its personal one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyby.report.figures import ACCENT, INK, PALETTE, WIDTH, _as_svg, _axes, _canvas, clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 12  # nodes that can be named beside their lines
WORSE = PALETTE[1]


def slope_chart(key: str, label: str, slopes: object) -> str:
    """The chart of a section's ``slopes``, ``{"left", "right", "pairs": {node: [before, after]}}`` with accuracies in
    0..1; empty where it is not one."""
    if not isinstance(slopes, Mapping) or not isinstance(slopes.get("pairs"), Mapping):
        return ""
    pairs = {
        clean(name, 20): (float(p[0]) * 100, float(p[1]) * 100) for name, p in slopes["pairs"].items() if _is_pair(p)
    }
    key = "".join(c if c.isalnum() else "-" for c in key)  # it becomes part of ids
    return (
        slopes_figure(key, label, pairs, (clean(slopes.get("left", ""), 20), clean(slopes.get("right", ""), 20)))
        if pairs
        else ""
    )


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(isinstance(v, int | float) and math.isfinite(v) for v in value)
    )


@_as_svg
def slopes_figure(pairs: Mapping[str, tuple[float, float]], ends: tuple[str, str]) -> Figure:
    """A line a node, accented where it rose and in the warning colour where it fell; a bold one for the mean. Few nodes
    are named."""
    figure = _canvas(380)
    axes = _axes(figure, 110, 12, WIDTH - 320, 320)
    for name, (before, after) in pairs.items():
        axes.plot(
            (0, 1),
            (before, after),
            color=ACCENT if after >= before else WORSE,
            alpha=0.8 if len(pairs) <= FEW else 0.4,
            marker="o",
            markersize=3,
        )
        if len(pairs) <= FEW:
            axes.annotate(f"{name} {after:.1f}", (1, after), (10, 0), "data", "offset points", va="center", fontsize=11)
    first, last = (sum(pair[i] for pair in pairs.values()) / len(pairs) for i in (0, 1))
    axes.plot((0, 1), (first, last), color=INK, linewidth=3)
    for place, value, shift, side in (
        (0, first, -10, "right"),
        (1, last, 10 if len(pairs) > FEW else -10, "left" if len(pairs) > FEW else "right"),
    ):
        axes.annotate(f"mean {value:.1f}", (place, value), (shift, 9), "data", "offset points", ha=side, weight="bold")
    low = min(min(pair) for pair in pairs.values())
    axes.set(xlim=(-0.02, 1.02), ylim=(max(0, low - 4), min(100, max(max(pair) for pair in pairs.values()) + 2) + 1))
    axes.set_xticks((0, 1), ends, color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.grid(axis="y")
    return figure
