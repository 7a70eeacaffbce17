"""The report's figures: plain numbers in, one self-contained inline SVG out.

Every drawing function is called as ``draw(key, label, ...)``: ``key`` names the figure (its ids carry it, so that many
figures can share one page), ``label`` is what a screen reader says. Text stays text, one SVG unit is one CSS pixel, and
equal input gives equal bytes.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from html import escape
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
P = ParamSpec("P")

# Okabe and Ito's colour-blind-safe palette, without black (the text) and yellow (too faint for a line on white).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B")
INK, MUTED, RULE, ACCENT, QUIET = "#1c2430", "#5c6673", "#e4e7eb", "#0072B2", "#a9bccb"
WIDTH = 920
LEGEND_LIMIT = 10

_LETTER = 6.8  # pixels, a fair mean for 12 px sans-serif
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a class may be called "$5"
    "font.family": "sans-serif",
    "font.size": 12.0,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 13.0,
    "axes.titlelocation": "left",
    "axes.titlepad": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#eef0f3",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "lines.linewidth": 1.7,
    "axes.unicode_minus": False,
}
_GUIDE: dict[str, Any] = {"color": "#b3bac2", "linestyle": (0, (5, 4)), "linewidth": 1.3}


@dataclass(frozen=True)
class Panel:
    """One small plot of lines over epochs: ``lines`` maps a name to its (epoch, value) points; ``guide`` is a faint
    dashed reference, which leaves the frame where showing all of it would flatten the lines; ``low`` is where per cent
    begin (0, 50 or 80), ``log`` asks for a logarithmic axis; a guide is a straight line between its first and its last
    point."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    percent: bool = False
    low: int = 0
    from_zero: bool = True
    guide: Sequence[tuple[float, float]] = ()
    guide_label: str = ""
    log: bool = False


def clean(value: object, limit: int | None = None) -> str:
    """Text from a file, fit to show: one line, no control characters or lone surrogates, cut with an ellipsis at
    ``limit``."""
    whole = str(value).encode("utf-8", "replace").decode()
    text = " ".join("".join(character if character.isprintable() else " " for character in whole).split())
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def _as_svg(draw: Callable[P, Figure]) -> Callable[Concatenate[str, str, P], str]:
    """Run a drawing function under the report's own style (whatever the user's matplotlibrc says)
    and return its SVG."""

    @wraps(draw)
    def drawn(key: str, label: str, /, *args: P.args, **kwargs: P.kwargs) -> str:
        import matplotlib

        out = io.StringIO()
        with matplotlib.rc_context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "glyph missing" is about matplotlib's font; the browser has its own
            matplotlib.rcdefaults()
            settings: Any = {**_STYLE, "svg.hashsalt": key}
            matplotlib.rcParams.update(settings)
            draw(*args, **kwargs).savefig(out, format="svg", transparent=True, metadata={"Date": None})
        return _inline(out.getvalue(), key, label)

    return drawn


def _inline(svg: str, key: str, label: str) -> str:
    """Make a matplotlib SVG a good citizen of a shared page: own ids, no global style, no metadata, short numbers, a
    spoken name."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.S)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))

    def tidy(match: re.Match[str]) -> str:
        tag = match[0]
        tag = re.sub(r'\sid="([^"]*)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", tag)
        tag = re.sub(r'(url\(#|href="#)', rf"\g<1>{key}-", tag)
        tag = re.sub(r"(?:'[^']+', )+sans-serif", "sans-serif", tag)
        tag = re.sub(r'\s*transform="rotate\(-?0 [^"]*"', "", tag)
        # An image's own size must keep its digits; everywhere else a hundredth of a pixel is plenty.
        return (
            tag
            if tag.startswith("<image")
            else re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), tag)
        )

    svg = re.sub(r"<[^>]+>", tidy, svg)
    svg = re.sub(r"<g>\s*</g>|<defs>\s*</defs>", "", svg)
    box = re.search(r'viewBox="([^"]*)"', svg)
    opening = (
        f'<svg role="img" aria-label="{escape(clean(label))}" viewBox="{box[1] if box else ""}"'
        ' xmlns="http://www.w3.org/2000/svg"'
    )
    return re.sub(
        r"<svg[^>]*>", lambda _: opening + ' xmlns:xlink="http://www.w3.org/1999/xlink">', svg, count=1
    ).strip()


def _canvas(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH / 72, height / 72), dpi=72)


def _axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes placed in pixels from the top left corner, as on the page."""
    total = figure.get_figheight() * 72
    return figure.add_axes((left / WIDTH, 1 - (top + height) / total, width / WIDTH, height / total))


