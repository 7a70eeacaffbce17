"""Drawings that several rooms share: plain numbers in, a matplotlib figure or one self-contained inline SVG out.

A function under :class:`Drawing` is called as ``draw(key, label, ...)``: ``key`` names the figure (its ids carry it, so
that many figures can share one page), ``label`` is what a screen reader says; ``draw.figure(...)`` is the same drawing
as a figure of matplotlib. Text stays text, one SVG unit is one CSS pixel, and equal input gives equal bytes.
``draw.both(...)`` is for pages: drawn a second time for a phone (functions that ask :func:`wide` for their room can be
called so), with the style's colours as CSS variables, so that a page can have dark ones.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from typing import TYPE_CHECKING, Any, Generic, ParamSpec

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
GRID = "#eef0f3"
ON_LIGHT, ON_DARK = "#1c2431", "#fffffe"  # text on a tinted cell, which is the same by day and by night
WIDTH, NARROW = 920, 354  # a page; a phone of 390 pixels without its margins
_WIDE: ContextVar[float] = ContextVar("wide", default=WIDTH)
# What a page may give other values to.
VARIABLES = {
    **{INK: "ink", MUTED: "muted", RULE: "rule", QUIET: "quiet", GRID: "grid", "#ffffff": "paper"},
    **{colour.lower(): f"c{i}" for i, colour in enumerate(PALETTE)},
}

LETTER = 6.8  # pixels, a fair mean for 12 px sans-serif
STYLE: dict[str, Any] = {
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
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "lines.linewidth": 1.7,
    "axes.unicode_minus": False,
}


def clean(value: object, limit: int | None = None) -> str:
    """Text from a file, fit to show: one line, no control characters or lone surrogates, cut with an ellipsis at
    ``limit``."""
    whole = str(value).encode("utf-8", "replace").decode()
    text = " ".join("".join(character if character.isprintable() else " " for character in whole).split())
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


class Drawing(Generic[P]):
    """A function that draws, under flyby's own style (whatever the user's matplotlibrc says): as inline SVG when it is
    called, as a figure of matplotlib, or as the bytes of a PNG or a PDF."""

    def __init__(self, draw: Callable[P, Figure]) -> None:
        self.draw, self.__doc__ = draw, draw.__doc__

    def __call__(self, key: str, label: str, /, *args: P.args, **kwargs: P.kwargs) -> str:
        out = io.StringIO()
        with _styled({"svg.hashsalt": key}):
            self.draw(*args, **kwargs).savefig(out, format="svg", transparent=True, metadata={"Date": None})
        return _inline(out.getvalue(), key, label)

    def both(self, key: str, label: str, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """For wide screens and for phones; the page's style shows one of them, and only that one is spoken."""
        wide = self(key, label, *args, **kwargs)
        token = _WIDE.set(NARROW)
        try:
            narrow = self(f"{key}-n", label, *args, **kwargs)
        finally:
            _WIDE.reset(token)
        both = wide.replace("<svg ", '<svg class="wide" ', 1) + narrow.replace("<svg ", '<svg class="narrow" ', 1)
        return re.sub(r"(?<=: )#[0-9a-f]{6}\b", _variable, both)

    def figure(self, *args: P.args, **kwargs: P.kwargs) -> Figure:
        with _styled():
            return self.draw(*args, **kwargs)

    def png(self, *args: P.args, **kwargs: P.kwargs) -> bytes:
        out = io.BytesIO()
        with _styled():
            self.draw(*args, **kwargs).savefig(out, format="png", dpi=144, facecolor="white")
        return out.getvalue()

    def pdf(self, *args: P.args, **kwargs: P.kwargs) -> bytes:
        out = io.BytesIO()
        with _styled({"pdf.fonttype": 42}):  # letters that another program can search and change
            self.draw(*args, **kwargs).savefig(out, format="pdf", metadata={"CreationDate": None})
        return out.getvalue()


@contextmanager
def _styled(more: dict[str, Any] | None = None) -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "glyph missing" is about matplotlib's font; the browser has its own
        matplotlib.rcdefaults()
        settings: Any = {**STYLE, **(more or {})}
        matplotlib.rcParams.update(settings)
        yield


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


def wide() -> float:
    """How many pixels there are from left to right."""
    return _WIDE.get()


def _variable(colour: re.Match[str]) -> str:
    name = VARIABLES.get(colour[0])
    return f"var(--{name},{colour[0]})" if name else colour[0]


