"""What a study shows beside accuracies: bytes, lambda, accuracy over time, how alike prototypes are. Published figures
of the same ``measure`` stand below ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flyby.files import write_text
from flyby.objectives.weighting import WeightingSettings
from flyby.study.sheet import THEIRS, Entry, Table, plain
from flyby.study.strengths import line_of, trajectories

Row = dict[str, Any]
Names = dict[str, tuple[str, str]]  # by key: the clients' method, and the server rule
PROTOTYPES = ("proto_matrix_std", "proto_consistency", "inter_client_std")
TIMES = (0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # shares of the epochs at which lambda is printed
BOUND = float(WeightingSettings.model_fields["lambda_max"].default)


def measured(
    shows: Sequence[str], rows: list[Row], wanted: Names, figures: list[Row], facts: Mapping[str, Any]
) -> list[Table]:
    """The further tables of one group of rows."""
    order = {key: place for place, key in enumerate(wanted)}
    rows = sorted(rows, key=lambda row: order[row["key"]])
    return [replace(TABLES[show](rows, wanted, figures), facts=facts) for show in shows]


def _by_bytes(rows: list[Row], wanted: Names, figures: list[Row]) -> Table:
    """Accuracy against what was sent, by all sites together."""
    alphas, lines = sorted({row["alpha"] for row in rows}), []
    for name in dict.fromkeys(wanted.values()):
        mine = [row for row in rows if wanted[row["key"]] == name and row.get("bytes_up") is not None]
        if not mine:
            continue
        told = {"method": name[0], "rule": name[1]}
        ways = [(way, _mean([row.get(way) or 0 for row in mine])) for way in ("bytes_up", "bytes_down")]
        sent = [Entry(f"{b / 1e6:.3f}", facts={**told, "measure": way, "mean": b, "n": len(mine)}) for way, b in ways]
        right = [[r["accuracy"] for r in mine if r["alpha"] == a and r["accuracy"] is not None] for a in alphas]
        lines.append([*plain(*name), *sent, *plain(*(f"{100 * _mean(found):.2f}" if found else "" for found in right))])
    heads = ["clients' method", "server rule", "MB up", "MB down", *(f"α = {a:g}" for a in alphas)]
    return _table(heads, 2, lines, "Accuracy in %, and what all sites send and get (MB = 1e6 bytes).")


def _by_seconds(rows: list[Row], wanted: Names, figures: list[Row]) -> Table:
    """Accuracy against the seconds that training one set of uploads took."""
    rules, lines = list(dict.fromkeys(wanted[row["key"]][1] for row in rows)), []
    for name, alpha in _ways(rows, wanted):
        mine = [row for row in rows if wanted[row["key"]][0] == name and row["alpha"] == alpha]
        whole = {row["split_hash"]: row for row in mine if row.get("trained") == row["clients"]}
        spent = [row["timings"]["train"] for row in whole.values()]
        told = {"method": name, "alpha": alpha, "measure": "train_seconds", "n": len(spent)}
        took = Entry(f"{_mean(spent):.0f}", facts={**told, "mean": _mean(spent)}) if spent else Entry()
        right = [
            [r["accuracy"] for r in mine if wanted[r["key"]][1] == rule and r["accuracy"] is not None] for rule in rules
        ]
        long = str(mine[0]["epochs"])
        lines.append(
            [*plain(name, f"{alpha:g}", long), took, *plain(*(f"{100 * _mean(v):.2f}" if v else "" for v in right))]
        )
    said = "Seconds that training one set of uploads took, a first compilation among them, and accuracy in %."
    return _table(["clients' method", "α", "epochs", "seconds", *rules], 1, lines, said)


def _likeness(rows: list[Row], wanted: Names, figures: list[Row]) -> Table:
    """How alike the clients' prototypes are: facts about uploads, the same under every rule."""
    lines = []
    for name, alpha in _ways(rows, wanted):
        mine = _uploads(rows, wanted, name, alpha, "consistency")
        if mine:
            entries = []
            for measure in PROTOTYPES:
                found = [v for row in mine if (v := row["consistency"].get(measure)) is not None]
                told = {"method": name, "alpha": alpha, "measure": measure, "n": len(found)}
                entries.append(Entry(f"{_mean(found):.3f}", facts={**told, "mean": _mean(found)}) if found else Entry())
            lines.append([*plain(name, f"{alpha:g}"), *entries, Entry(str(len(mine)))])
    for figure in _published(figures, "proto_matrix_std", rows):
        lines.append(
            [_source(figure), Entry(f"{figure['alpha']:g}"), _printed(figure, "value", "g"), *plain("", "", "")]
        )
    return _table(["clients' method", "α", *PROTOTYPES, "n"], 1, lines, "How alike the clients' prototypes are.")


