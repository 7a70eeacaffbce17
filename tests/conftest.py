"""What all tests share: a private cache, one thread, quiet hypothesis, an end when a worker dies, the digits, and
reports without pictures for those who ask."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Generator

import pytest
import torch
from hypothesis import HealthCheck, settings

from flyby.data import sources
from flyby.data.dataset import DataBundle
from flyby.drawing import Drawing

pytest_plugins = ("ending",)

# At import, so that subprocesses inherit it too: no test reads or fills the user's own cache.
os.environ["FLYBY_CACHE"] = tempfile.mkdtemp(prefix="flyby-tests-")
atexit.register(shutil.rmtree, os.environ["FLYBY_CACHE"], ignore_errors=True)

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of some two hundred processes compiles flyby again
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # onnxruntime tells its maker of every session otherwise
torch.set_num_threads(1)  # one order of sums: the same bytes everywhere
settings.register_profile(
    "flyby",
    deadline=None,
    max_examples=20,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("flyby")


@pytest.fixture(scope="session")
def digits() -> DataBundle:
    """The 1,797 handwritten digits (8x8, grey), a fifth of them for testing."""
    return sources.load("digits", holdout=0.2)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that do many runs and look at their numbers and files: reports are written with no pictures in them,
    which are most of what a small run costs."""
    monkeypatch.setattr(Drawing, "both", lambda self, key, label, /, *args, **kwargs: f"<svg><!-- {key} --></svg>")


LONG = ["flower", "golden", "ray", "packaging", "examples", "suite", "api", "run"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few, long tests first: one that is left to the end has a single worker wait for another."""
    ranks = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(LONG)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: the garbage collector need not look through them again and again, neither
    while they come nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
