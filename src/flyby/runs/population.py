"""A population of nodes that meet and personalise: who is judged, who meets whom, and FOL at the judged nodes.

Only judged nodes do the heavy work (all nodes, where a neighbour sends its ``current`` model); a finished node is on
disk and is skipped by ``--resume``.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from flyby.data.dataset import DataBundle
from flyby.data.site import Site, site_of
from flyby.data.splits import Split
from flyby.engines.engine import Engine
from flyby.engines.jobs import bundle_of, split_at
from flyby.errors import BadInput, unknown
from flyby.files import digest, file_digest, plain, read_json, write_json
from flyby.fusion.evaluation import accuracy, scores_of
from flyby.fusion.predictor import Predictor, Single, save_predictor
from flyby.machine import as_a_site
from flyby.meeting.candidate import Candidate
from flyby.meeting.collect import Schedule, make_schedule, record_round
from flyby.meeting.pipeline import History, Personal, neighbours, orient
from flyby.meeting.settings import VARIANTS, FleetSettings, stage_defaults
from flyby.parcels import parcel
from flyby.parcels.ledger import Ledger
from flyby.parcels.parcel import Parcel
from flyby.runs.attacks import success
from flyby.runs.config import Plan, RunConfig, plan
from flyby.runs.folder import Run
from flyby.runs.judge import Common, series
from flyby.runs.memory import Memory
from flyby.runs.methods import METHODS
from flyby.settings import build

log = logging.getLogger(__name__)


def plan_fleet(config: RunConfig, bundle: DataBundle) -> tuple[FleetSettings, list[Plan]]:
    """The settings with every default filled in, and one plan per architecture of the fleet."""
    if config.fusion_name is not None or config.admission != "none":
        word = "--fusion" if config.fusion_name is not None else "admission"
        raise BadInput(f"{config.method} has no server, so {word} means nothing to it; leave it out")
    train, stages = stage_defaults(bundle.train.size, METHODS[config.method].orient or "fol")
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
    memory: Memory | None = None

    def remember(self) -> None:
        """So that this round is not done again."""
        if self.memory is not None:
            self.memory.note(len(self.versions) - 1, self.versions[-1], self.kept, self.facts["rounds"])


@dataclass
class Population:
    """All nodes of a run and the rounds in which they meet. ``judged`` are the nodes that are measured."""

    config: RunConfig
    settings: FleetSettings
    bundle: DataBundle
    split: Split
    judged: list[str]
    schedule: Schedule = field(default_factory=lambda: Schedule((), ()))
    device: str = "cpu"
    keep: bool = True
    ledger: Ledger = field(default_factory=Ledger)

    @classmethod
    def of(cls, config: RunConfig, settings: FleetSettings, bundle: DataBundle, split: Split) -> Population:
        schedule = the_schedule(settings, list(split.shares), config.seed)
        return cls(config, settings, bundle, split, judged_of(settings, split), schedule)

    def begin(self, run: Run) -> None:
        """Write down who will meet whom."""
        self.schedule.save(run.schedule)

    @property
    def variant(self) -> str:
        return METHODS[self.config.method].orient or "fol"

    @cached_property
    def common(self) -> Common | None:
        """Opened when the first node is judged: on the device, where all networks will look at it."""
        return Common.of(self.bundle, self.device, self.settings.judge_images, self.config.seed)

    def met(self) -> dict[str, list[str]]:
        """Whose models reach each judged node, over all rounds."""
        rounds = range(1, self.settings.rounds + 1)
        return {name: [s for e in rounds for s in self.schedule.senders(name, e)] for name in self.judged}

    def personalise(self, paths: Mapping[str, Path], run: Run, engine: Engine) -> dict[str, dict[str, Any]]:
        """All rounds of all nodes that work; facts of the judged ones by name. Where only pretrained models travel,
        nodes know nothing of each other, and as many work at once as the engine can; where current ones do, rounds go
        one after another, each over all nodes."""
        if self.settings.sends == "current":
            with as_a_site(self.device):
                return self.together(paths, run)
        sizes = {name: (path.stat().st_size, file_digest(path)) for name, path in paths.items()}
        for e in range(1, self.settings.rounds + 1):
            record_round(self.ledger, self.schedule, e, sizes)
        rounds = range(1, self.settings.rounds + 1)
        inboxes = {name: [[paths[s] for s in self.schedule.senders(name, e)] for e in rounds] for name in self.judged}
        return self.apart(paths, inboxes, run, engine)

    def apart(
        self, paths: Mapping[str, Path], inboxes: Mapping[str, Sequence[Sequence[Path]]], run: Run, engine: Engine
    ) -> dict[str, dict[str, Any]]:
        """The judged nodes, each through the rounds that its inboxes make, as many at once as the engine can."""
        finished = {name: read_json(run.node(name)) for name in self.judged if run.node(name).exists()}
        todo = [name for name in self.judged if name not in finished]
        largest_first = sorted(todo, key=lambda name: -len(self.split.shares[name].train))
        seal = digest([file_digest(run.config), self.split.hash])
        where = run.path.resolve(), seal, self.device, self.keep
        turns = [
            Turn(name, *where, paths[name], tuple(tuple(inbox) for inbox in inboxes[name])) for name in largest_first
        ]
        for turn, facts in engine.spread(take, turns, self.device):
            finished[turn.name] = facts
            _say(turn.name, facts)
        return {name: finished[name] for name in self.judged}

    def alone(self, name: str, own: Path, inboxes: Sequence[Sequence[Path]], run: Run) -> dict[str, Any]:
        """One node through all its rounds, from pretrained models."""
        node, made = self.start(name, parcel.read(own), run), None
        for number in range(len(node.versions), len(inboxes) + 1):
            made = self.round(node, [parcel.read(path) for path in inboxes[number - 1]], number, judged=True)
            if number < len(inboxes):
                node.remember()
        facts = self.finish(node, name, made, run)
        shutil.rmtree(run.memory / name, ignore_errors=True)
        return facts

    def together(self, paths: Mapping[str, Path], run: Run) -> dict[str, dict[str, Any]]:
        """All nodes, round by round: what is sent in one is what the round before it made."""
        nodes = {name: self.start(name, parcel.read(path), run) for name, path in paths.items()}
        finished: dict[str, dict[str, Any]] = {}
        for e in range(1, self.settings.rounds + 1):
            sent = {name: node.versions[-1] for name, node in nodes.items()}
            record_round(self.ledger, self.schedule, e, {name: (p.size, p.digest) for name, p in sent.items()})
            for name, node in nodes.items():
                inbox = [sent[s] for s in self.schedule.senders(name, e)]
                made = self.round(node, inbox, e, judged=name in self.judged)
                if e == self.settings.rounds and name in self.judged:
                    finished[name] = self.finish(node, name, made, run)
                    _say(name, finished[name])
        return {name: finished[name] for name in self.judged}

    def start(self, name: str, own: Parcel, run: Run) -> Node:
        """A node before its first round; where nodes meet by a plan, after as many as it remembers."""
        site, manifest = site_of(self.bundle, self.split, name), own.manifest
        local = Single([manifest.spec], manifest.class_names, [own.network()])
        counts = {"train": len(site.train), "val": len(site.val), "test": len(site.test)}
        facts: dict[str, Any] = {"model": manifest.spec.name, **counts, "rounds": []}
        if name in self.judged:
            facts |= {"local": self.own_test(local, site), **self.on_common({"local": local}, name)}
        if not self.config.contacts.plan:
            return Node(site, [own], facts=facts)
        memory = Memory.at(run.memory / name, own, digest([self.split.hash, name]))
        facts["rounds"] = memory.rounds
        return Node(site, memory.versions(own), memory.kept(self.device), facts, memory)

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
            models = {"student": made.student, "teacher": made.teacher}
            scores = {who: self.own_test(model, node.site) for who, model in models.items()}
            scores |= self.on_common(models, node.site.id)
            facts = plain({"candidates": made.rows, "log": made.log, **made.facts})
            node.facts["rounds"].append({"round": number, **scores, **facts})
        return made

    def own_test(self, predictor: Predictor, site: Site) -> float:
        return accuracy(scores_of(predictor, site.test.images, self.device), site.test.labels)

    def on_common(self, models: Mapping[str, Predictor], name: str) -> dict[str, Any]:
        """Figures on the common images, weighted as the node's classes; a model that plays two parts looks once."""
        if self.common is None:
            return {}
        seen = {id(m): self.common.figures(m, self.split.counts[name], self.device) for m in models.values()}
        return {"common": {"images": len(self.common), **{who: seen[id(m)] for who, m in models.items()}}}

    def finish(self, node: Node, name: str, made: Personal | None, run: Run) -> dict[str, Any]:
        """Judge a node's last model, and write down what was measured of it. One that ``made`` nothing, since it met
        too few, keeps its own."""
        manifest = node.versions[-1].manifest
        predictor: Predictor = Single([manifest.spec], manifest.class_names, [node.versions[-1].network()])
        predictor = predictor if made is None else made.predictor
        scores, labels = scores_of(predictor, node.site.test.images, self.device), node.site.test.labels
        classes, answer = len(node.site.class_names), accuracy(scores, labels)
        right = torch.bincount(labels[scores.argmax(1) == labels], minlength=classes)
        node.facts |= {"answer": answer, "right": right.tolist()}
        node.facts |= {"seen": torch.bincount(labels, minlength=classes).tolist()}
        if self.common is not None:
            node.facts["answer_common"] = answers(node.facts, VARIANTS[self.variant].teacher)[-1]
        if self.config.attack.kind == "backdoor":
            node.facts["fooled"] = success(predictor, node.site.test, self.config.attack, self.device)
        if self.keep:
            card = {"method": self.variant, "node": name, "own-test accuracy": answer}
            save_predictor(predictor, run.personal / name, card, export=False)
        write_json(run.node(name), node.facts)
        return node.facts


