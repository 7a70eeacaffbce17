"""Scores and accuracies. Test data comes here and nowhere earlier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyby.data.dataset import Dataset
from flyby.data.site import Part, part_of
from flyby.errors import BadInput
from flyby.fusion.predictor import Predictor

VOICES = 256_000_000  # bytes of what an ensemble's members said that are kept at once


@torch.no_grad()
def scores_of(predictor: Predictor, images: Tensor, device: torch.device | str = "cpu", batch: int = 512) -> Tensor:
    """The predictor's scores [N, C] on uint8 images [N, H, W, C], computed in pieces and kept on the host."""
    predictor = predictor.eval().to(device)
    if predictor.shelf is not None:
        return torch.cat(
            [_one_by_one(predictor, piece, device, batch) for piece in torch.split(images, _piece(predictor, batch))]
        )
    predictor.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return torch.cat([predictor(piece.to(device)).float().cpu() for piece in torch.split(images, batch)])


def _piece(predictor: Predictor, batch: int) -> int:
    """As many images, in whole batches, as leave room for what all members say about them: each pass over them reads
    every network again."""
    each = 4 * len(predictor.specs) * len(predictor.class_names)
    return max(1, VOICES // (each * batch)) * batch


def _one_by_one(predictor: Predictor, images: Tensor, device: torch.device | str, batch: int) -> Tensor:
    """Members read one at a time, each over all images; what they said is kept and then combined, batch by batch as all
    at once would."""
    assert predictor.shelf is not None
    said: list[Tensor] = []
    for network, spec in zip(predictor.shelf, predictor.specs, strict=True):
        network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        pieces = torch.split(images, batch)
        said.append(torch.cat([predictor.voice(network, spec.prepare(piece.to(device))).cpu() for piece in pieces]))
    batches = zip(*(torch.split(one, batch) for one in said), strict=True)
    return torch.cat([predictor.combine(torch.stack(voices).to(device)).float().cpu() for voices in batches])


def check_fit(predictor: Predictor, data: Dataset) -> None:
    if (predictor.size, predictor.channels) != (data.size, data.channels):
        raise BadInput(
            f"the model takes {predictor.size}x{predictor.channels} images, the data has {data.size}x{data.channels};"
            f" load it with --size {predictor.size[0]}"
        )
    if len(predictor.class_names) != data.classes:
        raise BadInput(f"the model knows {len(predictor.class_names)} classes, the data has {data.classes}")
    if predictor.class_names != data.class_names and sorted(predictor.class_names) == sorted(data.class_names):
        raise BadInput(
            "the model and the data number the same classes differently, so every score would be misread; order them"
            " alike"
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


def evaluate_dataset(predictor: Predictor, data: Dataset, device: torch.device | str = "cpu") -> tuple[Tensor, Part]:
    check_fit(predictor, data)
    part = part_of(data)
    return scores_of(predictor, part.images, device), part
