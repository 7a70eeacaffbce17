"""Whether the fast path learns the same. The same run three ways, seed by seed: a reference (float32, nothing recorded
or compiled; on a card without TF32 too), the defaults of the device, and fully compiled. Compared are the clients' mean
loss after each epoch and the fused model's accuracy.

python benchmarks/exactness.py                                                        # digits, on whatever device there
is python benchmarks/exactness.py --data cifar10/ --model resnet18 --batch 512 --epochs 6   # on a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

WAYS: dict[str, list[str]] = {
    "reference": ["train.precision=fp32", "train.compile=off"],
    "fast": [],
    "compiled": ["train.compile=full"],
}
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}  # the card's libraries then compute float32 in full; it holds for a whole process


def curve(folder: Path) -> list[float]:
    """The mean loss of all clients after each epoch."""
    losses: dict[int, list[float]] = defaultdict(list)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        losses[row["epoch"]].append(row["loss"])
    return [statistics.mean(losses[epoch]) for epoch in sorted(losses)]


def runs(asked: argparse.Namespace, way: str) -> None:
    """One line of JSON for every seed."""
    from flyby.runs.config import make_config
    from flyby.runs.pipeline import Options, run

    for seed in range(asked.seeds):
        words = ["locals=false", f"train.batch={asked.batch}", *asked.set, *WAYS[way]]
        config = make_config(
            asked.method,
            seed=seed,
            data={"name": asked.data},
            split={"alpha": asked.alpha, "clients": asked.clients},
            model=asked.model,
            epochs=asked.epochs,
            assignments=words,
        )
        with tempfile.TemporaryDirectory() as folder:
            result = run(config, Path(folder), Options(engine="inline", device=asked.device, quiet=True, keep=False))
            row = {
                "way": way,
                "seed": seed,
                "accuracy": result.accuracy,
                "losses": curve(Path(folder)),
                "training": result.timings["train"],
            }
        print(json.dumps(row | {"hardware": result.hardware}), flush=True)


def compared(rows: list[dict[str, Any]]) -> str:
    """Each way beside the reference: accuracies, their mean difference with its standard error, and how far loss curves
    are apart."""
    found = {(row["way"], row["seed"]): row for row in rows}
    seeds = sorted({seed for _, seed in found})
    lines = [
        (
            "| way | accuracy, seed by seed | mean | minus the reference | largest difference of a loss, of its value |"
            " training |"
        ),
        "|---|---|---:|---:|---:|---:|",
    ]
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [found[way, seed] for seed in seeds]
        base = [found["reference", seed] for seed in seeds]
        apart = [100 * (m["accuracy"] - b["accuracy"]) for m, b in zip(mine, base, strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
        loss = max(
            abs(x - y) / abs(y)
            for m, b in zip(mine, base, strict=True)
            for x, y in zip(m["losses"], b["losses"], strict=True)
        )
        shown = " ".join(f"{100 * m['accuracy']:.2f}" for m in mine)
        versus = "" if way == "reference" else f"{statistics.mean(apart):+.2f} ± {error:.2f}"
        seconds = statistics.median(m["training"] for m in mine)
        lines.append(
            f"| {way} | {shown} | {statistics.mean(100 * m['accuracy'] for m in mine):.2f} | {versus} | {loss:.4f} |"
            f" {seconds:.1f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("data", "digits"),
        ("method", "aurora"),
        ("model", "cnn-small"),
        ("device", "auto"),
        ("ways", ",".join(WAYS)),
    ):
        words.add_argument(f"--{name}", default=default)
    for name, number in (("clients", 5), ("epochs", 10), ("batch", 64), ("seeds", 3)):
        words.add_argument(f"--{name}", type=int, default=number)
    words.add_argument("--alpha", type=float, default=0.5)
    words.add_argument("--set", action="append", default=[], help="as flyby run takes it: model.width=0.5")
    words.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.only:
        runs(asked, asked.only)
        return
    rows = []
    for way in asked.ways.split(","):
        environment = os.environ | (EXACT if way == "reference" else {})
        with subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--only", way], env=environment, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                rows.append(json.loads(line))
                print(line, end="", file=sys.stderr, flush=True)
        if child.returncode:
            raise SystemExit(child.returncode)
    print(
        f"{asked.method}, {asked.data}, {asked.model}, {asked.clients} clients, alpha {asked.alpha}, {asked.epochs}"
        f" epochs, batch {asked.batch}; {rows[0]['hardware']}\n\n{compared(rows)}"
    )


if __name__ == "__main__":
    main()
