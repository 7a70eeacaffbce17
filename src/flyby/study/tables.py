"""Results as Markdown: mean, standard deviation and n of every cell, with published figures and their caveats beside ours."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from flyby.errors import BadInput
from flyby.files import write_text
from flyby.study.grid import Study, read_rows

Row = dict[str, Any]


def published(path: Path = Path("studies/published.yaml")) -> list[Row]:
    """Figures from papers: each with data, alpha, method, value, source and the caveat that goes with it."""
    import yaml

    if not path.exists():
        return []
    rows = yaml.safe_load(path.read_text())
    if not isinstance(rows, list):
        raise BadInput(f"{path} must hold a list of published figures")
    return rows


def cell_text(values: list[float | None]) -> str:
    """``71.20 ± 3.10 (n=3)`` in per cent; a single run shows no spread, a diverged one says so."""
    good = [100 * v for v in values if v is not None]
    lost = len(values) - len(good)
    if not good:
        return "diverged"
    spread = f" ± {statistics.stdev(good):.2f}" if len(good) > 1 else ""
    return f"{statistics.fmean(good):.2f}{spread} (n={len(good)}{f', {lost} diverged' if lost else ''})"


def render(name: str, study: Study, results: Path, figures: list[Row] | None = None) -> str:
    """One table for every (data, split, clients, epochs): a line a method and rule, a column an alpha, published lines below."""
    rows = read_rows(results / f"{name}.jsonl")
    if not rows:
        raise BadInput(f"{results / (name + '.jsonl')} holds no rows yet; run flyby study {name} first")
    figures = published() if figures is None else figures
    lines = [f"# {study.title}", "", study.note.strip(), ""] if study.note else [f"# {study.title}", ""]
    groups = sorted({(r["data"], r["split"], r.get("clients", 0), r.get("epochs", 0), r.get("model", "")) for r in rows})
    for data, split, clients, epochs, model in groups:
        mine = [
            r
            for r in rows
            if (r["data"], r["split"], r.get("clients", 0), r.get("epochs", 0), r.get("model", "")) == (data, split, clients, epochs, model)
        ]
        alphas = sorted({r["alpha"] for r in mine})
        seeds = sorted({r["seed"] for r in mine})
        lines += [f"## {data}: {model}, {clients} clients, `{split}` split, {epochs} epochs", ""]
        lines += [
            "| clients' method | server rule | " + " | ".join(f"α = {a:g}" for a in alphas) + " |",
            "|---|---|" + "---:|" * len(alphas),
        ]
        for method, rule in dict.fromkeys((r["method"], r["fusion"]) for r in mine):
            found = [[r["accuracy"] for r in mine if (r["method"], r["fusion"], r["alpha"]) == (method, rule, a)] for a in alphas]
            lines.append(f"| {method} | {rule} | " + " | ".join(cell_text(v) if v else "" for v in found) + " |")
        printed = [f for f in figures if f["data"] == data and f["alpha"] in alphas]
        notes: list[str] = []
        for label in dict.fromkeys((f["method"], f["source"], f.get("caveat", "")) for f in printed):
            values = {f["alpha"]: f["value"] for f in printed if (f["method"], f["source"], f.get("caveat", "")) == label}
            if label[2] not in notes:
                notes.append(label[2])
            mark = notes.index(label[2]) + 1
            lines.append(
                f"| *{label[0]}* | *published: {label[1]} [{mark}]* | "
                + " | ".join(f"*{values[a]:.2f}*" if a in values else "" for a in alphas)
                + " |"
            )
        hardware = ", ".join(sorted({r["hardware"] for r in mine if "hardware" in r}))
        train = [r["timings"]["train"] for r in mine if r.get("trained")]
        lines += ["", f"Test accuracy in %, seeds {', '.join(map(str, seeds))}; one split a seed, all rules on the same uploads."]
        if train:
            lines.append(f"Training one set of uploads took {min(train):.0f} to {max(train):.0f} s ({hardware}).")
        lines += [f"[{i + 1}] {note}" for i, note in enumerate(notes)] + [""]
    return "\n".join(lines)


def write_table(name: str, study: Study, results: Path) -> Path:
    path = results / f"{name}.md"
    write_text(path, render(name, study, results) + "\n")
    return path
