"""``flyby keys``: make a key pair, look at one, say whose key is whose, and hold a round of masked sums."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyby.commands.common import Json, TrustFile, say

app = typer.Typer(
    help="Keys to sign and to mask parcels with, and the trust file that says whose key is whose.",
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
def mask(
    key: Annotated[Path, typer.Argument(help="This site's private key, of `flyby keys new`.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; by default NAME.mask beside the key.")] = None,
    as_json: Json = False,
) -> None:
    """Write this site's public masking key, for rounds in which no server sees its sums."""
    from flyby.parcels.masks import participant, write
    from flyby.parcels.signing import read_private

    made = participant(read_private(key))
    out = out or key.with_name(f"{made.sender}.mask")
    write(out, made)
    say({"sender": made.sender, "mask": str(out)}, as_json, f"{out}: give it to whoever makes the round")


@app.command("round")
def make_round(
    sites: Annotated[list[Path], typer.Argument(metavar="MASKS", help="The .mask files of all sites, two or more.")],
    out: Annotated[Path, typer.Option(help="The round file to write; all sites need the same.")],
    name: Annotated[str | None, typer.Option(help="What to call it; by default the file's name.")] = None,
    images: Annotated[int, typer.Option(min=1, help="Most images that a site has.")] = 100_000,
    largest: Annotated[float, typer.Option(help="Largest number that a feature is, its sign aside.")] = 64.0,
    trust: TrustFile = None,
    as_json: Json = False,
) -> None:
    """Name the sites whose masks cancel: each then trains with --mask, once."""
    from flyby.errors import BadInput
    from flyby.parcels.masks import Participant, Round, read_as, write
    from flyby.parcels.signing import Trust

    if out.exists():
        raise BadInput(f"{out} exists already; a round is held once, so name another file")
    made = Round.of(
        [read_as(Participant, path, "a public masking key") for path in sites], name or out.stem, images, largest
    )
    made.check(None if trust is None else Trust.load(trust))
    write(out, made)
    facts = {"round": made.name, "file": str(out), "digest": made.digest, "sites": made.names, "bits": made.bits}
    say(facts, as_json, f"{out}: {len(made.names)} sites, {made.bits} bits after the point; give it to all of them")


@app.command()
def reveal(
    round_file: Annotated[Path, typer.Argument(metavar="ROUND", help="The round file.")],
    missing: Annotated[list[str], typer.Option(help="A site that did not send and never will (repeatable).")],
    key: Annotated[Path, typer.Option(help="This site's private key.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; by default NAME.revealed.json here.")] = None,
    as_json: Json = False,
) -> None:
    """Give away the masks towards sites that dropped out of a round, so that the others' sum can be
    had. It tells nothing of this site's sums; but if a missing site's parcel does arrive, the
    server can take its masks off: ask that site first."""
    from flyby.parcels.masks import Masking, read_round, write

    masking = Masking.at(read_round(round_file), key)
    made = masking.reveal(missing)
    out = out or Path(f"{made.sender}.revealed.json")
    write(out, made)
    say(
        {"sender": made.sender, "file": str(out), "missing": sorted(made.seeds)},
        as_json,
        f"{out}: this site's masks towards {', '.join(sorted(made.seeds))} and nothing of its own sums; whoever also"
        " holds a parcel of such a site could open that, so send it only if none was sent",
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
