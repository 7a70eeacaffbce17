"""Who exchanges with whom, in which window, in which codec, and when each node has enough to orient.

The plan is known beforehand, as contact plans are, so that nothing is begun that cannot end. Each pair exchanges once.
A node's round fires when its own buffer is full (Q models, those it kept of its last round among them), not by a common
clock. The outcome are the events of a journal (:mod:`flyby.contacts.journal`); nothing is random, and no model is
looked at but where models are dropped by score.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from flyby.contacts.journal import Event
from flyby.contacts.plan import Contact, Plan
from flyby.contacts.storage import Evict, Held, Score, weakest
from flyby.contacts.transfer import LinkSettings, Load

Sizes = Mapping[str, Mapping[str, int]]  # bytes of each node's parcel, by codec
OPEN, ARRIVED, READY = 2, 0, 1  # what happens first, of what happens in the same moment: models come, then windows open


class ScheduleSettings(LinkSettings):
    """When a pair spends its only exchange, and on what; what a node keeps."""

    codecs: tuple[str, ...] = Field(("fp32", "fp16", "int8", "int4"), min_length=1, description="the best first")
    policy: Literal["first", "best", "wait"] = Field(
        "first",
        description="first: as soon as any codec fits, in the best that does; best: in the best codec that fits at"
        " all; wait: when both have oriented once, or at the last chance",
    )
    carry: bool = Field(False, description="hand on the models of others, as their makers signed them")
    storage: int | None = Field(None, ge=1, description="most models of others that a node carries; default: Q")
    evict: Evict = Field("age", description="what is dropped when there is no room: by age, score or diversity")
    round_seconds: float = Field(0.0, ge=0, description="how long a node works on a round, in the plan's seconds")
    last_round: bool = Field(False, description="when the plan ends, orient on what has come, enough or not")

    @field_validator("codecs", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return tuple(value.split(",")) if isinstance(value, str) else value


class ContactSettings(ScheduleSettings):
    """How a run follows a plan; without a ``plan`` it follows none."""

    plan: str | None = Field(None, description="the plan that says who can talk to whom when, as --contacts")
    journal: str | None = Field(None, description="a saved journal to replay, instead of making one")
    every: float = Field(1.0, gt=0, description="hours between two fusions at the server behind the ground stations")

    @model_validator(mode="after")
    def _a_plan(self) -> ContactSettings:
        if self.plan is None and self.model_fields_set - {"plan"}:
            raise ValueError("they say how a plan is followed, and there is none; name one with --contacts")
        if len(set(self.codecs)) < len(self.codecs):
            raise ValueError(f"a codec stands twice in {', '.join(self.codecs)}")
        return self


@dataclass(frozen=True)
class Need:
    """What the nodes work with: Q models for a round, so many of which ``stay`` for the next one; at most ``rounds`` of
    them. ``current``: a node gives its newest model, and not the one it began with."""

    buffer: int
    stay: int
    rounds: int
    current: bool = False


@dataclass
class _Node:
    name: str
    version: int = 0
    made: list[float] = field(default_factory=lambda: [0.0])  # when each version was
    kept: int = 0
    fired: int = 0
    busy: bool = False
    waiting: list[Held] = field(default_factory=list)
    carried: list[Held] = field(default_factory=list)
    had: set[str] = field(default_factory=set)


@dataclass
class _Crossing:
    """A pair's transfer that has begun."""

    load: Load
    codec: str
    versions: dict[str, int]  # of whoever gives
    begun: float
    done: int = 0
    windows: int = 0


def ends(load: Load, windows: Sequence[Contact], link: LinkSettings) -> int | None:
    """In which of the windows a transfer that begins with the first of them ends; None: in none. Without ``resume`` it
    must fit into one."""
    done = 0
    for place, window in enumerate(windows):
        done = load.after(done if link.resume else 0, link.room(window))
        if done == load.chunks:
            return place
    return None


def choose(sizes: Sequence[Sequence[int]], windows: Sequence[Contact], s: ScheduleSettings) -> tuple[int, int] | None:
    """(which codec, in which window it ends) for a pair's remaining windows, by the policy; ``sizes`` has the files of
    each codec. None where none fits."""
    found = [(ends(Load(tuple(files), s.chunk), windows, s), place) for place, files in enumerate(sizes)]
    fits = [(end, place) for end, place in found if end is not None]
    if not fits:
        return None
    end, place = min(fits, key=lambda one: one[1]) if s.policy == "best" else min(fits)
    return place, end


def encounters(
    plan: Plan,
    sizes: Sizes,
    need: Need,
    settings: ScheduleSettings,
    *,
    counts: Mapping[str, tuple[int, ...]] | None = None,
    score: Score | None = None,
) -> list[Event]:
    """What happens to the nodes of ``sizes`` over a plan. ``counts`` are their class counts, for diversity; ``score``
    says what a node thinks of a model."""
    return _Course(plan, sizes, need, settings, counts or {}, score).run()


