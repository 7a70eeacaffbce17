"""What a network costs (floating-point operations of one image, and the time it takes), and what nodes reach together
in every class."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from flyby.models import ModelSpec, Network


@lru_cache(maxsize=256)
def flops(spec: ModelSpec) -> int:
    """Multiplications and additions of one image's forward pass through convolutions and linear layers, counted by
    hooks (nothing is computed)."""
    total = 0

    def count(layer: nn.Module, _: Any, out: Tensor) -> None:
        nonlocal total
        weight = layer.weight
        assert isinstance(weight, Tensor)
        places = out.shape[2] * out.shape[3] if out.ndim == 4 else 1
        total += places * (2 * weight.numel() + (out.shape[1] if layer.bias is not None else 0))

    network = spec.skeleton().eval()
    hooks = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        network(torch.empty(1, spec.channels, *spec.size, device="meta"))
    for hook in hooks:
        hook.remove()
    return total


@torch.no_grad()
def latency_ms(network: Network, images: Tensor, repeats: int = 5) -> float:
    """Median milliseconds of a forward pass over a batch, measured here and now."""
    network.eval()
    x = network.spec.prepare(images)
    times = []
    for _ in range(repeats + 1):
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        start = time.perf_counter()
        network(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1000


def per_class(facts: Mapping[str, Mapping[str, Any]], class_names: Sequence[str]) -> dict[str, float | None]:
    """Accuracy by class over the own test images of all evaluated nodes together: a node's ``right`` among its
    ``seen``."""
    right, seen = (
        [sum(column) for column in zip(*(f[key] for f in facts.values()), strict=True)] for key in ("right", "seen")
    )
    return {name: r / n if n else None for name, r, n in zip(class_names, right, seen, strict=True)}
