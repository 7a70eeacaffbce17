"""What a site does: train on its own data and write the one parcel it sends. In a simulation it is a job of an
engine."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flyby.data.classes import after, prepared
from flyby.data.site import Site, whole_site
from flyby.data.splits import Split
from flyby.engines.jobs import Job
from flyby.errors import BadInput
from flyby.files import sole_writer
from flyby.machine import pick_device
from flyby.names import check_name
from flyby.parcels import parcel
from flyby.parcels.masks import Masking, read_round
from flyby.parcels.signing import PrivateKey, Trust, check_sender, sign
from flyby.runs.config import Plan, RunConfig, data_of, plan
from flyby.runs.estimate import affordable, estimate
from flyby.runs.folder import Run
from flyby.runs.like import check_alike
from flyby.runs.nodefolder import HELD_OUT
from flyby.runs.progress import Progress
from flyby.runs.quality import Seen, concerns, look, remember_images, unheard
from flyby.statistics.catalogue import named
from flyby.statistics.feature_sums import NAME
from flyby.statistics.masked_sums import masked
from flyby.statistics.temperature import NAME as TEMPERATURE
from flyby.training.loop import check_fit, train_site
from flyby.training.recipe import Recipe

log = logging.getLogger(__name__)


def jobs_of(todo: Plan, split: Split, run: Run, device: str, store: Path | None) -> list[Job]:
    """One job per site, in site order. Uploads of equal recipes over equal splits share one folder of the store."""
    origin = split.hash
    folder = (store / todo.recipe.key(origin)) if store else run.parcels
    shared = {"data": data_of(todo.config).absolute(), "split": run.split.resolve(), "origin": origin}
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


@dataclass(frozen=True)
class Manner:
    """How a real site trains, beside what: where, how loud, signed by whom, hidden under which masks. ``force`` writes
    over an older parcel; ``choose`` lets a machine without a GPU take a small network where none was named; ``like`` is
    the manifest of a site whose network it must be."""

    device: str = "auto"
    quiet: bool = False
    key: PrivateKey | None = None
    masking: Masking | None = None
    force: bool = True
    choose: bool = False
    like: parcel.Manifest | None = None
    classes: Sequence[str] | None = None
    synonyms: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Upload:
    """What was written, and what the site's own model is worth on its own images."""

    manifest: parcel.Manifest
    bytes: int
    site: Site
    seen: Seen
    notes: list[str]
    seconds: float


def train_parcel(config: RunConfig, out: Path, site_id: str, manner: Manner | None = None) -> Upload:
    """``flyby train``: one real site's data to one parcel, signed where there is a key and masked where there is a
    round. Some images are held out to judge by. Interrupted, the same command goes on where it stopped."""
    manner = manner or Manner()
    check_name(site_id)
    if manner.key is not None:
        check_sender(manner.key, site_id)  # now, not after an hour of training
    if manner.masking is not None:
        manner.masking.check(site_id)
    check_free(out, manner.force)
    device, started = pick_device(manner.device), time.perf_counter()
    bundle = prepared(data_of(config).load(progress=not manner.quiet), manner.synonyms, manner.classes)
    if manner.like is not None and manner.classes is None:
        bundle = prepared(bundle, None, after(manner.like.class_names, bundle.train))
    config = affordable(config, bundle, device) if manner.choose and manner.like is None else config
    recipe = plan(config, bundle).normalised(bundle.train).recipe
    if manner.like is not None:
        check_alike(recipe.spec, manner.like)
    recipe = recipe if manner.masking is None else for_masks(recipe)
    site = whole_site(bundle, site_id, HELD_OUT if config.split.val is None else config.split.val, config.seed)
    check_fit(site, recipe)
    bundle.tell()
    notes = concerns(site) + (unheard(config, recipe) if manner.like is None else [])
    for line in notes:
        log.warning("note: %s", line)
    if not manner.quiet:
        log.info("%s", estimate(recipe, len(site.train), device))
    with sole_writer(out):
        manifest, written, seen = _written(site, recipe, out, device, manner, config.method)
    remember_images(out, site.train.images)
    return Upload(manifest, written, site, seen, notes, time.perf_counter() - started)


def check_free(out: Path, force: bool) -> None:
    """Refuse to write over another parcel, unless that was asked for or a training goes on that was."""
    if out.is_dir():
        raise BadInput(f"{out} is a folder; name the .parcel file to write")
    if out.exists() and not force:
        begun = [
            p for p in out.parent.iterdir() if p.is_dir() and p.name.startswith(f".{out.name}.") and any(p.iterdir())
        ]
        if not begun:
            raise BadInput(f"{out} is there already, and a parcel is sent once; name another --out, or give --force")


def _written(
    site: Site, recipe: Recipe, out: Path, device: str, manner: Manner, method: str
) -> tuple[parcel.Manifest, int, Seen]:
    """The upload: what it says, its size, and what it is worth here. Checkpoints are keyed by the settings and the
    images: a changed command does not pick up another's."""
    work = out.parent / f".{out.name}.{recipe.key(f'{site.origin} {len(site.val)}')}"
    epochs, quiet = recipe.train.epochs, manner.quiet
    try:
        with Progress(f"training {site.id}", epochs, 1, quiet, images=len(site.train)) as bar:
            hooks: dict[str, Any] = {"on_epoch": bar.on_epoch, "on_batch": bar.on_batch}
            made = train_site(site, recipe, device=device, folder=work, method=method, **hooks).parcel
            seen = look(made, site, device)
        if manner.masking is not None:
            made = masked(made, manner.masking)
        elif seen.temperature is not None and recipe.train.dp_epsilon is None:  # which it is not accounted for in
            facts = {**made.manifest.meta, TEMPERATURE: seen.temperature}
            made = replace(made, manifest=made.manifest.model_copy(update={"meta": facts}))
        written = parcel.write(made if manner.key is None else sign(made, manner.key), out)
        shutil.rmtree(work, ignore_errors=True)
    finally:
        with contextlib.suppress(OSError):
            work.rmdir()  # it stays where it holds a checkpoint to go on from
    return made.manifest, written, seen