def canvas(height: float) -> Figure:
    """An empty figure as wide as a page."""
    from matplotlib.figure import Figure

    class Page(Figure):
        def _repr_png_(self) -> bytes:  # shows itself in a notebook where pyplot was never imported
            out = io.BytesIO()
            self.savefig(out, format="png", facecolor="white")
            return out.getvalue()

    return Page(figsize=(wide() / 72, height / 72), dpi=72)


def place_axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes placed in pixels from the top left corner, as on the page."""
    total = figure.get_figheight() * 72
    return figure.add_axes((left / wide(), 1 - (top + height) / total, width / wide(), height / total))


def room(labels: Sequence[str], least: float = 24) -> float:
    return max(least, max((len(label) for label in labels), default=0) * LETTER + 10)


def numbers_fit(columns: int, widest: int) -> bool:
    """Whether a grid with so many columns has room to print each cell's number, ``widest`` characters long."""
    return (WIDTH - 200) / max(columns, 1) >= widest * LETTER + 3


@Drawing
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

    names, heads = [clean(row, 20 if wide() > NARROW else 12) for row in rows], [clean(one, 16) for one in columns]
    top = top or float(np.nanmax(values, initial=1.0))
    texts = [[show(v) if math.isfinite(v) else "" for v in row] for row in values]
    left, right = room(names), room(totals, 40) + 4 if totals else 4.0
    cell = min((wide() - left - right) / max(len(heads), 1), 78.0)
    longest = max((len(t) for row in texts for t in row), default=1)
    numbers = numbers_fit(len(heads), longest) if wide() > NARROW else cell >= longest * LETTER
    foot = 8 if numbers else 46
    tall = (28.0 if len(names) <= 16 else 17.0) if numbers else max(11.0, min(24.0, 420 / max(len(names), 1)))
    turned = max(map(len, heads), default=0) * LETTER > cell
    step = max(1, math.ceil(13 / cell)) if turned else 1
    head = room(heads) + 4 if turned else 26.0

    figure = canvas(head + tall * len(names) + foot)
    axes = place_axes(figure, left, head, cell * len(heads), tall * len(names))
    tint = LinearSegmentedColormap.from_list("tint", ["#eaf3f9", "#8fc1e0", "#2f86bd", "#0b4f7d"])
    # Counts span decades: the square root keeps small holdings visible.
    norm = PowerNorm(0.5 if totals else 1.0, 0, top)
    _cells(axes, np.ma.masked_invalid(values), {"cmap": tint, "norm": norm}, line=1.5 if numbers else 0.4)
    for i, row in enumerate(texts if numbers else []):
        for j, text in enumerate(row):
            color = QUIET if not text else ON_DARK if float(norm(values[i, j])) > 0.66 else ON_LIGHT
            axes.text(j, i, text or "·", ha="center", va="center", fontsize=12 if tall > 20 else 11, color=color)
    axes.set_xticks(
        range(0, len(heads), step), heads[::step], rotation=90 if turned else 0, fontsize=12 if cell > 13 else 10
    )
    small = 12 if tall > 14 else 9
    axes.set_yticks(range(len(names)), names, fontsize=small, va="center")
    axes.tick_params(top=False, labeltop=True, labelbottom=False, pad=4)
    for side in axes.spines.values():
        side.set_visible(not numbers)
    if totals:
        _totals(axes, totals, len(heads) - 0.5 + room(totals, 40) / cell, small)
    if not numbers:
        _scale(figure, left, head + tall * len(names) + 14, tint, norm, top, show, unit)
    return figure


def _cells(axes: Axes, values: Any, colours: dict[str, Any], line: float) -> None:
    rows, columns = values.shape
    edges = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    if rows * columns <= 800:
        x, y = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
        axes.pcolormesh(x, y, values, **colours, edgecolors="white", linewidth=line)
        axes.set(xlim=edges[:2], ylim=edges[2:])
    else:  # as one picture: thousands of rectangles would weigh megabytes
        axes.imshow(values, **colours, interpolation="none", aspect="auto", extent=edges)


def _totals(axes: Axes, totals: Sequence[str], edge: float, small: float) -> None:
    """A column of sums to the right of the cells."""
    for i, text in enumerate(totals):
        axes.text(edge, i, text, ha="right", va="center", fontsize=small, color=MUTED)
    place: dict[str, Any] = {"ha": "right", "va": "bottom", "annotation_clip": False}
    axes.annotate("total", (edge, -0.5), (0, 4), "data", "offset points", color=MUTED, **place)


def _scale(
    figure: Figure, left: float, top: float, tint: Any, norm: Any, most: float, show: Callable[[float], str], unit: str
) -> None:
    axes = place_axes(figure, left, top, min(220, wide() - left - 30), 9)
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
