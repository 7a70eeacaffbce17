"""``flyby report``: what runs look like on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyby.commands.common import Json, say


def report(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a folder of runs.")], as_json: Json = False
) -> None:
    """Write (again) the HTML report of a run, or of several side by side."""
    from flyby.report.write import write_report

    path = write_report(folder)
    say({"report": str(path)}, as_json, f"report: {path}")
