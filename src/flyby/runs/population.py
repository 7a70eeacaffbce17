"""A population of nodes that meet and personalise: who is judged, who meets whom, and FOL at the judged nodes.

Only judged nodes do the heavy work (all nodes, where a neighbour sends its ``current`` model); a finished node is on
disk and is skipped by ``--resume``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flyby.data.dataset import DataBundle
from flyby.data.site import Site, site_of
from flyby.data.splits import Split
from flyby.errors import BadInput, unknown
from flyby.files import file_digest, read_json, write_json
from flyby.fusion.evaluation import accuracy, scores_of
from flyby.fusion.predictor import Predictor, Single, save_predictor
from flyby.meeting.candidate import Candidate
from flyby.meeting.collect import Schedule, make_schedule, record_round
from flyby.meeting.pipeline import History, Personal, orient
from flyby.meeting.settings import FleetSettings, stage_defaults
from flyby.parcels import parcel
from flyby.parcels.ledger import Ledger
from flyby.parcels.parcel import Parcel
from flyby.runs.attacks import success
from flyby.runs.config import Plan, RunConfig, plan
from flyby.runs.folder import Run
from flyby.runs.methods import METHODS
from flyby.runs.node import plain
from flyby.settings import build

log = logging.getLogger(__name__)


def plan_fleet(config: RunConfig, bundle: DataBundle) -> tuple[FleetSettings, list[Plan]]:
    """The settings with every default filled in, and one plan per architecture of the fleet."""
    if config.fusion_name is not None or config.admission != "none":
        word = "--fusion" if config.fusion_name is not None else "admission"
        raise BadInput(f"{config.method} has no server, so {word} means nothing to it; leave it out")
    train, stages = stage_defaults(bundle.train.size)
    settings = build(FleetSettings, {**stages, **config.orient}, "orient")
    if config.attack.kind != "none" and settings.sends == "current":
        raise BadInput(
            "an attack forges what is sent first, and under orient.sends=current nodes send what they made of it; leave"
            " that out"
        )
    config = config.model_copy(update={"train": {**train, **config.train}})
    kinds = settings.fleet or (config.model.name,)
    models = [config.model.model_copy(update={"name": kind}) for kind in kinds]
    return settings, [plan(config.model_copy(update={"model": model}), bundle) for model in models]


@dataclass
class Node:
    """One node between rounds: its data, every version of its model, the peers it kept, and what was measured."""

    site: Site
    versions: list[Parcel]
    kept: list[Candidate] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Population:
    """All nodes of a run and the rounds in which they meet. ``judged`` are the nodes that are measured."""

    config: RunConfig
    settings: FleetSettings
    bundle: DataBundle
    split: Split
    judged: list[str]
    schedule: Schedule
    device: str = "cpu"
    keep: bool = True
    ledger: Ledger = field(default_factory=Ledger)

    @classmethod
    def of(cls, config: RunConfig, settings: FleetSettings, bundle: DataBundle, split: Split) -> Population:
        judged = evaluated(settings.eval_nodes, list(split.shares))
        _check_parts(split, judged)
        schedule = the_schedule(settings, list(split.shares), config.seed)
        return cls(config, settings, bundle, split, judged, schedule)

    @property
    def variant(self) -> str:
        return METHODS[self.config.method].orient or "fol"

    def met(self) -> dict[str, list[str]]:
        """Whose models reach each judged node, over all rounds."""
        rounds = range(1, self.settings.rounds + 1)
        return {name: [s for e in rounds for s in self.schedule.senders(name, e)] for name in self.judged}

    def personalise(self, paths: Mapping[str, Path], run: Run) -> dict[str, dict[str, Any]]:
        """All rounds of all nodes that work; facts of the judged ones by name. Where only pretrained models travel,
        nodes go one after another, each through all its rounds; where current ones do, rounds go one after another,
        each over all nodes."""
        current = self.settings.sends == "current"
        done = [] if current else [name for name in self.judged if run.node(name).exists()]
        workers = list(self.split.shares) if current else [name for name in self.judged if name not in done]
        finished: dict[str, dict[str, Any]] = {name: read_json(run.node(name)) for name in done}
        pretrained = {name: parcel.read(path) for name, path in paths.items()} if workers else {}
        if not current:
            sizes = {name: (path.stat().st_size, file_digest(path)) for name, path in paths.items()}
            for e in range(1, self.settings.rounds + 1):
                record_round(self.ledger, self.schedule, e, sizes)
        nodes: dict[str, Node] = {}
        for name, e in self.turns(workers):
            if name not in nodes:
                nodes[name] = self.start(name, pretrained[name])
            if current and name == workers[0]:
                sent = {n: _version(nodes.get(n), pretrained[n], e) for n in workers}
                record_round(self.ledger, self.schedule, e, {n: (p.size, p.digest) for n, p in sent.items()})
            senders = self.schedule.senders(name, e)
            inbox = [_version(nodes.get(s) if current else None, pretrained[s], e) for s in senders]
            made = self.round(nodes[name], inbox, e, judged=name in self.judged)
            if e == self.settings.rounds:
                if name in self.judged:
                    finished[name] = self.finish(nodes[name], name, made, run)
                nodes[name].kept = []
        return {name: finished[name] for name in self.judged}

    def turns(self, workers: Sequence[str]) -> Iterator[tuple[str, int]]:
        rounds = range(1, self.settings.rounds + 1)
        if self.settings.sends == "current":
            return ((name, e) for e in rounds for name in workers)
        return ((name, e) for name in workers for e in rounds)

    def start(self, name: str, own: Parcel) -> Node:
        site, manifest = site_of(self.bundle, self.split, name), own.manifest
        local = Single([manifest.spec], manifest.class_names, [own.network()])
        counts = {"train": len(site.train), "val": len(site.val), "test": len(site.test)}
        facts = {"model": manifest.spec.name, **counts, "rounds": [], "local": self.own_test(local, site)}
        return Node(site, [own], facts=facts)

    def round(self, node: Node, inbox: Sequence[Parcel], number: int, judged: bool) -> Personal:
        """One round of one node: its new model and the peers it keeps are in it afterwards."""
        made = orient(
            node.versions[-1],
            inbox,
            node.site,
            self.settings,
            seed=self.config.seed,
            device=self.device,
            variant=self.variant,
            history=History(node.kept, number),
        )
        node.versions.append(made.own)
        node.kept = made.kept
        if judged:
            scores = {who: self.own_test(getattr(made, who), node.site) for who in ("student", "teacher")}
            facts = plain({"candidates": made.rows, "log": made.log, **made.facts})
            node.facts["rounds"].append({"round": number, **scores, **facts})
            _say(node.site.id, number, node.facts)
        return made

    def own_test(self, predictor: Predictor, site: Site) -> float:
        return accuracy(scores_of(predictor, site.test.images, self.device), site.test.labels)

    def finish(self, node: Node, name: str, made: Personal, run: Run) -> dict[str, Any]:
        """Judge a node's last model, and write down what was measured of it."""
        scores, labels = scores_of(made.predictor, node.site.test.images, self.device), node.site.test.labels
        classes, answer = len(node.site.class_names), accuracy(scores, labels)
        right = torch.bincount(labels[scores.argmax(1) == labels], minlength=classes)
        node.facts |= {"answer": answer, "right": right.tolist()}
        node.facts |= {"seen": torch.bincount(labels, minlength=classes).tolist()}
        if self.config.attack.kind == "backdoor":
            node.facts["fooled"] = success(made.predictor, node.site.test, self.config.attack, self.device)
        if self.keep:
            card = {"method": self.variant, "node": name, "own-test accuracy": answer}
            save_predictor(made.predictor, run.personal / name, card, export=False)
        write_json(run.node(name), node.facts)
        return node.facts


