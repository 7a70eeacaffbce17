"""The report: one self-contained HTML file for a run, or for a folder of runs side by side.

It is made from the files in the folder and nothing else, asks the network for nothing, runs no script, and is the same
bytes for the same files. Whatever a file says is shown as text, never as markup, but for the ``svg`` of an extra
section: a drawing made by ``flyby.report.figures``, embedded as it is. A section whose file is absent is left out.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from flyby.errors import BadInput
from flyby.files import write_text
from flyby.report import figures, page, trajectories
from flyby.report.figures import clean
from flyby.report.orient_figures import slope_chart
from flyby.report.page import RunData

SHOWN_CROSSINGS = 20
SETTINGS = ("method", "objective", "fusion", "model", "data", "clients", "split", "alpha", "epochs", "seed")


def write_report(folder: Path) -> Path:
    """Write ``folder/report.html`` for a run folder, or for a folder whose direct children are run folders, and return
    its path."""
    folder = Path(folder)
    if (folder / "result.json").is_file():
        runs = [RunData.read(folder)]
    else:
        children = sorted(folder.iterdir(), key=lambda child: page.natural(child.name)) if folder.is_dir() else []
        runs = [
            RunData.read(child)
            for child in children
            if not child.name.startswith(".") and (child / "result.json").is_file()
        ]
    if not runs:
        raise BadInput(
            f"{folder} holds neither result.json nor run folders; name the --out folder of a finished run, or a folder"
            " of them"
        )
    path = folder / "report.html"
    write_text(path, build_html(runs, folder.resolve().name))
    return path


def build_html(runs: list[RunData], title: str) -> str:
    """The whole page for one run, or for several compared. Sections that have nothing to show are left out, from the
    page and its menu."""
    sections = [
        ("results", "Results", _results(runs) + _accuracy_bars(runs)),
        ("holdings", "Who holds what", _holdings(runs)),
        ("classes", "Accuracy by class", _classes(runs)),
        ("clients", "Site by site", _clients(runs)),
        ("training", "Training", trajectories.training(runs)),
        ("lambda", "Alignment weight λ", trajectories.alignment(runs)),
        ("checkpoints", "Had they stopped earlier", trajectories.stopped_earlier(runs)),
        ("alike", "How alike the sites became", _consistency(runs)),
        ("crossings", "Communication", _communication(runs)),
        *((f"extra-{i}", heading, body) for i, (heading, body) in enumerate(_extras(runs))),
        ("reproduce", "How to reproduce", _reproduce(runs)),
    ]
    sections = [section for section in sections if section[2]]
    menu = " ".join(f'<a href="#s-{key}">{page.text(heading)}</a>' for key, heading, _ in sections)
    body = "\n".join(
        f'<section id="s-{key}"><h2>{page.text(heading)}</h2>\n{content}</section>'
        for key, heading, content in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{page.text(title)} · flyby report</title>
<style>{page.CSS}</style>
</head>
<body>
<main>
<header><p class="brand">flyby report</p><h1>{page.text(title)}</h1>
{_headline(runs)}</header>
<nav aria-label="Sections">{menu}</nav>
{body}
{page.GLOSSARY}</main>
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
        caption = (
            "test accuracy after the last epoch"
            if shared
            else "test accuracy, mean over the sites’ own models: nothing was shared"
        )
    else:
        sentence, caption, facts = _what_was_compared(runs), _lead(ranked), _common_split(runs)
    number = (
        f'<p class="number"><strong>{page.percent(best.accuracy)} %</strong> <span>{caption}</span></p>' if best else ""
    )
    return f'<p class="lead">{sentence}</p>\n{number}\n{facts}\n'


def _what_was_run(result: dict[str, Any]) -> str:
    uploads = result.get("uploads")
    epochs = f" for {page.plural(result['epochs'], 'epoch')}" if result.get("epochs") is not None else ""
    trained = f"trained {page.strong(result['model'])}{epochs}" if result.get("model") else f"trained{epochs}"
    if uploads is not None:
        all_sent = uploads and uploads == result.get("clients")
        trained += " and sent its model once" if all_sent else f"; {page.plural(uploads, 'model')} crossed in all"
    fused = f"; the server fused what arrived with {page.strong(result['fusion'])}" if result.get("fusion") else ""
    return (
        f"{page.strong(page.name(result.get('method')))}{_setting({**result, 'seed': None})}. Each site"
        f" {trained}{fused}."
    )


def _what_was_compared(runs: list[RunData]) -> str:
    differ = [key for key in SETTINGS if len({json.dumps(run.result.get(key)) for run in runs}) > 1]
    same = {key: value for key, value in runs[0].result.items() if key not in differ}
    verdict = f"They differ in {page.listed(differ)}" if differ else "Their settings are equal"
    return f"{len(runs)} runs compared{_setting(same)}. {verdict}."


def _lead(ranked: list[RunData]) -> str:
    """Who is best and by how much; runs whose printed numbers agree are level."""
    level = [run.name for run in ranked if page.percent(run.accuracy) == page.percent(ranked[0].accuracy)]
    caption = "test accuracy after the last epoch, the best of the runs: "
    if len(level) > 1 or len(ranked) < 2:
        return caption + f"<strong>{page.text(page.listed(level))}</strong>" + (", level" if len(level) > 1 else "")
    ahead = 100 * ((ranked[0].accuracy or 0.0) - (ranked[1].accuracy or 0.0))
    return caption + f"{page.strong(level[0])}, {ahead:.1f} points above the next, {page.strong(ranked[1].name)}"


def _common_split(runs: list[RunData]) -> str:
    shared = runs[0].split_hash
    if shared and {run.split_hash for run in runs} == {shared}:
        return f"<p>All runs share one split (<code>{page.text(shared)}</code>): the same data in the same hands.</p>"
    return (
        '<p class="warn">The runs do not all share one split: a difference between two rows is partly the luck of the'
        " split.</p>"
    )


def _setting(result: dict[str, Any]) -> str:
    """The common setting in words, e.g. ': 5 sites, digits, dirichlet split (α = 0.1), seed 0'."""
    alpha = f" (α = {page.text(result['alpha'])})" if result.get("alpha") is not None and result.get("split") else ""
    parts = [
        page.plural(result["clients"], "site") if result.get("clients") is not None else "",
        page.strong(result["data"]) if result.get("data") else "",
        f"{page.text(result['split'])} split{alpha}" if result.get("split") else "",
        f"seed {page.text(result['seed'])}" if result.get("seed") is not None else "",
    ]
    return ": " + ", ".join(part for part in parts if part) if any(parts) else ""


def _facts(run: RunData) -> str:
    """The few numbers that put the headline in proportion."""
    own, alone = page.mean(run.scores("per_client").values()), page.mean(run.scores("local_accuracy").values())
    size, speed = page.number(run.result.get("bytes_up")), page.number(run.result.get("samples_per_second"))
    facts = []
    if alone is not None and run.result.get("uploads"):
        facts.append((f"{page.percent(alone)} %", "a site’s own model alone, on the same test set (mean)"))
    if own is not None:
        facts.append((f"{page.percent(own)} %", "own-test accuracy: on each site’s own mix of classes (mean)"))
    if size is not None:
        facts.append((page.size(size), "sent up, in all"))
    if run.seconds is not None:
        facts.append(
            (
                f"{page.seconds(run.seconds)} s",
                "from start to end" + (f", at {speed:,.0f} samples a second" if speed else ""),
            )
        )
    items = "".join(f"<li><b>{number}</b> {words}</li>" for number, words in facts)
    return f'<ul class="facts">{items}</ul>' if items else ""


def _results(runs: list[RunData]) -> str:
    several = len(runs) > 1
    columns: list[tuple[str, Callable[[RunData], float | None], Callable[[float | None], str], int]] = [
        ("Accuracy %", lambda run: run.accuracy, page.percent, 1),
        ("Own-test accuracy %, mean", lambda run: page.mean(run.scores("per_client").values()), page.percent, 1),
        ("Uploads", lambda run: page.number(run.result.get("uploads")), page.count, -1),
        ("MB up", lambda run: page.number(run.result.get("bytes_up")), page.megabytes, -1),
        ("Seconds", lambda run: run.seconds, page.seconds, -1),
    ]
    cells: list[list[str]] = []
    for _, value, show, sign in columns:
        values = [value(run) for run in runs]
        best = max((sign * v for v in values if v is not None), default=0.0)
        shown = [show(v) for v in values]
        mark = several and len(set(shown)) > 1
        cells.append([page.Best(text) if mark and text == show(sign * best) else text for text in shown])
    names = [
        [run.name] * several + [page.name(run.result.get("method")), page.name(run.result.get("fusion"))]
        for run in runs
    ]
    rows = [name + [column[i] for column in cells] for i, name in enumerate(names)]
    head = ["Run"] * several + ["Method", "Fusion rule"] + [column[0] for column in columns]
    bold = any(isinstance(cell, page.Best) for column in cells for cell in column)
    note = '<p class="note">Bold: the best of each column (highest accuracy, least cost).</p>' if bold else ""
    note = note if several else _time_spent(runs[0])
    return (
        page.table(head, rows, numeric=range(2 + several, len(head)), key="results", label="Results, one row a run")
        + note
    )


def _time_spent(run: RunData) -> str:
    seconds = run.result.get("timings") or run.result.get("seconds")
    parts = seconds.items() if isinstance(seconds, dict) else ()
    known = [(name, number) for name, value in parts if name != "total" and (number := page.number(value)) is not None]
    spent = [f"{page.text(name)} {page.seconds(number)} s" for name, number in known]
    return f'<p class="note">Time spent: {", ".join(spent)}.</p>' if spent else ""


def _accuracy_bars(runs: list[RunData]) -> str:
    measured = [(run.name, 100 * run.accuracy) for run in runs if run.accuracy is not None]
    if len(runs) < 2 or not measured:
        return ""
    names, percents = [name for name, _ in measured], [percent for _, percent in measured]
    spoken = "Test accuracy by run: " + "; ".join(f"{name} {percent:.1f} %" for name, percent in measured)
    return page.figure(figures.run_bars("bars", spoken, names, percents), "Test accuracy after the last epoch.")


def _holdings(runs: list[RunData]) -> str:
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        if run.counts():
            groups.setdefault(run.split_hash or run.name, []).append(run)
    parts = []
    for i, members in enumerate(groups.values()):
        if len(groups) > 1:
            parts.append(f"<h3>{page.text(page.listed([member.name for member in members]))}</h3>")
        parts.append(_one_split(f"split{i}", members[0].counts(), members[0].class_names()))
    return "\n".join(parts)


def _one_split(key: str, counts: dict[str, list[int]], classes: list[str]) -> str:
    table = np.array([row + [0] * (len(classes) - len(row)) for row in counts.values()], dtype=np.float64)
    totals, everything = [page.count(total) for total in table.sum(axis=1)], page.count(table.sum())
    values = np.where(table > 0, table, np.nan)
    spoken = (
        f"Training samples of {page.plural(len(classes), 'class', 'classes')} held by"
        f" {page.plural(len(counts), 'site')}, {everything} in all"
    )
    svg = figures.grid(
        key, spoken, list(counts), classes, values, page.whole, totals=totals, unit="samples of the class"
    )
    least, most = (table > 0).sum(axis=1).min(), (table > 0).sum(axis=1).max()
    span = f"{least}" if least == most else f"{least} to {most}"
    caption = (
        f"Training samples by site (rows) and class (columns): {everything} in all; a site holds {span} of"
        f" {len(classes)} classes."
    )
    if figures.numbers_fit(len(classes), len(page.whole(table.max()))):
        return page.figure(svg, caption)
    rows = [
        [site, total, *(str(n) if n else "" for n in row)]
        for (site, row), total in zip(counts.items(), totals, strict=True)
    ]
    numbers = page.table(
        ["Site", "Total", *classes], rows, numeric=range(1, len(classes) + 2), label="The counts behind the picture"
    )
    return page.figure(svg, caption) + f"<details><summary>The counts as numbers</summary>{numbers}</details>"


def _classes(runs: list[RunData]) -> str:
    scores = {run.name: table for run in runs if (table := run.per_class())}
    if not scores:
        return ""
    names = list(dict.fromkeys(name for table in scores.values() for name in table))
    values = np.array(
        [[page.nan(table.get(name)) * 100 for name in names] for table in scores.values()], dtype=np.float64
    )
    spoken = f"Test accuracy of {page.plural(len(names), 'class', 'classes')}"
    if len(scores) > 1:
        spoken += f" in {len(scores)} runs"
        svg = figures.grid("classes", spoken, list(scores), names, values, page.whole, top=100.0, unit="% correct")
        return page.figure(svg, "Test accuracy in %, by run (rows) and class (columns).")
    svg = figures.class_bars("classes", spoken, names, [float(value) for value in values[0]])
    ranked = sorted((float(value), name) for value, name in zip(values[0], names, strict=True) if math.isfinite(value))
    words = [f"{name} ({value:.0f} %)" for value, name in ranked]
    ends = f" Weakest: {page.listed(words[:3])}. Strongest: {page.listed(words[:-4:-1])}." if len(words) > 5 else ""
    return page.figure(svg, f"Share of each class’s test images classified correctly.{ends}")


def _clients(runs: list[RunData]) -> str:
    several, shared = len(runs) > 1, len({run.split_hash for run in runs}) == 1
    columns: list[
        tuple[str, str, dict[str, Any], Callable[[float | None], str]]
    ] = []  # run, heading, cells, how to show one
    for run in runs:
        group = run.name if several else ""
        held = {site: sum(row) for site, row in run.counts().items()}
        if not shared:
            columns.append((group, "Samples", held, page.count))
        elif held and not any(heading == "Samples" for _, heading, _, _ in columns):
            columns.insert(0, ("", "Samples", held, page.count))
        columns.append(
            (group, "Own test %" if several else "Own-test accuracy %", run.scores("per_client"), page.percent)
        )
        columns.append(
            (
                group,
                "Alone %" if several else "Its own model alone, on the global test set %",
                run.scores("local_accuracy"),
                page.percent,
            )
        )
    columns = [column for column in columns if column[2]]
    if all(heading == "Samples" for _, heading, _, _ in columns):
        return ""
    sites = sorted({site for _, _, cells, _ in columns for site in cells}, key=page.natural)
    rows = [[site, *(show(cells.get(site)) for _, _, cells, show in columns)] for site in sites]
    means = ["Mean", *(show(page.mean(cells.values())) for _, _, cells, show in columns)]
    head = ["Site", *(heading for _, heading, _, _ in columns)]
    groups = (
        [(name, len(list(span))) for name, span in groupby(["", *(name for name, _, _, _ in columns)])]
        if several
        else []
    )
    table = page.table(
        head,
        rows,
        numeric=range(1, len(head)),
        foot=[means],
        groups=groups,
        key="clients",
        label="Site by site",
        tall=len(sites) > 25,
    )
    note = (
        "Own test: the result, on the site’s own mix of classes. Alone: the site’s own model, unshared, on the global"
        " test set."
    )
    return table + (f'<p class="note">{note}</p>' if several else "")


# Every measure of result["consistency"]: its name, when sites are more alike, and what it is in one line.
MEASURES: dict[str, tuple[str, str, str]] = {
    "feature_agreement": (
        "Feature agreement",
        "higher",
        (
            "mean linear CKA between two sites’ features of the same held-out images: 1 is the same up to rotation and"
            " scale, 0 unrelated."
        ),
    ),
    "drift": (
        "Drift",
        "lower",
        "how far a site’s weights moved from the start they all share, as a part of that start’s norm (mean).",
    ),
    "proto_consistency": (
        "Prototype consistency",
        "lower",
        "spread of a class’s unit prototype over the sites that hold it, averaged over classes that two or more hold.",
    ),
    "proto_matrix_std": (
        "Std of the mean prototypes",
        page.NONE,
        (
            "standard deviation of all entries of the sites’ mean prototype matrix; it says how large prototypes are,"
            " not how alike."
        ),
    ),
    "inter_client_std": (
        "Std between sites",
        "lower",
        (
            "standard deviation over sites of each prototype entry, averaged over all entries, classes a site lacks"
            " included."
        ),
    ),
}


def _consistency(runs: list[RunData]) -> str:
    """How alike the sites' models are, a column a run, with a line on what each measure is."""
    measured = {run.name: scores for run in runs if (scores := run.scores("consistency"))}
    known = [name for name in MEASURES if any(scores.get(name) is not None for scores in measured.values())]
    if not known:
        return ""
    columns = list(measured) if len(runs) > 1 else ["Value"]
    head = ["Measure", "More alike if", *columns]
    rows = [[*MEASURES[name][:2], *(page.short(scores.get(name)) for scores in measured.values())] for name in known]
    words = "".join(f"<dt>{page.text(MEASURES[name][0])}</dt><dd>{page.text(MEASURES[name][2])}</dd>" for name in known)
    table = page.table(
        head, rows, numeric=range(2, len(head)), key="consistency", label="How alike the sites’ models are"
    )
    return table + f"<dl>{words}</dl>"


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
            ends = [page.name(crossing.get("sender")), page.name(crossing.get("receiver"))]
            number = [page.name(str(crossing.get("round", "")))] * rounds
            what = [page.name(crossing.get("digest"))[:12], page.size(page.number(crossing.get("bytes")))]
            rows.append([run.name] * several + ends + number + what)
        pairs = Counter((str(crossing.get("sender")), str(crossing.get("receiver"))) for crossing in crossings)
        total = sum(page.number(crossing.get("bytes")) or 0.0 for crossing in crossings)
        twice = sorted(
            (f"{sender} → {receiver}" for (sender, receiver), times in pairs.items() if times > 1), key=page.natural
        )
        gap = [""] * (several + rounds + 1)
        foot.append([run.name if several else "Total", page.plural(len(crossings), "crossing"), *gap, page.size(total)])
        if twice:
            name = f" in {page.strong(run.name)}" if several else ""
            more = f" and {len(twice) - 5} more" if len(twice) > 5 else ""
            notes.append(
                f'<p class="warn">Crossed more than once{name}: {page.text(page.listed(twice[:5]))}{more}.</p>'
            )
    if not rows:
        return ""
    head = ["Run"] * several + ["From", "To"] + ["Round"] * rounds + ["Digest", "Size"]
    if len(rows) > SHOWN_CROSSINGS:
        foot.insert(0, [f"… and {len(rows) - SHOWN_CROSSINGS:,} more", *[""] * (len(head) - 1)])
    table = page.table(
        head,
        rows[:SHOWN_CROSSINGS],
        numeric=[len(head) - 1],
        foot=foot,
        key="communication",
        label="Who sent what to whom",
    )
    stated = [page.number(run.result.get("bytes_down")) for run in runs]
    down = sum(size or 0.0 for size in stated)
    once = "" if notes else "Every pair crossed once. "
    back = f"Sent back down: {page.size(down)}." if down else "" if None in stated else "Nothing was sent back down."
    return table + "".join(notes) + f'<p class="note">{once}{back}</p>'


