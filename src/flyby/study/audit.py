"""Membership inference on one upload: how well does the model alone tell its training images (*members*) from other
ones?

An attacker who holds an upload and an image with its label has the model's answer and nothing else. Four scores, higher
for likelier members: ``loss`` log p(y) [Yeom et al., CSF 2018]; ``confidence`` max_c log p(c) and ``entropy`` sum_c p
log p, which need no label; ``calibrated`` log p(y) with each class's own mean and spread taken out, so that a class
that is merely hard is not taken for one that was not trained on.

Of closed forms an attacker holds the sums. The model is then the ridge head that they alone give, and there is one more
score: ``distance``, -(x - m_y)^T (W + delta I)^-1 (x - m_y) with the class's mean and the scatter W about the means. A
member is part of W, so it lies in its span and nearer than others: with fewer images than features that tells all
members apart. Where the sums have noise of z, an attacker who knows all other images has N(1 / z, 1) against N(0, 1) to
tell, so that no AUC is above Phi(1 / (z sqrt 2)) in the mean over the noise: the ``bound``.

Members and others must differ in membership alone. Sites hold uneven shares of the classes, and a class that a site
never saw is easy to tell from the rest without any memory of a single image: so the others are weighted to have the
members' class frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flyby.data.classes import fitted_bundle
from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import Part, part_of, site_of
from flyby.data.sources import Reading, load
from flyby.data.splits import Split, make_split
from flyby.errors import BadInput
from flyby.files import read_json
from flyby.fusion import FUSIONS, Predictor, load_predictor
from flyby.fusion.closed.base import KIND, Contributions
from flyby.fusion.closed.kept import SUMS, read_kept
from flyby.fusion.evaluation import check_fit, scores_of
from flyby.fusion.predictor import model_folder
from flyby.models import Network
from flyby.models.features import features_of
from flyby.parcels import parcel
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import Parcel
from flyby.rng import legacy_numpy
from flyby.runs.config import RunConfig, data_of
from flyby.runs.folder import Run
from flyby.settings import build
from flyby.statistics.extras import given
from flyby.statistics.feature_sums import ROUNDING, Choice, Sums, noise_of, widened
from flyby.statistics.masked_sums import is_masked
from flyby.statistics.noised import SHARES

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
FALSE_ALARMS = {"tpr_at_1_percent": 0.01, "tpr_at_0.1_percent": 0.001}
RESAMPLES = 1000
GLOBAL = "global"


def audit_model(
    model: Path,
    members: str,
    others: str,
    *,
    size: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    rename: Callable[[DataBundle], DataBundle] | None = None,
    skip: bool = False,
) -> dict[str, Any]:
    """``flyby audit MODEL --members DATA --others DATA``: the training images of one source against the test images of
    another (all of them where it has no test split), their classes by name: ``rename`` gives them other names,
    ``skip`` leaves out those that the model does not know."""
    predictor, told = target(model)
    reading = Reading(channels=predictor.channels)
    inside, outside = (
        load(name, size=size or predictor.size, reading=reading, holdout=None) for name in (members, others)
    )
    inside, outside = (
        fitted_bundle(rename(one) if rename else one, predictor.class_names, "the model", skip=skip)
        for one in (inside, outside)
    )
    for data in (inside.train, outside.test or outside.train):
        check_fit(predictor, data)
    return {
        "model": str(model),
        "notes": [*inside.notes, *outside.notes],
        **audit(
            predictor,
            part_of(inside.train),
            _unseen(outside.test or outside.train, inside.train),
            device,
            seed,
            told=told,
        ),
    }


@dataclass(frozen=True)
class Told:
    """The sums that an attacker holds, through which network they came, and the AUC that noise allows (None: any)."""

    network: Network
    sums: Sums
    choice: Choice
    bound: float | None

    @classmethod
    def by(cls, items: Sequence[Parcel]) -> Told:
        sums = Contributions(Inbox(items), "audit")
        bounds = [_bound(item) for item in items]
        bound = None if None in bounds else max(one for one in bounds if one is not None)
        tried = sums.sent.settled(0.0)  # an attacker is not put off by noise
        return cls(items[0].network(), tried, sums.choice, bound)

    @torch.no_grad()
    def distance(self, part: Part, device: str) -> Floats:
        """How near images lie to where those of the sums are; higher is nearer."""
        network, sums = self.network.to(device), self.sums
        features = widened(features_of(network, part.images), self.choice).cpu()
        means = sums.first / sums.counts.clamp_min(1).double()[:, None]
        scatter = sums.within()
        scatter.diagonal().add_(ROUNDING * float(sums.second.diagonal().sum()))
        rest = torch.linalg.solve_triangular(
            torch.linalg.cholesky(scatter.cpu()), (features - means.cpu()[part.labels]).T, upper=False
        )
        return np.asarray(-rest.square().sum(0).numpy(), dtype=np.float64)


def _bound(item: Parcel) -> float | None:
    """What no attack on the noisy sums of one site can pass."""
    noise = noise_of(given(item, KIND))
    if noise is None or not noise.counts > 0 or item.manifest.sites > 1:
        return None
    z = noise.counts * math.sqrt(SHARES[0])
    return 0.5 * math.erfc(-1 / (2 * z))


def target(path: Path) -> tuple[Predictor, Told | None]:
    """What is attacked: a model, and where it is one of sums, these as well."""
    predictor = load_predictor(path)
    if path.is_file():
        manifest = parcel.read_manifest(path)
        if is_masked(manifest):
            raise BadInput(
                f"the sums of {manifest.sender} are masked, and look like chance without those of the whole round;"
                " audit the fused model"
            )
        if f"{KIND.name}.choice" in manifest.extras:
            item = parcel.read(path)
            with suppress(BadInput):  # sums may tell too little for a head: the parcel's own tells nothing
                predictor = FUSIONS["ridge"]().fuse(Inbox([item]))
            return predictor, Told.by([item])
        return predictor, None
    if ((folder := model_folder(path)) / SUMS).is_file():
        return predictor, Told.by(read_kept(folder, predictor.networks[0]).items)  # type: ignore[arg-type]
    return predictor, None


def _unseen(others: Dataset, members: Dataset) -> Part:
    """The others without those that are members too, pixel for pixel."""
    known = {image.tobytes() for image in members.images}
    rows = [i for i, image in enumerate(others.images) if image.tobytes() not in known]
    if not rows:
        raise BadInput("every image of --others is among the --members; name images that the model was not trained on")
    return part_of(others, rows)


def audit_run(folder: Path, *, device: str = "cpu", seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """``flyby audit RUN``: each site's upload, with its own training images against the common test images; then the
    fused model, with everybody's training images."""
    asked = {key: value for key, value in read_json(folder / "config.json").items() if key != "resolved"}
    config, split = build(RunConfig, asked, str(Run(folder).config)), Split.load(Run(folder).split)
    bundle = data_of(config).load()
    if make_split(bundle.train, config.split, config.seed).hash != split.hash:
        raise BadInput(f"the data changed since the run in {folder} was made, so its members are not known any more")
    if bundle.test is None:
        raise BadInput(f"{config.data.name} has no test images to compare with; name some with --members and --others")
    others = part_of(bundle.test)
    parts = {name: site_of(bundle, split, name).train for name in split.shares}
    for name, members in parts.items():
        predictor, told = target(folder / "parcels" / f"{name}.parcel")
        yield name, audit(predictor, members, others, device, seed, told=told)
    if (folder / GLOBAL / "model.json").exists():
        everyone = Part(torch.cat([p.images for p in parts.values()]), torch.cat([p.labels for p in parts.values()]))
        predictor, told = target(folder / GLOBAL)
        yield GLOBAL, audit(predictor, everyone, others, device, seed, told=told)


