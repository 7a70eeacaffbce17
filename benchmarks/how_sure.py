"""How sure a server rule may be of its answers: what it says with its usual temperature, with the one that its sites
measure on their own held-out images, and with the best there is, on images of all sites.

    python benchmarks/how_sure.py runs/study/runs/KEY ... --rules experts-calibrated,best --out rows.jsonl
    python benchmarks/how_sure.py ... --images test --pulls 1

Every finished run is fused again by every rule, from the parcels that it kept (with ``split.val``, so that sites hold
images out); each site measures with its own parcel alone, as ``flyby train`` does. ``--pulls`` are strengths with which
what is usual holds a site's measurement back (``statistics/temperature.py``); choose on held-out images.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from flyby.data.splits import Split
from flyby.errors import BadInput
from flyby.fusion import FUSIONS
from flyby.fusion.evaluation import scores_of
from flyby.fusion.quality import quality_of
from flyby.parcels.inbox import Inbox
from flyby.runs.config import RunConfig, data_of
from flyby.runs.folder import Run
from flyby.runs.server import held_out
from flyby.settings import build
from flyby.statistics import temperature

Told = tuple[int, Tensor, Tensor]  # a site's images, and what its own upload says of those it held out


def measured(sites: list[Told], usual: float, pull: float) -> float | None:
    """What the server makes of the sites' temperatures."""
    temperature.PULL = pull
    found = [(n, temperature.temperature_of(scores.softmax(1), labels, usual)) for n, scores, labels in sites]
    return temperature.weighted([(value, n) for n, value in found if value is not None])


def best_of(scores: Tensor, labels: Tensor) -> float | None:
    temperature.PULL = 0.0
    return temperature.temperature_of(scores.softmax(1), labels)


def rows_of(folder: Path, rules: list[str], part: str, pulls: list[float], device: str) -> Iterator[dict[str, Any]]:
    run = Run(folder)
    config = build(RunConfig, {k: v for k, v in run.asked().items() if k != "resolved"}, str(run.config))
    bundle, split = data_of(config).load(), Split.load(run.split)
    judges = bundle.test if part == "test" else held_out(bundle, split)
    assert judges is not None
    (images, labels), (own, truth) = judges.tensors(), bundle.train.tensors()
    asked = config.model.model_dump(exclude_unset=True) | {k: v for k, v in config.objective.items() if k == "preset"}
    about = {"data": Path(config.data.name).stem, "method": config.method, "asked": asked, "alpha": config.split.alpha}
    about |= {"seed": config.seed, "images": part, "judged": len(labels)}
    for name in rules:
        try:
            made = FUSIONS[name]().fuse(Inbox([run.parcel(site) for site in split.shares]))
        except BadInput:  # not every rule takes every upload
            continue
        scores, sites = scores_of(made, images, device).double(), list[Told]()
        for site, share in split.shares.items():
            rows = torch.as_tensor(share.val)
            alone = FUSIONS[name]().fuse(Inbox([run.parcel(site)]))
            sites.append((len(share.train), scores_of(alone, own[rows], device).double(), truth[rows]))
        ways = {"usual": made.temperature, "best": best_of(scores, labels)}
        ways |= {f"sites, pull {pull:g}": measured(sites, made.temperature, pull) for pull in pulls}
        for way, value in ways.items():
            chosen = made.temperature if value is None else value  # where no site can measure, it stays as it is
            found = quality_of((scores / chosen).softmax(1), labels, made.class_names)
            figures = {"log_loss": found.log_loss, "calibration_error": found.calibration_error}
            yield {"rule": name, "way": way, "temperature": chosen, **about, "accuracy": found.accuracy, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--rules", default="experts-calibrated,best")
    parser.add_argument("--images", choices=("held-out", "test"), default="held-out")
    parser.add_argument("--pulls", default="0.3,1,3,10")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a file for all figures, a row per run, rule and way")
    words = parser.parse_args()
    rules, pulls = words.rules.split(","), [float(one) for one in words.pulls.split(",")]
    rows = [row for run in words.runs for row in rows_of(run, rules, words.images, pulls, words.device)]
    if words.out is not None:
        words.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rule in rules:
        for way in dict.fromkeys(row["way"] for row in rows):
            mine = [row for row in rows if (row["rule"], row["way"]) == (rule, way)]
            means = ", ".join(
                f"{key} {fmean(row[key] for row in mine):.3f}" for key in ("calibration_error", "log_loss")
            )
            print(f"{rule:20s} {way:16s} {means} ({len(mine)} runs)")


if __name__ == "__main__":
    main()
