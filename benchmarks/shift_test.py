"""How soon sites can tell that turns mean something: the test of ``objectives/shifting.py`` on the sites of many
splits, after every moment of its small network's training, and on noise, where the answer must be no.

    python benchmarks/shift_test.py cifar10/ svhn/ --alphas 0.05,0.1 --seeds 10-14 --tries 6 --out rows.jsonl

A row is a site: its images and classes, the share told right after each moment, what is asked for, and the seconds of a
moment on one core. Sites of more than ten classes, which are never asked, are left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flyby.data.site import Part, Site
from flyby.data.sources import load
from flyby.data.splits import SplitSettings, make_split
from flyby.machine import as_a_site
from flyby.models import ModelSpec
from flyby.objectives.shifting import asked_for, told_apart
from flyby.rng import generator


def row_of(site: Site, shift: str, seed: int, tries: int) -> dict[str, Any]:
    spec = ModelSpec(name="cnn-small", classes=len(site.class_names), channels=site.channels, size=site.size)
    began, told = time.perf_counter(), list(told_apart(spec, site, shift, seed, tries))
    seconds = (time.perf_counter() - began) / tries
    held = [name for name, n in zip(site.class_names, site.counts, strict=True) if n]
    found = {"images": len(site.train), "classes": len(held), "judged": told[0][1]}
    return found | {"asked": asked_for(told[0][1]), "told": [right for right, _ in told], "seconds": round(seconds, 2)}


def sites_of(data: str, alpha: float, seed: int, clients: int) -> Iterator[Site]:
    train = load(data).train
    split = make_split(train, SplitSettings(name="dirichlet", clients=clients, alpha=alpha), seed)
    images, labels = train.tensors()
    none = Part(images[:0], labels[:0])
    for name, share in split.shares.items():
        rows = torch.as_tensor(share.train)
        yield Site(name, Part(images[rows], labels[rows]), none, none, train.class_names)


def noisy(site: Site, seed: int) -> Site:
    """The same labels on images of noise."""
    images = torch.randint(0, 256, site.train.images.shape, generator=generator("noise", seed), dtype=torch.uint8)
    return replace(site, train=Part(images, site.train.labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--shift", default="turns")
    parser.add_argument("--alphas", default="0.05,0.1")
    parser.add_argument("--seeds", default="10-14", help="from and to")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--tries", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    first, last = map(int, words.seeds.split("-"))
    with words.out.open("a") as file, as_a_site("cpu"):
        for data in words.data:
            for alpha in map(float, words.alphas.split(",")):
                for seed in range(first, last + 1):
                    for site in sites_of(data, alpha, seed, words.clients):
                        if sum(n > 0 for n in site.counts) > 10:
                            continue
                        about = {"data": Path(data).name, "alpha": alpha, "seed": seed, "site": site.id}
                        for kind, one in (("images", site), ("noise", noisy(site, seed))):
                            row = {**about, "of": kind, **row_of(one, words.shift, seed, words.tries)}
                            file.write(json.dumps(row) + "\n")
                            file.flush()
                            print(row)


if __name__ == "__main__":
    main()
