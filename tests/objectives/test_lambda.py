"""How often AURORA's bound bites: the recursion alone, without a network, against numbers by hand; and what a training
logs of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from factories import train_site
from flyby.data.site import Part, Site
from flyby.data.views import PLAIN
from flyby.models import ModelSpec
from flyby.objectives.aurora import Aurora, AuroraSettings
from flyby.objectives.weighting import WEIGHTINGS, Weighting, WeightingSettings
from flyby.rng import generator
from flyby.training.settings import TrainSettings

LR, MOMENTUM, SIGMA_LR, GAMMA, MOST = 0.05, 0.9, 0.005, 1e-3, 50.0


@dataclass
class Ideal:
    """One site whose L_local stays where it is, and whose prototypes, 10 x 512 numbers that are 1 away from their
    anchors, move by lambda's pull alone: the clipped SGD of the preset ``paper``, 20 steps an epoch. In plain floats,
    from the equations and not from flyby's code."""

    local: float = 3.0
    stable: bool = True

    def run(self, epochs: int, steps: int = 20) -> list[float]:
        """lambda before each step."""
        scalars, speed, away, drift, found = [0.0, 0.0], [0.0, 0.0], 1.0, 0.0, []
        for epoch in (epoch for epoch in range(epochs) for _ in range(steps)):
            s = max(1e-3, 0.5 * (1 + math.cos(math.pi * (epoch + 1) / epochs)))
            strength, align = math.exp(scalars[0] - scalars[1]), away * away
            found.append(strength)
            pull = strength * 2 * away / 5120
            drift = MOMENTUM * drift + pull / max(1.0, abs(pull) * math.sqrt(5120))
            away -= LR * 0.5 * (1 + math.cos(math.pi * epoch / epochs)) * drift
            hinge = 2 * GAMMA * max(0.0, strength - MOST) * strength if self.stable else 0.0
            slope = [
                0.5 * (1 - self.local * math.exp(-scalars[0])) + hinge,
                0.5 * (s - align * math.exp(-scalars[1])) - hinge,
            ]
            norm = max(1.0, math.hypot(*slope))
            speed = [MOMENTUM * v + g / norm for v, g in zip(speed, slope, strict=True)]
            scalars = [x - SIGMA_LR * v for x, v in zip(scalars, speed, strict=True)]
        return found


def at_bound(found: list[float]) -> float:
    return sum(value > MOST for value in found) / len(found)


def test_the_first_steps_by_hand() -> None:
    """lambda = 1; then l_local moves by .005 (slope (1 - 3) / 2 = -1, l_align's is next to 0); then by .005 (.9 + the
    slope at e^-.005), that is .005 (.9 + .99252) = .0094626."""
    first, second, third = Ideal().run(1000, 20)[:3]
    assert first == 1
    assert second == pytest.approx(math.exp(0.005), rel=1e-5)
    assert third == pytest.approx(math.exp(0.005 + 0.0094626), rel=1e-4)


@pytest.mark.parametrize("local", [3.0, 6.0])
def test_in_sixty_epochs_the_bound_is_never_reached_so_both_are_one_run(local: float) -> None:
    with_it, without = Ideal(local).run(60), Ideal(local, stable=False).run(60)
    assert with_it == without
    assert max(with_it) < 15
    assert at_bound(with_it) == 0


