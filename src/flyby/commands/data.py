"""``flyby data``: the kinds of data and splits there are, or what some data holds."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from flyby.commands.common import Json, Size, say


def data(
    name: Annotated[str | None, typer.Argument(help="Some data, as --data takes it: what is in it.")] = None,
    size: Size = None,
    as_json: Json = False,
) -> None:
    """The kinds of data there are and how to name them; the splits too. With NAME: what that data holds."""
    from flyby.data.sources import catalogue
    from flyby.data.splits import SPLITS

    if name is not None:
        _describe(name, size, as_json)
        return
    sources = catalogue()
    splits = [{"split": name, "rule": (rule.__doc__ or "").split("\n\n")[0].strip()} for name, rule in SPLITS.items()]
    if as_json:
        print(json.dumps({"sources": sources, "splits": splits}, indent=1))
        return
    _table(sources)
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
