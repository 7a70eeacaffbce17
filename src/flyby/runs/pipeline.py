"""A run, from data to result, for both ways of working:

open -> train uploads -> (fuse and judge | orient and judge) -> finish, in this order and one way.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import part_of
from flyby.data.splits import Split, make_split
from flyby.engines.engine import engine_named, held
from flyby.engines.jobs import Job
from flyby.engines.processes import workers_peak_mb
from flyby.errors import BadInput
from flyby.files import write_json
from flyby.fusion.base import Server
from flyby.fusion.closed.base import ClosedForm
from flyby.fusion.closed.kept import write_kept
from flyby.fusion.evaluation import digest_of
from flyby.fusion.predictor import save_predictor
from flyby.machine import hardware, peak_memory_mb, pick_device, versions
from flyby.meeting.measure import per_class
from flyby.names import check_name
from flyby.parcels.inbox import Inbox
from flyby.parcels.ledger import Ledger
from flyby.runs.answers import Answers
from flyby.runs.attacks import assault, met, success
from flyby.runs.config import Plan, RunConfig, data_of, plan
from flyby.runs.crossing import Road
from flyby.runs.encounters import Encounters
from flyby.runs.folder import Result, Run
from flyby.runs.judge import Judge
from flyby.runs.methods import METHODS
from flyby.runs.population import Population, by_round, common_means, evenly, plan_fleet
from flyby.runs.progress import Progress
from flyby.runs.server import SERVER, entrance, held_out, proxy_of
from flyby.runs.site import jobs_of
from flyby.runs.stations import Passes, road_of
from flyby.training.loop import Row

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How a run is done, none of which changes a number. ``store`` is a folder of uploads that runs share; without
    ``keep`` no deployable folder is written, for the many cells of a study. ``follow`` is called with a run's folder
    when it begins to train, and gives what is called with every row of an epoch."""

    engine: str | None = None
    device: str = "auto"
    resume: bool = False
    command: str = ""
    quiet: bool = False
    store: Path | None = None
    keep: bool = True
    follow: Callable[[Path], Callable[[Row], None]] | None = None


@dataclass
class Opened:
    """A run that has begun: its data is loaded, its split is saved, and all that could be refused was not."""

    config: RunConfig
    run: Run
    options: Options
    bundle: DataBundle
    split: Split
    plans: Sequence[Plan]
    population: Population | None
    proxy: Dataset | None
    engine: str
    device: str
    road: Road | None = None
    marks: list[tuple[str, float]] = field(default_factory=lambda: [("", time.perf_counter())])

    def mark(self, stage: str) -> None:
        """A stage ends here."""
        self.marks.append((stage, time.perf_counter()))

    @property
    def timings(self) -> dict[str, float]:
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return {stage: round(end - start, 3) for (_, start), (stage, end) in pairs}


@dataclass
class Uploads:
    """What every site trained, and what crosses in its place: with an attack some of it is forged."""

    jobs: list[Job]
    trained: int
    honest: list[Path]
    sent: list[Path]
    liars: list[str]


def run(config: RunConfig, out: Path, options: Options | None = None) -> Result:
    """Do one run in folder ``out``, or go on with it, and return its result."""
    options, folder = options or Options(), Run(out)
    with folder.locked(), held(options.engine):
        if folder.already(config, options.resume):
            return folder.result()
        opened = open_run(config, folder, options)
        uploads = train_uploads(opened)
        found, ledger = (orient_and_judge if opened.population else fuse_and_judge)(opened, uploads)
        return finish(opened, uploads, found, ledger)


def open_run(config: RunConfig, folder: Run, options: Options) -> Opened:
    started = time.perf_counter()
    device = pick_device(options.device)
    engine = options.engine or ("processes" if device == "cpu" and (os.cpu_count() or 1) > 1 else "inline")
    engine_named(engine)
    bundle = data_of(config).load(progress=not options.quiet)
    settings, plans = plan_fleet(config, bundle) if METHODS[config.method].orient else (None, [plan(config, bundle)])
    if settings is None and bundle.test is None:
        raise BadInput(f"{config.data.name} has no test images to judge by; set data.holdout above 0")
    split = make_split(bundle.train, config.split, config.seed)
    shared = np.concatenate([share.train for share in split.shares.values()])  # as sites would agree on beforehand
    plans = [one.normalised(bundle.train, shared) for one in plans]
    proxy = proxy_of(config, bundle, split) if plans[0].fusion else None
    if config.judge == "held-out":
        held_out(bundle, split)  # that there are none is said before anything is trained
    for name in split.shares:
        check_name(name)
    resolved = plans[0].recipe.model_dump(mode="json")
    population, road = None, None
    if settings is not None:
        meet = Encounters if config.contacts.plan else Population
        population = meet.of(config, settings, bundle, split)
        population.device, population.keep = device, options.keep
        recipes = [one.recipe.model_dump(mode="json") for one in plans]
        resolved = {"recipes": recipes, "orient": settings.model_dump(mode="json")}
    else:
        road = road_of(config, list(split.shares), plans[0].fusion)
    folder.begin(config, resolved, split)
    for planned in (population, road):
        if planned is not None:
            planned.begin(folder)
    bundle.tell()
    marks = [("", started)]
    opened = Opened(config, folder, options, bundle, split, plans, population, proxy, engine, device, road, marks)
    opened.mark("load")
    return opened


