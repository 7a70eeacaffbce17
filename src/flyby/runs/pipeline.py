"""A ``Run`` is a folder: config, split, parcels, metrics, result, report. Resume = skip what is already there.

data -> split -> one parcel a site -> ledger -> fuse -> evaluate -> report, in this order and one way.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flyby import __version__, files
from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import Part, part_of, site_of
from flyby.data.splits import Split, make_split
from flyby.engines.engine import DataSettings, Job, engine_named, held
from flyby.engines.processes import workers_peak_mb
from flyby.errors import BadInput
from flyby.files import digest, read_json, write_json, write_text
from flyby.fusion import Inbox, Predictor, save_predictor
from flyby.fusion.evaluation import accuracy, own_accuracy, per_class, scores_of
from flyby.fusion.predictor import Single
from flyby.parcels import parcel
from flyby.parcels.ledger import Ledger
from flyby.runs.attacks import assault, entrance, success
from flyby.runs.config import Plan, RunConfig, pick_device, plan
from flyby.runs.methods import method_named
from flyby.runs.metrics import consistency
from flyby.runs.progress import Progress
from flyby.settings import build

SERVER = "server"
PROBE = 512  # images on which clients' features are compared
MANY = 20  # more clients than this are not compared pair by pair


def run(
    config: RunConfig,
    out: Path,
    *,
    engine: str | None = None,
    device: str = "auto",
    resume: bool = False,
    command: str = "",
    quiet: bool = False,
    store: Path | None = None,
    brief: bool = False,
) -> dict[str, Any]:
    """Do one run in folder ``out`` and return its result. ``store`` is a folder of uploads shared between runs;
    ``brief`` leaves out the report and the deployable folder, for the many cells of a study."""
    from flyby.report.report import write_report

    with locked(out), held(engine):
        if _already(config, out, resume):
            result: dict[str, Any] = read_json(out / "result.json")
            if not brief and not (out / "report.html").exists():  # it was stopped in the very last step
                write_report(out)
            return result
        device = pick_device(device)
        engine = engine or ("processes" if device == "cpu" and (os.cpu_count() or 1) > 1 else "inline")
        engine_named(engine)
        if method_named(config.method).orient:
            from flyby.runs.population import run_population

            return run_population(config, out, engine=engine, device=device, command=command, quiet=quiet, store=store)
        started = time.perf_counter()
        bundle = config.data.load(progress=not quiet)
        if bundle.broken and not quiet:
            print(f"note: {len(bundle.broken)} broken image(s) skipped, e.g. {bundle.broken[0]}", file=sys.stderr)
        todo = plan(config, bundle)
        if bundle.test is None:
            raise BadInput(f"{config.data.name} has no test images to judge by; set data.holdout above 0")
        split = make_split(bundle.train, config.split, config.seed)
        proxy = proxy_of(config, bundle, split) if todo.fusion else None
        check_names(split.shares)
        check_same_split(split, out)
        split.save(out / "split.json")
        write_json(
            out / "config.json", {**config.model_dump(mode="json"), "resolved": todo.recipe.model_dump(mode="json")}
        )
        loaded = time.perf_counter()

        jobs = uploads(todo, split, out, device, store)
        sweep(out, jobs[0].folder)
        missing = [job for job in jobs if not job.done()]
        with Progress(f"training {config.method}", todo.recipe.train.epochs, len(missing), quiet) as bar:
            engine_named(engine)(missing, bar.on_epoch)
        rows = [line for job in jobs for line in job.rows_path.read_text().splitlines()]
        write_text(out / "metrics.jsonl", "".join(line + "\n" for line in rows))
        trained = time.perf_counter()

        honest = collect(jobs, out)
        paths, liars = assault(config.attack, jobs, honest, bundle, split)
        clean = part_of(held_out(bundle, split)) if config.admission == "validated" else None
        let_in, ledger, seen = (
            entrance(SERVER, config.admission, paths, liars, clean, device) if todo.fusion else (paths, Ledger(), {})
        )
        ledger.save(out / "ledger.json")
        predictor = None
        if todo.fusion:
            fuse = engine_named(engine).fuse
            predictor = fuse(
                todo.fusion, Inbox(let_in), proxy=proxy, seed=config.seed, device=device, work=out / "server"
            )
            if todo.fusion.sections:
                write_json(out / "extra.json", todo.fusion.sections)
            if not brief:
                card = {"method": config.method, "fusion": todo.fusion.name, "sites": len(paths)}
                save_predictor(predictor, out / "global", card, export=False)
        fused = time.perf_counter()
        judged = judge(predictor, paths, bundle, split, device, config.locals)
        judged |= looked_into(todo, jobs, honest, bundle, device, proxy) | seen
        if predictor is not None and config.attack.kind == "backdoor":
            judged["attack_success"] = success(predictor, part_of(bundle.test), config.attack, device)
        ended = time.perf_counter()
        timings = {
            "load": loaded - started,
            "train": trained - loaded,
            "fuse": fused - trained,
            "evaluate": ended - fused,
        }
        result = {
            **describe(config, todo, split, bundle),
            **judged,
            "uploads": len(ledger.crossings),
            "bytes_up": ledger.bytes_up(SERVER),
            "bytes_down": ledger.bytes_down(SERVER),
            "seconds": round(ended - started, 3),
            "timings": {k: round(v, 3) for k, v in timings.items()},
            "engine": engine,
            "trained": len(missing),
            "peak_memory_mb": round(peak_memory_mb(), 1),
            "seed": config.seed,
            "versions": versions(),
            "hardware": hardware(device),
            "command": command,
        }
        write_json(out / "result.json", result)
        if not brief:
            write_report(out)
        return result


def _already(config: RunConfig, out: Path, resume: bool) -> bool:
    """Whether ``out`` holds the finished run already; refuses a folder that holds another run, or anything else."""
    if not (out / "config.json").exists():
        strange = sorted(p.name for p in out.iterdir() if p.name != "split.json" and not p.name.startswith("."))
        if strange:
            raise BadInput(
                f"{out} is not empty ({strange[0]!r} is in it) and is not a run; name a new folder with --out"
            )
        return False
    asked = {k: v for k, v in read_json(out / "config.json").items() if k != "resolved"}
    if not resume:
        raise BadInput(f"{out} already holds a run; add --resume to finish it, or name another folder with --out")
    # Read into the settings of today: what was added to them since the run began has its default there.
    old, new = (json.loads(c.model_dump_json()) for c in (build(RunConfig, asked, str(out / "config.json")), config))
    if old != new:
        changed = sorted(k for k in new if old.get(k) != new[k])
        raise BadInput(f"{out} holds a run with other settings ({', '.join(changed)}); --resume needs the same command")
    return (out / "result.json").exists()


def check_names(names: Iterable[str]) -> None:
    """A site's name stands in file names and parcels; one that cannot is refused before any training."""
    for name in names:
        if not re.fullmatch(r"(?!\.)[A-Za-z0-9._:@+-]{1,128}", name):
            raise BadInput(
                f"a site cannot be called {name!r}; use at most 128 letters, digits and . _ : @ + -, and no dot first"
            )


