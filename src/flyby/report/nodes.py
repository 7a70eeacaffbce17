"""FOL in the report: node by node, theorems, pruning and meetings as sections of plain text, tables and numbers, and
the slope chart of them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flyby.drawing import ACCENT, INK, NARROW, PALETTE, Drawing, canvas, clean, place_axes, wide
from flyby.errors import BadInput
from flyby.meeting.pipeline import neighbours
from flyby.meeting.settings import VARIANTS
from flyby.report import figures, page
from flyby.report.figures import Panel
from flyby.report.read import RunData, around
from flyby.runs.methods import METHODS, PRINTED
from flyby.runs.paired import Paired, mean_error, p_said
from flyby.runs.population import evenly

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NodeFacts = Mapping[str, dict[str, Any]]
MORE = {"log_loss": "log-loss", "calibration_error": "calibration error", "recall": "recall at 5 % false alarms"}
FEW = 12  # nodes that can be named beside their lines
WORSE = PALETTE[1]


def sections_of(run: RunData) -> list[dict[str, Any]]:
    """The sections of a run whose nodes met, from what its folder says of each of them; none of any other run."""
    return (
        _careful(run, lambda: sections(evenly(run.nodes), _variant(run), int(run.result["rounds"])))
        if run.nodes
        else []
    )


def _variant(run: RunData) -> str:
    method = str(run.result.get("method"))
    return (METHODS[method].orient if method in METHODS else None) or method


def _careful(run: RunData, made: Callable[[], Any]) -> Any:
    try:
        return made()
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise BadInput(
            f"nodes/ of the run {run.name} does not hold what was measured at its nodes ({type(error).__name__}:"
            f" {error}); take the folder away, or run it again"
        ) from None


def summary(runs: Sequence[RunData]) -> str:
    """A table of what the nodes had alone and have after the last round, the best first; empty where nobody met. A
    line that several runs share is one."""
    lines: dict[tuple[str, tuple[float, ...]], list[float] | None] = {}
    for run in runs:
        if run.nodes:
            lines |= _careful(run, partial(_lines, run.nodes, _variant(run)))
    if not lines:
        return ""
    shared = any(common is not None for common in lines.values())
    rows = []
    for (name, own), common in sorted(lines.items(), key=lambda line: -sum(line[0][1]) / len(line[0][1])):
        mean, gap = mean_error(own)[0], _over_local(lines, own) if name != "local" else None
        moved = [f"{100 * gap.mean:+.1f}", f"{gap.up} / {gap.down}", p_said(gap.p)] if gap else ["", "", ""]
        seen = [page.percent(page.mean(common or [])), page.interval(around(common or []))] * shared
        rows.append([name, page.percent(mean), page.interval(around(own)), *moved, *seen])
    head = ["Model", "Own test %", "95 % interval", "Over local, points", "Nodes up / down", "p"]
    head += ["Common images %", "95 % interval"] * shared
    note = (
        f"Mean over {len(rows and next(iter(lines))[1])} nodes after the last round, and 1.96 standard errors of it"
        " over the nodes; p is of a paired sign-flip test against the local models."
    )
    table = page.table(
        head, rows, numeric=range(1, len(head)), key="nodes", label="What the nodes have, one row per model"
    )
    return table + f'<p class="note">{note}</p>'


def _lines(facts: NodeFacts, variant: str) -> dict[tuple[str, tuple[float, ...]], list[float] | None]:
    """(name, accuracy by node) of the local models, the students and the teachers; with that on common images."""
    student, teacher = PRINTED.get(variant, (variant, ""))
    nodes = list(evenly(facts).values())
    found: dict[tuple[str, tuple[float, ...]], list[float] | None] = {}
    for name, who in (("local", "local"), (student, "student"), (teacher, "teacher")):
        if name:
            places = [one if who == "local" else one["rounds"][-1] for one in nodes]
            known = all(place.get("common", {}).get(who) for place in places)
            common = [float(place["common"][who]["accuracy"]) for place in places] if known else None
            found[name, tuple(float(place[who]) for place in places)] = common
    return found


def _over_local(lines: Mapping[tuple[str, tuple[float, ...]], Any], own: Sequence[float]) -> Paired | None:
    """Against the local models at the same nodes; where runs began from several, there is no one answer."""
    local = [values for name, values in lines if name == "local" and len(values) == len(own)]
    return Paired.of(own, local[0]) if len(local) == 1 else None


def sections(facts: NodeFacts, variant: str, rounds: int) -> list[dict[str, Any]]:
    """The first section holds every node's numbers, as a slope chart too."""
    found = (
        nodes(facts, variant, rounds),
        *common(facts, variant, rounds),
        learning(facts),
        theorems(facts),
        pruning(facts),
        sizes(facts),
        meetings(facts),
    )
    return [section for section in found if section]


