"""What a site does: train on its own data and write the one parcel it sends. In a simulation it is a job of an
engine."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from flyby.data.site import whole_site
from flyby.data.splits import Split
from flyby.engines.jobs import Job
from flyby.errors import BadInput
from flyby.files import sole_writer
from flyby.machine import pick_device
from flyby.names import check_name
from flyby.parcels import parcel
from flyby.parcels.signing import PrivateKey, check_sender, sign
from flyby.runs.config import Plan, RunConfig, plan
from flyby.runs.folder import Run
from flyby.runs.progress import Progress
from flyby.training.loop import train_site


def jobs_of(todo: Plan, split: Split, run: Run, device: str, store: Path | None) -> list[Job]:
    """One job per site, in site order. Uploads of equal recipes over equal splits share one folder of the store."""
    origin = split.hash
    folder = (store / todo.recipe.key(origin)) if store else run.parcels
    shared = {"data": todo.config.data.absolute(), "split": run.split.resolve(), "origin": origin}
    return [
        Job(site=name, recipe=todo.recipe, device=device, folder=folder.resolve(), **shared) for name in split.shares
    ]


def train_parcel(
    config: RunConfig,
    out: Path,
    site_id: str,
    *,
    device: str = "auto",
    quiet: bool = False,
    key: PrivateKey | None = None,
) -> tuple[parcel.Manifest, int]:
    """``flyby train``: one real site's data to one parcel, signed where there is a key; its manifest and size.
    Interrupted, the same command goes on where it stopped."""
    check_name(site_id)
    if key is not None:
        check_sender(key, site_id)  # now, not after an hour of training
    if out.is_dir():
        raise BadInput(f"{out} is a folder; name the .parcel file to write")
    bundle = config.data.load(progress=not quiet)
    recipe = plan(config, bundle).normalised(bundle.train).recipe
    site = whole_site(bundle, site_id, config.split.val or 0.0, config.seed)
    # Keyed by the settings: a changed command does not pick up another's checkpoint.
    work = out.parent / f".{out.name}.{recipe.key(site.origin)}"
    with sole_writer(out):
        try:
            with Progress(f"training {site_id}", recipe.train.epochs, 1, quiet) as bar:
                trained = train_site(
                    site,
                    recipe,
                    device=pick_device(device),
                    folder=work,
                    on_epoch=bar.on_epoch,
                    method=config.method,
                )
            written = parcel.write(trained.parcel if key is None else sign(trained.parcel, key), out)
            shutil.rmtree(work, ignore_errors=True)
        finally:
            with contextlib.suppress(OSError):
                work.rmdir()  # it stays where it holds a checkpoint to go on from
    return trained.parcel.manifest, written
