"""A plan is checked when it is made, and survives its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyby.contacts.plan import Contact, Plan, meet
from flyby.errors import BadInput

NAMES = ("ground", "sat-1", "sat-2", "sat-10")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan of three nodes and a station: per pair, disjoint windows."""
    contacts = []
    for i, one in enumerate(NAMES):
        for other in NAMES[i + 1 :]:
            times = draw(st.lists(st.floats(0, 1e5, allow_subnormal=False), unique=True, max_size=6).map(sorted))
            rates = draw(st.lists(st.floats(1e-3, 1e9), min_size=3, max_size=3))
            contacts += [meet(*times[2 * k : 2 * k + 2], other, one, rates[k]) for k in range(len(times) // 2)]
    return Plan(NAMES[1:], tuple(contacts), 1e5, NAMES[:1], "2026-03-01T12:00:00Z")


@given(plan=plans())
def test_a_plan_survives_its_file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "plan.csv"
    plan.write(path)
    again = Plan.read(path)
    assert again == plan
    assert again.digest == plan.digest
    assert list(plan.contacts) == sorted(plan.contacts)
    for name in plan.nodes:  # meeting goes both ways
        assert all(name in plan.peers(other) for other in plan.peers(name))


def test_what_a_plan_answers() -> None:
    rows = (meet(30, 40, "b", "a", 5.0), meet(0, 10, "a", "g", 5.0), meet(10, 20, "b", "a", 5.0))
    plan = Plan(("c", "b", "a"), rows, 60, ("g",))
    assert [c.start for c in plan.contacts] == [0, 10, 30]
    assert plan.nodes == ("a", "b", "c")
    assert plan.peers("a") == ("b",)
    assert plan.peers("g") == ("a",)
    assert plan.alone() == ("c",)
    assert list(plan.pairs()) == [("a", "g"), ("a", "b")]
    assert [c.other("a") for c in plan.of("a")] == ["g", "b", "b"]
    assert len(plan.between_nodes()) == 2
    assert plan.hours == pytest.approx(1 / 60)


def test_a_table_from_anywhere_is_a_plan(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("start,end,a,b,rate\n0,60, b,a,1000\n\n60,90,a,b,1000\n")
    plan = Plan.read(tmp_path / "t.csv")
    assert plan.contacts == (Contact(0, 60, "a", "b", 1000), Contact(60, 90, "a", "b", 1000))
    assert (plan.nodes, plan.seconds) == (("a", "b"), 90)


HEAD = "# seconds: 100\n# nodes: a b\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is it a contact plan"),
        ("# nodes: a a\n# seconds: 9\n", "two participants"),
        ("# nodes: a b\n# stations: b\n# seconds: 9\n", "two participants"),
        ("# nodes: a b\n", "no time"),
        ("# nodes: a b\n# seconds: long\n", "no number"),
        ("# nodes: a b\n# seconds: nan\n", "no time"),
        ("# nodes: a b/c\n# seconds: 9\n", "cannot be called"),
        (HEAD + "# epoch: noon\n", "ISO 8601"),
        (HEAD + "0,10,a,b,5\n5,15,b,a,5\n", "overlap"),
        (HEAD + "0,10,a,b,-5\n", "must be positive"),
        (HEAD + "0,10,a,b,0\n", "must be positive"),
        (HEAD + "10,10,a,b,5\n", "its end must be later"),
        (HEAD + "-1,10,a,b,5\n", "outside the plan"),
        (HEAD + "0,101,a,b,5\n", "outside the plan"),
        (HEAD + "0,10,a,c,5\n", "not in the plan"),
        (HEAD + "0,10,a,a,5\n", "with itself"),
        (HEAD + "0,inf,a,b,5\n", "not finite"),
        (HEAD + "0,10,a,b\n", "line 3: 4 columns"),
        (HEAD + "0,ten,a,b,5\n", "line 3: start, end and rate"),
    ],
)
def test_a_bad_plan_gets_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(BadInput, match=said) as error:
        Plan.read(tmp_path / "t.csv")
    assert "\n" not in str(error.value)
    assert "t.csv" in str(error.value)


def test_a_file_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("t.csv", "absent.csv"):
        with pytest.raises(BadInput, match=name):
            Plan.read(tmp_path / name)
