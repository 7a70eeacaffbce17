"""A plan: every window in which two participants can talk, as a value and as a CSV file.

The file is the home format. Comment lines say what rows cannot: when second 0 is, how long the plan looks, who takes
part (also those who meet nobody), and which of the names are ground stations. All of them may be missing, so that a
table from anywhere is a plan too.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from flyby.errors import BadInput
from flyby.files import atomic_open
from flyby.names import check_name, natural, printable

MARK = "# flyby contact plan 1"
COLUMNS = ("start", "end", "a", "b", "rate")
EPOCH = "2000-01-01T00:00:00Z"  # where nobody said when second 0 is


@dataclass(frozen=True, order=True, slots=True)
class Contact:
    """A window in which two participants can talk, both ways."""

    start: float  # seconds from the plan's epoch
    end: float
    a: str  # a < b, as text
    b: str
    rate: float  # bytes per second in the direction that sends; one direction at a time unless somebody says otherwise

    @property
    def pair(self) -> tuple[str, str]:
        return self.a, self.b

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def other(self, name: str) -> str:
        """The participant at the other end."""
        return self.b if name == self.a else self.a


def meet(start: float, end: float, one: str, other: str, rate: float) -> Contact:
    """A contact of two names in any order."""
    return Contact(float(start), float(end), min(one, other), max(one, other), float(rate))


@dataclass(frozen=True)
class Plan:
    """Contacts in the order of time, and all who take part. ``nodes`` learn; ``stations`` are on the ground and only
    collect. The two share no name; a contact is between any two of both."""

    nodes: tuple[str, ...]
    contacts: tuple[Contact, ...]
    seconds: float  # the plan looks so far; contacts lie in [0, seconds]
    stations: tuple[str, ...] = ()
    epoch: str = EPOCH  # ISO 8601, UTC: when second 0 is

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "nodes", tuple(sorted(self.nodes, key=natural)))
        set_(self, "stations", tuple(sorted(self.stations, key=natural)))
        set_(self, "epoch", utc(self.epoch))
        set_(self, "seconds", float(self.seconds))  # as a file says it: equal plans have equal digests
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise BadInput(f"a plan of {self.seconds} seconds has no time in it; give a positive number")
        known: set[str] = set()
        for name in (*self.nodes, *self.stations):
            check_name(name)
            if name in known:
                raise BadInput(f"two participants of the plan are called {name!r}; give each a name of its own")
            known.add(name)
        contacts = tuple(sorted(self.contacts))
        for contact in contacts:
            _check(contact, known, self.seconds)
        _check_overlaps(contacts)
        set_(self, "contacts", contacts)

    @property
    def hours(self) -> float:
        return self.seconds / 3600

    @cached_property
    def _by_name(self) -> dict[str, tuple[Contact, ...]]:
        found: dict[str, list[Contact]] = {name: [] for name in (*self.nodes, *self.stations)}
        for contact in self.contacts:
            found[contact.a].append(contact)
            found[contact.b].append(contact)
        return {name: tuple(rows) for name, rows in found.items()}

    def of(self, name: str) -> tuple[Contact, ...]:
        """One participant's contacts, in the order of time."""
        if name not in self._by_name:
            raise BadInput(f"nobody in the plan is called {name!r}; its nodes begin with {', '.join(self.nodes[:5])}")
        return self._by_name[name]

    def pairs(self) -> dict[tuple[str, str], tuple[Contact, ...]]:
        """Each pair's contacts, pairs in the order of their first contact."""
        found: dict[tuple[str, str], list[Contact]] = {}
        for contact in self.contacts:
            found.setdefault(contact.pair, []).append(contact)
        return {pair: tuple(rows) for pair, rows in found.items()}

    def peers(self, name: str) -> tuple[str, ...]:
        """The nodes (no stations) that a participant ever meets, in the order of the first contact."""
        ground = set(self.stations)
        met = dict.fromkeys(contact.other(name) for contact in self.of(name))
        return tuple(other for other in met if other not in ground)

    def between_nodes(self) -> tuple[Contact, ...]:
        """The contacts that have no station at either end."""
        ground = set(self.stations)
        return tuple(c for c in self.contacts if c.a not in ground and c.b not in ground)

    def alone(self) -> tuple[str, ...]:
        """The nodes that never meet another node."""
        met = {name for contact in self.between_nodes() for name in contact.pair}
        return tuple(name for name in self.nodes if name not in met)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan's CSV text: equal plans have equal digests."""
        whole = hashlib.sha256()
        for line in self.lines():
            whole.update(line.encode())
        return whole.hexdigest()

    def lines(self) -> Iterator[str]:
        head = header(self.nodes, self.stations, self.epoch, self.seconds)
        return itertools.chain(head, map(row, self.contacts))

    def write(self, path: Path | str) -> None:
        write_lines(path, self.lines())

    @classmethod
    def read(cls, path: Path | str) -> Plan:
        return _read(Path(path))


