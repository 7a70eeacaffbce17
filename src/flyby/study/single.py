"""The same work as a run, one participant at a time: what a real site and a real server do."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flyby import parcel
from flyby.data.site import whole_site
from flyby.data.sources import load
from flyby.errors import BadInput, unknown
from flyby.files import file_digest
from flyby.fusion import Inbox, save_predictor
from flyby.ledger import Ledger
from flyby.methods import fusion_named, objective_named
from flyby.settings import build, parse_assignment
from flyby.study.config import RunConfig, pick_device, plan
from flyby.study.progress import Progress
from flyby.study.run import SERVER, check_names
from flyby.training import train_site


def train_parcel(config: RunConfig, out: Path, site_id: str, *, device: str = "auto", quiet: bool = False) -> tuple[parcel.Manifest, int]:
    """``flyby train``: one site's own data to one parcel. Interrupted, the same command goes on where it stopped."""
    check_names([site_id])
    if out.is_dir():
        raise BadInput(f"{out} is a folder; name the .parcel file to write")
    bundle = config.data.load(progress=not quiet)
    todo = plan(config, bundle)
    site = whole_site(bundle, site_id, config.split.val or 0.0, config.seed)
    recipe = todo.recipe
    kind = objective_named(recipe.objective)
    objective = kind(build(kind.settings_type, recipe.objective_settings, "objective"))
    key = recipe.key(bundle.train.digest)
    work = out.parent / f".{out.name}.{key}"  # keyed by the settings: a changed command does not pick up another's checkpoint
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write {out}: {error.strerror}; name another place with --out") from None
    try:
        with Progress(f"training {site_id}", recipe.train.epochs, 1, quiet) as bar:
            trained = train_site(
                site, recipe.spec, objective, recipe.train, recipe.views, recipe.seed,
                codec=recipe.codec, counts=recipe.counts, epsilon=recipe.epsilon, simulated=False, device=pick_device(device), folder=work, on_epoch=bar.on_epoch, provenance={"key": key},
            )  # fmt: skip
        written = parcel.write(trained.parcel, out)
        shutil.rmtree(work, ignore_errors=True)
    finally:
        with contextlib.suppress(OSError):
            work.rmdir()  # it stays where it holds a checkpoint to go on from
    return trained.parcel.manifest, written


def _replaceable(out: Path) -> None:
    """A folder is written whole, in place of an old one: nothing but an older model may be lost that way."""
    if out.is_dir() and any(out.iterdir()) and not (out / "model.json").exists():
        raise BadInput(f"{out} holds something else than a fused model; name a new folder with --out")


def fuse_parcels(
    paths: Sequence[Path],
    out: Path,
    rule: str,
    assignments: Iterable[str] = (),
    *,
    proxy: str | None = None,
    seed: int = 0,
    export: bool = True,
    device: str = "auto",
) -> dict[str, Any]:
    """``flyby fuse``: parcels to a deployable folder, each counted once in its ledger."""
    kind = fusion_named(rule)
    _replaceable(out)
    values = {}
    for text in assignments:
        key, value = parse_assignment(text)
        name = key.removeprefix("fusion.")
        if name not in kind.settings_type.model_fields:
            raise (
                unknown(f"{rule} setting", name, kind.settings_type.model_fields)
                if kind.settings_type.model_fields
                else BadInput(f"{rule} has no settings")
            )
        values[name] = value
    fusion = kind(build(kind.settings_type, values, "fusion"))
    inbox = Inbox(paths)
    ledger = Ledger()
    for path in paths:
        ledger.record(parcel.read_manifest(path).sender, SERVER, path.stat().st_size, file_digest(path))
    images = load(proxy, size=inbox.manifests[0].spec.size[0]).train if proxy else None
    work = out.parent / f".{out.name}.server"
    predictor = fusion.fuse(inbox, proxy=images, seed=seed, device=pick_device(device), work=work)
    shutil.rmtree(work, ignore_errors=True)
    card = {
        "fusion": rule,
        "sites": len(inbox),
        "senders": ", ".join(m.sender for m in inbox.manifests[:20]),
        "samples": sum(inbox.samples),
    }
    save_predictor(predictor, out, card, export=export)
    ledger.save(out / "ledger.json")
    return {
        "out": str(out),
        "kind": predictor.kind,
        "fusion": rule,
        "sites": len(inbox),
        "bytes_up": ledger.bytes_up(SERVER),
        "files": sorted(p.name for p in out.iterdir()),
    }
