"""A population of nodes that meet and personalise: the split, everybody's pretraining, the meetings, and FOL at the
evaluated nodes.

Pretraining goes through the same jobs and the same store of uploads as every other run, so that all variants share it.
Only evaluated nodes do the heavy work (all nodes, where a neighbour sends its ``current`` model); a finished node is on
disk and is skipped by ``--resume``.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flyby.data.dataset import DataBundle
from flyby.data.site import Site, site_of, whole_site
from flyby.data.sources import load
from flyby.data.splits import Split, make_split
from flyby.engines.engine import Job, engine_named
from flyby.errors import BadInput, unknown
from flyby.files import atomic_folder, file_digest, read_json, write_json, write_text
from flyby.fusion import load_predictor, save_predictor
from flyby.fusion.evaluation import accuracy, scores_of
from flyby.fusion.predictor import Predictor, Single
from flyby.orient.admit import read_inbox
from flyby.orient.candidate import Candidate
from flyby.orient.collect import Schedule, make_schedule, record_round
from flyby.orient.pipeline import Personal, check_site, orient
from flyby.orient.settings import FleetSettings, OrientSettings, stage_defaults
from flyby.parcels import parcel
from flyby.parcels.gate import open_gate, remember
from flyby.parcels.ledger import Ledger
from flyby.parcels.parcel import Parcel
from flyby.report import orient_report
from flyby.runs.attacks import assault, met, success
from flyby.runs.config import Plan, RunConfig, pick_device, plan
from flyby.runs.methods import method_named
from flyby.runs.pipeline import (
    check_names,
    check_same_split,
    collect,
    describe,
    hardware,
    peak_memory_mb,
    sweep,
    uploads,
    versions,
)
from flyby.runs.progress import Progress
from flyby.settings import build, parse_assignment


@dataclass
class Node:
    """One node between rounds: its data, every version of its model so far, the peers it kept, and what was measured."""

    site: Site
    versions: list[Parcel]
    kept: list[Candidate] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def run_population(
    config: RunConfig, out: Path, *, engine: str, device: str, command: str, quiet: bool, store: Path | None
) -> dict[str, Any]:
    """``flyby run`` for the FOL methods, in a locked folder; returns the result that is also in ``result.json``."""
    from flyby.report.report import write_report

    if config.fusion_name is not None or config.admission != "none":
        word = "--fusion" if config.fusion_name is not None else "admission"
        raise BadInput(f"{config.method} has no server, so {word} means nothing to it; leave it out")
    started = time.perf_counter()
    bundle = config.data.load(progress=not quiet)
    settings, plans = plan_fleet(config, bundle)
    split = make_split(bundle.train, config.split, config.seed)
    names = list(split.shares)
    check_names(names)
    judged = evaluated(settings.eval_nodes, names)
    if config.attack.kind != "none" and settings.sends == "current":
        raise BadInput(
            "an attack forges what is sent first, and under orient.sends=current nodes send what they made of it; leave"
            " that out"
        )
    _check_parts(split, judged)
    check_same_split(split, out)
    split.save(out / "split.json")
    resolved = {
        "recipes": [p.recipe.model_dump(mode="json") for p in plans],
        "orient": settings.model_dump(mode="json"),
    }
    write_json(out / "config.json", {**config.model_dump(mode="json"), "resolved": resolved})
    schedule = the_schedule(settings, names, config.seed)
    schedule.save(out / "schedule.json")
    loaded = time.perf_counter()

    jobs = fleet_jobs(plans, split, out, device, store)
    sweep(out, *{job.folder for job in jobs})
    missing = [job for job in jobs if not job.done()]
    with Progress(f"pretraining for {config.method}", plans[0].recipe.train.epochs, len(missing), quiet) as bar:
        engine_named(engine)(missing, bar.on_epoch)
    write_text(
        out / "metrics.jsonl", "".join(line + "\n" for job in jobs for line in job.rows_path.read_text().splitlines())
    )
    sent, liars = assault(
        config.attack, jobs, collect(jobs, out), bundle, split, judged if len(judged) < len(names) else ()
    )
    paths, judged = dict(zip(names, sent, strict=True)), [name for name in judged if name not in liars]
    trained = time.perf_counter()

    variant = method_named(config.method).orient or "fol"
    ledger = Ledger()
    facts = personalise(
        config.seed, variant, settings, schedule, bundle, split, paths, judged, ledger, out, device, quiet
    )
    ledger.save(out / "ledger.json")
    threat = met(
        facts,
        {name: [s for e in range(settings.rounds) for s in schedule.senders(name, e + 1)] for name in judged},
        liars,
    )
    if config.attack.kind == "backdoor":
        fooled = [
            success(load_predictor(out / "personal" / n), site_of(bundle, split, n).test, config.attack, device)
            for n in judged
        ]
        threat["attack_success"] = statistics.fmean(rate for rate in fooled if rate is not None)
    own = {name: facts[name]["answer"] for name in judged}
    ended = time.perf_counter()
    timings = {"load": loaded - started, "pretrain": trained - loaded, "orient": ended - trained}
    write_json(out / "extra.json", orient_report.sections(facts, variant, settings))
    result = {
        **describe(config, plans[0], split, bundle),
        "accuracy": sum(own.values()) / len(own),
        "per_client": own,
        "local_per_client": {name: facts[name]["local"] for name in judged},
        "by_round": {name: by_round(facts[name]) for name in judged},
        **threat,
        "per_class": orient_report.per_class(facts, split.class_names),
        "model": ", ".join(dict.fromkeys(p.recipe.spec.name for p in plans)),
        "rounds": settings.rounds,
        "buffer": settings.buffer,
        "top": settings.top,
        "uploads": len(ledger.crossings),
        "bytes_up": ledger.total_bytes,
        "bytes_down": 0,
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
    write_report(out)
    return result


def plan_fleet(config: RunConfig, bundle: DataBundle) -> tuple[FleetSettings, list[Plan]]:
    """The settings with every default filled in, and one plan an architecture of the fleet."""
    train, stages = stage_defaults(bundle.train.size)
    settings = build(FleetSettings, {**stages, **config.orient}, "orient")
    config = config.model_copy(update={"train": {**train, **config.train}})
    kinds = settings.fleet or (config.model.name,)
    return settings, [
        plan(config.model_copy(update={"model": config.model.model_copy(update={"name": kind})}), bundle)
        for kind in kinds
    ]


def fleet_jobs(plans: Sequence[Plan], split: Split, out: Path, device: str, store: Path | None) -> list[Job]:
    """One pretraining job a node, the architectures dealt in turn."""
    each = [uploads(one, split, out, device, store) for one in plans]
    return [each[i % len(each)][i] for i in range(len(split.shares))]


def evaluated(wanted: Sequence[str], names: list[str]) -> list[str]:
    """The evaluated nodes' names, from numbers or names; all where none is wanted in particular."""
    chosen = []
    for word in wanted:
        if word not in names and not (word.isdecimal() and int(word) < len(names)):
            raise (
                unknown("node", word, names)
                if not word.isdecimal()
                else BadInput(f"there is no node {word}: they are 0 to {len(names) - 1}")
            )
        chosen.append(word if word in names else names[int(word)])
    return list(dict.fromkeys(chosen)) or names


