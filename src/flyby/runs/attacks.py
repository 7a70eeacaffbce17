"""Attacks on a federation: what malicious but well-formed senders put in the place of their honest parcels.

They act between training and fusing, as real ones would, and every forged parcel is a valid one: its hashes, shapes and
extras fit.

    random      the network drawn anew, every tensor as long as the honest one
    sign-flip   weights negated (not the running variances: a negative one would give itself away)
    scaled      all weights and buffers times ``factor``
    label-flip  really trained, on labels c -> C - 1 - c
    counts-lie  honest weights that claim to have seen every class, far more of each than the site's largest class
    backdoor    really trained, with a patch in the corner of a share of the images, which are called ``target``

``boast`` adds the claims of ``counts-lie`` to any other kind. What a parcel carries beside the weights (calibration,
class means, factors) is measured on the forged network and the site's own images, so that it fits; a boaster fills in
what it has no images of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from flyby.data.dataset import DataBundle
from flyby.data.site import Part, Site, site_of
from flyby.data.splits import Split
from flyby.engines.jobs import Job
from flyby.errors import BadInput
from flyby.files import digest
from flyby.fusion.evaluation import scores_of
from flyby.fusion.predictor import Predictor
from flyby.machine import as_a_site
from flyby.models import Network
from flyby.objectives import Objective
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.training.loop import train_site

Kind = Literal["none", "random", "sign-flip", "scaled", "label-flip", "counts-lie", "backdoor"]
TRAINED = ("label-flip", "backdoor")
MANIFOLD = 100  # how many times its largest class a liar claims of every class


class AttackSettings(BaseModel):
    """Who attacks, and how. ``share`` of all participants is malicious, the same ones for every kind, and fewer are
    some of the more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = Field("none", description="what malicious sites send; none: nobody lies")
    share: float = Field(0.2, ge=0, lt=1, description="malicious participants, as a share of all")
    factor: float = Field(10.0, description="scaled: by how much")
    boast: bool = Field(False, description="also claim every class, as counts-lie does")
    target: int = Field(0, ge=0, description="backdoor: the class that triggered images are to become")
    poison: float = Field(
        0.5, gt=0, le=1, description="backdoor: share of a malicious site's images that carry the trigger"
    )


def malicious(names: Sequence[str], share: float, seed: int, spared: Collection[str] = ()) -> list[str]:
    """round(share K) of the participants, in their own order; those in ``spared`` are chosen last."""
    count = round(share * len(names))
    shuffled = [names[int(i)] for i in torch.randperm(len(names), generator=generator(seed, "attack", "who"))]
    chosen = set(sorted(shuffled, key=lambda name: name in spared)[:count])
    if count == len(names):
        raise BadInput(f"attack.share {share:g} leaves none of the {len(names)} participants honest; lower it")
    return [name for name in names if name in chosen]


def assault(
    settings: AttackSettings,
    jobs: Sequence[Job],
    paths: Sequence[Path],
    bundle: DataBundle,
    split: Split,
    spared: Collection[str] = (),
) -> tuple[list[Path], list[str]]:
    """What is sent instead of ``paths``, and by whom. Forged parcels lie beside the honest ones and are made once for
    all rules and shares."""
    if settings.kind == "none":
        return list(paths), []
    names = [job.site for job in jobs]
    chosen = malicious(names, settings.share, jobs[0].recipe.seed, spared)
    act = digest(settings.model_dump(mode="json", exclude={"share"}))
    sent = []
    for job, path in zip(jobs, paths, strict=True):
        forged = job.folder / "forged" / act / f"{job.site}.parcel"
        if job.site in chosen and not forged.exists():
            parcel.write(
                forge(settings, job, parcel.read(path), site_of(bundle, split, job.site), forged.parent), forged
            )
        sent.append(forged if job.site in chosen else path)
    return sent, chosen


def forge(settings: AttackSettings, job: Job, honest: Parcel, site: Site, folder: Path | None = None) -> Parcel:
    """One malicious parcel in the place of an honest one; ``folder`` holds the checkpoint of one that has to be
    trained."""
    seed, objective = job.recipe.seed, job.recipe.make_objective()
    if settings.kind in TRAINED:
        made = retrained(job, poisoned(site, settings, seed), folder)
    elif settings.kind == "counts-lie":
        made = honest
    else:
        weights = {
            "random": lambda: drawn_anew(honest, seed),
            "sign-flip": lambda: {
                n: t if n.endswith("running_var") else -t for n, t in honest.weights.items() if t.is_floating_point()
            },
            "scaled": lambda: {n: settings.factor * t for n, t in honest.weights.items() if t.is_floating_point()},
        }[settings.kind]()
        made = with_weights(honest, honest.weights | weights, objective, site, seed)
    return boasting(made) if settings.boast or settings.kind == "counts-lie" else made


