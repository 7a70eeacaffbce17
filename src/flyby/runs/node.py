"""What a real node does: personalise its own model from those it received, with no server; once, or round after round
in a folder of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from flyby.data.classes import fitted_bundle
from flyby.data.dataset import DataBundle
from flyby.data.folders import IMAGE_FILES
from flyby.data.site import Site
from flyby.data.sources import Reading, load, read_images
from flyby.errors import BadInput
from flyby.files import atomic_folder, digest, file_digest, plain, write_json
from flyby.fusion.evaluation import accuracy, scores_of
from flyby.fusion.predictor import Predictor, Single, check_replaceable, save_predictor
from flyby.machine import pick_device
from flyby.meeting.admit import read_inbox
from flyby.meeting.pipeline import History, Personal, check_site, neighbours, orient
from flyby.meeting.settings import VARIANTS, OrientSettings, stage_defaults
from flyby.parcels import parcel
from flyby.parcels.gate import Gate, remember
from flyby.parcels.parcel import Manifest, Parcel
from flyby.runs.nodefolder import PERSONAL, STATE, NodeFolder
from flyby.runs.progress import lasting
from flyby.settings import build, parse_assignment, put

Look = Callable[[Path], Manifest]  # what a file that has arrived says, if it may come in
Wait = Callable[[Look], Sequence[Path]]


@dataclass(frozen=True)
class Wish:
    """What a real node was asked to make. What is None is as it was in the node's last round, or flyby's own choice."""

    data: str
    own: Path | None = None
    node: Path | None = None
    out: Path | None = None
    variant: str | None = None
    size: int | None = None
    assignments: Sequence[str] = ()
    seed: int | None = None
    device: str = "auto"
    export: bool = True
    unlabelled: Path | None = None
    again: bool = False
    rename: Callable[[DataBundle], DataBundle] | None = None  # its classes, where they have other names
    skip_unknown: bool = False
    seen: Callable[[Site, Predictor, Predictor], None] | None = None  # told of the model before and of the new one


@dataclass(frozen=True)
class Round:
    """One round, all of it known to be right: what decides its result beside the models that came."""

    node: NodeFolder
    variant: str
    seed: int
    asked: dict[str, Any]
    settings: OrientSettings
    site: Site
    marks: dict[str, str]
    unlabelled: torch.Tensor | None
    data: str
    device: str

    @classmethod
    def of(cls, wish: Wish) -> Round:
        node = the_node(wish)
        last = node.state
        variant, seed = wish.variant or last.method, last.seed if wish.seed is None else wish.seed
        VARIANTS[variant]
        own = node.own.manifest.spec
        bundle = load(wish.data, size=wish.size or own.size, reading=Reading(channels=own.channels))
        bundle = wish.rename(bundle) if wish.rename else bundle
        bundle.tell(classes=False)
        bundle = fitted_bundle(bundle, node.own.manifest.class_names, "the node's own model", skip=wish.skip_unknown)
        site, marks = node.site(bundle, seed)
        check_site(node.own, site, variant)
        asked = dict(last.settings)
        for text in wish.assignments:
            key, value = parse_assignment(text)
            put(asked, key.removeprefix("orient."), value)
        if plain(asked) != asked:
            raise BadInput("a setting of a node must be finite, or it cannot be written down; give a large number")
        settings = build(OrientSettings, {**stage_defaults(site.size, variant)[1], **asked}, "orient")
        extra = None if wish.unlabelled is None else read_unlabelled(wish.unlabelled, site)
        seen = None if extra is None else hashlib.sha256(extra.numpy().tobytes()).hexdigest()[:16]
        held = None if bundle.validation is None else bundle.validation.digest
        data = digest([bundle.train.digest, held, marks, seen])
        return cls(node, variant, seed, asked, settings, site, marks, extra, data, pick_device(wish.device))

    @property
    def number(self) -> int:
        return self.node.state.number + 1

    @property
    def decides(self) -> dict[str, Any]:
        return {"method": self.variant, "seed": self.seed, "settings": self.asked, "data": self.data}

    @property
    def nothing_new(self) -> bool:
        """Whether the last round was done on just this; without new neighbours it would be done a second time."""
        rounds = self.node.state.rounds
        return bool(rounds) and all(rounds[-1].get(key) == value for key, value in self.decides.items())

    def go(self, received: Sequence[Parcel]) -> Personal:
        """A neighbour that comes again with a newer model takes the place of the older one."""
        newer = {item.manifest.sender for item in received}
        kept = [peer for peer in self.node.kept(self.device, self.data) if peer.sender not in newer]
        past = History(kept, self.number, self.unlabelled)
        how: dict[str, Any] = {"seed": self.seed, "device": self.device, "variant": self.variant, "history": past}
        with lasting(f"round {self.number} of {self.node.state.node} ({len(received)} new models, {len(kept)} kept)"):
            return orient(self.node.own, received, self.site, self.settings, **how)

    def row(self, made: Personal) -> dict[str, Any]:
        """What the node's history says of the round."""
        old, row = self.node.own, {"round": self.number, **self.decides}
        row |= {
            "version": made.own.manifest.meta.get("version", 0),
            "own": made.own.digest,
            "images": {"train": len(self.site.train), "val": len(self.site.val)},
            "used": len(neighbours(made.rows, made.facts)),
            "chosen": [one["sender"] for one in made.rows if one["chosen"]],
            "kept": [peer.sender for peer in made.kept],
            "before": _standing(alone(old), self),
            "after": _standing(made.predictor, self),
            "accept": made.facts.get("accept"),
            "seconds": round(sum(made.facts["seconds"].values()), 3),
        }
        return row


