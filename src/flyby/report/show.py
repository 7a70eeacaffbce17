"""``flyby contacts show``: a plan as one page that opens offline. Who can exchange what when, how many peers a node
reaches, and a globe on which it happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flyby.contacts.feasibility import SHARES
from flyby.contacts.ground import read_stations
from flyby.contacts.journal import Journal
from flyby.contacts.plan import Contact, Plan
from flyby.contacts.schedule import ScheduleSettings
from flyby.contacts.tracks import Tracks
from flyby.contacts.transfer import LinkSettings
from flyby.drawing import MUTED, WIDTH, Drawing, canvas, place_axes
from flyby.errors import BadInput
from flyby.files import write_text
from flyby.report import page
from flyby.report.fans import Steps, fan, spread
from flyby.report.globe import CSS, globe
from flyby.runs.folder import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOUR = 3600.0
COLOURS = ("#0b4f7d", "#2f86bd", "#7fb8dc", "#a8dccb", "#d9c7e6", "#dfe3e8")
EXCHANGE = "#D55E00"
PARTS, NOTHING = "a part, in chunks", "nothing"
PAIRS, COLUMNS = 3000, 860  # most rows of the raster, and its columns


@dataclass(frozen=True)
class View:
    """What is looked at: a plan, the bytes of a parcel by codec (empty: not known), and what a run made of the plan."""

    plan: Plan
    sizes: Mapping[str, int] = field(default_factory=dict)
    link: LinkSettings = field(default_factory=LinkSettings)
    journal: Journal | None = None
    accuracy: Mapping[str, Steps] = field(default_factory=dict)
    tracks: Tracks | None = None

    @classmethod
    def of(cls, plan: Plan, size: int | None, journal: Path | None, tracks: Tracks | None) -> View:
        """``size`` is that of an fp32 parcel; a journal knows the sizes and the settings itself, and its run the
        accuracies."""
        sizes = {codec: round(size * share) for codec, share in SHARES.items()} if size else {}
        if journal is None:
            return cls(plan, sizes, tracks=tracks)
        read = Journal.read(journal)
        if read.head.get("plan") != plan.digest:
            raise BadInput(f"{journal} is the journal of another plan; name the plan.csv that stands beside it")
        how = ScheduleSettings.model_validate(read.head["settings"])
        ordered = {codec: int(read.head["sizes"][codec]) for codec in how.codecs}
        sites = {site: node for node, site in read.sites.items()}
        found: dict[str, list[tuple[float, float]]] = {}
        table = Run(journal.parent).hours
        for line in table.read_text(encoding="utf-8").splitlines()[1:] if table.exists() else ():
            site, hour, value = line.rsplit(",", 2)
            if site in sites:
                found.setdefault(sites[site], []).append((float(hour), float(value)))
        return cls(plan, ordered, how, read, found, tracks)

    @property
    def classes(self) -> list[str]:
        """What a window may let through, the most first."""
        return [*self.sizes, PARTS, NOTHING] if self.sizes else ["they can talk"]

    def fits(self, contact: Contact) -> int:
        """The place among ``classes`` of what one window lets through both ways (to a station: one way)."""
        if not self.sizes:
            return 0
        room = self.link.room(contact)
        ways = 1 if set(contact.pair) & set(self.plan.stations) else 2
        for place, size in enumerate(self.sizes.values()):
            if ways * size <= room:
                return place
        return len(self.sizes) + (room < self.link.chunk)


def tracks_of(plan: Plan, positions: Path | None, elements: Path | None, stations: Path | None) -> Tracks | None:
    """Where everybody is, from a file of positions or from element sets; None where neither is named."""
    if positions is not None and elements is not None:
        raise BadInput("--positions and --elements both say where everybody is; leave one of them out")
    if positions is not None:
        return Tracks.read(positions)
    if elements is None:
        return None
    from flyby.contacts.elements import read_elements

    ground = () if stations is None else read_stations(stations)
    return Tracks.of(read_elements(elements, plan.epoch, True), plan.seconds, stations=ground)


def write_page(view: View, out: Path, title: str) -> Path:
    sections = [
        ("globe", "On the globe", _globe(view)),
        ("peers", "Peers against hours", _peers(view)),
        ("windows", "Pair by pair", _raster(view)),
        ("nodes", "Node by node", _nodes(view)),
    ]
    sections = [one for one in sections if one[2]]
    menu = " ".join(f'<a href="#s-{key}">{heading}</a>' for key, heading, _ in sections)
    body = "\n".join(f'<section id="s-{key}"><h2>{heading}</h2>\n{text}</section>' for key, heading, text in sections)
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    write_text(
        out,
        f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{page.text(title)} · flyby contacts</title>
<style>{page.CSS}{CSS}</style>
</head>
<body>
<main>
<header><p class="brand">flyby contacts</p><h1>{page.text(title)}</h1>
{_lead(view)}</header>
<nav aria-label="Sections">{menu}</nav>
{body}
</main>
</body>
</html>
""",
    )
    return out


