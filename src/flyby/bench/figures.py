"""The figures of ``flyby bench``: bars of the loops, lines of growth. Each as an SVG for pages and a PNG for everything
else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyby.drawing import ACCENT, INK, MUTED, PALETTE, QUIET, WIDTH, Drawing, canvas, place_axes, room

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"limit": "#d3dbe2", "flyby": ACCENT, "script": QUIET}
NAMES = {"limit": "limit: bare step", "flyby": "flyby", "script": "DataLoader script"}
WORKS = {"plain": "Plain training", "salt": "SALT (FAFI), two views", "aurora": "AURORA, two views"}


def draw(facts: Mapping[str, Any]) -> tuple[str, bytes]:
    """The figure of a result as (SVG, PNG)."""
    if facts["kind"] == "loops":
        label = f"Samples a second of {facts['model']} on {facts['device']}"
        return loop_bars("bench", label, facts["rows"]), loop_bars.png(facts["rows"])
    rows = facts["rows"]
    words = {"title": f"{facts['title']}: {facts['y']}", "across": facts["x"], "log": facts["log"]}
    return growth_lines(f"bench-{facts['kind']}", facts["title"], rows, **words), growth_lines.png(rows, **words)


@Drawing
def loop_bars(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A group of bars for each kind of training: the limit, flyby, the script, each with its samples a second; flyby's
    with its two ratios."""
    works = list(dict.fromkeys(row["work"] for row in rows))
    groups = [[row for row in rows if row["work"] == work] for work in works]
    bar, gap, head = 26, 16, 26
    tall = sum(head + bar * len(group) + gap for group in groups)
    left, right = room(list(NAMES.values())), 300
    most = max(row["samples_per_second"] for row in rows)
    figure = canvas(tall + 46)
    axes = place_axes(figure, left, 4, WIDTH - left - right, tall)
    place, ticks = 0.0, []
    for group in groups:
        axes.annotate(
            WORKS[group[0]["work"]],
            (0, place + head - 9),
            (-left + 4, 0),
            "data",
            "offset points",
            weight="bold",
            color=INK,
        )
        place += head
        for row in group:
            value, ours = row["samples_per_second"], row["way"] == "flyby"
            axes.barh(place + bar / 2, value, height=bar * 0.72, color=COLOURS[row["way"]])
            ratios = [f"{row['of_limit']:.2f} of the limit"] if ours and row["of_limit"] else []
            ratios += [f"{row['of_script']:.1f}× the script"] if ours and row["of_script"] else []
            note = f"{value:,.0f}" + (f"   {', '.join(ratios)}" if ratios else "")
            axes.annotate(
                note,
                (value, place + bar / 2),
                (7, 0),
                "data",
                "offset points",
                va="center",
                weight="bold" if ours else "normal",
            )
            ticks.append((place + bar / 2, NAMES[row["way"]]))
            place += bar
        place += gap
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], color=INK)
    axes.set(xlim=(0, most), ylim=(tall, 0))
    axes.set_xlabel("samples (images) a second", color=MUTED)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    return figure


@Drawing
def growth_lines(rows: Sequence[Mapping[str, Any]], title: str, across: str, log: bool) -> Figure:
    """A line for each way of working, named at its end."""
    names = list(dict.fromkeys(row["line"] for row in rows))
    figure = canvas(340)
    axes = place_axes(figure, 64, 34, WIDTH - 64 - room(names) - 24, 250)
    ends = []
    for name, colour in zip(names, PALETTE, strict=False):
        points = sorted((row["x"], row["value"]) for row in rows if row["line"] == name)
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4)
        ends.append((points[-1], name, colour))
    axes.set_title(title)
    axes.set_xlabel(across)
    places = sorted({row["x"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:.3g}" for place in places])
    axes.minorticks_off()
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.grid(axis="y")
    for (x, y), name, colour, shift in _apart(axes, ends):
        axes.annotate(
            name,
            (x, y),
            (9, shift),
            "data",
            "offset points",
            va="center",
            color=colour,
            weight="bold",
            annotation_clip=False,
        )
    return figure


def _apart(axes: Any, ends: Sequence[tuple[tuple[float, float], str, str]], least: float = 16) -> list[Any]:
    """Names at the ends of lines, moved up where they would lie on one another."""
    heights = [(axes.transData.transform(point)[1], point, name, colour) for point, name, colour in ends]
    placed, before = [], float("-inf")
    for height, point, name, colour in sorted(heights):
        at = max(height, before + least)
        placed.append((point, name, colour, at - height))
        before = at
    return placed
