"""Results as Markdown: mean, standard deviation and n of every cell, with published figures and their caveats beside
ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flyby.data.splits import SplitSettings
from flyby.errors import BadInput
from flyby.files import write_text
from flyby.runs.methods import METHODS
from flyby.study.catalogue import Study, published
from flyby.study.grid import Cell, cells, known_rows, settled
from flyby.study.hour_tables import by_plan, hour_tables
from flyby.study.measures import draw, measured
from flyby.study.orient_tables import meets, node_tables

Row = dict[str, Any]


def cell_text(values: list[float | None]) -> str:
    """``71.20 ± 3.10 (n=3)`` in per cent; a single run shows no spread, a diverged one says so."""
    good = [100 * v for v in values if v is not None]
    lost = len(values) - len(good)
    if not good:
        return "diverged"
    spread = f" ± {statistics.stdev(good):.2f}" if len(good) > 1 else ""
    return f"{statistics.fmean(good):.2f}{spread} (n={len(good)}{f', {lost} diverged' if lost else ''})"


def render(study: Study, place: Path, figures: list[Row] | None = None) -> str:
    """One table for every (data, model, clients, split, epochs): a line a method and rule, a column an alpha, published
    lines below.

    Only rows of the study as it stands are shown: one that was run under other settings must not enter a mean."""
    everything = known_rows(study, place)
    if not everything:
        raise BadInput(f"{place} holds no rows yet; run flyby study {place.stem} first")
    wanted = {cell.key: (_clients(cell), _rule(cell)) for cell in cells(study)}
    threats = {cell.key: (cell.attack, cell.admission) for cell in cells(study)}
    rows = [{**row, "key": key} for key, row in settled(study, place).items()]
    if not rows:
        raise BadInput(
            f"{place} holds {len(everything)} rows, none of them of the study as it stands; run flyby study"
            f" {place.stem} again"
        )
    figures = published() if figures is None else figures
    lines = [f"# {study.title}", "", *([study.note.strip(), ""] if study.note else [])]
    for group in sorted({_group(row) for row in rows}):
        mine = [row for row in rows if _group(row) == group]
        data, model, clients, split, epochs = group
        lines += [f"## {data}: {model}, {clients} clients, `{split}` split, {epochs} epochs", ""]
        # Published figures are of classes shared out at random by alpha; anything else is another setting.
        printed = [f for f in figures if f["data"] == data and SplitSettings(name=split).uses_alpha]
        if all(by_plan(row) for row in mine):
            lines += [*hour_tables(mine, {key: clients for key, (clients, _) in wanted.items()}), ""]
        elif any(any(threat) for threat in threats.values()):
            lines += [*under_attack(mine, wanted, threats), ""]
        elif all("by_round" in row for row in mine) and any(meets(row) for row in mine):
            lines += [*node_tables(mine, printed), ""]
        else:
            fit = [f for f in printed if "node" not in f and f.get("clients", clients) == clients]
            lines += [*_table(mine, wanted, [f for f in fit if "measure" not in f]), ""]
            lines += measured(study.shows, mine, wanted, fit)
    if other := len(everything) - len(rows):
        lines += [f"{other} rows that were run under other settings are left out.", ""]
    return "\n".join(lines)


def _group(row: Row) -> tuple[str, str, int, str, int]:
    return row["data"], row["model"], row["clients"], row["split"], row["epochs"]


def _clients(cell: Cell) -> str:
    """How the clients of a cell trained: variants are other trainings, never more runs of one."""
    return f"{cell.config.method}, {cell.variant}" if cell.variant else cell.config.method


def _rule(cell: Cell) -> str:
    return (METHODS[cell.config.method].fusion or "none") if cell.rule == "own" else cell.rule


def _table(rows: list[Row], wanted: dict[str, tuple[str, str]], figures: list[Row]) -> list[str]:
    alphas, notes = sorted({row["alpha"] for row in rows}), list[str]()
    heads = [f"α = {a:g}" if SplitSettings(name=rows[0]["split"]).uses_alpha else "accuracy" for a in alphas]
    lines = [
        "| clients' method | server rule | " + " | ".join(heads) + " |",
        "|---|---|" + "---:|" * len(alphas),
    ]
    for line in dict.fromkeys(wanted.values()):  # as the study lists them, whatever the order of the rows
        found = [[r for r in rows if (wanted[r["key"]], r["alpha"]) == (line, a)] for a in alphas]
        if any(found):
            lines.append(
                f"| {line[0]} | {line[1]} | " + " | ".join(_shown(v, notes) if v else "" for v in found) + " |"
            )
    lines += _alone(rows, wanted, alphas)
    printed = [f for f in figures if f["alpha"] in alphas]
    for label in dict.fromkeys((f["method"], f["source"], f.get("caveat", "")) for f in printed):
        method, source, caveat = label
        values = {f["alpha"]: f["value"] for f in printed if (f["method"], f["source"], f.get("caveat", "")) == label}
        if caveat and caveat not in notes:
            notes.append(caveat)
        mark = f" [{notes.index(caveat) + 1}]" if caveat else ""
        shown = [f"*{values[a]:.2f}*" if a in values else "" for a in alphas]
        lines.append(f"| *{method}* | *published: {source}{mark}* | " + " | ".join(shown) + " |")
    seeds = sorted({row["seed"] for row in rows})
    drawn = sorted({row["server_seed"] for row in rows if "server_seed" in row})
    again = f" Rules that draw were run with the server seeds {', '.join(map(str, drawn))} on each." if drawn else ""
    lines += [
        "",
        f"{judged(rows)} in %, seeds {', '.join(map(str, seeds))}; one split a seed, all rules on the same"
        f" uploads.{again}",
    ]
    whole = [row for row in rows if row.get("trained") == row["clients"]]  # of a resumed one a part was timed
    if spent := [row["timings"]["train"] for row in whole]:
        hardware = ", ".join(sorted({row["hardware"] for row in whole}))
        lines.append(f"Training one set of uploads took {min(spent):.0f} to {max(spent):.0f} s ({hardware}).")
    return lines + ([""] if notes else []) + [f"- [{i}] {note}" for i, note in enumerate(notes, 1)]


def _alone(rows: list[Row], wanted: dict[str, tuple[str, str]], alphas: list[float]) -> list[str]:
    """What the sites' own models reach on the common test images, once for each set of uploads."""
    lines = []
    for method in dict.fromkeys(name for name, _ in wanted.values()):
        mine = [row for row in rows if wanted[row["key"]][0] == method and "local_accuracy" in row]
        by_alpha = [{r["split_hash"]: r["local_accuracy"] for r in mine if r["alpha"] == a} for a in alphas]
        if any(by_alpha):
            cells = " | ".join(cell_text(list(found.values())) if found else "" for found in by_alpha)
            lines.append(f"| {method} | none: the sites' own models, mean | {cells} |")
    return lines


