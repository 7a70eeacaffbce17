"""A ``Job`` is one site's training, as plain JSON-like data: enough for any process or machine to do it and get the
same bytes."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from flyby.data.dataset import DataBundle
from flyby.data.settings import DataSettings
from flyby.data.site import Site, site_of
from flyby.data.splits import Split
from flyby.errors import BadInput
from flyby.files import write_text
from flyby.objectives import OBJECTIVES
from flyby.parcels import parcel
from flyby.training.loop import Pausing, Row, at_once, training
from flyby.training.recipe import Recipe
from flyby.training.settings import batch_size


class Job(BaseModel):
    """Train one site of a split and put its parcel at ``folder/SITE.parcel``, its history at ``folder/SITE.jsonl``.
    ``origin`` is the hash of the whole split."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    site: str
    data: DataSettings
    split: Path
    origin: str
    recipe: Recipe
    device: str
    folder: Path

    @property
    def key(self) -> str:
        """The name of the upload."""
        return self.recipe.key(self.origin)

    @property
    def parcel_path(self) -> Path:
        return self.folder / f"{self.site}.parcel"

    @property
    def rows_path(self) -> Path:
        return self.folder / f"{self.site}.jsonl"

    @property
    def checkpoint_path(self) -> Path:
        return self.folder / f"{self.site}.ckpt"

    @property
    def key_path(self) -> Path:
        """Which recipe over which data the upload is of, and that upload's digest. It stays here: a digest of data in a
        parcel would let whoever knows all images but one find out the last."""
        return self.folder / f"{self.site}.key"

    def done(self) -> bool:
        """Whether this very upload is already there; one of another recipe in its place is an error, not a surprise."""
        if not (self.parcel_path.exists() and self.rows_path.exists() and self.key_path.exists()):
            return False
        if self.key_path.read_text().split() != [self.key, parcel.read_manifest(self.parcel_path).digest]:
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


def views_by_batch(jobs: Iterable[Job]) -> dict[int, int]:
    """How many views jobs will look at, in batches of each size."""
    views = Counter[int]()
    for job in jobs:
        recipe, samples = job.recipe, samples_of(job)
        preferred = OBJECTIVES[recipe.objective].preferred_batch(recipe.objective_settings)
        batch = batch_size(recipe.train, preferred, samples)
        views[batch] += samples * recipe.views.views * recipe.train.epochs
    return dict(views)


def performing(job: Job, on_epoch: Callable[[Row], None] | None = None, site: Site | None = None) -> Pausing[float]:
    """Do a job; returns its seconds. The parcel appears last, so its presence means that all is there. ``site`` is the
    job's data where it came some other way than from this machine's disk. Pauses as ``training`` does; ``perform`` is
    the same at once."""
    site = replace(site or site_of(bundle_of(job.data), split_at(job.split), job.site), origin=job.origin)
    trained = yield from training(site, job.recipe, device=job.device, folder=job.folder, on_epoch=on_epoch)
    write_text(job.rows_path, "".join(json.dumps(row) + "\n" for row in trained.rows))
    write_text(job.key_path, f"{job.key} {trained.parcel.digest}\n")
    parcel.write(trained.parcel, job.parcel_path)
    job.checkpoint_path.unlink(missing_ok=True)
    return trained.seconds


perform = at_once(performing)
