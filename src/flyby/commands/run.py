"""``flyby run``: a whole federation on one machine."""

from __future__ import annotations

import atexit
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyby.commands.common import (
    Architecture,
    Backbone,
    BackboneSize,
    Compiled,
    Device,
    Epochs,
    Json,
    MinSize,
    Quiet,
    Seed,
    Set,
    Size,
    TestDir,
    Tune,
    compiling,
    grouped,
    say,
    standing,
)
from flyby.errors import BadInput

if TYPE_CHECKING:
    from flyby.runs.config import RunConfig
    from flyby.runs.pipeline import Options


@dataclass(frozen=True)
class Meetings:
    """How nodes meet, for methods without a server."""

    rounds: Annotated[int | None, typer.Option(help="FOL: collection rounds.")] = None
    buffer: Annotated[int | None, typer.Option(help="FOL: most neighbour models a node holds.")] = None
    top: Annotated[int | None, typer.Option(help="FOL: members of a node's ensemble.")] = None
    eval_nodes: Annotated[
        str | None, typer.Option(help="FOL: nodes to judge: 13,28,48 or quantiles:12 (by size); by default all.")
    ] = None


@grouped
def run(
    *,
    method: Annotated[
        str, typer.Option(help="A method of `flyby methods`, or several with commas: a comparison on the same uploads.")
    ] = "aurora",
    data: Annotated[
        str, typer.Option(help="digits, a folder of class folders or Parquet files, a .csv, an .npz, hf:NAME.")
    ] = "digits",
    clients: Annotated[int, typer.Option(help="How many sites.")] = 5,
    alpha: Annotated[float, typer.Option(help="Dirichlet concentration: .05 very uneven, 100 nearly even.")] = 0.1,
    epochs: Epochs = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="The run folder.")] = None,
    split: Annotated[str, typer.Option(help="How the data is divided.")] = "dirichlet",
    min_size: MinSize = None,
    model: Architecture = None,
    backbone: Backbone = None,
    backbone_size: BackboneSize = None,
    tune: Tune = None,
    fusion: Annotated[
        str | None,
        typer.Option(help="Another server rule than the method's own, or several with commas, on the same uploads."),
    ] = None,
    meetings: Meetings,
    contacts: Annotated[
        Path | None,
        typer.Option(metavar="PLAN", help="Who can talk to whom, when: a plan of `flyby contacts`."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="inline, processes or ray; by default what suits the machine.")
    ] = None,
    device: Device = "auto",
    compiled: Compiled = None,
    size: Size = None,
    test_dir: TestDir = None,
    settings: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    track: Annotated[
        bool,
        typer.Option(
            "--track", help="Also write TensorBoard event files while it trains, one folder per site (extra: track)."
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Simulate a whole federation on one machine: split, train every site, fuse, evaluate, report."""
    _warm(engine, device)
    from flyby.runs.pipeline import Options

    names, rules = _listed("--method", method), _listed("--fusion", fusion) if fusion is not None else [None]
    words = {"seed": seed, "model": model, "epochs": epochs, "data": {"name": data, "size": size, "test": test_dir}}
    words["contacts"] = {"plan": None if contacts is None else str(contacts)}
    shares = {"name": split, "clients": clients, "alpha": alpha, "min_size": min_size}
    chosen = compiling(standing(settings, backbone, backbone_size, tune), compiled)
    configs = _configs(names, rules, meetings, split=shares, assignments=chosen, **words)
    folder = out or Path("runs") / f"{'-'.join(configs)}-{Path(data).name}-a{alpha:g}-s{seed}"
    command = shlex.join(["flyby", *sys.argv[1:]])
    options = Options(engine=engine, device=device, resume=resume, command=command, quiet=quiet)
    _run(configs, folder, options, track, as_json)


def _warm(engine: str | None, device: str) -> None:
    from flyby.engines import forkserver

    if forkserver.worth_starting(engine, device):
        forkserver.start()  # it imports torch for the workers while this process does so for itself
        atexit.register(forkserver.stop)


def _listed(option: str, words: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in words.split(",") if name.strip()))
    if not names:
        raise BadInput(f"{option} {words!r} names nothing; `flyby methods` lists what there is")
    return names


def _configs(
    names: list[str], rules: Sequence[str | None], meetings: Meetings, assignments: list[str], **words: Any
) -> dict[str, RunConfig]:
    """One run for every method and rule, by the name of its folder."""
    from flyby.runs.config import concerning, make_config
    from flyby.runs.methods import METHODS

    orient = vars(meetings)
    if any(v is not None for v in orient.values()) and not any(METHODS[name].orient for name in names):
        raise BadInput("--rounds, --buffer, --top and --eval-nodes belong to methods without a server, such as fol")
    meet = [name for name in names if METHODS[name].orient]
    if meet and rules != [None]:
        raise BadInput(f"{meet[0]} has no server, so no --fusion; leave that out, or run it by itself")
    mine = {name: concerning(name, names, assignments) for name in names}
    sends = [name for name in names if METHODS[name].fusion]
    return {
        f"{name}-{rule}" if rule and len(rules) > 1 else name: make_config(
            name, fusion=rule, orient=orient, assignments=mine[name], **words
        )
        for name in names
        for rule in (rules if name in sends or not sends else [None])  # local stands beside them as it is
    }


def _run(configs: dict[str, RunConfig], folder: Path, options: Options, track: bool, as_json: bool) -> None:
    from flyby.report.track import Live
    from flyby.runs.folder import Run
    from flyby.study.compare import compare

    live, several = Live() if track else None, len(configs) > 1
    results = compare(configs, folder, replace(options, follow=live))
    if live is not None:
        live.finish(folder / name if several else folder for name in configs)
    width = max(map(len, results))
    lines = [*(result.line(f"{name:<{width}}") for name, result in results.items()), f"report: {Run(folder).report}"]
    found = {name: result.to_json() for name, result in results.items()}
    say(found if several else next(iter(found.values())), as_json, "\n".join(lines))
