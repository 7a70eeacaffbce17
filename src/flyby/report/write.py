"""The report: one self-contained HTML file for a run, or for a folder of runs side by side.

It is made from the files in the folder and nothing else, asks the network for nothing, runs no script, and is the same
bytes for the same files. Whatever a file says is shown as text, never as markup, but for the ``svg`` of an extra
section: a drawing made by ``flyby.drawing``, embedded as it is. A section whose file is absent is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from flyby.data.splits import SplitSettings
from flyby.drawing import clean
from flyby.files import write_text
from flyby.names import natural
from flyby.report import contacts, figures, nodes, page, sites, trajectories
from flyby.report.read import RunData, runs_in
from flyby.report.sections import pictures
from flyby.runs.folder import Run

BRAND = "flyby report"
SETTINGS = ("method", "objective", "fusion", "model", "data", "clients", "split", "alpha", "epochs", "seed")


def write_report(folder: Path) -> Path:
    """Write ``folder/report.html`` for a run folder, or for a folder whose direct children are run folders, and return
    its path."""
    folder, run = Path(folder), Run(folder)
    write_text(run.report, build_html(runs_in(folder), folder.resolve().name))
    return run.report


def build_html(runs: list[RunData], title: str) -> str:
    """The whole page for one run, or for several compared, the most accurate first; runs on different data stand under
    the name of their data. Sections that have nothing to show are left out, from the page and its menu."""
    runs = sorted(runs, key=lambda run: -(run.accuracy if run.accuracy is not None else -1.0))
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(clean(run.result.get("data") or page.NONE), []).append(run)
    end = [("reproduce", "How to reproduce", _reproduce(runs), False)]
    if len(groups) == 1:
        sections = [*_sections(runs), *end]
        return page.document(
            title, BRAND, _headline(runs), _joined(sections) + page.GLOSSARY, nav=_menu(sections), css=""
        )
    parts, menu = [], ""
    for place, (data, members) in enumerate(sorted(groups.items(), key=lambda group: natural(group[0]))):
        inner = _joined(_sections(members)).replace("<h3>", "<h4>").replace("</h3>", "</h4>")
        inner = inner.replace("<h2>", "<h3>").replace("</h2>", "</h3>")
        body = f"<h2>{page.text(data)}</h2>\n{_headline(members)}{inner}"
        body = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>set{place}-", body)  # what is text has no bare quotes
        parts.append(f'<section class="set" id="s-set{place}">{body}</section>')
        menu += f' <a href="#s-set{place}">{page.text(data)} ({len(members)})</a>'
    lead = (
        f"{len(runs)} runs on {page.plural(len(groups), 'dataset')}: accuracies on different images are not compared."
    )
    body = "\n".join(parts) + _joined(end) + page.GLOSSARY
    return page.document(title, BRAND, f'<p class="lead">{lead}</p>', body, nav=menu + _menu(end))


Section = tuple[str, str, str, bool]  # its key, heading, markup, and whether it is folded


def _sections(runs: list[RunData]) -> list[Section]:
    """Where nodes met, their own figures come first, and what describes them is folded away."""
    met, extras = any(run.met for run in runs), list(_extras(runs))
    found: list[Section] = [
        ("results", "Results", nodes.summary(runs) + _results(runs) + _accuracy_bars(runs), False),
        ("hours", "Accuracy against hours", contacts.over_hours(runs), False),
        *(one for one in extras if not one[3] and met),
        ("holdings", "Who holds what", sites.holdings(runs), met),
        ("classes", "Accuracy by class", sites.classes(runs), met),
        ("clients", "Site by site", sites.clients([run for run in runs if not run.nodes]), met),
        ("training", "Training", trajectories.training(runs), met),
        ("lambda", "Alignment weight λ", trajectories.alignment(runs), False),
        ("checkpoints", "Had they stopped earlier", trajectories.stopped_earlier(runs), False),
        ("alike", "How alike the sites became", sites.consistency(runs), False),
        ("crossings", "Communication", sites.communication(runs), met),
        *(one for one in extras if one[3] or not met),
    ]
    return [one for one in found if one[2]]


def _joined(sections: list[Section]) -> str:
    return "\n".join(page.section(key, heading, body, folded=shut) for key, heading, body, shut in sections) + "\n"


def _menu(sections: list[Section]) -> str:
    return " ".join(f'<a href="#s-{key}">{page.text(heading)}</a>' for key, heading, *_ in sections)


# ---------------------------------------------------------------- sections


def _headline(runs: list[RunData]) -> str:
    ranked = sorted((run for run in runs if run.accuracy is not None), key=lambda run: -(run.accuracy or 0.0))
    best = ranked[0] if ranked else None
    if len(runs) == 1:
        sentence, facts = _what_was_run(runs[0].result), _facts(runs[0])
        shared = runs[0].result.get("fusion") or runs[0].result.get("uploads")
        caption = (
            "accuracy, mean over the nodes’ own test images"
            if runs[0].met
            else "test accuracy after the last epoch"
            if shared
            else "test accuracy, mean over the sites’ own models: nothing was shared"
        )
    else:
        sentence, caption, facts = _what_was_compared(runs), _lead(ranked), _common_split(runs)
    number = ""
    if best:
        caption += _certain(best)
        number = f'<p class="number"><strong>{page.percent(best.accuracy)} %</strong> <span>{caption}</span></p>'
    return f'<p class="lead">{sentence}</p>\n{number}\n{facts}\n'


def _certain(run: RunData) -> str:
    """The interval of an accuracy in words."""
    if (ends := run.interval()) is None:
        return ""
    of = f"{len(run.scores('per_client'))} nodes" if run.met else f"{run.images:,} images"
    return f"; 95 % interval {page.interval(ends)} % ({of})"


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
    lead = f"{page.strong(level[0])}, {ahead:.1f} points above the next, {page.strong(ranked[1].name)}"
    first, second = ranked[0].interval(), ranked[1].interval()
    within = first and second and second[1] >= first[0]
    return caption + lead + (" (their intervals overlap)" if within else "")


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
    before = page.mean(run.scores("local_per_client").values())
    if before is not None:
        facts.append((f"{page.percent(before)} %", "local: the nodes’ own models before they met (mean)"))
    if alone is not None and run.result.get("uploads"):
        facts.append((f"{page.percent(alone)} %", "a site’s own model alone, on the same test set (mean)"))
    if own is not None and not run.met:
        facts.append((f"{page.percent(own)} %", "own-test accuracy: on each site’s own mix of classes (mean)"))
    if (common := page.number(run.result.get("accuracy_common"))) is not None:
        facts.append((f"{page.percent(common)} %", "on common images, weighted as each site’s classes (mean)"))
    if (taught := page.number(run.result.get("teacher_accuracy"))) is not None:
        facts.append((f"{page.percent(taught)} %", "its teacher’s accuracy, on the same test images"))
    if size:
        facts.append((page.size(size), "sent from node to node, in all" if run.met else "sent up, in all"))
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
    """A row per run: its name and its accuracy first, for a phone shows no more without scrolling."""
    several, met = len(runs) > 1, all(run.met for run in runs)
    if met and not several:
        return _time_spent(runs[0])  # the nodes' table says the rest
    sent, many = ("MB sent", "Crossings") if met else ("MB up", "Uploads")
    columns: list[tuple[str, Callable[[RunData], float | None], Callable[[float | None], str], int]] = [
        ("Accuracy %", lambda run: run.accuracy, page.percent, 1),
        ("Own-test accuracy %, mean", lambda run: page.mean(run.scores("per_client").values()), page.percent, 1),
        ("Common images %, mean", lambda run: page.number(run.result.get("accuracy_common")), page.percent, 1),
        ("Teacher’s accuracy %", lambda run: page.number(run.result.get("teacher_accuracy")), page.percent, 1),
        (many, lambda run: page.number(run.result.get("uploads")), page.count, -1),
        (sent, lambda run: page.number(run.result.get("bytes_up")), page.megabytes, -1),
        ("Seconds", lambda run: run.seconds, page.seconds, 0),  # no race: who comes later may find uploads trained
    ]
    rare = ("Common", "Teacher")
    columns = [one for one in columns if not one[0].startswith(rare) or any(one[1](run) is not None for run in runs)]
    columns = [one for one in columns if not (met and one[0].startswith("Own"))]  # of nodes that met it is the accuracy
    cells: list[list[str]] = []
    for _, value, show, sign in columns:
        values = [value(run) for run in runs]
        best = max((sign * v for v in values if v is not None), default=0.0)
        shown = [show(v) for v in values]
        mark = several and sign and len(set(shown)) > 1
        cells.append([page.Best(text) if mark and text == show(sign * best) else text for text in shown])
    head = [column[0] for column in columns]
    if any(run.interval() for run in runs):
        head.insert(1, "95 % interval")
        cells.insert(1, [page.interval(run.interval()) for run in runs])
    words = [[page.name(run.result.get("method"))] * several + [page.name(run.result.get("fusion"))] for run in runs]
    rows = [
        [run.name if several else page.name(run.result.get("method")), *(column[i] for column in cells), *words[i]]
        for i, run in enumerate(runs)
    ]
    tail = ["Method"] * several + ["Fusion rule"]
    bold = any(isinstance(cell, page.Best) for column in cells for cell in column)
    said = "Bold: the best of each column (highest accuracy, least cost). " if bold else ""
    said += "Seconds: uploads that several runs share are trained once, and count for the first of them."
    note = f'<p class="note">{said}</p>' if several else _time_spent(runs[0])
    head = ["Run" if several else "Method", *head, *tail]
    numbers = range(1, len(head) - len(tail))
    return page.table(head, rows, numeric=numbers, key="results", label="Results, one row per run") + note


def _time_spent(run: RunData) -> str:
    seconds = run.result.get("timings") or run.result.get("seconds")
    parts = seconds.items() if isinstance(seconds, dict) else ()
    known = [(name, number) for name, value in parts if name != "total" and (number := page.number(value)) is not None]
    spent = [f"{page.text(name)} {page.seconds(number)} s" for name, number in known]
    return f'<p class="note">Time spent: {", ".join(spent)}.</p>' if spent else ""


def _accuracy_bars(runs: list[RunData]) -> str:
    shown = [run for run in runs if run.accuracy is not None]
    measured = [(run.name, 100 * (run.accuracy or 0.0)) for run in shown]
    if len(runs) < 2 or not measured:
        return ""
    names, percents = [name for name, _ in measured], [percent for _, percent in measured]
    spoken = "Test accuracy by run: " + "; ".join(f"{name} {percent:.1f} %" for name, percent in measured)
    spans = [(100 * ends[0], 100 * ends[1]) if (ends := run.interval()) else None for run in shown]
    caption = "Accuracy" if any(run.met for run in runs) else "Test accuracy after the last epoch"
    caption += ", with its 95 % interval." if any(spans) else "."
    return page.figure(figures.run_bars.both("bars", spoken, names, percents, spans), caption)


OPEN = ("Node by node", "On common images", "More than accuracy")  # of one run whose nodes met


def _extras(runs: list[RunData]) -> Iterable[tuple[str, str, str, bool]]:
    """Sections that a run or its nodes bring: key, heading, markup, and whether it is folded away."""
    for place, run in enumerate(runs):
        found = nodes.sections_of(run)
        titles = [section["title"] for section in found]
        found += [part for part in run.extra if isinstance(part, dict) and part.get("title") not in titles]
        for number, section in enumerate(found):
            heading = clean(section.get("title") or "More")
            title = f"{heading} ({run.name})" if len(runs) > 1 else heading
            shut = run.met and (len(runs) > 1 or heading not in OPEN)
            yield f"extra-{place}-{number}", title, _extra(run, section, heading), shut


def _extra(run: RunData, section: dict[str, Any], heading: str) -> str:
    body = "".join(f"<p>{page.text(part)}</p>" for part in str(section.get("text") or "").split("\n\n") if part.strip())
    table = section.get("table") or {}
    head, rows = (
        [str(column) for column in table.get("columns") or []],
        [list(row) for row in table.get("rows") or []],
    )
    for kind, draw in (("slopes", nodes.slope_chart), ("panels", nodes.line_chart)):
        if svg := draw(f"{kind}-{clean(run.name)}-{heading}", heading, section.get(kind)):
            body += page.figure(svg, "")
    if head:
        shown = [[page.cell(value) for value in row] for row in rows]
        words = {j for row in shown for j, text in enumerate(row) if not _numeric(text)}
        numeric = [j for j in range(len(head)) if j not in words and rows]
        made = page.table(
            head,
            page.folded(shown, section.get("names", 0)) if section.get("names") else shown,
            numeric=numeric,
            label=heading,
        )
        body += page.fold("The numbers", made) if section.get("folded") else made
    if isinstance(picture := pictures(section.get("images")) or section.get("svg"), str):
        body += page.figure(picture, "")
    return body


def _numeric(text: str) -> bool:
    return text in ("", page.NONE) or re.fullmatch(r"[-+±<]?\s?[\d.,]+(e[-+]?\d+)?", text) is not None


def _reproduce(runs: list[RunData]) -> str:
    block = page.commands(str(run.result.get("command") or "") for run in runs)
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
