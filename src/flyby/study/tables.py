"""Rows as tables: mean, standard deviation and n of every cell, with published figures and their caveats beside ours,
and cells that were not run yet as missing."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flyby.data.splits import SplitSettings
from flyby.errors import BadInput
from flyby.runs.methods import METHODS
from flyby.study.catalogue import Study, published
from flyby.study.grid import Cell, Standing, standing
from flyby.study.hour_tables import by_plan, hour_tables
from flyby.study.measures import measured
from flyby.study.orient_tables import meets, node_tables
from flyby.study.sheet import MISSING, THEIRS, Entry, Part, Sheet, Table
from flyby.study.writers import markdown

Row = dict[str, Any]


class Group(NamedTuple):
    """What has a table of its own."""

    data: str
    model: str
    clients: int
    split: str
    epochs: int  # 0 where nothing is trained; less where the lines of the table differ in them

    @property
    def heading(self) -> str:
        long = f", {self.epochs} epochs" if self.epochs > 0 else ""
        return f"{self.data}: {self.model}, {self.clients} clients, `{self.split}` split{long}"

    @property
    def facts(self) -> Row:
        return {**self._asdict(), "epochs": None if self.epochs < 0 else self.epochs}


def cell_text(values: list[float | None]) -> str:
    """``71.20 ± 3.10 (n=3)`` in per cent; a single run shows no spread, a diverged one says so."""
    good = [100 * v for v in values if v is not None]
    lost = len(values) - len(good)
    if not good:
        return "diverged"
    spread = f" ± {statistics.stdev(good):.2f}" if len(good) > 1 else ""
    return f"{statistics.fmean(good):.2f}{spread} (n={len(good)}{f', {lost} diverged' if lost else ''})"


def cell_facts(values: list[float | None]) -> Row:
    """The same as numbers."""
    good = [100 * v for v in values if v is not None]
    return {
        "mean": statistics.fmean(good) if good else None,
        "std": statistics.stdev(good) if len(good) > 1 else None,
        "n": len(good),
        **({"diverged": len(values) - len(good)} if len(values) > len(good) else {}),
    }


def render(study: Study, place: Path, figures: list[Row] | None = None) -> str:
    """The study's sheet as Markdown."""
    return markdown(sheet(standing(study, place), place, figures))


def sheet(now: Standing, place: Path, figures: list[Row] | None = None) -> Sheet:
    """One part for every (data, model, clients, split, epochs): a line a method and rule, a column an alpha, published
    lines below.

    Only rows of the study as it stands are shown: one that was run under other settings must not enter a mean."""
    check_rows(now, place)
    figures = published() if figures is None else figures
    groups, homeless = grouped(now)
    parts = []
    for group in sorted(groups):
        shown = Shown(now, groups[group], group)
        # Published figures are of classes shared out by alpha among several clients; anything else is another setting.
        shared = group.clients > 1 and SplitSettings(name=group.split).uses_alpha
        printed = [f for f in figures if shared and f["data"] == group.data]
        tables = shown.tables(printed)
        tables[-1] = _with_missing(tables[-1], shown)
        tables += measured(now.study.shows, shown.rows, shown.line, _of_size(printed, group.clients), group.facts)
        parts.append(Part(group.heading, tables))
    end = [f"{now.others} rows that were run under other settings are left out."] if now.others else []
    if homeless:
        end.append(f"{len(homeless)} cells of other tables have no row yet; `{now.command}` runs them.")
    return Sheet(now.name, now.study.title, now.study.note.strip(), parts, end)


def check_rows(now: Standing, place: Path) -> None:
    if not now.rows and not now.others:
        raise BadInput(f"{place} holds no rows yet; run {now.command} first")
    if not now.rows:
        raise BadInput(
            f"{place} holds {now.others} rows, none of them of the study as it stands; run {now.command} again"
        )


