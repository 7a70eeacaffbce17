"""``flyby study`` and ``flyby report``: grids of runs, and what runs look like on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyby.commands.common import Device, Json, Quiet, say


def report(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a folder of runs.")], as_json: Json = False
) -> None:
    """Write (again) the HTML report of a run, or of several side by side."""
    from flyby.report.report import write_report

    path = write_report(folder)
    say({"report": str(path)}, as_json, f"report: {path}")


def study(
    name: Annotated[str, typer.Argument(help="A study of the folder studies/, or a path to a .yaml.")],
    data_root: Annotated[Path | None, typer.Option(help="Folder in which the named datasets lie.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the rows and tables.")] = Path("results"),
    work: Annotated[Path, typer.Option(help="Folder for uploads and runs; may be deleted afterwards.")] = Path(
        "runs/study"
    ),
    limit: Annotated[
        float | None, typer.Option(help="Begin no cell that would likely end after this many seconds.")
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
    from flyby.study.grid import merge as merge_rows
    from flyby.study.grid import missing, read_study, run_study
    from flyby.study.tables import write_table

    name, grid = read_study(name)
    merged = merge_rows(results / f"{name}.jsonl", merge) if merge else 0
    done, left = (
        (0, len(missing(grid, results / f"{name}.jsonl")))
        if render
        else run_study(
            name, grid, results, work, data_root=data_root, engine=engine, device=device, limit=limit, quiet=quiet
        )
    )
    table = write_table(name, grid, results)
    facts = {"done": done, "left": left, "merged": merged, "table": str(table)}
    say(facts, as_json, f"{done} cells done, {left} left{f', {merged} rows merged' if merge else ''}; table: {table}")
