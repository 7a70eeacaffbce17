"""Scores and accuracies. Test data comes here and nowhere earlier."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from flyby.data.classes import fitted
from flyby.data.dataset import Dataset
from flyby.data.site import Part, part_of
from flyby.errors import BadInput
from flyby.fusion.predictor import Predictor
from flyby.fusion.quality import calibration_error
from flyby.models import Network
from flyby.models.cost import at_once
from flyby.models.features import features_of, pooled_of
from flyby.models.heads import HEADS
from flyby.models.shifts import WAYS

BATCH = 512
VOICES = 256_000_000  # bytes of what a predictor's members said that are kept at once
REMEMBERED = 512_000_000  # bytes of features that are kept for the next rule over the same networks


class Looks:
    """What networks saw: features by (network, image set), so that a network looks at an image once, whoever asks. The
    oldest go where there are too many. Both names are digests of content, so an answer is never another's."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self.most, self.seen = most, OrderedDict[tuple[str, ...], Tensor]()

    @torch.no_grad()
    def features(
        self, network: Network, images: Tensor, device: torch.device | str, name: str = "", shown: bool = False
    ) -> Tensor:
        """``network.features`` (or what is ``shown``) of uint8 images [N, H, W, C], computed in batches and kept on the
        host. ``name`` is the images' digest where the caller has it: taking it costs as much as a small network."""
        if network.spec.backbone is not None:
            network.to(device).eval()
            return features_of(network, images, pooled=self._of_backbone(network, images, device, name)).cpu()
        shown = shown and bool(network.head.shift)
        key = (network.identity, name or digest_of(images), str(device), str(shown)) if network.identity else ()
        if key in self.seen:
            self.seen.move_to_end(key)
            return self.seen[key]
        network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        network.eval()
        pieces = torch.split(images, at_once(network.spec, BATCH, device))
        look = network.shown if shown else network.features
        return self._kept(key, torch.cat([look(network.spec.prepare(piece.to(device))).cpu() for piece in pieces]))

    def _of_backbone(self, network: Network, images: Tensor, device: torch.device | str, name: str) -> Tensor | None:
        """What the frozen part of its backbone gives, the same for all networks that stand on it; None: not kept."""
        assert network.spec.backbone is not None
        normalised = ", ".join(str(v.tolist()) for v in network.statistics("cpu"))
        key = (network.spec.backbone.model_dump_json(), normalised, name or digest_of(images), str(device))
        if key in self.seen:
            self.seen.move_to_end(key)
            return self.seen[key]
        found = pooled_of(network, images)
        return None if found is None else self._kept(key, found)

    def _kept(self, key: tuple[str, ...], found: Tensor) -> Tensor:
        if key and found.nbytes <= self.most:
            self.seen[key] = found
            while sum(one.nbytes for one in self.seen.values()) > self.most:
                self.seen.popitem(last=False)
        return found


LOOKS = Looks()


def digest_of(images: Tensor) -> str:
    pixels = images.cpu().contiguous()
    return f"{tuple(pixels.shape)} {hashlib.sha256(pixels.numpy().data).hexdigest()}"


@torch.no_grad()
def scores_of(predictor: Predictor, images: Tensor, device: torch.device | str = "cpu", name: str = "") -> Tensor:
    """The predictor's scores [N, C] on uint8 images [N, H, W, C], in pieces and kept on the host. Members speak
    one at a time, each over all images of a piece; what they said is then combined, batch by batch. ``name`` is the
    digest of the images, for a set that many predictors are asked about."""
    predictor = predictor.eval().to(device)
    batch = min(at_once(spec, BATCH, device) for spec in dict.fromkeys(predictor.specs))
    if type(predictor).combine is Predictor.combine:  # it has a ``forward`` of its own, and nothing to share
        return torch.cat([predictor(piece.to(device)).float().cpu() for piece in torch.split(images, batch)])
    scores, step = [], _piece(predictor)
    for place, piece in enumerate(torch.split(images, sizes(len(images), step, predictor.least))):
        said = []
        known = f"{name} {place} {step} {len(piece)}" if name else ""
        for k, network in enumerate(predictor.shelf or predictor.networks):
            seen = LOOKS.features(network, piece, device, known, predictor.shows)  # type: ignore[arg-type]
            parts = [part.to(device) for part in torch.split(seen, sizes(len(piece), batch, predictor.least))]
            said.append([predictor.voice(k, network, part).cpu() for part in parts])  # type: ignore[arg-type]
        asked = torch.split(piece, sizes(len(piece), batch, predictor.least))
        for voices, part in zip(zip(*said, strict=True), asked, strict=True):
            scores.append(predictor.combine([voice.to(device) for voice in voices], part.to(device)).float().cpu())
    return torch.cat(scores)