def _check_parts(split: Split, judged: list[str]) -> None:
    for name in judged:
        share = split.shares[name]
        if not (len(share.val) and len(share.test)):
            raise BadInput(
                f"{name} has {len(share.val)} validation and {len(share.test)} test images of its own, and"
                " personalisation needs both; use --split fol, or --set split.val=0.15 --set split.test=0.15"
            )


def the_schedule(settings: FleetSettings, names: list[str], seed: int) -> Schedule:
    if settings.meetings is None:
        return make_schedule(names, settings.rounds, settings.buffer, settings.top, seed)
    schedule = Schedule.load(settings.meetings)
    if set(schedule.nodes) != set(names) or len(schedule.rounds) < settings.rounds:
        raise BadInput(
            f"{settings.meetings} is for {len(schedule.nodes)} nodes and {len(schedule.rounds)} rounds, this run has"
            f" {len(names)} and {settings.rounds} (or other names); make one for this run"
        )
    return schedule


def personalise(
    seed: int,
    variant: str,
    settings: FleetSettings,
    schedule: Schedule,
    bundle: DataBundle,
    split: Split,
    paths: dict[str, Path],
    judged: list[str],
    ledger: Ledger,
    out: Path,
    device: str,
    quiet: bool,
) -> dict[str, dict[str, Any]]:
    """All rounds of all nodes that work; facts of the evaluated ones by name. Where only pretrained models travel,
    nodes go one after another, each through all its rounds; where current ones do, rounds go one after another, each
    over all nodes."""
    rounds = range(1, settings.rounds + 1)
    current = settings.sends == "current"
    finished = {
        name: read_json(_node_path(out, name)) for name in judged if _node_path(out, name).exists() and not current
    }
    workers = list(split.shares) if current else [name for name in judged if name not in finished]
    order = (
        [(name, e) for e in rounds for name in workers] if current else [(name, e) for name in workers for e in rounds]
    )
    pretrained = {name: parcel.read(path) for name, path in paths.items()} if workers else {}
    if not current:
        sizes = {name: (path.stat().st_size, file_digest(path)) for name, path in paths.items()}
        for e in rounds:
            record_round(ledger, schedule, e, sizes)
    nodes: dict[str, Node] = {}
    for name, e in order:
        if name not in nodes:
            nodes[name] = _start(site_of(bundle, split, name), pretrained[name], device)
        if current and name == workers[0]:
            record_round(ledger, schedule, e, {n: _crossing(_version(nodes.get(n), pretrained[n], e)) for n in workers})
        node = nodes[name]
        inbox = [_version(nodes.get(s) if current else None, pretrained[s], e) for s in schedule.senders(name, e)]
        made = orient(
            node.versions[-1], inbox, node.site, settings, seed, device, variant=variant, kept=node.kept, number=e
        )
        node.versions.append(made.own)
        node.kept = made.kept
        if name in judged:
            _measure(node, made, e, device)
            if not quiet:
                _say(name, e, node.facts)
        if e == settings.rounds:
            if name in judged:
                finished[name] = _finish(node, name, made, device, out, variant)
            node.kept = []
    return {name: finished[name] for name in judged}