def the_node(wish: Wish) -> NodeFolder:
    if wish.node is None and (wish.own is None or wish.out is None):
        raise BadInput(
            "name --own FILE.parcel and --out FOLDER, or --node FOLDER for a node that goes on from round to round"
        )
    if wish.node is not None and (wish.own is None or (wish.node / STATE).exists()):
        node = NodeFolder.load(wish.node)
        if wish.own is not None:
            raise BadInput(
                f"{wish.node} is the folder of {node.state.node} already, with its model of round {node.state.number};"
                " leave --own out, or name a new folder with --node"
            )
        return node
    assert wish.own is not None
    return NodeFolder.start(wish.node, parcel.read(wish.own))


def read_unlabelled(folder: Path, site: Site) -> torch.Tensor:
    """The image files under a folder, as the node's own images are."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; name the folder of images without labels")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_FILES and path.is_file())
    if not paths:
        raise BadInput(f"{folder} holds no images (looked for {', '.join(sorted(IMAGE_FILES))})")
    return torch.from_numpy(read_images(paths, site.channels, site.size))


def orient_folder(
    wish: Wish, inbox: Path | Wait, entrance: Callable[[str], Gate], ledger: Path | None = None
) -> dict[str, Any]:
    """``flyby orient``: one round, which ends with a deployable folder. The received parcels (a folder of them, or a
    wait that ends with them) come through the gate that ``entrance`` opens for this node's name."""
    if wish.node is not None and ledger is not None:
        raise BadInput("--node keeps a ledger of its own; leave --ledger out")
    if wish.node is not None and wish.out is not None and wish.out.absolute().is_relative_to(wish.node.absolute()):
        raise BadInput(f"--out {wish.out} lies in the node's folder; leave it out, or name a place outside")
    out = wish.out or (wish.node or Path()) / PERSONAL
    check_replaceable(out, ("orient.json", "*.parcel"))
    todo = Round.of(wish)
    node, door = todo.node, partial(_door, entrance, todo.node, wish.again)
    files = inbox(partial(_look, door)) if callable(inbox) else inbox  # a wait, once all else is known to be right
    gate = door()
    received, _ = read_inbox(files, gate, node.own)
    came = _came(gate, node, wish.again)
    if not received and todo.nothing_new:
        return {**node.state.rounds[-1], **came, "out": str(out), "nothing_new": True}
    made = todo.go(received)
    if wish.seen is not None:
        wish.seen(todo.site, alone(node.own), made.predictor)
    row = plain(todo.row(made) | {key: came[key] for key in ("new", "again", "refused", "bytes_received")})
    came["log"] += made.log
    document = plain({"log": came["log"], "candidates": made.rows, **made.facts})

    def publish(folder: Path) -> None:  # the model never stands there without the ledger of what went into it
        card = {"method": todo.variant, "node": node.state.node, "neighbours": row["used"], "round": todo.number}
        save_predictor(made.predictor, folder, card, export=wish.export)
        write_json(folder / "orient.json", document)
        gate.ledger.save(folder / "ledger.json")
        parcel.write(made.own, folder / f"{node.state.node}.parcel")
        remember(gate, ledger)  # recorded, then published

    if wish.node is None:
        _written(publish, out)
    else:
        _remember(todo, made, gate, row, lambda top: _written(publish, wish.out or top / PERSONAL))
    scores = {one["sender"]: one["score"] for one in made.rows}
    return {**row, **came, "out": str(out), "scores": scores, "files": sorted(one.name for one in out.iterdir())}