def utc(text: str) -> str:
    """A time in ISO 8601 as the plan writes it. A time without a zone is taken as UTC."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"the time {printable(text)!r} is not ISO 8601; write it as 2026-03-01T12:00:00Z") from None
    when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    return when.replace(tzinfo=None).isoformat() + "Z"


def header(nodes: Iterable[str], stations: Iterable[str], epoch: str, seconds: float) -> Iterator[str]:
    """The lines before the first contact."""
    yield f"{MARK}\n# epoch: {epoch}\n# seconds: {seconds!r}\n"
    yield f"# nodes: {' '.join(nodes)}\n# stations: {' '.join(stations)}\n{','.join(COLUMNS)}\n"


def row(contact: Contact) -> str:
    return f"{contact.start!r},{contact.end!r},{contact.a},{contact.b},{contact.rate!r}\n"


def write_lines(path: Path | str, lines: Iterable[str]) -> None:
    """Lines into a file that is whole or absent, in pieces."""
    rest = iter(lines)
    with atomic_open(path) as file:
        while block := list(itertools.islice(rest, 10_000)):
            file.write("".join(block).encode())


def _check(contact: Contact, known: set[str], seconds: float) -> None:
    said = f"the contact of {printable(contact.a)} and {printable(contact.b)} at second {contact.start}"
    if contact.a == contact.b:
        raise BadInput(f"{said} is with itself; name two participants")
    if contact.a > contact.b:
        raise BadInput(f"{said} has its names in the wrong order; build it with meet()")
    for name in contact.pair:
        if name not in known:
            raise BadInput(f"{said} names {printable(name)!r}, who is not in the plan; add it to the nodes")
    if not all(map(math.isfinite, (contact.start, contact.end, contact.rate))):
        raise BadInput(f"{said} has a number that is not finite")
    if contact.end <= contact.start:
        raise BadInput(f"{said} ends at {contact.end}, before it has begun; its end must be later")
    if contact.start < 0 or contact.end > seconds:
        raise BadInput(f"{said} is outside the plan's {seconds} seconds; cut it there, or make the plan longer")
    if contact.rate <= 0:
        raise BadInput(f"{said} has a rate of {contact.rate} bytes per second; it must be positive")


def _check_overlaps(contacts: tuple[Contact, ...]) -> None:
    last: dict[tuple[str, str], Contact] = {}
    for contact in contacts:
        before = last.get(contact.pair)
        if before is not None and contact.start < before.end:
            raise BadInput(
                f"two contacts of {contact.a} and {contact.b} overlap: {before.start} to {before.end} and"
                f" {contact.start} to {contact.end}; make them one"
            )
        last[contact.pair] = contact


def _read(path: Path) -> Plan:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            facts, contacts = _parse(file, path)
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} is not a readable CSV file ({error})") from None
    stations = tuple(facts.get("stations", "").split())
    ground = set(stations)
    met = {name for contact in contacts for name in contact.pair if name not in ground}
    nodes = tuple(facts["nodes"].split()) if "nodes" in facts else tuple(met)
    if not nodes:
        raise BadInput(f"{path} holds no contact and names no nodes; is it a contact plan?")
    seconds = facts.get("seconds") or max((contact.end for contact in contacts), default=0.0)
    try:
        return Plan(nodes, tuple(contacts), float(seconds), stations, facts.get("epoch", EPOCH))
    except ValueError:
        raise BadInput(f"{path} says 'seconds: {printable(str(seconds))}', which is no number") from None
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _parse(file: Iterable[str], path: Path) -> tuple[dict[str, str], list[Contact]]:
    """The facts of the comment lines, and the contacts."""
    facts: dict[str, str] = {}
    contacts: list[Contact] = []
    numbers = itertools.count(1)
    names: dict[str, str] = {}  # one string per participant, however many rows name it
    for number, line in zip(numbers, file, strict=False):
        if line.startswith("#"):
            key, colon, value = line[1:].partition(":")
            if colon:
                facts[key.strip()] = value.strip()
            continue
        cells = [cell.strip() for cell in next(csv.reader([line]), [])]
        if not any(cells) or (not contacts and tuple(cells) == COLUMNS):
            continue
        where = f"{path}, line {number}"
        if len(cells) != len(COLUMNS):
            raise BadInput(f"{where}: {len(cells)} columns where {','.join(COLUMNS)} are expected")
        try:
            start, end, rate = float(cells[0]), float(cells[1]), float(cells[4])
        except ValueError:
            raise BadInput(f"{where}: start, end and rate must be numbers") from None
        one, other = (names.setdefault(name, name) for name in cells[2:4])
        contacts.append(meet(start, end, one, other, rate))
    return facts, contacts
