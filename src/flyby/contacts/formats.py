"""Plans of other tools, in and out.

===== ============================================ ========================================= =====================
name  tool                                         one contact                               rate
===== ============================================ ========================================= =====================
csv   flyby                                        ``start,end,a,b,rate``                    bytes per second
ion   ION (JPL): contact plan of ionadmin          ``a contact +0 +600 1 2 125000``, twice   **bytes** per second
hdtn  HDTN (NASA): contact plan, JSON              ``"rateBitsPerSec": 1000000``, twice      **bits** per second
one   The ONE: external events                     ``0.0 CONN 1 2 up`` and ``... down``      none in the file
===== ============================================ ========================================= =====================

ION and HDTN count whole seconds and one direction per line: a contact is written twice, its times rounded inwards; what
is read is where both directions overlap, at the slower rate. Their nodes are numbers; names ride along in comments.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flyby.contacts.links import RATE
from flyby.contacts.plan import EPOCH, Contact, Plan, meet, write_lines
from flyby.errors import BadInput, unknown
from flyby.files import read_json
from flyby.names import printable

log = logging.getLogger(__name__)
SUFFIXES = {".csv": "csv", ".json": "hdtn", ".ion": "ion", ".ionrc": "ion", ".rc": "ion", ".one": "one", ".txt": "one"}
BITS = 8


@dataclass
class _Head:
    """What a file says beside its contacts."""

    epoch: str = EPOCH
    seconds: float | None = None
    rate: float | None = None
    names: dict[int, str] = field(default_factory=dict)
    stations: set[int] = field(default_factory=set)

    def name(self, number: int) -> str:
        return self.names.setdefault(number, f"node-{number}")

    def comment(self, line: str) -> None:
        found = re.fullmatch(r"#\s*(epoch|seconds|rate|node|station)[:\s]\s*(.+?)\s*", line)
        if found is None:
            return
        key, value = found.groups()
        if key == "epoch":
            self.epoch = value
        elif key in ("seconds", "rate"):
            setattr(self, key, _number(value, f"# {key}"))
        else:
            number, _, name = value.partition(" ")
            if number.isdecimal() and name:
                self.names[int(number)] = name.strip()
                self.stations |= {int(number)} if key == "station" else set()

    def plan(self, contacts: Iterable[Contact], path: Path) -> Plan:
        made = tuple(contacts)
        seconds = self.seconds or max((contact.end for contact in made), default=0.0)
        nodes = tuple(name for number, name in self.names.items() if number not in self.stations)
        try:
            return Plan(nodes, made, seconds, tuple(self.names[n] for n in self.stations), self.epoch)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None

    @staticmethod
    def lines(plan: Plan, first: int) -> Iterator[str]:
        yield f"# flyby contact plan\n# epoch: {plan.epoch}\n# seconds: {plan.seconds!r}\n"
        for number, name in enumerate((*plan.nodes, *plan.stations), start=first):
            yield f"# {'node' if number < first + len(plan.nodes) else 'station'} {number} {name}\n"


def _number(text: Any, where: str) -> float:
    try:
        number = float(text)
        if isinstance(text, bool) or not math.isfinite(number):
            raise ValueError
    except (TypeError, ValueError):
        raise BadInput(f"{where}: {printable(str(text)[:40])!r} is no number") from None
    return number


def _whole(text: Any, where: str) -> int:
    number = _number(text, where)
    if number != int(number) or number < 0:
        raise BadInput(f"{where}: {printable(str(text)[:40])!r} is no node number")
    return int(number)


def _numbers(plan: Plan, first: int) -> dict[str, int]:
    return {name: number for number, name in enumerate((*plan.nodes, *plan.stations), start=first)}


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Where each line stands, and the line."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                yield f"{path}, line {number}", line.strip()
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not readable text ({error})") from None


OneWay = tuple[int, int, float, float, float]  # from, to, start, end, bytes per second


def _two_way(rows: Iterable[OneWay], head: _Head, path: Path) -> Iterator[Contact]:
    """Where both directions of a pair are there, at the slower rate."""
    ways: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for source, target, start, end, rate in rows:
        if end <= start or rate <= 0:
            raise BadInput(
                f"{path}: {source} to {target}, {start} to {end} at {rate} bytes/s: it must end later, at > 0"
            )
        ways.setdefault((source, target), []).append((start, end, rate))
        head.name(source), head.name(target)
    single = sum((target, source) not in ways for source, target in ways)
    if single:
        log.warning("%s: %d pairs can talk in one direction only; they have no contact here", path, single)
    for (source, target), there in ways.items():
        back = sorted(ways.get((target, source), ())) if source < target else []
        there.sort()
        for rows_ in (there, back):
            if any(b[0] < a[1] for a, b in itertools.pairwise(rows_)):
                who = f"{head.name(source)} and {head.name(target)}"
                raise BadInput(f"{path}: two contacts of {who} overlap in one direction; make them one")
        i = j = 0
        while i < len(there) and j < len(back):
            start, end = max(there[i][0], back[j][0]), min(there[i][1], back[j][1])
            if start < end:
                yield meet(start, end, head.name(source), head.name(target), min(there[i][2], back[j][2]))
            i, j = (i + 1, j) if there[i][1] <= back[j][1] else (i, j + 1)


def _inwards(plan: Plan) -> Iterator[tuple[Contact, int, int]]:
    """Contacts in whole seconds, none longer than it is."""
    short = 0
    for contact in plan.contacts:
        start, end = math.ceil(contact.start), math.floor(contact.end)
        if start < end:
            yield contact, start, end
        else:
            short += 1
    if short:
        log.warning("%d contacts have no whole second and are left out: the format counts whole seconds", short)


def _read_ion(path: Path, rate: float | None) -> Plan:
    head = _Head()
    rows: list[tuple[str, list[str]]] = []
    for where, line in _lines(path):
        words = line.split()
        if line.startswith("#"):
            head.comment(line)
        elif words[:1] == ["@"] and len(words) == 2:
            head.epoch = _ion_date(words[1], where)
        elif words[:2] == ["a", "contact"]:
            if len(words) not in (7, 8):
                raise BadInput(f"{where}: a contact is 'a contact START END FROM TO BYTES-PER-SECOND'")
            rows.append((where, words[2:7]))
    dates = [_ion_date(word, where) for where, words in rows for word in words[:2] if not word.startswith("+")]
    if dates and head.epoch == EPOCH:
        head.epoch = min(dates)
    begin = datetime.fromisoformat(head.epoch.rstrip("Z"))

    def seconds(word: str, where: str) -> float:
        if word.startswith("+"):
            return _number(word, where)
        return (datetime.fromisoformat(_ion_date(word, where).rstrip("Z")) - begin).total_seconds()

    found = [
        (_whole(w[2], at), _whole(w[3], at), seconds(w[0], at), seconds(w[1], at), _number(w[4], at)) for at, w in rows
    ]
    return head.plan(_two_way(found, head, path), path)


def _ion_date(word: str, where: str) -> str:
    try:
        return datetime.strptime(word, "%Y/%m/%d-%H:%M:%S").isoformat() + "Z"
    except ValueError:
        raise BadInput(f"{where}: the time {printable(word)!r} is neither +SECONDS nor yyyy/mm/dd-hh:mm:ss") from None


def _write_ion(plan: Plan, path: Path) -> None:
    numbers = _numbers(plan, 1)

    def lines() -> Iterator[str]:
        yield from _Head.lines(plan, 1)
        for contact, start, end in _inwards(plan):
            a, b, rate = numbers[contact.a], numbers[contact.b], max(1, math.floor(contact.rate))
            yield f"a contact +{start} +{end} {a} {b} {rate}\na contact +{start} +{end} {b} {a} {rate}\n"
            yield f"a range +{start} +{end} {min(a, b)} {max(a, b)} 1\n"

    write_lines(path, lines())


def _read_hdtn(path: Path, rate: float | None) -> Plan:
    raw = read_json(path)
    rows = raw.get("contacts") if isinstance(raw, dict) else None
    if not isinstance(rows, list):
        raise BadInput(f"{path} is no HDTN contact plan; it has a list called contacts")
    own, head = raw.get("flyby"), _Head()
    for line in own if isinstance(own, list) else ():
        head.comment(str(line))
    found: list[OneWay] = []
    for number, row in enumerate(rows):
        where = f"{path}, contact {number}"
        if not isinstance(row, dict):
            raise BadInput(f"{where}: a contact is an object with source, dest, startTime, endTime, rateBitsPerSec")
        bits = row.get("rateBitsPerSec", row.get("rateBps"))  # both are bits per second
        if bits is None:
            raise BadInput(f"{where}: no rateBitsPerSec; older plans count megabits per second as rate, so convert it")
        ends = _whole(row.get("source"), where), _whole(row.get("dest"), where)
        times = _number(row.get("startTime"), where), _number(row.get("endTime"), where)
        found.append((*ends, *times, _number(bits, where) / BITS))
    return head.plan(_two_way(found, head, path), path)


def _write_hdtn(plan: Plan, path: Path) -> None:
    numbers = _numbers(plan, 1)

    def lines() -> Iterator[str]:
        head = "".join(_Head.lines(plan, 1)).splitlines()
        yield f'{{"flyby": {json.dumps(head)},\n "contacts": ['
        count = 0
        for contact, start, end in _inwards(plan):
            bits = max(BITS, math.floor(contact.rate * BITS))
            for source, target in (contact.pair, contact.pair[::-1]):
                row = {"contact": count, "source": numbers[source], "dest": numbers[target], "startTime": start}
                row |= {"endTime": end, "rateBitsPerSec": bits, "owlt": 1}
                yield f"{',' if count else ''}\n  {json.dumps(row)}"
                count += 1
        yield "\n]}\n"

    write_lines(path, lines())


def _read_one(path: Path, rate: float | None) -> Plan:
    head = _Head()
    since: dict[tuple[int, int], float] = {}
    found: list[tuple[int, int, float, float]] = []
    last = 0.0
    for where, line in _lines(path):
        words = line.split()
        if line.startswith("#"):
            head.comment(line)
        if line.startswith("#") or len(words) < 2 or words[1] != "CONN":
            continue
        if len(words) != 5 or words[4] not in ("up", "down"):
            raise BadInput(f"{where}: a connection is 'TIME CONN NODE NODE up|down'")
        last = _number(words[0], where)
        a, b = sorted(_whole(re.sub(r"^\D+", "", word), where) for word in words[2:4])
        head.name(a), head.name(b)
        if (words[4] == "up") == ((a, b) in since):
            raise BadInput(
                f"{where}: {a} and {b} go {words[4]} twice in a row; their contacts overlap or are not whole"
            )
        if words[4] == "up":
            since[a, b] = last
        else:
            found.append((a, b, since.pop((a, b)), last))
    end = head.seconds or last
    found += [(a, b, start, end) for (a, b), start in since.items() if start < end]  # still up at the end
    speed = rate or head.rate or RATE
    return head.plan((meet(start, end, head.name(a), head.name(b), speed) for a, b, start, end in found), path)


def _write_one(plan: Plan, path: Path) -> None:
    numbers = _numbers(plan, 0)
    rates = {contact.rate for contact in plan.contacts}
    if len(rates) > 1:
        log.warning("the plan has %d rates and the ONE's events have none; set the interface's speed there", len(rates))
    events = [(c.start, 1, "up", c) for c in plan.contacts] + [(c.end, 0, "down", c) for c in plan.contacts]
    events.sort(key=lambda event: event[:2])  # at one time those that go down first

    def lines() -> Iterator[str]:
        yield from _Head.lines(plan, 0)
        if len(rates) == 1:
            yield f"# rate: {next(iter(rates))!r}\n"
        for time, _, what, contact in events:
            yield f"{time!r} CONN {numbers[contact.a]} {numbers[contact.b]} {what}\n"

    write_lines(path, lines())


READ: dict[str, Callable[[Path, float | None], Plan]] = {
    "csv": lambda path, _: Plan.read(path),
    "ion": _read_ion,
    "hdtn": _read_hdtn,
    "one": _read_one,
}
WRITE: dict[str, Callable[[Plan, Path], None]] = {
    "csv": lambda plan, path: plan.write(path),
    "ion": _write_ion,
    "hdtn": _write_hdtn,
    "one": _write_one,
}


def kind_of(path: Path | str, named: str | None) -> str:
    """The format of a file, as named or by its suffix."""
    if named is not None:
        if named not in READ:
            raise unknown("plan format", named, READ)
        return named
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise BadInput(
            f"the format of {path} is not known by its name; call it {', '.join(SUFFIXES)}, or say it to flyby contacts"
            f" convert ({', '.join(READ)}: --from, --to)"
        )
    return SUFFIXES[suffix]


def read_plan(path: Path | str, kind: str | None = None, rate: float | None = None) -> Plan:
    """A plan in any of the formats; ``rate`` (bytes per second) is for those that have none."""
    return READ[kind_of(path, kind)](Path(path), rate)


def write_plan(plan: Plan, path: Path | str, kind: str | None = None) -> None:
    WRITE[kind_of(path, kind)](plan, Path(path))
