"""``flyby compare``: finished runs in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyby.commands.common import Formats, Json, say


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of runs.")],
    formats: Formats = None,
    out: Annotated[
        Path | None, typer.Option(metavar="NAME", help="Write NAME.md (.tex, .html, .csv) instead of showing it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Finished runs side by side: accuracy with its interval, bytes, seconds, and whether they stand on the same
    split."""
    from flyby.study.beside import beside, read_runs
    from flyby.study.writers import FORMATS, write_sheet
    from flyby.study.writers import formats as chosen

    asked = chosen(formats or ())
    sheet = beside(read_runs(folders))
    facts = {"runs": sheet.facts(), "notes": [line for part in sheet.parts for t in part.tables for line in t.below]}
    if out is not None:
        paths = [str(path) for path in write_sheet(sheet, out, asked)]
        say({**facts, "files": paths}, as_json, f"table written to {', '.join(paths)}")
        return
    say(facts, as_json, "\n".join(FORMATS[name][1](sheet).rstrip("\n") for name in asked))
