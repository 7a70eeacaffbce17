"""What privacy costs closed forms, and what it buys: accuracy of ridge and LDA from noised sums at several epsilons,
and how well an attacker who holds one site's sums tells its images from others (docs/privacy.md). Features come from
the cache, so that only the first run computes them.

python benchmarks/private_sums.py --data cifar10/ --backbone efficientnet-lite2 --clients 5,50 --alpha 0.1,iid
python benchmarks/private_sums.py --data cifar10/ --backbone efficientnet-lite0 --size 96 --train 2000 --test 1000
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyby.data.dataset import Dataset
from flyby.data.site import Part, Site, part_of
from flyby.data.sources import load
from flyby.data.splits import SplitSettings, make_split
from flyby.fusion import Server
from flyby.fusion.closed.base import ClosedForm, Contributions, without
from flyby.models import Network
from flyby.models.features import features_of
from flyby.parcels import parcel
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.runs.config import make_config, plan
from flyby.runs.server import rule_named
from flyby.statistics.feature_sums import NAME, blurred, feature_sums, noised_sums, widened
from flyby.study.audit import Told, judged
from flyby.training.privacy import draws


def first(data: Dataset, count: int | None) -> Dataset:
    rows = np.arange(len(data) if count is None else min(count, len(data)))
    return Dataset(data.images[rows], data.labels[rows], data.class_names, f"{data.digest}-{len(rows)}")


def upload(network: Network, site: Site, epsilon: float, asked: argparse.Namespace) -> Parcel:
    """What a site sends, made as ``flyby train`` makes it; noise is seeded, so that the table can be made again."""
    if math.isinf(epsilon):
        made, told = feature_sums(network, site, 0, least=1), dict[str, Any](counts=site.counts)
    else:
        draw = draws(generator(asked.seed, site.id, epsilon))
        made = noised_sums(network, site, {}, (epsilon, asked.delta), asked.norm, draw)
        told = {"counts": blurred(made["counts"]), "counts_kind": "noisy"}
    return parcel.make(
        sender=site.id,
        method="ridge",
        spec=network.spec,
        class_names=site.class_names,
        samples=len(site.train),
        weights={name: value.cpu() for name, value in network.state_dict().items()},
        extras={f"{NAME}.{part}": value.cpu() for part, value in made.items()},
        **told,
    )


def scores(rule: str, items: list[Parcel], features: Tensor, device: str) -> Tensor:
    made = rule_named(rule)
    assert isinstance(made, ClosedForm)
    sums = Contributions(Inbox(items), rule, device)
    head = without(made.solve(sums, Server(device=torch.device(device))), sums.total.counts)
    return widened(features.to(device), sums.choice) @ head.weight.T + head.bias


def attacked(
    item: Parcel, members: Part, others: Part, seen: dict[str, Tensor], asked: argparse.Namespace
) -> dict[str, Any]:
    """AUC of the two attacks on one site's sums; others are weighed to have the members' classes."""
    classes = item.manifest.spec.classes
    held = [np.bincount(part.labels.numpy(), minlength=classes) for part in (members, others)]
    kept = [torch.from_numpy((held[0] > 0) & (held[1] > 0))[part.labels] for part in (members, others)]
    labels = [part.labels[rows] for part, rows in zip((members, others), kept, strict=True)]
    weights = (held[0] / np.maximum(held[1], 1))[labels[1].numpy()].astype(np.float64)
    told, found = Told.by([item]), {}
    pairs = {
        "distance": [
            told.distance(Part(part.images[rows], part.labels[rows]), asked.device)
            for part, rows in zip((members, others), kept, strict=True)
        ],
        "loss": [
            scores("ridge", [item], seen[which][rows], asked.device)
            .log_softmax(1)
            .cpu()[torch.arange(len(own)), own]
            .numpy()
            for which, rows, own in zip(("members", "others"), kept, labels, strict=True)
        ],
    }
    for name, (mine, theirs) in pairs.items():
        found[name] = judged(mine, theirs, weights, asked.seed, 200)
    return found | {"bound": told.bound}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--data", required=True)
    words.add_argument("--backbone", default="efficientnet-lite0")
    words.add_argument("--size", type=int, help="pixels a side that the backbone is given")
    words.add_argument("--epsilons", default="1,3,8,inf")
    words.add_argument("--delta", type=float, default=1e-5)
    words.add_argument("--norm", type=float, help="largest norm of features; by default twice that of noise")
    words.add_argument("--clients", default="5")
    words.add_argument("--alpha", default="iid", help="of the Dirichlet split; iid for even shares")
    words.add_argument("--train", type=int, help="only so many training images")
    words.add_argument("--test", type=int, help="only so many test images")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words.add_argument("--json", action="store_true", help="one line of JSON per row in place of the table")
    asked = words.parse_args()

    bundle = load(asked.data)
    assert bundle.test is not None, "the data needs test images"
    data, test = first(bundle.train, asked.train), part_of(first(bundle.test, asked.test))
    sizes = [f"model.backbone_size={asked.size}"] if asked.size else []
    config = make_config("ridge", data={"name": asked.data}, assignments=[f"model.backbone={asked.backbone}", *sizes])
    network = plan(config, bundle).recipe.spec.build(generator("eyes")).to(asked.device).eval()
    began = time.perf_counter()
    unseen = features_of(network, test.images, "test images").cpu()
    features_of(network, part_of(data).images, "training images")
    print(f"features: {len(data):,} + {len(test):,} images in {time.perf_counter() - began:.1f} s", flush=True)
    if not asked.json:
        print("| sites | alpha | epsilon | ridge | lda | site | AUC distance | AUC loss | bound | seconds |")
        print("|---|---|---|---|---|---|---|---|---|---|")
    for count in map(int, asked.clients.split(",")):
        for alpha in asked.alpha.split(","):
            how: dict[str, Any] = {"name": "iid"} if alpha == "iid" else {"alpha": float(alpha)}
            split = make_split(data, SplitSettings(clients=count, **how), asked.seed)
            parts = {name: part_of(data, share.train) for name, share in split.shares.items()}
            none = part_of(data, [])
            sites = [Site(name, part, none, none, data.class_names) for name, part in parts.items()]
            usual = sorted(sites, key=lambda site: len(site.train))[len(sites) // 2]
            seen = {"members": features_of(network, usual.train.images).cpu(), "others": unseen}
            for epsilon in map(float, asked.epsilons.split(",")):
                began = time.perf_counter()
                items = [upload(network, site, epsilon, asked) for site in sites]
                right = {
                    rule: float(
                        (scores(rule, items, unseen, asked.device).argmax(1).cpu() == test.labels).double().mean()
                    )
                    for rule in ("ridge", "lda")
                }
                seconds = time.perf_counter() - began
                found = attacked(items[sites.index(usual)], usual.train, test, seen, asked)
                row = {"sites": count, "alpha": alpha, "epsilon": epsilon, **right, "site": len(usual.train), **found}
                if asked.json:
                    print(json.dumps(row | {"epsilon": str(epsilon), "seconds": seconds}), flush=True)
                    continue
                auc = [
                    f"{found[n]['auc']:.3f} ({found[n]['low']:.3f}-{found[n]['high']:.3f})"
                    for n in ("distance", "loss")
                ]
                bound = "-" if found["bound"] is None else f"{found['bound']:.3f}"
                print(
                    f"| {count} | {alpha} | {epsilon:g} | {right['ridge']:.2%} | {right['lda']:.2%}"
                    f" | {len(usual.train)} | {auc[0]} | {auc[1]} | {bound} | {seconds:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