def _lead(view: View) -> str:
    plan = view.plan
    ground = f", {page.plural(len(plan.stations), 'ground station')}" if plan.stations else ""
    windows = plan.between_nodes()
    lasting = np.array([c.seconds for c in windows] or [0.0])
    facts = [
        (f"{len(plan.pairs()):,}", "pairs that ever meet"),
        (f"{np.median(lasting):,.0f} s", "a window between nodes, the median"),
        (f"{np.median([len(plan.peers(name)) for name in plan.nodes]):g}", "peers of a node, the median"),
    ]
    if view.journal is not None:
        crossed = view.journal.of("exchange")
        facts.append((f"{len(crossed):,}", "pairs exchanged their models"))
        facts.append((f"{len(view.journal.of('round')):,}", "rounds, at " + _orienting(view)))
    items = "".join(f"<li><b>{number}</b> {words}</li>" for number, words in facts)
    lead = f"{len(plan.nodes)} nodes{ground}: {len(plan.contacts):,} windows in {plan.hours:g} hours from {plan.epoch}."
    return f'<p class="lead">{page.text(lead)}</p>\n<ul class="facts">{items}</ul>'


def _orienting(view: View) -> str:
    assert view.journal is not None
    return f"{len({e['node'] for e in view.journal.of('round')})} of {len(view.journal.sites)} nodes"


def _globe(view: View) -> str:
    if view.tracks is None:
        return ""
    drawn = {name for name in view.tracks.names if name in view.plan.nodes}
    if not drawn:
        raise BadInput("the positions are of others than the plan's nodes; name those that the plan was made from")
    return globe(view.plan, view.tracks, view.journal, view.accuracy)


def reached(view: View, useful: bool) -> dict[str, list[tuple[float, float]]]:
    """How many peers each node has met by when: at all, or in a window that lets a whole model through."""
    first: dict[tuple[str, str], float] = {}
    for contact in view.plan.between_nodes():
        if not useful or view.fits(contact) < max(1, len(view.sizes)):
            first.setdefault(contact.pair, contact.start)
    return _counted(view.plan.nodes, first)


