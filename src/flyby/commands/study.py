"""``flyby study``: a grid of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyby.commands.common import Device, Formats, Json, Quiet, say
from flyby.errors import BadInput

if TYPE_CHECKING:
    from flyby.study.grid import Standing


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
    formats: Formats = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Also compare the lines on the same splits, with intervals and a sign test.")
    ] = False,
    against: Annotated[
        str | None, typer.Option(metavar="METHOD/RULE", help="With --pairs: compare with this line, not the best.")
    ] = None,
    figure: Annotated[
        bool, typer.Option("--figure", help="Also draw accuracy against alpha, or bars, as SVG and PDF.")
    ] = False,
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
    if against is not None and not pairs:
        raise BadInput("--against names what --pairs compares with; add --pairs")
    from flyby.study.grid import merge as merge_rows
    from flyby.study.grid import run_study, standing
    from flyby.study.writers import formats as chosen
    from flyby.study.writers import markdown, write_sheet

    asked = chosen(formats or ())
    name, grid = read_study(name)
    rows = results / f"{name}.jsonl"
    merged = merge_rows(rows, merge) if merge else 0
    now = standing(grid, rows)
    before, done = len(now.rows), 0
    if not render:
        done, _ = run_study(
            grid, rows, work, data_root=data_root, engine=engine, device=device, limit=limit, quiet=quiet
        )
        now = standing(grid, rows, now.cells)
    written, shown = _tables(now, rows, asked), list[str]()
    if pairs:
        from flyby.study.pairs import pairs as compared

        differences = compared(now, against)
        written += write_sheet(differences, rows.with_suffix(".pairs"), asked)
        shown = ["", markdown(differences).rstrip("\n")]
    if figure:
        from flyby.study.charts import write_charts

        written += write_charts(now, results)
    left = len(now.missing)
    facts = {"done": done, "before": before, "left": left, "merged": merged, "table": str(written[0])}
    facts |= {"files": [str(path) for path in written]} if len(written) > 1 else {}
    told = _told(done, before, left, merged if merge else None)
    say(facts, as_json, "\n".join([f"{told}; table written to {', '.join(map(str, written))}", *shown]))


def _tables(now: Standing, rows: Path, asked: list[str]) -> list[Path]:
    """The study's tables beside its rows, with the figure that some of them have."""
    from flyby.study.measures import draw
    from flyby.study.tables import sheet
    from flyby.study.writers import write_sheet

    written = write_sheet(sheet(now, rows), rows.with_suffix(""), asked)
    return written + (draw(now.rows, rows.with_suffix(".lambda.svg")) if "lambda" in now.study.shows else [])


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
