"""``flyby methods``: the methods there are."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from flyby.commands.common import Json


def methods(as_json: Json = False) -> None:
    """The methods there are, what crosses the wire in each, what their halves need and provide."""
    from flyby.runs.methods import catalogue

    rows = catalogue()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for row in rows:
        for line in _card(row):
            print(textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))
    print("\nUploads: weights + extras for cnn-small (8x8 images, 10 classes). As data: flyby methods --json")


def _card(row: dict[str, Any]) -> Iterator[str]:
    """One method's facts in a few short lines. That weights are needed and provided goes without saying."""
    yield f"{row['method']:<20} {row['about']}"
    if row["exchanges"] == "nothing":
        return
    extra = f"{row['extra_bytes']} B" if row["extra_bytes"] < 1000 else f"{row['extra_bytes'] / 1e3:,.1f} kB"
    needs, provides = (", ".join(name for name in row[key] if name != "weights") for key in ("needs", "provides"))
    halves = f"{row['objective']} -> {row['fusion']}" if row["fusion"] else row["objective"]
    data = "data-free" if row["data_free"] else "needs proxy images"
    models = "models may differ" if row["mixed_architectures"] else "one architecture"
    yield f"    {halves}; {row['exchanges']}, {row['weight_bytes'] / 1e3:,.0f} kB + {extra}; {data}; {models}"
    yield f"    {f'needs {needs}; ' if needs else ''}provides {provides}"
    if row["paper"]:
        yield f"    {row['paper']}"