def _room(labels: Sequence[str], least: float = 24) -> float:
    return max(least, max((len(label) for label in labels), default=0) * _LETTER + 10)


def numbers_fit(columns: int, widest: int) -> bool:
    """Whether a grid with so many columns has room to print each cell's number, ``widest`` characters long."""
    return (WIDTH - 200) / max(columns, 1) >= widest * _LETTER + 3


@_as_svg
def grid(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Floats,
    show: Callable[[float], str],
    top: float = 0,
    totals: Sequence[str] = (),
    unit: str = "",
) -> Figure:
    """A table drawn as tinted cells (NaN is an empty cell): numbers are printed while they fit, beyond that a colour
    scale stands in."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    names, heads = [clean(row, 20) for row in rows], [clean(column, 16) for column in columns]
    top = top or float(np.nanmax(values, initial=1.0))
    texts = [[show(v) if math.isfinite(v) else "" for v in row] for row in values]
    numbers = numbers_fit(len(heads), max((len(t) for row in texts for t in row), default=1))
    left, right, foot = _room(names), _room(totals, 40) + 4 if totals else 4.0, 8 if numbers else 46
    cell = min((WIDTH - left - right) / max(len(heads), 1), 78.0)
    tall = (28.0 if len(names) <= 16 else 17.0) if numbers else max(11.0, min(24.0, 420 / max(len(names), 1)))
    turned = max(map(len, heads), default=0) * _LETTER > cell
    step = max(1, math.ceil(13 / cell)) if turned else 1
    head = _room(heads) + 4 if turned else 26.0

    figure = _canvas(head + tall * len(names) + foot)
    axes = _axes(figure, left, head, cell * len(heads), tall * len(names))
    tint = LinearSegmentedColormap.from_list("tint", ["#eaf3f9", "#8fc1e0", "#2f86bd", "#0b4f7d"])
    norm = PowerNorm(
        0.5 if totals else 1.0, 0, top
    )  # counts span decades: the square root keeps small holdings visible
    edges = (-0.5, len(heads) - 0.5, len(names) - 0.5, -0.5)
    if len(names) * len(heads) <= 800:
        x, y = np.arange(len(heads) + 1) - 0.5, np.arange(len(names) + 1) - 0.5
        axes.pcolormesh(
            x,
            y,
            np.ma.masked_invalid(values),
            cmap=tint,
            norm=norm,
            edgecolors="white",
            linewidth=1.5 if numbers else 0.4,
        )
        axes.set(xlim=edges[:2], ylim=edges[2:])
    else:  # as one picture: thousands of rectangles would weigh megabytes
        axes.imshow(
            np.ma.masked_invalid(values), cmap=tint, norm=norm, interpolation="none", aspect="auto", extent=edges
        )
    for i, row in enumerate(texts if numbers else []):
        for j, text in enumerate(row):
            color = QUIET if not text else "white" if float(norm(values[i, j])) > 0.66 else INK
            axes.text(j, i, text or "·", ha="center", va="center", fontsize=12 if tall > 20 else 11, color=color)
    axes.set_xticks(
        range(0, len(heads), step), heads[::step], rotation=90 if turned else 0, fontsize=12 if cell > 13 else 10
    )
    small = 12 if tall > 14 else 9
    axes.set_yticks(range(len(names)), names, fontsize=small, va="center")
    axes.tick_params(top=False, labeltop=True, labelbottom=False, pad=4)
    for side in axes.spines.values():
        side.set_visible(not numbers)
    edge = edges[1] + _room(totals, 40) / cell
    for i, text in enumerate(totals):
        axes.text(edge, i, text, ha="right", va="center", fontsize=small, color=MUTED)
    if totals:
        axes.annotate(
            "total",
            (edge, -0.5),
            (0, 4),
            "data",
            "offset points",
            ha="right",
            va="bottom",
            color=MUTED,
            annotation_clip=False,
        )
    if not numbers:
        _scale(figure, left, head + tall * len(names) + 14, tint, norm, top, show, unit)
    return figure


def _scale(
    figure: Figure, left: float, top: float, tint: Any, norm: Any, most: float, show: Callable[[float], str], unit: str
) -> None:
    axes = _axes(figure, left, top, 220, 9)
    axes.imshow(
        np.linspace(0, most, 200)[None], cmap=tint, norm=norm, aspect="auto", interpolation="none", extent=(0, 1, 0, 1)
    )
    axes.set_yticks([])
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], [show(most * part) for part in (0, 0.25, 0.5, 0.75, 1)], fontsize=11)
    axes.annotate(
        f"{unit}; blank: none",
        (1, 0.5),
        (10, 0),
        "axes fraction",
        "offset points",
        va="center",
        color=MUTED,
        fontsize=11,
    )


@_as_svg
def run_bars(names: Sequence[str], percents: Sequence[float]) -> Figure:
    """One horizontal bar a run, the best in the accent colour, each with its number."""
    labels = [clean(name, 28) for name in names]
    left = _room(labels)
    figure = _canvas(30 * len(labels) + 34)
    axes = _axes(figure, left, 4, WIDTH - left - 60, 30 * len(labels))
    rows = range(len(labels))
    for row, percent in zip(rows, percents, strict=True):
        best = f"{percent:.1f}" == f"{max(percents):.1f}"  # runs that print alike are alike
        axes.barh(row, percent, height=0.62, color=ACCENT if best else QUIET)
        axes.annotate(
            f"{percent:.1f}",
            (percent, row),
            (6, 0),
            "data",
            "offset points",
            va="center",
            weight="bold" if best else "normal",
        )
    axes.set_yticks(rows, labels, color=INK)
    axes.set(xlim=(0, 100), ylim=(len(labels) - 0.5, -0.5))
    axes.set_xticks(range(0, 101, 20), [f"{tick} %" for tick in range(0, 101, 20)])
    axes.grid(axis="x")
    axes.spines["bottom"].set_visible(False)
    return figure


@_as_svg
def class_bars(names: Sequence[str], percents: Sequence[float]) -> Figure:
    """One column a class from 0 to 100 %; a class that was never tested (NaN) has no column."""
    labels = [clean(name, 16) for name in names]
    pitch = min((WIDTH - 60) / len(labels), 78)
    turned = max(map(len, labels)) * _LETTER > pitch
    step = max(1, math.ceil(13 / pitch)) if turned else 1
    foot = _room(labels) + 6 if turned else 28
    figure = _canvas(24 + 190 + foot)
    axes = _axes(figure, 48, 24, pitch * len(labels), 190)
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


@_as_svg
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
    widths = [_room([label]) + 40 for label, _ in keys]
    per_row = len(keys) if sum(widths) <= WIDTH - 40 else int((WIDTH - 40) // max(widths))
    foot = 22 * math.ceil(len(keys) / per_row) + 8 if keys else 0
    gap = 52
    wide = (WIDTH - 6 - gap * max(2, len(panels))) / max(2, len(panels))
    figure = _canvas(30 + height + 40 + foot)
    for place, panel in enumerate(panels):
        axes = _axes(figure, (gap + wide) * place + gap - 8, 30, wide, height)
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
            "bbox_to_anchor": ((gap - 8) / WIDTH, 0),
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
    axes.set_xlabel("epoch")
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
        _make_room(axes, panel)


def _make_room(axes: Axes, panel: Panel) -> None:
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
