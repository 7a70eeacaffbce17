"""What crosses by a contact plan: which node of it stands for which site, and every upload in every codec that a window
may ask for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flyby.contacts.journal import Event, Journal
from flyby.contacts.plan import Plan
from flyby.contacts.schedule import ContactSettings
from flyby.errors import BadInput, unknown
from flyby.parcels import parcel
from flyby.parcels.codecs import CODECS
from flyby.parcels.parcel import Parcel
from flyby.runs.config import RunConfig
from flyby.runs.folder import Run

log = logging.getLogger(__name__)
HOUR = 3600.0


def encoded(item: Parcel, codec: str) -> Parcel:
    """The same upload in another codec, which its own maker has put it in."""
    if item.manifest.codec == codec:
        return item
    facts: parcel.Facts = {**item.manifest.facts, "codec": codec}
    return parcel.make(weights=item.weights, extras=item.extras, **facts)


@dataclass(frozen=True)
class Road:
    """A plan, and the site that stands for each of its nodes. Nodes that stand for nobody are not on it."""

    plan: Plan
    sites: Mapping[str, str]
    settings: ContactSettings

    @classmethod
    def of(cls, config: RunConfig, sites: Sequence[str]) -> Road:
        """The plan of a run; sites that have no names in it take its nodes in order."""
        contacts = config.contacts
        assert contacts.plan is not None
        for codec in contacts.codecs:
            if codec not in CODECS:
                raise unknown("codec", codec, CODECS)
        if config.codec != "fp32":
            raise BadInput(
                "with --contacts a window decides the codec; leave codec out, and name contacts.codecs=[...]"
            )
        plan = Plan.read(contacts.plan)
        if set(sites) <= set(plan.nodes):
            return cls(plan, {name: name for name in sites}, contacts)
        if len(plan.nodes) < len(sites):
            raise BadInput(
                f"{contacts.plan} has {len(plan.nodes)} nodes and this run {len(sites)} sites; ask for as many with"
                " --clients, or make a larger plan"
            )
        taken = dict(zip(plan.nodes, sites, strict=False))
        first, last = (f"{node} is {taken[node]}" for node in (next(iter(taken)), list(taken)[-1]))
        more = f"; the plan's other {len(plan.nodes) - len(sites)} stay out" if len(plan.nodes) > len(sites) else ""
        log.info("note: sites take the plan's nodes in order: %s ... %s%s", first, last, more)
        return cls(plan, taken, contacts)

    @cached_property
    def node(self) -> dict[str, str]:
        """The node of each site."""
        return {site: node for node, site in self.sites.items()}

    def begin(self, run: Run) -> None:
        """The plan stands beside the run; another one in its place is an error."""
        if run.plan.exists() and Plan.read(run.plan).digest != self.plan.digest:
            raise BadInput(f"the contact plan changed since the run in {run.path} began; name a new folder with --out")
        self.plan.write(run.plan)

    def journal(self, events: Sequence[Event] | None, sizes: Mapping[str, Mapping[str, int]]) -> Journal:
        """What happens, with its head; without ``events`` what a saved journal says, if it is of this plan."""
        largest = {codec: max(one[codec] for one in sizes.values()) for codec in self.settings.codecs}
        how = self.settings.model_dump(mode="json", exclude={"plan", "journal", "every"})
        head: dict[str, Any] = {"plan": self.plan.digest, "hours": self.plan.hours, "sites": dict(self.sites)}
        made = Journal({**head, "settings": how, "sizes": largest}, list(events or ()))
        if events is not None:
            return made
        assert self.settings.journal is not None
        read = Journal.read(self.settings.journal)
        for key, words in (("plan", "another plan"), ("sites", "other sites"), ("sizes", "models of other sizes")):
            if read.head.get(key) != made.head[key]:
                raise BadInput(f"{self.settings.journal} is a journal of {words}; leave contacts.journal out")
        return read


@dataclass
class Outbox:
    """Every site's upload, in every codec. Files of other codecs than the upload's own are written where they cross."""

    paths: Mapping[str, Path]
    folder: Path

    def sizes(self, road: Road, later: Mapping[str, Any] | None = None) -> dict[str, dict[str, int]]:
        """By node and codec; where newer versions cross too, whose manifests say ``later``, what the larger takes."""
        found: dict[str, dict[str, int]] = {}
        for node, site in road.sites.items():
            item = parcel.read(self.paths[site])
            forms = [item]
            if later is not None:
                said: Any = {**item.manifest.facts, **later}
                forms.append(parcel.make(weights=item.weights, **said))
            found[node] = {c: max(encoded(one, c).size for one in forms) for c in road.settings.codecs}
        return found

    def file(self, site: str, codec: str) -> Path:
        own = self.paths[site]
        if parcel.read_manifest(own).codec == codec:
            return own
        path = self.folder / codec / f"{site}.parcel"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            parcel.write(encoded(parcel.read(own), codec), path)
        return path


def hours(rows: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Accuracy over time as CSV: one line per node and change."""
    lines = [f"{name},{hour!r},{value!r}\n" for name, series in rows.items() for hour, value in series]
    return "node,hour,accuracy\n" + "".join(lines)
