"""The report's sections about sites: who holds what, how well each class and each site does, how alike they became, and
who sent what to whom."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np

from flyby.drawing import grid, numbers_fit
from flyby.fusion.quality import wilson
from flyby.names import natural
from flyby.report import figures, page
from flyby.report.read import RunData

SHOWN_CROSSINGS = 20


def holdings(runs: list[RunData]) -> str:
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
    svg = grid.both(key, spoken, list(counts), classes, values, page.whole, totals=totals, unit="samples of the class")
    least, most = (table > 0).sum(axis=1).min(), (table > 0).sum(axis=1).max()
    span = f"{least}" if least == most else f"{least} to {most}"
    caption = (
        f"Training samples by site (rows) and class (columns): {everything} in all; a site holds {span} of"
        f" {len(classes)} classes."
    )
    if numbers_fit(len(classes), len(page.whole(table.max()))):
        return page.figure(svg, caption)
    rows = [
        [site, total, *(str(n) if n else "" for n in row)]
        for (site, row), total in zip(counts.items(), totals, strict=True)
    ]
    numbers = page.table(
        ["Site", "Total", *classes], rows, numeric=range(1, len(classes) + 2), label="The counts behind the picture"
    )
    return page.figure(svg, caption) + f"<details><summary>The counts as numbers</summary>{numbers}</details>"


def classes(runs: list[RunData]) -> str:
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
        svg = grid.both("classes", spoken, list(scores), names, values, page.whole, top=100.0, unit="% correct")
        return page.figure(svg, f"Test accuracy in %, by run (rows) and class (columns).{_per_class(runs, len(names))}")
    svg = figures.class_bars.both("classes", spoken, names, [float(value) for value in values[0]])
    ranked = sorted((float(value), name) for value, name in zip(values[0], names, strict=True) if math.isfinite(value))
    words = [f"{name} ({value:.0f} %)" for value, name in ranked]
    ends = f" Weakest: {page.listed(words[:3])}. Strongest: {page.listed(words[:-4:-1])}." if len(words) > 5 else ""
    share = "Share of each class’s test images classified correctly."
    return page.figure(svg, f"{share}{ends}{_per_class(runs, len(names))}")


def _per_class(runs: list[RunData], classes: int) -> str:
    """How far the accuracy of a class can be believed; nothing where the number of images is not known."""
    known = {run.images for run in runs}
    if len(known) != 1 or None in known or not classes:
        return ""
    each = max(1, round(min(n for n in known if n) / classes))
    return f" About {each:,} images per class: 95 % intervals reach up to ± {_widest(each):.0f} points."


def _widest(images: int) -> float:
    """Half the width of the widest 95 % interval that so many images give, in points."""
    low, high = wilson(round(images / 2), images)
    return 50 * (high - low)


def clients(runs: list[RunData]) -> str:
    several, shared = len(runs) > 1, len({run.split_hash for run in runs}) == 1
    # Run, heading, cells, how to show one.
    columns: list[tuple[str, str, dict[str, Any], Callable[[float | None], str]]] = []
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
    sites = sorted({site for _, _, cells, _ in columns for site in cells}, key=natural)
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
    note = note if several else ""
    if len(known := {run.images for run in runs}) == 1 and (images := known.pop()):
        note += f" With {images:,} test images 95 % intervals reach up to ± {_widest(images):.1f} points."
    return table + (f'<p class="note">{note.strip()}</p>' if note else "")


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


def consistency(runs: list[RunData]) -> str:
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


def communication(runs: list[RunData]) -> str:
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
            (f"{sender} → {receiver}" for (sender, receiver), times in pairs.items() if times > 1), key=natural
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
    served = not all(run.met for run in runs)
    back = (
        f"Sent back down: {page.size(down)}."
        if down
        else "Nothing was sent back down."
        if served and None not in stated
        else ""
    )
    return table + "".join(notes) + f'<p class="note">{once}{back}</p>'
