"""What a study shows beside accuracies: bytes, lambda, accuracy over time, how alike prototypes are. Published figures
of the same ``measure`` stand below ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyby.files import write_text
from flyby.objectives.weighting import WeightingSettings
from flyby.study.strengths import line_of, trajectories

Row = dict[str, Any]
Names = dict[str, tuple[str, str]]  # by key: the clients' method, and the server rule
PROTOTYPES = ("proto_matrix_std", "proto_consistency", "inter_client_std")
TIMES = (0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # shares of the epochs at which lambda is printed
BOUND = float(WeightingSettings.model_fields["lambda_max"].default)


def measured(shows: Sequence[str], rows: list[Row], wanted: Names, figures: list[Row]) -> list[str]:
    """The further tables of one group of rows, each with an empty line below it."""
    order = {key: place for place, key in enumerate(wanted)}
    rows = sorted(rows, key=lambda row: order[row["key"]])
    return [line for show in shows for line in TABLES[show](rows, wanted, figures)]


def _by_bytes(rows: list[Row], wanted: Names, figures: list[Row]) -> list[str]:
    """Accuracy against what was sent, by all sites together."""
    alphas = sorted({row["alpha"] for row in rows})
    lines = _head(["clients' method", "server rule", "MB up", "MB down", *(f"α = {a:g}" for a in alphas)], 2)
    for name in dict.fromkeys(wanted.values()):
        mine = [row for row in rows if wanted[row["key"]] == name and row.get("bytes_up") is not None]
        if mine:
            sent = [_mean([row.get(way) or 0 for row in mine]) / 1e6 for way in ("bytes_up", "bytes_down")]
            right = [[r["accuracy"] for r in mine if r["alpha"] == a and r["accuracy"] is not None] for a in alphas]
            cells = [f"{mb:.3f}" for mb in sent] + [f"{100 * _mean(found):.2f}" if found else "" for found in right]
            lines.append(_line([*name, *cells]))
    return ["Accuracy in %, and what all sites send and get (MB = 1e6 bytes).", "", *lines, ""]


def _likeness(rows: list[Row], wanted: Names, figures: list[Row]) -> list[str]:
    """How alike the clients' prototypes are: facts about uploads, the same under every rule."""
    lines = _head(["clients' method", "α", *PROTOTYPES, "n"], 1)
    for name, alpha in _ways(rows, wanted):
        mine = _uploads(rows, wanted, name, alpha, "consistency")
        if mine:
            found = [[row["consistency"].get(m) for row in mine] for m in PROTOTYPES]
            cells = [f"{_mean([v for v in one if v is not None]):.3f}" if any(one) else "" for one in found]
            lines.append(_line([name, f"{alpha:g}", *cells, str(len(mine))]))
    printed, notes = _published(figures, "proto_matrix_std", rows)
    for figure, mark in printed:
        cells = [f"*{figure['value']:g}*", "", "", ""]
        lines.append(_line([f"*{figure['method']}: {figure['source']}{mark}*", f"{figure['alpha']:g}", *cells]))
    return ["How alike the clients' prototypes are.", "", *lines, "", *notes]


def _over_time(rows: list[Row], wanted: Names, figures: list[Row]) -> list[str]:
    """Peak and last accuracy of the snapshots."""
    lines = _head(["clients' method", "server rule", "α", "peak", "at epoch", "final"], 2)
    for row in rows:
        if found := row.get("checkpoints"):
            best = max(found, key=lambda one: one["accuracy"])
            cells = [f"{row['alpha']:g}", f"{100 * best['accuracy']:.2f}", str(best["epoch"])]
            lines.append(_line([*wanted[row["key"]], *cells, f"{100 * row['accuracy']:.2f}"]))
    printed, notes = _published(figures, "peak", rows)
    for figure, mark in printed:
        cells = [f"{figure['alpha']:g}", f"*{figure['value']:.2f}*", f"*{figure['epoch']}*", f"*{figure['final']:.2f}*"]
        lines.append(_line([f"*{figure['method']}*", f"*published: {figure['source']}{mark}*", *cells]))
    said = "Accuracy in % of what snapshots would have given, offline: the best of them, and the last."
    return [said, "", *lines, "", *notes]


