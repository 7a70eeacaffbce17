"""Plans of other tools survive the way there and back; bits are not bytes."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flyby.contacts.formats import read_plan, write_plan
from flyby.contacts.plan import Plan, meet
from flyby.errors import BadInput

NAMES = ("ground", "sat-1", "sat-2", "sat-10")
loosely = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def plans(draw: st.DrawFn, times: st.SearchStrategy[float], rates: st.SearchStrategy[float]) -> Plan:
    contacts = []
    for i, one in enumerate(NAMES):
        for other in NAMES[i + 1 :]:
            cuts = draw(st.lists(times, unique=True, max_size=6).map(sorted))
            pairs = zip(cuts[::2], cuts[1::2], strict=False)
            contacts += [meet(start, end, other, one, draw(rates)) for start, end in pairs]
    return Plan(NAMES[1:], tuple(contacts), 1e5, NAMES[:1], "2026-03-01T12:00:00Z")


WHOLE = plans(st.integers(0, 100_000).map(float), st.integers(1, 10**9).map(float))


@loosely
@given(plan=WHOLE, kind=st.sampled_from(["csv", "ion", "hdtn"]))
def test_whole_seconds_survive(plan: Plan, kind: str, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "p", kind)
    assert read_plan(tmp_path / "p", kind) == plan


@loosely
@given(plan=plans(st.floats(0, 1e5, allow_subnormal=False), st.just(777.0)))
def test_the_one_keeps_any_time_and_others_round_inwards(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "p.one")
    again = read_plan(tmp_path / "p.one")
    if plan.contacts:
        assert again == plan
    write_plan(plan, tmp_path / "p.ion")
    longer = [c for c in plan.contacts if math.ceil(c.start) < math.floor(c.end)]
    for contact, kept in zip(longer, read_plan(tmp_path / "p.ion").contacts, strict=True):
        if contact.pair == kept.pair:
            assert contact.start <= kept.start < kept.end <= contact.end


def test_the_eightfold_trap(tmp_path: Path) -> None:
    """1,000,000 bits per second are 125,000 bytes per second, in both directions of the way."""
    rows = [
        {"contact": i, "source": a, "dest": b, "startTime": 0, "endTime": 600, "rateBitsPerSec": 1_000_000, "owlt": 1}
        for i, (a, b) in enumerate(((1, 2), (2, 1)))
    ]
    (tmp_path / "p.json").write_text(json.dumps({"contacts": rows}))
    plan = read_plan(tmp_path / "p.json")
    assert plan.contacts == (meet(0, 600, "node-1", "node-2", 125_000.0),)
    write_plan(plan, tmp_path / "p.ion")
    assert "a contact +0 +600 1 2 125000\n" in (tmp_path / "p.ion").read_text()
    write_plan(plan, tmp_path / "q.json")
    assert [row["rateBitsPerSec"] for row in json.loads((tmp_path / "q.json").read_text())["contacts"]] == [1e6, 1e6]
    rows[1]["rateBps"] = rows[1].pop("rateBitsPerSec")
    (tmp_path / "p.json").write_text(json.dumps({"contacts": rows}))
    assert read_plan(tmp_path / "p.json").contacts[0].rate == 125_000


def test_both_directions_make_a_contact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "p.ion").write_text(
        "1 1 ''\n@ 2026/03/01-12:00:00\na contact +0 +100 1 2 1000\na contact 2026/03/01-12:00:30 +200 2 1 500 0.9\n"
        "a contact +0 +50 3 1 10\na range +0 +100 1 2 1\nm production 1\n"
    )
    with caplog.at_level(logging.WARNING, "flyby"):
        plan = read_plan(tmp_path / "p.ion")
    assert plan.contacts == (meet(30, 100, "node-1", "node-2", 500.0),)
    assert plan.epoch == "2026-03-01T12:00:00Z"
    assert plan.alone() == ("node-3",)
    assert "1 pairs can talk in one direction only" in caplog.text


def test_events_of_the_one(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(
        "0 CONN n1 n2 up\n3 C M1 n1 n2 500\n5.5 CONN 2 1 down\n6 CONN 0 1 up\n9 CONN 0 2 up\n"
    )
    plan = read_plan(tmp_path / "p.txt", rate=100.0)
    assert plan.contacts == (meet(0, 5.5, "node-1", "node-2", 100), meet(6, 9, "node-0", "node-1", 100))


HEAD = "a contact +0 +10 1 2 5\na contact +0 +10 2 1 5\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.ion", "a contact +0 +10 1 2\n", "line 1: a contact is"),
        ("p.ion", "a contact +0 soon 1 2 5\n", "neither"),
        ("p.ion", "a contact +0 +ten 1 2 5\n", "no number"),
        ("p.ion", "a contact +0 +10 1.5 2 5\n", "no node number"),
        ("p.ion", HEAD.replace("5", "-5"), "at > 0"),
        ("p.ion", HEAD.replace("+10", "+0"), "must end later"),
        ("p.ion", HEAD + "a contact +5 +20 1 2 5\n", "overlap"),
        ("p.ion", "a contact -5 +10 1 2 5\n", "neither"),
        ("p.json", "[]", "no HDTN contact plan"),
        ("p.json", "{", "not readable JSON"),
        ("p.json", '{"contacts": [1]}', "contact 0: a contact is"),
        ("p.json", '{"contacts": [{"source": 1, "dest": 2, "rate": 5}]}', "no rateBitsPerSec"),
        ("p.json", '{"contacts": [{"source": "x", "dest": 2, "rateBps": 5}]}', "no number"),
        ("p.one", "0 CONN 1 2 maybe\n", "line 1: a connection is"),
        ("p.one", "0 CONN 1 2 up\n1 CONN 1 2 up\n", "line 2: 1 and 2 go up twice"),
        ("p.one", "0 CONN 1 2 down\n", "line 1: 1 and 2 go down twice"),
        ("p.one", "", "no time in it"),
        ("p.unknown", "", "--from"),
    ],
)
def test_a_bad_plan_gets_one_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=said) as error:
        read_plan(tmp_path / name)
    assert "\n" not in str(error.value)


def test_an_unknown_format_has_a_hint() -> None:
    with pytest.raises(BadInput, match="did you mean 'hdtn'"):
        read_plan("p", "hdnt")
    with pytest.raises(BadInput, match="does not exist"):
        read_plan("absent.ion")