class _Course:
    """The plan as it passes: a queue of moments, and what every node holds."""

    def __init__(
        self,
        plan: Plan,
        sizes: Sizes,
        need: Need,
        settings: ScheduleSettings,
        counts: Mapping[str, tuple[int, ...]],
        score: Score | None,
    ) -> None:
        self.plan, self.sizes, self.need, self.s = plan, sizes, need, settings
        self.counts, self.score = counts, score
        self.nodes = {name: _Node(name) for name in sizes}
        self.events: list[Event] = []
        self.numbers = itertools.count()
        self.queue: list[tuple[float, int, int, Any]] = []
        self.begun: dict[tuple[str, str], _Crossing] = {}
        self.spent: set[tuple[str, str]] = set()
        self.windows: dict[tuple[str, str], list[Contact]] = defaultdict(list)
        self.passed: dict[tuple[str, str], int] = defaultdict(int)

    def run(self) -> list[Event]:
        for contact in self.plan.contacts:
            if contact.a in self.nodes and contact.b in self.nodes:
                self.windows[contact.pair].append(contact)
                self._at(contact.start, OPEN, contact)
        while self.queue:
            now, kind, _, what = heapq.heappop(self.queue)
            (self._open if kind == OPEN else self._ready if kind == READY else self._arrived)(now, what)
        if self.s.last_round:
            for node in self.nodes.values():
                if node.waiting and not node.busy and node.fired < self.need.rounds:
                    self._fire(node, self.plan.seconds)
        return sorted(self.events, key=lambda event: event["at"])  # stable: what was noted together stays in order

    def _at(self, moment: float, kind: int, what: Any) -> None:
        heapq.heappush(self.queue, (moment, kind, next(self.numbers), what))

    def _note(self, event: str, at: float, **facts: Any) -> None:
        self.events.append({"event": event, "at": round(at, 3), **facts})

    # -- windows

    def _open(self, now: float, contact: Contact) -> None:
        """A window opens: the pair's own exchange first, and then what they carry for others."""
        pair, sent = contact.pair, 0
        self.passed[pair] += 1
        if pair not in self.spent:
            crossing = self.begun.get(pair) or self._begin(contact)
            if crossing is not None:
                sent = self._send(contact, crossing)
        if self.s.carry:
            self._hand_on(contact, sent)

    def _wants(self, node: _Node) -> bool:
        if self.s.carry:
            return True
        return node.fired < self.need.rounds and node.kept < self.need.buffer

    def _begin(self, contact: Contact) -> _Crossing | None:
        """Whether the pair's exchange begins in this window, and in which codec."""
        a, b = self.nodes[contact.a], self.nodes[contact.b]
        givers = [giver for giver, taker in ((a, b), (b, a)) if self._wants(taker) and giver.name not in taker.had]
        left = self.windows[contact.pair][self.passed[contact.pair] - 1 :]
        sizes = [[self.sizes[giver.name][codec] for giver in givers] for codec in self.s.codecs]
        chosen = choose(sizes, left, self.s) if givers else None
        if chosen is None or (chosen[1] > 0 and not self.s.resume):
            return None
        young = self.s.policy == "wait" and min(a.version, b.version) == 0
        if young and choose(sizes, left[1:], self.s) is not None:
            return None
        place, _ = chosen
        versions = {giver.name: giver.version if self.need.current else 0 for giver in givers}
        crossing = _Crossing(Load(tuple(sizes[place]), self.s.chunk), self.s.codecs[place], versions, contact.start)
        self.begun[contact.pair] = crossing
        for giver in givers:  # it will be there: nothing is begun that does not end
            self.nodes[contact.other(giver.name)].had.add(giver.name)
        return crossing

    def _send(self, contact: Contact, crossing: _Crossing) -> int:
        """As many chunks as the window takes; the bytes that crossed in it."""
        before = crossing.done
        crossing.done = crossing.load.after(before, self.s.room(contact))
        sent = crossing.load.bytes(crossing.done) - crossing.load.bytes(before)
        crossing.windows += sent > 0
        if crossing.done == crossing.load.chunks:
            self.spent.add(contact.pair)
            del self.begun[contact.pair]
            self._at(self.s.until(contact, sent), ARRIVED, (contact, crossing))
        elif sent:
            words = {"a": contact.a, "b": contact.b, "codec": crossing.codec, "bytes": sent}
            self._note("partial", contact.end, **words, chunks=crossing.done, of=crossing.load.chunks)
        return sent

    def _hand_on(self, contact: Contact, sent: int) -> None:
        """Models of others that fit whole into what is left of the window, the newest first."""
        room = self.s.room(contact) - sent
        for giver, taker in ((contact.a, contact.b), (contact.b, contact.a)):
            to = self.nodes[taker]
            for held in sorted(self.nodes[giver].carried, key=lambda one: (-one.made, one.received, one.origin)):
                if held.origin in to.had or held.origin == taker or held.bytes > room:
                    continue
                to.had.add(held.origin)
                room, sent = room - held.bytes, sent + held.bytes
                self._at(self.s.until(contact, sent), ARRIVED, (contact, giver, taker, held))

    # -- models

    def _arrived(self, now: float, what: Any) -> None:
        if len(what) == 4:
            _, giver, taker, held = what
            words = {"a": giver, "b": taker, "origin": held.origin, "version": held.version}
            self._note("carry", now, **words, codec=held.codec, bytes=held.bytes)
            self._receive(self.nodes[taker], replace(held, received=now), now)
            self._fire_if_full(self.nodes[taker], now)
            return
        contact, crossing = what
        a, b = contact.pair
        size = {name: self.sizes[name][crossing.codec] for name in crossing.versions}
        self._note(
            "exchange",
            now,
            a=a,
            b=b,
            codec=crossing.codec,
            bytes=[size.get(a), size.get(b)],
            versions=[crossing.versions.get(a), crossing.versions.get(b)],
            windows=crossing.windows,
            begun=round(crossing.begun, 3),
        )
        for giver, taker in ((b, a), (a, b)):
            if giver in crossing.versions:
                version = crossing.versions[giver]
                facts = (giver, version, crossing.codec, size[giver], self.nodes[giver].made[version], now)
                self._receive(self.nodes[taker], Held(*facts, self.counts.get(giver, ())), now)
        for name in (a, b):  # once both have the other's
            self._fire_if_full(self.nodes[name], now)

    def _receive(self, node: _Node, held: Held, now: float) -> None:
        if node.fired < self.need.rounds and node.kept < self.need.buffer:
            node.waiting.append(held)
            if node.kept + len(node.waiting) > self.need.buffer:
                self._drop(node, node.waiting, now)
        if self.s.carry:
            node.carried.append(held)
            if len(node.carried) > (self.s.storage or self.need.buffer):
                self._drop(node, node.carried, now, carried=True)

    def _drop(self, node: _Node, held: list[Held], now: float, carried: bool = False) -> None:
        gone = weakest(node.name, held, self.s.evict, self.score)
        held.remove(gone)
        words = {"by": self.s.evict, **({"carried": True} if carried else {})}
        self._note("evict", now, node=node.name, origin=gone.origin, version=gone.version, **words)

    # -- rounds

    def _fire_if_full(self, node: _Node, now: float) -> None:
        enough = node.waiting and node.kept + len(node.waiting) >= self.need.buffer
        if enough and not node.busy and node.fired < self.need.rounds:
            self._fire(node, now)

    def _fire(self, node: _Node, now: float) -> None:
        node.fired += 1
        models = [
            {
                "origin": held.origin,
                "version": held.version,
                "codec": held.codec,
                "age": round(now - held.made, 3),
                "ahead": max(0, bisect.bisect_left(self.nodes[held.origin].made, now) - 1 - held.version),
            }
            for held in node.waiting
        ]
        self._note("round", now, node=node.name, number=node.fired, models=models)
        node.kept = min(self.need.stay, node.kept + len(node.waiting))
        node.waiting, node.busy = [], True
        if self.s.round_seconds:
            self._at(now + self.s.round_seconds, READY, node)
        else:
            self._ready(now, node)

    def _ready(self, now: float, node: _Node) -> None:
        """A round has ended: the node has a new model, and room for others."""
        node.version, node.busy = node.version + 1, False
        node.made.append(now)
        self._fire_if_full(node, now)


