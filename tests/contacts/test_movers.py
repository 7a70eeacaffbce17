"""Contacts by distance, worked out by hand; links, by Friis and Shannon."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flyby.contacts.links import Budget, amount, rate_of
from flyby.contacts.movers import read_movers
from flyby.contacts.plan import Contact
from flyby.errors import BadInput

FCD = """<?xml version="1.0" encoding="UTF-8"?>
<fcd-export xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">
    <timestep time="100.00"><vehicle id="car/1" x="0" y="0" angle="90"/><vehicle id="bus" x="500" y="40"/></timestep>
    <timestep time="110.00"><vehicle id="car/1" x="100" y="0"/><vehicle id="bus" x="400" y="40"/></timestep>
    <timestep time="120.00"><vehicle id="car/1" x="200" y="0"/><vehicle id="bus" x="300" y="40"/>
    <person id="p" x="9999" y="0"/></timestep>
    <timestep time="130.00"><vehicle id="car/1" x="300" y="0"/><vehicle id="bus" x="200" y="40"/>
    <person id="p" x="9999" y="0"/></timestep>
</fcd-export>
"""


def test_two_cars_on_a_road(tmp_path: Path) -> None:
    """x differs by 500 - 20 t, y by 40: within 50 m where |500 - 20 t| <= 30, from 23.5 to 26.5 s."""
    (tmp_path / "fcd.xml").write_text(FCD)
    plan = read_movers(tmp_path / "fcd.xml", 50, rate=1000.0)
    assert plan.contacts == (Contact(23.5, 26.5, "bus", "car-1", 1000.0),)
    assert plan.alone() == ("p",)
    assert plan.seconds == 30


def table(folder: Path, text: str) -> Path:
    (folder / "t.csv").write_text("time,id,x,y,z\n" + text)
    return folder / "t.csv"


def test_each_reports_at_times_of_its_own_and_silence_is_absence(tmp_path: Path) -> None:
    """b stands 30 m above the origin. a comes from x = -100 to 100 in 100 s: within 50 m where |x| <= 40, so from 30 to
    70 s; a silence of 60 s is too long where 20 s are the most."""
    path = table(tmp_path, "0,b,0,0,30\n45,b,0,0,30\n100,b,0,0,30\n0,a,-100,0,0\n33,a,-34,0,0\n100,a,100,0,\n")
    assert read_movers(path, 50, 9.0, gap=90).contacts == (Contact(30, 70, "a", "b", 9.0),)
    assert read_movers(path, 50, 9.0, gap=90, step=7).contacts == (
        Contact(pytest.approx(30, abs=0.7), pytest.approx(70, abs=0.7), "a", "b", 9.0),
    )
    # b's own reports are 45 and 55 s apart, a's 33 and 67.
    assert read_movers(path, 50, 9.0, gap=60).contacts == (Contact(30, 33, "a", "b", 9.0),)
    assert not read_movers(path, 50, 9.0, gap=20).contacts


def test_two_that_stand_still(tmp_path: Path) -> None:
    path = table(tmp_path, "0,a,0,0,0\n10,a,0,0,0\n0,b,3,4,0\n10,b,3,4,0\n0,c,5,9,0\n10,c,5,9,0\n")
    assert read_movers(path, 5, 1.0).contacts == (Contact(0, 10, "a", "b", 1.0),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "0 movers"),
        ("0,a,0,0,0\n1,a,0,0,0\n", "1 movers"),
        ("0,a,0,0,0\n0,b,0,0,0\n", "one moment only"),
        ("0,a,0,here,0\n", "line 2: a report needs id"),
        ("0,a,0,nan,0\n", "line 2: a report needs id"),
        ("0,,0,0,0\n", "line 2: a report needs id"),
        ("0,a,0,0,0\n0,a,1,0,0\n1,b,0,0,0\n", "two places at one time"),
        ("0,a/b,0,0,0\n0,a-b,1,0,0\n1,a-b,0,0,0\n", "two participants"),
    ],
)
def test_bad_reports_get_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_movers(table(tmp_path, text), 5, 1.0)


def test_hostile_xml_and_bad_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text("<!DOCTYPE x [<!ENTITY a 'b'>]><fcd-export>&a;</fcd-export>")
    with pytest.raises(BadInput, match="document type"):
        read_movers(tmp_path / "a.xml", 5, 1.0)
    (tmp_path / "a.xml").write_text("<fcd-export><timestep time='0'>")
    with pytest.raises(BadInput, match="not XML"):
        read_movers(tmp_path / "a.xml", 5, 1.0)
    with pytest.raises(BadInput, match="does not exist"):
        read_movers(tmp_path / "absent", 5, 1.0)
    with pytest.raises(BadInput, match="range of -5"):
        read_movers(tmp_path / "a.xml", -5, 1.0)


def test_a_link_budget_by_hand() -> None:
    """1 W, 10 dBi at both ends, 2.2 GHz, 1,000 km: (0.136269 / 1.256637e7)^2 * 100 = 1.1759e-14 W arrive; 500 K on
    1 MHz make 6.9032e-15 W of noise. So 1.7034 to 1, and log2(2.7034) = 1.4348 Mbit/s = 179,347 bytes/s."""
    budget = Budget(power=1, gain=10, temperature=500, frequency=2.2e9, bandwidth=1e6)
    assert budget.snr(1000) == pytest.approx(1.7034, rel=1e-3)
    assert budget.limit(1000) == pytest.approx(179_347, rel=1e-3)
    assert budget.snr(2000) == pytest.approx(1.7034 / 4, rel=1e-3)
    assert Budget(1, 10, 500, 2.2e9, 1e6, gain_there=0, losses=3).snr(1000) == pytest.approx(1.7034 / 10**1.3, rel=1e-3)
    assert rate_of(None, budget, 1000) == pytest.approx(1e6 / 8 * 0.889, rel=2e-3)  # log2(1 + 1.7034 / 1.9953) = .8905


def test_a_claim_beyond_shannon_is_said(caplog: pytest.LogCaptureFixture) -> None:
    budget = Budget(1, 10, 500, 2.2e9, 1e6)
    with caplog.at_level(logging.WARNING, "flyby"):
        assert rate_of(170_000, budget, 1000) == 170_000
        assert not caplog.records
        assert rate_of(190_000, budget, 1000) == 190_000
    assert "beyond Shannon's limit" in caplog.text
    assert rate_of(None, None, None) == 1_250_000
    for bad, said in ((lambda: rate_of(None, budget, None), "--max-range"), (lambda: Budget(0, 1, 1, 1, 1), "power")):
        with pytest.raises(BadInput, match=said):
            bad()


@pytest.mark.parametrize(
    ("text", "wanted"), [("45MB", 45e6), ("300 kB", 3e5), ("10Mbit/s", 1.25e6), ("2MiB", 2 << 20), ("1.5e3", 1500)]
)
def test_amounts(text: str, wanted: float) -> None:
    assert amount(text, "size") == wanted


@pytest.mark.parametrize("text", ["", "MB", "-5MB", "0", "45 apples", "1..2MB", "5Ti"])
def test_bad_amounts_get_one_line(text: str) -> None:
    with pytest.raises(BadInput, match="size"):
        amount(text, "size")
