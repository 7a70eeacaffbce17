"""``flyby sign``: for a parcel that exists already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyby.commands.common import Json, say


def sign(
    parcel: Annotated[Path, typer.Argument(help="The .parcel to sign.")],
    key: Annotated[Path, typer.Option(help="The sender's private key of `flyby keys new`.")],
    out: Annotated[Path | None, typer.Option(help="The signed .parcel to write; by default the same file.")] = None,
    as_json: Json = False,
) -> None:
    """Sign a parcel that exists already. Its content stays as it is."""
    from flyby.parcels import parcel as parcels
    from flyby.parcels.signing import read_private
    from flyby.parcels.signing import sign as signed

    secret, target = read_private(key), out or parcel
    made = signed(parcels.read(parcel), secret)
    written = parcels.write(made, target)
    facts = {
        "parcel": str(target),
        "bytes": written,
        "sender": made.manifest.sender,
        "fingerprint": secret.public.fingerprint,
    }
    say(
        facts,
        as_json,
        f"{target}: {written:,} bytes, signed by {made.manifest.sender} with {secret.public.fingerprint}",
    )