def deliveries(plan: Plan, sizes: Sizes, settings: ScheduleSettings) -> list[Event]:
    """Each node sends its model once, to whichever station it passes: the stations are one receiver with many ears, so
    that chunks may come down at several of them. While two of them hear a node it talks to the first."""
    ground, events = set(plan.stations), list[Event]()
    for name, each in sizes.items():
        windows, end = list[Contact](), 0.0
        for contact in plan.of(name):
            if contact.other(name) in ground and contact.end > end:
                windows.append(replace(contact, start=max(contact.start, end)))
                end = contact.end
        chosen = choose([[each[codec]] for codec in settings.codecs], windows, settings)
        if chosen is None:
            continue
        place, last = chosen
        load, codec, done = Load((each[settings.codecs[place]],), settings.chunk), settings.codecs[place], 0
        for window in windows[: last + 1] if settings.resume else [windows[last]]:
            before, station = done, window.other(name)
            done = load.after(done, settings.room(window))
            sent = load.bytes(done) - load.bytes(before)
            words = {"node": name, "station": station, "codec": codec}
            if done == load.chunks:
                at = round(settings.until(window, sent), 3)
                events.append({"event": "deliver", "at": at, **words, "bytes": load.bytes(done), "version": 0})
            elif sent:
                row = {"event": "partial", "at": round(window.end, 3), **words, "bytes": sent}
                events.append({**row, "chunks": done, "of": load.chunks})
    return sorted(events, key=lambda event: event["at"])
