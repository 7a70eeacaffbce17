"""``flyby data``: the kinds of data and splits there are."""

from __future__ import annotations

import json
from typing import Any

from flyby.commands.common import Json


def data(as_json: Json = False) -> None:
    """The kinds of data there are and how to name them; the splits too."""
    from flyby.data.sources import catalogue
    from flyby.data.splits import SPLITS

    sources = catalogue()
    splits = [{"split": name, "rule": (rule.__doc__ or "").split("\n\n")[0].strip()} for name, rule in SPLITS.items()]
    if as_json:
        print(json.dumps({"sources": sources, "splits": splits}, indent=1))
        return
    _table(sources)
    _table(splits)


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
