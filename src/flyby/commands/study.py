"""``flyby study``: a grid of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyby.commands.common import Device, Json, Quiet, say
from flyby.errors import BadInput


def study(
    name: Annotated[str | None, typer.Argument(help="A path to a .yaml, or a study of --list.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="The studies that come with flyby; nothing is run.")] = False,
    data_root: Annotated[Path | None, typer.Option(help="Folder in which the named datasets lie.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the rows and tables.")] = Path("results"),
    work: Annotated[Path, typer.Option(help="Folder for uploads and runs; may be deleted afterwards.")] = Path(
        "runs/study"
    ),
    limit: Annotated[
        float | None, typer.Option(min=0, help="Begin no cell that would likely end after this many seconds.")
    ] = None,
    merge: Annotated[
        list[Path] | None, typer.Option(help="Bring in rows of another machine first (repeatable).")
    ] = None,
    render: Annotated[bool, typer.Option("--render", help="Run nothing; only write the table.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="inline, processes or ray (cells at once, on many machines).")
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """A grid of runs: finished cells are never redone, uploads are shared by all server rules, the table has published
    values beside ours."""
    from flyby.study.catalogue import read_study, titles

    if listed:
        found = titles()
        width = max(map(len, found))
        say(
            [{"study": key, "title": title} for key, title in found.items()],
            as_json,
            "\n".join(f"{key:<{width}}  {title}" for key, title in found.items()),
        )
        return
    if name is None:
        raise BadInput("name a study: a path to a .yaml, or one that `flyby study --list` shows")
    from flyby.study.grid import merge as merge_rows
    from flyby.study.grid import missing, run_study, settled
    from flyby.study.tables import write_table

    name, grid = read_study(name)
    rows = results / f"{name}.jsonl"
    merged = merge_rows(rows, merge) if merge else 0
    before = len(settled(grid, rows))
    if render:
        done, left = 0, len(missing(grid, rows))
    else:
        done, left = run_study(
            grid, rows, work, data_root=data_root, engine=engine, device=device, limit=limit, quiet=quiet
        )
    table = write_table(grid, rows)
    facts = {"done": done, "before": before, "left": left, "merged": merged, "table": str(table)}
    say(facts, as_json, _told(done, before, left, merged if merge else None) + f"; table written to {table}")


def _told(done: int, before: int, left: int, merged: int | None) -> str:
    """What became of the cells: how many there are, and which were done now or before, or are left."""
    parts = [
        f"{number} {words}" for number, words in ((done, "done now"), (before, "done before"), (left, "left")) if number
    ]
    if len(parts) == 1:
        parts = [f"all {parts[0].split(' ', 1)[1]}"]
    found = [] if merged is None else [f"{merged} rows merged"]
    total = done + before + left
    return ", ".join([f"{total} cell{'s' * (total != 1)}", *parts, *found])