def _over_time(rows: list[Row], wanted: Names, figures: list[Row]) -> Table:
    """Peak and last accuracy of the snapshots."""
    lines = []
    for row in rows:
        if found := row.get("checkpoints"):
            best = max(found, key=lambda one: one["accuracy"])
            method, rule = wanted[row["key"]]
            told = {"method": method, "rule": rule, "alpha": row["alpha"], "n": 1}
            peak = Entry(f"{100 * best['accuracy']:.2f}", facts={**told, "measure": "peak", "mean": best["accuracy"]})
            last = f"{100 * row['accuracy']:.2f}"
            lines.append([*plain(method, rule, f"{row['alpha']:g}"), peak, *plain(str(best["epoch"]), last)])
    for figure in _published(figures, "peak", rows):
        source = Entry(f"published: {figure['source']}", _caveat(figure), published=True)
        numbers = [_printed(figure, "value", ".2f"), _printed(figure, "epoch", ""), _printed(figure, "final", ".2f")]
        lines.append([Entry(figure["method"], published=True), source, Entry(f"{figure['alpha']:g}"), *numbers])
    said = "Accuracy in % of what snapshots would have given, offline: the best of them, and the last."
    return _table(["clients' method", "server rule", "α", "peak", "at epoch", "final"], 2, lines, said)


def _strength(rows: list[Row], wanted: Names, figures: list[Row]) -> Table:
    """lambda at each site in the course of the training, of the first seed that has it."""
    lines = []
    for name, alpha in _ways(rows, wanted):
        for row in _uploads(rows, wanted, name, alpha, "lambda")[:1]:
            epochs = row["lambda"]["epochs"]
            nearest = [min(range(len(epochs)), key=lambda i, t=t: abs(epochs[i] - t * epochs[-1])) for t in TIMES]  # type: ignore[misc]
            for site, one in row["lambda"]["sites"].items():
                seen = [f"{one['lambda'][i]:.4g}" if i < len(one["lambda"]) else "" for i in nearest]
                told = {"method": name, "alpha": alpha, "n": 1}
                ends = [
                    Entry(f"{one['largest']:.4g}", facts={**told, "measure": "lambda_peak", "mean": one["largest"]}),
                    Entry(
                        f"{100 * one['share']:.1f} %", facts={**told, "measure": "lambda_bound", "mean": one["share"]}
                    ),
                ]
                lines.append([*plain(name, f"{alpha:g}", site, *seen), *ends])
    printed = _published(figures, "lambda", rows)
    for method in dict.fromkeys(figure["method"] for figure in printed):
        mine = {f["at"]: f for f in printed if f["method"] == method}
        first = next(iter(mine.values()))
        cells = [_printed(mine[t], "value", "g") if t in mine else Entry(published=True) for t in TIMES]
        lines.append([_source(first), *plain(f"{first['alpha']:g}", ""), *cells, *plain("", "")])
    heads = ["start" if not t else f"{100 * t:.0f} %" for t in TIMES]
    said = (
        f"lambda at each site by share of the training, its peak, and the share of steps above lambda_max ({BOUND:g})."
    )
    return _table(["clients' method", "α", "site", *heads, "peak", "steps above"], 1, lines, said)


TABLES: dict[str, Callable[[list[Row], Names, list[Row]], Table]] = {
    "bytes": _by_bytes,
    "lambda": _strength,
    "peak": _over_time,
    "prototypes": _likeness,
    "seconds": _by_seconds,
}


def draw(rows: Mapping[str, Row], path: Path) -> list[Path]:
    """lambda against epochs in one figure: a colour for each way to train, a line for each site, of the first seed."""
    found = dict[str, Row]()
    for row in rows.values():
        if "lambda" in row:
            name = ", ".join(str(row[word]) for word in ("method", "variant", "data") if row.get(word))
            found.setdefault(f"{name}, {row['epochs']} epochs, alpha {row['alpha']:g}", row)
    if not found:
        return []
    lines = [line_of(name, row) for name, row in found.items()]
    write_text(path, trajectories("lambda", "lambda against epochs at each site", lines, BOUND) + "\n")
    return [path]


def _ways(rows: list[Row], wanted: Names) -> list[tuple[str, float]]:
    """The trainings among the rows: the clients' method and alpha, in the order of the study."""
    return list(dict.fromkeys((wanted[row["key"]][0], row["alpha"]) for row in rows))


def _uploads(rows: list[Row], wanted: Names, name: str, alpha: float, field: str) -> list[Row]:
    """One row for each set of uploads of a training: all rules over one say the same of it."""
    mine = [row for row in rows if wanted[row["key"]][0] == name and row["alpha"] == alpha and row.get(field)]
    return list({row["split_hash"]: row for row in reversed(mine)}.values())[::-1]


def _published(figures: list[Row], measure: str, rows: list[Row]) -> list[Row]:
    """The figures of this measure at our alphas."""
    alphas = {row["alpha"] for row in rows}
    return [figure for figure in figures if figure.get("measure") == measure and figure["alpha"] in alphas]


def _caveat(figure: Row) -> tuple[str, ...]:
    return (figure["caveat"],) if figure.get("caveat") else ()


def _source(figure: Row) -> Entry:
    return Entry(f"{figure['method']}: {figure['source']}", _caveat(figure), published=True)


def _printed(figure: Row, name: str, form: str) -> Entry:
    told = {"alpha": figure["alpha"], "method": figure["method"], "source": figure["source"], **THEIRS}
    facts = {**told, "measure": figure["measure"], "published": figure["value"]} if name == "value" else {}
    return Entry(format(figure[name], form), published=True, facts=facts)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _table(heads: list[str], words: int, lines: list[list[Entry]], lead: str) -> Table:
    return Table(heads, "l" * words + "r" * (len(heads) - words), lines, lead=lead)
