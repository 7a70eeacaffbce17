"""Federated Oriented Learning [Huang and Shu, ICML 2025] as a list of stages; a variant
(``settings.VARIANTS``) is a list with some left out, or with a new one.

Stage by stage, for one node in one round: admit what was received, screen it, fine-tune, prune, post-tune, cut, score
on validation data, select the top K, weigh them into a teacher, distil the teacher into the node's own architecture.
FOL answers with the student, FOL-A with the teacher; the N variants adapt nothing. Test data is never looked at here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyby.data.site import Site
from flyby.errors import BadInput
from flyby.fusion.ensembles.experts import ExpertsPredictor, expert_votes
from flyby.fusion.predictor import Ensemble, Predictor, Single
from flyby.fusion.weights.average import AverageSettings, FedAvg
from flyby.meeting.adapt import Desk, accuracy_by_size, finetune, posttune, prune, shrink
from flyby.meeting.admit import admit, part_logits, screen
from flyby.meeting.bounds import smoothness, theorem_1, theorem_2
from flyby.meeting.candidate import Candidate
from flyby.meeting.collect import retain
from flyby.meeting.distill import Distilled, epoch_steps, study_material
from flyby.meeting.ensemble import ask, combine, fit_weights
from flyby.meeting.layers import cosine
from flyby.meeting.prune import channel_groups
from flyby.meeting.select import top_k
from flyby.meeting.settings import VARIANTS, OrientSettings
from flyby.meeting.stack import Stack
from flyby.meeting.tuning import Budget, tune
from flyby.parcels import parcel
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import Parcel
from flyby.registry import Registry

SELF = "self"


@dataclass
class Work:
    """What the stages hand on. ``site`` is on the device; ``peers`` are kept and new neighbours; ``done`` ends the
    round early."""

    own_parcel: Parcel
    received: Sequence[Parcel]
    site: Site
    settings: OrientSettings
    key: tuple[object, ...]
    device: torch.device
    own: Candidate
    peers: list[Candidate]
    unlabelled: Tensor | None = None
    chosen: list[Candidate] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    teacher: Predictor | None = None
    teacher_logits: dict[str, Tensor] = field(default_factory=dict)
    new: Candidate | None = None
    student: Single | None = None
    log: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    started: float = field(default_factory=time.perf_counter)

    def until(self, share: float = 1.0) -> float:
        """The moment at which a share of the round's seconds is over; never, where none are set."""
        return math.inf if self.settings.time is None else self.started + share * self.settings.time

    def desk(self, share: float = math.inf) -> Desk:
        """Where neighbours are adapted until a share of the round's seconds is over."""
        return Desk(self.site, self.settings, self.key, self.until(share))

    @property
    def to_adapt(self) -> list[Candidate]:
        return [c for c in self.peers if self.settings.readapt or not c.adapted]


Stage = Callable[[Work], None]


@dataclass(frozen=True)
class Personal:
    """A personalised node: ``predictor`` is the variant's answer, ``own`` the parcel of its new model, ``kept`` the
    peers for the next round, ``rows`` one line a candidate, ``facts`` weights, theorems and seconds, ``log`` what was
    refused or skipped and why.
    """

    predictor: Predictor
    student: Single
    teacher: Predictor
    own: Parcel
    kept: list[Candidate]
    rows: list[dict[str, Any]]
    facts: dict[str, Any]
    log: list[str]


