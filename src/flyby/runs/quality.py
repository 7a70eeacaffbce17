"""What a real site's own model is worth on images it did not learn from, the temperature that follows, and what a
server makes of the temperatures; and what people should be told before they believe a figure."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flyby.data.cache import root_of
from flyby.data.site import Part, Site
from flyby.errors import BadInput
from flyby.files import file_digest, write_bytes
from flyby.fusion import FUSIONS, Fusion
from flyby.fusion.base import Server
from flyby.fusion.closed.base import ClosedForm
from flyby.fusion.evaluation import scores_of
from flyby.fusion.predictor import Predictor, Single
from flyby.fusion.quality import Quality, quality_of
from flyby.objectives import OBJECTIVES
from flyby.parcels import parcel
from flyby.parcels.inbox import Inbox
from flyby.parcels.ledger import Ledger
from flyby.parcels.parcel import Manifest, Parcel
from flyby.runs.config import RunConfig
from flyby.runs.methods import method_of, rule_for, settings_for
from flyby.settings import build
from flyby.statistics.masked_sums import is_masked
from flyby.statistics.temperature import fused_temperature, temperature_of
from flyby.training.recipe import Recipe

log = logging.getLogger(__name__)

FEW = 20  # training images of a class below which little can be learned, and less be known
LOOKED = 2000  # training images that are enough to know the accuracy on all of them
SHORT = 8  # bytes by which an image is known on this machine


@dataclass(frozen=True)
class Seen:
    """What a site's own model says of its own images: those it learned from (some of them, if there are many), and
    those held out, with the shares that it gives each of them, and its test images, where it has some."""

    train: Quality
    held: Quality | None
    chances: Tensor | None
    temperature: float | None
    test: Quality | None = None


def own_predictor(item: Parcel, device: str = "cpu") -> Predictor:
    """The model that one upload alone gives: by its method's rule, where that can be had in a moment, so that it
    answers as the fused one will; else the network as it is."""
    method = method_of(item.manifest.method)
    kind = FUSIONS[method.fusion] if method is not None and method.fusion else None
    if method is not None and kind is not None and not kind.draws and kind.data_free:
        usual = settings_for(kind.name, [method.name])
        with contextlib.suppress(BadInput):  # some rules want several
            return kind(build(kind.settings_type, usual, "fusion")).fuse(Inbox([item]), Server(device=device))
    return Single([item.manifest.spec], item.manifest.class_names, [item.network(shared=True)])


def answering(path: Path, predictor: Predictor, device: str = "cpu") -> Predictor:
    """The model to judge where a path was named: of an upload that learned nothing, and only measured sums for a closed
    form, the network in it answers by chance; what its sums alone give does not, and masked ones give nothing."""
    if not path.is_file():
        return predictor
    item = parcel.read(path)
    if is_masked(item.manifest):
        raise BadInput(
            f"{path} is masked, so it says nothing alone; fuse all parcels of its round, and name that model"
        )
    rule = closed_form(item.manifest)
    return predictor if rule is None else tempered(own_predictor(item, device), [item.manifest], rule())


def closed_form(manifest: Manifest) -> type[ClosedForm] | None:
    """The rule that the sums of an upload are for; None where it has a network that learned, or sums under masks."""
    method = method_of(manifest.method)
    rule = FUSIONS[method.fusion] if method is not None and method.fusion else None
    return rule if rule is not None and issubclass(rule, ClosedForm) and not is_masked(manifest) else None


def look(item: Parcel, site: Site, device: str) -> Seen:
    """Figures on the site's own images; nothing of it is sent but the temperature."""
    predictor = own_predictor(item, device)
    some = torch.linspace(0, len(site.train) - 1, min(LOOKED, len(site.train))).round().long()
    train, _ = _judged(predictor, Part(site.train.images[some], site.train.labels[some]), site.class_names, device)
    test = _judged(predictor, site.test, site.class_names, device)[0] if len(site.test) else None
    if not len(site.val):
        return Seen(train, None, None, None, test)
    held, chances = _judged(predictor, site.val, site.class_names, device)
    raw = predictor.raw_chances(scores_of(predictor, site.val.images, device).double())
    return Seen(train, held, chances, temperature_of(raw, site.val.labels, predictor.temperature), test)


def _judged(predictor: Predictor, part: Part, names: Sequence[str], device: str) -> tuple[Quality, Tensor]:
    chances = predictor.chances(scores_of(predictor, part.images, device).double())
    return quality_of(chances, part.labels, names), chances