def _door(entrance: Callable[[str], Gate], node: NodeFolder, again: bool) -> Gate:
    """The gate, which knows whose models this node has had."""
    gate = entrance(node.state.node)
    if node.path is not None:
        gate.standing, gate.again = node.ledger, again
    return gate


def _look(door: Callable[[], Gate], path: Path) -> Manifest:
    """What a file says while the node waits for more: nothing is moved away yet."""
    gate = door()
    gate.quarantine = None
    return gate.check(path).manifest


def _came(gate: Gate, node: NodeFolder, again: bool) -> dict[str, Any]:
    """Who came, who came again, who was refused and why, and whose files lie there still from earlier rounds."""
    known = {crossing.digest for crossing in node.ledger.crossings}
    replays = [one for one in gate.refused if one.stage == "replay" and one.path is not None and one.path.is_file()]
    seen = [one for one in replays if one.path is not None and file_digest(one.path) in known]
    refused = [one for one in gate.refused if one not in seen]
    log = [one.line for one in refused] + gate.notes
    if not again and any(one.sender and node.ledger.has(one.sender, node.state.node) for one in refused):
        log.append("a neighbour came with another model than before; --again takes it, and counts it in the ledger")
    new = [crossing.sender for crossing in gate.ledger.crossings]
    return {
        "node": node.state.node,
        "received": len(new) + len(gate.refused),
        "new": new,
        "again": [sender for sender in new if node.ledger.has(sender, node.state.node)],
        "seen": [one.name for one in seen],
        "refused": [one.row() for one in refused],
        "bytes_received": gate.ledger.total_bytes,
        "log": log,
    }


def _remember(todo: Round, made: Personal, gate: Gate, row: dict[str, Any], publish: Callable[[Path], None]) -> None:
    node = todo.node
    for c in gate.ledger.crossings:
        node.ledger.record(c.sender, c.receiver, c.bytes, c.digest, todo.number, again=gate.again)
    words = {"number": todo.number, "method": todo.variant, "seed": todo.seed, "settings": todo.asked, **todo.marks}
    state = node.state.model_copy(update={**words, "rounds": [*node.state.rounds, row]})
    node.save(state, made.own, made.kept, todo.data, publish)


def _written(publish: Callable[[Path], None], folder: Path) -> None:
    with atomic_folder(folder) as inside:
        publish(inside)


def alone(own: Parcel) -> Predictor:
    return Single([own.manifest.spec], own.manifest.class_names, [own.network()])


def _standing(predictor: Predictor, todo: Round) -> dict[str, float]:
    """How a model does on the node's validation images."""
    scores, labels = scores_of(predictor, todo.site.val.images, todo.device), todo.site.val.labels
    if not len(labels):
        return {}
    chances = predictor.chances(scores).clamp_min(1e-12).log()
    return {"accuracy": accuracy(scores, labels), "log_loss": float(F.nll_loss(chances, labels))}