def train_uploads(opened: Opened) -> Uploads:
    """One parcel per site, trained now or there already; the architectures of a fleet are dealt in turn."""
    config, split, run = opened.config, opened.split, opened.run
    each = [jobs_of(one, split, run, opened.device, opened.options.store) for one in opened.plans]
    jobs = [each[i % len(each)][i] for i in range(len(split.shares))]
    run.sweep(*{job.folder for job in jobs})
    missing = [job for job in jobs if not job.done()]
    title = f"{'pretraining for' if opened.population else 'training'} {config.method}"
    epochs = opened.plans[0].recipe.train.epochs
    follow = opened.options.follow(run.path) if opened.options.follow else None
    with Progress(title, epochs, len(missing), opened.options.quiet) as bar:
        engine_named(opened.engine)(missing, heard_by(bar.on_epoch, follow))
    run.write_metrics(jobs)
    if not opened.population:
        opened.mark("train")
    judged = opened.population.judged if opened.population else ()
    spared = judged if len(judged) < len(split.shares) else ()
    honest = run.collect(jobs)
    sent, liars = assault(config.attack, jobs, honest, opened.bundle, split, spared)
    if opened.population:
        opened.mark("pretrain")
    return Uploads(jobs, len(missing), honest, sent, liars)


def heard_by(*listeners: Callable[[Row], None] | None) -> Callable[[Row], None]:
    """One listener to every row of training, for all that are not None."""

    def hear(row: Row) -> None:
        for listener in listeners:
            if listener is not None:
                listener(row)

    return hear


def fuse_and_judge(opened: Opened, uploads: Uploads) -> tuple[dict[str, Any], Ledger]:
    """A server lets the parcels in and fuses them once; the result is judged, and so is each site's own model."""
    config, bundle, split, run, device = opened.config, opened.bundle, opened.split, opened.run, opened.device
    rule, sent = opened.plans[0].fusion, Inbox(uploads.sent)
    let_in, ledger, found, predictor = sent, Ledger(), dict[str, Any](), None
    passes = opened.road and Passes.of(opened.road, dict(zip(split.shares, uploads.sent, strict=True)), run)
    if rule is not None:
        came = list(passes.files.values()) if passes else uploads.sent
        clean = part_of(held_out(bundle, split)) if config.admission == "validated" else None
        reached = Inbox(came) if passes else sent
        let_in, ledger, found = entrance(rule, config.admission, reached, came, uploads.liars, clean, device)
    ledger.save(run.ledger)
    server = Server(opened.proxy, config.seed if config.server_seed is None else config.server_seed, device, run.server)
    if rule is not None:
        predictor = engine_named(opened.engine).fuse(rule, let_in, server)
        if server.report:
            write_json(run.extra, server.report)
        if opened.options.keep:
            card = {"method": config.method, "fusion": rule.name, "sites": len(sent)}
            save_predictor(predictor, run.model, card, export=False)
            if isinstance(rule, ClosedForm):
                write_kept(run.model, let_in, rule)  # so that a site can be added to it or taken out of it
    opened.mark("fuse")
    chosen_by = replace(bundle, test=held_out(bundle, split), validation=None) if config.judge == "held-out" else bundle
    judge = Judge(chosen_by, split, device)
    fused = None if predictor is None else judge.look(predictor, split.shares)
    if fused is not None:
        Answers.of(digest_of(judge.test.images), fused.right).save(run.right)
    found = judge.judged(fused, sent, config.locals) | {"test_images": len(judge.test)} | found
    if rule is not None and (teacher := rule.teacher(let_in, server)) is not None:
        found["teacher_accuracy"] = judge.look(teacher).accuracy
    honest = sent if uploads.sent == uploads.honest else Inbox(uploads.honest)
    start = config.seed if opened.plans[0].recipe.train.init == "shared" else None
    alike = judge.consistency(honest, start, uploads.jobs[0].folder / "consistency.json")
    found |= {} if alike is None else {"consistency": alike}
    found |= snapshots(opened, uploads, judge, server)
    if passes and rule is not None and predictor is not None:
        found |= passes.over_time(rule, server, judge, predictor, run)
    if predictor is not None and config.attack.kind == "backdoor":
        found["attack_success"] = success(predictor, judge.test, config.attack, device)
    opened.mark("evaluate")
    return found, ledger


