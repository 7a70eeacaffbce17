"""``flyby keys``: make a key pair, look at one, say whose key is whose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyby.commands.common import Json, say

app = typer.Typer(
    help="Keys to sign parcels with, and the trust file that says whose key is whose.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The sender: this site's name, as it stands in its parcels.")],
    out: Annotated[Path, typer.Option(help="The folder to write NAME.key and NAME.pub to.")] = Path(),
    as_json: Json = False,
) -> None:
    """Make a key pair: NAME.key stays here, NAME.pub goes to whoever receives this site's parcels."""
    from flyby.parcels.signing import new_key

    secret, public, key = new_key(name, out)
    facts = {"sender": name, "private": str(secret), "public": str(public), "fingerprint": key.fingerprint}
    say(
        facts,
        as_json,
        f"{secret}: keep it here and private\n{public}: give it to the receivers of your parcels\nfingerprint:"
        f" {key.fingerprint}",
    )


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A .pub or .key file.")], as_json: Json = False) -> None:
    """Whose key a file holds, the public key and its fingerprint, for two people to compare."""
    from flyby.parcels.signing import read_either

    key = read_either(file)
    facts = {"sender": key.sender, "public_key": key.text, "fingerprint": key.fingerprint}
    say(
        facts,
        as_json,
        f"sender:      {key.sender or 'not named in the file'}\npublic key:  {key.text}\nfingerprint:"
        f" {key.fingerprint}",
    )


@app.command()
def trust(
    trust_file: Annotated[Path, typer.Argument(metavar="TRUSTFILE", help="The trust file; made if it is not there.")],
    public_key: Annotated[Path, typer.Argument(metavar="PUBLICKEY", help="The sender's .pub file.")],
    sender: Annotated[str | None, typer.Option(help="Whose key it is; by default the name in the .pub file.")] = None,
    also: Annotated[bool, typer.Option("--also", help="Trust it beside the sender's older key.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Trust it in place of the sender's older keys.")] = False,
    as_json: Json = False,
) -> None:
    """Trust a public key as a sender's, after its fingerprint was compared by some other way than
    the one it came by."""
    from flyby.files import sole_writer
    from flyby.parcels.signing import Trust, read_public

    key = read_public(public_key)
    name = sender or key.sender or public_key.stem
    with sole_writer(trust_file, patience=30):  # calls at the same time lose none of their keys
        known = Trust.load(trust_file) if trust_file.exists() else Trust()
        known.add(name, key, also=also, replace=replace)
        known.save(trust_file)
    facts = {
        "trust": str(trust_file),
        "sender": name,
        "fingerprint": key.fingerprint,
        "keys": len(known.senders[name]),
        "senders": len(known.senders),
    }
    say(
        facts,
        as_json,
        f"{trust_file}: {name} is trusted with {key.fingerprint}; senders in the file: {len(known.senders)}",
    )