def concerns(site: Site) -> list[str]:
    """What makes a site's own figures, or its model, worth less than they look."""
    counts = dict(zip(site.class_names, site.counts, strict=True))
    held = {name: n for name, n in counts.items() if n}
    found = []
    if len(held) == 1:
        found.append(
            f"all {len(site.train)} images are of one class ({next(iter(held))}), so accuracy here says nothing; use"
            " bearings, best or a closed form (ridge, lda), which can take such a site in"
        )
    few = [f"{name} {n}" for name, n in sorted(held.items(), key=lambda pair: pair[1]) if n < FEW]
    if few:
        more = f" and {len(few) - 5} more" if len(few) > 5 else ""
        found.append(f"few images to learn from: {', '.join(few[:5])}{more}; {FEW} of a class are little already")
    return found


def unheard(config: RunConfig, recipe: Recipe) -> list[str]:
    """What was asked of a method that trains nothing and changes nothing, and a network that tells it little."""
    if OBJECTIVES[recipe.objective].trains:
        return []
    found = []
    if idle := [key for key in config.train if not key.startswith("dp_")]:
        verb = "has" if len(idle) == 1 else "have"
        found.append(f"{config.method} trains nothing, so train.{', train.'.join(idle)} {verb} no effect")
    if recipe.spec.backbone is None:
        found.append(
            f"{config.method} trains nothing, and {recipe.spec.name} has learned nothing yet; for photographs name a"
            " network that has, as in --backbone efficientnet-lite0"
        )
    return found


# -- at the server


def tempered(predictor: Predictor, manifests: Sequence[Manifest], rule: Fusion) -> Predictor:
    """The predictor with the sites' fused temperature, if they measured theirs by this very rule."""
    with contextlib.suppress(BadInput):
        found = fused_temperature(manifests)
        if found is not None and rule_for(m.method for m in manifests) == rule.name:
            predictor.temperature, predictor.measured = float(f"{found:.6g}"), True
    return predictor


def started_apart(manifests: Sequence[Manifest], rule: Fusion) -> str:
    """Why the mean of these weights is worth little: their networks began at different places. Empty where they did
    not, or where the rule does not mind."""
    spec = manifests[0].spec
    frozen = spec.backbone is not None and spec.backbone.tune == "head"
    if rule.heterogeneous or rule.draws or isinstance(rule, ClosedForm) or rule.name == "ot" or frozen:
        return ""
    seeds = {m.sender: m.provenance.get("seed") for m in manifests}
    known = {who: seed for who, seed in seeds.items() if isinstance(seed, int)}
    own = [m.sender for m in manifests if isinstance(t := m.provenance.get("train"), dict) and t.get("init") == "own"]
    if len(set(known.values())) > 1:
        first = next(iter(known))
        other = next(who for who, seed in known.items() if seed != known[first])
        why = f"{first} was trained with --seed {known[first]} and {other} with --seed {known[other]}"
    elif own and len(manifests) > 1:
        why = f"{own[0]} was trained with train.init=own"
    else:
        return ""
    return (
        f"WARNING: {why}, so their networks began from different weights, and {rule.name} of them may know nothing;"
        " train all sites alike (flyby train --like a.parcel), or use --fusion ensemble"
    )


# -- what was trained on here


def _marks(images: Tensor) -> list[bytes]:
    return [hashlib.sha256(image.contiguous().numpy().tobytes()).digest()[:SHORT] for image in images.cpu()]


def remember_images(path: Path, images: Tensor) -> None:
    """Note in the cache folder of this machine, and nowhere else, which images went into a parcel."""
    with contextlib.suppress(BadInput, OSError):  # it is a courtesy
        write_bytes(root_of(None) / "trained" / file_digest(path), b"".join(_marks(images)))


def trained_on(model: Path, images: Tensor) -> int:
    """How many of these images a parcel, or a parcel that went into a model, was trained on, as far as this machine
    knows: it must have been trained here."""
    digests = [file_digest(model)] if model.is_file() else _crossed(model)
    known: set[bytes] = set()
    for digest in digests:
        path = root_of(None) / "trained" / digest
        if path.is_file():
            raw = path.read_bytes()
            known.update(raw[at : at + SHORT] for at in range(0, len(raw), SHORT))
    return sum(mark in known for mark in _marks(images)) if known else 0


def _crossed(folder: Path) -> list[str]:
    path = next((p for p in (folder / "ledger.json", folder / "global" / "ledger.json") if p.is_file()), None)
    try:
        return [] if path is None else [c.digest for c in Ledger.load(path).crossings if c.digest.isalnum()]
    except BadInput:
        return []