def _start(site: Site, own: Parcel, device: str) -> Node:
    local = Single([own.manifest.spec], own.manifest.class_names, [own.network()])
    facts = {
        "model": own.manifest.spec.name,
        "train": len(site.train),
        "val": len(site.val),
        "test": len(site.test),
        "rounds": [],
    }
    return Node(site, [own], facts=facts | {"local": _own_test(local, site, device)})


def _version(node: Node | None, pretrained: Parcel, number: int) -> Parcel:
    """What a sender gives in round ``number``: its model as it was before the round, or the pretrained one."""
    return pretrained if node is None else node.versions[number - 1]


def _crossing(item: Parcel) -> tuple[int, str]:
    return item.size, item.digest


def _own_test(predictor: Predictor, site: Site, device: str) -> float:
    return accuracy(scores_of(predictor, site.test.images, device), site.test.labels)


def _measure(node: Node, made: Personal, number: int, device: str) -> None:
    node.facts["rounds"].append(
        {
            "round": number,
            "student": _own_test(made.student, node.site, device),
            "teacher": _own_test(made.teacher, node.site, device),
            **plain({"candidates": made.rows, "log": made.log, **made.facts}),
        }
    )


def by_round(facts: dict[str, Any]) -> dict[str, Any]:
    """A node's own-test accuracies: alone, and after every round its student's and its teacher's; with the number of
    images they stand on."""
    return {
        "images": facts["test"],
        "local": facts["local"],
        **{who: [r[who] for r in facts["rounds"]] for who in ("student", "teacher")},
    }


