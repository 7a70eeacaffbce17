"""``flyby flower``: a round over a Flower network, with TLS and authenticated nodes. Flower itself is imported by its
own processes alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flyby.commands.common import (
    Architecture,
    Device,
    Epochs,
    Export,
    Json,
    MinSize,
    Quiet,
    Rule,
    Seed,
    Set,
    Size,
    grouped,
    say,
)
from flyby.errors import BadInput

app = typer.Typer(
    name="flower",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Carry the parcels over a Flower network: TLS, authenticated nodes, a deadline and a quorum.",
)


@dataclass(frozen=True)
class RoundOptions:
    """What every round is told, here or on many hosts."""

    method: Annotated[str, typer.Option(help="Whose local training, a method of `flyby methods`.")] = "aurora"
    fusion: Rule = None
    epochs: Epochs = None
    seed: Seed = 0
    model: Architecture = None
    deadline: Annotated[str, typer.Option(help="Fuse after this time what is there, e.g. 90s, 10m, 2h.")] = "10m"
    min_sites: Annotated[int | None, typer.Option(help="Fewest parcels to fuse; by default all that are expected.")] = (
        None
    )
    max_megabytes: Annotated[int, typer.Option(help="Largest parcel that a site may send.")] = 500
    export: Export = True
    device: Device = "auto"
    size: Size = None
    settings: Set = None

    def told(self, **own: Any) -> dict[str, Any]:
        """The run config of a round; what was not said stays at its default."""
        words = {**vars(self), "settings": None, **own}
        return {name.replace("_", "-"): value for name, value in words.items() if value is not None}


@app.command("up")
@grouped
def up_command(
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(help="One source, split among the nodes as `flyby run` would, or one for each node (repeatable)."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="How many SuperNodes; 3, or one for each --data.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for model, parcels, ledger.json and result.json.")] = Path(
        "flower-round"
    ),
    alpha: Annotated[float, typer.Option(help="Dirichlet concentration of the split.")] = 0.1,
    split: Annotated[str, typer.Option(help="How one source is divided.")] = "dirichlet",
    min_size: MinSize = None,
    options: RoundOptions,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Try it here: a SuperLink and SuperNodes on this machine, one whole round over TLS, and everything taken down
    again."""
    from flyby.deploy.round import read_round
    from flyby.deploy.trial import up

    sources = data or ["digits"]
    if len(sources) > 1 and nodes not in (None, len(sources)):
        raise BadInput(
            f"--nodes {nodes} does not fit {len(sources)} sources; leave it out, or name one source to be split"
        )
    if nodes is not None and nodes < 1:
        raise BadInput("--nodes must be at least 1")
    result = up(
        sources,
        read_round(options.told(out=str(out))),
        options.settings or (),
        nodes=nodes or 3,
        split={"name": split, "alpha": alpha, "min_size": min_size},
        device=options.device,
        tell=(lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True)),
    )
    say(result, as_json, _line(result, out))


def _line(result: dict[str, Any], out: Path) -> str:
    judged = f"accuracy {result['accuracy']:.4f}   " if "accuracy" in result else ""
    absent = [f"{row['site'] or row['node']}: {row['reason']}" for row in [*result["late"], *result["failed"]]]
    first = (
        f"{result['method']:<12} {judged}{result['uploads']} uploads, {result['bytes_up'] / 1e6:.2f} MB  "
        f" {result['seconds']['collect']:.1f} s"
    )
    return "\n".join([first, *(f"without {line}" for line in absent), f"model: {out}"])


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    host: Annotated[
        list[str] | None, typer.Option(help="A name or IP address of the SuperLink's host (repeatable).")
    ] = None,
    days: Annotated[int, typer.Option(help="For how long the certificate holds.")] = 365,
    as_json: Json = False,
) -> None:
    """A TLS certificate for the SuperLink: ca.crt for every host, server.crt and server.key for its own."""
    from flyby.deploy.credentials import write_certificates

    paths = write_certificates(folder, host or (), days)
    facts = {name: str(path) for name, path in paths.items()}
    say(
        facts,
        as_json,
        f"{paths['ca']}: for every host\n{paths['certificate']}, {paths['key']}: for the SuperLink's host alone",
    )


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    sites: Annotated[list[str], typer.Argument(help="The name of the site, or of several.")],
    as_json: Json = False,
) -> None:
    """Key pairs by which the SuperLink knows its nodes: SITE-node.key stays at the site,
    SITE-node.pub is registered."""
    from flyby.deploy.credentials import write_node_keys

    made = {site: write_node_keys(folder, site) for site in sites}
    facts = {site: {name: str(path) for name, path in paths.items()} for site, paths in made.items()}
    lines = [
        f"{paths['key']}: stays at {site}; register {paths['public']} at the SuperLink" for site, paths in made.items()
    ]
    say(facts, as_json, "\n".join(lines))


@app.command("app")
@grouped
def app_command(
    *,
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    sites: Annotated[int, typer.Option(help="How many sites are expected; 0 waits for the deadline.")] = 0,
    out: Annotated[
        str, typer.Option(help="The folder on the SuperLink's host for model, parcels and result.json.")
    ] = "flower-round",
    trust: Annotated[
        Path | None, typer.Option(help="Whose signing key is whose: a file of `flyby keys trust` on the server's host.")
    ] = None,
    require_signed: Annotated[
        bool, typer.Option("--require-signed", help="Take only parcels signed with a trusted key.")
    ] = False,
    options: RoundOptions,
    as_json: Json = False,
) -> None:
    """Write the Flower app that `flwr run` takes; every setting of a round is a key of its run config."""
    from flyby.deploy.app_folder import write_app
    from flyby.deploy.round import joined, read_round

    told = options.told(
        sites=sites,
        out=out,
        trust=trust and str(trust),
        require_signed=require_signed,
        settings=joined(options.settings or ()),
    )
    asked = read_round(told).check()
    write_app(folder, asked)
    say(
        {"app": str(folder), "config": asked.scalars()},
        as_json,
        f"{folder}: start the round with: flwr run {folder} --stream",
    )
