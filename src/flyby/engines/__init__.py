"""Where ``train_site`` runs. Every engine gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flyby.engines.inline import run_inline
from flyby.engines.jobs import DataSettings, Job, Recipe
from flyby.engines.processes import run_processes
from flyby.errors import unknown
from flyby.training import Row

ENGINES: dict[str, Callable[[Sequence[Job], Callable[[Row], None]], None]] = {"inline": run_inline, "processes": run_processes}


def engine_named(name: str) -> Callable[[Sequence[Job], Callable[[Row], None]], None]:
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    return ENGINES[name]


__all__ = ["ENGINES", "DataSettings", "Job", "Recipe", "engine_named"]