def _extras(runs: list[RunData]) -> Iterable[tuple[str, str]]:
    for run in runs:
        for section in (part for part in run.extra if isinstance(part, dict)):
            body = "".join(
                f"<p>{page.text(part)}</p>" for part in str(section.get("text") or "").split("\n\n") if part.strip()
            )
            table = section.get("table") or {}
            head, rows = (
                [str(column) for column in table.get("columns") or []],
                [list(row) for row in table.get("rows") or []],
            )
            heading = clean(section.get("title") or "More")
            body += slope_chart(f"slopes-{clean(run.name)}", heading, section.get("slopes"))
            if head:
                words = {
                    j for row in rows for j, value in enumerate(row) if not page.is_number(value) and value is not None
                }
                numeric = [j for j in range(len(head)) if j not in words and rows]
                body += page.table(
                    head, [[page.cell(value) for value in row] for row in rows], numeric=numeric, label=heading
                )
            if isinstance(svg := section.get("svg"), str):
                body += page.figure(svg, "")
            yield (f"{heading} ({run.name})" if len(runs) > 1 else heading), body


def _reproduce(runs: list[RunData]) -> str:
    commands = "\n".join(str(run.result["command"]) for run in runs if run.result.get("command"))
    # Word for word (spaces may sit inside quotes), but for half characters that no file could hold.
    block = f"<pre><code>{escape(commands.encode('utf-8', 'replace').decode())}</code></pre>" if commands else ""
    facts: dict[str, list[str]] = {"Seed": [], "Split": [], "Versions": [], "Hardware": [], "Memory": []}
    for run in runs:
        facts["Seed"].append(clean(run.result.get("seed", "")))
        facts["Split"].append(
            f"{clean(run.result.get('split') or run.split.get('name') or '')} {run.split_hash}".strip()
        )
        facts["Versions"].append(
            clean(", ".join(f"{name} {version}" for name, version in (run.result.get("versions") or {}).items()))
        )
        facts["Hardware"].append(clean(run.result.get("hardware") or ""))
        peak = run.result.get("peak_memory_mb")
        facts["Memory"].append(f"{peak:,.0f} MB at the most" if page.is_number(peak) else "")
    lines = ""
    for heading, values in facts.items():
        each = "<br>".join(
            f"{page.strong(run.name)}: {page.text(value or page.NONE)}" for run, value in zip(runs, values, strict=True)
        )
        lines += (
            f"<dt>{heading}</dt><dd>{each if len(set(values)) > 1 else page.text(values[0])}</dd>"
            if any(values)
            else ""
        )
    configs = ""
    for run in (run for run in runs if run.config):
        whose = f" of {page.text(run.name)}" if len(runs) > 1 else ""
        text = escape(json.dumps(run.config, indent=2))
        configs += f"<details><summary>Full configuration{whose}</summary><pre><code>{text}</code></pre></details>"
    return block + (f"<dl>{lines}</dl>" if lines else "") + configs
