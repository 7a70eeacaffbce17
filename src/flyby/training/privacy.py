"""Differentially private local training: DP-SGD [Abadi et al., CCS 2016], with opacus for per-sample gradients and for
the accounting.

A step draws every image with probability ``q = batch / n`` (Poisson sampling, which is what the accountant assumes;
nothing is shuffled), takes each image's own gradient ``g_i``, and moves by ``(sum_i g_i min(1, C / |g_i|) + N(0, (sigma
C)^2)) / (q n)``. ``sigma`` is found before training so that all steps together cost at most ``dp_epsilon`` at
``dp_delta`` by opacus' RDP accountant, a proven upper bound.

Two data sets are neighbours if one image of one of them contributes nothing to the other (*zero-out*): so the number of
images is public, as are class names and image size. A real site draws batches, augmentation and noise from the
operating system: the seed is known to all sites, and whoever knows the random numbers can take the noise off again. A
simulation draws them from the seed, and its parcels say so.

Where nothing is trained and sums of features are sent, one Gaussian noise makes the sums private
(``flyby.statistics.noised``); what is promised and what the parcel says are the same.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from flyby.data.site import Part, Site
from flyby.data.views import ViewSettings, augment
from flyby.errors import BadInput
from flyby.models import ModelSpec, Network
from flyby.models.networks import ARCHITECTURES
from flyby.objectives.base import Batch, Objective, ObjectiveSettings
from flyby.rng import generator
from flyby.settings import Grown
from flyby.statistics.catalogue import named
from flyby.statistics.feature_sums import NAME, blurred, noise_of, noised_sums
from flyby.statistics.noised import multiplier

ACCOUNTANT = "rdp"
CHUNK = 256  # per-sample gradients held at once
TOLERANCE = 0.01  # of the target epsilon: how far below it the noise may end up


class PrivacySettings(Grown):
    """The settings of private training, off by default. They stand in parcels and keys only where they are on: no other
    parcel's bytes know of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dp_epsilon: float | None = Field(
        None, gt=0, description="train by DP-SGD at this epsilon (extra: privacy), or send sums with noise for it"
    )
    dp_delta: float | None = Field(None, gt=0, lt=1, description="its delta; null: 1 / (10 n)")
    dp_clip: float = Field(1.0, gt=0, description="DP-SGD: largest gradient norm of one image")
    dp_norm: float | None = Field(
        None, gt=0, description="private sums: largest norm of one image's features; null: twice that of noise"
    )

    def silent(self) -> set[str]:
        if self.dp_epsilon is None:
            return super().silent() | set(PrivacySettings.model_fields)
        return super().silent() | ({"dp_norm"} if self.dp_norm is None else set())

    def budget(self, images: int) -> tuple[float, float]:
        """(epsilon, delta)"""
        assert self.dp_epsilon is not None
        return self.dp_epsilon, self.dp_delta if self.dp_delta is not None else 0.1 / images


def check_privacy(
    spec: ModelSpec,
    objective: type[Objective],
    chosen: ObjectiveSettings,
    train: PrivacySettings,
    views: ViewSettings,
    counts: str,
) -> None:
    """Refuse, before any training, whatever would go out of the accounting: all of it in one sentence, each with its
    cure."""
    if train.dp_epsilon is None:
        return
    if not objective.trains:
        _check_sums(chosen.send, counts)
        return
    if not objective.per_sample:
        why = (
            "its loss mixes the images of a batch"
            if views.views > 1
            else "its loss uses exact counts or trains more than the network"
        )
        raise BadInput(
            f"objective {objective.name!r} cannot be trained privately (train.dp_epsilon): {why}; use a method with"
            " plain cross-entropy, such as fedavg or ensemble"
        )
    cures = []
    if has_batch_norm(spec) and spec.backbone is not None:
        cures.append("--tune head or lora (per-sample gradients of its BatchNorm are not known)")
    elif has_batch_norm(spec):
        plain = [
            name
            for name in ARCHITECTURES
            if min(spec.size) >= ARCHITECTURES[name].smallest and not has_batch_norm(spec.replace(name=name, widths={}))
        ]
        cures.append(f"--model {' or '.join(plain)} ({spec.name} has BatchNorm, which mixes the images of a batch)")
    if counts != "noisy":
        cures.append(f"--set counts=noisy ({counts} class counts are not private; their epsilon is added to the total)")
    if chosen.calibrate:
        cures.append("--set objective.calibrate=false (calibration is computed from the images)")
    if chosen.send:
        cures.append(f"objective.send left empty ({', '.join(chosen.send)} are computed from the images)")
    if views.views > 1:
        cures.append("--set views.views=1 (several views of an image are several contributions)")
    for name, why in (
        ("patience", "choosing an epoch by validation images is not accounted for"),
        ("clip", "train.dp_clip takes its place"),
    ):
        if getattr(train, name) is not None:
            cures.append(f"train.{name} left out ({why})")
    usual = type(train).model_fields
    for name in ("ema", "resolution", "one_view"):
        if getattr(train, name) != usual[name].default:
            cures.append(f"train.{name} left out (its steps are not those that are accounted for)")
    if getattr(train, "optimizer") == "muon":  # noqa: B009
        cures.append("train.optimizer=sgd")
    if getattr(train, "compile") == "full":  # noqa: B009
        cures.append("train.compile left out (per-sample gradients need the layers one by one)")
    if cures:
        raise BadInput(f"private training (train.dp_epsilon) needs {'; '.join(cures)}")


