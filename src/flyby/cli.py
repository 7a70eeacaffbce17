"""The command line. Each command reads its words, calls one function, prints; heavy imports wait until they are needed.

Exit codes: 0 done, 2 bad input (one line that says what and how to mend it), 3 a run that diverged, 130 interrupted.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyby import __version__
from flyby.commands import audit, bench, catalogue, flower, keys, studies
from flyby.commands.common import Compiled, Deadline, Device, Expect, Json, Poll, Quiet, Set, Size, compiling, say
from flyby.commands.keys import (
    KeyFile,
    LedgerFile,
    MaxBytes,
    MaxParcels,
    MaxTotal,
    Quarantine,
    RequireSigned,
    TrustFile,
)
from flyby.errors import BadInput, FlybyError

if TYPE_CHECKING:
    from flyby.data.dataset import Dataset
    from flyby.parcels.arrivals import Arrivals

app = typer.Typer(
    name="flyby",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="One-shot federated learning: every participant's model crosses the wire exactly once.",
)


def main() -> None:
    """Run the command line and turn every error a user can cause into one line and an exit code."""
    try:
        code = app(standalone_mode=False)
        if code == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        goes_on = {"run": "; the same command with --resume goes on from here"}
        goes_on |= dict.fromkeys(("train", "study", "fuse", "orient"), "; the same command goes on from here")
        _fail(f"interrupted{goes_on.get(sys.argv[1] if len(sys.argv) > 1 else '', '')}", 130)
    except FlybyError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        os._exit(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(
            f"no room left on the disk ({error.strerror}); make room and give the same command again (flyby run: with"
            " --resume)",
            2,
        )
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("click", "typer") and hasattr(error, "format_message"):
            _fail(error.format_message() or "see flyby --help", 2)
        raise


def _fail(message: str, code: int) -> None:
    print(f"flyby: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(f"flyby {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def run(
    method: Annotated[
        str, typer.Option(help="A method of `flyby methods`, or several with commas: a comparison on the same uploads.")
    ] = "aurora",
    data: Annotated[
        str, typer.Option(help="digits, a folder of Parquet files or class folders, an .npz, hf:NAME.")
    ] = "digits",
    clients: Annotated[int, typer.Option(help="How many sites.")] = 5,
    alpha: Annotated[float, typer.Option(help="Dirichlet concentration: .05 very uneven, 100 nearly even.")] = 0.1,
    epochs: Annotated[int | None, typer.Option(help="Local epochs.")] = None,
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The run folder.")] = None,
    split: Annotated[str, typer.Option(help="How the data is divided.")] = "dirichlet",
    min_size: Annotated[int | None, typer.Option(help="Fewest samples a site may hold.")] = None,
    model: Annotated[str | None, typer.Option(help="Architecture; by default one that fits the images.")] = None,
    fusion: Annotated[str | None, typer.Option(help="Another server rule than the method's own.")] = None,
    rounds: Annotated[int | None, typer.Option(help="FOL: collection rounds.")] = None,
    buffer: Annotated[int | None, typer.Option(help="FOL: most neighbour models a node holds.")] = None,
    top: Annotated[int | None, typer.Option(help="FOL: members of a node's ensemble.")] = None,
    eval_nodes: Annotated[
        str | None, typer.Option(help="FOL: nodes to personalise and judge, e.g. 13,28,48; by default all.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="inline, processes or ray; by default what suits the machine.")
    ] = None,
    device: Device = "auto",
    compiled: Compiled = None,
    size: Size = None,
    settings: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    track: Annotated[
        bool, typer.Option("--track", help="Also write TensorBoard event files, one folder a site (extra: track).")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Simulate a whole federation on one machine: split, train every site, fuse, evaluate, report."""
    from flyby.engines import forkserver

    if forkserver.worth_starting(engine, device):
        forkserver.start()  # it imports torch for the workers while this process does so for itself
        atexit.register(forkserver.stop)
    from flyby.report.track import check_tracking, write_events
    from flyby.runs.compare import compare
    from flyby.runs.config import make_config
    from flyby.runs.methods import method_named
    from flyby.runs.pipeline import run as run_one

    if track:
        check_tracking()
    names = [name.strip() for name in method.split(",") if name.strip()]
    if not names:
        raise BadInput("name a method; `flyby methods` lists them")
    meetings = {"rounds": rounds, "buffer": buffer, "top": top, "eval_nodes": eval_nodes}
    if any(v is not None for v in meetings.values()) and not any(method_named(name).orient for name in names):
        raise BadInput("--rounds, --buffer, --top and --eval-nodes belong to methods without a server, such as fol")
    configs = {
        name: make_config(
            name,
            fusion=fusion,
            seed=seed,
            data={"name": data, "size": size},
            model=model,
            epochs=epochs,
            assignments=compiling(settings, compiled),
            orient=meetings,
            split={"name": split, "clients": clients, "alpha": alpha, "min_size": min_size},
        )
        for name in names
    }
    folder = out or Path("runs") / f"{'-'.join(names)}-{Path(data).name}-a{alpha:g}-s{seed}"
    command = shlex.join(["flyby", *sys.argv[1:]])
    options: dict[str, Any] = {"engine": engine, "device": device, "resume": resume, "command": command, "quiet": quiet}
    if len(names) == 1:
        result = run_one(configs[names[0]], folder, **options)
        if track:
            write_events(folder)
        say(result, as_json, f"{_line(result)}\nreport: {folder / 'report.html'}")
    else:
        results = compare(configs, folder, **options)
        for name in names if track else ():
            write_events(folder / name)
        say(results, as_json, "\n".join([*(_line(r) for r in results.values()), f"report: {folder / 'report.html'}"]))