def grouped(now: Standing) -> tuple[dict[Group, list[Cell]], list[Cell]]:
    """The cells of each table, those without a row too, in the study's order; and those that belong to none yet."""

    def place(cell: Cell) -> tuple[Any, ...]:
        asked = cell.config
        return cell.data, asked.split.name, asked.split.clients, asked.model.name, asked.train.get("epochs")

    # What a row's model and epochs became is known once it was run: a cell without a row follows those most like it.
    alike: dict[tuple[Any, ...], set[Group]] = defaultdict(set)
    for cell in now.cells:
        if row := now.rows.get(cell.key):
            for more in (("both", cell.config.method, cell.variant), ("method", cell.config.method), ("any",)):
                alike[*place(cell), *more].add(_group(cell, row))
    found: dict[Group, list[Cell]] = defaultdict(list)
    homeless: list[Cell] = []
    for cell in now.cells:
        if row := now.rows.get(cell.key):
            found[_group(cell, row)].append(cell)
            continue
        tries = (("both", cell.config.method, cell.variant), ("method", cell.config.method), ("any",))
        homes = next((there for more in tries if (there := alike.get((*place(cell), *more)))), set())
        (found[min(homes)] if len(homes) == 1 else homeless).append(cell)
    return found, homeless


def _group(cell: Cell, row: Row) -> Group:
    epochs = -1 if "train.epochs=" in cell.variant else row["epochs"]
    return Group(row["data"], row["model"], row["clients"], row["split"], epochs)


def clients_of(cell: Cell) -> str:
    """How the clients of a cell trained: variants are other trainings, never more runs of one."""
    return f"{cell.config.method}, {cell.variant}" if cell.variant else cell.config.method


def rule_name(cell: Cell) -> str:
    return (METHODS[cell.config.method].fusion or "none") if cell.rule == "own" else cell.rule


Line = tuple[str, str]  # how the clients trained, and the server's rule


class Shown:
    """The cells of one table, with their rows."""

    def __init__(self, now: Standing, grid: list[Cell], group: Group) -> None:
        self.now, self.grid, self.group = now, grid, group
        self.cells = [cell for cell in grid if cell.key in now.rows]
        order = list(now.rows)  # rows as they came in
        mine = {cell.key for cell in self.cells}
        self.rows: list[Row] = [{**now.rows[key], "key": key} for key in order if key in mine]
        self.line = {cell.key: (clients_of(cell), rule_name(cell)) for cell in grid}
        self.lines: list[Line] = list(dict.fromkeys(self.line.values()))  # as the study lists them
        self.by_alpha = SplitSettings(name=group.split).uses_alpha

    @property
    def attacked(self) -> bool:
        return any(cell.attack or cell.admission for cell in self.grid)

    def tables(self, printed: list[Row]) -> list[Table]:
        if all(by_plan(row) for row in self.rows):
            return hour_tables(self.rows, {key: clients for key, (clients, _) in self.line.items()}, self.group.facts)
        if self.attacked:
            return under_attack(self)
        if all("by_round" in row for row in self.rows) and any(meets(row) for row in self.rows):
            return node_tables(self.rows, printed, self.group.facts)
        return [_table(self, [f for f in _of_size(printed, self.group.clients) if "measure" not in f])]

    def asked(self, cell: Cell) -> Row:
        """What a cell of this table asks for, as a CSV file has it."""
        more = {"variant": cell.variant, "attack": cell.attack, "admission": cell.admission}
        alpha = {"alpha": cell.config.split.alpha} if self.by_alpha else {}
        return {**alpha, "method": cell.config.method, "rule": rule_name(cell), **{k: v for k, v in more.items() if v}}


def _of_size(printed: list[Row], clients: int) -> list[Row]:
    """The figures that are not of single nodes, nor of another number of clients."""
    return [f for f in printed if "node" not in f and f.get("clients", clients) == clients]


def _with_missing(table: Table, shown: Shown) -> Table:
    """With a sentence that says how many cells have no row, and how to run them."""
    lost = len(shown.grid) - len(shown.cells)
    if not lost:
        return table
    blank = f" ({MISSING}: none of its seeds)" if any(e.text == MISSING for line in table.lines for e in line) else ""
    verb, them = ("has", "it") if lost == 1 else ("have", "them")
    told = f"{lost} of {len(shown.grid)} cells {verb} no row yet{blank}; `{shown.now.command}` runs {them}."
    return replace(table, below=[*table.below, told])


