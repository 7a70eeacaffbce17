"""The report: one self-contained HTML file for a run, or for a folder of runs side by side.

It is made from the files in the folder and nothing else, asks the network for nothing, runs no script, and is the same bytes for the same
files. Whatever a file says is shown as text, never as markup. A section whose file is absent is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from flyby.errors import BadInput
from flyby.files import read_json, write_text
from flyby.study import figures
from flyby.study.figures import Panel, clean

SHOWN_CROSSINGS = 20
OPEN_RUNS = 6  # beyond so many runs, each run's own curves are folded away
SETTINGS = ("method", "objective", "fusion", "model", "data", "clients", "split", "alpha", "epochs", "seed")
NONE = "–"


@dataclass(frozen=True)
class RunData:
    """What the report knows of one run: its name (the folder's) and the contents of its files, empty where a file is absent."""

    name: str
    result: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    ledger: dict[str, Any] = field(default_factory=dict)
    extra: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> RunData:
        kinds: dict[str, type] = {"config": dict, "split": dict, "ledger": dict, "extra": list}
        files = {name: _read(folder / f"{name}.json", kind) for name, kind in kinds.items() if (folder / f"{name}.json").exists()}
        return cls(folder.resolve().name, _read(folder / "result.json", dict), metrics=_read_rows(folder / "metrics.jsonl"), **files)

    @property
    def split_hash(self) -> str:
        return clean(self.result.get("split_hash") or self.split.get("hash") or "")

    @property
    def accuracy(self) -> float | None:
        return _number(self.result.get("accuracy"))

    @property
    def seconds(self) -> float | None:
        seconds = self.result.get("seconds")
        return _number(seconds.get("total") if isinstance(seconds, dict) else seconds)

    def scores(self, key: str) -> dict[str, float | None]:
        """One of the result's name-to-accuracy tables, in natural order."""
        table = self.result.get(key)
        return {name: _number(table[name]) for name in sorted(table, key=_natural)} if isinstance(table, dict) else {}

    def counts(self) -> dict[str, list[int]]:
        counts = self.split.get("counts") or {}
        return {site: [int(n) for n in counts[site]] for site in sorted(counts, key=_natural)}

    def class_names(self) -> list[str]:
        width = max((len(row) for row in self.counts().values()), default=0)
        names = [str(name) for name in self.split.get("class_names") or []]
        return names + [str(index) for index in range(len(names), width)]

    def per_class(self) -> dict[str, float | None]:
        """Accuracy by class name; a result may key its classes by name or by index."""
        scores, names = self.scores("per_class"), self.class_names()
        if all(key in names for key in scores):
            return {name: scores[name] for name in names if name in scores}
        return {names[int(key)] if key.isdigit() and int(key) < len(names) else key: value for key, value in scores.items()}


def write_report(folder: Path) -> Path:
    """Write ``folder/report.html`` for a run folder, or for a folder whose direct children are run folders, and return its path."""
    folder = Path(folder)
    if (folder / "result.json").is_file():
        runs = [RunData.read(folder)]
    else:
        children = sorted(folder.iterdir(), key=lambda child: _natural(child.name)) if folder.is_dir() else []
        runs = [RunData.read(child) for child in children if not child.name.startswith(".") and (child / "result.json").is_file()]
    if not runs:
        raise BadInput(f"{folder} holds neither result.json nor run folders; name the --out folder of a finished run, or a folder of them")
    path = folder / "report.html"
    write_text(path, build_html(runs, folder.resolve().name))
    return path


def build_html(runs: list[RunData], title: str) -> str:
    """The whole page for one run, or for several compared. Sections that have nothing to show are left out, from the page and its menu."""
    sections = [
        ("results", "Results", _results(runs) + _accuracy_bars(runs)),
        ("holdings", "Who holds what", _holdings(runs)),
        ("classes", "Accuracy by class", _classes(runs)),
        ("clients", "Site by site", _clients(runs)),
        ("training", "Training", _curves(runs, "training", _training_panels)),
        ("lambda", "Alignment weight λ", _curves(runs, "lambda", _lambda_panels)),
        ("crossings", "Communication", _communication(runs)),
        *((f"extra-{i}", heading, body) for i, (heading, body) in enumerate(_extras(runs))),
        ("reproduce", "How to reproduce", _reproduce(runs)),
    ]
    sections = [section for section in sections if section[2]]
    menu = " ".join(f'<a href="#s-{key}">{_text(heading)}</a>' for key, heading, _ in sections)
    body = "\n".join(f'<section id="s-{key}"><h2>{_text(heading)}</h2>\n{content}</section>' for key, heading, content in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{_text(title)} · flyby report</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<header><p class="brand">flyby report</p><h1>{_text(title)}</h1>
{_headline(runs)}</header>
<nav aria-label="Sections">{menu}</nav>
{body}
{_GLOSSARY}</main>
</body>
</html>
"""


# ---------------------------------------------------------------- sections


def _headline(runs: list[RunData]) -> str:
    ranked = sorted((run for run in runs if run.accuracy is not None), key=lambda run: -(run.accuracy or 0.0))
    best = ranked[0] if ranked else None
    if len(runs) == 1:
        sentence, facts = _what_was_run(runs[0].result), _facts(runs[0])
        shared = runs[0].result.get("fusion") or runs[0].result.get("uploads")
        caption = "test accuracy after the last epoch" if shared else "test accuracy, mean over the sites’ own models: nothing was shared"
    else:
        sentence, caption, facts = _what_was_compared(runs), _lead(ranked), _common_split(runs)
    number = f'<p class="number"><strong>{_percent(best.accuracy)} %</strong> <span>{caption}</span></p>' if best else ""
    return f'<p class="lead">{sentence}</p>\n{number}\n{facts}\n'


def _what_was_run(result: dict[str, Any]) -> str:
    uploads = result.get("uploads")
    epochs = f" for {_plural(result['epochs'], 'epoch')}" if result.get("epochs") is not None else ""
    trained = f"trained {_strong(result['model'])}{epochs}" if result.get("model") else f"trained{epochs}"
    if uploads is not None:
        all_sent = uploads and uploads == result.get("clients")
        trained += " and sent its model once" if all_sent else f"; {_plural(uploads, 'model')} crossed in all"
    fused = f"; the server fused what arrived with {_strong(result['fusion'])}" if result.get("fusion") else ""
    return f"{_strong(_name(result.get('method')))}{_setting({**result, 'seed': None})}. Each site {trained}{fused}."


def _what_was_compared(runs: list[RunData]) -> str:
    differ = [key for key in SETTINGS if len({json.dumps(run.result.get(key)) for run in runs}) > 1]
    same = {key: value for key, value in runs[0].result.items() if key not in differ}
    return f"{len(runs)} runs compared{_setting(same)}. {f'They differ in {_listed(differ)}' if differ else 'Their settings are equal'}."


def _lead(ranked: list[RunData]) -> str:
    """Who is best and by how much; runs whose printed numbers agree are level."""
    level = [run.name for run in ranked if _percent(run.accuracy) == _percent(ranked[0].accuracy)]
    caption = "test accuracy after the last epoch, the best of the runs: "
    if len(level) > 1 or len(ranked) < 2:
        return caption + f"<strong>{_text(_listed(level))}</strong>" + (", level" if len(level) > 1 else "")
    ahead = 100 * ((ranked[0].accuracy or 0.0) - (ranked[1].accuracy or 0.0))
    return caption + f"{_strong(level[0])}, {ahead:.1f} points above the next, {_strong(ranked[1].name)}"


def _common_split(runs: list[RunData]) -> str:
    shared = runs[0].split_hash
    if shared and {run.split_hash for run in runs} == {shared}:
        return f"<p>All runs share one split (<code>{_text(shared)}</code>): the same data in the same hands.</p>"
    return '<p class="warn">The runs do not all share one split: a difference between two rows is partly the luck of the split.</p>'


def _setting(result: dict[str, Any]) -> str:
    """The common setting in words, e.g. ': 5 sites, digits, dirichlet split (α = 0.1), seed 0'."""
    alpha = f" (α = {_text(result['alpha'])})" if result.get("alpha") is not None and result.get("split") else ""
    parts = [
        _plural(result["clients"], "site") if result.get("clients") is not None else "",
        _strong(result["data"]) if result.get("data") else "",
        f"{_text(result['split'])} split{alpha}" if result.get("split") else "",
        f"seed {_text(result['seed'])}" if result.get("seed") is not None else "",
    ]
    return ": " + ", ".join(part for part in parts if part) if any(parts) else ""


def _facts(run: RunData) -> str:
    """The few numbers that put the headline in proportion."""
    own, alone = _mean(run.scores("per_client").values()), _mean(run.scores("local_accuracy").values())
    size, speed = _number(run.result.get("bytes_up")), _number(run.result.get("samples_per_second"))
    facts = []
    if alone is not None and run.result.get("uploads"):
        facts.append((f"{_percent(alone)} %", "a site’s own model alone, on the same test set (mean)"))
    if own is not None:
        facts.append((f"{_percent(own)} %", "own-test accuracy: on each site’s own mix of classes (mean)"))
    if size is not None:
        facts.append((_size(size), "sent up, in all"))
    if run.seconds is not None:
        facts.append((f"{_seconds(run.seconds)} s", "from start to end" + (f", at {speed:,.0f} samples a second" if speed else "")))
    items = "".join(f"<li><b>{number}</b> {words}</li>" for number, words in facts)
    return f'<ul class="facts">{items}</ul>' if items else ""


class _Best(str):
    """A cell to print in bold."""


def _results(runs: list[RunData]) -> str:
    several = len(runs) > 1
    columns: list[tuple[str, Callable[[RunData], float | None], Callable[[float | None], str], int]] = [
        ("Accuracy %", lambda run: run.accuracy, _percent, 1),
        ("Own-test accuracy %, mean", lambda run: _mean(run.scores("per_client").values()), _percent, 1),
        ("Uploads", lambda run: _number(run.result.get("uploads")), _count, -1),
        ("MB up", lambda run: _number(run.result.get("bytes_up")), _megabytes, -1),
        ("Seconds", lambda run: run.seconds, _seconds, -1),
    ]
    cells: list[list[str]] = []
    for _, value, show, sign in columns:
        values = [value(run) for run in runs]
        best = max((sign * v for v in values if v is not None), default=0.0)
        shown = [show(v) for v in values]
        mark = several and len(set(shown)) > 1
        cells.append([_Best(text) if mark and text == show(sign * best) else text for text in shown])
    names = [[run.name] * several + [_name(run.result.get("method")), _name(run.result.get("fusion"))] for run in runs]
    rows = [name + [column[i] for column in cells] for i, name in enumerate(names)]
    head = ["Run"] * several + ["Method", "Fusion rule"] + [column[0] for column in columns]
    bold = any(isinstance(cell, _Best) for column in cells for cell in column)
    note = '<p class="note">Bold: the best of each column (highest accuracy, least cost).</p>' if bold else ""
    note = note if several else _time_spent(runs[0])
    return _table(head, rows, numeric=range(2 + several, len(head)), key="results", label="Results, one row a run") + note


def _time_spent(run: RunData) -> str:
    seconds = run.result.get("timings") or run.result.get("seconds")
    parts = seconds.items() if isinstance(seconds, dict) else ()
    spent = [f"{_text(name)} {_seconds(number)} s" for name, value in parts if name != "total" and (number := _number(value)) is not None]
    return f'<p class="note">Time spent: {", ".join(spent)}.</p>' if spent else ""


def _accuracy_bars(runs: list[RunData]) -> str:
    measured = [(run.name, 100 * run.accuracy) for run in runs if run.accuracy is not None]
    if len(runs) < 2 or not measured:
        return ""
    names, percents = [name for name, _ in measured], [percent for _, percent in measured]
    spoken = "Test accuracy by run: " + "; ".join(f"{name} {percent:.1f} %" for name, percent in measured)
    return _figure(figures.run_bars("bars", spoken, names, percents), "Test accuracy after the last epoch.")


def _holdings(runs: list[RunData]) -> str:
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        if run.counts():
            groups.setdefault(run.split_hash or run.name, []).append(run)
    parts = []
    for i, members in enumerate(groups.values()):
        if len(groups) > 1:
            parts.append(f"<h3>{_text(_listed([member.name for member in members]))}</h3>")
        parts.append(_one_split(f"split{i}", members[0].counts(), members[0].class_names()))
    return "\n".join(parts)


def _one_split(key: str, counts: dict[str, list[int]], classes: list[str]) -> str:
    table = np.array([row + [0] * (len(classes) - len(row)) for row in counts.values()], dtype=np.float64)
    totals, everything = [_count(total) for total in table.sum(axis=1)], _count(table.sum())
    values = np.where(table > 0, table, np.nan)
    spoken = f"Training samples of {_plural(len(classes), 'class', 'classes')} held by {_plural(len(counts), 'site')}, {everything} in all"
    svg = figures.grid(key, spoken, list(counts), classes, values, _whole, totals=totals, unit="samples of the class")
    least, most = (table > 0).sum(axis=1).min(), (table > 0).sum(axis=1).max()
    span = f"{least}" if least == most else f"{least} to {most}"
    caption = f"Training samples by site (rows) and class (columns): {everything} in all; a site holds {span} of {len(classes)} classes."
    if figures.numbers_fit(len(classes), len(_whole(table.max()))):
        return _figure(svg, caption)
    rows = [[site, total, *(str(n) if n else "" for n in row)] for (site, row), total in zip(counts.items(), totals, strict=True)]
    numbers = _table(["Site", "Total", *classes], rows, numeric=range(1, len(classes) + 2), label="The counts behind the picture")
    return _figure(svg, caption) + f"<details><summary>The counts as numbers</summary>{numbers}</details>"


def _classes(runs: list[RunData]) -> str:
    scores = {run.name: table for run in runs if (table := run.per_class())}
    if not scores:
        return ""
    names = list(dict.fromkeys(name for table in scores.values() for name in table))
    values = np.array([[_nan(table.get(name)) * 100 for name in names] for table in scores.values()], dtype=np.float64)
    spoken = f"Test accuracy of {_plural(len(names), 'class', 'classes')}"
    if len(scores) > 1:
        svg = figures.grid("classes", f"{spoken} in {len(scores)} runs", list(scores), names, values, _whole, top=100.0, unit="% correct")
        return _figure(svg, "Test accuracy in %, by run (rows) and class (columns).")
    svg = figures.class_bars("classes", spoken, names, [float(value) for value in values[0]])
    ranked = sorted((float(value), name) for value, name in zip(values[0], names, strict=True) if math.isfinite(value))
    words = [f"{name} ({value:.0f} %)" for value, name in ranked]
    ends = f" Weakest: {_listed(words[:3])}. Strongest: {_listed(words[:-4:-1])}." if len(words) > 5 else ""
    return _figure(svg, f"Share of each class’s test images classified correctly.{ends}")


def _clients(runs: list[RunData]) -> str:
    several, shared = len(runs) > 1, len({run.split_hash for run in runs}) == 1
    columns: list[tuple[str, str, dict[str, Any], Callable[[float | None], str]]] = []  # run, heading, cells, how to show one
    for run in runs:
        group = run.name if several else ""
        held = {site: sum(row) for site, row in run.counts().items()}
        if not shared:
            columns.append((group, "Samples", held, _count))
        elif held and not any(heading == "Samples" for _, heading, _, _ in columns):
            columns.insert(0, ("", "Samples", held, _count))
        columns.append((group, "Own test %" if several else "Own-test accuracy %", run.scores("per_client"), _percent))
        columns.append(
            (group, "Alone %" if several else "Its own model alone, on the global test set %", run.scores("local_accuracy"), _percent)
        )
    columns = [column for column in columns if column[2]]
    if all(heading == "Samples" for _, heading, _, _ in columns):
        return ""
    sites = sorted({site for _, _, cells, _ in columns for site in cells}, key=_natural)
    rows = [[site, *(show(cells.get(site)) for _, _, cells, show in columns)] for site in sites]
    means = ["Mean", *(show(_mean(cells.values())) for _, _, cells, show in columns)]
    head = ["Site", *(heading for _, heading, _, _ in columns)]
    groups = [(name, len(list(span))) for name, span in groupby(["", *(name for name, _, _, _ in columns)])] if several else []
    table = _table(
        head, rows, numeric=range(1, len(head)), foot=[means], groups=groups, key="clients", label="Site by site", tall=len(sites) > 25
    )
    note = "Own test: the result, on the site’s own mix of classes. Alone: the site’s own model, unshared, on the global test set."
    return table + (f'<p class="note">{note}</p>' if several else "")


def _lines(run: RunData, value: Callable[[dict[str, Any]], float | None]) -> dict[str, list[tuple[float, float]]]:
    """One named line a site; a row written twice (a resumed run) counts once, the later one."""
    points: dict[str, dict[float, float]] = {}
    for row in run.metrics:
        epoch, number = _number(row.get("epoch")), value(row)
        if epoch is not None and number is not None:
            points.setdefault(str(row.get("site", "")), {})[epoch] = number
    return {site: sorted(points[site].items()) for site in sorted(points, key=_natural)}


def _training_panels(run: RunData) -> list[Panel]:
    loss, validation = _lines(run, lambda row: _number(row.get("loss"))), _lines(run, lambda row: _number(row.get("val_loss")))
    accuracy = _lines(run, lambda row: None if (share := _number(row.get("train_accuracy"))) is None else 100 * share)
    panels = [Panel("Training loss", loss), Panel("Validation loss", validation), Panel("Training accuracy", accuracy, percent=True)]
    return [panel for panel in panels if panel.lines]


def _lambda_panels(run: RunData) -> list[Panel]:
    weight, term = _lines(run, lambda row: _number(row.get("lambda"))), _lines(run, _weighted_alignment)
    if not weight:
        return []
    epochs = [epoch for line in weight.values() for epoch, _ in line]
    guide = [(min(epochs), 18.0), (max(epochs), 0.0)] if max(epochs) > min(epochs) else []
    panels = [
        Panel("λ, the weight of alignment", weight, guide=guide, guide_label="a manual schedule, 18 → 0"),
        Panel("λ · L_align, what alignment adds to the loss", term),
    ]
    return [panel for panel in panels if panel.lines]


def _weighted_alignment(row: dict[str, Any]) -> float | None:
    weight, loss = _number(row.get("lambda")), _number(row.get("loss_align"))
    stated = _number(row.get("lambda_align"))
    return stated if stated is not None else weight * loss if weight is not None and loss is not None else None


def _curves(runs: list[RunData], key: str, panels_of: Callable[[RunData], list[Panel]]) -> str:
    shown = [(run, panels) for run in runs if (panels := panels_of(run))]
    parts = []
    for i, (run, panels) in enumerate(shown):
        sites = len({name for panel in panels for name in panel.lines})
        titles = _listed([panel.title.split(",")[0] for panel in panels])
        spoken = f"{titles} by epoch for {_plural(sites, 'site')}, {run.name}"
        bundle = f"Each faint line is one of {sites} sites; the bold line is their median."
        caption = bundle if sites > figures.LEGEND_LIMIT else ""
        body = _figure(figures.curves(f"{key}{i}", spoken, panels, 220 if len(runs) == 1 else 160), caption)
        if len(shown) > OPEN_RUNS:
            body = f"<details><summary>{_text(run.name)}</summary>\n{body}</details>"
        elif len(runs) > 1:
            body = f"<h3>{_text(run.name)}</h3>\n{body}"
        parts.append(body)
    return "\n".join(parts)


def _communication(runs: list[RunData]) -> str:
    several = len(runs) > 1
    rows: list[list[str]] = []
    foot: list[list[str]] = []
    notes: list[str] = []
    rounds = any(crossing.get("round") for run in runs for crossing in run.ledger.get("crossings") or [])
    for run in runs:
        crossings = run.ledger.get("crossings") or []
        if not crossings:
            continue
        for crossing in crossings:
            ends, number = (
                [_name(crossing.get("sender")), _name(crossing.get("receiver"))],
                [_name(str(crossing.get("round", "")))] * rounds,
            )
            rows.append([run.name] * several + ends + number + [_name(crossing.get("digest"))[:12], _size(_number(crossing.get("bytes")))])
        pairs = Counter((str(crossing.get("sender")), str(crossing.get("receiver"))) for crossing in crossings)
        total = sum(_number(crossing.get("bytes")) or 0.0 for crossing in crossings)
        twice = sorted((f"{sender} → {receiver}" for (sender, receiver), times in pairs.items() if times > 1), key=_natural)
        foot.append([run.name if several else "Total", _plural(len(crossings), "crossing"), *[""] * (several + rounds + 1), _size(total)])
        if twice:
            name = f" in {_strong(run.name)}" if several else ""
            more = f" and {len(twice) - 5} more" if len(twice) > 5 else ""
            notes.append(f'<p class="warn">Crossed more than once{name}: {_text(_listed(twice[:5]))}{more}.</p>')
    if not rows:
        return ""
    head = ["Run"] * several + ["From", "To"] + ["Round"] * rounds + ["Digest", "Size"]
    if len(rows) > SHOWN_CROSSINGS:
        foot.insert(0, [f"… and {len(rows) - SHOWN_CROSSINGS:,} more", *[""] * (len(head) - 1)])
    table = _table(head, rows[:SHOWN_CROSSINGS], numeric=[len(head) - 1], foot=foot, key="communication", label="Who sent what to whom")
    stated = [_number(run.result.get("bytes_down")) for run in runs]
    down = sum(size or 0.0 for size in stated)
    once = "" if notes else "Every pair crossed once. "
    back = f"Sent back down: {_size(down)}." if down else "" if None in stated else "Nothing was sent back down."
    return table + "".join(notes) + f'<p class="note">{once}{back}</p>'


def _extras(runs: list[RunData]) -> Iterable[tuple[str, str]]:
    for run in runs:
        for section in (part for part in run.extra if isinstance(part, dict)):
            body = "".join(f"<p>{_text(part)}</p>" for part in str(section.get("text") or "").split("\n\n") if part.strip())
            table = section.get("table") or {}
            head, rows = [str(column) for column in table.get("columns") or []], [list(row) for row in table.get("rows") or []]
            heading = clean(section.get("title") or "More")
            if head:
                words = {j for row in rows for j, value in enumerate(row) if not _is_number(value) and value is not None}
                numeric = [j for j in range(len(head)) if j not in words and rows]
                body += _table(head, [[_cell(value) for value in row] for row in rows], numeric=numeric, label=heading)
            yield (f"{heading} ({run.name})" if len(runs) > 1 else heading), body


def _reproduce(runs: list[RunData]) -> str:
    commands = "\n".join(str(run.result["command"]) for run in runs if run.result.get("command"))
    # Word for word (spaces may sit inside quotes), but for half characters that no file could hold.
    block = f"<pre><code>{escape(commands.encode('utf-8', 'replace').decode())}</code></pre>" if commands else ""
    facts: dict[str, list[str]] = {"Seed": [], "Split": [], "Versions": [], "Hardware": []}
    for run in runs:
        facts["Seed"].append(clean(run.result.get("seed", "")))
        facts["Split"].append(f"{clean(run.result.get('split') or run.split.get('name') or '')} {run.split_hash}".strip())
        facts["Versions"].append(clean(", ".join(f"{name} {version}" for name, version in (run.result.get("versions") or {}).items())))
        facts["Hardware"].append(clean(run.result.get("hardware") or ""))
    lines = ""
    for heading, values in facts.items():
        each = "<br>".join(f"{_strong(run.name)}: {_text(value or NONE)}" for run, value in zip(runs, values, strict=True))
        lines += f"<dt>{heading}</dt><dd>{each if len(set(values)) > 1 else _text(values[0])}</dd>" if any(values) else ""
    configs = ""
    for run in (run for run in runs if run.config):
        whose = f" of {_text(run.name)}" if len(runs) > 1 else ""
        text = escape(json.dumps(run.config, indent=2))
        configs += f"<details><summary>Full configuration{whose}</summary><pre><code>{text}</code></pre></details>"
    return block + (f"<dl>{lines}</dl>" if lines else "") + configs


# ---------------------------------------------------------------- furniture


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    label: str,
    numeric: Iterable[int] = (),
    foot: Sequence[Sequence[str]] = (),
    groups: Sequence[tuple[str, int]] = (),
    key: str = "",
    tall: bool = False,
) -> str:
    """A table in its own scrolling box; every cell is escaped here. ``groups`` puts names over spans of columns."""
    right = set(numeric)

    def line(cells: Sequence[str], tag: str = "td") -> str:
        out = []
        for i, cell in enumerate(cells):
            text = f"<b>{_text(cell)}</b>" if isinstance(cell, _Best) else _text(cell)
            element, scope = ("th", ' scope="col"') if tag == "th" else ("th", ' scope="row"') if i == 0 else ("td", "")
            side = ' class="n"' if i in right else ""
            out.append(f"<{element}{scope}{side}>{text}</{element}>")
        return f"<tr>{''.join(out)}</tr>"

    over = "".join(f'<th scope="colgroup" colspan="{span}" class="g"><span>{_text(name)}</span></th>' for name, span in groups)
    top = (f"<tr>{over}</tr>" if over else "") + line(head, "th")
    body = "\n".join(line(row) for row in rows)
    bottom = f"<tfoot>{''.join(line(row) for row in foot)}</tfoot>" if foot else ""
    name = f' id="{key}"' if key else ""
    size = "scroll tall" if tall else "scroll"
    box = f'<div class="{size}" role="region" tabindex="0" aria-label="{_text(label)}">'
    return f"{box}<table{name}><thead>{top}</thead>\n<tbody>{body}</tbody>{bottom}</table></div>\n"


def _figure(svg: str, caption: str) -> str:
    words = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
    return f'<figure><div class="scroll">{svg}</div>{words}</figure>\n'


def _text(value: object) -> str:
    return escape(clean(value))


def _strong(value: object) -> str:
    return f"<strong>{_text(value)}</strong>"


def _name(value: object) -> str:
    return clean(value) if value else NONE


def _plural(count: object, one: str, many: str = "") -> str:
    return f"{_text(count)} {one if count == 1 else many or one + 's'}"


def _listed(names: Sequence[str]) -> str:
    """'a, b and c', not yet escaped."""
    words = [clean(name) for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}" if value < 1 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _megabytes(size: float | None) -> str:
    return NONE if size is None else f"{size / 1e6:,.2f}" if size >= 1e5 or not size else f"{size / 1e6:.2g}"


def _size(size: float | None) -> str:
    if size is None:
        return NONE
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 999.5 * scale else f"{size / scale:,.0f} {unit}"
    return f"{size:.0f} B"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return NONE if value is None else f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else clean(value)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key under which site-10 comes after site-2."""
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part) for part in re.split(r"(\d+)", name) if part]


