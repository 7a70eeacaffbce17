"""FOL's rows as the paper's Table 1 has them: a line a method and round, a column an evaluated node, published figures
in the same cells."""

from __future__ import annotations

from statistics import fmean
from typing import Any

Row = dict[str, Any]
NAMES = {
    "fol": ("FOL", "FOL-A"),
    "fol-n": ("FOL-N", "FOL-AN"),
    "gossip": ("FedAvg", ""),
}  # of a run's student and of its teacher


def node_tables(rows: list[Row], figures: list[Row]) -> list[str]:
    """One table for every variant of the study. Own-test accuracies, with the number of own test images: a node with
    few says little."""
    lines: list[str] = []
    for variant in dict.fromkeys(row.get("variant", "") for row in rows):
        mine = [row for row in rows if row.get("variant", "") == variant]
        nodes = list(mine[0]["by_round"])
        values = _values(mine, nodes)
        seeds = sorted({row["seed"] for row in mine})
        images = [sorted({row["by_round"][node]["images"] for row in mine}) for node in nodes]
        heads = [
            f"{node} ({'/'.join(map(str, n))} images)" if len(n) < 4 else f"{node} ({n[0]}-{n[-1]} images)"
            for node, n in zip(nodes, images, strict=True)
        ]
        lines += [f"### {variant}", ""] if variant else []
        lines += [
            "| method | " + " | ".join(heads) + " | mean | published |",
            "|---|" + "---:|" * (len(nodes) + 1) + "---|",
        ]
        for name, per_node in values.items():
            shown = " | ".join(f"{100 * fmean(v):.2f}" for v in per_node)
            printed = " / ".join(f"{f['value']:.2f}" for f in figures if f["method"] == name)
            lines.append(
                f"| {name} | {shown} | {100 * fmean(v for values in per_node for v in values):.2f} | {printed} |"
            )
        seconds = ", ".join(f"{row['method']} {row['seconds']:.0f} s" for row in mine if row["seed"] == seeds[0])
        lines += [
            "",
            (
                f"Own-test accuracy in %, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}; {seconds}"
                f" ({mine[0]['hardware']})."
            ),
        ]
        lines += (
            [
                (
                    f"Published, for its own nodes {', '.join(dict.fromkeys(str(f['node']) for f in figures))}:"
                    f" {figures[0]['source']}."
                ),
                "",
            ]
            if figures
            else [""]
        )
    return lines[:-1]


def _values(rows: list[Row], nodes: list[str]) -> dict[str, list[list[float]]]:
    """Accuracies by line name: for every node, one a seed."""
    found: dict[str, list[list[float]]] = {}
    seen: set[tuple[int, str]] = set()
    for row in rows:
        for place, node in enumerate(nodes):
            by_round = row["by_round"][node]
            if (row["seed"], node) not in seen:  # every method of a seed starts from the same local models
                seen.add((row["seed"], node))
                found.setdefault("Local", [[] for _ in nodes])[place].append(by_round["local"])
            for name, who in zip(NAMES.get(row["method"], (row["method"], "")), ("student", "teacher"), strict=True):
                for number, value in enumerate(by_round[who] if name else (), 1):
                    found.setdefault(f"{name} (E={number})", [[] for _ in nodes])[place].append(value)
    return found