def check_same_split(split: Split, out: Path) -> None:
    """What was trained before an interruption belongs to the split of that time."""
    if (out / "split.json").exists() and Split.load(out / "split.json").hash != split.hash:
        raise BadInput(f"the data changed since the run in {out} began; name a new folder with --out")


def sweep(out: Path, *stores: Path) -> None:
    """Take away what a killed process left and nobody needs; the folder's lock is held, so nobody is writing it:
    half-written files, and checkpoints of sites whose upload is there. A store may be filled by another cell right now:
    what is fresh stays there."""
    for folder in (out, *stores):
        left = {*folder.rglob(".*.part"), *folder.rglob(".*.old")}
        files.sweep(left if folder.is_relative_to(out) else (path for path in left if _settled(path)))
        files.sweep(
            path
            for path in folder.glob("*.ckpt")
            if path.with_suffix(".parcel").exists() and path.with_suffix(".jsonl").exists()
        )


def _settled(path: Path, seconds: float = 10.0) -> bool:
    try:
        return time.time() - path.stat().st_mtime > seconds
    except OSError:
        return False


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """One process a run folder: a second one is told so instead of mixing its files in. A folder that stays empty is
    taken away again."""
    new = not out.exists()
    lock = out / ".lock"
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = open(lock, "w")  # noqa: SIM115
    except OSError as error:
        if error.errno in files.FULL:
            raise files.unwritable(lock, error) from None
        raise BadInput(f"cannot write to {out}: {error.strerror}; name another folder with --out") from None
    with handle:
        files.take_lock(handle, lock, out)
        try:
            yield
        finally:
            if new and [p.name for p in out.iterdir()] == [lock.name]:
                shutil.rmtree(out)


