"""A real node's folder: what it remembers from one round to the next.

===================  =================================================================================================
``node.json``        who it is, how it works, every round so far, and the digest of each file below that counts
``own/V.parcel``     every version of its model: V is the round that made it, 0 the model it came with
``kept/N-I.parcel``  the peers it kept after round N, adapted to it, with what they answer to its images
``ledger.json``      whose models crossed to it, in which round
``personal/``        the model to fly, unless it is written elsewhere
===================  =================================================================================================

``node.json`` is written last, and a round counts once it stands there. What a round that did not end has left behind is
not named in it: the same command does that round again, with the same result.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from flyby.data.dataset import DataBundle
from flyby.data.site import Site, part_of, whole_site
from flyby.data.splits import hold_out
from flyby.errors import BadInput
from flyby.files import atomic_folder, digest, plain, read_json, sweep, write_json
from flyby.meeting.candidate import Candidate
from flyby.names import Name
from flyby.parcels import parcel
from flyby.parcels.ledger import Crossing, Ledger
from flyby.parcels.parcel import Parcel
from flyby.rng import legacy_numpy
from flyby.settings import sentence

STATE, LEDGER, PERSONAL = "node.json", "ledger.json", "personal"
HELD_OUT = 0.15  # of the images that a source does not divide itself
PARTS = ("train", "val")


class Stored(BaseModel):
    """A file of the folder that counts, and the digest of what it holds."""

    model_config = ConfigDict(strict=True, extra="forbid")
    file: Annotated[str, Field(pattern=r"^(own/[0-9]+|kept/[0-9]+-[0-9]+)\.parcel$")]
    digest: str


class State(BaseModel):
    """What ``node.json`` holds. ``settings`` are those that were asked for; ``train`` and ``val`` are the marks of the
    images that were once trained on and held out, so that none ever changes sides."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    schema_version: Literal[1] = 1
    node: Name
    number: Annotated[int, Field(ge=0)]
    seed: int = 0
    method: str = "fol"
    settings: dict[str, JsonValue] = {}
    own: Stored
    kept: list[Stored] = []
    ledger: str = ""
    train: str = ""
    val: str = ""
    rounds: list[dict[str, JsonValue]] = []

    def to_json(self) -> dict[str, Any]:
        content = self.model_dump(mode="json")
        return {**content, "digest": digest(content)}


@dataclass
class NodeFolder:
    """A node between rounds: its newest model, the ledger of what it received, and its state. One without a ``path`` is
    not written down."""

    path: Path | None
    own: Parcel
    state: State
    ledger: Ledger = field(default_factory=Ledger)

    @classmethod
    def start(cls, path: Path | None, own: Parcel) -> NodeFolder:
        """A node that begins with a model, in a new folder; one that was oriented before counts on from there."""
        if path is not None and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BadInput(
                f"{path} holds something and is not a node's folder (no {STATE}); name a new one with --node"
            )
        version = own.manifest.meta.get("version", 0)
        number = version if isinstance(version, int) and version > 0 else 0
        return cls(path, own, State(node=own.manifest.sender, number=number, own=_stored("own", number, own)))

    @classmethod
    def load(cls, path: Path) -> NodeFolder:
        """What stands in a node's folder, checked against its ``node.json``."""
        if not (path / STATE).is_file():
            raise BadInput(f"{path} is not a node's folder (no {STATE}); make one with --node {path} --own FILE.parcel")
        state = _state(path / STATE)
        own = _read(path, state.own)
        whole, ledger = Ledger.load(path / LEDGER), Ledger()
        for c in whole.crossings:
            if c.round <= state.number:  # later ones are of a round that did not end
                ledger.record(c.sender, c.receiver, c.bytes, c.digest, c.round, again=c.again > 0)
        if _ledger_digest(ledger) != state.ledger or own.manifest.sender != state.node:
            raise BadInput(f"{path} does not fit together (its {LEDGER} or model is another's); take it from a backup")
        return cls(path, own, state, ledger)

    def site(self, bundle: DataBundle, seed: int) -> tuple[Site, dict[str, str]]:
        """The node's data, and the marks of its images. A validation split of the source is used as it is; else a share
        of the images is held out, new ones each time, and what was held out before stays so."""
        site = whole_site(bundle, self.state.node, 0.0, seed)
        if bundle.validation is not None:
            return site, {}
        known = {part: set(getattr(self.state, part).split()) for part in PARTS}
        marks = [hashlib.sha256(image.tobytes()).hexdigest()[:16] for image in bundle.train.images]
        place = np.array([0 if m in known["train"] else 1 if m in known["val"] else 2 for m in marks])
        new = np.flatnonzero(place == 2)
        rows = {"train": np.flatnonzero(place == 0), "val": np.flatnonzero(place == 1)}
        if len(new):
            rng = legacy_numpy(seed, self.state.node, "hold-out")
            share = hold_out(new, bundle.train.labels, HELD_OUT, 0.0, rng)
            rows = {part: np.sort(np.concatenate([rows[part], getattr(share, part)])) for part in PARTS}
        trained = {marks[row] for row in rows["train"]}
        rows["val"] = np.array([row for row in rows["val"] if marks[row] not in trained], dtype=np.int64)  # no copies
        for part in PARTS:
            known[part] |= {marks[row] for row in rows[part]}
        site = replace(site, train=part_of(bundle.train, rows["train"]), val=part_of(bundle.train, rows["val"]))
        return site, {part: " ".join(sorted(known[part])) for part in PARTS}

    def kept(self, device: torch.device | str, data: str) -> list[Candidate]:
        """The peers of the rounds before. What they answered counts only for the very images they were asked about."""
        if self.path is None:
            return []
        return [_candidate(_read(self.path, one), device, data) for one in self.state.kept]

    def save(
        self, state: State, own: Parcel, kept: Sequence[Candidate], data: str, publish: Callable[[Path], None]
    ) -> None:
        """One more round: files, the ledger, what ``publish`` writes into the folder, and then ``node.json``."""
        assert self.path is not None
        new = not (self.path / STATE).exists()
        with atomic_folder(self.path) if new else nullcontext(self.path) as folder:
            if new:
                parcel.write(self.own, folder / self.state.own.file)
            mine = self.state.own
            if own is not self.own:
                mine = _stored("own", state.number, own)
                parcel.write(own, folder / mine.file)
            peers = [_as_parcel(one, own.manifest.class_names, data) for one in kept]
            stored = [_stored("kept", f"{state.number}-{i}", peer) for i, peer in enumerate(peers)]
            for one, peer in zip(stored, peers, strict=True):
                parcel.write(peer, folder / one.file)
            self.ledger.save(folder / LEDGER)
            publish(folder)
            self.state = state.model_copy(update={"own": mine, "kept": stored, "ledger": _ledger_digest(self.ledger)})
            write_json(folder / STATE, self.state.to_json())
        self.own = own
        self._sweep()

    def _sweep(self) -> None:
        """Peers of earlier rounds, and what killed processes left half-written."""
        assert self.path is not None
        named = {self.path / one.file for one in self.state.kept}
        half = re.compile(r"\..+\.[a-z0-9_]{8}\.(part|old)")
        sweep(one for one in (self.path / "kept").glob("*-*.parcel") if one not in named)
        sweep(one for top in (".", "own", "kept") for one in (self.path / top).glob(".*") if half.fullmatch(one.name))


