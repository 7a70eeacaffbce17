"""Who exchanges with whom and when: schedules worked out by hand, and what must hold for any plan."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyby.contacts.journal import Event
from flyby.contacts.plan import Contact, Plan, meet
from flyby.contacts.schedule import Need, ScheduleSettings, deliveries, encounters
from flyby.contacts.storage import Held, weakest

KB = 1024
# A byte takes 1/1024 s, and a window gives its first 10 s away: room for (seconds - 10) kilobytes.
HAND = ScheduleSettings(acquisition=10, overhead=0, chunk=KB, codecs=("fp32", "int8"))
FOUR = {"fp32": 4 * KB, "int8": KB}
ONE = Need(buffer=2, stay=1, rounds=1)


def plan_of(*windows: tuple[float, float, str, str], seconds: float = 1000.0, stations: tuple[str, ...] = ()) -> Plan:
    contacts = tuple(meet(start, end, a, b, float(KB)) for start, end, a, b in windows)
    nodes = {name for c in contacts for name in c.pair} - set(stations)
    return Plan(tuple(nodes), contacts, seconds, stations)


def changed(**words: Any) -> ScheduleSettings:
    return HAND.model_copy(update=words)


def brief(events: list[Event]) -> list[tuple[Any, ...]]:
    """Events as short tuples, for reading beside the working."""
    found: list[tuple[Any, ...]] = []
    for one in events:
        match one["event"]:
            case "exchange":
                found.append(("exchange", one["at"], one["a"] + one["b"], one["codec"], one["versions"]))
            case "round":
                found.append(("round", one["at"], one["node"], [m["origin"] for m in one["models"]]))
            case "partial":
                whose = one["a"] + one["b"] if "a" in one else one["node"]
                found.append(("partial", one["at"], whose, one["chunks"], one["of"]))
            case "carry":
                found.append(("carry", one["at"], one["a"] + one["b"], one["origin"]))
            case "evict":
                found.append(("evict", one["at"], one["node"], one["origin"]))
            case "deliver":
                found.append(("deliver", one["at"], one["node"], one["station"], one["codec"]))
    return found


# Room: a-b 8 kB (fp32 both ways, just so); a-c 3 kB (int8 only); b-c 0 kB, and at last 2 kB (int8, just so).
THREE = plan_of((0, 18, "a", "b"), (20, 33, "a", "c"), (40, 49, "b", "c"), (60, 72, "b", "c"))
SIZES = dict.fromkeys("abc", FOUR)


def test_three_nodes_and_four_windows() -> None:
    assert brief(encounters(THREE, SIZES, ONE, HAND)) == [
        ("exchange", 18, "ab", "fp32", [0, 0]),
        ("exchange", 32, "ac", "int8", [0, 0]),  # 20 + 10 + 2 kB
        ("round", 32, "a", ["b", "c"]),
        ("exchange", 72, "bc", "int8", [0, 0]),
        ("round", 72, "b", ["a", "c"]),
        ("round", 72, "c", ["a", "b"]),
    ]


def test_a_byte_too_many_does_not_fit() -> None:
    large = {name: {"fp32": 4 * KB + 1, "int8": KB + 1} for name in "abc"}
    assert [e[2:4] for e in brief(encounters(THREE, large, ONE, changed(resume=False))) if e[0] == "exchange"] == [
        ("ab", "int8"),
        ("ac", "int8"),
    ], "b-c has two kilobytes, and both together now take two bytes more"


def test_overhead_and_acquisition_take_their_part() -> None:
    assert brief(encounters(THREE, SIZES, ONE, changed(overhead=0.01)))[0][3] == "int8"
    assert brief(encounters(THREE, SIZES, ONE, changed(acquisition=10.5)))[0][3] == "int8"
    assert encounters(THREE, SIZES, ONE, changed(acquisition=30)) == []


def test_chunks_go_on_in_the_pair_s_later_windows() -> None:
    plan = plan_of((0, 13.5, "a", "b"), (20, 32.2, "a", "b"), (50, 63, "a", "b"), (80, 99, "a", "b"))
    fp32 = {name: {"fp32": 4 * KB} for name in "ab"}
    only = changed(codecs=("fp32",))
    assert brief(encounters(plan, fp32, ONE, only)) == [
        ("partial", 13.5, "ab", 3, 8),  # half a chunk is cut off and lost
        ("partial", 32.2, "ab", 5, 8),
        ("exchange", 63, "ab", "fp32", [0, 0]),  # the last three, just so
    ]
    assert brief(encounters(plan, fp32, ONE, changed(codecs=("fp32",), resume=False))) == [
        ("exchange", 98, "ab", "fp32", [0, 0])
    ]
    short = plan_of((0, 13.5, "a", "b"), (20, 32.2, "a", "b"))
    assert encounters(short, fp32, ONE, only) == [], "nothing is begun that cannot end"


def test_policies() -> None:
    plan = plan_of((0, 12, "a", "b"), (20, 38, "a", "b"), (100, 118, "a", "c"), (200, 218, "a", "b"))
    assert brief(encounters(plan, SIZES, ONE, HAND))[0] == ("exchange", 12, "ab", "int8", [0, 0])
    best = brief(encounters(plan, SIZES, ONE, changed(policy="best")))
    assert best[:2] == [("partial", 12, "ab", 2, 8), ("exchange", 36, "ab", "fp32", [0, 0])]
    alone = brief(encounters(plan, SIZES, ONE, changed(policy="best", resume=False)))
    assert alone[0] == ("exchange", 38, "ab", "fp32", [0, 0])
    now = Need(buffer=1, stay=0, rounds=2, current=True)
    waited = [e for e in brief(encounters(plan, SIZES, now, changed(policy="wait"))) if e[0] == "exchange"]
    assert waited == [
        ("exchange", 118, "ac", "fp32", [0, 0]),  # their only window
        ("exchange", 218, "ab", "fp32", [1, 0]),  # b has not oriented, and this is the last chance
    ]


def test_rounds_have_their_own_clock_and_staleness_is_noted() -> None:
    plan = plan_of((0, 18, "a", "b"), (20, 38, "b", "c"), (40, 58, "a", "c"))
    events = encounters(plan, SIZES, Need(buffer=1, stay=0, rounds=2, current=True), HAND)
    rounds = [e for e in events if e["event"] == "round"]
    assert [(e["at"], e["node"], e["number"]) for e in rounds] == [
        *((18, "a", 1), (18, "b", 1), (38, "b", 2), (38, "c", 1), (58, "a", 2), (58, "c", 2)),
    ]
    later = encounters(plan, SIZES, Need(buffer=2, stay=0, rounds=2, current=True), HAND)
    assert [(e["at"], e["node"]) for e in later if e["event"] == "round"] == [(38, "b"), (58, "a"), (58, "c")]
    assert later[-2]["models"] == [
        {"origin": "b", "version": 0, "codec": "fp32", "age": 58.0, "ahead": 1},  # b has oriented at 38
        {"origin": "c", "version": 0, "codec": "fp32", "age": 58.0, "ahead": 0},
    ]
    slow = encounters(plan, SIZES, Need(buffer=1, stay=0, rounds=2, current=True), changed(round_seconds=30))
    assert [e["versions"] for e in slow if e["event"] == "exchange"] == [[0, 0], [0, 0], [0, 0]]


def test_who_has_all_its_rounds_takes_no_more_and_still_gives() -> None:
    plan = plan_of((0, 18, "a", "b"), (20, 38, "a", "c"), (40, 58, "b", "d"), (60, 78, "a", "b"))
    events = encounters(plan, dict.fromkeys("abcd", FOUR), Need(buffer=1, stay=0, rounds=1), HAND)
    given_ = {(e["a"], e["b"]): e["bytes"] for e in events if e["event"] == "exchange"}
    assert given_ == {("a", "b"): [4096, 4096], ("a", "c"): [4096, None], ("b", "d"): [4096, None]}


def test_a_round_at_the_end_only_where_it_is_asked_for() -> None:
    plan = plan_of((0, 18, "a", "b"), seconds=500)
    assert [e[0] for e in brief(encounters(plan, SIZES, ONE, HAND))] == ["exchange"]
    late = brief(encounters(plan, SIZES, ONE, changed(last_round=True)))
    assert late[1:] == [("round", 500, "a", ["b"]), ("round", 500, "b", ["a"])]


def test_a_model_is_carried_to_whom_its_maker_never_meets() -> None:
    plan = plan_of((0, 18, "a", "b"), (20, 40, "b", "c"), (50, 70, "b", "c"))
    events = brief(encounters(plan, SIZES, Need(2, 1, 1), changed(carry=True)))
    assert events == [
        ("exchange", 18, "ab", "fp32", [0, 0]),
        ("exchange", 38, "bc", "fp32", [0, 0]),
        ("round", 38, "b", ["a", "c"]),
        ("carry", 64, "bc", "a"),  # no room before: 50 + 10 + 4 kB
        ("round", 64, "c", ["b", "a"]),
    ]


def test_what_is_dropped() -> None:
    def held(origin: str, made: float, received: float, *counts: int) -> Held:
        return Held(origin, 0, "fp32", 1, made, received, counts)

    many = [held("a", 5, 9, 1, 0, 0), held("b", 0, 10, 0, 3, 1), held("c", 3, 8, 0, 6, 2)]
    assert weakest("x", many, "age").origin == "b"
    assert weakest("x", many, "score", lambda _, one: {"a": 0.4, "b": 0.6, "c": 0.5}[one.origin]).origin == "a"
    assert weakest("x", many, "diversity").origin == "b", "b and c hold the same classes, and b's is older"
    # Two places while a round lasts an hour: of b, c and d the oldest goes.
    plan = plan_of((0, 18, "a", "b"), (20, 38, "a", "c"), (40, 58, "a", "d"), (60, 78, "a", "e"), (80, 98, "a", "f"))
    sizes, need = dict.fromkeys("abcdef", FOUR), Need(buffer=2, stay=0, rounds=2)
    gone = [e for e in brief(encounters(plan, sizes, need, changed(round_seconds=3600))) if e[0] == "evict"]
    assert gone == [("evict", 98, "a", "d")]


def test_deliveries_to_whichever_station_is_passed() -> None:
    plan = plan_of(
        *(
            (0, 13, "a", "rome"),
            (5, 16, "a", "kiel"),
            (100, 115, "a", "kiel"),
            (50, 61, "b", "rome"),
            (0, 99, "a", "b"),
        ),
        stations=("rome", "kiel"),
    )
    fp32 = changed(codecs=("fp32",))
    # a: 3 chunks over rome; of kiel only 13 to 16 are left, too short; the fourth at 100 + 10 + 1. b never.
    assert brief(deliveries(plan, dict.fromkeys("ab", FOUR), fp32)) == [
        ("partial", 13, "a", 3, 4),
        ("deliver", 111, "a", "kiel", "fp32"),
    ]
    assert brief(deliveries(plan, dict.fromkeys("ab", FOUR), HAND)) == [
        ("deliver", 11, "a", "rome", "int8"),
        ("deliver", 61, "b", "rome", "int8"),
    ]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Plan, ScheduleSettings, Need]:
    names = "abcdef"[: draw(st.integers(2, 6))]
    contacts: list[Contact] = []
    for one, other in combinations(names, 2):
        now = 0.0
        for _ in range(draw(st.integers(0, 3))):
            start = now + draw(st.integers(0, 300)) / 10
            now = start + draw(st.integers(1, 400)) / 10
            contacts.append(Contact(start, now, one, other, float(draw(st.sampled_from([300, 1024, 5000])))))
    end = max((c.end for c in contacts), default=1.0)
    link = ScheduleSettings(
        acquisition=draw(st.sampled_from([0.0, 3.0])),
        overhead=draw(st.sampled_from([0.0, 0.1])),
        chunk=KB,
        codecs=("fp32", "int8"),
        resume=draw(st.booleans()),
        policy=draw(st.sampled_from(["first", "best", "wait"])),
        carry=draw(st.booleans()),
        evict=draw(st.sampled_from(["age", "diversity"])),
        round_seconds=draw(st.sampled_from([0.0, 20.0])),
        last_round=draw(st.booleans()),
    )
    need = Need(draw(st.integers(1, 3)), draw(st.integers(0, 2)), draw(st.integers(1, 3)), draw(st.booleans()))
    return Plan(tuple(names), tuple(contacts), end), link, need


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_no_pair_twice_no_window_overfull_and_no_part_taken_for_the_whole(world: tuple[Plan, Any, Need]) -> None:
    plan, link, need = world
    size = {"fp32": 9 * KB + 7, "int8": 2 * KB + 300}
    events = encounters(plan, dict.fromkeys(plan.nodes, size), need, link)
    assert events == encounters(plan, dict.fromkeys(plan.nodes, size), need, link), "the same every time"
    assert [e["at"] for e in events] == sorted(e["at"] for e in events)
    pairs = [(e["a"], e["b"]) for e in events if e["event"] == "exchange"]
    assert len(pairs) == len(set(pairs)), "a pair exchanges once"
    came: dict[str, set[str]] = defaultdict(set)
    used = 0
    for e in events:
        news = [(e["b"], e["origin"])] if e["event"] == "carry" else []
        if e["event"] == "exchange":
            news = [(t, g) for t, g, n in ((e["b"], e["a"], 0), (e["a"], e["b"], 1)) if e["bytes"][n] is not None]
        for taker, origin in news:
            assert origin not in came[taker], "a maker's model reaches a node once, by whatever way"
            assert origin != taker
            came[taker].add(origin)
        if e["event"] == "round":
            origins = [m["origin"] for m in e["models"]]
            used += len(origins)
            assert set(origins) <= came[e["node"]], "only what came whole is used"
            assert 1 <= len(origins) <= need.buffer
            assert all(m["age"] >= 0 and m["ahead"] >= 0 for m in e["models"])
            assert e["number"] <= need.rounds
    assert used <= sum(map(len, came.values()))
    # What crossed in the windows of a pair, up to any moment, is no more than they had room for.
    for pair, windows in plan.pairs().items():
        mine = [e for e in events if (e.get("a"), e.get("b")) in (pair, pair[::-1])]
        for e in mine:
            past = sum(link.room(w) for w in windows if w.start <= e["at"])
            crossed = sum(_bytes(one) for one in mine if one["at"] <= e["at"] and one["event"] != "partial")
            assert crossed <= past
        assert sum(e["event"] == "partial" for e in mine) < len(windows)
        if any(e["event"] == "partial" for e in mine):
            assert link.resume
            assert any(e["event"] == "exchange" for e in mine), "what is begun ends"


def _bytes(event: Event) -> int:
    return sum(n or 0 for n in event["bytes"]) if event["event"] == "exchange" else event["bytes"]


def test_bad_settings_are_one_line() -> None:
    from flyby.errors import BadInput
    from flyby.settings import build

    with pytest.raises(BadInput, match=r"contacts\.policy = 'never' will not do"):
        build(ScheduleSettings, {"policy": "never"}, "contacts")
    assert build(ScheduleSettings, {"codecs": "fp16,int4"}, "contacts").codecs == ("fp16", "int4")
