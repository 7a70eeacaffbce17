"""What a model, and each participant's own, is worth on test images. Test data comes here and nowhere earlier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyby.data.dataset import DataBundle
from flyby.data.site import Part, part_of
from flyby.data.splits import Split
from flyby.files import read_json, write_json
from flyby.fusion.evaluation import (
    LOOKS,
    accuracy,
    digest_of,
    own_accuracy,
    per_class,
    scores_of,
    weighted_figures,
)
from flyby.fusion.predictor import Predictor, Single
from flyby.parcels.inbox import Inbox
from flyby.rng import legacy_numpy
from flyby.runs.metrics import consistency
from flyby.runs.quality import closed_form, own_predictor

PROBE = 512  # images on which clients' features are compared
MANY = 20  # more clients than this are not compared pair by pair

Figures = dict[str, float]


@dataclass(frozen=True)
class Common:
    """Images that judge every node alike: the test and the validation images that came with the data. Nobody trains on
    them or chooses by them, and each node weighs them as its own classes: thousands, where its own are a few dozen."""

    part: Part
    name: str

    @classmethod
    def of(cls, bundle: DataBundle, device: str, most: int | None = None, seed: int = 0) -> Common | None:
        """``most`` keeps that many, drawn so that every class keeps its share; None where there are no such images."""
        parts = [part_of(data) for data in (bundle.test, bundle.validation) if data is not None]
        if not parts:
            return None
        images, labels = torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts])
        if most is not None and most < len(labels):
            rng, place = legacy_numpy(seed, "common images"), np.empty(len(labels))
            for c in range(bundle.train.classes):
                rows = rng.permutation(np.flatnonzero(labels.numpy() == c))
                place[rows] = (np.arange(len(rows)) + 0.5) / max(1, len(rows))
            kept = np.sort(np.argsort(place, kind="stable")[:most])
            images, labels = images[kept], labels[kept]
        return cls(Part(images, labels).to(device), digest_of(images))

    def __len__(self) -> int:
        return len(self.part)

    def chances(self, predictor: Predictor, device: str) -> Tensor:
        return predictor.chances(scores_of(predictor, self.part.images, device, self.name).double())

    def figures(self, predictor: Predictor, mix: list[int], device: str) -> Figures:
        return weighted_figures(self.chances(predictor, device), self.part.labels, mix)


@dataclass(frozen=True)
class Seen:
    """What one model is worth: on the common test images, in all and by class; and for some participants on their own
    images, with figures on the common ones weighted as their classes. ``right``: which test images it had right."""

    accuracy: float
    right: Tensor
    by_class: list[float | None]
    own: dict[str, float]
    common: dict[str, Figures]


class Judge:
    """Scores predictors on a run's test images. Features that a network gave once serve every later question."""

    def __init__(self, bundle: DataBundle, split: Split, device: str) -> None:
        assert bundle.test is not None
        self.bundle, self.split, self.device = bundle, split, device
        self.test = part_of(bundle.test)
        # Where nobody has test images of its own the common ones are all there is, and they are weighted already.
        alone = not any(len(share.test) for share in split.shares.values())
        self.common = None if alone else Common.of(bundle, device)

    def look(self, predictor: Predictor, names: Iterable[str] = ()) -> Seen:
        """One pass over the common images, and one over the own ones of each participant that is named."""
        if self.common is None:
            chances, scores = None, scores_of(predictor, self.test.images, self.device)
        else:
            chances = scores = self.common.chances(predictor, self.device)
        scores = scores[: len(self.test)]  # the common images begin with the test images
        by_class = per_class(scores, self.test.labels, self.bundle.train.classes)
        own, common = {}, {}
        for name in names:
            test, mix = self.split.shares[name].test, self.split.counts[name]
            if len(test):
                part = part_of(self.bundle.train, test)
                own[name] = accuracy(scores_of(predictor, part.images, self.device), part.labels)
            else:  # the common ones weighted as its classes
                own[name] = own_accuracy(by_class, mix)
            if chances is not None and self.common is not None:
                common[name] = weighted_figures(chances, self.common.part.labels, mix)
        right = scores.argmax(1) == self.test.labels.cpu()
        return Seen(accuracy(scores, self.test.labels), right, by_class, own, common)

    def judged(self, fused: Seen | None, sent: Inbox, locals_too: bool) -> dict[str, Any]:
        """All accuracies of a fused model that was looked at for all participants (None: everybody keeps its own), and
        of each participant's model alone."""
        alone = self.alone(sent) if fused is None or locals_too else {}
        accuracies = {name: seen.accuracy for name, seen in alone.items()}
        if fused is not None:
            overall, by_class, answers = fused.accuracy, fused.by_class, dict.fromkeys(self.split.shares, fused)
        else:
            overall, by_class = (
                sum(accuracies.values()) / len(accuracies),
                mean_of([s.by_class for s in alone.values()]),
            )
            answers = alone
        names = self.bundle.train.class_names
        found: dict[str, Any] = {"accuracy": overall, "per_client": {n: one.own[n] for n, one in answers.items()}}
        found["per_class"] = dict(zip(names, by_class, strict=True))
        if self.common is not None:
            found["by_round"] = {n: self.node(n, one, alone.get(n)) for n, one in answers.items()}
            shares = [one.common[n]["accuracy"] for n, one in answers.items() if one.common[n]]
            found["accuracy_common"] = sum(shares) / len(shares)
        return found | ({"local_accuracy": accuracies} if accuracies else {})

    def node(self, name: str, answer: Seen, alone: Seen | None) -> dict[str, Any]:
        """One participant as a row of nodes that meet has it: the fused model stands where their student does."""
        assert self.common is not None
        local = {} if alone is None else {"local": (alone.own[name], alone.common[name])}
        rounds = [{"student": (answer.own[name], answer.common[name])}]
        return series(len(self.split.shares[name].test), len(self.common), local, rounds)

    def alone(self, sent: Inbox) -> dict[str, Seen]:
        """Each participant's own model, in the split's order; what its sums alone give, where it sent those."""
        found = {}
        for place, (manifest, network) in enumerate(zip(sent.manifests, sent.networks(), strict=True)):
            single: Predictor = Single([manifest.spec], manifest.class_names, [network])
            if closed_form(manifest):
                single = own_predictor(sent.read(place), self.device)
            found[manifest.sender] = self.look(single, [manifest.sender])
        return {name: found[name] for name in self.split.shares}

    def consistency(self, sent: Inbox, seed: int | None, kept: Path) -> dict[str, float] | None:
        """How alike the clients became: a fact about the uploads, kept beside them, which all rules over them share."""
        if len(sent) <= MANY and not kept.exists():
            rows = range(0, len(self.test), -(-len(self.test) // PROBE))  # spread out: a test set may be sorted
            items = list(sent)
            probe = list(rows)
            features = [LOOKS.features(item.network(), self.test.images, self.device)[probe].float() for item in items]
            write_json(kept, consistency(items, features, seed))
        return read_json(kept) if kept.exists() else None


def mean_of(columns: list[list[float | None]]) -> list[float | None]:
    """The mean of several models' accuracy on each class; None for a class without test images."""
    return [
        sum(v for v in column if v is not None) / len(column) if column[0] is not None else None
        for column in zip(*columns, strict=True)
    ]


Facts = tuple[float, Figures]  # of one model: its own-test accuracy, and figures on the common images


def series(images: int, common: int, local: dict[str, Facts], rounds: list[dict[str, Facts]]) -> dict[str, Any]:
    """A node's figures as a result holds them: ``local`` alone, and a list by round for its student and its teacher.
    ``common`` has the accuracies on the common images and ``more`` the other figures there, in the same shape."""
    whose = [who for who in ("student", "teacher") if rounds and who in rounds[0]]

    def laid_out(of: Any) -> dict[str, Any]:
        alone = {who: of(*facts) for who, facts in local.items()}
        return alone | {who: [of(*one[who]) for one in rounds] for who in whose}

    found: dict[str, Any] = {"images": images, **laid_out(lambda own, _: own)}
    every = [*local.values(), *(facts for one in rounds for facts in one.values())]
    if every and all(figures for _, figures in every):
        found["common"] = {"images": common, **laid_out(lambda _, figures: figures["accuracy"])}
        others = [key for key in every[0][1] if key != "accuracy"]
        found["more"] = {key: laid_out(lambda _, figures, key=key: figures[key]) for key in others}
    return found
