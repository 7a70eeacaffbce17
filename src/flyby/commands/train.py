"""``flyby train``: one real site, one parcel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyby.commands.common import (
    Backbone,
    BackboneSize,
    Compiled,
    Device,
    Epochs,
    Json,
    Quiet,
    Set,
    Size,
    TestDir,
    TrustFile,
    Tune,
    compiling,
    say,
    standing,
)
from flyby.commands.reports import train_report
from flyby.errors import BadInput

if TYPE_CHECKING:
    from flyby.runs.like import Like
    from flyby.runs.site import Upload


def train(
    data: Annotated[str, typer.Option(help="This site's own images.")],
    out: Annotated[Path, typer.Option(help="The parcel to write.")],
    method: Annotated[str | None, typer.Option(help="Whose local training; fedavg by default.")] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="PARCEL|MODEL",
            help="Train as another site did: its method, network, image size, seed and settings; its classes first.",
        ),
    ] = None,
    site: Annotated[str | None, typer.Option(help="This site's name; by default the key's or the parcel's.")] = None,
    classes: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The classes of all sites: a name on each line, or a parcel, or a model."),
    ] = None,
    synonyms: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Other names of classes, `old: new` on each line.")
    ] = None,
    holdout: Annotated[
        float | None,
        typer.Option(min=0, max=0.9, help="Share of the images to judge by, not to learn from; 0.15 by default."),
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Sign with this private key of `flyby keys new`.")] = None,
    mask: Annotated[
        Path | None,
        typer.Option(metavar="ROUND", help="Hide sums under the masks of a round of `flyby keys round`; needs --key."),
    ] = None,
    trust: TrustFile = None,
    dp_epsilon: Annotated[
        float | None, typer.Option(min=0, help="Train, or noise sums, with this differential privacy.")
    ] = None,
    dp_delta: Annotated[float | None, typer.Option(help="Its delta; by default 1 / (10 images).")] = None,
    epochs: Epochs = None,
    seed: Annotated[int | None, typer.Option(help="All sites must use the same; 0 by default.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Architecture, the same at all sites; by default one that fits images and machine."),
    ] = None,
    backbone: Backbone = None,
    backbone_size: BackboneSize = None,
    tune: Tune = None,
    device: Device = "auto",
    compiled: Compiled = None,
    size: Size = None,
    test_dir: TestDir = None,
    settings: Set = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a parcel that is there already.")] = False,
    report: Annotated[bool, typer.Option(help="Also write a page about it beside the parcel; it stays here.")] = True,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train one real site on its own data and write the one parcel it will send."""
    from flyby.data.classes import read_synonyms
    from flyby.fusion.alignment import class_list
    from flyby.parcels.signing import read_private
    from flyby.runs.config import make_config
    from flyby.runs.like import Like
    from flyby.runs.site import Manner, masking_of, train_parcel

    named: dict[str, object] = {"method": method, "model": model, "backbone-size": backbone_size, "tune": tune}
    named |= {"seed": seed, "size": size}
    taken = None if like is None else Like.at(like, backbone)
    if taken is not None and (twice := [word for word, value in named.items() if value is not None]):
        raise BadInput(f"--like says the {twice[0]} already; leave --{twice[0]} out, or --like")
    private = {"train.dp_epsilon": dp_epsilon, "train.dp_delta": dp_delta, "split.val": holdout}
    words = [f"{name}={value}" for name, value in private.items() if value is not None] + (settings or [])
    masking, secret = masking_of(mask, key, trust), read_private(key) if key else None
    config = make_config(
        taken.method if taken else method or "fedavg",
        seed=taken.seed if taken else seed or 0,
        data={"name": data, "size": taken.size if taken else size, "holdout": 0.0, "test": test_dir},
        model=model,
        epochs=epochs,
        assignments=[*_alike(taken, epochs), *compiling(standing(words, backbone, backbone_size, tune), compiled)],
    )
    manner = Manner(
        device=device,
        quiet=quiet,
        key=secret,
        masking=masking,
        force=force,
        choose=True,
        like=taken.manifest if taken else None,
        classes=class_list(classes) if classes else None,
        synonyms=read_synonyms(synonyms) if synonyms else None,
    )
    made = train_parcel(config, out, site or (secret and secret.sender) or _called(out), manner)
    facts = _facts(made, out, secret.public.fingerprint if secret else None)
    if report:
        facts["report"] = train_report(made, out)
    say(facts, as_json, _story(made, out, facts.get("report"), masked=mask is not None))


def _called(out: Path) -> str:
    """The site's name, where nobody says it: that of its file."""
    from flyby.names import is_name

    if not is_name(out.stem):
        raise BadInput(f"a site is called as its file, and {out.stem!r} is no name for one; give it one with --site")
    return out.stem


def _alike(taken: Like | None, epochs: int | None) -> list[str]:
    """The other site's settings, but for what is asked for here."""
    own = ("train.epochs=",) if epochs is not None else ()
    return [word for word in (taken.words if taken else ()) if not word.startswith(own or ("\0",))]


def _facts(made: Upload, out: Path, signer: str | None) -> dict[str, Any]:
    manifest, seen = made.manifest, made.seen
    return {
        "parcel": str(out),
        "bytes": made.bytes,
        "sender": manifest.sender,
        "samples": manifest.samples,
        "counts": manifest.counts,
        "signer": signer,
        "model": manifest.spec.name,
        "seconds": round(made.seconds, 3),
        "train_accuracy": seen.train.accuracy,
        "held_out": None if seen.held is None else seen.held.row(),
        "test": None if seen.test is None else seen.test.row(),
        "temperature": seen.temperature,
        "notes": made.notes,
    }


def _story(made: Upload, out: Path, report: str | None, masked: bool) -> str:
    """What came of it, for people."""
    from flyby.fusion.quality import matrix, summary

    manifest, seen = made.manifest, made.seen
    of = f"{manifest.sender}, masked" if masked else f"{manifest.samples} samples of {manifest.sender}"
    lines = [f"{out}: {made.bytes:,} bytes from {of}; look inside with: flyby inspect {out}"]
    lines.append(f"on images that it learned from: accuracy {seen.train.accuracy:.4f}")
    if seen.held is not None:
        lines += [f"on held-out images: {summary(seen.held)}", *matrix(seen.held)]
    if "temperature" in manifest.meta:
        lines.append(f"sent with it: temperature {seen.temperature:g}, at which its confidence fits these images")
    lines += [f"on its test images: {summary(seen.test)}"] if seen.test is not None else []
    lines += [f"more about it, for this site only: {report}"] if report else []
    lines.append(f"other sites train alike with: flyby train --data PATH --like {out} --out NAME.parcel")
    return "\n".join(lines)