def uploads(todo: Plan, split: Split, out: Path, device: str, store: Path | None) -> list[Job]:
    """One job a site, in site order. Uploads of equal recipes over equal splits share one folder of the store."""
    key = todo.recipe.key(split.hash)
    folder = (store / key) if store else out / "parcels"
    return [
        Job(
            site=name,
            data=_absolute(todo.config.data),
            split=(out / "split.json").resolve(),
            recipe=todo.recipe,
            device=device,
            folder=folder.resolve(),
            key=key,
        )
        for name in split.shares
    ]


def _absolute(data: DataSettings) -> DataSettings:
    return data.model_copy(update={"name": str(Path(data.name).resolve())}) if Path(data.name).exists() else data


def collect(jobs: list[Job], out: Path) -> list[Path]:
    """The run's own parcels folder: hard links into the store where there is one, so that a run folder is always whole."""
    paths = []
    for job in jobs:
        path = out / "parcels" / f"{job.site}.parcel"
        if path.resolve() != job.parcel_path.resolve():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            try:
                os.link(job.parcel_path, path)
            except OSError:  # no links here, or another disk
                with job.parcel_path.open("rb") as source, files.atomic_open(path) as copy:
                    shutil.copyfileobj(source, copy)
        paths.append(path)
    return paths


def held_out(bundle: DataBundle, split: Split) -> Dataset:
    """The sites' validation parts together: labelled images that nobody trained on, which a server might own."""
    rows = np.concatenate([share.val for share in split.shares.values()])
    if not len(rows):
        raise BadInput("there are no held-out images for the server; keep some back with --set split.val=0.1")
    data = bundle.train
    return Dataset(data.images[rows], data.labels[rows], data.class_names, digest([data.digest, rows.tolist()]))


def proxy_of(config: RunConfig, bundle: DataBundle, split: Split) -> Dataset | None:
    """The named proxy images (``held-out``: the sites' validation parts); none of them may be a test image, whatever
    file they came from."""
    if config.proxy is None:
        return None
    if config.proxy == "held-out":
        return held_out(bundle, split)
    proxy = DataSettings(name=config.proxy, holdout=0.0).load().train
    if proxy.size != bundle.train.size:
        proxy = DataSettings(name=config.proxy, size=bundle.train.size[0], holdout=0.0).load().train
    if (proxy.size, proxy.channels) != (bundle.train.size, bundle.train.channels):
        raise BadInput(
            f"the proxy images are {proxy.size}x{proxy.channels}, the data's"
            f" {bundle.train.size}x{bundle.train.channels}; name others"
        )
    if bundle.test is not None:
        known = {image.tobytes() for image in bundle.test.images}
        seen = sum(image.tobytes() in known for image in proxy.images)
        if seen:
            raise BadInput(
                f"{seen} of the {len(proxy)} proxy images are test images; test data may choose nothing, so name other"
                " images"
            )
    return proxy


