"""``flyby data``: the kinds of data and splits there are, or what some data holds."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from flyby.commands.common import Json, Size, note, say

# Where the sets of the papers come from. flyby fetches only what is named as hf:..., and keeps none of them.
HUB = "pip install 'flyby[hub]', then --data hf:"
OWN = "one folder per class, the images of that class in it: --data FOLDER; or a table of path,label: --data FILE.csv"
KAGGLE = "Kaggle: {}; unpack it{}, then --data FOLDER"
PUBLIC = (
    ("your own images", "photographs, scans or tiles of any size (docs/data.md)", OWN),
    ("digits", "1,797 images of 8x8, 10 classes", "nothing to get: --data digits"),
    ("CIFAR-10", "50,000 and 10,000 images of 32x32, 10 classes", f"{HUB}uoft-cs/cifar10"),
    ("CIFAR-100", "50,000 and 10,000 images of 32x32, 100 classes", f"{HUB}uoft-cs/cifar100"),
    ("SVHN", "73,257 and 26,032 images of 32x32, 10 classes", f"{HUB}ufldl-stanford/svhn/cropped_digits"),
    (
        "Hurricane",
        "10,000, 2,000 and 2,000 satellite images of 128x128, damage or none (Cao and Choe)",
        KAGGLE.format(
            "satellite-images-of-hurricane-damage", ", call train_another train and validation_another validation"
        ),
    ),
    (
        "Wildfire",
        "30,250, 6,300 and 6,300 satellite images of 350x350, wildfire or none (Aaba)",
        KAGGLE.format("wildfire-prediction-dataset", "") + " --size 64",
    ),
)


def data(
    name: Annotated[str | None, typer.Argument(help="Some data, as --data takes it: what is in it.")] = None,
    size: Size = None,
    as_json: Json = False,
) -> None:
    """The kinds of data there are, how to name them and where to get some; the splits too. With NAME: what that data
    holds."""
    from flyby.data.sources import catalogue
    from flyby.data.splits import SPLITS

    if name is not None:
        _describe(name, size, as_json)
        return
    sources = catalogue()
    rules = {name: (rule.__doc__ or "").split("\n\n")[0] for name, rule in SPLITS.items()}
    splits = [{"split": name, "rule": " ".join(rule.split())} for name, rule in rules.items()]
    public = [{"set": name, "what": what, "how to get it": how} for name, what, how in PUBLIC]
    if as_json:
        print(json.dumps({"sources": sources, "public": public, "splits": splits}, indent=1))
        return
    _table(sources)
    lines = (f"{name}: {what}\n    {how}" for name, what, how in PUBLIC)  # each way on a line of its own, to be copied
    print("\nwhere to get some:", *lines, "", sep="\n")
    _table(splits)


def _describe(name: str, size: int | None, as_json: bool) -> None:
    """Shapes, classes and the statistics of each channel, with the words that give them to every site."""
    from flyby.data.dataset import channel_statistics
    from flyby.data.sources import load

    bundle = load(name, size=size)
    train = bundle.train
    mean, std = channel_statistics(train)
    if train.pixels == "uint8":  # the units of a spec
        mean, std = (tuple(round(value / 255, 4) for value in numbers) for numbers in (mean, std))
    height, width = train.size
    parts = {"train": bundle.train, "validation": bundle.validation, "test": bundle.test}
    counts = {part: len(held) for part, held in parts.items() if held is not None}
    facts = {
        "data": name,
        "images": counts,
        "shape": [height, width, train.channels],
        "dtype": str(train.images.dtype),
        "classes": dict(zip(train.class_names, train.counts(), strict=True)),
        "mean": list(mean),
        "std": list(std),
        "broken": list(bundle.broken),
    }
    note(bundle.notes)
    words = [f"--set model.{key}={json.dumps(facts[key], separators=(',', ':'))}" for key in ("mean", "std")]
    lines = [
        f"{name}: {', '.join(f'{count} {part}' for part, count in counts.items())} images,"
        f" {height}x{width}x{train.channels} {train.images.dtype}",
        *(f"  {label:<20} {count}" for label, count in zip(train.class_names, train.counts(), strict=True)),
        "each channel's mean and standard deviation, as the words that give them to a training:",
        " ".join(words),
    ]
    say(facts, as_json, "\n".join(lines))


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(rows[0]):
        table.add_column(column, overflow="fold", no_wrap=i == 0)  # a name must stay one word, to be copied
    for row in rows:
        table.add_row(*(Text("-" if value is None else str(value)) for value in row.values()))
    Console().print(table)
