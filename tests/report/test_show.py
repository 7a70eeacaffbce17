"""The page of a contact plan: one file that asks nobody for anything, whose numbers are those of the plan."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factories import call, done, one_line
from flyby.contacts.czml import czml
from flyby.contacts.ground import Station
from flyby.contacts.journal import Journal
from flyby.contacts.plan import Plan, meet
from flyby.contacts.schedule import Need, ScheduleSettings, encounters
from flyby.contacts.tracks import Tracks
from flyby.contacts.walker import walker
from flyby.contacts.windows import Rules, find
from flyby.report.fans import leads, mean_at
from flyby.report.show import View, reached

pytest.importorskip("sgp4")
STATION = Station("kiel", 54.3, 10.1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of six satellites and a station, positions, and a run's journal with its hours."""
    folder = tmp_path_factory.mktemp("world")
    orbits = walker(6, 2, 1, 600, 70)
    windows, _ = find(orbits, 3 * 3600, Rules(max_range=5000, step=30), (STATION,))
    plan = windows.plan(orbits.names, ("kiel",), 20_000.0, orbits.epoch, 3 * 3600)
    plan.write(folder / "plan.csv")
    Tracks.of(orbits, plan.seconds, stations=(STATION,)).write(folder / "positions.csv")
    sizes = {"fp32": 400_000, "int8": 100_000}
    how = ScheduleSettings(codecs=("fp32", "int8"))
    events = encounters(plan, dict.fromkeys(plan.nodes, sizes), Need(2, 1, 1), how)
    sites = {node: f"site-{i}" for i, node in enumerate(plan.nodes)}
    head = {"plan": plan.digest, "hours": 3.0, "sites": sites, "settings": how.model_dump(mode="json"), "sizes": sizes}
    Journal(head, events).write(folder / "journal.jsonl")
    (folder / "hours.csv").write_text("node,hour,accuracy\nsite-0,0.0,0.5\nsite-0,1.5,0.75\nsite-1,0.0,0.6\n")
    return folder


def facts(page: str) -> dict[str, Any]:
    found = re.search(r'id="g-facts">(.*?)</script>', page, re.S)
    assert found is not None
    return dict(json.loads(found[1]))


def test_the_page_of_a_run(world: Path, tmp_path: Path) -> None:
    words = ("--journal", world / "journal.jsonl", "--positions", world / "positions.csv")
    out, other = tmp_path / "page.html", tmp_path / "plan.czml"
    done("contacts", "show", world / "plan.csv", *words, "--out", out, "--czml", other)
    page = out.read_text()
    assert not re.search(r"(src|href)=\"(?!#|data:)", page.replace('xmlns:xlink="http://www.w3.org/1999/xlink"', ""))
    assert "default-src 'none'" in page
    assert len(page) < 400_000
    assert [key in page for key in ("s-globe", "s-peers", "s-windows", "s-nodes")] == [True] * 4
    plan, journal = Plan.read(world / "plan.csv"), Journal.read(world / "journal.jsonl")
    seen = facts(page)
    assert seen["names"] == [*plan.nodes, "kiel"]
    assert seen["stations"] == [6]
    assert len(seen["lines"]) == len(journal.of("exchange")) > 3
    assert seen["accuracy"] == {"0": [[0.0, 0.5], [1.5, 0.75]], "1": [[0.0, 0.6]]}
    assert seen["range"] == [0.5, 0.75]
    raw = np.frombuffer(base64.b64decode(seen["places"]), dtype="<i2").reshape(7, seen["moments"], 3) * seen["unit"]
    read = Tracks.read(world / "positions.csv")
    assert np.abs(raw - read.places).max() < 0.5, "to half a kilometre"
    packets = json.loads(other.read_text())
    assert [p["id"] for p in packets[:3]] == ["document", "sat-0", "sat-1"]
    assert len(packets) == 1 + 7 + len(journal.of("exchange"))
    assert len(next(p for p in packets if p["id"] == "kiel")["position"]["cartesian"]) == 3


def test_a_station_stays_where_it_is_and_satellites_keep_their_height() -> None:
    orbits = walker(6, 2, 1, 600, 70)
    tracks = Tracks.of(orbits, 7200, stations=(STATION,))
    lat, lon = np.radians([54.3, 10.1])
    up = np.array([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)])
    ground = tracks.places[-1]
    assert np.abs(ground - ground[0]).max() < 1e-6
    assert float(ground[0] @ up / np.linalg.norm(ground[0])) > 0.99999  # but for the flattening
    assert np.abs(np.linalg.norm(tracks.places[:-1], axis=-1) - 6978).max() < 15


def test_what_a_window_lets_through() -> None:
    plan = Plan(
        ("a", "b", "c"),
        tuple(meet(0, end, one, other, 1000.0) for end, one, other in ((900.0, "a", "b"), (300.0, "a", "c"))),
        1000.0,
    )
    view = View(plan, {"fp32": 400_000, "int8": 100_000})
    assert view.classes == ["fp32", "int8", "a part, in chunks", "nothing"]
    assert [view.fits(c) for c in plan.pairs()[("a", "b")] + plan.pairs()[("a", "c")]] == [0, 1]
    short = View(plan, {"fp32": 4_000_000})
    assert [short.fits(c) for c in plan.contacts] == [1, 1]
    assert reached(view, useful=True)["a"][-1][1] == 2
    assert reached(short, useful=True)["a"] == [(0.0, 0.0)]


def test_who_is_ahead_when() -> None:
    groups = {"fol": {"a": [(0.0, 0.6), (2.0, 0.8)], "b": [(0.0, 0.7)]}, "server": {"a": [(0.0, 0.5), (6.0, 0.9)]}}
    assert mean_at(groups["fol"], 1.9) == pytest.approx(0.65)
    assert mean_at(groups["fol"], 2) == pytest.approx(0.75)
    (start, first), (change, second) = leads(groups, 24.0)
    assert (start, first, second) == (0.0, "fol", "server")
    assert change == pytest.approx(6.0, abs=0.11)


def test_bad_input_is_one_line(world: Path, tmp_path: Path) -> None:
    other = Plan(("a", "b"), (meet(0, 60, "a", "b", 1.0),), 60.0)
    other.write(tmp_path / "other.csv")
    (tmp_path / "bad.csv").write_text("seconds,name,x\n1,a,2\n")

    def said(*words: object) -> str:
        return one_line(call("contacts", "show", *words, "--out", tmp_path / "page.html"))

    assert "journal of another plan" in said(tmp_path / "other.csv", "--journal", world / "journal.jsonl")
    assert "is not a journal" in said(tmp_path / "other.csv", "--journal", world / "plan.csv")
    assert "holds no positions" in said(tmp_path / "other.csv", "--positions", tmp_path / "bad.csv")
    assert "others than the plan's nodes" in said(tmp_path / "other.csv", "--positions", world / "positions.csv")
    assert "CZML shows where everybody is" in said(tmp_path / "other.csv", "--czml", tmp_path / "x.czml")
    assert not (tmp_path / "page.html").exists()
    assert json.loads(czml(other, Tracks.read(world / "positions.csv")))[0]["id"] == "document"