def nodes(facts: NodeFacts, variant: str, last: int) -> dict[str, Any]:
    student, teacher = PRINTED.get(variant, (variant, ""))
    columns = ["node", "model", "train", "val", "test", "local", *(f"{student} E={e}" for e in range(1, last + 1))]
    columns += [f"{teacher} E={e}" for e in range(1, last + 1)] if teacher else []
    rows: list[list[Any]] = []
    for name, one in facts.items():
        row = [name, one["model"], one["train"], one["val"], one["test"], one["local"]]
        row += [r["student"] for r in one["rounds"]]
        rows.append(row + ([r["teacher"] for r in one["rounds"]] if teacher else []))
    slopes = _slopes(variant, {name: [one["local"], one["answer"]] for name, one in facts.items()})
    return {
        "title": "Node by node",
        "text": "Accuracy of each judged node on its own test images: its pretrained model, then after every round. "
        + _said(columns, rows, 5, last),
        "slopes": slopes,
        "table": {"columns": _in_percent(columns, 5), "rows": _percents([*rows, *_sums(rows, 2, 5)], 5)},
        "folded": True,
    }


def common(facts: NodeFacts, variant: str, last: int) -> list[dict[str, Any]]:
    """The same nodes judged by images that are the same for all; empty for a run that had none."""
    if not all(one.get("common", {}).get("local") for one in facts.values()):
        return []
    student, teacher = PRINTED.get(variant, (variant, ""))
    series = [("local", "local", -1)] + [(f"{student} E={e}", "student", e - 1) for e in range(1, last + 1)]
    series += [(f"{teacher} E={e}", "teacher", e - 1) for e in range(1, last + 1)] if teacher else []

    def of(one: dict[str, Any], who: str, number: int) -> dict[str, float]:
        found: dict[str, float] = (one if number < 0 else one["rounds"][number])["common"][who]
        return found

    columns = ["node", "train", *(title for title, _, _ in series)]
    rows = [
        [name, one["train"], *(of(one, who, number)["accuracy"] for _, who, number in series)]
        for name, one in facts.items()
    ]
    images = next(iter(facts.values()))["common"]["images"]
    text = (
        f"Accuracy of the same nodes on {images:,} images that no node trained on or chose by, each class weighted as"
        " in the node's training images. "
    )
    pairs = {name: [of(one, "local", -1)["accuracy"], one["answer_common"]] for name, one in facts.items()}
    slopes = _slopes(variant, pairs)
    keys = [key for key in MORE if key in of(next(iter(facts.values())), "local", -1)]
    ends = [one for one in series if one[2] in (-1, last - 1)]
    others = [
        [title, *(_figure(key, [of(one, who, number)[key] for one in facts.values()]) for key in keys)]
        for title, who, number in ends
    ]
    return [
        {
            "title": "On common images",
            "text": text + _said(columns, rows, 2, last),
            "slopes": slopes,
            "table": {"columns": _in_percent(columns, 2), "rows": _percents([*rows, *_sums(rows, 1, 2)], 2)},
            "folded": True,
        },
        {
            "title": "More than accuracy",
            "text": "On the same common images: mean and standard error over the nodes."
            + (" Recall is the share of the second class that is found where 5 % of the first raise a false alarm.")
            * ("recall" in keys),
            "table": {"columns": ["", *(MORE[key] for key in keys)], "rows": others},
        },
    ]


