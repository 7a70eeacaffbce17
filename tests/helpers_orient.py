"""Small nodes and parcels for the tests of FOL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flyby import parcel
from flyby.data.site import Part, Site
from flyby.data.views import PLAIN
from flyby.models import ModelSpec
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.orient import OrientSettings
from flyby.parcel import Parcel
from flyby.training import TrainSettings, train_site
from helpers_cli import stripes

NAMES = ("rows", "columns", "checks")


def striped_site(name: str, seed: int = 0, count: int = 60, size: int = 8, flip: bool = False) -> Site:
    """A node with three easy classes; ``flip`` gives every image its neighbour class's label."""

    def part(count: int, seed: int) -> Part:
        images, labels = stripes(count, seed, size)
        order = np.random.RandomState(seed).permutation(count)
        wrong = (labels + 1) % 3 if flip else labels
        return Part(torch.from_numpy(images[order]), torch.from_numpy(wrong[order]))

    return Site(name, part(count, 3 * seed), part(18, 3 * seed + 1), part(18, 3 * seed + 2), NAMES)


def small_spec(name: str = "cnn-small", size: int = 8, width: float = 0.25, classes: int = 3, **more: object) -> ModelSpec:
    return ModelSpec(name=name, classes=classes, channels=1, size=(size, size), width=width, **more)  # type: ignore[arg-type]


def trained(site: Site, spec: ModelSpec | None = None, epochs: int = 6, sender: str | None = None, lr: float = 0.05) -> Parcel:
    settings = TrainSettings(epochs=epochs, lr=lr, batch=32, schedule="constant")
    made = train_site(site, spec or small_spec(size=site.size[0]), Supervised(SupervisedSettings(calibrate=False)), settings, PLAIN, 0)
    return made.parcel if sender is None else renamed(made.parcel, sender)


def random_parcel(
    sender: str, spec: ModelSpec | None = None, seed: int = 0, counts: Sequence[int] = (20, 20, 20), names: Sequence[str] = NAMES
) -> Parcel:
    spec = spec or small_spec()
    weights = spec.build(torch.Generator().manual_seed(seed)).state_dict()
    return parcel.make(
        sender=sender, method="supervised", spec=spec, class_names=names, weights=weights, samples=sum(counts), counts=counts
    )


def renamed(item: Parcel, sender: str) -> Parcel:
    m = item.manifest
    return parcel.make(
        sender=sender, method=m.method, spec=m.spec, class_names=m.class_names, weights=item.weights, samples=m.samples, counts=m.counts
    )


def quick(**changes: object) -> OrientSettings:
    """Settings for tests: few epochs, a learning rate that moves."""
    values: dict[str, object] = {"epochs": 3, "lr": 0.02, "batch": 16, "patience": 3, "buffer": 6, "top": 3, "diagnostics": False}
    return OrientSettings(**{**values, **changes})  # type: ignore[arg-type]
