"""Which fixed features of a frozen backbone suit closed forms best: chosen on held-out training images, judged once.

    python benchmarks/feature_recipes.py --data cifar10/ --backbone efficientnet-lite2 --device cuda --out recipes.jsonl

Everything here is a fixed function of one image, so sums of it add over sites and the fit is the centralised one for
any split: the mean over an image and its mirror, several sizes, pooled maps of earlier stages beside the last
(``layers``), random ReLU features beside those. What is chosen here is asked for by ``--set model.looks=mirrored``,
``model.layers=all``, ``fusion.even=true`` and the statistic's ``random=``.

Ridge by its closed form in float64. A fifth of the training images chooses lambda and is what recipes are compared on;
the test images judge every recipe after a fit on all training images, and choose nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from flyby import api
from flyby.models.lite import DIM, LITE, MEAN, STD, EfficientNetLite, lite_network, lite_weights
from flyby.statistics.feature_sums import random_rows

LAMBDAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # of the mean square feature, per image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--backbone", default="efficientnet-lite2", choices=sorted(LITE))
    parser.add_argument("--sides", default="", help="pixels a side, with commas; default: the backbone's own")
    parser.add_argument("--random", default="0,4000,12000", help="numbers of random features, with commas")
    parser.add_argument("--images", type=int, default=None, help="so many of each part, for a trial")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    bundle = api.load(words.data)
    assert bundle.test is not None
    network = lite_network(words.backbone)
    network.load_state_dict(lite_weights(words.backbone))
    network = network.eval().folded().requires_grad_(False).to(words.device)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sides = [int(s) for s in words.sides.split(",") if s] or [LITE[words.backbone].side]
    parts = [
        (torch.tensor(part.images[: words.images]), torch.tensor(part.labels[: words.images]).to(words.device))
        for part in (bundle.train, bundle.test)
    ]
    looks: dict[tuple[int, bool], list[tuple[Tensor, Tensor]]] = {}
    for side, mirrored in itertools.product(sides, (False, True)):
        started = time.perf_counter()
        looks[side, mirrored] = [seen(network, images, side, mirrored, words.device) for images, _ in parts]
        print(f"{side} pixels{', mirrored' if mirrored else ''}: {time.perf_counter() - started:.1f} s", flush=True)
    labels = [labels for _, labels in parts]
    for sizes, flips, layers, random in itertools.product(
        sorted({(s,) for s in sides} | {tuple(sides)}),
        (False, True),
        (False, True),
        [int(n) for n in words.random.split(",")],
    ):
        chosen = [looks[side, m] for side in sizes for m in ((False, True) if flips else (False,))]
        x = [torch.stack([torch.cat(look[p], 1) if layers else look[p][1] for look in chosen]).mean(0) for p in (0, 1)]
        row = {"backbone": words.backbone, "sides": list(sizes), "flips": flips, "layers": layers, "random": random}
        row |= judged([widened(part, random) for part in x], labels)
        with words.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


@torch.no_grad()
def seen(network: EfficientNetLite, images: Tensor, side: int, mirrored: bool, device: str) -> tuple[Tensor, Tensor]:
    """Pooled maps after each stage but the first ``[N, d]``, and the last features ``[N, 1280]``."""
    told = []
    for piece in torch.split(images, 512 if device != "cpu" else 16):
        x = piece.to(device).permute(0, 3, 1, 2).float().div(255)
        x = F.interpolate(x.flip(3) if mirrored else x, (side, side), mode="bilinear", antialias=True)
        told.append(network.layered(((x - MEAN) / STD).contiguous(memory_format=torch.channels_last)))
    whole = torch.cat(told)
    return whole[:, :-DIM], whole[:, -DIM:]


def widened(x: Tensor, random: int) -> Tensor:
    if not random:
        return x
    # In float64: layers differ in size, and what float32 rounds off the large ones the fit takes for a feature.
    rows = random_rows(random, x.shape[1], 7).to(x.device).double()
    return torch.cat((x.double(), (x.double() @ rows.T).relu()), 1)


def judged(x: list[Tensor], labels: list[Tensor]) -> dict[str, object]:
    """The held-out accuracy at the best lambda, and the test accuracy of the fit on all training images there."""
    held = torch.arange(len(x[0]), device=x[0].device) % 5 == 0
    classes = int(labels[0].max()) + 1
    tried = accuracies(x[0][~held], labels[0][~held], x[0][held], labels[0][held], LAMBDAS, classes)
    best = max(zip(tried, LAMBDAS, strict=True))
    (test,) = accuracies(x[0], labels[0], x[1], labels[1], best[1:], classes)
    return {"features": x[0].shape[1], "lambda": best[1], "held_out": best[0], "test": test}


def accuracies(
    x: Tensor, y: Tensor, judge: Tensor, answers: Tensor, lambdas: Sequence[float], classes: int
) -> list[float]:
    """Of ridge at each lambda. Every feature to a spread of 1, but those that hardly differ from image to image: sums
    tell it, so it stays a closed form of them."""
    width = x.shape[1]
    second = torch.zeros(width, width, dtype=torch.float64, device=x.device)
    first = torch.zeros(width, classes, dtype=torch.float64, device=x.device)
    mean, spread = x.double().mean(0), x.std(0).double()
    spread[spread < 1e-3 * spread.median()] = math.inf
    for rows, own in zip(torch.split(x, 8192), torch.split(y, 8192), strict=True):
        even = (rows.double() - mean) / spread
        second += even.T @ even
        first += even.T @ F.one_hot(own, classes).double()
    share, unit, found = torch.bincount(y, minlength=classes).double() / len(y), second.diagonal().mean(), []
    for lam in lambdas:
        gram = second.clone()
        gram.diagonal().add_(lam * unit)
        weights = torch.cholesky_solve(first, torch.linalg.cholesky(gram)) / spread[:, None]
        told = torch.cat([(part.double() - mean) @ weights for part in torch.split(judge, 8192)]) + share
        found.append(float((told.argmax(1) == answers).double().mean()))
    return found


if __name__ == "__main__":
    main()