def _counted(nodes: Sequence[str], moments: Mapping[tuple[str, str], float]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {name: [(0.0, 0.0)] for name in nodes}
    for pair, moment in sorted(moments.items(), key=lambda item: item[1]):
        for name in pair:
            if name in found:
                found[name].append((moment / HOUR, float(len(found[name]))))
    return found


def _peers(view: View) -> str:
    groups: dict[str, Mapping[str, Steps]] = {"met": reached(view, useful=False)}
    if view.sizes:
        groups["in one window"] = reached(view, useful=True)
    if view.journal is not None:
        crossed = {(e["a"], e["b"]): e["at"] for e in view.journal.of("exchange")}
        groups["exchanged"] = _counted(list(view.journal.sites), crossed)
    end = np.array([view.plan.hours])
    ends = {name: float(np.median(spread(nodes, end))) for name, nodes in groups.items()}
    spoken = "Peers of a node by the end, in the median: " + "; ".join(f"{n} {v:g}" for n, v in ends.items())
    drawn = fan("peers", spoken, groups, view.plan.hours, "peers that a node has reached")
    words = "The median node (line) and the middle half of the nodes (band)."
    return page.figure(drawn, words)


def _raster(view: View) -> str:
    pairs = view.plan.pairs()
    if not pairs:
        return ""
    shown = dict(list(pairs.items())[:PAIRS])
    marks = []
    if view.journal is not None:
        place = {pair: i for i, pair in enumerate(shown)}
        crossed = [((e["a"], e["b"]), e["at"]) for e in view.journal.of("exchange")]
        crossed += [(tuple(sorted((e["node"], e["station"]))), e["at"]) for e in view.journal.of("deliver")]
        marks = [(at / HOUR, place[pair]) for pair, at in crossed if pair in place]
    counts = Counter(view.fits(contact) for windows in shown.values() for contact in windows)
    spoken = "Windows by what they let through: " + "; ".join(
        f"{name} {counts[i]}" for i, name in enumerate(view.classes)
    )
    cells = np.full((len(shown), COLUMNS), -1)
    for row, windows in enumerate(shown.values()):
        for contact in windows:
            left, right = (int(COLUMNS * t / view.plan.seconds) for t in (contact.start, contact.end))
            part = cells[row, left : max(right, left + 1)]
            fits = view.fits(contact)
            part[(part < 0) | (part > fits)] = fits
    drawn = raster(
        "raster", spoken, cells, view.classes, [counts[i] for i in range(len(view.classes))], marks, view.plan.hours
    )
    some = f" The first {PAIRS:,} of {len(pairs):,} pairs." if len(pairs) > PAIRS else ""
    ways = "both ways, before the window closes" if view.sizes else "while the window is open"
    words = (
        f"A row is a pair, in the order of the first meeting; the colour is the best that crosses whole, {ways}.{some}"
    )
    return page.figure(drawn, words + (" Dots: the pair’s one exchange." if marks else ""))


@Drawing
def raster(
    cells: np.ndarray[tuple[int, int], np.dtype[np.int_]],
    classes: Sequence[str],
    counts: Sequence[int],
    marks: Sequence[tuple[float, float]],
    hours: float,
) -> Figure:
    """Pairs down, time across; ``cells`` are places among ``classes``, -1 where nobody talks."""
    from matplotlib.colors import ListedColormap

    height = float(min(560, max(90, 7 * len(cells))))
    figure = canvas(height + 84)
    axes = place_axes(figure, 40, 34, WIDTH - 44, height)
    tints = [*COLOURS[: len(classes) - 2], *COLOURS[-2:]] if len(classes) > 1 else [COLOURS[1]]
    image = np.ma.masked_less(cells, 0)
    extent = (0, hours, len(cells), 0)
    axes.imshow(
        image,
        cmap=ListedColormap(tints),
        vmin=-0.5,
        vmax=len(tints) - 0.5,
        aspect="auto",
        interpolation="none",
        extent=extent,
    )
    if marks:
        x, y = zip(*marks, strict=True)
        axes.scatter(
            x, [place + 0.5 for place in y], s=max(2.0, min(14.0, 2500 / len(cells))), color=EXCHANGE, linewidths=0
        )
    axes.set_xlabel("hours")
    axes.set_ylabel(f"{len(cells):,} pairs")
    axes.set_yticks([])
    _key(axes, [f"{name} ({count:,})" for name, count in zip(classes, counts, strict=True)], tints, height)
    return figure


def _key(axes: Axes, labels: Sequence[str], tints: Sequence[str], height: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=tint, label=label) for tint, label in zip(tints, labels, strict=True)]
    look: dict[str, Any] = {"frameon": False, "handlelength": 0.9, "columnspacing": 1.4, "labelcolor": MUTED}
    place: dict[str, Any] = {"bbox_to_anchor": (0, 1 + 4 / height), "borderaxespad": 0, "borderpad": 0}
    axes.legend(handles=handles, loc="lower left", ncols=len(labels), **look, **place)


def _nodes(view: View) -> str:
    plan, sizes = view.plan, bool(view.sizes)
    whole = reached(view, useful=True)
    head = ["Node", *(["Site"] if view.journal else []), "Windows", "Peers met", *(["In one window"] if sizes else [])]
    head += ["Exchanged", "Rounds", "First round, hour"] if view.journal else []
    head += ["Accuracy %, hour 0", "Accuracy %, last"] if view.accuracy else []
    exchanged: Counter[str] = Counter()
    rounds: dict[str, list[float]] = {}
    for e in view.journal.events if view.journal else ():
        if e["event"] == "exchange":
            exchanged.update((e["a"], e["b"]))
        elif e["event"] == "round":
            rounds.setdefault(e["node"], []).append(e["at"] / HOUR)
    rows = []
    for name in plan.nodes:
        row = [name, *([view.journal.sites.get(name, page.NONE)] if view.journal else [])]
        row += [page.count(len(plan.of(name))), page.count(len(plan.peers(name)))]
        row += [page.count(whole[name][-1][1])] if sizes else []
        if view.journal:
            mine = rounds.get(name, [])
            row += [page.count(exchanged[name]), page.count(len(mine)), f"{mine[0]:.1f}" if mine else page.NONE]
        if view.accuracy:
            steps = view.accuracy.get(name)
            row += [page.percent(steps[0][1]), page.percent(steps[-1][1])] if steps else [page.NONE, page.NONE]
        rows.append(row)
    first = 2 if view.journal else 1
    table = page.table(head, rows, numeric=range(first, len(head)), label="The nodes of the plan", tall=len(rows) > 14)
    alone = plan.alone()
    note = f'<p class="note">Meet no other node: {page.text(", ".join(alone))}.</p>' if alone else ""
    return table + note