def judge(
    predictor: Predictor | None, paths: list[Path], bundle: DataBundle, split: Split, device: str, locals_too: bool
) -> dict[str, Any]:
    """Accuracies: on the common test set, per class, and per client on its own test data (or the common set weighted as
    its classes)."""
    assert bundle.test is not None
    test = part_of(bundle.test)
    classes = bundle.test.classes
    judged: dict[str, Any] = {}
    common = _scored(predictor, test, classes, device) if predictor is not None else None
    own: dict[str, float] = {}
    alone: dict[str, float] = {}
    each: list[list[float | None]] = []
    for path, name in zip(paths, split.shares, strict=True):
        mine = site_of(bundle, split, name).test if len(split.shares[name].test) else None
        judge_of = predictor
        scored = common
        if predictor is None or locals_too:
            made = parcel.read(path)
            local = Single([made.manifest.spec], made.manifest.class_names, [made.network()])
            alone_score = _scored(local, test, classes, device)
            alone[name] = alone_score[0]
            each.append(alone_score[1])
            if predictor is None:
                judge_of, scored = local, alone_score
        assert judge_of is not None
        assert scored is not None
        own[name] = (
            _scored(judge_of, mine, classes, device)[0]
            if mine is not None
            else own_accuracy(scored[1], split.counts[name])
        )
    if common is None:
        by_class = [
            sum(v for v in column if v is not None) / len(column) if column[0] is not None else None
            for column in zip(*each, strict=True)
        ]
        judged |= {"accuracy": sum(alone.values()) / len(alone)}
    else:
        by_class = common[1]
        judged |= {"accuracy": common[0]}
    judged |= {"per_client": own, "per_class": dict(zip(bundle.test.class_names, by_class, strict=True))}
    return judged | ({"local_accuracy": alone} if alone else {})


def looked_into(
    todo: Plan, jobs: list[Job], paths: list[Path], bundle: DataBundle, device: str, proxy: Any = None
) -> dict[str, Any]:
    """How alike the clients became, and what fusing their snapshots would have given: offline, with nothing in the
    ledger."""
    assert bundle.test is not None
    # Spread out: a test set may be sorted
    probe = part_of(bundle.test, range(0, len(bundle.test), -(-len(bundle.test) // PROBE))).images
    found: dict[str, Any] = {}
    kept = jobs[0].folder / "consistency.json"  # a fact about the uploads: rules that share them share it
    if len(paths) <= MANY and not kept.exists():
        write_json(kept, consistency([parcel.read(path) for path in paths], probe, todo.config.seed, device))
    if kept.exists():
        found["consistency"] = read_json(kept)
    snapshots = (
        sorted((jobs[0].folder / "snapshots").glob("[0-9]*")) if todo.fusion and todo.recipe.train.snapshots else []
    )
    if snapshots:
        test = part_of(bundle.test)
        found["checkpoints"] = []
        for folder in snapshots:
            assert todo.fusion is not None
            # In the sites' own order, as the run itself; a site that had stopped before that epoch is there with what
            # it sent.
            kept_then = [then if (then := folder / path.name).exists() else path for path in paths]
            predictor = todo.fusion.fuse(Inbox(kept_then), proxy=proxy, seed=todo.config.seed, device=device)
            found["checkpoints"].append(
                {"epoch": int(folder.name), "accuracy": _scored(predictor, test, bundle.test.classes, device)[0]}
            )
    return found


def _scored(predictor: Predictor, part: Part, classes: int, device: str) -> tuple[float, list[float | None]]:
    scores = scores_of(predictor, part.images, device)
    return accuracy(scores, part.labels), per_class(scores, part.labels, classes)


def describe(config: RunConfig, todo: Plan, split: Split, bundle: DataBundle) -> dict[str, Any]:
    recipe = todo.recipe
    return {
        "method": config.method,
        "objective": recipe.objective,
        "fusion": todo.fusion.name if todo.fusion else None,
        "model": recipe.spec.name,
        "parameters": recipe.spec.parameter_count(),
        "data": bundle.name,
        "split": split.settings.name,
        "split_hash": split.hash,
        "clients": len(split.shares),
        "alpha": split.settings.alpha,
        "epochs": recipe.train.epochs,
        "codec": recipe.codec,
    }


def versions() -> dict[str, str]:
    import numpy

    return {
        "flyby": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def hardware(device: str) -> str:
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name()} ({os.cpu_count()} CPU cores)"
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"


def peak_memory_mb() -> float:
    """The largest resident size of this process and, added to it, of each worker: an upper bound, since they share some
    pages."""
    own = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
    return own + workers_peak_mb()
