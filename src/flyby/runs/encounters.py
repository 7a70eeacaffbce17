"""FOL on exactly the encounters that a contact plan allows: nodes train as ever, then events come in the order of time,
and each node's round runs on what it holds when its own buffer is full.

The journal decides everything (:mod:`flyby.contacts.journal`); the rounds themselves are those of
:mod:`flyby.runs.population`.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from flyby.contacts.journal import Journal
from flyby.contacts.schedule import Need, encounters
from flyby.contacts.storage import Held
from flyby.data.dataset import DataBundle
from flyby.data.site import site_of
from flyby.data.splits import Split
from flyby.engines.engine import Engine
from flyby.errors import BadInput
from flyby.files import file_digest, read_json, write_text
from flyby.fusion.evaluation import accuracy, scores_of
from flyby.fusion.predictor import Single
from flyby.machine import as_a_site
from flyby.meeting.collect import stayers
from flyby.meeting.pipeline import Personal
from flyby.meeting.settings import VARIANTS, FleetSettings
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.runs.config import RunConfig
from flyby.runs.crossing import HOUR, Outbox, Road, encoded, hours
from flyby.runs.folder import Run
from flyby.runs.population import Node, Population, answers, judged_of

log = logging.getLogger(__name__)
DIGITS = "0" * 64


@dataclass(frozen=True)
class Came:
    """A model that reached a node: whose, which version, in which codec, and for which of the node's rounds."""

    origin: str
    taker: str
    version: int
    codec: str
    round: int