def _read(path: Path, kind: type) -> Any:
    value = read_json(path)
    if not isinstance(value, kind):
        raise BadInput(f"{path} does not hold a JSON {'object' if kind is dict else 'list'}; run `flyby run` again to write it anew")
    return value


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file; a last line cut short (an interrupted run) is passed over, any other damage is an error."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except ValueError:
            if number == len(lines):
                break
            raise BadInput(f"{path} line {number} is not JSON; mend or remove that line") from None
        if isinstance(row, dict):
            rows.append(row)
    return rows


_GLOSSARY = """<section id="s-glossary"><details><summary>Words used here</summary><dl>
<dt>Accuracy</dt><dd>The share of the global test images classified correctly, after the last epoch. Test images choose nothing: no epoch,
no setting.</dd>
<dt>Own-test accuracy</dt><dd>The same, on one site’s own test data; where a site keeps none, on the global test images weighted to that
site’s mix of classes.</dd>
<dt>Alone</dt><dd>The model a site trained by itself, before anything was shared, on the global test set: what it would have had without the
others.</dd>
<dt>Split</dt><dd>Who holds which samples. Runs with equal split hashes had the same data in the same hands. The smaller α is, the more the
sites’ classes differ.</dd>
<dt>Parcel</dt><dd>The one file a site sends: its model, what its method adds (class counts, prototypes …) and where it came from.</dd>
<dt>One crossing</dt><dd>One parcel going from one sender to one receiver. In one-shot learning each pair crosses once.</dd>
<dt>Fusion rule</dt><dd>How the server makes one predictor of the parcels that arrived.</dd>
</dl></details></section>
"""