def judged_of(settings: FleetSettings, split: Split) -> list[str]:
    """The nodes that are measured, all known to have what it takes."""
    judged = evaluated(settings.eval_nodes, {name: len(share.train) for name, share in split.shares.items()})
    _check_parts(split, judged)
    return judged


def answers(facts: dict[str, Any], teacher: bool) -> list[float | None]:
    """What a node answers on the common images (where there are none: on its own): alone, and after each round."""
    who, found = "teacher" if teacher else "student", list[float | None]()
    for one, name in [(facts, "local"), *((one, who) for one in facts["rounds"])]:
        found.append(one["common"][name].get("accuracy") if "common" in one else one[name])
    return found


def evaluated(wanted: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """The judged nodes' names, from numbers, names, or ``quantiles:N``; all where none is wanted in particular.
    ``sizes`` are all nodes' training images."""
    names, chosen = list(sizes), list[str]()
    for word in wanted:
        if word == "all":
            chosen += names
        elif word.startswith("quantiles:"):
            chosen += _quantiles(word.removeprefix("quantiles:"), sizes)
        elif word in sizes:
            chosen.append(word)
        elif word.isdecimal() and int(word) < len(names):
            chosen.append(names[int(word)])
        elif word.isdecimal():
            raise BadInput(f"there is no node {word}: they are 0 to {len(names) - 1}")
        else:
            raise unknown("node", word, names)
    return list(dict.fromkeys(chosen)) or names


def _quantiles(number: str, sizes: Mapping[str, int]) -> list[str]:
    """So many nodes, smallest first: the middle one of each of as many equal groups of the nodes ordered by size."""
    if not (number.isdecimal() and 1 <= int(number) <= len(sizes)):
        raise BadInput(
            f"quantiles:{number} does not say how many of the {len(sizes)} nodes to judge; write quantiles:N with N"
            f" from 1 to {len(sizes)}"
        )
    order, n = sorted(sizes, key=lambda name: sizes[name]), int(number)
    return [order[(2 * i + 1) * len(order) // (2 * n)] for i in range(n)]


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


def padded(facts: dict[str, Any], rounds: int) -> dict[str, Any]:
    """A node's facts with so many rounds: one that met too few for all of them stands still after its last."""
    done = list(facts["rounds"])
    if not done:
        common = facts.get("common")
        before = dict.fromkeys(("student", "teacher"), facts["local"])
        before |= {"common": {**common, "student": common["local"], "teacher": common["local"]}} if common else {}
    else:
        before = {key: done[-1][key] for key in ("student", "teacher", "common") if key in done[-1]}
    idle = {**before, "candidates": [], "log": ["too few models came for this round"], "seconds": {}}
    return {**facts, "rounds": done + [{"round": e, **idle} for e in range(len(done) + 1, rounds + 1)]}


def evenly(facts: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The nodes' facts as if all had as many rounds as the busiest, and at least one."""
    most = max([1, *(len(one["rounds"]) for one in facts.values())])
    return {name: padded(one, most) for name, one in facts.items()}


def by_round(facts: dict[str, Any]) -> dict[str, Any]:
    """A node's accuracies: alone, and after every round its student's and its teacher's; on its own test images, and on
    the common ones where there are some; with the numbers of images they stand on."""
    rounds = [{who: (one[who], _figures(one, who)) for who in ("student", "teacher")} for one in facts["rounds"]]
    common = facts.get("common", {}).get("images", 0)
    return series(facts["test"], common, {"local": (facts["local"], _figures(facts, "local"))}, rounds)


def _figures(facts: dict[str, Any], who: str) -> dict[str, float]:
    found: dict[str, float] = facts.get("common", {}).get(who, {})
    return found


def common_means(facts: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """The mean over the judged nodes of what each answers on the common images; nothing where there are none."""
    answers = [one["answer_common"] for one in facts.values() if one.get("answer_common") is not None]
    return {"accuracy_common": sum(answers) / len(answers)} if answers else {}


def _say(name: str, facts: dict[str, Any]) -> None:
    for one in facts["rounds"]:
        peers = len(neighbours(one["candidates"], one))
        log.info(
            "%s round %d: %d neighbours, %d notes, local %.4f, student %.4f, teacher %.4f, %.1f s",
            *(name, one["round"], peers, len(one["log"]), facts["local"], one["student"], one["teacher"]),
            sum(one["seconds"].values()),
        )


@dataclass(frozen=True)
class Turn:
    """All rounds of one node, in words that another process understands: the run's folder says the rest. ``seal`` is of
    what it says, so that a folder that was made anew is read anew; ``inboxes`` are the models that come, by round."""

    name: str
    folder: Path
    seal: str
    device: str
    keep: bool
    own: Path
    inboxes: tuple[tuple[Path, ...], ...]

    def __str__(self) -> str:
        return self.name


def take(turn: Turn) -> dict[str, Any]:
    """Do a node's turn, in any process: the bytes are the same."""
    with as_a_site(turn.device):
        population = _opened(turn.folder, turn.seal, turn.device, turn.keep)
        return population.alone(turn.name, turn.own, turn.inboxes, Run(turn.folder))


@lru_cache(maxsize=1)
def _opened(folder: Path, seal: str, device: str, keep: bool) -> Population:
    """The population of a run that has begun, from its folder."""
    run = Run(folder)
    asked = run.asked()
    settings = build(FleetSettings, asked.pop("resolved")["orient"], "orient")
    config, split = build(RunConfig, asked, str(run.config)), split_at(run.split)
    everybody = list(split.shares)
    return Population(config, settings, bundle_of(config.data), split, everybody, device=device, keep=keep)
