"""FOL in the report: node by node, theorems, pruning and meetings as sections of plain text, tables and numbers, and
the slope chart of them all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyby.drawing import ACCENT, INK, PALETTE, WIDTH, Drawing, canvas, clean, place_axes
from flyby.errors import BadInput
from flyby.meeting.settings import VARIANTS
from flyby.report import page
from flyby.report.read import RunData
from flyby.runs.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NodeFacts = Mapping[str, dict[str, Any]]
LABELS = {"fol": "FOL", "fol-a": "FOL", "fol-n": "FOL-N", "fol-an": "FOL-N", "gossip": "FedAvg"}
FEW = 12  # nodes that can be named beside their lines
WORSE = PALETTE[1]


def sections_of(run: RunData) -> list[dict[str, Any]]:
    """The sections of a run whose nodes met, from what its folder says of each of them; none of any other run."""
    if not run.nodes:
        return []
    method = str(run.result.get("method"))
    variant = METHODS[method].orient if method in METHODS else None
    try:
        return sections(run.nodes, variant or method, int(run.result["rounds"]))
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise BadInput(
            f"nodes/ of the run {run.name} does not hold what was measured at its nodes ({type(error).__name__}:"
            f" {error}); take the folder away, or run it again"
        ) from None


def sections(facts: NodeFacts, variant: str, rounds: int) -> list[dict[str, Any]]:
    """The first section holds every node's numbers, as a slope chart too."""
    found = (nodes(facts, variant, rounds), theorems(facts), pruning(facts), meetings(facts))
    return [section for section in found if section]


def nodes(facts: NodeFacts, variant: str, last: int) -> dict[str, Any]:
    student = LABELS.get(variant, variant)
    teacher = student.replace("FOL", "FOL-A").replace("FOL-A-N", "FOL-AN")
    both = student.startswith("FOL")
    rounds = range(1, last + 1)
    columns = ["node", "model", "train", "val", "test", "local", *(f"{student} E={e}" for e in rounds)]
    columns += [f"{teacher} E={e}" for e in rounds] if both else []
    rows: list[list[Any]] = []
    for name, one in facts.items():
        row = [
            name,
            one["model"],
            one["train"],
            one["val"],
            one["test"],
            one["local"],
            *(r["student"] for r in one["rounds"]),
        ]
        rows.append(row + ([r["teacher"] for r in one["rounds"]] if both else []))
    means = ["mean", "", *(_mean([row[i] for row in rows]) for i in range(2, len(columns)))]
    answer = teacher if variant in VARIANTS and VARIANTS[variant].teacher else student
    text = (
        "Own-test accuracy of each evaluated node: its pretrained model, then after every round. Mean: local"
        f" {means[5]:.4f}"
    )
    text += "".join(f", {columns[i]} {means[i]:.4f}" for i in range(6, len(columns))) + "."
    slopes = {
        "left": "local",
        "right": answer,
        "pairs": {name: [one["local"], one["answer"]] for name, one in facts.items()},
    }
    return {
        "title": "Node by node",
        "text": text,
        "slopes": slopes,
        "table": {"columns": columns, "rows": [*rows, means]},
    }


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
        {"title": "What the theorems say", "text": text, "table": {"columns": columns, "rows": rows}} if rows else None
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
    return {"title": "Pruning", "text": text, "table": {"columns": columns, "rows": rows}} if rows else None


def meetings(facts: NodeFacts) -> dict[str, Any]:
    rows = []
    for name, number, one in _rounds(facts):
        chosen = ", ".join(
            f"{c['sender']} ({c['weight']:.2f})" if c["weight"] is not None else c["sender"]
            for c in one["candidates"]
            if c["chosen"]
        )
        rows.append(
            [name, number, sum(c["sender"] != "self" for c in one["candidates"]), chosen, "; ".join(one["log"])]
        )
    text = "Who was in the ensemble, with its weight, and what was refused or left out and why."
    return {
        "title": "Meetings",
        "text": text,
        "table": {"columns": ["node", "round", "neighbours", "chosen", "notes"], "rows": rows},
    }


def _rounds(facts: NodeFacts) -> list[tuple[str, int, dict[str, Any]]]:
    return [(name, one["round"], one) for name, node in facts.items() for one in node["rounds"]]


def _short(value: float | None) -> str:
    return page.NONE if value is None else f"{value:.4g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def slope_chart(key: str, label: str, slopes: object) -> str:
    """The chart of a section's ``slopes``, ``{"left", "right", "pairs": {node: [before, after]}}`` with accuracies in
    0..1; empty where it is not one."""
    if not isinstance(slopes, Mapping) or not isinstance(slopes.get("pairs"), Mapping):
        return ""
    pairs = {
        clean(name, 20): (float(p[0]) * 100, float(p[1]) * 100) for name, p in slopes["pairs"].items() if _is_pair(p)
    }
    key = "".join(c if c.isalnum() else "-" for c in key)  # it becomes part of ids
    return (
        slopes_figure(key, label, pairs, (clean(slopes.get("left", ""), 20), clean(slopes.get("right", ""), 20)))
        if pairs
        else ""
    )


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
    axes = place_axes(figure, 110, 12, WIDTH - 320, 320)
    for name, (before, after) in pairs.items():
        axes.plot(
            (0, 1),
            (before, after),
            color=ACCENT if after >= before else WORSE,
            alpha=0.8 if len(pairs) <= FEW else 0.4,
            marker="o",
            markersize=3,
        )
        if len(pairs) <= FEW:
            axes.annotate(f"{name} {after:.1f}", (1, after), (10, 0), "data", "offset points", va="center", fontsize=11)
    first, last = (sum(pair[i] for pair in pairs.values()) / len(pairs) for i in (0, 1))
    axes.plot((0, 1), (first, last), color=INK, linewidth=3)
    for place, value, shift, side in (
        (0, first, -10, "right"),
        (1, last, 10 if len(pairs) > FEW else -10, "left" if len(pairs) > FEW else "right"),
    ):
        axes.annotate(f"mean {value:.1f}", (place, value), (shift, 9), "data", "offset points", ha=side, weight="bold")
    low = min(min(pair) for pair in pairs.values())
    axes.set(xlim=(-0.02, 1.02), ylim=(max(0, low - 4), min(100, max(max(pair) for pair in pairs.values()) + 2) + 1))
    axes.set_xticks((0, 1), ends, color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.grid(axis="y")
    return figure