_CSS = """
:root{color-scheme:light;--ink:#1c2430;--muted:#5c6673;--rule:#e4e7eb;--accent:#0072B2;
--face:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
*{box-sizing:border-box}
body{margin:0;background:#fff;color:var(--ink);font:16px/1.6 var(--face)}
main{max-width:980px;margin:0 auto;padding:48px 30px 80px}
h1{font-size:2rem;line-height:1.2;margin:0 0 .6em;overflow-wrap:anywhere}
h2{font-size:1.3rem;line-height:1.3;margin:0 0 .9em}
h3{font-size:1rem;margin:1.8em 0 .5em}
section{margin-top:60px}
.brand{color:var(--accent);font-weight:600;font-size:.85rem;margin:0 0 .3em}
.lead{font-size:1.1rem;max-width:46em;margin:0 0 1.2em}
.number{display:flex;flex-wrap:wrap;align-items:baseline;gap:.2em .9em;margin:0 0 1.2em}
.number>strong{font-size:3.2rem;line-height:1;font-weight:650;color:var(--accent);white-space:nowrap;font-variant-numeric:tabular-nums}
.number>span{flex:1 1 16em;color:var(--muted)}
.facts{list-style:none;padding:0;margin:0;display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:14px 28px}
.facts li{border-top:2px solid var(--rule);padding-top:10px;color:var(--muted);font-size:.9rem;line-height:1.45}
.facts b{display:block;color:var(--ink);font-size:1.15rem;font-variant-numeric:tabular-nums}
nav{margin-top:34px;padding:10px 0;border:solid var(--rule);border-width:1px 0;font-size:.9rem;display:flex;flex-wrap:wrap;gap:2px 22px}
a{color:var(--accent);text-decoration:none}
a:hover{text-decoration:underline}
.scroll{overflow-x:auto}
.tall{max-height:560px;overflow-y:auto;border-bottom:1px solid var(--rule)}
.tall thead{position:sticky;top:0;background:#fff}
table{border-collapse:collapse;min-width:60%;font-size:.93rem;font-variant-numeric:tabular-nums}
th,td{padding:8px 20px 8px 0;text-align:left;white-space:nowrap;border-bottom:1px solid var(--rule);font-weight:400}
th:last-child,td:last-child{padding-right:4px}
thead th{color:var(--muted);font-size:.83rem;line-height:1.35;vertical-align:bottom;white-space:normal;border-bottom-color:#c9ced5}
tfoot th,tfoot td{color:var(--muted);border-bottom:0;padding-top:9px;padding-bottom:3px}
.n{text-align:right}
thead .n{padding-left:16px}
thead .g{border-bottom:0;padding-bottom:0;padding-left:16px;color:var(--ink);font-weight:600;text-align:center}
.g span:not(:empty){display:block;border-bottom:1px solid #c9ced5;padding-bottom:4px}
td b{font-weight:700}
figure{margin:26px 0 0}
figure svg{display:block;width:100%;min-width:620px;height:auto;overflow:visible}
figure svg *{stroke-linejoin:round}
figure svg text{font-family:var(--face)!important;font-variant-numeric:tabular-nums}
figcaption,.note{color:var(--muted);font-size:.9rem;margin:10px 0 0}
.warn{border-left:3px solid #D55E00;padding:2px 0 2px 12px;margin:14px 0 0}
pre{background:#f6f7f9;border-radius:6px;padding:14px 16px;white-space:pre-wrap;overflow-wrap:anywhere;font-size:.87rem;line-height:1.55}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.95em}
dl{display:grid;grid-template-columns:max-content 1fr;gap:8px 24px;margin:18px 0;font-size:.95rem}
dt{color:var(--muted)}
dd{margin:0;overflow-wrap:anywhere}
details{margin-top:14px}
summary{cursor:pointer;color:var(--accent)}
@media(max-width:600px){main{padding:28px 18px 60px}section{margin-top:44px}.number>strong{font-size:2.6rem}
dl{grid-template-columns:1fr;gap:2px}dd{margin-bottom:10px}}
@media print{.tall{max-height:none}nav{display:none}}
"""
