"""A ``Job`` is one site's training, as plain JSON-like data: enough for any process or machine to do it and get the
same bytes."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from flyby.data.dataset import DataBundle
from flyby.data.site import Site, site_of
from flyby.data.sources import load
from flyby.data.splits import Split
from flyby.data.views import ViewSettings
from flyby.errors import BadInput
from flyby.files import digest, write_text
from flyby.models import ModelSpec
from flyby.parcels import parcel
from flyby.runs.methods import objective_named
from flyby.training.loop import Counts, Row, TrainSettings, Work, at_once, training


class DataSettings(BaseModel):
    """Which data, and how it is read. ``holdout`` is the test share where the source has no test split of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "digits"
    size: int | None = None
    column: str | None = None
    holdout: float = 0.2

    def load(self, progress: bool = False) -> DataBundle:
        return load(self.name, size=self.size, holdout=self.holdout, column=self.column, progress=progress)


class Recipe(BaseModel):
    """All that decides a site's upload, resolved: two sites or two runs with equal recipes and equal data send equal
    bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: ModelSpec
    objective: str
    objective_settings: dict[str, Any]
    train: TrainSettings
    views: ViewSettings
    seed: int
    codec: str = "fp32"
    counts: Counts = "exact"
    epsilon: float = Field(1.0, gt=0, description="how exact noisy counts are")

    def key(self, split_hash: str) -> str:
        return digest({"recipe": self.model_dump(mode="json"), "split": split_hash})


class Job(BaseModel):
    """Train one site of a split and put its parcel at ``folder/SITE.parcel``, its history at ``folder/SITE.jsonl``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    site: str
    data: DataSettings
    split: Path
    recipe: Recipe
    device: str
    folder: Path
    key: str

    @property
    def parcel_path(self) -> Path:
        return self.folder / f"{self.site}.parcel"

    @property
    def rows_path(self) -> Path:
        return self.folder / f"{self.site}.jsonl"

    @property
    def checkpoint_path(self) -> Path:
        return self.folder / f"{self.site}.ckpt"

    def done(self) -> bool:
        """Whether this very upload is already there; one of another recipe in its place is an error, not a surprise."""
        if not (self.parcel_path.exists() and self.rows_path.exists()):
            return False
        if parcel.read_manifest(self.parcel_path).provenance.get("key") != self.key:
            raise BadInput(f"{self.parcel_path} was made by other settings; use another --out folder, or delete it")
        return True


@functools.lru_cache(maxsize=2)
def bundle_of(settings: DataSettings) -> DataBundle:
    return settings.load()


def split_at(path: Path) -> Split:
    return _split(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _split(path: Path, _stamp: int) -> Split:
    return Split.load(path)


def samples_of(job: Job) -> int:
    """How many images a job trains on."""
    return len(split_at(job.split).shares[job.site].train)


def performing(job: Job, on_epoch: Callable[[Row], None] | None = None, site: Site | None = None) -> Work[float]:
    """Do a job; returns its seconds. The parcel appears last, so its presence means that all is there. ``site`` is the
    job's data where it came some other way than from this machine's disk. Pauses as ``training`` does; ``perform`` is
    the same at once."""
    recipe = job.recipe
    site = site or site_of(bundle_of(job.data), split_at(job.split), job.site)
    kind = objective_named(recipe.objective)
    objective = kind(kind.settings_type(**recipe.objective_settings))
    trained = yield from training(
        site,
        recipe.spec,
        objective,
        recipe.train,
        recipe.views,
        recipe.seed,
        codec=recipe.codec,
        counts=recipe.counts,
        epsilon=recipe.epsilon,
        device=job.device,
        folder=job.folder,
        on_epoch=on_epoch,
        provenance={"key": job.key},
    )
    write_text(job.rows_path, "".join(json.dumps(row) + "\n" for row in trained.rows))
    parcel.write(trained.parcel, job.parcel_path)
    job.checkpoint_path.unlink(missing_ok=True)
    return trained.seconds


perform = at_once(performing)


def one_thread() -> None:
    """One thread a site on a CPU: sums are then taken in one order, so that every engine gives the same bytes."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
