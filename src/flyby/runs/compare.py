"""Several methods side by side on one split: equal uploads are trained once, every rule is judged on the same parcels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flyby.engines.engine import held
from flyby.errors import BadInput
from flyby.runs.config import RunConfig
from flyby.runs.pipeline import locked, run


def compare(configs: dict[str, RunConfig], out: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """One run folder a method under ``out``, a shared store of uploads, and one report over all of them."""
    from flyby.report.report import write_report

    with locked(out), held(options.get("engine")):
        strange = sorted(
            p.name
            for p in out.iterdir()
            if p.name not in (*configs, "uploads", "report.html") and not p.name.startswith(".")
        )
        if strange:
            raise BadInput(f"{out} is not empty ({strange[0]!r} is in it); name a new folder with --out")
        results = {name: run(config, out / name, store=out / "uploads", **options) for name, config in configs.items()}
        write_report(out)
    return results