@pytest.mark.parametrize(("local", "epochs", "share"), [(3.0, 300, 0.829), (3.0, 500, 0.900), (6.0, 500, 0.946)])
def test_in_a_long_training_the_bound_bites_in_most_steps(local: float, epochs: int, share: float) -> None:
    """Far more than the 5 % that the paper speaks of. Where L_align is gone, l_align rests where its two slopes are
    equal: s / 2 = 2 gamma (lambda - 50) lambda, so lambda = 25 + sqrt(625 + 250 s), at most 54.58."""
    bound, free = Ideal(local).run(epochs), Ideal(local, stable=False).run(epochs)
    assert at_bound(bound) == pytest.approx(share, abs=0.001)
    assert max(bound) < 25 + math.sqrt(625 + 250)
    half = 0.5 * (1 + math.cos(math.pi * 0.5))  # s in the middle of the training
    assert bound[len(bound) // 2] == pytest.approx(25 + math.sqrt(625 + 250 * half), abs=0.1)
    assert bound[-1] == pytest.approx(25 + math.sqrt(625 + 250 * 1e-3), abs=0.01)
    assert max(free) > 1e6
    first = next(i for i, value in enumerate(bound) if value > MOST)
    assert free[: first + 1] == bound[: first + 1], "below the bound they are one"


@pytest.mark.parametrize("kind", ["aurora", "meta-anneal"])
def test_flybys_own_recursion_is_that_one(kind: str) -> None:
    """Over the first steps, in float32, with L_local so large that the bound is passed among them."""
    mine: Weighting = WEIGHTINGS[kind](WeightingSettings(sigma_init="zero"), math.log(49.0))
    scalars, speed = [math.log(49.0), 0.0], [0.0, 0.0]
    seen = []
    for step in range(60):
        p = torch.tensor((step + 1) / 100)
        s = 0.5 * (1 + math.cos(math.pi * float(p)))
        strength = math.exp(scalars[0] - scalars[1])
        seen.append(strength)
        assert float(mine.strength(p)) == pytest.approx(strength, rel=1e-4)
        hinge = 2 * GAMMA * max(0.0, strength - MOST) * strength * (kind == "aurora")
        slope = [0.5 * (1 - 100 * math.exp(-scalars[0])) + hinge, 0.5 * (s - 0.5 * math.exp(-scalars[1])) - hinge]
        norm = max(1.0, math.hypot(*slope))
        speed = [MOMENTUM * v + g / norm for v, g in zip(speed, slope, strict=True)]
        scalars = [x - SIGMA_LR * v for x, v in zip(scalars, speed, strict=True)]
        mine.update(torch.tensor(100.0), torch.tensor(0.5), p)
    assert min(seen) < MOST < max(seen)
    assert (max(seen) < 60) == (kind == "aurora")


# -- what is logged


def site(samples: int = 24) -> Site:
    rng = generator("lambda", samples)
    part = Part(torch.randint(0, 256, (samples, 8, 8, 1), generator=rng, dtype=torch.uint8), torch.arange(samples) % 4)
    none = Part(part.images[:0], part.labels[:0])
    return Site("site-0", part, none, none, tuple("abcd"))


def rows_and_steps(monkeypatch: pytest.MonkeyPatch, epochs: int = 4, **settings: Any) -> tuple[list[Any], list[float]]:
    """A training's rows, and lambda of every single step as it was used."""
    used: list[float] = []
    weigh = Weighting.weigh

    def watched(self: Weighting, *given: Any) -> Any:
        total, strength = weigh(self, *given)
        used.append(float(strength))
        return total, strength

    monkeypatch.setattr(Weighting, "weigh", watched)
    objective = Aurora(AuroraSettings(**settings))
    spec = ModelSpec(name="mlp", classes=4, channels=1, size=(8, 8), widths={"fc1": 8, "fc2": 8})
    choice = TrainSettings(epochs=epochs, batch=8)
    spec = objective.adapt_spec(spec, objective.settings)
    return train_site(site(), spec, objective, choice, PLAIN, 0).rows, used


def test_a_row_says_the_peak_and_the_share_of_its_own_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, used = rows_and_steps(monkeypatch, lambda_max=1.03)
    assert len(used) == 4 * 3
    each = [used[i : i + 3] for i in range(0, 12, 3)]
    assert [row["lambda_bound"] for row in rows] == pytest.approx([sum(v > 1.03 for v in e) / 3 for e in each])
    assert [row["lambda_peak"] for row in rows] == pytest.approx([max(e) for e in each], rel=1e-6)
    assert 0 < sum(row["lambda_bound"] for row in rows) < 4, "both sides of the bound were seen"


def test_the_peak_falls_again_with_lambda(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = rows_and_steps(monkeypatch, weighting="linear", lambda_start=18.0, lambda_max=5.0)
    assert [row["lambda_peak"] for row in rows] == pytest.approx([13.5, 9.0, 4.5, 0.0])
    assert [row["lambda_bound"] for row in rows] == [1, 1, 0, 0]
    assert all(a["lambda_peak"] > b["lambda_peak"] for a, b in pairwise(rows))
