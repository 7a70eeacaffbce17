"""What a model, and each participant's own, is worth on test images. Test data comes here and nowhere earlier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flyby.data.dataset import DataBundle
from flyby.data.site import Part, part_of, site_of
from flyby.data.splits import Split
from flyby.files import read_json, write_json
from flyby.fusion.evaluation import LOOKS, accuracy, own_accuracy, per_class, scores_of
from flyby.fusion.predictor import Predictor, Single
from flyby.parcels.inbox import Inbox
from flyby.runs.metrics import consistency

PROBE = 512  # images on which clients' features are compared
MANY = 20  # more clients than this are not compared pair by pair

Score = tuple[float, list[float | None]]


class Judge:
    """Scores predictors on a run's test images. Features that a network gave once serve every later question."""

    def __init__(self, bundle: DataBundle, split: Split, device: str) -> None:
        assert bundle.test is not None
        self.bundle, self.split, self.device = bundle, split, device
        self.test = part_of(bundle.test)

    def score(self, predictor: Predictor, part: Part | None = None) -> Score:
        """(accuracy, accuracy per class) on the common test images, or on a part."""
        part = self.test if part is None else part
        scores = scores_of(predictor, part.images, self.device)
        return accuracy(scores, part.labels), per_class(scores, part.labels, self.bundle.train.classes)

    def own(self, name: str, predictor: Predictor, common: Score) -> float:
        """On a participant's own test images; where it has none, on the common ones weighted as its classes."""
        if len(self.split.shares[name].test):
            return self.score(predictor, site_of(self.bundle, self.split, name).test)[0]
        return own_accuracy(common[1], self.split.counts[name])

    def judged(self, predictor: Predictor | None, sent: Inbox, locals_too: bool) -> dict[str, Any]:
        """All accuracies of a fused model (None: everybody keeps its own), and of each participant's model alone."""
        alone = self.alone(sent) if predictor is None or locals_too else {}
        accuracies = {name: score[0] for name, (_, score) in alone.items()}
        if predictor is not None:
            common = self.score(predictor)
            own = {name: self.own(name, predictor, common) for name in self.split.shares}
            overall, by_class = common
        else:
            own = {name: self.own(name, *alone[name]) for name in self.split.shares}
            overall, by_class = sum(accuracies.values()) / len(accuracies), mean_of([s[1] for _, s in alone.values()])
        names = self.bundle.train.class_names
        found: dict[str, Any] = {"accuracy": overall, "per_client": own}
        found["per_class"] = dict(zip(names, by_class, strict=True))
        return found | ({"local_accuracy": accuracies} if accuracies else {})

    def alone(self, sent: Inbox) -> dict[str, tuple[Predictor, Score]]:
        """Each participant's own model and its score, in the split's order."""
        found = {}
        for manifest, network in zip(sent.manifests, sent.networks(), strict=True):
            single = Single([manifest.spec], manifest.class_names, [network])
            found[manifest.sender] = single, self.score(single)
        return {name: found[name] for name in self.split.shares}

    def consistency(self, sent: Inbox, seed: int, kept: Path) -> dict[str, float] | None:
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
