"""Element sets: four formats give one orbit, SGP4 gives the published positions, and bad sets get one line."""

from __future__ import annotations

import csv
import json
import logging
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import pytest

from flyby.contacts.elements import read_elements
from flyby.contacts.orbits import Elements, Orbits, circular, unique
from flyby.contacts.windows import find
from flyby.errors import BadInput

sgp4 = pytest.importorskip("sgp4", reason="the extra space is not installed")
FIRST = "1 25544U 98067A   19343.69339541  .00001764  00000-0  38792-4 0  9991"
SECOND = "2 25544  51.6439 211.2001 0007417  17.6667  85.6398 15.50103472202482"
THIRD = "1 20580U 90037B   19342.88042116  .00000361  00000-0  11007-4 0  9996"
FOURTH = "2 20580  28.4682 146.6676 0002639 185.9222 322.7238 15.09309432427086"
TWO = f"ISS (ZARYA)\n{FIRST}\n{SECOND}\nHST\n{THIRD}\n{FOURTH}\n"


def written(folder: Path, text: str, name: str = "sets.txt") -> Path:
    (folder / name).write_text(text)
    return folder / name


def messages() -> list[dict[str, Any]]:
    from sgp4.api import Satrec
    from sgp4.exporter import export_omm

    pairs = (("ISS (ZARYA)", FIRST, SECOND), ("HST", THIRD, FOURTH))
    return [export_omm(Satrec.twoline2rv(*lines), name) for name, *lines in pairs]


def as_file(kind: str, rows: list[dict[str, Any]], folder: Path) -> Path:
    path = folder / f"sets.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        fields = ("".join(f"<{key}>{escape(str(value))}</{key}>" for key, value in row.items()) for row in rows)
        parts = "".join(f"<omm><body><segment><data>{one}</data></segment></body></omm>\n" for one in fields)
        path.write_text(f"<?xml version='1.0'?>\n<ndm>{parts}</ndm>")
    return path


@pytest.mark.parametrize("kind", ["csv", "json", "xml"])
def test_every_format_gives_the_same_orbits(kind: str, tmp_path: Path) -> None:
    lines = read_elements(written(tmp_path, TWO))
    message = read_elements(as_file(kind, messages(), tmp_path))
    assert message.names == lines.names == ("ISS--ZARYA-", "HST")
    assert message.epoch == lines.epoch == "2019-12-09T16:38:29Z"
    times = np.linspace(0, 86_400, 50)
    assert np.abs(message.states(times)[0] - lines.states(times)[0]).max() < 1e-4  # km; OMM rounds the epoch to 1 us


def test_a_number_too_long_for_two_lines(tmp_path: Path) -> None:
    rows = [row | {"NORAD_CAT_ID": 799_500_000 + i, "OBJECT_NAME": "DEB"} for i, row in enumerate(messages())]
    assert read_elements(as_file("csv", rows, tmp_path)).names == ("DEB-799500000", "DEB-799500001")


def test_positions_of_the_verification_set(tmp_path: Path) -> None:
    """SGP4-VER.TLE and tcppver.out, which sgp4 brings along: Vallado's published positions."""
    folder = Path(sgp4.__file__).parent
    lines = [line for line in (folder / "SGP4-VER.TLE").read_text().splitlines() if line[:1] in "12"]
    published: dict[str, list[list[float]]] = {}
    for line in (folder / "tcppver.out").read_text().splitlines():
        if line.endswith("xx"):
            rows = published.setdefault(line.split()[0], [])
        else:
            rows.append([float(word) for word in line.split()[:7]])
    checked = 0
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        try:
            one = read_elements(written(tmp_path, f"{first}\n{second[:69]}\n"))
        except BadInput:
            continue  # the set has wrong checksums on purpose
        record = one.records[0]
        days = record.jdsatepoch - 2_451_544.5
        epoch = datetime(2000, 1, 1) + timedelta(days=days) + timedelta(days=record.jdsatepochF)
        exact = Orbits(one.names, one.records, epoch.isoformat())
        rows = published[str(int(one.names[0]))]
        x, v = (part[0] for part in exact.states(60 * np.array([row[0] for row in rows])))
        there = np.isfinite(x[:, 0])
        wanted = np.array(rows)[there]
        assert np.abs(x[there] - wanted[:, 1:4]).max() < 2e-5  # km: what 1 us of the epoch is at 11 km/s
        assert np.abs(v[there] - wanted[:, 4:]).max() < 1e-6
        checked += int(there.sum())
    assert checked > 400