def _finish(node: Node, name: str, made: Personal, device: str, out: Path, variant: str) -> dict[str, Any]:
    scores, labels = scores_of(made.predictor, node.site.test.images, device), node.site.test.labels
    classes = len(node.site.class_names)
    right = torch.bincount(labels[scores.argmax(1) == labels], minlength=classes)
    node.facts |= {
        "answer": accuracy(scores, labels),
        "right": right.tolist(),
        "seen": torch.bincount(labels, minlength=classes).tolist(),
    }
    save_predictor(
        made.predictor,
        out / "personal" / name,
        {"method": variant, "node": name, "own-test accuracy": node.facts["answer"]},
        export=False,
    )
    write_json(_node_path(out, name), node.facts)
    return node.facts


def plain(value: Any) -> Any:
    """The same value for a JSON file: what is not a finite number becomes null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _node_path(out: Path, name: str) -> Path:
    return out / "nodes" / f"{name}.json"


def _say(name: str, number: int, facts: dict[str, Any]) -> None:
    one = facts["rounds"][-1]
    peers = sum(c["sender"] != "self" for c in one["candidates"])
    spent = sum(one["seconds"].values())
    print(
        f"{name} round {number}: {peers} neighbours, {len(one['log'])} notes, local {facts['local']:.4f}, student"
        f" {one['student']:.4f}, teacher {one['teacher']:.4f}, {spent:.1f} s",
        file=sys.stderr,
        flush=True,
    )


def orient_folder(
    own_path: Path,
    inbox: Path | Callable[[], Sequence[Path]],
    data: str,
    out: Path,
    *,
    variant: str = "fol",
    size: int | None = None,
    assignments: Sequence[str] = (),
    seed: int = 0,
    device: str = "auto",
    export: bool = True,
    trust: Path | None = None,
    require_signed: bool = False,
    ledger: Path | None = None,
    quarantine: Path | None = None,
    **limits: int | None,
) -> dict[str, Any]:
    """``flyby orient``: one real node, its own parcel, a folder of received ones (which come through a gate) and its
    own images; writes a deployable folder."""
    if out.is_dir() and any(out.iterdir()) and not (out / "model.json").exists():
        raise BadInput(f"{out} holds something else than a model; name a new folder with --out")
    if variant not in ("fol", "fol-a", "fol-n", "fol-an", "gossip"):
        raise unknown("variant of FOL", variant, ("fol", "fol-a", "fol-n", "fol-an", "gossip"))
    own = parcel.read(own_path)
    spec = own.manifest.spec
    site = whole_site(load(data, size=size or spec.size[0], holdout=0.0), own.manifest.sender, 0.15, seed)
    check_site(own, site, variant)
    values = dict(_assignment(text) for text in assignments)
    settings = build(OrientSettings, {**stage_defaults(site.size)[1], **values}, "orient")
    files = inbox() if callable(inbox) else inbox  # a wait, once all else is known to be right
    gate = open_gate(
        own.manifest.sender,
        out,
        trust=trust,
        require_signed=require_signed,
        ledger=ledger,
        quarantine=quarantine,
        **limits,
    )
    received, refused = read_inbox(files, gate, own)
    made = orient(own, received, site, settings, seed, pick_device(device), variant=variant)
    scores = {row["sender"]: row["score"] for row in made.rows}
    facts = plain({"log": refused + gate.notes + made.log, "candidates": made.rows, **made.facts})
    with atomic_folder(out) as folder:  # the model never stands there without the ledger of what went into it
        card = {"method": variant, "node": own.manifest.sender, "neighbours": len(made.rows) - 1}
        save_predictor(made.predictor, folder, card, export=export)
        write_json(folder / "orient.json", facts)
        gate.ledger.save(folder / "ledger.json")
        parcel.write(made.own, folder / f"{own.manifest.sender}.parcel")
    remember(gate, ledger)
    return {
        "out": str(out),
        "variant": variant,
        "node": own.manifest.sender,
        "received": len(received) + len(refused),
        "used": len(made.rows) - 1,
        "chosen": [row["sender"] for row in made.rows if row["chosen"]],
        "scores": scores,
        "log": facts["log"],
        "bytes_received": gate.ledger.total_bytes,
        "refused": [one.row() for one in gate.refused],
        "files": sorted(p.name for p in out.iterdir()),
    }


def _assignment(text: str) -> tuple[str, Any]:
    key, value = parse_assignment(text)
    return key.removeprefix("orient."), value