def _check_sums(send: Sequence[str], counts: str) -> None:
    """The same where nothing is trained: only sums can be sent privately, with the counts that are in them."""
    kinds = [named(text)[0] for text in send]
    if kinds != [NAME]:
        raise BadInput(
            f"without training only {NAME} can be private (train.dp_epsilon), and {', '.join(kinds) or 'nothing'} would"
            f" be sent; use --method ridge or lda, or --set objective.send=[{NAME}]"
        )
    if counts != "noisy":
        raise BadInput(
            f"{counts} class counts are not private (train.dp_epsilon); leave out counts=..., and those of the noisy"
            " sums are told"
        )


def has_batch_norm(spec: ModelSpec) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in spec.skeleton().modules())


@dataclass(frozen=True)
class Budget:
    """What all steps of a training cost: ``steps`` times the Gaussian mechanism of noise ``sigma`` on samples drawn at
    ``rate``."""

    sigma: float
    rate: float
    steps: int
    delta: float

    @classmethod
    def plan(cls, epsilon: float, delta: float, rate: float, steps: int) -> Budget:
        """The least noise, within :data:`TOLERANCE`, whose cost stays within epsilon."""
        return cls(least_noise(epsilon, delta, rate, steps), rate, steps, delta)

    def epsilon(self, steps: int | None = None) -> float:
        """What so many steps cost (None: all), by opacus' accountant."""
        from opacus.accountants import create_accountant

        accountant = create_accountant(mechanism=ACCOUNTANT)
        accountant.history = [(self.sigma, self.rate, self.steps if steps is None else steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(accountant.get_epsilon(delta=self.delta))


@functools.lru_cache(maxsize=64)  # the search takes a second, and sites of one size share its answer
def least_noise(epsilon: float, delta: float, rate: float, steps: int) -> float:
    opacus_or_why()
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that the best order lies at the end of its range: a looser bound, still a bound
        try:
            sigma = get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=rate,
                steps=steps,
                accountant=ACCOUNTANT,
                epsilon_tolerance=TOLERANCE * epsilon,
            )
        except ValueError:
            cost = f"epsilon {epsilon:g} at delta {delta:g} over {steps} steps"
            raise BadInput(f"no amount of noise gives {cost}; raise train.dp_epsilon or train fewer epochs") from None
    return float(sigma)


class PrivateTraining:
    """DP-SGD for one site: takes the place of the plain epoch. Its whole memory is how many epochs are done, so a
    resumed site goes on with the same budget; an epoch that was interrupted is drawn anew, and nothing of its first try
    was kept or sent."""

    def __init__(
        self,
        settings: PrivacySettings,
        views: ViewSettings,
        epochs: int,
        samples: int,
        batch: int,
        site: str,
        seed: int | None,
        counts_epsilon: float,
    ) -> None:
        batch = min(batch, samples)
        self.views, self.samples, self.clip, self.seed, self.site, self.counts_epsilon = (
            views,
            samples,
            settings.dp_clip,
            seed,
            site,
            counts_epsilon,
        )
        self.steps = math.ceil(samples / batch)
        epsilon, delta = settings.budget(samples)
        self.budget = Budget.plan(epsilon, delta, batch / samples, self.steps * epochs)

    def epoch(
        self,
        model: Network,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        train: Part,
        epoch: int,
        progress: Tensor,
    ) -> dict[str, float]:
        """One epoch of steps. The returned means are for the site's own eyes: they are not noisy and never leave it."""
        mean, std = model.statistics(progress.device)
        draw = draws(None if self.seed is None else generator(self.seed, self.site, "private", epoch))
        key = (secrets.token_hex(32),) if self.seed is None else (self.seed, self.site, "views", epoch)
        view = functools.partial(
            augment, settings=self.views, mean=mean, std=std, rng=generator(*key, device=progress.device)
        )
        totals: dict[str, float] = {}
        with per_sample_gradients(model) as parameters:
            for _ in range(self.steps):
                rows = (draw(self.samples) < self.budget.rate).nonzero().flatten().to(progress.device)
                sums = [torch.zeros_like(p) for p in parameters]
                for chunk in (
                    torch.split(rows, CHUNK) if len(rows) else ()
                ):  # a batch without any image is a step of pure noise
                    terms = objective.loss(model, Batch(view(train.images[chunk]), train.labels[chunk], 1), progress)
                    terms.total.backward()  # type: ignore[no-untyped-call]
                    each = [p.grad_sample for p in parameters]  # type: ignore[attr-defined]
                    for total, one in zip(sums, clipped_sum(each, self.clip), strict=True):
                        total.add_(one)
                    for name, value in {"loss": terms.total, **terms.parts}.items():
                        totals[name] = totals.get(name, 0.0) + float(value.detach()) * len(chunk) / (
                            self.budget.rate * self.samples * self.steps
                        )
                    optimizer.zero_grad(set_to_none=True)
                    for p in parameters:
                        p.grad_sample = None  # type: ignore[attr-defined]
                for p, total in zip(parameters, sums, strict=True):
                    noise = torch.special.ndtri(draw(p.numel())).to(p.device, p.dtype).view(p.shape)
                    p.grad = total.add_(noise, alpha=self.budget.sigma * self.clip).div_(
                        self.budget.rate * self.samples
                    )
                optimizer.step()
        return totals

    def facts(self, epochs: int) -> dict[str, Any]:
        """What the parcel says about its privacy: the cost of the epochs that were done, and of the noisy counts beside
        them."""
        epsilon = self.budget.epsilon(self.steps * epochs)
        return {
            "epsilon": epsilon,
            "delta": self.budget.delta,
            "counts_epsilon": self.counts_epsilon,
            "total_epsilon": epsilon + self.counts_epsilon,
            "noise": self.budget.sigma,
            "clip": self.clip,
            "sampling": "poisson",
            "rate": self.budget.rate,
            "steps": self.steps * epochs,
            "accountant": ACCOUNTANT,
            **promise(self.seed),
        }


class PrivateSums:
    """Sums of features with noise, for one site: takes the place of what its objective would send."""

    def __init__(self, settings: PrivacySettings, send: Sequence[str], seed: int | None) -> None:
        self.settings, self.options, self.seed = settings, named(send[0])[1], seed

    def extras(self, model: Network, site: Site) -> dict[str, Tensor]:
        draw = draws(None if self.seed is None else generator(self.seed, site.id, "private sums"))
        budget = self.settings.budget(len(site.train))
        made = noised_sums(model, site, self.options, budget, self.settings.dp_norm, draw)
        return {f"{NAME}.{part}": value for part, value in made.items()}

    @staticmethod
    def counts(extras: Mapping[str, Tensor]) -> list[int]:
        """Those of the noisy sums: they cost nothing more."""
        return blurred(extras[f"{NAME}.counts"])

    def facts(self, extras: Mapping[str, Tensor], images: int) -> dict[str, Any]:
        """What the parcel says about its privacy."""
        (epsilon, delta), noise = self.settings.budget(images), noise_of(extras)
        assert noise is not None
        return {
            "epsilon": epsilon,
            "delta": delta,
            "counts_epsilon": 0.0,
            "total_epsilon": epsilon,
            "noise": multiplier(epsilon, delta),
            "clip": noise.norm,
            "sampling": "none",
            "rate": 1.0,
            "steps": 1,
            "accountant": "analytic gaussian",
            **promise(self.seed),
        }


def promise(seed: int | None) -> dict[str, str]:
    """What is promised, and whether the random numbers keep it."""
    return {
        "neighbours": "zero-out of one image",
        "randomness": "operating system" if seed is None else "seeded: a simulation, not private",
    }


@contextmanager
def per_sample_gradients(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Within the block, a backward pass leaves every image's own gradient in ``grad_sample`` of each trainable
    parameter (opacus' hooks)."""
    opacus_or_why()
    from opacus import GradSampleModule

    # Opacus takes a convolution's patches out of memory as if channels lay first: of others its gradients are wrong.
    filters = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    first = [one.register_forward_pre_hook(lambda _, given: (given[0].contiguous(),)) for one in filters]
    hooked = GradSampleModule(model, loss_reduction="mean")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # images need no gradient
            yield [p for p in model.parameters() if p.requires_grad]
    finally:
        hooked.to_standard_module()
        for handle in first:
            handle.remove()


def clipped_sum(gradients: list[Tensor], clip: float) -> list[Tensor]:
    """``sum_i g_i min(1, clip / |g_i|)`` for gradients ``[B, ...]`` of all parameters, ``|g_i|`` over all of them
    together."""
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    factors = (clip / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
    return [torch.einsum("i,i...->...", factors, g) for g in gradients]


def draws(rng: torch.Generator | None) -> Callable[[int], Tensor]:
    """A source of uniform numbers in (0, 1), float64, on the host: a generator's, or (None) the operating system's own,
    53 bits each."""

    def draw(count: int) -> Tensor:
        if rng is None:
            bits = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64) & ((1 << 53) - 1)
        else:
            bits = torch.randint(0, 1 << 53, (count,), generator=rng)
        return (bits.double() + 0.5) * 2.0**-53

    return draw


def opacus_or_why() -> None:
    try:
        import opacus  # noqa: F401
    except ImportError:
        raise BadInput("train.dp_epsilon needs opacus; install it with pip install 'flyby[privacy]'") from None