def is_run(folder: Path) -> bool:
    return Run(folder).split.exists() and Run(folder).parcels.is_dir()


def audit(
    predictor: Predictor,
    members: Part,
    others: Part,
    device: str = "cpu",
    seed: int = 0,
    resamples: int = RESAMPLES,
    told: Told | None = None,
) -> dict[str, Any]:
    """All attacks on one model, each with its AUC, a bootstrap interval of it (95 %), and its true-positive rates at
    low false-positive rates (None where there are too few others to see such a rate)."""
    classes = len(predictor.class_names)
    held = [np.bincount(part.labels.numpy(), minlength=classes) for part in (members, others)]
    common = (held[0] > 0) & (held[1] > 0)
    if not common.any():
        raise BadInput(
            "members and others have no class in common, so that only the classes could be told apart; name other"
            " images"
        )
    kept = [
        Part(part.images[rows], part.labels[rows])
        for part in (members, others)
        for rows in [torch.from_numpy(common)[part.labels]]
    ]
    weights = (held[0] / np.maximum(held[1], 1))[kept[1].labels.numpy()].astype(np.float64)
    answers = [log_chances(predictor, part, device) for part in kept]
    labels = [part.labels.numpy() for part in kept]
    scores = {name: (rule(answers[0], labels[0]), rule(answers[1], labels[1])) for name, rule in SCORES.items()}
    scores["calibrated"] = calibrated(*scores["loss"], labels[0], labels[1], weights)
    if told is not None:
        scores["distance"] = (told.distance(kept[0], device), told.distance(kept[1], device))
    attacks = {name: judged(*pair, weights, seed, resamples) for name, pair in scores.items()}
    strongest = max(attacks, key=lambda name: float(attacks[name]["low"]))
    right = [(answer.argmax(1) == own).astype(np.float64) for answer, own in zip(answers, labels, strict=True)]
    return {
        "members": len(kept[0]),
        "others": len(kept[1]),
        "left_out": len(members) + len(others) - len(kept[0]) - len(kept[1]),
        "accuracy": {"members": float(right[0].mean()), "others": float(np.average(right[1], weights=weights))},
        "attacks": attacks,
        "strongest": strongest,
        **({"bound": told.bound} if told is not None else {}),
        "verdict": verdict(strongest, attacks[strongest]),
    }


