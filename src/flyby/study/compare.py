"""One method, or several side by side on one split, with one report: equal uploads are trained once, and every rule is
judged on the same parcels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flyby.engines.engine import held
from flyby.errors import BadInput
from flyby.report.write import write_report
from flyby.runs.config import RunConfig
from flyby.runs.folder import Result, Run
from flyby.runs.pipeline import Options, run
from flyby.study.grid import check_cell


def compare(configs: Mapping[str, RunConfig], out: Path, options: Options | None = None) -> dict[str, Result]:
    """The results by method. One alone has ``out`` as its run folder; several have one each under it, a shared store of
    uploads, and one report over all of them."""
    options, folder = options or Options(), Run(out)
    if len(configs) == 1:
        ((name, config),) = configs.items()
        results = {name: run(config, out, options)}
        if not (options.resume and folder.report.exists()):
            write_report(out)
        return results
    for config in configs.values():
        check_cell(config)  # before the first of them is trained
    with folder.locked(), held(options.engine):
        known = (*configs, folder.uploads.name, folder.report.name)
        strange = sorted(p.name for p in out.iterdir() if p.name not in known and p.name[0] != ".")
        if strange:
            raise BadInput(f"{out} is not empty ({strange[0]!r} is in it); name a new folder with --out")
        shared = replace(options, store=folder.uploads)
        results = {name: run(config, out / name, shared) for name, config in configs.items()}
        for name in configs:
            if not Run(out / name).report.exists():
                write_report(out / name)
        write_report(out)
    return results