def _in_percent(columns: list[str], first: int) -> list[str]:
    return [*columns[:first], *(f"{column} %" for column in columns[first:])]


def _percents(rows: list[list[Any]], first: int) -> list[list[Any]]:
    """Shares from the column ``first`` on as per cent; the line of p stays as it is."""
    return [
        [*row[:first], *(value if row[0] == "p" or value is None else f"{100 * value:.1f}" for value in row[first:])]
        for row in rows
    ]


def _slopes(variant: str, pairs: dict[str, list[float]]) -> dict[str, Any]:
    student, teacher = PRINTED.get(variant, (variant, ""))
    answer = teacher if teacher and variant in VARIANTS and VARIANTS[variant].teacher else student
    return {"left": "local", "right": answer, "pairs": pairs}


def _sums(rows: list[list[Any]], first: int, local: int) -> list[list[Any]]:
    """The mean of each column; with several nodes its standard error too, and how it compares with the local models at
    the same nodes."""
    columns = [[row[i] for row in rows] for i in range(first, len(rows[0]))]
    blank = [""] * (first - 1)
    means = [["mean", *blank, *(mean_error(column)[0] for column in columns)]]
    if len(rows) < 2:
        return means
    none = [*blank, *[None] * (local - first)]
    gaps = [Paired.of(column, columns[local - first]) for column in columns[local - first + 1 :]]
    errors = [mean_error(column)[1] for column in columns[local - first :]]
    return [
        *means,
        ["±", *none, *(_round(error) for error in errors)],
        ["over local", *none, None, *(_round(gap.mean) for gap in gaps)],
        ["±", *none, None, *(_round(gap.error) for gap in gaps)],
        ["p", *none, None, *(None if gap.p is None else max(1e-4, round(gap.p, 4)) for gap in gaps)],  # never 0
    ]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _said(columns: list[str], rows: list[list[Any]], local: int, last: int) -> str:
    """The means after the last round in words, and how they compare with the local models at the same nodes."""
    alone, said = [row[local] for row in rows], []
    for place in range(local + last, len(columns), last):
        gap = Paired.of([row[place] for row in rows], alone)
        moved = f"{gap.up} up, {gap.down} down" + (f", p {p_said(gap.p)}" if len(rows) > 1 else "")
        said.append(
            f"{columns[place]} {_with_error([row[place] for row in rows])} ({100 * gap.mean:+.1f} points; {moved})"
        )
    return f"Mean over {len(rows)} nodes: local {_with_error(alone)}, {', '.join(said)}."


def _with_error(values: Sequence[float]) -> str:
    mean, error = mean_error(values)
    return f"{100 * mean:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "") + " %"


def _figure(key: str, values: Sequence[float]) -> str:
    """Shares in per cent; a log-loss is none."""
    mean, error = mean_error(values)
    return (
        f"{mean:.3f}" + (f" ± {error:.3f}" if error is not None else "") if key == "log_loss" else _with_error(values)
    )


def learning(facts: NodeFacts) -> dict[str, Any] | None:
    """FOL's Figure 1: what distillation did to the loss, epoch by epoch, in every node's last round."""
    last = {name: one["rounds"][-1].get("distill_history") for name, one in facts.items() if one["rounds"]}
    panels = []
    for title, key in (("loss on training images", "loss"), ("loss on validation images", "val_loss")):
        lines = {
            name: [(row["epoch"], row[key]) for row in history if row[key] is not None]
            for name, history in last.items()
            if history
        }
        if any(lines.values()):
            panels.append(Panel(title, lines))
    text = (
        "What the students' distillation minimises, in each node's last round. Kept is the state of the least loss on"
        " validation images."
    )
    return {"title": "How the students learned", "text": text, "panels": panels} if panels else None


