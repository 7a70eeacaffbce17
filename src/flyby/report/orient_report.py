"""What a FOL run tells the report, as sections of plain text, tables and numbers: node by node, theorems, pruning,
meetings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flyby.orient.pipeline import TEACHERS
from flyby.orient.settings import FleetSettings

Facts = Mapping[str, dict[str, Any]]
LABELS = {"fol": "FOL", "fol-a": "FOL", "fol-n": "FOL-N", "fol-an": "FOL-N", "gossip": "FedAvg", "local": "local"}


def sections(facts: Facts, variant: str, settings: FleetSettings) -> list[dict[str, Any]]:
    """All sections of ``extra.json``; the first holds every node's numbers, as a slope chart too."""
    return [
        section
        for section in (nodes(facts, variant, settings), theorems(facts), pruning(facts), meetings(facts))
        if section
    ]


def nodes(facts: Facts, variant: str, settings: FleetSettings) -> dict[str, Any]:
    student = LABELS.get(variant, variant)
    teacher = student.replace("FOL", "FOL-A").replace("FOL-A-N", "FOL-AN")
    both = student.startswith("FOL")
    rounds = range(1, settings.rounds + 1)
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
    answer = teacher if variant in TEACHERS else student
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


def theorems(facts: Facts) -> dict[str, Any] | None:
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
            values = [f"{a[key]:.4g}" for key in ("risk_gap", "printed", "ours", "logit_gap", "logit_bound")]
            rows.append([name, number, *values, factor, f"{b['largest_rate']:.3g}"])
    text = (
        "Diagnostics beside what was measured on the training images; they decide nothing. Theorem 1 bounds the gap"
        " between the risks of student and teacher, as printed and in the tighter form. Theorem 2 contracts only for"
        " learning rates under the last column; its convexity is the anchor's own."
    )
    return (
        {"title": "What the theorems say", "text": text, "table": {"columns": columns, "rows": rows}} if rows else None
    )


def pruning(facts: Facts) -> dict[str, Any] | None:
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


def meetings(facts: Facts) -> dict[str, Any]:
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


def per_class(facts: Facts, class_names: Sequence[str]) -> dict[str, float | None]:
    """Accuracy by class over the own test images of all evaluated nodes together."""
    right = [sum(one["right"][c] for one in facts.values()) for c in range(len(class_names))]
    seen = [sum(one["seen"][c] for one in facts.values()) for c in range(len(class_names))]
    return {name: r / n if n else None for name, r, n in zip(class_names, right, seen, strict=True)}


def _rounds(facts: Facts) -> list[tuple[str, int, dict[str, Any]]]:
    return [(name, one["round"], one) for name, node in facts.items() for one in node["rounds"]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
