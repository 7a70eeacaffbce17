"""flyby: one-shot federated learning. Every participant's model crosses the wire exactly once.

These names are the contract; each is imported when it is first used (``__init__.pyi`` has their types).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "load": "api",
    "train": "api",
    "train_all": "api",
    "fuse": "api",
    "orient": "api",
    "run": "api",
    "load_model": "api",
    "backbone": "api",
    "read_parcel": "api",
    "write_parcel": "api",
    "recipe_for": "api",
    "Model": "api",
    "Judged": "api",
    "Data": "data.federation",
    "Sites": "data.federation",
    "Dataset": "data.dataset",
    "Site": "data.site",
    "Split": "data.splits",
    "ModelSpec": "models.spec",
    "Parcel": "parcels.parcel",
    "Ledger": "parcels.ledger",
    "Objective": "objectives.base",
    "Fusion": "fusion.base",
    "Recipe": "training.recipe",
    "Run": "runs.folder",
    "Result": "runs.folder",
    "Options": "runs.pipeline",
    "FlybyError": "errors",
    "BadInput": "errors",
    "Diverged": "errors",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flyby' has no attribute {name!r}")
    value = getattr(import_module(f"flyby.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