def _line(result: dict[str, Any]) -> str:
    own = result["per_client"].values()
    sent = f"{result['uploads']} uploads, {result['bytes_up'] / 1e6:.2f} MB" if result["uploads"] else "nothing sent"
    return (
        f"{result['method']:<12} accuracy {result['accuracy']:.4f}   own-test mean {sum(own) / len(own):.4f}   {sent}  "
        f" {result['seconds']:.1f} s"
    )


@app.command()
def train(
    data: Annotated[str, typer.Option(help="This site's own images.")],
    out: Annotated[Path, typer.Option(help="The parcel to write.")],
    method: Annotated[str, typer.Option(help="Whose local training.")] = "fedavg",
    site: Annotated[str | None, typer.Option(help="This site's name; by default the key's or the parcel's.")] = None,
    key: KeyFile = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs.")] = None,
    seed: Annotated[int, typer.Option(help="All sites must use the same.")] = 0,
    model: Annotated[str | None, typer.Option(help="Architecture; all sites the same, for rules that average.")] = None,
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
    from flyby.runs.single import train_parcel

    secret = read_private(key) if key else None
    config = make_config(
        method,
        seed=seed,
        data={"name": data, "size": size, "holdout": 0.0},
        model=model,
        epochs=epochs,
        assignments=compiling(settings, compiled),
    )
    name = site or (secret and secret.sender) or out.stem
    manifest, written = train_parcel(config, out, name, device=device, quiet=quiet, key=secret)
    facts = {
        "parcel": str(out),
        "bytes": written,
        "sender": manifest.sender,
        "samples": manifest.samples,
        "counts": manifest.counts,
    }
    facts["signer"] = secret.public.fingerprint if secret else None
    say(
        facts,
        as_json,
        f"{out}: {written:,} bytes from {manifest.samples} samples of {manifest.sender}; look inside with: flyby"
        f" inspect {out}",
    )


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A .parcel file.")], trust: TrustFile = None, as_json: Json = False
) -> None:
    """Show what a parcel says and check that it is whole. Nothing in it is ever run."""
    from flyby.parcels import parcel
    from flyby.parcels.container import printable
    from flyby.parcels.signing import Trust, verdict

    made = parcel.read(path)
    signature = verdict(made, Trust.load(trust) if trust else None)
    m = made.manifest
    facts = json.loads(m.model_dump_json())
    facts |= {
        "bytes": path.stat().st_size,
        "parameters": m.spec.parameter_count(),
        "signed": bool(made.signature),
        "signature": signature._asdict(),
    }
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, title=str(path), title_justify="left")
    head = m.spec.head if m.spec.head != "linear" else "linear head"
    counts = (
        ", ".join(f"{n}: {c}" for n, c in zip(m.class_names, m.counts, strict=True) if c) if m.counts else "not shared"
    )
    for key, value in (
        ("sender", m.sender),
        ("objective", m.method),
        ("model", f"{m.spec.name}, {head}, {facts['parameters']:,} parameters"),
        ("images", f"{m.spec.size[0]}x{m.spec.size[1]}x{m.spec.channels}"),
        ("samples", f"{m.samples:,}"),
        ("class counts", counts),
        ("codec", m.codec),
        ("extras", ", ".join(m.extras) or "none"),
        ("size", f"{facts['bytes']:,} bytes in {len(m.tensors)} tensors"),
        ("checked", "whole: sizes, shapes, hashes and finiteness"),
        ("signature", signature.note),
        *_trained(m.provenance),
    ):
        table.add_row(key, Text(printable(str(value))))
    Console().print(table)


