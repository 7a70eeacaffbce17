"""What all tests share: a private cache, one thread, quiet hypothesis, and the digits."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings

from flyby.data import sources
from flyby.data.dataset import DataBundle

# At import, so that subprocesses inherit it too: no test reads or fills the user's own cache.
os.environ["FLYBY_CACHE"] = tempfile.mkdtemp(prefix="flyby-tests-")
atexit.register(shutil.rmtree, os.environ["FLYBY_CACHE"], ignore_errors=True)

os.environ["OMP_NUM_THREADS"] = "1"
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