def sizes(facts: NodeFacts) -> dict[str, Any] | None:
    """Accuracy against size, where ``orient.curve`` asked for it."""
    lines = {}
    for name, one in facts.items():
        rows = one["rounds"][0].get("curve") if one["rounds"] else None
        if rows:
            lines[name] = sorted((100 * row["share"], 100 * row["accuracy"]) for row in rows)
    text = (
        "Neighbours pruned to a share of their parameters and tuned again: means over them, on the node's validation"
        " images, in the first round."
    )
    panel = Panel("accuracy, %", lines, from_zero=False, across="% of the parameters")
    return {"title": "Accuracy against size", "text": text, "panels": [panel]} if lines else None


def theorems(facts: NodeFacts) -> dict[str, Any] | None:
    columns = [
        "node",
        "round",
        "risk gap",
        "Theorem 1, printed",
        "Theorem 1, ours",
        "logit gap",
        "bound of it",
        "contraction",
        "largest rate",
    ]
    rows = []
    for name, number, one in _rounds(facts):
        if "theorem_1" in one:
            a, b = one["theorem_1"], one["theorem_2"]
            factor = "says nothing" if b["says_nothing"] else f"{b['factor']:.6f}"
            values = [_short(a[key]) for key in ("risk_gap", "printed", "ours", "logit_gap", "logit_bound")]
            rows.append([name, number, *values, factor, f"{b['largest_rate']:.3g}"])
    text = (
        "Diagnostics beside what was measured on the training images; they decide nothing. Theorem 1 bounds the gap"
        " between the risks of student and teacher, as printed and in the tighter form. Theorem 2 contracts only for"
        " learning rates under the last column; its convexity is the anchor's own."
    )
    return (
        {"title": "What the theorems say", "text": text, "table": {"columns": columns, "rows": rows}, "names": 2}
        if rows
        else None
    )


def pruning(facts: NodeFacts) -> dict[str, Any] | None:
    columns = [
        "node",
        "round",
        "neighbours",
        "made smaller",
        "parameters before",
        "parameters after",
        "MFLOPs before",
        "MFLOPs after",
        "ms before",
        "ms after",
    ]
    rows = []
    for name, number, one in _rounds(facts):
        seen = [c for c in one["candidates"] if "parameters_after" in c and c["sender"] != "self"]
        smaller = [c for c in seen if c["parameters_after"] < c["parameters_before"]]
        if seen:
            sizes = [round(_mean([c[k] for c in seen])) for k in ("parameters_before", "parameters_after")]
            work = [round(_mean([c[k] for c in seen]) / 1e6, 3) for k in ("flops_before", "flops_after")]
            timed = [c for c in smaller if "latency_ms_after" in c]
            times = [
                round(_mean([c[k] for c in timed]), 3) if timed else None
                for k in ("latency_ms_before", "latency_ms_after")
            ]
            rows.append([name, number, len(seen), len(smaller), *sizes, *work, *times])
    text = (
        "Means over a node's neighbours; latency is of those that became smaller, on a batch of up to 64 images,"
        " measured in the run."
    )
    table = {"columns": columns, "rows": rows}
    return {"title": "Pruning", "text": text, "table": table, "names": 2} if rows else None


def meetings(facts: NodeFacts) -> dict[str, Any]:
    rows = []
    for name, number, one in _rounds(facts):
        chosen = ", ".join(
            f"{c['sender']} ({c['weight']:.2f})" if c["weight"] is not None else c["sender"]
            for c in one["candidates"]
            if c["chosen"]
        )
        rows.append([name, number, len(neighbours(one["candidates"], one)), chosen, "; ".join(one["log"])])
    text = "Who was in the ensemble, with its weight, and what was refused or left out and why."
    return {
        "title": "Meetings",
        "text": text,
        "table": {"columns": ["node", "round", "neighbours", "chosen", "notes"], "rows": rows},
        "names": 2,
    }


def _rounds(facts: NodeFacts) -> list[tuple[str, int, dict[str, Any]]]:
    return [(name, one["round"], one) for name, node in facts.items() for one in node["rounds"]]