def snapshots(opened: Opened, uploads: Uploads, judge: Judge, server: Server) -> dict[str, Any]:
    """What fusing the sites' snapshots would have given: offline, with nothing in the ledger."""
    rule = opened.plans[0].fusion
    if rule is None or not opened.plans[0].recipe.train.snapshots:
        return {}
    found = []
    for folder in sorted((uploads.jobs[0].folder / "snapshots").glob("[0-9]*")):
        # In the sites' own order, as the run itself; a site that had stopped before is there with what it sent.
        then = [path if not (folder / path.name).exists() else folder / path.name for path in uploads.honest]
        predictor = rule.fuse(Inbox(then), Server(server.proxy, server.seed, server.device))
        found.append({"epoch": int(folder.name), "accuracy": judge.look(predictor).accuracy})
    return {"checkpoints": found} if found else {}


def orient_and_judge(opened: Opened, uploads: Uploads) -> tuple[dict[str, Any], Ledger]:
    """No server: nodes meet, and each personalises its own model; the judged ones are measured."""
    population, config = opened.population, opened.config
    assert population is not None
    population.judged = [name for name in population.judged if name not in uploads.liars]
    paths = dict(zip(opened.split.shares, uploads.sent, strict=True))
    facts = population.personalise(paths, opened.run, engine_named(opened.engine))
    population.ledger.save(opened.run.ledger)
    settings, own = population.settings, {name: one["answer"] for name, one in facts.items()}
    found: dict[str, Any] = {
        "accuracy": sum(own.values()) / len(own),
        "per_client": own,
        "local_per_client": {name: one["local"] for name, one in facts.items()},
        "by_round": {name: by_round(one) for name, one in evenly(facts).items()},
        **common_means(facts),
        **met(facts, population.met(), uploads.liars),
        "per_class": per_class(facts, opened.split.class_names),
        "model": ", ".join(dict.fromkeys(one.recipe.spec.name for one in opened.plans)),
        "rounds": settings.rounds,
        "buffer": settings.buffer,
        "top": settings.top,
        "bytes_up": population.ledger.total_bytes,
        "bytes_down": 0,
    }
    if isinstance(population, Encounters):
        found |= population.findings(facts, opened.run)
    if config.attack.kind == "backdoor":
        rates = [one["fooled"] for one in facts.values() if one.get("fooled") is not None]
        found["attack_success"] = statistics.fmean(rates)
    opened.mark("orient")
    return found, population.ledger


def finish(opened: Opened, uploads: Uploads, found: dict[str, Any], ledger: Ledger) -> Result:
    config, split, todo = opened.config, opened.split, opened.plans[0]
    values = {
        "method": config.method,
        "objective": todo.recipe.objective,
        "fusion": todo.fusion.name if todo.fusion else None,
        "model": todo.recipe.spec.name,
        "parameters": todo.recipe.spec.parameter_count(),
        "data": opened.bundle.name,
        "split": split.settings.name,
        "split_hash": split.hash,
        "clients": len(split.shares),
        "alpha": split.settings.alpha,
        "epochs": todo.recipe.train.epochs,
        "codec": todo.recipe.codec,
        "uploads": len(ledger.crossings),
        "bytes_up": ledger.bytes_up(SERVER),
        "bytes_down": ledger.bytes_down(SERVER),
        "seconds": round(opened.marks[-1][1] - opened.marks[0][1], 3),
        "timings": opened.timings,
        "engine": opened.engine,
        "trained": uploads.trained,
        "peak_memory_mb": round(peak_memory_mb() + workers_peak_mb(), 1),
        "seed": config.seed,
        "versions": versions(),
        "hardware": hardware(opened.device),
        "command": opened.options.command,
    }
    return opened.run.finish(Result(**{**values, **found}))
