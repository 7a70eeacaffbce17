"""Adapting Q neighbours' models, as FOL does it, on made-up data: every way there is, and a hand-written loop beside
them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from flyby.data.site import Part, Site
from flyby.data.views import STANDARD, augment
from flyby.meeting import OrientSettings
from flyby.meeting.stack import Stack
from flyby.meeting.tuning import Problem, tune
from flyby.models import ModelSpec
from flyby.rng import generator
from flyby.training.steps import autocast, precision_of

Adapt = Callable[[Site, ModelSpec, int, int, OrientSettings, torch.device], None]


def made_up(samples: int, size: int, device: torch.device) -> Site:
    rng = generator("benchmark")

    def part(count: int) -> Part:
        images = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=rng)
        return Part(images, torch.randint(2, (count,), generator=rng)).to(device)

    return Site("bench", part(samples), part(32), part(2), ("no", "yes"))


def states_of(spec: ModelSpec, models: int) -> list[dict[str, torch.Tensor]]:
    return [dict(spec.build(generator("neighbour", i)).state_dict()) for i in range(models)]


def plain(
    site: Site, spec: ModelSpec, models: int, epochs: int, settings: OrientSettings, device: torch.device
) -> None:
    """What one would write by hand for one neighbour after another: a module, autograd, torch.optim.SGD."""
    mean, std = spec.statistics(device)
    for state in states_of(spec, models):
        network = spec.build(device=device)
        network.load_state_dict(state)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(
            network.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for epoch in range(epochs):
            network.train()
            rng = generator(epoch, device=device)
            order = torch.randperm(len(site.train), device=device)
            for rows in torch.split(order, settings.batch):
                with autocast(precision_of(settings.precision, spec, device), device, cached=False):
                    loss = F.cross_entropy(
                        network(augment(site.train.images[rows], STANDARD, mean, std, rng)).float(),
                        site.train.labels[rows],
                    )
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            network.eval()
            with torch.no_grad():
                F.cross_entropy(network(spec.prepare(site.val.images)), site.val.labels).item()


def stacked(
    site: Site, spec: ModelSpec, models: int, epochs: int, settings: OrientSettings, device: torch.device
) -> None:
    """flyby's own loop, over all neighbours in one step or, with ``together`` False, one after another."""
    states = states_of(spec, models)
    most = models if settings.together else 1
    for first in range(0, models, most):
        tune(
            Stack.of(spec, states[first : first + most], device, settings.backend),
            Problem(),
            site,
            settings,
            epochs,
            ("bench",),
        )


def seconds_of(work: Callable[[int], None], epochs: int, device: torch.device) -> float:
    """Of ``epochs`` epochs, without what is spent once (allocation, the choice of kernels, graph capture)."""
    work(1)
    times = []
    for count in (1, 1 + epochs):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work(count)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[1] - times[0]
