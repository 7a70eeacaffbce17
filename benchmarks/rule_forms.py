"""Which form of the rule ``best``: what clients say is kept once, and every form is judged from that in seconds.

    python benchmarks/rule_forms.py listen runs/study/runs/KEY ... --out voices --device cuda
    python benchmarks/rule_forms.py choose voices/*.npz [--images held-out]
    python benchmarks/rule_forms.py scale voices/*.npz [--images held-out]

``listen`` opens finished runs and keeps, for the sites' held-out images and for the test images, every client's
cosines, how far its features stand out, and what it sent beside its weights: megabytes where the networks are hundreds.
For forms that are not written yet, the features themselves are kept too (NAME.features), of as many held-out images as
fit into 15 MB.
``choose`` gives these to the rule itself (``BestPredictor.weighed``) under a grid of its settings, and prints
accuracies, their mean over all files and the largest distance to the best form of any file. A rule is chosen on
held-out images. ``scale`` does the same for how sure it is: log-loss and calibration error of softmax(scale scores), by
which ``SURE`` was chosen.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyby.data.dataset import Dataset
from flyby.data.splits import Split
from flyby.fusion.ensembles.best import Best, BestPredictor, stands_out
from flyby.fusion.ensembles.experts import expert_votes
from flyby.fusion.quality import quality_of
from flyby.models import ModelSpec
from flyby.models.features import shown_of
from flyby.models.heads import between, shown_directions
from flyby.parcels.inbox import Inbox
from flyby.runs.config import RunConfig, data_of
from flyby.runs.folder import Run
from flyby.runs.server import held_out
from flyby.settings import build
from flyby.statistics import extras
from flyby.statistics.catalogue import EXTRAS

LARGEST = 15_000_000  # bytes of features
STEPS = 32767  # cosines are kept as 16-bit numbers
PARTS = {"held-out": "held", "test": "test"}
GRID: dict[str, tuple[Any, ...]] = {
    "seen": (0.0, 1.0, 2.0),
    "crowd": (0.0, 1.0, 2.0),
    "centre": (False, True),
    "enough": (None, 0.5, 1.0, 2.0),
    "exponent": (0.0, 0.5, 1.0),
}
SCALES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
ASIDE: tuple[dict[str, Any], ...] = (
    {"power": 0.5},
    {"calibrate": False, "enough": 1.0},
    {"seen": 0.0, "crowd": 0.0, "exponent": 0.0, "power": 0.5},  # that is experts-calibrated
)


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
    for name, data in parts.items():
        if data is None:
            continue
        images, labels = data.tensors()
        cosines, plain, centred = list[Tensor](), list[Tensor](), list[Tensor]()
        for item in sent:
            network = item.network().to(device).eval()
            mean, std = (table.to(device) for table in extras.sent(item, EXTRAS["moments"]).values())
            rows = shown_directions(network)
            for piece in torch.split(images, 2048):
                seen = shown_of(network, piece.to(device))
                cosines.append(between(seen, rows).cpu())
                plain.append(stands_out(seen, mean, std, rows).cpu())
                centred.append(stands_out(seen, mean, std, rows, centre=True).cpu())
        shape = len(sent), len(labels), len(sent.class_names)
        kept[f"{name}_labels"] = labels.numpy().astype(np.int16)
        kept[f"{name}_cosines"] = (torch.cat(cosines).reshape(shape) * STEPS).round().to(torch.int16).numpy()
        for word, dots in (("dots", plain), ("centred", centred)):
            kept[f"{name}_{word}"] = torch.cat(dots).reshape(shape).half().numpy()
    return kept


@torch.no_grad()
def look(folder: Path, device: str) -> dict[str, np.ndarray[Any, Any]]:
    """The features of some held-out images in every way that a client shows them, its class directions and moments."""
    run, split = Run(folder), Split.load(Run(folder).split)
    config = build(RunConfig, {k: v for k, v in run.asked().items() if k != "resolved"}, str(run.config))
    if not any(len(share.val) for share in split.shares.values()):
        return {}
    judges = held_out(data_of(config).load(), split)
    items = {item.manifest.sender: item for item in Inbox([run.parcel(name) for name in split.shares])}
    networks = {name: item.network() for name, item in items.items()}
    rows = {name: shown_directions(network).float() for name, network in networks.items()}
    numbers = sum(one.shape[0] * one.shape[2] for one in rows.values())
    images, labels = judges.tensors()
    step = -(-len(images) * numbers * 2 // LARGEST)
    kept = {"labels": labels[::step].numpy().astype(np.int16), "senders": np.array(list(networks))}
    for name, network in networks.items():
        seen = shown_of(network.to(device).eval(), images[::step].to(device)).cpu()
        kept |= {f"features_{name}": seen.numpy().astype(np.float16), f"rows_{name}": rows[name].numpy()}
        kept |= {f"{key}_{name}": one.numpy() for key, one in extras.sent(items[name], EXTRAS["moments"]).items()}
    return kept


def keep(folder: Path, path: Path, device: str) -> None:
    """Both files of a run, each under its name only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for end, arrays in ((".features", look(folder, device)), (".npz", listen(folder, device))):
        if arrays:
            part = path.with_suffix(".part.npz")
            np.savez_compressed(part, allow_pickle=False, **arrays)
            part.rename(path.with_suffix(end))


