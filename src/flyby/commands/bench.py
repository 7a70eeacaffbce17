"""``flyby bench``: the speed of the real training loop against its limit and against an ordinary script, and how work
grows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flyby.commands.common import Device, Json, Quiet, say


def bench(
    model: Annotated[str | None, typer.Option(help="Architecture; resnet18 on a GPU, cnn-small on a CPU.")] = None,
    size: Annotated[int | None, typer.Option(help="Pixels a side; 32 on a GPU, 16 on a CPU.")] = None,
    batch: Annotated[int | None, typer.Option(help="Images a step; 512 on a GPU, 64 on a CPU.")] = None,
    seconds: Annotated[float, typer.Option(help="How long each loop is measured.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Into how many interleaved turns.")] = 5,
    steps: Annotated[int | None, typer.Option(help="Steps in an epoch; 20.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes of the script's DataLoader; as many as cores, 16 at most.")
    ] = None,
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        typer.Option(
            help="Of the limit and of flyby; auto is bf16 on a GPU, and for large networks on a CPU that has it."
        ),
    ] = "auto",
    compile: Annotated[
        Literal["auto", "off", "graph", "full"],
        typer.Option(help="Of the limit and of flyby, as train.compile of a run."),
    ] = "auto",
    only: Annotated[str, typer.Option(help="Some of plain,salt,aurora.")] = "",
    growth: Annotated[
        Literal["clients", "neighbours", "bytes"] | None, typer.Option(help="Measure instead how work grows with this.")
    ] = None,
    points: Annotated[str, typer.Option(help="Where growth is measured, e.g. 1,4,16.")] = "",
    engines: Annotated[str, typer.Option(help="Of --growth clients, e.g. inline,processes.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="A folder for the JSON, the table and the figure (SVG and PNG).")
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure flyby's training loop in one run against the bare step of the same network and against an ordinary
    DataLoader script."""
    from flyby.bench import figures, measure
    from flyby.bench import growth as growing

    facts: dict[str, Any]
    wanted = measure.Wanted(device, model, size, batch, precision, compile, workers, steps)
    if growth:
        facts = growing.grow(growth, wanted, points, _words(engines))
        text, name = growing.describe(facts), f"bench-{growth}"
    else:
        facts = measure.bench(wanted.cases(_words(only)), seconds, rounds)
        text, name = measure.describe(facts), "bench"
    if out:
        files = measure.keep(facts, *figures.draw(facts), text, out, name)
        text += f"\nwritten: {', '.join(str(path) for path in files)}"
    say(facts, as_json, text)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
