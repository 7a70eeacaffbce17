"""Element sets from files: orbit mean-elements messages (OMM: CSV, JSON, XML) and two-line elements, with or without
a line for the name.

CCSDS 502.0-B-3, Orbit Data Messages (2023). Two-line elements end at catalogue number 339999 (Alpha-5); OMM does not.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flyby.contacts.orbits import Elements, Orbits, orbits, sgp4
from flyby.contacts.safe_xml import elements
from flyby.errors import BadInput
from flyby.names import printable

Row = tuple[str, str, Any]  # name, catalogue number, sgp4's record
MOST = 256 << 20  # bytes: the whole catalogue of the Earth's orbits is 15 MB as CSV
FIELDS = {
    "EPOCH": "epoch",
    "INCLINATION": "inclination",
    "RA_OF_ASC_NODE": "node",
    "ECCENTRICITY": "eccentricity",
    "ARG_OF_PERICENTER": "perigee",
    "MEAN_ANOMALY": "anomaly",
    "MEAN_MOTION": "motion",
    "BSTAR": "drag",
}
LIMITS = {"inclination": (0.0, 180.0), "eccentricity": (0.0, 0.999999), "motion": (0.01, 18.0), "drag": (-10.0, 10.0)}


def read_elements(path: Path | str, start: str | None = None, old: bool = False) -> Orbits:
    """The satellites of a file, whatever of the four formats it is in, from ``start`` on."""
    path = Path(path)
    try:
        if path.stat().st_size > MOST:
            raise BadInput(f"{path} is larger than {MOST >> 20} MB; give the element sets alone")
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not readable text ({error})") from None
    head = text.lstrip()[:1]
    if head == "<":
        rows = _omm(_xml(path), path)
    elif head in ("[", "{"):
        rows = _omm(_json(text, path), path)
    elif "MEAN_MOTION" in text.split("\n", 1)[0]:
        rows = _omm(_csv(text, path), path)
    else:
        rows = _tle(text, path)
    found = list(rows)
    try:
        return orbits([(name, number) for name, number, _ in found], [record for *_, record in found], start, old)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


Message = tuple[str, Mapping[str, Any]]  # where it stands, and its fields


def _csv(text: str, path: Path) -> Iterator[Message]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:
        raise BadInput(f"{path}, line {reader.line_num}: {error}") from None


def _json(text: str, path: Path) -> Iterator[Message]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not readable JSON ({error})") from None
    for number, row in enumerate(given if isinstance(given, list) else [given], start=1):
        if not isinstance(row, dict):
            raise BadInput(f"{path}, entry {number}: no element set; each is an object with EPOCH, MEAN_MOTION ...")
        yield f"{path}, entry {number}", row


def _xml(path: Path) -> Iterator[Message]:
    fields: dict[str, str] = {}
    begun = 0
    for line, tag, _, text in elements(path):
        tag = tag.rpartition(":")[2]
        if tag == "segment" and text is None:
            fields, begun = {}, line
        elif tag == "segment":
            yield f"{path}, line {begun}", fields
        elif text is not None:
            fields[tag] = text


def _omm(messages: Iterator[Message], path: Path) -> Iterator[Row]:
    for where, fields in messages:
        given: dict[str, Any] = {}
        for key, name in FIELDS.items():
            value = fields.get(key, 0.0 if key == "BSTAR" else None)
            if value in (None, ""):
                raise BadInput(f"{where}: {key} is missing; an OMM has {', '.join(FIELDS)}")
            given[name] = str(value) if key == "EPOCH" else _number(value, key, where)
        for name, (low, high) in LIMITS.items():
            if not low <= given[name] <= high:
                raise BadInput(f"{where}: {name} {given[name]} is outside {low} to {high}")
        theory = str(fields.get("MEAN_ELEMENT_THEORY") or "SGP4")
        if theory.upper() not in ("SGP4", "SGP", "SGP/SGP4"):
            raise BadInput(f"{where}: made for {printable(theory)}, and flyby has SGP4")
        number = str(fields.get("NORAD_CAT_ID") or fields.get("OBJECT_ID") or "").strip()
        name = str(fields.get("OBJECT_NAME") or number)
        if not name:
            raise BadInput(f"{where}: neither OBJECT_NAME nor NORAD_CAT_ID is there; give one")
        try:
            yield name, number or name, Elements(**given).record()
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None


def _number(value: Any, key: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise BadInput(f"{where}: {key} is {printable(str(value)[:40])!r}, which is no number")
    return number


# Columns of both lines, as in Spacetrack Report No. 3; a catalogue number may begin with a letter (Alpha-5).
_ID = r"[A-HJ-NP-Z\d ][\d ]{4}"
_FIRST = re.compile(
    rf"1 {_ID}[A-Z ] .{{8}} [\d ]\d[\d .]{{12}} [-+ ]\.\d{{8}} [-+ \d]{{6}}[-+]\d [-+ \d]{{6}}[-+]\d .+"
)
_SECOND = re.compile(
    rf"2 {_ID} [\d ]{{3}}\.\d{{4}} [\d ]{{3}}\.\d{{4}} [\d ]{{7}} [\d ]{{3}}\.\d{{4}} [\d ]{{3}}\.\d{{4}} .+"
)


def _tle(text: str, path: Path) -> Iterator[Row]:
    name, first = "", ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line, where = raw.rstrip(), f"{path}, line {number}"
        if not line or line.startswith("#"):
            continue
        if first:
            _check(line, _SECOND, "second", where)
            if line[2:7] != first[2:7]:
                raise BadInput(f"{where}: the second line is of {line[2:7]}, the first of {first[2:7]}; keep pairs")
            catalogue = first[2:7].strip()
            yield name or catalogue, catalogue, sgp4().Satrec.twoline2rv(first, line)
            name, first = "", ""
        elif _FIRST.match(line) or (line.startswith("1 ") and (name or len(line) == 69)):
            _check(line, _FIRST, "first", where)
            first = line
        elif name:
            raise BadInput(f"{where}: after the name {printable(name[:30])!r} comes no first line of an element set")
        else:
            name = line.removeprefix("0 ")[:60]
    if first or name:
        raise BadInput(f"{path}: the last element set is not whole; a set is a first and a second line")


def _check(line: str, pattern: re.Pattern[str], which: str, where: str) -> None:
    if len(line) != 69 or not pattern.fullmatch(line):
        raise BadInput(f"{where}: not the {which} line of an element set (69 characters in fixed columns)")
    total = sum(int(c) if c.isdigit() else c == "-" for c in line[:68]) % 10
    if line[68] != str(total):
        raise BadInput(f"{where}: the checksum is {printable(line[68])} and should be {total}; the line was changed")