def _table(shown: Shown, figures: list[Row]) -> Table:
    alphas = sorted({cell.config.split.alpha for cell in shown.grid})
    heads = [f"α = {a:g}" if shown.by_alpha else "accuracy" for a in alphas]
    at: dict[tuple[Line, float], list[Cell]] = defaultdict(list)
    for cell in shown.grid:
        at[shown.line[cell.key], cell.config.split.alpha].append(cell)
    lines = [
        [Entry(line[0]), Entry(line[1]), *(_shown(at.get((line, a), []), shown) for a in alphas)]
        for line in shown.lines
    ]
    lines += _alone(shown, alphas)
    printed = [f for f in figures if f["alpha"] in alphas]
    for label in dict.fromkeys((f["method"], f["source"], f.get("caveat", "")) for f in printed):
        method, source, caveat = label
        values = {f["alpha"]: f["value"] for f in printed if (f["method"], f["source"], f.get("caveat", "")) == label}
        told = {"method": method, "source": source, "caveat": caveat, **THEIRS}
        lines.append(
            [
                Entry(method, published=True),
                Entry(f"published: {source}", (caveat,) if caveat else (), published=True),
                *(
                    Entry(f"{values[a]:.2f}", published=True, facts={"alpha": a, "published": values[a], **told})
                    if a in values
                    else Entry(published=True)
                    for a in alphas
                ),
            ]
        )
    heads, align = ["clients' method", "server rule", *heads], "ll" + "r" * len(alphas)
    return Table(heads, align, lines, below=_footing(shown.rows), facts=shown.group.facts)


def _footing(rows: list[Row]) -> list[str]:
    seeds = sorted({row["seed"] for row in rows})
    drawn = sorted({row["server_seed"] for row in rows if "server_seed" in row})
    again = f" Rules that draw were run with the server seeds {', '.join(map(str, drawn))} on each." if drawn else ""
    lines = [
        f"{judged(rows)} in %, seeds {', '.join(map(str, seeds))}; one split a seed, all rules on the same"
        f" uploads.{again}",
    ]
    whole = [row for row in rows if row.get("trained") == row["clients"]]  # of a resumed one a part was timed
    if spent := [row["timings"]["train"] for row in whole]:
        hardware = ", ".join(sorted({row["hardware"] for row in whole}))
        lines.append(f"Training one set of uploads took {min(spent):.0f} to {max(spent):.0f} s ({hardware}).")
    return lines


def _alone(shown: Shown, alphas: list[float]) -> list[list[Entry]]:
    """What the sites' own models reach on the common test images, once for each set of uploads."""
    lines, rule = [], "none: the sites' own models, mean"
    for clients in dict.fromkeys(name for name, _ in shown.lines):
        mine = [row for row in shown.rows if shown.line[row["key"]][0] == clients and "local_accuracy" in row]
        by_alpha = [{r["split_hash"]: r["local_accuracy"] for r in mine if r["alpha"] == a} for a in alphas]
        if any(by_alpha):
            line = [Entry(clients), Entry(rule)]
            for alpha, found in zip(alphas, by_alpha, strict=True):
                told = {"alpha": alpha, "method": clients, "rule": rule, **cell_facts([*found.values()])}
                line.append(Entry(cell_text([*found.values()]), facts=told) if found else Entry())
            lines.append(line)
    return lines


def _shown(cells: list[Cell], shown: Shown) -> Entry:
    """A cell: the runs' mean, their teachers' mean beside it where they had one, and a mark for a row that says how it
    came to be there otherwise than by a run."""
    rows = [shown.now.rows[cell.key] for cell in cells if cell.key in shown.now.rows]
    if not rows:
        return Entry(MISSING, facts={**shown.asked(cells[0]), "n": 0}) if cells else Entry()
    accuracies = [row["accuracy"] for row in rows]
    text = cell_text(accuracies)
    if taught := [100 * row["teacher_accuracy"] for row in rows if row.get("teacher_accuracy") is not None]:
        text += f"; teacher {statistics.fmean(taught):.2f}"
    notes = tuple(dict.fromkeys(row["note"] for row in rows if row.get("note")))
    return Entry(text, notes, facts={**shown.asked(cells[0]), **cell_facts(accuracies)})