@dataclass(kw_only=True)
class Encounters(Population):
    """All nodes of a run that meet by a plan."""

    road: Road
    journal: Journal = field(default_factory=lambda: Journal({}))
    working: dict[str, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, settings: FleetSettings, bundle: DataBundle, split: Split) -> Encounters:
        if settings.meetings is not None:
            raise BadInput("orient.meetings and --contacts both say who meets whom; leave one of them out")
        if config.contacts.policy == "wait" and settings.sends != "current":
            raise BadInput(
                "contacts.policy=wait waits for newer models, and nodes give the ones they began with; add --set"
                " orient.sends=current"
            )
        if config.contacts.evict == "score" and settings.sends == "current":
            raise BadInput(
                "what a newer model scores is not known when the plan is made; use contacts.evict=age or diversity with"
                " orient.sends=current"
            )
        road = Road.of(config, list(split.shares))
        return cls(config, settings, bundle, split, judged_of(settings, split), road=road)

    def begin(self, run: Run) -> None:
        self.road.begin(run)

    def met(self) -> dict[str, list[str]]:
        came = list(self.came())
        return {name: [one.origin for one in came if one.taker == name] for name in self.judged}

    def personalise(self, paths: Mapping[str, Path], run: Run, engine: Engine) -> dict[str, dict[str, Any]]:
        outbox = Outbox(paths, run.crossed)
        self.journal = self.foresee(outbox)
        self.journal.write(run.journal)
        self.tell()
        if self.settings.sends == "current":
            with as_a_site(self.device):
                facts = self.in_time(outbox, run)
        else:
            for one in self.came():
                file = outbox.file(one.origin, one.codec)
                self.ledger.record(one.origin, one.taker, file.stat().st_size, file_digest(file), one.round)
            inboxes = {
                site: [[outbox.file(m["origin"], m["codec"]) for m in one] for one in self.rounds(site)]
                for site in self.judged
            }
            facts = self.apart(paths, inboxes, run, engine)
        shutil.rmtree(run.memory, ignore_errors=True)  # every node has ended
        return facts

    # -- what happens

    def foresee(self, outbox: Outbox) -> Journal:
        current = self.settings.sends == "current"
        # A model that a round has made says so in its manifest, which takes some bytes.
        later = {"method": self.variant, "meta": {"version": self.settings.rounds}}
        later["provenance"] = {"oriented from": DIGITS, "round": self.settings.rounds}
        sizes = outbox.sizes(self.road, later if current else None)
        if self.road.settings.journal is not None:
            return self.road.journal(None, sizes)
        stay = stayers(self.settings.buffer, self.settings.top)
        need = Need(self.settings.buffer, stay, self.settings.rounds, current)
        counts = {node: tuple(self.split.counts[site]) for node, site in self.road.sites.items()}

        @cache
        def score(node: str, origin: str, codec: str) -> float:
            """On the validation images of the node that holds it."""
            item = encoded(parcel.read(outbox.paths[self.road.sites[origin]]), codec)
            val, manifest = site_of(self.bundle, self.split, self.road.sites[node]).val, item.manifest
            single = Single([manifest.spec], manifest.class_names, [item.network()])
            return accuracy(scores_of(single, val.images, self.device), val.labels)

        def of(node: str, held: Held) -> float:
            return score(node, held.origin, held.codec)

        events = encounters(self.road.plan, sizes, need, self.road.settings, counts=counts, score=of)
        return self.road.journal(events, sizes)

    def came(self) -> Iterator[Came]:
        """Every model that reached a node, in the order of time."""
        done: Counter[str] = Counter()
        site = self.road.sites
        for e in self.journal.events:
            if e["event"] == "round":
                done[e["node"]] += 1
            elif e["event"] == "carry":
                yield Came(site[e["origin"]], site[e["b"]], e["version"], e["codec"], done[e["b"]] + 1)
            elif e["event"] == "exchange":
                for giver, taker, version in zip("ab", "ba", e["versions"], strict=True):
                    if version is not None:
                        yield Came(site[e[giver]], site[e[taker]], version, e["codec"], done[e[taker]] + 1)

    def rounds(self, site: str) -> list[list[dict[str, Any]]]:
        """What each round of a site's node works on, with sites for nodes."""
        mine = self.journal.rounds(self.road.node[site])
        return [[{**m, "origin": self.road.sites[m["origin"]]} for m in one["models"]] for one in mine]

    def tell(self) -> None:
        facts = self.summary()
        log.info(
            "%d exchanges in %.1f hours (%s); %d of %d nodes orient at least once",
            *(facts["exchanges"], facts["hours"]),
            ", ".join(f"{n} in {codec}" for codec, n in facts["codecs"].items()) or "none",
            *(sum(n > 0 for n in facts["rounds"].values()), len(facts["rounds"])),
        )
        for key, words in (("unmet", "met nobody in time and keep"), ("unfilled", "met too few for a round and keep")):
            if facts[key]:
                log.info("note: %s %s their own model", ", ".join(facts[key]), words)

    def summary(self) -> dict[str, Any]:
        """The plan in a few numbers: what crossed, who oriented how often, and who never did."""
        journal, reached = self.journal, {one.taker for one in self.came()}
        crossed = Counter(e["codec"] for e in journal.of("exchange"))
        rounds = {site: len(self.rounds(site)) for site in self.split.shares}
        ages = [m["age"] / HOUR for e in journal.of("round") for m in e["models"]]
        return {
            "plan": journal.head["plan"],
            "hours": journal.head["hours"],
            "exchanges": len(journal.of("exchange")),
            "partial": len(journal.of("partial")),
            "carried": len(journal.of("carry")),
            "evicted": len(journal.of("evict")),
            "codecs": {codec: crossed[codec] for codec in self.road.settings.codecs if crossed[codec]},
            "rounds": rounds,
            "age_hours": sum(ages) / len(ages) if ages else None,
            "unmet": [site for site in rounds if site not in reached],
            "unfilled": [site for site, n in rounds.items() if not n and site in reached],
        }

    # -- what is made of it

    def in_time(self, outbox: Outbox, run: Run) -> dict[str, dict[str, Any]]:
        """Nodes give their newest models: each version is made when somebody needs it, and then remembered."""
        for one in self.came():
            item = self.version(outbox, run, one.origin, one.version, one.codec)
            self.ledger.record(one.origin, one.taker, item.size, item.digest, one.round)
        for name in self.judged:
            self.version(outbox, run, name, len(self.rounds(name)), "fp32")
            if not run.node(name).exists():
                self.finish(self.working[name], name, None, run)
        return {name: read_json(run.node(name)) for name in self.judged}

    def version(self, outbox: Outbox, run: Run, name: str, number: int, codec: str) -> Parcel:
        """A node's model after so many rounds, and before that all that it takes to make it."""
        if name not in self.working:
            self.working[name] = self.start(name, parcel.read(outbox.paths[name]), run)
        node, rounds = self.working[name], self.rounds(name)
        while len(node.versions) <= number:
            e = len(node.versions)
            inbox = [self.version(outbox, run, m["origin"], m["version"], m["codec"]) for m in rounds[e - 1]]
            made = self.round(node, inbox, e, judged=name in self.judged)
            self._end(node, name, made, e == len(rounds), run)
        return encoded(node.versions[number], codec)

    def _end(self, node: Node, name: str, made: Personal, last: bool, run: Run) -> None:
        """A round is over. The last one is judged before it is remembered: its teacher is never written down."""
        if last and name in self.judged:
            self.finish(node, name, made, run)
        node.remember()

    def findings(self, facts: Mapping[str, dict[str, Any]], run: Run) -> dict[str, Any]:
        """What a result has beside the usual: accuracy over the plan's hours, and what crossed."""
        teacher, found = VARIANTS[self.variant].teacher, {}
        for name, one in facts.items():
            moments = [0.0, *(e["at"] / HOUR for e in self.journal.rounds(self.road.node[name]))]
            values = answers(one, teacher)
            found[name] = [(round(h, 4), v) for h, v in zip(moments, values, strict=True) if v is not None]
        write_text(run.hours, hours(found))
        done = max([1, *(len(one["rounds"]) for one in facts.values())])
        return {"by_hour": found, "contacts": self.summary(), "rounds": done}