def _shown(rows: list[Row], notes: list[str]) -> str:
    """A cell: the runs' mean, their teachers' mean beside it where they had one, and a mark for a row that says how it
    came to be there otherwise than by a run."""
    text = cell_text([row["accuracy"] for row in rows])
    if taught := [100 * row["teacher_accuracy"] for row in rows if row.get("teacher_accuracy") is not None]:
        text += f"; teacher {statistics.fmean(taught):.2f}"
    for note in dict.fromkeys(row["note"] for row in rows if row.get("note")):
        if note not in notes:
            notes.append(note)
        text += f" [{notes.index(note) + 1}]"
    return text


def under_attack(rows: list[Row], wanted: dict[str, tuple[str, str]], threats: dict[str, tuple[str, str]]) -> list[str]:
    """One table a kind of value: a line a method and rule, a column an attack (and gate, and alpha, where there are
    several).

    Accuracies come first, then how often triggered images became the target, then whom the gate or the screen turned
    away: malicious ones of how many, and honest ones.
    """
    alphas, gates = {row["alpha"] for row in rows}, {gate for _, gate in threats.values()}

    def column(row: Row) -> str:
        attack, gate = threats[row["key"]]
        parts = [
            attack or "none",
            *([gate or "none"] if len(gates) > 1 else []),
            *([f"α = {row['alpha']:g}"] if len(alphas) > 1 else []),
        ]
        return ", ".join(parts)

    def table(title: str, show: Callable[[list[Row]], str], chosen: list[Row]) -> list[str]:
        heads = list(dict.fromkeys(column(row) for key in wanted for row in chosen if row["key"] == key))
        lines = [
            title,
            "",
            f"| clients' method | server rule | {' | '.join(heads)} |",
            "|---|---|" + "---:|" * len(heads),
        ]
        for line in dict.fromkeys(wanted[key] for key in wanted):
            found = [[r for r in chosen if wanted[r["key"]] == line and column(r) == head] for head in heads]
            if any(found):
                lines.append(
                    f"| {line[0]} | {line[1]} | " + " | ".join(show(those) if those else "" for those in found) + " |"
                )
        return [*lines, ""]

    seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
    lines = table(
        f"Test accuracy in %, seeds {seeds}; one split a seed, all rules on the same uploads.",
        _mean_of("accuracy"),
        rows,
    )
    if triggered := [row for row in rows if row.get("attack_success") is not None]:
        lines += table(
            "Triggered images of other classes that become the target, in %.", _mean_of("attack_success"), triggered
        )
    if judged := [
        row
        for row in rows
        if "refused_malicious" in row and (row["refused_malicious"] or row["refused_honest"] or threats[row["key"]][1])
    ]:
        lines += table(
            "Refused before fusing: malicious ones of all malicious, and honest ones; sums over seeds.",
            _turned_away,
            judged,
        )
    return lines[:-1]


def judged(rows: list[dict[str, Any]]) -> str:
    """What the accuracies of these rows are of."""
    return "Accuracy on held-out training images" if any(row.get("judge") for row in rows) else "Test accuracy"


def _mean_of(name: str) -> Callable[[list[Row]], str]:
    return lambda rows: cell_text([row[name] for row in rows])


def _turned_away(rows: list[Row]) -> str:
    malicious, refused, honest = (
        sum(row[name] for row in rows) for name in ("malicious", "refused_malicious", "refused_honest")
    )
    return f"{refused} of {malicious}, {honest} honest"


def write_table(study: Study, place: Path) -> Path:
    """The table of the rows in NAME.jsonl, as NAME.md beside them."""
    path = place.with_suffix(".md")
    write_text(path, render(study, place) + "\n")
    if "lambda" in study.shows:
        draw(settled(study, place), place.with_suffix(".svg"))
    return path