def _trained(provenance: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a sender says of its training: its own words, of any shape and length."""
    versions, private = provenance.get("versions"), provenance.get("privacy")
    version = versions.get("flyby", "?") if isinstance(versions, dict) else "?"
    yield "trained by", f"flyby {str(version)[:40]}, seed {str(provenance.get('seed', '?'))[:40]}"
    if isinstance(private, dict):
        epsilon, delta, source = (str(private.get(key, "?"))[:40] for key in ("total_epsilon", "delta", "randomness"))
        yield "privacy", f"says: epsilon {epsilon} at delta {delta}, randomness {source}"


@app.command()
def fuse(
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    parcels: Annotated[list[Path] | None, typer.Argument(help="The .parcel files, one a site.")] = None,
    watch: Annotated[
        Path | None,
        typer.Option(metavar="INBOX", help="Wait until enough parcels lie in this folder, instead of naming them."),
    ] = None,
    deadline: Deadline = None,
    expect: Expect = None,
    poll: Poll = "5s",
    fusion: Annotated[str, typer.Option(help="The server rule.")] = "fedavg",
    proxy: Annotated[str | None, typer.Option(help="Unlabelled images, for rules that can use some.")] = None,
    seed: Annotated[int, typer.Option(help="For rules that draw.")] = 0,
    export: Annotated[bool, typer.Option(help="Also write model.pt2, which plain PyTorch loads.")] = True,
    trust: TrustFile = None,
    require_signed: RequireSigned = False,
    validation: Annotated[
        str | None, typer.Option(help="Labelled images to judge parcels by: refuse what knows no more than chance.")
    ] = None,
    min_sites: Annotated[
        int | None,
        typer.Option(min=1, help="Go on without refused parcels if so many are left; by default all must do."),
    ] = None,
    ledger: LedgerFile = None,
    quarantine: Quarantine = None,
    max_bytes: MaxBytes = None,
    max_total: MaxTotal = None,
    max_parcels: MaxParcels = None,
    device: Device = "auto",
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Fuse parcels into one model: a folder that evaluate, predict and plain PyTorch can load."""
    from flyby.files import sole_writer
    from flyby.parcels.arrivals import Waiting
    from flyby.parcels.gate import open_gate
    from flyby.runs.pipeline import SERVER
    from flyby.runs.single import fuse_parcels, fusion_of

    waiting = Waiting.of(watch is not None, deadline, expect, min_sites if watch else None, poll)
    if (watch is None) is not bool(parcels):
        raise BadInput("name the .parcel files, or the folder in which they arrive with --watch INBOX, and not both")
    entrance: dict[str, Any] = {"trust": trust, "require_signed": require_signed, "ledger": ledger}
    entrance |= {"max_bytes": max_bytes, "max_total": max_total, "max_parcels": max_parcels}
    with sole_writer(out):
        fusion_of(fusion, settings or (), out)  # nobody waits for hours to hear of a misspelt word
        came = (
            waiting.gather(watch, lambda path: open_gate(SERVER, out, **entrance).check(path).manifest)
            if watch and waiting
            else None
        )
        gate = open_gate(SERVER, out, quarantine=quarantine, **entrance)
        facts = fuse_parcels(
            came.files(rejected=quarantine is not None) if came else parcels or [],
            out,
            fusion,
            settings or (),
            proxy=proxy,
            seed=seed,
            export=export,
            device=device,
            gate=gate,
            validation=validation,
            min_sites=waiting.quorum.least if waiting else min_sites,
            ledger=ledger,
        )
    _tell(came, facts)
    for line in [*(one.line for one in gate.refused), *gate.notes]:
        print(f"note: {line}", file=sys.stderr)
    say(
        facts,
        as_json,
        f"{out}: {facts['kind']} from {facts['sites']} sites ({facts['bytes_up']:,} bytes received); try it: flyby"
        f" evaluate {out} --data PATH",
    )


def _tell(came: Arrivals | None, facts: dict[str, Any]) -> None:
    """Say what took no part: files that were not whole, or that came after the wait had ended. What was refused was
    said while waiting."""
    if came is None:
        return
    facts["watch"] = came.row()
    for kind, names in (("not whole in time", list(came.unfinished)), ("too late", facts["watch"]["late"])):
        if names:
            print(f"note: {kind}: {', '.join(names)}", file=sys.stderr)


@app.command()
def orient(
    own: Annotated[Path, typer.Option(help="This node's own .parcel.")],
    received: Annotated[Path, typer.Option(help="The folder of parcels from nodes it met.")],
    data: Annotated[str, typer.Option(help="This node's own images.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    method: Annotated[str, typer.Option(help="fol, fol-a, fol-n, fol-an or gossip.")] = "fol",
    watch: Annotated[bool, typer.Option("--watch", help="Wait until enough parcels lie in --received.")] = False,
    deadline: Deadline = None,
    expect: Expect = None,
    min_sites: Annotated[
        int | None, typer.Option(min=1, help="With --watch: so many neighbours are enough at the deadline.")
    ] = None,
    poll: Poll = "5s",
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 0,
    export: Annotated[bool, typer.Option(help="Also write model.pt2, which plain PyTorch loads.")] = True,
    trust: TrustFile = None,
    require_signed: RequireSigned = False,
    ledger: LedgerFile = None,
    quarantine: Quarantine = None,
    max_bytes: MaxBytes = None,
    max_total: MaxTotal = None,
    max_parcels: MaxParcels = None,
    device: Device = "auto",
    size: Size = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Personalise one real node's model from those it received, on its own data, with no server."""
    from flyby.files import sole_writer
    from flyby.parcels import parcel
    from flyby.parcels.arrivals import Waiting
    from flyby.parcels.gate import open_gate
    from flyby.runs.population import orient_folder

    waiting = Waiting.of(watch, deadline, expect, min_sites, poll)
    entrance: dict[str, Any] = {"trust": trust, "require_signed": require_signed, "ledger": ledger}
    entrance |= {"max_bytes": max_bytes, "max_total": max_total, "max_parcels": max_parcels}
    arrivals: list[Arrivals] = []

    def wait(waiting: Waiting) -> list[Path]:
        me = parcel.read_manifest(own).sender
        arrivals.append(waiting.gather(received, lambda path: open_gate(me, out, **entrance).check(path).manifest))
        return arrivals[0].files(rejected=quarantine is not None)

    with sole_writer(out):
        facts = orient_folder(
            own,
            partial(wait, waiting) if waiting else received,
            data,
            out,
            variant=method,
            size=size,
            assignments=settings or (),
            seed=seed,
            device=device,
            export=export,
            quarantine=quarantine,
            **entrance,
        )
    _tell(arrivals[0] if arrivals else None, facts)
    for line in facts["log"]:
        print(f"note: {line}", file=sys.stderr)
    chosen = ", ".join(facts["chosen"]) or "none but itself"
    say(
        facts,
        as_json,
        f"{out}: {facts['node']} from {facts['used']} of {facts['received']} received models; in its ensemble:"
        f" {chosen}",
    )


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="A fused folder, a run folder or a .parcel.")],
    data: Annotated[str, typer.Option(help="Labelled images; the test split where there is one.")],
    size: Size = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Accuracy of a model on labelled data, overall and per class."""
    from flyby.data.sources import load
    from flyby.fusion import load_predictor
    from flyby.fusion.evaluation import accuracy, evaluate_dataset, per_class
    from flyby.runs.config import pick_device

    predictor = load_predictor(model)
    bundle = load(data, size=size, holdout=0.2 if data.startswith("digits") else 0.0)
    judged: Dataset = bundle.test or bundle.train
    scores, part = evaluate_dataset(predictor, judged, pick_device(device))
    by_class = dict(zip(judged.class_names, per_class(scores, part.labels, judged.classes), strict=True))
    facts = {
        "model": str(model),
        "data": data,
        "images": len(judged),
        "accuracy": accuracy(scores, part.labels),
        "per_class": by_class,
    }
    lines = [
        f"accuracy {facts['accuracy']:.4f} on {len(judged)} images",
        *(f"  {n:<20} {a:.4f}" for n, a in by_class.items() if a is not None),
    ]
    say(facts, as_json, "\n".join(lines))


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A fused folder, a run folder or a .parcel.")],
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Say what is in some images."""
    import torch

    from flyby.data.sources import read_images
    from flyby.fusion import load_predictor
    from flyby.fusion.evaluation import scores_of
    from flyby.runs.config import pick_device

    predictor = load_predictor(model)
    pixels = torch.from_numpy(read_images(images, predictor.channels, predictor.size))
    chances = predictor.chances(scores_of(predictor, pixels, pick_device(device)))
    rows = [
        {"image": str(path), "class": predictor.class_names[int(p.argmax())], "probability": float(p.max())}
        for path, p in zip(images, chances, strict=True)
    ]
    say(rows, as_json, "\n".join(f"{r['image']}: {r['class']} ({r['probability']:.2f})" for r in rows))


# These last: help lists commands in the order in which they come.
app.command()(studies.report)
app.command()(studies.study)
app.command()(catalogue.methods)
app.command("data")(catalogue.data_command)
app.command()(audit.audit)
app.command()(bench.bench)
app.command()(keys.sign)
app.add_typer(keys.app, name="keys")
app.add_typer(flower.app, name="flower")
