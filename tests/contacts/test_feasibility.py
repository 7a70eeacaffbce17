"""What a plan allows, worked out by hand, and the commands that say it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from factories import call, done, one_line, random_parcel
from flyby.contacts.feasibility import Asked, feasibility, reach
from flyby.contacts.plan import Plan, meet
from flyby.contacts.transfer import LinkSettings
from flyby.errors import BadInput
from flyby.parcels import parcel

LINK = LinkSettings(acquisition=10, overhead=0.0, chunk=1024)
KB = 1024


def test_when_a_peer_is_reached_by_hand() -> None:
    """Two parcels of 50 chunks at one chunk per second need 100 s, and 10 s are lost to acquisition in each window: 50
    chunks of a-b cross in the first window, the other 50 in the second, done at 200 + 10 + 50."""
    plan = Plan(
        ("a", "b", "c", "d"),
        (
            meet(0, 60, "a", "b", KB),
            meet(200, 290, "a", "b", KB),
            meet(300, 410, "a", "c", KB),  # exactly enough in one window
            meet(500, 609, "b", "c", KB),  # one second too short
            meet(0, 900, "a", "g", KB),
        ),
        1000,
        ("g",),
    )
    got = reach(plan, 50 * KB, LINK)
    assert got == {"a": [(260.0, "b"), (410.0, "c")], "b": [(260.0, "a")], "c": [(410.0, "a")], "d": []}
    alone = reach(plan, 50 * KB, LINK.model_copy(update={"resume": False}))
    assert alone == {"a": [(410.0, "c")], "b": [], "c": [(410.0, "a")], "d": []}
    facts = feasibility(plan, {"fp32": 50 * KB, "fp16": 25 * KB}, Asked(2, 1), LINK)
    assert facts["alone"] == ["d"]
    assert "1 never meet anybody and keep their own model: d." in facts["said"]
    assert [row["windows_that_fit"] for row in facts["codecs"]] == [0.25, 1.0]
    assert [row["nodes_to_buffer"] for row in facts["codecs"]] == [1, 3]
    assert facts["per_node"]["a"]["hours_to_buffer"]["fp32"] == round(410 / 3600, 3)
    assert facts["over_time"]["fp32"]["most"][-1] == 2


def test_the_seed_paper_s_schedule() -> None:
    asked = Asked()
    assert (str(asked), asked.peers) == ("29 + 20 + 20 = 69", 69)
    assert [asked.rounds_of(n) for n in (28, 29, 48, 49, 68, 69, 500)] == [0, 1, 1, 2, 2, 3, 3]
    assert str(Asked(5, 1)) == "5"
    for words, said in (((0, 1, 1), "at least one"), ((5, 2, 9), "no room for new ones")):
        with pytest.raises(BadInput, match=said):
            Asked(*words)


def everyone(count: int, seconds: float = 1000) -> Plan:
    """Everybody meets everybody, one pair after the other."""
    names = tuple(f"n{i}" for i in range(count))
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    contacts = tuple(meet(seconds * k, seconds * (k + 1), a, b, 1e6) for k, (a, b) in enumerate(pairs))
    return Plan(names, contacts, seconds * len(pairs))


def test_a_schedule_that_works_is_said_with_the_codec_that_makes_it_work() -> None:
    sizes = {"fp32": 1e9, "fp16": 4e8, "int4": 1e8}
    facts = feasibility(everyone(8), sizes, Asked(3, 2, 2), LINK)  # 3 + 2 = 5 of 7; two parcels of 400 MB fit in 990 s
    assert facts["suggestion"] == {"codec": "fp16", "buffer": 3, "rounds": 2, "top": 2}
    assert "The schedule 3 + 2 = 5 works for 90 % of the nodes with fp16." in facts["said"]
    facts = feasibility(everyone(8), sizes, Asked(10, 2, 3), LINK)  # 10 + 8 of 7
    assert any(
        "impossible here, in any codec" in line and "no node meets more than 7" in line for line in facts["said"]
    )
    found = facts["suggestion"]
    assert found["codec"] == "fp16"
    assert Asked(found["buffer"], found["rounds"], found["top"]).peers <= 7
    assert feasibility(everyone(4), {"fp32": 1e12}, Asked(2, 1), LINK)["suggestion"] is None


def test_the_walker_example_says_that_the_paper_s_schedule_is_impossible(tmp_path: Path) -> None:
    pytest.importorskip("sgp4", reason="the extra space is not installed")
    plan = tmp_path / "plan.csv"
    words = "--satellites 70 --planes 7 --phasing 1 --altitude 550 --inclination 97.6 --hours 6 --max-range 1000"
    said = done("contacts", "walker", *words.split(), "--out", plan, "--json").json
    assert said["nodes"] == 70
    facts = done("contacts", "feasibility", plan, "--size", "45MB", "--json").json
    assert facts["met"] == {"least": 8, "median": 8, "most": 8}
    text = done("contacts", "feasibility", plan, "--size", "45MB", "--buffer", 29, "--rounds", 3, "--nodes").out
    assert "every node has the same few peers for ever" in text
    assert "The schedule 29 + 20 + 20 = 69 is impossible here" in text
    assert text.count("\nsat-") == 70


def test_every_way_to_a_plan(tmp_path: Path) -> None:
    pytest.importorskip("sgp4", reason="the extra space is not installed")
    stations = tmp_path / "stations.csv"
    stations.write_text("name,latitude,longitude,height,mask\nkiruna,67.9,21.1,400,5\nquito,-0.2,-78.5,2800,\n")
    plan, ion = tmp_path / "p.csv", tmp_path / "p.ion"
    done("contacts", "random", "--satellites", 5, "--hours", 2, "--stations", stations, "--out", plan)
    assert Plan.read(plan).stations == ("kiruna", "quito")
    done("contacts", "convert", plan, ion)
    done("contacts", "convert", ion, tmp_path / "p.json")
    assert done("contacts", "convert", tmp_path / "p.json", tmp_path / "q.csv", "--json").json["format"] == "csv"
    assert Plan.read(tmp_path / "q.csv").nodes == Plan.read(plan).nodes
    sets = tmp_path / "iss.tle"
    sets.write_text(
        "ISS\n1 25544U 98067A   19343.69339541  .00001764  00000-0  38792-4 0  9991\n"
        "2 25544  51.6439 211.2001 0007417  17.6667  85.6398 15.50103472202482\n"
    )
    said = done("contacts", "windows", sets, "--hours", 12, "--stations", stations, "--out", plan, "--json").json
    assert said["epoch"] == "2019-12-09T16:38:29Z"
    assert said["contacts"] == len(Plan.read(plan).contacts) > 0
    cars = tmp_path / "cars.csv"
    cars.write_text("time,id,x,y\n0,a,0,0\n10,a,0,0\n0,b,0,100\n10,b,0,100\n")
    assert done("contacts", "movers", cars, "--range", 300, "--out", plan, "--json").json["contacts"] == 1


def test_a_parcel_s_own_sizes(tmp_path: Path) -> None:
    everyone(4).write(tmp_path / "p.csv")
    size = parcel.write(random_parcel("a"), tmp_path / "a.parcel")
    facts = done(
        *("contacts", "feasibility", tmp_path / "p.csv", "--parcel", tmp_path / "a.parcel"),
        *("--buffer", 2, "--rounds", 1, "--json"),
    ).json
    sizes = {row["codec"]: row["bytes"] for row in facts["codecs"]}
    assert sizes["fp32"] == size
    assert sizes["fp32"] > sizes["fp16"] > sizes["int8"] > sizes["int4"]
    json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("walker --planes 8 --out p.csv", "evenly"),
        ("walker --out p.unknown", "format of p.unknown"),
        ("walker --max-range 0 --out p.csv", "reaches nobody"),
        ("walker --rate fast --out p.csv", "10Mbit"),
        ("walker --power 1 --out p.csv", "--max-range"),
        ("walker --hours 0 --out p.csv", "positive"),
        ("walker --start noon --out p.csv", "ISO 8601"),
        ("walker --stations absent.csv --out p.csv", "does not exist"),
        ("random --altitude high --out p.csv", "500:600"),
        ("windows absent.tle --out p.csv", "does not exist"),
        ("movers absent.xml --out p.csv", "does not exist"),
        ("convert absent.csv p.ion", "does not exist"),
        ("feasibility absent.csv --size 45MB", "does not exist"),
        ("feasibility plan.xyz --size 45MB", "call it .csv, .json, .ion, .ionrc, .rc, .one, .txt, or say it to"),
        ("feasibility p.csv", "--size 45MB, or --parcel"),
        ("feasibility p.csv --size 45MB --acquisition -1", "acquisition"),
    ],
)
def test_bad_words_get_one_line(words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in one_line(call("contacts", *words.split()))
    assert not (tmp_path / "p.csv").exists()
