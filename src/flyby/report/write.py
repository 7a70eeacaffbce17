"""The report: one self-contained HTML file for a run, or for a folder of runs side by side.

It is made from the files in the folder and nothing else, asks the network for nothing, runs no script, and is the same
bytes for the same files. Whatever a file says is shown as text, never as markup, but for the ``svg`` of an extra
section: a drawing made by ``flyby.drawing``, embedded as it is. A section whose file is absent is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from flyby.data.splits import SplitSettings
from flyby.drawing import clean
from flyby.errors import BadInput
from flyby.files import write_text
from flyby.names import natural
from flyby.report import contacts, figures, nodes, page, sites, trajectories
from flyby.report.read import RunData
from flyby.report.sections import pictures
from flyby.runs.folder import Run

SETTINGS = ("method", "objective", "fusion", "model", "data", "clients", "split", "alpha", "epochs", "seed")


def write_report(folder: Path) -> Path:
    """Write ``folder/report.html`` for a run folder, or for a folder whose direct children are run folders, and return
    its path."""
    folder, run = Path(folder), Run(folder)
    if run.finished:
        runs = [RunData.read(folder)]
    else:
        children = sorted(folder.iterdir(), key=lambda child: natural(child.name)) if folder.is_dir() else []
        runs = [RunData.read(child) for child in children if not child.name.startswith(".") and Run(child).finished]
    if not runs:
        raise BadInput(
            f"{folder} holds neither {run.result_path.name} nor run folders; name the --out folder of a finished run,"
            " or a folder of them"
        )
    write_text(run.report, build_html(runs, folder.resolve().name))
    return run.report


def build_html(runs: list[RunData], title: str) -> str:
    """The whole page for one run, or for several compared. Sections that have nothing to show are left out, from the
    page and its menu."""
    sections = [
        ("results", "Results", _results(runs) + _accuracy_bars(runs)),
        ("hours", "Accuracy against hours", contacts.over_hours(runs)),
        ("holdings", "Who holds what", sites.holdings(runs)),
        ("classes", "Accuracy by class", sites.classes(runs)),
        ("clients", "Site by site", sites.clients(runs)),
        ("training", "Training", trajectories.training(runs)),
        ("lambda", "Alignment weight λ", trajectories.alignment(runs)),
        ("checkpoints", "Had they stopped earlier", trajectories.stopped_earlier(runs)),
        ("alike", "How alike the sites became", sites.consistency(runs)),
        ("crossings", "Communication", sites.communication(runs)),
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
    shaped = result.get("alpha") is not None and SplitSettings(name=str(result.get("split"))).uses_alpha
    alpha = f" (α = {page.text(result['alpha'])})" if shaped else ""
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
    if (common := page.number(run.result.get("accuracy_common"))) is not None:
        facts.append((f"{page.percent(common)} %", "on common images, weighted as each site’s classes (mean)"))
    if (taught := page.number(run.result.get("teacher_accuracy"))) is not None:
        facts.append((f"{page.percent(taught)} %", "its teacher’s accuracy, on the same test images"))
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
        ("Common images %, mean", lambda run: page.number(run.result.get("accuracy_common")), page.percent, 1),
        ("Teacher’s accuracy %", lambda run: page.number(run.result.get("teacher_accuracy")), page.percent, 1),
        ("Uploads", lambda run: page.number(run.result.get("uploads")), page.count, -1),
        ("MB up", lambda run: page.number(run.result.get("bytes_up")), page.megabytes, -1),
        ("Seconds", lambda run: run.seconds, page.seconds, -1),
    ]
    rare = ("Common", "Teacher")
    columns = [one for one in columns if not one[0].startswith(rare) or any(one[1](run) is not None for run in runs)]
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


def _extras(runs: list[RunData]) -> Iterable[tuple[str, str]]:
    for run in runs:
        found = nodes.sections_of(run)
        titles = [section["title"] for section in found]
        found += [part for part in run.extra if isinstance(part, dict) and part.get("title") not in titles]
        for section in found:
            body = "".join(
                f"<p>{page.text(part)}</p>" for part in str(section.get("text") or "").split("\n\n") if part.strip()
            )
            table = section.get("table") or {}
            head, rows = (
                [str(column) for column in table.get("columns") or []],
                [list(row) for row in table.get("rows") or []],
            )
            heading = clean(section.get("title") or "More")
            body += nodes.slope_chart(f"slopes-{clean(run.name)}-{heading}", heading, section.get("slopes"))
            body += nodes.line_chart(f"lines-{clean(run.name)}-{heading}", heading, section.get("panels"))
            if head:
                words = {
                    j for row in rows for j, value in enumerate(row) if not page.is_number(value) and value is not None
                }
                numeric = [j for j in range(len(head)) if j not in words and rows]
                body += page.table(
                    head, [[page.cell(value) for value in row] for row in rows], numeric=numeric, label=heading
                )
            if isinstance(svg := pictures(section.get("images")) or section.get("svg"), str):
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
