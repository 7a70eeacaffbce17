"""When is it better to average the models of similar clients first, and to ask the groups as experts then?

    python benchmarks/grouped.py runs/study/runs/KEY ... --groups 5,10,20 --device cuda [--out rows.jsonl]

A folder is one of a finished run whose parcels are kept. Clients are grouped by their class mix (average linkage over
the distance of their class shares); in a group weights and BatchNorm buffers are averaged by images, the class rows of
the head by the images of their class, and counts are added. Whatever was measured at one site alone (calibration,
moments) says nothing of an averaged network, so the groups are asked under rules that need none of it, and the
ungrouped uploads stand beside them under the same rules.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import AgglomerativeClustering

import flyby
from flyby.data.splits import Split
from flyby.fusion.base import Server
from flyby.fusion.weights.average import FedAvg
from flyby.parcels import parcel
from flyby.parcels.inbox import Inbox, unshifted
from flyby.parcels.parcel import Facts, Parcel
from flyby.runs.config import RunConfig, data_of
from flyby.runs.folder import Run
from flyby.settings import build

RULES = ("experts", "experts-softmax", "iffi", "ensemble")
ROWS = "head.prototypes"


def grouped(counts: torch.Tensor, groups: int) -> list[list[int]]:
    """Places of the clients in every group."""
    if groups >= len(counts):
        return [[place] for place in range(len(counts))]
    shares = (counts / counts.sum(1, keepdim=True)).numpy()
    labels = AgglomerativeClustering(groups, linkage="average").fit_predict(shares)
    return [list(np.flatnonzero(labels == group)) for group in range(groups)]


def averaged(items: Sequence[Parcel], name: str) -> Parcel:
    """One upload that speaks for all of them."""
    inbox = Inbox(items)
    counts = inbox.counts
    (network,) = FedAvg(FedAvg.settings_type()).fuse(inbox, Server(None, 0, torch.device("cpu"))).networks
    weights = dict(network.state_dict())
    shares = (counts / counts.sum(0).clamp_min(1)).float()
    unheld = counts.sum(0) == 0  # nobody's rows: their plain mean
    shares[:, unheld] = 1 / len(items)
    rows = torch.stack([item.weights[ROWS] for item in inbox])
    weights[ROWS] = (shares[:, :, None] * rows).sum(0)
    first = items[0].manifest
    held = [int(n) for n in counts.sum(0)]
    facts: Facts = {**first.facts, "sender": name, "samples": sum(held), "counts": held, "meta": {}, "codec": "fp32"}
    return parcel.make(weights=weights, **facts)


def judge(folder: Path, sizes: Sequence[int], device: str) -> list[dict[str, object]]:
    run = Run(folder)
    config = build(RunConfig, {k: v for k, v in run.asked().items() if k != "resolved"}, str(run.config))
    test = data_of(config).load().test
    assert test is not None
    items = [unshifted(parcel.read(run.parcel(name))) for name in Split.load(run.split).shares]
    counts = Inbox(items).counts
    rows = []
    for size in (*(s for s in sizes if s < len(items)), len(items)):
        groups = grouped(counts, size)
        found = [
            averaged([items[i] for i in group], f"g{n}") if len(group) > 1 else items[group[0]]
            for n, group in enumerate(groups)
        ]
        for rule in RULES:
            accuracy = flyby.fuse(found, fusion=rule, device=device).evaluate(test).accuracy
            row = {"clients": len(items), "groups": size, "largest": max(map(len, groups)), "fusion": rule}
            row |= {"data": Path(config.data.name).name, "alpha": config.split.alpha, "seed": config.seed}
            rows.append({**row, "accuracy": accuracy, "run": folder.name})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--groups", default="1,5,10,20")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="rows are added to this file as they come")
    words = parser.parse_args()
    for folder in words.runs:
        rows = judge(folder, [int(size) for size in words.groups.split(",")], words.device)
        if words.out is not None:
            with words.out.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