def _stored(folder: str, name: object, item: Parcel) -> Stored:
    return Stored(file=f"{folder}/{name}.parcel", digest=item.digest)


def _state(path: Path) -> State:
    raw = read_json(path)
    try:
        if not isinstance(raw, dict):
            raise BadInput(f"{path} is not the state of a node; take it from a backup")
        written = raw.pop("digest", None)
        if raw.get("schema_version") != 1:
            raise BadInput(f"{path} has schema {raw.get('schema_version')!r} and this flyby reads 1; update flyby")
        if written != digest(raw):
            raise BadInput(f"{path} was changed after it was written (its digest does not fit); take it from a backup")
        return State.model_validate(raw)
    except ValidationError as error:
        raise BadInput(f"{path} is not the state of a node ({sentence(error)}); take it from a backup") from None


def _read(folder: Path, stored: Stored) -> Parcel:
    item = parcel.read(folder / stored.file)
    if item.digest != stored.digest:
        raise BadInput(f"{folder / stored.file} is not the one that {STATE} names; take it from a backup")
    return item


def _ledger_digest(ledger: Ledger) -> str:
    return digest([Crossing.row(c) for c in ledger.crossings])


def _as_parcel(peer: Candidate, class_names: Sequence[str], data: str) -> Parcel:
    """An adapted peer as a file: all that the next round needs to go on as if it had never left the memory."""
    return parcel.make(
        sender=peer.sender,
        method="adapted",
        spec=peer.spec,
        class_names=class_names,
        samples=sum(peer.counts or ()),
        counts=peer.counts,
        meta={"version": peer.version, "adapted": peer.adapted, "score": peer.score, "data": data},
        provenance={"facts": plain(peer.facts)},
        weights=peer.state,
        extras={f"logits.{part}": peer.logits[part] for part in PARTS if part in peer.logits},
    )


def _candidate(item: Parcel, device: torch.device | str, data: str) -> Candidate:
    meta, peer = item.manifest.meta, Candidate.of(item, device)
    score, facts = meta.get("score"), item.manifest.provenance.get("facts")
    peer.adapted, peer.score = meta.get("adapted") is True, score if isinstance(score, float) else None
    peer.facts = facts if isinstance(facts, dict) else {}
    if meta.get("data") == data:
        peer.logits = {name.removeprefix("logits."): value.to(device) for name, value in item.extras.items()}
    return peer