class Heard:
    """One file of voices, ready to be asked under many forms."""

    def __init__(self, path: Path, part: str) -> None:
        kept = np.load(path)
        self.name, self.counts = path.stem, torch.from_numpy(kept["counts"]).double()
        self.labels = torch.from_numpy(kept[f"{part}_labels"]).long()
        self.cosines = torch.from_numpy(kept[f"{part}_cosines"]).float() / STEPS
        self.dots = {
            word == "centred": torch.from_numpy(kept[f"{part}_{word}"]).float() for word in ("dots", "centred")
        }
        self.calibration = torch.from_numpy(kept["calibration"])
        shares = torch.from_numpy(kept["samples"]).double().sqrt()
        self.shares = (shares / shares.sum()).float()

    def accuracy(self, form: dict[str, Any]) -> float:
        return float((self.scores(form).argmax(1) == self.labels).double().mean())

    def scores(self, form: dict[str, Any]) -> Tensor:
        """Of the rule with these settings: those of its form, and ``power`` or ``enough`` of its votes."""
        shape = {name: value for name, value in form.items() if name not in ("power", "enough")}
        members, classes = self.counts.shape
        spec = ModelSpec(name="cnn-small", classes=classes, channels=1, size=(8, 8), head="prototype", width=0.1)
        predictor = BestPredictor(
            [spec] * members,
            [str(c) for c in range(classes)],
            form=shape,
            votes=expert_votes(self.counts, form.get("power", 1.0), enough=form.get("enough")).float(),
            calibration=self.calibration,
            kept={"shares": self.shares},
        )
        return predictor.weighed(self.cosines, self.dots[bool(form.get("centre"))])


def forms(grid: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def choose(paths: list[Path], part: str, shown: int, out: Path | None = None) -> None:
    files = [Heard(path, part) for path in paths]
    found = [(form, [round(100 * one.accuracy(form), 2) for one in files]) for form in (*forms(GRID), *ASIDE)]
    if out is not None:
        about = [f"{one.name} ({len(one.labels)} images)" for one in files]
        rows = [{**form, "images": part, "accuracy": dict(zip(about, row, strict=True))} for form, row in found]
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = [max(row[i] for _, row in found) for i in range(len(files))]
    print("best form of each file: " + ", ".join(f"{f.name} {b:.2f}" for f, b in zip(files, best, strict=True)))
    judged = [(fmean(row), max(b - a for a, b in zip(row, best, strict=True)), form, row) for form, row in found]
    for mean, behind, form, row in sorted(judged, key=lambda one: -one[0])[:shown]:
        settings = ",".join(f"{name}={value:g}" for name, value in form.items() if value is not None)
        print(f"{settings:52s} mean {mean:.2f}, behind at most {behind:.2f}: " + " ".join(f"{a:.1f}" for a in row))


def scale(paths: list[Path], part: str, out: Path | None = None) -> None:
    files, rows = [Heard(path, part) for path in paths], list[dict[str, Any]]()
    for times in SCALES:
        for one in files:
            chances = (times * one.scores({"enough": Best.enough}).double()).softmax(1)
            found = quality_of(chances, one.labels, [str(c) for c in range(chances.shape[1])])
            about = {"scale": times, "images": part, "uploads": one.name, "judged": len(one.labels)}
            rows.append(about | {"log_loss": found.log_loss, "calibration_error": found.calibration_error})
        mine = [row for row in rows if row["scale"] == times]
        means = (fmean(float(row[name]) for row in mine) for name in ("log_loss", "calibration_error"))
        print(f"{times:4g} times the scores: log-loss {next(means):.3f}, calibration error {next(means):.3f}")
    if out is not None:
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))


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
    second.add_argument("--out", type=Path, default=None, help="a file for all of them, a row per form")
    third = asked.add_parser("scale")
    third.add_argument("voices", type=Path, nargs="+")
    third.add_argument("--images", choices=PARTS, default="held-out")
    third.add_argument("--out", type=Path, default=None, help="a file for all figures, a row per file and scale")
    words = parser.parse_args()
    if words.verb == "scale":
        scale(words.voices, PARTS[words.images], words.out)
        return
    if words.verb == "choose":
        choose(words.voices, PARTS[words.images], words.shown, words.out)
        return
    words.out.mkdir(parents=True, exist_ok=True)
    for folder in words.runs:
        keep(folder, words.out / f"{folder.name}.npz", words.device)


if __name__ == "__main__":
    main()
