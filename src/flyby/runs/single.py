"""The same work as a run, one participant at a time: what a real site and a real server do."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flyby.data.site import Part, part_of, whole_site
from flyby.data.sources import load
from flyby.errors import BadInput, unknown
from flyby.files import atomic_folder, sole_writer
from flyby.fusion import Fusion, Inbox, save_predictor
from flyby.parcels import parcel
from flyby.parcels.gate import Gate, Refused, remember
from flyby.parcels.signing import PrivateKey, check_sender, sign
from flyby.runs.config import RunConfig, pick_device, plan
from flyby.runs.methods import fusion_named, objective_named
from flyby.runs.pipeline import SERVER, check_names
from flyby.runs.progress import Progress
from flyby.settings import build, parse_assignment
from flyby.training.loop import train_site


def train_parcel(
    config: RunConfig,
    out: Path,
    site_id: str,
    *,
    device: str = "auto",
    quiet: bool = False,
    key: PrivateKey | None = None,
) -> tuple[parcel.Manifest, int]:
    """``flyby train``: one site's own data to one parcel, signed where there is a key. Interrupted, the same command
    goes on where it stopped."""
    check_names([site_id])
    if key is not None:
        check_sender(key, site_id)  # now, not after an hour of training
    if out.is_dir():
        raise BadInput(f"{out} is a folder; name the .parcel file to write")
    bundle = config.data.load(progress=not quiet)
    todo = plan(config, bundle)
    site = whole_site(bundle, site_id, config.split.val or 0.0, config.seed)
    recipe = todo.recipe
    kind = objective_named(recipe.objective)
    objective = kind(build(kind.settings_type, recipe.objective_settings, "objective"))
    settings = recipe.key(bundle.train.digest)
    # Keyed by the settings: a changed command does not pick up another's checkpoint
    work = out.parent / f".{out.name}.{settings}"
    with sole_writer(out):
        try:
            with Progress(f"training {site_id}", recipe.train.epochs, 1, quiet) as bar:
                trained = train_site(
                    site,
                    recipe.spec,
                    objective,
                    recipe.train,
                    recipe.views,
                    recipe.seed,
                    codec=recipe.codec,
                    counts=recipe.counts,
                    epsilon=recipe.epsilon,
                    simulated=False,
                    device=pick_device(device),
                    folder=work,
                    on_epoch=bar.on_epoch,
                    provenance={"key": settings},
                )
            written = parcel.write(trained.parcel if key is None else sign(trained.parcel, key), out)
            shutil.rmtree(work, ignore_errors=True)
        finally:
            with contextlib.suppress(OSError):
                work.rmdir()  # it stays where it holds a checkpoint to go on from
    return trained.parcel.manifest, written


def _replaceable(out: Path) -> None:
    """A folder is written whole, in place of an old one: nothing but an older model may be lost that way."""
    if out.is_dir() and any(out.iterdir()) and not (out / "model.json").exists():
        raise BadInput(f"{out} holds something else than a fused model; name a new folder with --out")


def fusion_of(rule: str, assignments: Iterable[str], out: Path) -> Fusion:
    """The server rule with its settings, once it is known that its output may be written: all that can be wrong before
    any parcel is there."""
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
    return kind(build(kind.settings_type, values, "fusion"))


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
    gate: Gate | None = None,
    validation: str | None = None,
    min_sites: int | None = None,
    ledger: Path | None = None,
) -> dict[str, Any]:
    """``flyby fuse``: parcels to a deployable folder, each counted once in its ledger. All come through the ``gate``,
    which may hold some already; one that is refused ends it, unless ``min_sites`` says how many are enough.
    ``validation`` names labelled images to judge them by."""
    fusion = fusion_of(rule, assignments, out)
    gate = gate or Gate(receiver=SERVER)
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise BadInput(f"{path} is named twice; each participant sends exactly one parcel")
        gate.try_check(path)
    _enough(gate, min_sites)
    typical = gate.typical()
    images = load(proxy, size=typical.spec.size[0]).train if proxy else None
    judges = _judges(validation, typical) if validation else None
    gate.settle(
        judges, pick_device(device), like=typical if judges else None, rule=None if fusion.heterogeneous else rule
    )
    _enough(gate, min_sites)
    inbox = Inbox(one.source for one in gate.waiting)
    work = out.parent / f".{out.name}.server"
    predictor = fusion.fuse(inbox, proxy=images, seed=seed, device=pick_device(device), work=work)
    shutil.rmtree(work, ignore_errors=True)
    gate.unchanged()
    card = {
        "fusion": rule,
        "sites": len(inbox),
        "senders": ", ".join(m.sender for m in inbox.manifests[:20]),
        "samples": sum(inbox.samples),
    }
    with atomic_folder(out) as folder:  # the model never stands there without the ledger of what went into it
        save_predictor(predictor, folder, card, export=export)
        gate.ledger.save(folder / "ledger.json")
    remember(gate, ledger)
    return {
        "out": str(out),
        "kind": predictor.kind,
        "fusion": rule,
        "sites": len(inbox),
        "bytes_up": gate.ledger.bytes_up(SERVER),
        "files": sorted(p.name for p in out.iterdir()),
        "signers": {one.manifest.sender: one.signer for one in gate.waiting},
        "refused": [one.row() for one in gate.refused],
        "notes": gate.notes,
    }


def _enough(gate: Gate, least: int | None) -> None:
    """Without a number all who came must be let in, so that nobody is left out unnoticed."""
    there, first = len(gate.waiting), next(iter(gate.refused), None)
    if there >= (least or 1) and (least is not None or first is None):
        return
    gate.isolate()
    if first is None:
        raise BadInput(
            f"there are {there} parcels to fuse, fewer than --min-sites {least}"
            if there
            else "there are no parcels to fuse; name .parcel files"
        )
    if least is None:
        others = len(gate.refused) - 1
        raise Refused(first.reason + (f" (and {others} more refused)" if others else ""), first.stage)
    raise Refused(
        f"{there} parcels were let in, fewer than --min-sites {least}, and {len(gate.refused)} refused; the first:"
        f" {first.reason}",
        first.stage,
    )


def _judges(name: str, like: parcel.Manifest) -> Part:
    """Labelled images by which parcels are judged: a source's validation split, or else its training images; its test
    images choose nothing."""
    bundle = load(name, size=like.spec.size[0])
    data = bundle.validation or bundle.train
    if data.class_names != like.class_names or data.channels != like.spec.channels:
        raise BadInput(
            f"--validation {name} has other classes or images than the parcels; name labelled images like those they"
            " were trained on"
        )
    return part_of(data)
