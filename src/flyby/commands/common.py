"""What the commands share: options that mean the same everywhere, and one way to answer."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, e.g. train.lr=0.01 (repeatable)."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Compiled = Annotated[
    str | None,
    typer.Option("--compile", help="How a GPU takes training steps: auto, off, graph or full; as train.compile."),
]
Size = Annotated[int | None, typer.Option(help="Resize images to this many pixels a side.")]
Deadline = Annotated[
    str | None, typer.Option(metavar="DURATION", help="With --watch: wait no longer than this, e.g. 90s, 10m, 2h, 1d.")
]
Expect = Annotated[
    str | None,
    typer.Option(
        metavar="N|NAMES", help="With --watch: go on as soon as so many sites, or those with these names, are there."
    ),
]
Poll = Annotated[
    str, typer.Option(metavar="DURATION", help="With --watch: the longest pause between two looks at the folder.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def say(value: Any, as_json: bool, text: str) -> None:
    """Answer on stdout: the value as JSON, or a text for people."""
    print(json.dumps(value, indent=1) if as_json else text)


def compiling(settings: list[str] | None, compiled: str | None) -> list[str]:
    """The assignments of --set, with that of --compile."""
    return [*(settings or ()), *([f'train.compile="{compiled}"'] if compiled else [])]