# Scores


def log_chances(predictor: Predictor, part: Part, device: str) -> Floats:
    """log p(c) for each image, in float64: in float32 every sure answer would be the same number."""
    chances = predictor.chances(scores_of(predictor, part.images, device).double())
    return np.asarray(chances.clamp_min(1e-300).log().numpy(), dtype=np.float64)


SCORES: dict[str, Callable[[Floats, Ints], Floats]] = {
    "loss": lambda log_p, labels: log_p[np.arange(len(labels)), labels],
    "confidence": lambda log_p, labels: log_p.max(1),
    "entropy": lambda log_p, labels: (np.exp(log_p) * log_p).sum(1),
}


def calibrated(
    members: Floats, others: Floats, member_labels: Ints, other_labels: Ints, weights: Floats
) -> tuple[Floats, Floats]:
    """Scores less their class's mean, over its spread: of the whole pool, which an attacker has without knowing who is
    a member."""
    scores, labels = np.concatenate([members, others]), np.concatenate([member_labels, other_labels])
    weights = np.concatenate([np.ones(len(members)), weights])
    total = np.bincount(labels, weights)
    mean = np.bincount(labels, weights * scores) / np.maximum(total, 1e-300)
    spread = np.sqrt(np.bincount(labels, weights * (scores - mean[labels]) ** 2) / np.maximum(total, 1e-300))
    standard = (scores - mean[labels]) / np.maximum(spread[labels], 1e-12)
    return standard[: len(members)], standard[len(members) :]


# Judging scores


def judged(
    members: Floats, others: Floats, weights: Floats, seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, Any]:
    """AUC with its interval, and the rates of :data:`FALSE_ALARMS`; ``weights`` are the others'."""
    levels, place = np.unique(np.concatenate([members, others]), return_inverse=True)
    mine, theirs = place[: len(members)], place[len(members) :]

    def shares(count_mine: Floats, count_theirs: Floats) -> tuple[Floats, Floats]:
        found = [
            np.bincount(where, count, len(levels)) for where, count in ((mine, count_mine), (theirs, count_theirs))
        ]
        return found[0] / found[0].sum(), found[1] / found[1].sum()

    at = shares(np.ones(len(mine)), weights)
    random = legacy_numpy(seed, "audit", "bootstrap")
    again = [area(*shares(_redrawn(random, np.ones(len(mine))), _redrawn(random, weights))) for _ in range(resamples)]
    low, high = np.quantile(again, (0.025, 0.975))
    effective = weights.sum() ** 2 / (weights**2).sum()
    rates = {name: true_positives(*at, rate) if effective * rate >= 1 else None for name, rate in FALSE_ALARMS.items()}
    return {"auc": area(*at), "low": float(low), "high": float(high), **rates}


def _redrawn(random: np.random.RandomState, weights: Floats) -> Floats:
    return np.bincount(random.randint(0, len(weights), len(weights)), minlength=len(weights)) * weights


def area(members: Floats, others: Floats) -> float:
    """AUC = P(a member's score > another's) + P(equal) / 2, from both groups' shares at each score, lowest first."""
    return float((members * (np.cumsum(others) - others / 2)).sum())


def true_positives(members: Floats, others: Floats, rate: float) -> float:
    """The largest share of members above a threshold that at most ``rate`` of the others reach."""
    reached = np.cumsum(others[::-1]) <= rate * (1 + 1e-9)
    return float(members[::-1][reached].sum())  # the cumulative sum grows, so these are the highest scores


def verdict(name: str, found: dict[str, Any]) -> str:
    """One sentence for people."""
    auc, low, high = found["auc"], found["low"], found["high"]
    between = f"95 % interval {low:.2f} to {high:.2f}"
    if low <= 0.5:
        return (
            f"No attack does better than chance (strongest: {name}, AUC {auc:.2f}, {between}); that is no proof of"
            " privacy, since stronger attacks exist."
        )
    how = "slightly" if auc < 0.6 else "clearly" if auc < 0.75 else "strongly"
    return (
        f"The model leaks membership {how}: of a training image and another one, the {name} attack finds the training"
        f" image in {auc:.0%} of cases ({between}; chance is 50%)."
    )