def test_a_generated_circle_is_one() -> None:
    made = circular("2026-03-01T00:00:00Z", 550, 97.6, 30, 120)
    one = Orbits(("a",), (made.record(),), made.epoch)
    x, v = one.states(np.arange(0, 5700, 10.0))
    radius = np.linalg.norm(x[0], axis=1)
    assert abs(radius - 6928.135).max() < 15  # the bulge of the Earth moves it by a few km
    normal = np.cross(x[0], v[0])
    tilt = np.degrees(np.arccos(normal[:, 2] / np.linalg.norm(normal, axis=1)))
    assert tilt == pytest.approx(np.full(len(tilt), 97.6), abs=0.05)
    assert one.lowest < radius.min()


def test_a_decayed_satellite_is_named(caplog: pytest.LogCaptureFixture) -> None:
    made = Elements("2026-03-01T00:00:00Z", 97.6, 0, 0.0, 0, 0, 16.4, drag=0.5)
    good = circular(made.epoch, 550, 97.6, 0, 0)
    both = Orbits(("low", "good"), (made.record(), good.record()), made.epoch)
    with caplog.at_level(logging.WARNING, "flyby"):
        found, lost = find(both, 86_400.0)
    assert list(lost) == ["low"]
    assert "low is lost from second" in caplog.text
    assert (found.end <= lost["low"] + 1e-3).all()


def test_old_sets_warn_and_then_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, TWO)
    with caplog.at_level(logging.WARNING, "flyby"):
        read_elements(path, "2019-12-12T00:00:00Z")
        assert not caplog.records
        read_elements(path, "2019-12-20T00:00:00Z")
        assert "11 days from the start" in caplog.text
    with pytest.raises(BadInput, match="30 are the most"):
        read_elements(path, "2020-03-01T00:00:00Z")
    assert read_elements(path, "2020-03-01T00:00:00Z", old=True).epoch == "2020-03-01T00:00:00Z"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no element set"),
        ("hello\n", "not whole"),
        (f"{FIRST}\n", "not whole"),
        (f"{FIRST}\n{FIRST}\n", "line 2: not the second line"),
        (f"{FIRST}\n{FOURTH}\n", "line 2: the second line is of 20580"),
        (f"{FIRST[:-1]}2\n{SECOND}\n", "line 1: the checksum is 2 and should be 1"),
        (f"{FIRST}\n{SECOND.replace('51.6439', '5l.6439')}\n", "line 2: not the second line"),
        (f"{FIRST}\n{SECOND[:60]}\n", "line 2: not the second line"),
        (f"name\nname\n{FIRST}\n{SECOND}\n", "line 2: after the name"),
        (f"{FIRST}\n{SECOND}\n{FIRST}\n{SECOND}\n", "two element sets have the number 25544"),
        ("[1, 2]", "entry 1: no element set"),
        ("{", "not readable JSON"),
        ('[{"EPOCH": "2026-01-01T00:00:00"}]', "entry 1: INCLINATION is missing"),
        ("<a><segment></a>", "line 1: not XML"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>", "document type"),
        ("EPOCH,MEAN_MOTION\n2026-01-01T00:00:00,15\n", "line 2: INCLINATION is missing"),
    ],
)
def test_a_bad_file_gets_one_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said) as error:
        read_elements(written(tmp_path, text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("MEAN_MOTION", "fast", "no number"),
        ("MEAN_MOTION", 0, "motion 0.0 is outside"),
        ("ECCENTRICITY", 1.2, "eccentricity 1.2 is outside"),
        ("INCLINATION", "nan", "no number"),
        ("EPOCH", "yesterday", "ISO 8601"),
        ("MEAN_ELEMENT_THEORY", "DSST", "flyby has SGP4"),
        ("NORAD_CAT_ID", 20580, "two element sets have the number 20580"),
    ],
)
def test_a_bad_field_gets_one_line(key: str, value: object, said: str, tmp_path: Path) -> None:
    rows = messages()
    rows[0] |= {key: value}
    with pytest.raises(BadInput, match=said):
        read_elements(as_file("json", rows, tmp_path))


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sgp4.api", None)
    with pytest.raises(BadInput, match=r"flyby\[space\]"):
        read_elements(written(tmp_path, TWO))
    with pytest.raises(BadInput, match="does not exist"):
        read_elements(tmp_path / "absent")


def test_names_that_become_one_are_refused() -> None:
    assert unique([("A B", "1"), ("C", "2")]) == ("A-B", "C")
    with pytest.raises(BadInput, match="two satellites are called"):
        unique([("A-1", "7"), ("A", "1"), ("A", "2")])
