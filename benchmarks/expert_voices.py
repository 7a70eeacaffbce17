"""What an expert says about classes it never saw, before and after: the picture of docs/best.md, from digits alone.

``python benchmarks/expert_voices.py docs/best-voices.svg`` trains two sites (one holds the digit 3 alone, one 3, 5 and
8) as FAFI's clients and as ``bearings``, and draws what the expert for 3 says, on average, about the test images of
every digit: 100 times its cosine, the calibrated form, and how far the images stand out. The means are printed too.
Under a minute of one CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from flyby.data.site import Part, Site, part_of
from flyby.data.sources import load
from flyby.drawing import grid
from flyby.fusion.ensembles.best import stands_out
from flyby.models import ModelSpec
from flyby.models.features import shown_of
from flyby.models.heads import shown_directions
from flyby.objectives import OBJECTIVES
from flyby.statistics.calibration import calibrated, cosines
from flyby.training.loop import train_site
from flyby.training.recipe import Recipe
from flyby.training.settings import TrainSettings

DIGIT, EPOCHS = 3, 30
SITES = {"3 alone": (3,), "3, 5, 8": (3, 5, 8)}
CLIENTS = {"FAFI": "salt", "turns": "bearings"}
SHORT = {"cosine": "cos", "calibrated": "cal.", "stands out": "size"}


def main(path: Path) -> None:
    torch.set_num_threads(1)
    bundle = load("digits", holdout=0.2)
    assert bundle.test is not None
    train, test = part_of(bundle.train), part_of(bundle.test)
    rows, values = [], []
    for place, classes in SITES.items():
        kept = torch.isin(train.labels, torch.tensor(classes))
        none = Part(train.images[:0], train.labels[:0])
        site = Site("site", Part(train.images[kept], train.labels[kept]), none, none, bundle.train.class_names)
        for client, name in CLIENTS.items():
            for form, voice in voices(site, name, test).items():
                means = [float(voice[test.labels == c, DIGIT].mean()) for c in range(10)]
                rows.append(f"{place}: {client} {SHORT[form]}")
                values.append([100 * max(0.0, mean) for mean in means])
                others = [v for c, v in enumerate(values[-1]) if c not in classes]
                own, unseen = values[-1][DIGIT], np.mean(others)
                print(f"{place}, {client}, {form}: {own:.0f} about 3, {unseen:.0f} about digits it never saw")
    label = "What the expert for 3 says, on average, about test images of every digit, times 100"
    drawn = grid("voices", label, rows, [str(c) for c in range(10)], np.array(values), lambda v: f"{v:.0f}", top=100)
    path.write_text(drawn + "\n")


def voices(site: Site, name: str, test: Part) -> dict[str, torch.Tensor]:
    """What a site's experts say of the test images, [N, C], in each of three forms."""
    kind = OBJECTIVES[name]
    settings = kind.settings_type(send=("moments",))
    spec = ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8))
    recipe = Recipe(
        spec=kind.adapt_spec(spec, settings),
        objective=name,
        objective_settings=settings,
        train=TrainSettings(**{**kind.defaults(settings), "epochs": EPOCHS}),
        views=kind.views((8, 8), mirror=False),
        seed=0,
    )
    item = train_site(site, recipe).parcel
    network = item.network().eval()
    said, rows = cosines(network, test.images), shown_directions(network)
    moments = item.extras["moments.mean"], item.extras["moments.std"]
    return {
        "cosine": said,
        "calibrated": calibrated(said[None], item.extras["calibration"][None])[0],
        "stands out": stands_out(shown_of(network, test.images), *moments, rows),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
