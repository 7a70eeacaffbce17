"""Fusion through ground stations: satellites deliver their upload once, to whichever station they pass; the server
behind the stations fuses what has come, hour after hour."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyby.contacts.journal import Journal
from flyby.contacts.schedule import deliveries
from flyby.errors import BadInput
from flyby.files import write_text
from flyby.fusion.base import Fusion, Server
from flyby.fusion.predictor import Predictor
from flyby.parcels.inbox import Inbox
from flyby.runs.config import RunConfig
from flyby.runs.crossing import HOUR, Outbox, Road, hours
from flyby.runs.folder import Run
from flyby.runs.judge import Judge, Seen

log = logging.getLogger(__name__)


def road_of(config: RunConfig, sites: Sequence[str], rule: Fusion | None) -> Road | None:
    """The plan of a run with a server, if it follows one."""
    if config.contacts.plan is None:
        return None
    if rule is None:
        raise BadInput(f"{config.method} exchanges nothing, so --contacts means nothing to it; leave it out")
    road = Road.of(config, sites)
    if not road.plan.stations:
        raise BadInput(
            f"{config.contacts.plan} has no ground stations, and {config.method} has a server behind them; make the"
            " plan with stations, or use a method without a server, such as fol"
        )
    return road


@dataclass(frozen=True)
class Passes:
    """What came down: ``files`` has each site's upload as it arrived, ``at`` its second, both in the sites' order."""

    road: Road
    journal: Journal
    files: Mapping[str, Path]
    at: Mapping[str, float]

    @classmethod
    def of(cls, road: Road, paths: Mapping[str, Path], run: Run) -> Passes:
        outbox = Outbox(paths, run.crossed)
        sizes = outbox.sizes(road)
        replayed = road.settings.journal is not None
        journal = road.journal(None if replayed else deliveries(road.plan, sizes, road.settings), sizes)
        journal.write(run.journal)
        came = {road.sites[e["node"]]: e for e in journal.of("deliver")}
        if not came:
            raise BadInput(
                "no upload reaches a station within the plan; make it longer, or name smaller contacts.codecs such as"
                " [int4]"
            )
        there = [site for site in paths if site in came]
        missing = [site for site in paths if site not in came]
        log.info("%d of %d uploads reach a station in %.1f hours", len(there), len(paths), road.plan.hours)
        if missing:
            log.info("note: %s deliver nothing in time; the server does without them", ", ".join(missing))
        files = {site: outbox.file(site, came[site]["codec"]) for site in there}
        return cls(road, journal, files, {site: came[site]["at"] for site in there})

    def moments(self) -> list[tuple[float, list[str]]]:
        """The hours at which the server fuses, with all that has come by then: where nothing new came, it does not."""
        every, found = self.road.settings.every, list[tuple[float, list[str]]]()
        steps = {site: max(1, math.ceil(at / HOUR / every)) for site, at in self.at.items()}
        for step in sorted(set(steps.values())):
            there = [site for site in self.files if steps[site] <= step]
            found.append((min(step * every, self.road.plan.hours), there))
        return found

    def over_time(self, rule: Fusion, server: Server, judge: Judge, last: Predictor, run: Run) -> dict[str, Any]:
        """Accuracy against hours: each site's own model, and from the first fusion on the server's newest, weighted as
        the site's classes. ``last`` is made of all that came."""
        sites, fused, found = list(judge.split.shares), list[dict[str, Any]](), dict[str, list[tuple[float, float]]]()
        came = Inbox(self.files.values())
        for hour, there in self.moments():
            try:
                whole = len(there) == len(self.files)
                made = last if whole else rule.fuse(came.of(there), Server(server.proxy, server.seed, server.device))
            except BadInput as error:  # some rules need more than one or two
                log.info("hour %g: %d uploads do not fuse (%s)", hour, len(there), error)
                continue
            seen = judge.look(made, sites)
            fused.append({"hour": hour, "uploads": len(there), "accuracy": seen.accuracy})
            for site in sites:
                found.setdefault(site, []).append((hour, own_mix(seen, site)))
        alone = judge.alone(Inbox(run.parcel(site) for site in sites))
        rows = {site: [(0.0, own_mix(alone[site], site)), *found.get(site, ())] for site in sites}
        write_text(run.hours, hours(rows))
        return {"by_hour": rows, "contacts": self.summary() | {"fused": fused}}

    def summary(self) -> dict[str, Any]:
        journal = self.journal
        crossed = Counter(e["codec"] for e in journal.of("deliver"))
        return {
            "plan": journal.head["plan"],
            "hours": journal.head["hours"],
            "delivered": {site: round(at / HOUR, 4) for site, at in self.at.items()},
            "partial": len(journal.of("partial")),
            "codecs": {codec: crossed[codec] for codec in self.road.settings.codecs if crossed[codec]},
            "missing": [site for site in self.road.sites.values() if site not in self.at],
        }


def own_mix(seen: Seen, site: str) -> float:
    """On the common images, weighted as the site's classes."""
    return seen.common[site]["accuracy"] if seen.common else seen.own[site]