def neighbours(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> list[str]:
    """Whose models a round used, of its rows and facts: those it could choose from, or took the mean of."""
    return [row["sender"] for row in rows if row["sender"] != SELF] or list(facts.get("averaged", ()))


@dataclass(frozen=True)
class History:
    """What a node brings beside its labelled data: the peers it ``kept`` of earlier rounds, the ``number`` of the round
    now, and ``unlabelled`` images of its own (uint8 ``[n, H, W, C]``), on which the teacher speaks to the student."""

    kept: Sequence[Candidate] = ()
    number: int = 1
    unlabelled: Tensor | None = None


def admit_stage(work: Work) -> None:
    fresh, log = admit(work.received, work.own_parcel, work.site, work.device)
    work.log += log
    room = max(0, work.settings.buffer - len(work.peers))
    work.log += [f"left out {c.sender}: the buffer holds {work.settings.buffer} models" for c in fresh[room:]]
    work.peers += fresh[:room]


def screen_stage(work: Work) -> None:
    if work.settings.screen:
        passed, log = screen([c for c in work.peers if not c.adapted], work.site, work.settings)
        work.log += log
        work.peers = [c for c in work.peers if c.adapted or c in passed]


def company_stage(work: Work) -> None:
    if not work.peers:
        work.log.append("no usable neighbour; this node keeps its own model")
        work.done = True


def prescreen_stage(work: Work) -> None:
    """Cheap first: of the new neighbours only those that already fit this node's validation images best are adapted."""
    most, fresh = work.settings.prescreen, [c for c in work.peers if not c.adapted]
    if most is None or len(fresh) <= most:
        return
    part_logits(fresh, work.site, "val", work.settings)
    losses = {c: float(F.cross_entropy(c.logits["val"], work.site.val.labels)) for c in fresh}
    ranked = sorted(fresh, key=lambda c: losses[c])
    work.log += [f"left out {c.sender}: {most} others fit the validation images better" for c in ranked[most:]]
    work.peers = [c for c in work.peers if c.adapted] + ranked[:most]


def finetune_stage(work: Work) -> None:
    fresh = work.to_adapt
    finetune(fresh, work.desk(0.6 / 3 if work.settings.prunes else 0.6))
    late = [c for c in fresh if "finetune_epochs" not in c.facts]
    work.log += [f"left out {c.sender}: the round's {work.settings.time:g} s are too few to adapt it" for c in late]
    work.peers = [c for c in work.peers if c not in late]


def prune_stage(work: Work) -> None:
    if work.settings.curve:
        work.facts["curve"] = accuracy_by_size(work.to_adapt, work.own, work.desk(), work.settings.curve)
    if work.settings.prunes:
        whole = [c.sender for c in work.to_adapt if c.spec.backbone is not None]
        work.log += [f"{sender} is not pruned: the widths of its backbone are not its own" for sender in whole]
        prune(work.to_adapt, work.own, work.desk(0.4))


def posttune_stage(work: Work) -> None:
    if work.settings.prunes:
        posttune(work.to_adapt, work.desk(0.6))


def shrink_stage(work: Work) -> None:
    shrink(work.to_adapt, work.site, work.settings)
    for candidate in work.peers:
        candidate.adapted = True


def score_stage(work: Work) -> None:
    """Eq. 7, on logits that later stages use again."""
    everyone = [*work.peers, work.own]
    part_logits(everyone, work.site, "val", work.settings)
    for candidate in everyone:
        candidate.score = float((candidate.logits["val"].argmax(1) == work.site.val.labels).double().mean())


def early_exit_stage(work: Work) -> None:
    own = work.own.score or 0.0
    if work.settings.early_exit and not any((c.score or 0.0) > own for c in work.peers):
        work.log.append(f"no neighbour beats this node's own validation accuracy of {own:.4f}; it keeps its model")
        work.done = True


def select_stage(work: Work) -> None:
    work.chosen = best(work) if work.settings.members == "top" else [*work.peers, work.own]


def best(work: Work) -> list[Candidate]:
    """Algorithm 2, best first: neighbours, then self, as it lists them."""
    everyone = [*work.peers, work.own]
    places = top_k(
        [c.score or 0.0 for c in everyone],
        work.settings.top,
        lambda place: cosine(work.own.spec, work.own.state, everyone[place].spec, everyone[place].state),
    )
    return [everyone[place] for place in places]


def weigh_stage(work: Work) -> None:
    """Eq. 11, or the experts rule, on cached outputs."""
    s, site = work.settings, work.site
    part_logits(work.chosen, site, "train", s)
    specs, networks = [c.spec for c in work.chosen], [c.network() for c in work.chosen]
    cached = {part: torch.stack([c.logits[part] for c in work.chosen]) for part in ("train", "val")}
    if s.teacher == "experts":
        # An adapted member has seen its sender's classes and this node's.
        seen = torch.tensor(
            [[a + b for a, b in zip(c.counts or [0] * len(site.counts), site.counts, strict=True)] for c in work.chosen]
        )
        experts = ExpertsPredictor(
            specs, site.class_names, networks, form="softmax", votes=expert_votes(seen.double(), 1.0).float()
        ).to(work.device)
        work.teacher = experts
        work.teacher_logits = {part: ask_teacher(work, getattr(site, part).images) for part in ("train", "val")}
        return
    labels = site.train.labels if s.fit == "train" else site.val.labels
    weights = fit_weights(cached[s.fit], labels, s.weights, s.prior)
    work.weights = weights.tolist()
    work.facts["weights"] = {
        c.sender if c is not work.own else SELF: round(float(w), 6) for c, w in zip(work.chosen, weights, strict=True)
    }
    work.teacher_logits = {part: combine(logits, weights) for part, logits in cached.items()}
    work.teacher = Ensemble(specs, site.class_names, networks, mean="logits", weights=work.weights)


def ask_teacher(work: Work, images: Tensor) -> Tensor:
    """The teacher's logits of further images."""
    if work.weights:
        return ask(dict(zip(work.chosen, work.weights, strict=True)), images, work.settings)
    assert work.teacher is not None
    with torch.no_grad():
        scores = torch.cat([work.teacher(piece) for piece in torch.split(images, 256)])
    return scores.clamp_min(1e-6).log()


def distill_stage(work: Work) -> None:
    """Eq. 12, and beside it what the theorems say."""
    s, site = work.settings, work.site
    start = Stack.of(work.own.spec, [work.own.state], work.device, s.backend)
    key = (*work.key, "distill")
    material = study_material(site, work.own.spec, s, work.unlabelled, key)
    plain = len(material) == len(site.train)
    heard = work.teacher_logits["train"] if plain and not s.pool else ask_teacher(work, material.images)
    problem = Distilled(start, heard, s, work.teacher_logits["val"])
    budget = Budget(s.stage_epochs("distill"), epoch_steps(len(site.train), s), work.until())
    tuned = tune(start, problem, replace(site, train=material), s, budget, key, "distill")
    work.facts |= {
        "distill_steps": (budget.steps or 0) * tuned.epochs[0],
        "distill_images": len(material),
        "distill_epochs": tuned.epochs[0],
        "distill_best": tuned.best_epochs[0],
        "distill_history": tuned.history,
    }
    student = work.new = Candidate(work.own.sender, work.own.spec, tuned.stack.states()[0], work.own.counts)
    work.student = Single([student.spec], site.class_names, [student.network()])
    if s.diagnostics:
        part_logits([student], site, "train", s)
        penalty = problem.penalty(tuned.stack.parameters)
        work.facts["theorem_1"] = theorem_1(
            student.logits["train"],
            work.teacher_logits["train"],
            site.train.labels,
            s.temperature,
            0.0 if penalty is None else float(penalty.detach()),
        )
        curvature = smoothness(tuned.stack, problem, material.images)
        # The anchor's own curvature 2 lambda is all the convexity that can be vouched for.
        work.facts["theorem_2"] = {
            "smoothness": curvature,
            "convexity": 2 * s.anchor,
            **theorem_2(s.lr, 2 * s.anchor, curvature),
        }


def accept_stage(work: Work) -> None:
    """A check, not a promise: on few validation images chance passes it too."""
    if work.settings.accept is None or work.new is None:
        return
    part_logits([work.new], work.site, "val", work.settings)
    gain, error = paired_gain(work.own.logits["val"], work.new.logits["val"], work.site.val.labels)
    accepted = gain > work.settings.accept * error
    work.facts["accept"] = {"accepted": accepted, "gain": gain, "error": error, "images": len(work.site.val)}
    if not accepted:
        work.log.append(
            f"the new model stays out: on {len(work.site.val)} validation images its log-loss is lower by {gain:.4f} +-"
            f" {error:.4f}, and {work.settings.accept:g} standard errors are asked for; this node keeps its own model"
        )
        work.student = None


def paired_gain(old: Tensor, new: Tensor, labels: Tensor) -> tuple[float, float]:
    """By how much the log-loss falls from old to new logits ``[N, C]``, image by image: mean and standard error (not
    known, so infinite, for one image)."""
    before, after = (F.cross_entropy(logits.double(), labels, reduction="none") for logits in (old, new))
    gain = before - after
    error = float(gain.std()) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    return float(gain.mean()), error


def average_stage(work: Work) -> None:
    """Gossip FedAvg: the mean of the own model and of every received one of the same architecture."""
    admitted = {c.sender for c in work.peers}
    same = [p for p in work.received if p.manifest.sender in admitted and p.manifest.spec == work.own.spec]
    work.log += [
        f"left out {p.manifest.sender}: averaging needs one architecture"
        for p in work.received
        if p.manifest.sender in admitted and p.manifest.spec != work.own.spec
    ]
    mean = FedAvg(AverageSettings(weights=work.settings.gossip)).fuse(Inbox([work.own_parcel, *same]))
    assert isinstance(mean, Single)
    work.student, work.teacher, work.peers = mean, mean, []
    work.facts["averaged"] = [p.manifest.sender for p in same]  # no candidate is left to tell


STAGES: Registry[Stage] = Registry(
    "stage",
    {
        stage.__name__.removesuffix("_stage"): stage
        for stage in (
            *(admit_stage, screen_stage, prescreen_stage, company_stage),
            *(finetune_stage, prune_stage, posttune_stage, shrink_stage),
            *(score_stage, early_exit_stage, select_stage, weigh_stage, distill_stage),
            *(accept_stage, average_stage),
        )
    },
    group="flyby.stages",
)


def orient(
    own: Parcel,
    received: Sequence[Parcel],
    site: Site,
    settings: OrientSettings | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    variant: str = "fol",
    history: History | None = None,
) -> Personal:
    """One node, one round: personalise ``own`` with what was ``received`` (and what it kept of the rounds before), on
    the site's own train and validation data. A neighbour that cannot be used is refused with a reason in the log; a
    node without a usable one keeps its own model.
    """
    settings = settings or OrientSettings(**VARIANTS[variant].settings)
    history = history or History()
    stages, device = {name: STAGES[name] for name in VARIANTS[variant].stages}, torch.device(device)
    check_site(own, site, variant)
    if "prune" in stages and (settings.prunes or settings.curve) and own.manifest.spec.backbone is None:
        # Says now, not after an hour, that torch-pruning is missing.
        channel_groups(own.manifest.spec.replace(head="linear"))
    mine = Candidate.of(own, device)
    work = Work(
        own,
        received,
        _only_train_and_val(site).to(device),
        settings,
        (seed, site.id, "orient", history.number),
        device,
        mine,
        list(history.kept),
        history.unlabelled,
    )
    seconds: dict[str, float] = {}
    for name, stage in stages.items():
        started = time.perf_counter()
        stage(work)
        seconds[name] = round(time.perf_counter() - started, 4)
        if work.done:
            break
    work.facts["seconds"] = seconds
    return _personal(work, variant, history.number)


def check_site(own: Parcel, site: Site, variant: str) -> None:
    spec = own.manifest.spec
    takes, has = (spec.size, spec.channels, spec.pixels), (site.size, site.channels, site.pixels)
    if own.manifest.class_names != site.class_names or takes != has:
        raise BadInput(
            f"the own model of {own.manifest.sender} is for other classes or other images than {site.id}'s data; train"
            " it on this data"
        )
    if VARIANTS[variant].chooses and len(site.val) == 0:
        raise BadInput(
            f"{variant} chooses by validation accuracy, and {site.id} has no validation images; hold some out with"
            " split.val=0.15"
        )


def _only_train_and_val(site: Site) -> Site:
    """The site without its test part: what is not there cannot choose anything."""
    nothing = type(site.test)(site.test.images[:0], site.test.labels[:0])
    return replace(site, test=nothing)


def _personal(work: Work, variant: str, number: int) -> Personal:
    old = work.own_parcel.manifest
    student = work.student or Single([work.own.spec], work.site.class_names, [work.own.network()])
    teacher = work.teacher or student
    own = work.own_parcel
    if work.student is not None:
        facts: parcel.Facts = {
            **old.facts,
            "method": variant,
            "meta": {"version": number},
            "provenance": {"oriented from": own.digest, "round": number},
        }
        own = parcel.make(weights=student.networks[0].state_dict(), **facts)
    rows = [_row(candidate, work) for candidate in [*work.peers, work.own]]
    kept = retain(ranked_peers(work), work.settings.buffer, work.settings.top)
    answer = teacher if VARIANTS[variant].teacher else student
    return Personal(answer, student, teacher, own, kept, rows, work.facts, work.log)


def ranked_peers(work: Work) -> list[Candidate]:
    """The ensemble's peers, best first: by weight where everybody is a member, else as they were chosen."""
    chosen = work.chosen or best(work)
    if work.settings.members == "all" and work.weights:
        by_weight = dict(zip(chosen, work.weights, strict=True))
        chosen = sorted(chosen, key=lambda candidate: -by_weight[candidate])
    return [candidate for candidate in chosen if candidate is not work.own]


def _row(candidate: Candidate, work: Work) -> dict[str, Any]:
    name = SELF if candidate is work.own else candidate.sender
    return {
        "sender": name,
        "model": candidate.spec.name,
        "version": candidate.version,
        "score": candidate.score,
        "chosen": candidate in work.chosen,
        "weight": work.facts.get("weights", {}).get(name) if candidate in work.chosen else None,
        **candidate.facts,
    }