def _short(value: float | None) -> str:
    return page.NONE if value is None else f"{value:.4g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def line_chart(key: str, label: str, panels: object) -> str:
    """The chart of a section's ``panels``; empty where it has none."""
    found = [panel for panel in panels if isinstance(panel, Panel)] if isinstance(panels, list) else []
    return figures.curves.both(_identifier(key), label, found, 170) if found else ""


def slope_chart(key: str, label: str, slopes: object) -> str:
    """The chart of a section's ``slopes``, ``{"left", "right", "pairs": {node: [before, after]}}`` with accuracies in
    0..1; empty where it is not one."""
    if not isinstance(slopes, Mapping) or not isinstance(slopes.get("pairs"), Mapping):
        return ""
    pairs = {
        clean(name, 20): (float(p[0]) * 100, float(p[1]) * 100) for name, p in slopes["pairs"].items() if _is_pair(p)
    }
    return (
        slopes_figure.both(
            _identifier(key), label, pairs, (clean(slopes.get("left", ""), 20), clean(slopes.get("right", ""), 20))
        )
        if pairs
        else ""
    )


def _identifier(key: str) -> str:
    """It becomes part of ids."""
    return "".join(c if c.isalnum() else "-" for c in key)


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(isinstance(v, int | float) and math.isfinite(v) for v in value)
    )


@Drawing
def slopes_figure(pairs: Mapping[str, tuple[float, float]], ends: tuple[str, str]) -> Figure:
    """A line a node, accented where it rose and in the warning colour where it fell; a bold one for the mean. Few nodes
    are named."""
    figure = canvas(380)
    left, right = (110, 210) if wide() > NARROW else (46, 104)
    axes = place_axes(figure, left, 12, wide() - left - right, 320)
    for before, after in pairs.values():
        axes.plot(
            (0, 1),
            (before, after),
            color=ACCENT if after >= before else WORSE,
            alpha=0.8 if len(pairs) <= FEW else 0.4,
            marker="o",
            markersize=3,
        )
    low = max(0, min(min(pair) for pair in pairs.values()) - 4)
    high = min(100, max(max(pair) for pair in pairs.values()) + 2) + 1
    if len(pairs) <= FEW:
        ends_at = {name: 320 * (after - low) / (high - low) for name, (_, after) in pairs.items()}
        for name, shift in _apart(ends_at, 12).items():
            text, after = f"{name} {pairs[name][1]:.1f}", pairs[name][1]
            axes.annotate(text, (1, after), (10, shift), "data", "offset points", va="center", fontsize=11)
    first, last = (sum(pair[i] for pair in pairs.values()) / len(pairs) for i in (0, 1))
    axes.plot((0, 1), (first, last), color=INK, linewidth=3)
    for place, value, shift, side in (
        (0, first, 8, "left"),  # inside: beside the axis it would lie on its numbers
        (1, last, 10 if len(pairs) > FEW else -10, "left" if len(pairs) > FEW else "right"),
    ):
        axes.annotate(f"mean {value:.1f}", (place, value), (shift, 9), "data", "offset points", ha=side, weight="bold")
    axes.set(xlim=(-0.02, 1.02), ylim=(low, high))
    axes.set_xticks((0, 1), ends, color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.grid(axis="y")
    return figure


def _apart(places: Mapping[str, float], gap: float) -> dict[str, float]:
    """How far labels at these heights must move to stand ``gap`` apart, in their order: those that clash are pushed
    apart to both sides, around their common middle."""
    groups: list[list[str]] = []

    def middle(group: list[str]) -> float:
        return sum(places[name] for name in group) / len(group)

    for name in sorted(places, key=lambda name: places[name]):
        groups.append([name])
        while len(groups) > 1:
            upper, lower = groups[-1], groups[-2]
            if middle(upper) - middle(lower) >= gap * (len(upper) + len(lower)) / 2:
                break
            groups[-2:] = [lower + upper]
    return {
        name: middle(group) + gap * (i - (len(group) - 1) / 2) - places[name]
        for group in groups
        for i, name in enumerate(group)
    }
