"""How strongly sites aligned, and how often AURORA's bound bit: from a run's history to a row, and from rows to one
figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyby.drawing import INK, MUTED, PALETTE, Drawing, canvas, clean, place_axes, wide

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 50
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


def strengths(metrics: Path) -> dict[str, Any]:
    """``{"lambda": {...}}`` of a run's metrics.jsonl, or nothing where no site has a lambda: every n-th epoch's mean
    lambda for each site, the largest lambda and the share of steps above the bound since the epoch before it, and both
    over the whole training."""
    sites: dict[str, list[dict[str, Any]]] = {}
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        row = json.loads(line)
        if "lambda_peak" in row:
            sites.setdefault(row["site"], []).append(row)
    if not sites:
        return {}
    last = max(len(rows) for rows in sites.values())
    step = next((n for n in STEPS if last / n <= POINTS), STEPS[-1])
    epochs = sorted({1, *range(step, last + 1, step), last})
    return {"lambda": {"epochs": epochs, "sites": {name: _site(rows, epochs) for name, rows in sites.items()}}}


def _site(rows: Sequence[Mapping[str, Any]], epochs: Sequence[int]) -> dict[str, Any]:
    held = [e for e in epochs if e <= len(rows)]  # one that stopped early has fewer
    spans = [rows[before:e] for before, e in zip([0, *held], held, strict=False)]
    return {
        "lambda": [_short(rows[e - 1]["lambda"]) for e in held],
        "peak": [_short(max(row["lambda_peak"] for row in span)) for span in spans],
        "bound": [_short(sum(row["lambda_bound"] for row in span) / len(span)) for span in spans],
        "largest": _short(max(row["lambda_peak"] for row in rows)),
        "share": _short(sum(row["lambda_bound"] for row in rows) / len(rows)),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class Line:
    """The sites of one way to train: their lambda and share above the bound at some epochs, [site][epoch]."""

    name: str
    epochs: list[int]
    strength: list[list[float]]
    bound: list[list[float]]


def line_of(name: str, row: Mapping[str, Any]) -> Line:
    found = row["lambda"]
    whole = [site for site in found["sites"].values() if len(site["lambda"]) == len(found["epochs"])]
    return Line(name, found["epochs"], [site["lambda"] for site in whole], [site["bound"] for site in whole])


@Drawing
def trajectories(lines: Sequence[Line], bound: float) -> Figure:
    """Above: lambda against epochs, a line for each site, with the bound dotted. Below: the share of steps above it."""
    left, right, top = 62.0, 14.0, 14.0 + 18 * len(lines)
    figure = canvas(top + 360)
    above = place_axes(figure, left, top, wide() - left - right, 190)
    below = place_axes(figure, left, top + 232, wide() - left - right, 80)
    for place, line in enumerate(lines):
        colour, dash = PALETTE[place % len(PALETTE)], "--" if place % 2 else "-"  # equal lines hide each other
        for axes, values, scale in ((above, line.strength, 1.0), (below, line.bound, 100.0)):
            for one in values:
                axes.plot(line.epochs, [scale * v for v in one], color=colour, linestyle=dash, linewidth=1.3)
        figure.text(
            left / wide(),
            1 - (14 + 18 * place) / (top + 360),
            f"{'- -' if place % 2 else '—'} {clean(line.name, 100)}",
            color=colour,
        )
    above.axhline(bound, color=INK, linestyle=":", linewidth=1)
    above.annotate(f"bound {bound:g}", (0, bound), (4, 4), ("axes fraction", "data"), "offset points", color=INK)
    highest = max((v for line in lines for one in line.strength for v in one), default=1.0)
    if highest > 10 * bound:
        above.set_yscale("log")
        above.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _frame(above, "lambda", "")
    _frame(below, "steps above, %", "epoch")
    below.set_ylim(-3, 103)
    return figure


def _frame(axes: Axes, up: str, along: str) -> None:
    axes.grid(axis="y")
    axes.set_ylabel(up, color=MUTED)
    axes.set_xlabel(along, color=MUTED)
