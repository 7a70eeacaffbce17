"""What a site does: train on its own data and write the one parcel it sends. In a simulation it is a job of an
engine."""

from __future__ import annotations

import contextlib
import logging
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
from flyby.parcels.masks import Masking, read_round
from flyby.parcels.signing import PrivateKey, Trust, check_sender, sign
from flyby.runs.config import Plan, RunConfig, plan
from flyby.runs.folder import Run
from flyby.runs.progress import Progress
from flyby.statistics.catalogue import named
from flyby.statistics.feature_sums import NAME
from flyby.statistics.masked_sums import masked
from flyby.training.loop import train_site
from flyby.training.recipe import Recipe

log = logging.getLogger(__name__)


def jobs_of(todo: Plan, split: Split, run: Run, device: str, store: Path | None) -> list[Job]:
    """One job per site, in site order. Uploads of equal recipes over equal splits share one folder of the store."""
    origin = split.hash
    folder = (store / todo.recipe.key(origin)) if store else run.parcels
    shared = {"data": todo.config.data.absolute(), "split": run.split.resolve(), "origin": origin}
    return [
        Job(site=name, recipe=todo.recipe, device=device, folder=folder.resolve(), **shared) for name in split.shares
    ]


def masking_of(round_file: Path | None, key: Path | None, trust: Path | None) -> Masking | None:
    """A site's part in a masked round, from the words of a command."""
    if round_file is None:
        if trust is not None:
            raise BadInput("--trust says whose keys a round names; give it with --mask")
        return None
    if key is None:
        raise BadInput("--mask needs --key, the private key whose .mask file went into the round")
    if trust is None:
        log.warning(
            "note: nobody says whose keys the round names; give --trust FILE, or its maker may have made up all other"
            " sites and see your sums"
        )
    return Masking.at(read_round(round_file, None if trust is None else Trust.load(trust)), key)


def for_masks(recipe: Recipe) -> Recipe:
    """The same with sums in float64, since fixed point has room for them."""
    settings = recipe.objective_settings
    if recipe.train.dp_epsilon is not None and recipe.train.dp_delta is None:
        raise BadInput("the default delta would tell how many images a masked site has; give --dp-delta, such as 1e-5")
    wanted = tuple(
        text if name != NAME or "dtype" in options else f"{text}{';' if options else ':'}dtype=float64"
        for text in settings.send
        for name, options in [named(text)]
    )
    return recipe.model_copy(update={"objective_settings": settings.model_copy(update={"send": wanted})})


def train_parcel(
    config: RunConfig,
    out: Path,
    site_id: str,
    *,
    device: str = "auto",
    quiet: bool = False,
    key: PrivateKey | None = None,
    masking: Masking | None = None,
) -> tuple[parcel.Manifest, int]:
    """``flyby train``: one real site's data to one parcel, signed where there is a key and masked where there is a
    round; its manifest and size. Interrupted, the same command goes on where it stopped."""
    check_name(site_id)
    if key is not None:
        check_sender(key, site_id)  # now, not after an hour of training
    if masking is not None:
        masking.check(site_id)
    if out.is_dir():
        raise BadInput(f"{out} is a folder; name the .parcel file to write")
    bundle = config.data.load(progress=not quiet)
    recipe = plan(config, bundle).normalised(bundle.train).recipe
    if masking is not None:
        recipe = for_masks(recipe)
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
            made = trained.parcel if masking is None else masked(trained.parcel, masking)
            written = parcel.write(made if key is None else sign(made, key), out)
            shutil.rmtree(work, ignore_errors=True)
        finally:
            with contextlib.suppress(OSError):
                work.rmdir()  # it stays where it holds a checkpoint to go on from
    return made.manifest, written
