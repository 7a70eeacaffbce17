"""The figures of docs/findings.md, drawn from the rows in results/: run it again when these rows change.

    python benchmarks/findings_figures.py

writes docs/images/findings-*.svg.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from statistics import fmean

from flyby.files import write_text
from flyby.runs.paired import mean_error
from flyby.study.catalogue import read_study
from flyby.study.charts import Point, bars, charts, on_paper
from flyby.study.grid import read_rows, standing

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "results", ROOT / "docs" / "images"
RECIPES = {  # what is asked for beside float64 sums, in the order of docs/backbones.md
    "plain": set[str](),
    "mirrored": {"model.looks"},
    "mirrored, all layers": {"model.looks", "model.layers", "fusion.even"},
    "mirrored, all layers, 4,000 random": {"model.looks", "model.layers", "fusion.even", "random"},
    "the same, lambda 0.001": {"model.looks", "model.layers", "fusion.even", "random", "fusion.lam"},
}
ROUNDED = {"fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD"}
PAIRS = {  # clients and rule
    "FAFI, IFFI": ("fafi", "iffi:prototypes=uniform"),
    "FAFI, experts-calibrated": ("fafi", "experts-calibrated"),
    "FedSRA, own moments": ("fedsra", "standardised"),
    "FedSRA, unlabelled images": ("fedsra", "standardised:moments=unlabelled"),
    "best": ("best", "best"),
}


def fol() -> dict[str, Point]:
    """Accuracy on common images over the judged nodes, with its standard error; -a: the ensemble answers."""
    rows = {row["method"]: row["by_round"].values() for row in read_rows(RESULTS / "fol-hurricane-place.jsonl")}
    found = {"local": [node["common"]["local"] for node in rows["fol"]]}
    for way, end in (("student", ""), ("teacher", "-a")):
        found |= {f"{m}{end}": [node["common"][way][-1] for node in rows[m]] for m in ("fol", "fol-plus")}
    points = {name: mean_error([100 * value for value in values]) for name, values in found.items()}
    return dict(sorted(points.items(), key=lambda item: item[1][0]))


def recipes() -> dict[str, Point]:
    """Ridge over one backbone; every split must give the same."""
    found: dict[str, set[float]] = {name: set() for name in RECIPES}
    for row in read_rows(RESULTS / "backbones-recipes.jsonl"):
        asked = {word for word in set.union(*RECIPES.values()) if f"{word}=" in row["variant"]}
        found[next(name for name, words in RECIPES.items() if words == asked)].add(100 * row["accuracy"])
    assert all(len(values) == 1 for values in found.values()), "a split made a difference"
    return {name: (fmean(values), None) for name, values in found.items()}


def summit() -> dict[str, Point]:
    """Each pair's mean over the splits that all of them have."""
    rows = [row for name in ("cifar10", "cifar100", "svhn") for row in read_rows(RESULTS / f"summit-{name}.jsonl")]
    found: dict[str, dict[str, float]] = {line: {} for line in PAIRS}
    for line, pair in PAIRS.items():
        for row in rows:
            if (row["method"], row["fusion"]) == pair and not row.get("variant"):
                found[line][row["split_hash"]] = 100 * row["accuracy"]
    common = set.intersection(*(set(one) for one in found.values()))
    assert len(common) >= 6, "a pair lost a split"
    return {line: (fmean(one[split] for split in common), None) for line, one in found.items()}


def meetings() -> dict[str, Point]:
    """Plain clients: one upload under each rule, then many rounds, each with all that was sent both ways."""
    found: dict[str, tuple[int, list[float]]] = {}
    for row in read_rows(RESULTS / "rounds-cifar10-small.jsonl"):
        rounds = row.get("rounds") or 0
        if row["method"] == "fedavg" and rounds != 1:
            sent = (row["bytes_up"] + (row.get("bytes_down") or 0)) / 1e6
            name = re.split("[ ,]", row["fusion"])[0]
            told = f"{rounds} rounds of {ROUNDED[name]}" if rounds else f"one upload, {name}"
            found.setdefault(f"{told}, {sent:.0f} MB", (rounds, []))[1].append(100 * row["accuracy"])
    lines = sorted(found.items(), key=lambda one: one[1][0])
    return {name: mean_error(values) if len(values) > 1 else (values[0], None) for name, (_, values) in lines}


def drawings() -> dict[str, str]:
    """Every figure by its name."""
    made = {}
    (chart,) = charts(standing(read_study("aurora-cifar10")[1], RESULTS / "aurora-cifar10.jsonl"))
    draw, words = chart.drawn()
    made["rules"] = on_paper(draw(chart.stem, chart.spoken, *words))
    for name, title, points in (
        ("fol", "FOL on Hurricane, common images, 12 nodes, with standard errors", fol()),
        ("best", "Mean over six splits of CIFAR-10, CIFAR-100 and SVHN, ResNet-18, 100 epochs", summit()),
        ("rounds", "CIFAR-10, LeNet, five sites, alpha .1, 60 epochs in all, and what is sent both ways", meetings()),
        ("backbones", "Closed form over efficientnet-lite2 on CIFAR-10, any split", recipes()),
    ):
        spoken = f"{title}: " + "; ".join(f"{line} {mean:.1f} %" for line, (mean, _) in points.items())
        made[name] = on_paper(bars(f"findings-{name}", spoken, [*points], [*points.values()], title))
    return made


def main() -> None:
    for name, svg in drawings().items():
        write_text(IMAGES / f"findings-{name}.svg", svg)
    for name, study in (("lambda", "aurora-lambda"), ("learned", "aurora-table3a")):
        shutil.copy(RESULTS / f"{study}.lambda.svg", IMAGES / f"findings-{name}.svg")
    print(json.dumps(sorted(path.name for path in IMAGES.glob("findings-*.svg"))))


if __name__ == "__main__":
    main()