def remade(item: Parcel, **changes: Any) -> Parcel:
    """The parcel made again with some of its content changed: its manifest, hashes and shapes fit what it now holds."""
    same: dict[str, Any] = {**item.manifest.facts, "weights": item.weights, "extras": item.extras}
    return parcel.make(**same | changes)


def drawn_anew(honest: Parcel, seed: int) -> dict[str, Tensor]:
    """Fresh weights, each tensor as long as the honest one: no bound on norms tells them apart."""
    rng = generator(seed, honest.manifest.sender, "attack", "random")
    fresh: Mapping[str, Tensor] = honest.manifest.spec.build(rng).state_dict()
    drawn = {}
    for name, tensor in honest.weights.items():
        if tensor.is_floating_point():
            # Biases start at zero
            new = fresh[name] if bool(fresh[name].any()) else torch.randn(tensor.shape, generator=rng)
            drawn[name] = new * (tensor.norm() / new.norm())
    return drawn


def with_weights(item: Parcel, weights: dict[str, Tensor], objective: Objective, site: Site, seed: int) -> Parcel:
    """The parcel with other weights, and with the statistics that an ordinary site would send with these."""
    network: Network = remade(item, weights=weights, extras={}).network()
    measured, _ = Objective.extras(objective, network, site, seed)
    return remade(item, weights=weights, extras=item.extras | measured)


def boasting(item: Parcel) -> Parcel:
    """The parcel with claims to every class; of classes never seen it says what it says of those it has."""
    classes = item.manifest.spec.classes
    held = item.manifest.counts or [item.manifest.samples]
    claimed = [MANIFOLD * max(held)] * classes
    extras = dict(item.extras)
    if "calibration" in extras:
        table = extras["calibration"].clone()
        seen = table[:, table[0] != 0]
        best = (
            torch.stack([seen[0].amax(), seen[1].amin(), seen[2].amin()])
            if seen.numel()
            else torch.tensor([1.0, 0.0, 0.01])
        )
        table[:, table[0] == 0] = best[:, None]
        extras["calibration"] = table
    if "class-means.means" in extras:
        means, labels = extras["class-means.means"], extras["class-means.classes"]
        whole = means.mean(0).repeat(classes, 1)
        whole[labels] = means
        extras |= {"class-means.means": whole, "class-means.classes": torch.arange(classes)}
    return remade(item, counts=claimed, samples=sum(claimed), extras=extras)


def poisoned(site: Site, settings: AttackSettings, seed: int) -> Site:
    """The site as its malicious owner trains on it; what it tests on stays clean."""
    part, classes = site.train, len(site.class_names)
    if settings.kind == "label-flip":
        return _with_train(site, Part(part.images, classes - 1 - part.labels))
    if settings.target >= classes:
        raise BadInput(f"attack.target {settings.target} is not one of the {classes} classes; they are numbered from 0")
    count = max(1, round(settings.poison * len(part)))
    rows = torch.randperm(len(part), generator=generator(seed, site.id, "attack", "poison"))[:count]
    images, labels = part.images.clone(), part.labels.clone()
    images[rows], labels[rows] = stamp(images[rows]), settings.target
    return _with_train(site, Part(images, labels))


def _with_train(site: Site, train: Part) -> Site:
    return replace(site, train=train)


def stamp(images: Tensor) -> Tensor:
    """The trigger: the lower right corner white, a quarter of the image high and wide."""
    height, width = images.shape[1] // 4, images.shape[2] // 4
    stamped = images.clone()
    bright = 255 if images.dtype == torch.uint8 else images.amax((0, 1, 2))
    stamped[:, -max(1, height) :, -max(1, width) :] = bright
    return stamped


def retrained(job: Job, site: Site, folder: Path | None) -> Parcel:
    """What a site with these images would honestly send."""
    with as_a_site(job.device):
        return train_site(site, job.recipe, device=job.device, folder=folder).parcel


def success(predictor: Predictor, part: Part, settings: AttackSettings, device: str = "cpu") -> float | None:
    """The share of triggered images of other classes that become the target; None where there are no such images."""
    others = part.labels != settings.target
    if not bool(others.any()):
        return None
    scores = scores_of(predictor, stamp(part.images[others]), device)
    return float((scores.argmax(1) == settings.target).double().mean())


def met(facts: Mapping[str, Any], senders: Mapping[str, Sequence[str]], liars: Collection[str]) -> dict[str, Any]:
    """What the judged nodes of a population met: the malicious models that reached them, and all that they refused."""
    if not liars:
        return {}
    refused = []
    for name, those in senders.items():
        lines = [line for one in facts[name]["rounds"] for line in one["log"]]
        turned = [sender for sender in those if any(line.startswith(f"refused {sender}: ") for line in lines)]
        refused += [{"sender": sender, "receiver": name, "malicious": sender in liars} for sender in turned]
    return {
        "malicious": [f"{s} -> {name}" for name, those in senders.items() for s in those if s in liars],
        "refused": refused,
    }
