"""One teacher, many students: what a node's student keeps of its teacher, by what it learns from.

    python benchmarks/students.py --out students.jsonl                                   # digits, on a CPU
    python benchmarks/students.py --data hurricane/ --device cuda --out students.jsonl   # ResNet-18, 70 nodes, H200

Every node is pretrained once and its neighbours are adapted once (``fol-plus``, one round); then each way of distilling
starts from the same own model and hears the same teacher. Judged on the common images, weighted as the node's classes.
One line per node and way; the table has the mean over nodes of (student - local), and of (student - ``plus``) paired.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from flyby import api
from flyby.fusion.predictor import Predictor, Single
from flyby.meeting import pipeline
from flyby.parcels.parcel import Parcel
from flyby.runs.folder import Run
from flyby.runs.pipeline import Options
from flyby.runs.population import Node, Population

CLOSER: dict[str, Any] = {"crop": "resized", "scale": (0.5, 1.0), "flip": 0.5}
ALL_WAYS: dict[str, Any] = {**CLOSER, "vertical": 0.5, "turns": True}
WAYS: dict[str, dict[str, Any]] = {
    "as FOL prints it": {"pool": 0, "temperature_squared": False, "label_loss": 0.0},
    "plus": {"pool": 4, "pool_views": {"crop": "pad", "flip": 0.5}},
    "16 shifts": {"pool": 16, "pool_views": {"crop": "pad", "flip": 0.5}},
    "16 turns": {"pool": 16, "pool_views": {"flip": 0.5, "vertical": 0.5, "turns": True}},
    "16 closer": {"pool": 16, "pool_views": CLOSER},
    "16 closer and turned": {"pool": 16, "pool_views": ALL_WAYS},
    "16 closer, blended": {"pool": 16, "pool_views": CLOSER, "mix": True},
    "16 closer, blended, 2,700 steps": {"pool": 16, "pool_views": CLOSER, "mix": True, "distill_steps": 2700},
    "16 closer and turned, blended": {"pool": 16, "pool_views": ALL_WAYS, "mix": True},
    "16 closer, no labels": {"pool": 16, "pool_views": CLOSER, "label_loss": 0.0},
    "plus without an anchor": {"pool": 4, "pool_views": {"crop": "pad", "flip": 0.5}, "anchor": 0.0},
}
SATELLITES = {"split.min_size": 100, "orient.epochs": 10, "orient.distill_epochs": 20, "orient.distill_steps": 900}
LARGE = {"clients": 70, "model": "resnet18", "epochs": 60}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=12, help="how many are judged, at even quantiles of size")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    tiny = words.data == "digits"
    settings: Row = {"split.min_size": 40, "orient.buffer": 9, "orient.top": 4} if tiny else dict(SATELLITES)
    settings |= {"orient.eval_nodes": f"quantiles:{words.nodes}", "orient.rounds": 1, "orient.diagnostics": False}
    pipeline.STAGES["distill"] = Students(words.out)
    with tempfile.TemporaryDirectory() as folder:
        size: Row = {"clients": 20, "model": "mlp", "epochs": 100} if tiny else dict(LARGE)
        how: Row = {"split": "fol", "alpha": 0.7, "seed": words.seed, "settings": settings, **size}
        options = Options("inline", words.device, quiet=True)
        api.run("fol-plus", words.data, out=Path(folder), options=options, **how)
    table([json.loads(line) for line in words.out.read_text().splitlines()])


class Students:
    """In place of the stage that distils: every way, one after another, from the same start."""

    def __init__(self, out: Path) -> None:
        self.out, self.node = out, ""
        self.population: Population | None = None
        before = Population.start

        def start(population: Population, name: str, own: Parcel, run: Run) -> Node:
            self.population, self.node = population, name
            return before(population, name, own, run)

        Population.start = start  # type: ignore[assignment, method-assign]

    def __call__(self, work: pipeline.Work) -> None:
        site, own = work.site, work.own
        assert work.teacher is not None
        self.note(work, "local", Single([own.spec], site.class_names, [own.network()]))
        self.note(work, "teacher", work.teacher)
        for way, changes in WAYS.items():
            settings = type(work.settings).model_validate({**work.settings.model_dump(), **changes})
            trial = replace(work, settings=settings, facts={})
            pipeline.distill_stage(trial)
            assert trial.student is not None
            self.note(work, way, trial.student)
        work.new, work.student = trial.new, trial.student

    def note(self, work: pipeline.Work, who: str, model: Predictor) -> None:
        population = self.population
        assert population is not None
        assert population.common is not None
        found = population.common.figures(model, population.split.counts[self.node], population.device)
        with self.out.open("a") as file:
            file.write(json.dumps({"node": self.node, "images": len(work.site.train), "who": who, **found}) + "\n")


def table(rows: list[Row]) -> None:
    by: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        by[row["who"]][row["node"]] = row
    print(f"{len(by['local'])} nodes\n")
    print("| student | over local | over plus | up / down | log-loss |\n|---|---:|---:|---:|---:|")
    for who, line in by.items():
        over = [100 * (row["accuracy"] - by["local"][node]["accuracy"]) for node, row in line.items()]
        plus = [100 * (row["accuracy"] - by["plus"][node]["accuracy"]) for node, row in line.items()]
        counted = f"{sum(x > 0 for x in plus)} / {sum(x < 0 for x in plus)}"
        loss = statistics.mean(row["log_loss"] for row in line.values())
        print(f"| {who} | {said(over)} | {said(plus)} | {counted} | {loss:.3f} |")


def said(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):+.2f} ± {error:.2f}"


if __name__ == "__main__":
    main()