def evaluated(wanted: Sequence[str], names: list[str]) -> list[str]:
    """The judged nodes' names, from numbers or names; all where none is wanted in particular."""
    chosen = []
    for word in wanted:
        if word not in names and not (word.isdecimal() and int(word) < len(names)):
            if word.isdecimal():
                raise BadInput(f"there is no node {word}: they are 0 to {len(names) - 1}")
            raise unknown("node", word, names)
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


def _version(node: Node | None, pretrained: Parcel, number: int) -> Parcel:
    """What a sender gives in round ``number``: its model as it was before the round, or the pretrained one."""
    return pretrained if node is None else node.versions[number - 1]


def by_round(facts: dict[str, Any]) -> dict[str, Any]:
    """A node's own-test accuracies: alone, and after every round its student's and its teacher's; with the number of
    images they stand on."""
    series = {who: [r[who] for r in facts["rounds"]] for who in ("student", "teacher")}
    return {"images": facts["test"], "local": facts["local"], **series}


def _say(name: str, number: int, facts: dict[str, Any]) -> None:
    one = facts["rounds"][-1]
    peers = sum(c["sender"] != "self" for c in one["candidates"])
    log.info(
        "%s round %d: %d neighbours, %d notes, local %.4f, student %.4f, teacher %.4f, %.1f s",
        *(name, number, peers, len(one["log"]), facts["local"], one["student"], one["teacher"]),
        sum(one["seconds"].values()),
    )