def _strength(rows: list[Row], wanted: Names, figures: list[Row]) -> list[str]:
    """lambda at each site in the course of the training, of the first seed that has it."""
    heads = ["start" if not t else f"{100 * t:.0f} %" for t in TIMES]
    lines = _head(["clients' method", "α", "site", *heads, "peak", "steps above"], 1)
    for name, alpha in _ways(rows, wanted):
        for row in _uploads(rows, wanted, name, alpha, "lambda")[:1]:
            epochs = row["lambda"]["epochs"]
            nearest = [min(range(len(epochs)), key=lambda i, t=t: abs(epochs[i] - t * epochs[-1])) for t in TIMES]  # type: ignore[misc]
            for site, one in row["lambda"]["sites"].items():
                seen = [f"{one['lambda'][i]:.4g}" if i < len(one["lambda"]) else "" for i in nearest]
                ends = [f"{one['largest']:.4g}", f"{100 * one['share']:.1f} %"]
                lines.append(_line([name, f"{alpha:g}", site, *seen, *ends]))
    printed, notes = _published(figures, "lambda", rows)
    for method in dict.fromkeys(figure["method"] for figure, _ in printed):
        values = {f["at"]: f["value"] for f, _ in printed if f["method"] == method}
        source = next(f"{f['source']}{mark}" for f, mark in printed if f["method"] == method)
        alpha = next(f["alpha"] for f, _ in printed if f["method"] == method)
        cells = [f"*{values[t]:g}*" if t in values else "" for t in TIMES]
        lines.append(_line([f"*{method}: {source}*", f"{alpha:g}", "", *cells, "", ""]))
    said = (
        f"lambda at each site by share of the training, its peak, and the share of steps above lambda_max ({BOUND:g})."
    )
    return [said, "", *lines, "", *notes]


TABLES: dict[str, Callable[[list[Row], Names, list[Row]], list[str]]] = {
    "bytes": _by_bytes,
    "lambda": _strength,
    "peak": _over_time,
    "prototypes": _likeness,
}


def draw(rows: Mapping[str, Row], path: Path) -> None:
    """lambda against epochs in one figure: a colour for each way to train, a line for each site, of the first seed."""
    found = dict[str, Row]()
    for row in rows.values():
        if "lambda" in row:
            name = ", ".join(str(row[word]) for word in ("method", "variant", "data") if row.get(word))
            found.setdefault(f"{name}, {row['epochs']} epochs, alpha {row['alpha']:g}", row)
    if found:
        lines = [line_of(name, row) for name, row in found.items()]
        write_text(path, trajectories("lambda", "lambda against epochs at each site", lines, BOUND) + "\n")


def _ways(rows: list[Row], wanted: Names) -> list[tuple[str, float]]:
    """The trainings among the rows: the clients' method and alpha, in the order of the study."""
    return list(dict.fromkeys((wanted[row["key"]][0], row["alpha"]) for row in rows))


def _uploads(rows: list[Row], wanted: Names, name: str, alpha: float, field: str) -> list[Row]:
    """One row for each set of uploads of a training: all rules over one say the same of it."""
    mine = [row for row in rows if wanted[row["key"]][0] == name and row["alpha"] == alpha and row.get(field)]
    return list({row["split_hash"]: row for row in reversed(mine)}.values())[::-1]


def _published(figures: list[Row], measure: str, rows: list[Row]) -> tuple[list[tuple[Row, str]], list[str]]:
    """The figures of this measure at our alphas, each with the mark of its caveat, and the caveats."""
    alphas, notes, found = {row["alpha"] for row in rows}, list[str](), []
    for figure in figures:
        if figure.get("measure") == measure and figure["alpha"] in alphas:
            caveat = figure.get("caveat", "")
            if caveat and caveat not in notes:
                notes.append(caveat)
            found.append((figure, f" [{notes.index(caveat) + 1}]" if caveat else ""))
    return found, [f"- [{i}] {note}" for i, note in enumerate(notes, 1)] + ([""] if notes else [])


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _head(heads: list[str], words: int) -> list[str]:
    return [_line(heads), "|" + "---|" * words + "---:|" * (len(heads) - words)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