def sizes(count: int, batch: int, least: int = 1) -> list[int]:
    """How many images are asked about at once; a rest of fewer than ``least`` goes with those before it."""
    found = [min(batch, count - start) for start in range(0, count, batch)] or [0]
    return [*found[:-2], sum(found[-2:])] if len(found) > 1 and found[-1] < least else found


def _piece(predictor: Predictor) -> int:
    """As many images, in whole batches, as leave room for what all members see and say: each pass over them reads every
    network of a shelf again."""
    seen = ((spec.feature_dim(), HEADS[spec.head].shift) for spec in set(predictor.specs))
    widest = max(len(predictor.class_names), *(dim * (WAYS if shift and predictor.shows else 1) for dim, shift in seen))
    return max(1, VOICES // (4 * len(predictor.specs) * widest * BATCH)) * BATCH


@torch.no_grad()
def milliseconds(predictor: Predictor, device: torch.device | str = "cpu", batch: int = 64, repeats: int = 5) -> float:
    """The median time of one image, in batches, measured here and now."""
    predictor = predictor.eval().to(device)
    spec = predictor.specs[0]
    images = torch.zeros((batch, *spec.size, spec.channels), dtype=getattr(torch, spec.pixels), device=device)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        predictor(images).cpu()  # which waits for a GPU
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1000 / batch


def check_fit(predictor: Predictor, data: Dataset) -> None:
    if (predictor.size, predictor.channels) != (data.size, data.channels):
        raise BadInput(
            f"the model takes {predictor.size}x{predictor.channels} images, the data has {data.size}x{data.channels};"
            f" load it with --size {predictor.size[0]}"
        )


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels.cpu()).double().mean())


def per_class(scores: Tensor, labels: Tensor, classes: int) -> list[float | None]:
    """Accuracy on each class; None for a class without test images."""
    labels = labels.cpu()
    right = (scores.argmax(1) == labels).double()
    return [float(right[labels == c].mean()) if bool((labels == c).any()) else None for c in range(classes)]


def own_accuracy(by_class: Sequence[float | None], counts: Sequence[int]) -> float:
    """A client's own-test accuracy where it has no test part of its own: the common test set, weighted as its training
    classes."""
    pairs = [(a, n) for a, n in zip(by_class, counts, strict=True) if a is not None and n > 0]
    total = sum(n for _, n in pairs)
    return sum(a * n for a, n in pairs) / total if total else 0.0


def weighted_figures(chances: Tensor, labels: Tensor, mix: Sequence[int]) -> dict[str, float]:
    """What shares [N, C] that add up to one are worth on images that stand for a node's own: every class weighs as much
    as in its ``mix`` (counts [C]). Accuracy, log-loss, calibration error (15 bins of confidence), and with two classes
    the share of class 1 that is found where 5 % of class 0 raise a false alarm."""
    shares, labels = chances.double().cpu(), labels.cpu()
    seen = torch.bincount(labels, minlength=len(mix)).double()
    each = torch.where(seen > 0, torch.tensor(mix, dtype=torch.float64) / seen.clamp_min(1), 0.0)
    weights = each[labels]
    if not float(weights.sum()):
        return {}
    weights = weights / weights.sum()
    sure, answer = shares.max(1)
    right = (answer == labels).double()
    told = shares[torch.arange(len(labels)), labels].clamp_min(1e-12)
    found = {
        "accuracy": own_accuracy(per_class(shares, labels, len(mix)), mix),
        "log_loss": float(-(weights * told.log()).sum()),
        "calibration_error": calibration_error(sure, right, weights),
    }
    if len(mix) == 2 and bool((seen > 0).all()):
        logs = shares.clamp_min(torch.finfo(torch.float64).tiny).log()
        found["recall"] = recall_at(logs[:, 1] - logs[:, 0], labels == 1)
    return found


def recall_at(scores: Tensor, wanted: Tensor, alarms: float = 0.05) -> float:
    """The share of the wanted images above the threshold that at most ``alarms`` of the others lie above."""
    others = scores[~wanted].sort(descending=True).values
    threshold = others[int(alarms * len(others) + 1e-9)]
    return float((scores[wanted] > threshold).double().mean())


def evaluate_dataset(predictor: Predictor, data: Dataset, device: torch.device | str = "cpu") -> tuple[Tensor, Part]:
    """The scores of labelled images, and these images with the model's numbers for their classes."""
    check_fit(predictor, data)
    part = part_of(fitted(data, predictor.class_names)[0])
    return scores_of(predictor, part.images, device), part
