"""What flyby costs over a bare PyTorch loop that does the same work.

Both loops run in one process, epoch about: after each epoch of ``train_site`` its ``on_epoch`` callback runs the same
epoch bare. The ratio is the median over epochs of flyby's seconds (everything between two callbacks: batches, loss,
step, accuracy, schedule, history, the kept state) over the bare loop's (batches, loss, step). That the work is the same
is not claimed but checked: the two end with the same weights, bit for bit. One thread, as a site gets it. Also timed:
``flyby --help`` and, with ``--cifar FOLDER``, loading and splitting a cached CIFAR-10. Exits with 1 if a limit is
broken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyby.data.site import Part, Site, part_of, site_of
from flyby.data.sources import load
from flyby.data.splits import SplitSettings, make_split
from flyby.data.views import PLAIN
from flyby.models import ModelSpec
from flyby.objectives import OBJECTIVES
from flyby.rng import generator
from flyby.training.loop import train_site
from flyby.training.recipe import Recipe
from flyby.training.settings import TrainSettings

MAX_RATIO = 1.05
MAX_HELP = 1.0
MAX_LOAD = 2.0
SEED = 0


@dataclass(frozen=True)
class Case:
    """One network on one data set; ``rows`` limits the images so that an epoch of a large network is a few steps."""

    model: str
    data: str
    batch: int
    epochs: int
    rows: int | None = None


@dataclass
class BareLoop:
    """The loop a person would write: SGD with momentum on cross-entropy, images normalised, data in memory, no
    bookkeeping."""

    spec: ModelSpec
    site: Site
    settings: TrainSettings
    epoch: int = 0
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.spec.build(generator(SEED, "shared", "init")).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=self.settings.lr, momentum=self.settings.momentum, fused=True)

    def run_epoch(self) -> None:
        started = time.perf_counter()
        self.epoch += 1
        images, labels = self.site.train.images, self.site.train.labels
        batch = self.settings.batch or 64
        mean, std = (t.view(1, -1, 1, 1) for t in self.spec.statistics())
        order = torch.randperm(len(labels), generator=generator(SEED, self.site.id, "order", self.epoch))
        self.model.train()
        for rows in torch.split(order, batch):
            x = (
                images[rows]
                .permute(0, 3, 1, 2)
                .float()
                .div_(255)
                .sub_(mean)
                .div_(std)
                .contiguous(memory_format=torch.channels_last)
            )
            loss = F.cross_entropy(self.model(x), labels[rows])
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)


def measure(case: Case) -> dict[str, Any]:
    """Both loops, interleaved; the first epoch of each warms up and is left out."""
    data = load(case.data).train
    rows = (
        (case.rows or len(data)) // case.batch * case.batch
    )  # whole batches, so that no loop needs a rule for the last one
    whole = part_of(data)
    train = Part(whole.images[:rows].clone(), whole.labels[:rows].clone())
    empty = Part(train.images[:0], train.labels[:0])
    site = Site("site-0", train, empty, empty, data.class_names)
    spec = ModelSpec(name=case.model, classes=data.classes, channels=data.channels, size=data.size)
    settings = TrainSettings(epochs=case.epochs, batch=case.batch, schedule="constant", precision="fp32")
    kind = OBJECTIVES["supervised"]
    bare = BareLoop(spec, site, settings)
    flyby_seconds: list[float] = []
    resumed = time.perf_counter()

    def after_epoch(_row: dict[str, Any]) -> None:
        nonlocal resumed
        flyby_seconds.append(time.perf_counter() - resumed)
        bare.run_epoch()
        resumed = time.perf_counter()

    loss = kind.settings_type()
    recipe = Recipe(spec=spec, objective=kind.name, objective_settings=loss, train=settings, views=PLAIN, seed=SEED)
    trained = train_site(site, recipe, on_epoch=after_epoch)
    ratios = [f / b for f, b in zip(flyby_seconds[1:], bare.seconds[1:], strict=True)]
    steps = rows // case.batch
    return {
        "model": case.model,
        "data": case.data,
        "batch": case.batch,
        "steps_per_epoch": steps,
        "epochs": len(ratios),
        "flyby_ms_per_step": round(1000 * statistics.median(flyby_seconds[1:]) / steps, 3),
        "bare_ms_per_step": round(1000 * statistics.median(bare.seconds[1:]) / steps, 3),
        "ratio": round(statistics.median(ratios), 4),
        "limit": MAX_RATIO,
        "same_weights": same(trained.parcel.weights, bare.model.state_dict()),
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def help_seconds(repetitions: int = 5) -> float:
    """Wall time of ``flyby --help`` in a process of its own."""
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "flyby", "--help"], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def load_seconds(folder: str, repetitions: int = 3) -> float:
    """From a folder whose images were decoded before to five sites with their pixels in memory (a memory map alone
    reads nothing)."""
    load(folder)
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        bundle = load(folder)
        split = make_split(bundle.train, SplitSettings(name="dirichlet", clients=5, alpha=0.1), SEED)
        sites = [site_of(bundle, split, name) for name in split.shares]
        times.append(time.perf_counter() - started)
        assert sum(len(site.train) for site in sites) == len(bundle.train)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cifar", metavar="FOLDER", help="a Parquet folder of CIFAR-10, to time its loading from the cache"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    words = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        measure(Case("cnn-small", "digits", 64, epochs=31)),
        measure(Case("resnet18", "digits-32", 32, epochs=6, rows=128)),
    ]
    timings = {"flyby --help": (help_seconds(), MAX_HELP)}
    if words.cifar:
        timings["load and split CIFAR-10 (cached)"] = (load_seconds(words.cifar), MAX_LOAD)

    print(f"{'':<34}{'flyby':>12}{'bare':>12}{'ratio':>9}{'limit':>8}  same weights")
    for row in cases:
        title = f"{row['model']} on {row['data']}, batch {row['batch']}"
        flyby, bare = f"{row['flyby_ms_per_step']} ms", f"{row['bare_ms_per_step']} ms"
        print(
            f"{title:<34}{flyby:>12}{bare:>12}{row['ratio']:>9.4f}{row['limit']:>8} "
            f" {'yes' if row['same_weights'] else 'NO'}"
        )
    for name, (seconds, limit) in timings.items():
        print(f"{name:<34}{f'{seconds:.3f} s':>12}{'':>21}{f'{limit:g} s':>8}")
    fine = all(r["ratio"] <= MAX_RATIO and r["same_weights"] for r in cases) and all(
        s <= limit for s, limit in timings.values()
    )
    facts = {
        "loops": cases,
        "seconds": {name: {"median": round(s, 4), "limit": limit} for name, (s, limit) in timings.items()},
        "within_limits": fine,
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), one thread",
        "torch": torch.__version__,
    }
    print(json.dumps(facts))
    if words.out:
        words.out.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