def under_attack(shown: Shown) -> list[Table]:
    """One table a kind of value: a line a method and rule, a column an attack (and gate, and alpha, where there are
    several).

    Accuracies come first, then how often triggered images became the target, then whom the gate or the screen turned
    away: malicious ones of how many, and honest ones.
    """
    rows, of = shown.rows, {cell.key: cell for cell in shown.grid}
    alphas = {cell.config.split.alpha for cell in shown.grid}
    gates = {cell.admission for cell in shown.grid}

    def column(cell: Cell) -> str:
        parts = [
            cell.attack or "none",
            *([cell.admission or "none"] if len(gates) > 1 else []),
            *([f"α = {cell.config.split.alpha:g}"] if len(alphas) > 1 else []),
        ]
        return ", ".join(parts)

    def table(title: str, show: Callable[[list[Row]], Entry], chosen: Iterable[Cell]) -> Table:
        at: dict[tuple[Line, str], list[Cell]] = defaultdict(list)
        for cell in chosen:
            at[shown.line[cell.key], column(cell)].append(cell)
        heads = list(dict.fromkeys(head for _, head in at))

        def entry(cells: list[Cell]) -> Entry:
            mine = [shown.now.rows[cell.key] for cell in cells if cell.key in shown.now.rows]
            found = show(mine) if mine else Entry(MISSING if cells else "", facts={"n": 0})
            return Entry(found.text, facts={**shown.asked(cells[0]), **found.facts}) if cells else Entry()

        lines = [
            [Entry(line[0]), Entry(line[1]), *(entry(at.get((line, head), [])) for head in heads)]
            for line in shown.lines
            if any((line, head) in at for head in heads)
        ]
        names = ["clients' method", "server rule", *heads]
        return Table(names, "ll" + "r" * len(heads), lines, lead=title, facts=shown.group.facts)

    seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
    said = f"Test accuracy in %, seeds {seeds}; one split a seed, all rules on the same uploads."
    tables = [table(said, _mean_of("accuracy"), shown.grid)]
    if triggered := [of[row["key"]] for row in rows if row.get("attack_success") is not None]:
        said = "Triggered images of other classes that become the target, in %."
        tables.append(table(said, _mean_of("attack_success"), _in_order(triggered, shown.grid)))
    if turned := [of[row["key"]] for row in rows if _was_judged(row, of[row["key"]])]:
        said = "Refused before fusing: malicious ones of all malicious, and honest ones; sums over seeds."
        tables.append(table(said, _turned_away, _in_order(turned, shown.grid)))
    return tables


def _in_order(some: list[Cell], grid: list[Cell]) -> list[Cell]:
    keys = {cell.key for cell in some}
    return [cell for cell in grid if cell.key in keys]


def _was_judged(row: Row, cell: Cell) -> bool:
    """Whether a gate or a screen looked at what this row's sites sent."""
    return "refused_malicious" in row and bool(row["refused_malicious"] or row["refused_honest"] or cell.admission)


def judged(rows: list[Row]) -> str:
    """What the accuracies of these rows are of."""
    return "Accuracy on held-out training images" if any(row.get("judge") for row in rows) else "Test accuracy"


def _mean_of(name: str) -> Callable[[list[Row]], Entry]:
    def show(rows: list[Row]) -> Entry:
        values = [row[name] for row in rows]
        return Entry(cell_text(values), facts={"measure": name, **cell_facts(values)})

    return show


def _turned_away(rows: list[Row]) -> Entry:
    malicious, refused, honest = (
        sum(row[name] for row in rows) for name in ("malicious", "refused_malicious", "refused_honest")
    )
    told = {"malicious": malicious, "refused_malicious": refused, "refused_honest": honest}
    return Entry(f"{refused} of {malicious}, {honest} honest", facts={"measure": "refused", "n": len(rows), **told})
