"""Which form of the rule ``best``: what clients say is kept once, and every form is judged from that in seconds.

    python benchmarks/rule_forms.py listen runs/study/runs/KEY ... --out voices --device cuda
    python benchmarks/rule_forms.py choose voices/*.npz [--images held-out]

``listen`` opens finished runs and keeps, for the sites' held-out images and for the test images, every client's
cosines, the length of its features, and what it sent beside its weights: megabytes where the networks are hundreds. Of
clients that know a shift, all ways against all ways are kept too, for forms that are not written yet.
``choose`` gives these to the rule itself (``BestPredictor.combine``) under a grid of its settings, and prints
accuracies, their mean over all files and the largest distance to the best form of any file. A rule is chosen on
held-out images.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flyby.data.dataset import Dataset
from flyby.data.splits import Split
from flyby.fusion.ensembles.best import BestPredictor, lengths, usual_length
from flyby.fusion.ensembles.experts import expert_votes
from flyby.models import ModelSpec, Network
from flyby.models.features import shown_of
from flyby.models.heads import cosine, shown_directions
from flyby.parcels.inbox import Inbox
from flyby.runs.config import RunConfig, data_of
from flyby.runs.folder import Run
from flyby.runs.server import held_out
from flyby.settings import build

STEPS = 32767  # cosines are kept as 16-bit numbers
PARTS = {"held-out": "held", "test": "test"}
GRID: dict[str, tuple[Any, ...]] = {
    "crowd": (0.0, 0.5, 1.0, 2.0),
    "norms": (0.0, 0.5, 1.0, 2.0),
    "enough": (None, 300.0, 1000.0, 3000.0),
    "exponent": (0.0, 0.5, 1.0),
}


@torch.no_grad()
def listen(folder: Path, device: str) -> dict[str, np.ndarray[Any, Any]]:
    """What the clients of a finished run say of the held-out images, where there are any, and of the test images."""
    run = Run(folder)
    config = build(RunConfig, {k: v for k, v in run.asked().items() if k != "resolved"}, str(run.config))
    bundle, split = data_of(config).load(), Split.load(run.split)
    sent = Inbox([run.parcel(name) for name in split.shares])
    parts: dict[str, Dataset | None] = {"test": bundle.test}
    if any(len(share.val) for share in split.shares.values()):
        parts["held"] = held_out(bundle, split)
    kept: dict[str, Any] = {"counts": sent.counts.numpy(), "samples": np.array(sent.samples)}
    kept["calibration"] = torch.stack([item.extras["calibration"] for item in sent]).numpy()
    if all("moments.mean" in item.extras for item in sent):
        kept["usual"] = torch.stack([usual_length(item) for item in sent]).numpy()
    for name, data in parts.items():
        if data is None:
            continue
        images, labels = data.tensors()
        said, seen = [], []
        for item in sent:
            network = item.network().to(device).eval()
            pairs = [
                (cosine(network, looked).cpu(), lengths(looked).cpu())
                for looked in (shown_of(network, piece.to(device)) for piece in torch.split(images, 2048))
            ]
            said.append(torch.cat([one for one, _ in pairs]))
            seen.append(torch.cat([one for _, one in pairs]))
            if network.head.shift and name == "held":
                shown = [in_all_ways(network, piece.to(device)) for piece in torch.split(images, 2048)]
                kept[f"held_ways_{item.manifest.sender}"] = torch.cat(shown).cpu().numpy()
        kept[f"{name}_labels"] = labels.numpy().astype(np.int16)
        kept[f"{name}_cosines"] = (torch.stack(said) * STEPS).round().to(torch.int16).numpy()
        kept[f"{name}_lengths"] = torch.stack(seen).numpy()
    return kept


def in_all_ways(network: Network, images: Tensor) -> Tensor:
    """cos(f(way r of x), direction of c in way q), as 16-bit numbers [N, R, R, C]: whether the network can tell in
    which way an image is shown."""
    looked, rows = F.normalize(shown_of(network, images), dim=2), F.normalize(shown_directions(network).float(), dim=2)
    return (torch.einsum("nrd,qcd->nrqc", looked, rows) * STEPS).round().to(torch.int16)


class Heard:
    """One file of voices, ready to be asked under many forms."""

    def __init__(self, path: Path, part: str) -> None:
        kept = np.load(path)
        self.name, self.counts = path.stem, torch.from_numpy(kept["counts"]).double()
        self.labels = torch.from_numpy(kept[f"{part}_labels"]).long()
        self.cosines = torch.from_numpy(kept[f"{part}_cosines"]).float() / STEPS
        self.lengths = torch.from_numpy(kept[f"{part}_lengths"])
        self.calibration = torch.from_numpy(kept["calibration"])
        shares = torch.from_numpy(kept["samples"]).double().sqrt()
        self.kept = {"shares": (shares / shares.sum()).float()}
        if "usual" in kept:
            self.kept["usual"] = torch.from_numpy(kept["usual"])

    def accuracy(self, form: dict[str, Any]) -> float:
        """Of the rule with these settings: those of its form, and ``power`` or ``enough`` of its votes."""
        return self._right(self._scores(form))

    def of_some(self, form: dict[str, Any], holders: bool) -> float:
        """The same where of the crowd only the holders of a class speak for it, or only the others."""
        said = self.cosines * ((self.counts > 0) == holders)[:, None]
        crowd = torch.einsum("k,knc->nc", self.kept["shares"], said)
        return self._right(self._scores(form | {"crowd": 0.0}) + form["crowd"] * crowd)

    def _right(self, scores: Tensor) -> float:
        return float((scores.argmax(1) == self.labels).double().mean())

    def _scores(self, form: dict[str, Any]) -> Tensor:
        shape = {name: value for name, value in form.items() if name not in ("power", "enough")}
        members, classes = self.counts.shape
        spec = ModelSpec(name="cnn-small", classes=classes, channels=1, size=(8, 8), head="prototype", width=0.1)
        predictor = BestPredictor(
            [spec] * members,
            [str(c) for c in range(classes)],
            form=shape,
            votes=expert_votes(self.counts, form.get("power", 1.0), enough=form.get("enough")).float(),
            calibration=self.calibration,
            kept=self.kept,
        )
        voices: Tensor = self.cosines
        if shape.get("norms"):
            voices = torch.cat((voices, self.lengths[..., None]), 2)
        return predictor.combine(list(voices), torch.empty(0))


def forms(grid: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def choose(paths: list[Path], part: str, shown: int, out: Path | None = None) -> None:
    files = [Heard(path, part) for path in paths]
    grid = GRID if all("usual" in one.kept for one in files) else {**GRID, "norms": (0.0,)}
    found = [(form, [100 * one.accuracy(form) for one in files]) for form in forms(grid)]
    if out is not None:
        about = [{"voices": one.name, "images": part, "count": len(one.labels)} for one in files]
        rows = [
            {**facts, **form, "accuracy": round(value / 100, 6)}
            for form, row in found
            for facts, value in zip(about, row, strict=True)
        ]
        even = {"crowd": 2.0, "norms": 0.0, "enough": 1000.0, "exponent": 0.5}
        rows += [
            {**facts, **even, "crowd_of": who, "accuracy": round(one.of_some(even, who == "holders"), 6)}
            for who in ("holders", "others")
            for facts, one in zip(about, files, strict=True)
        ]
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = [max(row[i] for _, row in found) for i in range(len(files))]
    print("best form of each file: " + ", ".join(f"{f.name} {b:.2f}" for f, b in zip(files, best, strict=True)))
    rows = [(sum(row) / len(row), max(b - a for a, b in zip(row, best, strict=True)), form, row) for form, row in found]
    for mean, behind, form, row in sorted(rows, key=lambda one: -one[0])[:shown]:
        settings = ",".join(f"{name}={value:g}" for name, value in form.items() if value is not None)
        print(f"{settings:52s} mean {mean:.2f}, behind at most {behind:.2f}: " + " ".join(f"{a:.1f}" for a in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_subparsers(dest="verb", required=True)
    first = asked.add_parser("listen")
    first.add_argument("runs", type=Path, nargs="+")
    first.add_argument("--out", type=Path, required=True)
    first.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    second = asked.add_parser("choose")
    second.add_argument("voices", type=Path, nargs="+")
    second.add_argument("--images", choices=PARTS, default="held-out")
    second.add_argument(
        "--shown", type=int, default=12, help="so many forms are printed, those with the best mean first"
    )
    second.add_argument("--out", type=Path, default=None, help="a file for all of them, a row per form and file")
    words = parser.parse_args()
    if words.verb == "choose":
        choose(words.voices, PARTS[words.images], words.shown, words.out)
        return
    words.out.mkdir(parents=True, exist_ok=True)
    for folder in words.runs:
        np.savez_compressed(words.out / f"{folder.name}.npz", **listen(folder, words.device))


if __name__ == "__main__":
    main()
