"""``flyby sign``: for a parcel or a model folder that exists already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyby.commands.common import Json, say
from flyby.errors import BadInput


def sign(
    path: Annotated[Path, typer.Argument(help="The .parcel or the model folder to sign.")],
    key: Annotated[Path, typer.Option(help="The sender's private key of `flyby keys new`.")],
    out: Annotated[Path | None, typer.Option(help="The signed .parcel to write; by default the same file.")] = None,
    as_json: Json = False,
) -> None:
    """Sign a parcel, or every file of a model folder, that exists already. The content stays as it is."""
    from flyby.fusion.predictor import model_folder
    from flyby.parcels import parcel as parcels
    from flyby.parcels import signing

    secret = signing.read_private(key)
    name = secret.public.fingerprint
    if path.is_dir():
        if out is not None:
            raise BadInput("--out is for a parcel; a model folder gets its signature.json where it is")
        folder = model_folder(path)
        seal = signing.sign_folder(folder, secret)
        told = {"folder": str(folder), "files": sorted(seal.files), "sender": seal.sender, "fingerprint": name}
        say(told, as_json, f"{folder}: {len(seal.files)} files, signed by {seal.sender} with {name}")
        return
    made, target = signing.sign(parcels.read(path), secret), out or path
    written = parcels.write(made, target)
    facts = {"parcel": str(target), "bytes": written, "sender": made.manifest.sender, "fingerprint": name}
    say(facts, as_json, f"{target}: {written:,} bytes, signed by {made.manifest.sender} with {name}")
