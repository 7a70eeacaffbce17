"""``flyby train``: one real site, one parcel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    TrustFile,
    Tune,
    compiling,
    say,
    standing,
)


def train(
    data: Annotated[str, typer.Option(help="This site's own images.")],
    out: Annotated[Path, typer.Option(help="The parcel to write.")],
    method: Annotated[str, typer.Option(help="Whose local training.")] = "fedavg",
    site: Annotated[str | None, typer.Option(help="This site's name; by default the key's or the parcel's.")] = None,
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
    seed: Annotated[int, typer.Option(help="All sites must use the same.")] = 0,
    model: Annotated[str | None, typer.Option(help="Architecture; all sites the same, for rules that average.")] = None,
    backbone: Backbone = None,
    backbone_size: BackboneSize = None,
    tune: Tune = None,
    device: Device = "auto",
    compiled: Compiled = None,
    size: Size = None,
    settings: Set = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train one real site on its own data and write the one parcel it will send."""
    from flyby.parcels.signing import read_private
    from flyby.runs.config import make_config
    from flyby.runs.site import masking_of, train_parcel

    private = {"train.dp_epsilon": dp_epsilon, "train.dp_delta": dp_delta}
    settings = [*(f"{name}={value}" for name, value in private.items() if value is not None), *(settings or ())]
    masking = masking_of(mask, key, trust)
    secret = read_private(key) if key else None
    config = make_config(
        method,
        seed=seed,
        data={"name": data, "size": size, "holdout": 0.0},
        model=model,
        epochs=epochs,
        assignments=compiling(standing(settings, backbone, backbone_size, tune), compiled),
    )
    name = site or (secret and secret.sender) or out.stem
    manifest, written = train_parcel(config, out, name, device=device, quiet=quiet, key=secret, masking=masking)
    facts = {
        "parcel": str(out),
        "bytes": written,
        "sender": manifest.sender,
        "samples": manifest.samples,
        "counts": manifest.counts,
        "signer": secret.public.fingerprint if secret else None,
    }
    of = f"{manifest.samples} samples of {manifest.sender}" if mask is None else f"{manifest.sender}, masked"
    text = f"{out}: {written:,} bytes from {of}; look inside with: flyby"
    say(facts, as_json, f"{text} inspect {out}")
