"""What a server does: let parcels in, fuse them once, keep the model. A real one and a simulated one."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flyby.data.classes import fitted, part_for, union
from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import Part, part_of
from flyby.data.sources import Reading, load
from flyby.data.splits import Split
from flyby.errors import BadInput, unknown
from flyby.files import atomic_folder, digest, file_digest
from flyby.fusion import FUSIONS, Fusion
from flyby.fusion.alignment import holdings, remarks
from flyby.fusion.base import Server
from flyby.fusion.card import check_licence, held_by
from flyby.fusion.closed.base import ClosedForm
from flyby.fusion.closed.kept import read_kept, region_of, write_kept
from flyby.fusion.closed.masked import MASKED, unmasked
from flyby.fusion.evaluation import accuracy, milliseconds, scores_of
from flyby.fusion.predictor import Predictor, check_replaceable, load_predictor, model_folder, save_predictor
from flyby.machine import pick_device
from flyby.models.shelf import bytes_of
from flyby.names import check_name
from flyby.parcels import parcel, plausible
from flyby.parcels.gate import Gate, Refused, remember
from flyby.parcels.inbox import Inbox
from flyby.parcels.ledger import Ledger
from flyby.parcels.masks import Revealed, read_as
from flyby.parcels.parcel import Manifest
from flyby.runs.config import RunConfig
from flyby.runs.folder import Run
from flyby.runs.methods import rule_for, settings_for
from flyby.runs.quality import started_apart, tempered
from flyby.settings import build, parse_assignment
from flyby.statistics.catalogue import examined
from flyby.statistics.masked_sums import is_masked

SERVER = "server"


# -- simulated


def entrance(
    rule: Fusion,
    admission: str,
    sent: Inbox,
    paths: Sequence[Path],
    liars: Sequence[str],
    clean: Part | None,
    device: str,
) -> tuple[Inbox, Ledger, dict[str, Any]]:
    """What a simulated server takes in: the parcels, the ledger of their crossings, and whom its gate refused, where it
    has one."""
    facts: dict[str, Any] = {"malicious": list(liars)} if liars or admission != "none" else {}
    if admission == "none":
        ledger = Ledger()
        senders = {source: m.sender for source, m in zip(sent.sources, sent.manifests, strict=True)}
        for path in paths:
            ledger.record(senders[path], SERVER, path.stat().st_size, file_digest(path))
        return sent, ledger, facts
    gate = Gate(None, receiver=SERVER)
    for path in paths:
        gate.try_check(path)
    beside = partial(examined, used=rule.reads)
    admitted = gate.settle(validation=clean, device=device, needs=rule.needs, beside=beside)
    let_in = [Path(str(one.source)) for one in admitted]
    if not let_in:
        raise BadInput(f"the gate refused all {len(sent)} parcels; the first: {gate.refused[0].reason}")
    refused = [{**one.row(), "malicious": one.sender in liars} for one in gate.refused]
    return Inbox(let_in), gate.ledger, facts | {"refused": refused}


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
        if config.judge == "held-out":
            raise BadInput("the held-out images cannot be the server's own and judge it too; name another proxy")
        return held_out(bundle, split)
    data = bundle.train
    proxy = load(config.proxy, size=data.size).train
    if (proxy.size, proxy.channels) != (data.size, data.channels):
        raise BadInput(
            f"the proxy images are {proxy.size}x{proxy.channels}, the data's {data.size}x{data.channels}; name others"
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


# -- real


@dataclass(frozen=True)
class Order:
    """What a real server was asked to make: the rule (None: that of the parcels' own method) and its settings, and what
    it may use. ``min_sites`` parcels are enough where some are refused; without it one refusal ends the work.
    ``validation`` names labelled images to judge parcels and the fused model by; one that is no better than chance is
    published only with ``keep_bad``. ``revealed`` are files of seeds towards sites of a masked round that did not
    send. ``compact``: one network is made of what the rule would give, which is then its teacher."""

    out: Path
    rule: str | None = None
    assignments: Sequence[str] = ()
    proxy: str | None = None
    validation: str | None = None
    min_sites: int | None = None
    seed: int = 0
    export: bool = True
    device: str = "auto"
    keep_bad: bool = False
    revealed: Sequence[Path] = ()
    compact: bool = False
    licence: str | None = None  # of the model, for its card

    def check(self) -> None:
        """All that can be wrong before any parcel is there: nobody waits for hours to hear of a misspelt word."""
        check_replaceable(self.out, (Run(self.out).report.name,))
        if self.licence is not None:
            check_licence(self.licence)
        if self.rule is not None:
            self.fusion(self.rule)

    def fusion(self, rule: str, methods: Iterable[str] = ()) -> Fusion:
        """The rule with its settings, or the one that distils it: settings that only the rule has are then its own."""
        if not self.compact:
            return rule_named(rule, self.assignments, methods)
        return compact_rule(rule, self.assignments, settings_for(rule, methods))


def rule_named(
    rule: str, assignments: Iterable[str] = (), methods: Iterable[str] = (), usual: Mapping[str, Any] | None = None
) -> Fusion:
    """The server rule with its settings: those asked for, and else the ``usual`` ones, or those that the parcels'
    ``methods`` give it."""
    kind = FUSIONS[rule]
    known, values = kind.settings_type.model_fields, {**(settings_for(rule, methods) if usual is None else usual)}
    for text in assignments:
        key, value = parse_assignment(text)
        name = key.removeprefix("fusion.")
        if name not in known:
            raise unknown(f"{rule} setting", name, known) if known else BadInput(f"{rule} has no settings")
        values[name] = value
    return kind(build(kind.settings_type, values, "fusion"))


def compact_rule(rule: str, assignments: Iterable[str], usual: Mapping[str, Any]) -> Fusion:
    """``compact`` with this rule as its teacher; of the settings, those that it does not know are the rule's."""
    kind, given = FUSIONS["compact"], [parse_assignment(text) for text in assignments]
    words = {name.removeprefix("fusion."): value for name, value in given}
    values = {name: value for name, value in words.items() if name in kind.settings_type.model_fields}
    values.setdefault("teacher", rule)
    if strange := {name for name in words if name not in values} - set(FUSIONS[rule].settings_type.model_fields):
        raise unknown("compact setting", min(strange), kind.settings_type.model_fields)
    theirs = dict(usual) | {name: value for name, value in words.items() if name not in values}
    if theirs and values["teacher"] == rule:
        values["teacher"] = f"{rule}:" + ";".join(f"{name}={value}" for name, value in theirs.items())
    return kind(build(kind.settings_type, values, "fusion"))


def fuse_parcels(
    paths: Sequence[Path], order: Order, gate: Gate | None = None, ledger: Path | None = None
) -> dict[str, Any]:
    """``flyby fuse``: parcels to a deployable folder, each counted once in its ledger. All come through the ``gate``,
    which may hold some already; ``ledger`` is the file that remembers crossings from one fusion to the next."""
    order.check()
    gate, out = gate or Gate(receiver=SERVER), order.out
    _bring(paths, gate)
    work = out.parent / f".{out.name}.server"
    fused = fuse_waiting(gate, order, work)
    shutil.rmtree(work, ignore_errors=True)
    return published(fused, order, gate, gate.ledger, ledger)


def published(fused: Fused, order: Order, gate: Gate, crossings: Ledger, ledger: Path | None) -> dict[str, Any]:
    """Writes the deployable folder, whole or not at all, with the ledger of all ``crossings`` that went into it."""
    predictor, inbox, rule, out = fused.predictor, fused.inbox, fused.rule, order.out
    gate.unchanged()
    gate.notes += remarks(inbox.manifests)
    sites, senders = sum(m.sites for m in inbox.manifests), ", ".join(m.sender for m in inbox.manifests[:20])
    card = {"fusion": rule.name, "sites": sites, "senders": senders, "samples": sum(inbox.samples)}
    card |= {"held": held_by(inbox.manifests)} | ({"license": check_licence(order.licence)} if order.licence else {})
    if fused.compared is not None:
        card |= {"teacher": getattr(rule.settings, "teacher", ""), "beside its teacher": fused.compared}
    with atomic_folder(out) as folder:  # the model never stands there without the ledger of what went into it
        save_predictor(predictor, folder, card, export=order.export)
        if isinstance(rule, ClosedForm):
            write_kept(folder, inbox, rule)
        crossings.save(folder / "ledger.json")
        remember(gate, ledger)  # recorded, then published: a crossing that cannot be written down gives no model
    return {
        "out": str(out),
        "kind": predictor.kind,
        "fusion": rule.name,
        "sites": sites,
        "bytes_up": gate.ledger.bytes_up(SERVER),
        "files": sorted(p.name for p in out.iterdir()),
        "signers": {one.manifest.sender: one.signer for one in gate.waiting},
        "refused": [one.row() for one in gate.refused],
        "notes": gate.notes,
        "validation": fused.verdict,
        "temperature": predictor.temperature if predictor.measured else None,
        **({} if inbox.one_list else {"classes": holdings(inbox.manifests)}),
        **({} if fused.compared is None else {"compact": fused.compared}),
    }


def _bring(paths: Sequence[Path], gate: Gate) -> None:
    seen: set[Path] = set()
    for path in paths:
        if path in seen:
            raise BadInput(f"{path} is named twice; each participant sends exactly one parcel")
        seen.add(path)
        gate.try_check(path)


class Fused(NamedTuple):
    """What was fused, of which parcels, by which rule, and what the validation images say of it (None without any).
    ``compared``: a student beside its teacher, where one was asked for."""

    predictor: Predictor
    inbox: Inbox
    rule: Fusion
    verdict: dict[str, Any] | None
    compared: dict[str, Any] | None = None


def fuse_waiting(gate: Gate, order: Order, work: Path | None = None) -> Fused:
    """What waits at the gate, settled, fused and judged; nothing is written but checkpoints in ``work``."""
    device = pick_device(order.device)
    _enough(gate, order.min_sites)
    typical = gate.typical()
    methods = [one.manifest.method for one in gate.waiting]
    fusion = order.fusion(order.rule or rule_for(methods), methods)
    images = load(order.proxy, size=typical.spec.size).train if order.proxy else None
    names = union(one.manifest.class_names for one in gate.waiting)
    judges = _judges(order.validation, typical, names) if order.validation else None
    inbox = _let_in(gate, fusion, order, judges, typical if judges else None)
    server = Server(images, order.seed, device, work)
    predictor, verdict = tempered(fusion.fuse(inbox, server), inbox.manifests, fusion), None
    gate.notes += filter(None, [started_apart(inbox.manifests, fusion)])
    if judges:
        judges = judges.over(predictor.class_names)
        best = max((one.manifest.sender for one in gate.waiting), key=gate.accuracies.__getitem__)
        alone = gate.accuracies[best]
        verdict = _verdict(predictor, inbox, judges, order, gate, (f"{best} alone", "best_site", alone))
        verdict["best_site"] = best
    teacher = fusion.teacher(inbox, server) if order.compact else None
    labelled = judges.part if judges else None
    compared = beside_teacher(predictor, teacher, labelled, device) if teacher is not None else None
    return Fused(predictor, inbox, fusion, verdict, compared)


def _let_in(
    gate: Gate, rule: Fusion, order: Order, judges: Judges | None = None, like: Manifest | None = None
) -> Inbox:
    """What waits at the gate, settled, as the rule may use it: masked parcels as the one of their sum."""
    hidden = [is_masked(one.manifest) for one in gate.waiting] if isinstance(rule, ClosedForm) else []
    if any(hidden) and not all(hidden):
        raise BadInput(
            "some parcels are masked and some are not; add up the masked ones first: flyby fuse --partial ROUND.parcel,"
            " then fuse what it writes with the others"
        )
    needs, reads = (frozenset({MASKED.name}),) * 2 if any(hidden) else (rule.needs, rule.reads)
    gate.settle(
        judges.part if judges else None,
        pick_device(order.device),
        names=judges.names if judges else None,
        like=like,
        rule=None if rule.heterogeneous else rule.name,
        needs=needs,
        beside=partial(examined, used=reads),
    )
    _enough(gate, order.min_sites)
    inbox = Inbox(one.usable for one in gate.waiting)
    if len(inbox.class_names) > gate.policy.max_classes:
        raise BadInput(
            f"the parcels together name {len(inbox.class_names):,} classes, more than the {gate.policy.max_classes:,}"
            " allowed; raise --max-classes if you trust their senders"
        )
    if not any(hidden):
        return inbox
    revealed = [read_as(Revealed, path, "a file of revealed seeds") for path in order.revealed]
    return Inbox([unmasked(inbox, rule.name, revealed)])


def beside_teacher(student: Predictor, teacher: Predictor, judges: Part | None, device: str) -> dict[str, Any]:
    """What one network costs beside the ensemble it was made of, and what both are worth where images can tell."""

    def facts(predictor: Predictor) -> dict[str, Any]:
        found: dict[str, Any] = {"networks": len(predictor.specs)}
        found["parameters"] = sum(spec.parameter_count() for spec in predictor.specs)
        found["bytes"] = sum(bytes_of(spec) for spec in predictor.specs)
        found["ms_per_image"] = round(milliseconds(predictor, device), 4)
        if judges is not None:
            found["accuracy"] = accuracy(scores_of(predictor, judges.images, device), judges.labels)
        return found

    return {"teacher": facts(teacher), "student": facts(student)}


def change_model(
    model: Path, add: Sequence[Path], remove: Sequence[str], order: Order, gate: Gate, ledger: Path | None = None
) -> dict[str, Any]:
    """``flyby fuse --add`` and ``--remove``: a model of closed form with some more parcels, or without some; the others
    need not be there, since the folder keeps their sums. It equals a fusion of all that are then in it."""
    order.check()
    device, model = pick_device(order.device), model_folder(model)
    old = load_predictor(model, gate.trust, gate.policy.require_signed)
    kept = read_kept(model, old.networks[0])  # type: ignore[arg-type]
    crossings = Ledger.load(model / "ledger.json") if (model / "ledger.json").exists() else Ledger()
    for who in remove:
        kept = kept.without(who)
    same = order.rule in (None, kept.rule)
    rule = rule_named(order.rule or kept.rule, order.assignments, usual=kept.settings if same else None)
    if not isinstance(rule, ClosedForm):
        raise BadInput(f"{rule.name} cannot be solved from sums; use ridge, lda, nb or fishermix")
    if not kept.items and not add:
        raise BadInput("nothing would be left of this model; take the folder away instead")
    new: Sequence[Path | parcel.Parcel] = ()
    like = kept.items[0].manifest if kept.items else None
    heads = [*(item.manifest for item in kept.items), *(parcel.read_manifest(path) for path in add)]
    names = union(one.class_names for one in heads)
    judges = _judges(order.validation, heads[0], names) if order.validation else None
    if add:
        standing = gate.standing or Ledger()
        gate.standing = _both(standing, crossings)
        _bring(add, gate)
        _enough(gate, order.min_sites)
        new = _let_in(gate, rule, order, judges, like).sources
    inbox = Inbox([*kept.items, *new])
    predictor, verdict = tempered(rule.fuse(inbox, Server(None, order.seed, device)), inbox.manifests, rule), None
    if judges:
        known = judges.over(old.class_names).part
        right = (scores_of(old, known.images, device).argmax(1) == known.labels).sum() if len(known) else 0
        judges = judges.over(predictor.class_names)
        before = float(right) / len(judges.part)
        verdict = _verdict(predictor, inbox, judges, order, gate, ("the model before", "before", before))
    facts = published(Fused(predictor, inbox, rule, verdict), order, gate, _both(crossings, gate.ledger), ledger)
    return facts | {"added": [one.manifest.sender for one in gate.waiting], "removed": list(remove)}


def _both(one: Ledger, other: Ledger) -> Ledger:
    """One ledger of two; what is in both is there once."""
    made = Ledger()
    made.take_over(one)
    made.take_over(other, known=True)
    return made


def make_region(
    paths: Sequence[Path], out: Path, order: Order, gate: Gate, *, names: bool = True, ledger: Path | None = None
) -> dict[str, Any]:
    """``flyby fuse --partial``: what a hub does. One parcel of all their sums, to be fused like any other."""
    check_name(gate.receiver)
    rule = rule_named(order.rule or "ridge", order.assignments)
    if not isinstance(rule, ClosedForm):
        raise BadInput(f"only sums can be put together, and {rule.name} needs more; use ridge, lda, nb or fishermix")
    _bring(paths, gate)
    _enough(gate, order.min_sites)
    made = region_of(_let_in(gate, rule, order), gate.receiver, rule.name, names=names)
    gate.unchanged()
    remember(gate, ledger)
    return {
        "parcel": str(out),
        "sender": made.manifest.sender,
        "sites": made.manifest.sites,
        "samples": made.manifest.samples,
        "bytes": parcel.write(made, out),
        "bytes_up": gate.ledger.bytes_up(gate.receiver),
        "refused": [one.row() for one in gate.refused],
        "notes": gate.notes,
    }


def _verdict(
    predictor: Predictor, inbox: Inbox, judges: Judges, order: Order, gate: Gate, other: tuple[str, str, float]
) -> dict[str, Any]:
    """What labelled images say of the fused model: worse than the ``other`` one (in words, as a key, and its accuracy)
    is a note, no better than chance is refused, by the same judge as the sites' own models."""
    classes, labels = len(predictor.class_names), judges.part.labels.cpu()
    who, key, alone = other
    scores = scores_of(predictor, judges.part.images, pick_device(order.device))
    right, held = scores.argmax(1) == labels, holdings(inbox.manifests)
    told = [list(held[name].values()) for name in predictor.class_names]
    counts = None if any(None in each for each in told) else [sum(n or 0 for n in each) for each in told]
    judged = plausible.judge(right, labels, counts, classes)
    reached = float(right.double().mean())
    found = {"images": len(labels), "accuracy": reached, f"{key}_accuracy": alone}
    if not judged.passes or not bool(scores.isfinite().all()):
        if not order.keep_bad:
            raise BadInput(
                f"the fused model is no better than chance on the validation images (recall {judged.recall:.2f} on"
                f" {judged.judged} images), so it is not kept; {who} has {alone:.1%}: look at the parcels, use"
                " another --fusion, or give --keep-bad"
            )
        gate.notes.append("WARNING: the fused model is no better than chance on the validation images")
    elif reached < alone:
        gate.notes.append(
            f"WARNING: the fused model has {reached:.1%} on the validation images, less than the {alone:.1%} of {who};"
            " look at the parcels, or use another --fusion"
        )
    return found | {"better_than_chance": judged.passes, f"worse_than_{key}": reached < alone}


def _enough(gate: Gate, least: int | None) -> None:
    """Without a number all who came must be let in, so that nobody is left out unnoticed."""
    there, first = len(gate.waiting), next(iter(gate.refused), None)
    if there >= (least or 1) and (least is not None or first is None):
        return
    gate.isolate()
    if first is None:
        raise BadInput(
            f"there are {there} parcels to fuse, fewer than --min-sites {least}"
            if there
            else "there are no parcels to fuse; name .parcel files"
        )
    if least is None:
        others = len(gate.refused) - 1
        raise Refused(first.reason + (f" (and {others} more refused)" if others else ""), first.stage)
    raise Refused(
        f"{there} parcels were let in, fewer than --min-sites {least}, and {len(gate.refused)} refused; the first:"
        f" {first.reason}",
        first.stage,
    )


class Judges(NamedTuple):
    """Labelled images by which parcels are judged, and the classes that their labels number."""

    part: Part
    names: tuple[str, ...]

    def over(self, names: Sequence[str]) -> Judges:
        """Those whose class is among the names, numbered so."""
        return Judges(part_for(self.part, self.names, names)[0], tuple(names))


def _judges(name: str, like: Manifest, names: Sequence[str]) -> Judges:
    """A source's validation split, or else its training images, over the classes of all parcels; its test images choose
    nothing."""
    bundle = load(name, size=like.spec.size, reading=Reading(channels=like.spec.channels))
    data = bundle.validation or bundle.train
    if data.channels != like.spec.channels:
        raise BadInput(
            f"--validation {name} has other images than the parcels; name labelled images like those they were trained"
            " on"
        )
    cure = "name labelled images of classes like those they were trained on"
    return Judges(part_of(fitted(data, names, f"--validation {name}", "no parcel", cure)[0]), tuple(names))
