from __future__ import annotations

import json
from pathlib import Path

import pytest

from flyby.errors import BadInput
from flyby.parcels.ledger import Crossing, Ledger, SecondCrossing


def star() -> Ledger:
    """Two sites send 100 and 250 bytes up, the server sends 7 back to one of them, and the sites exchange 1000 + 2000
    in round 3."""
    ledger = Ledger()
    ledger.record("site-0", "server", 100, "aa")
    ledger.record("site-1", "server", 250, "bb")
    ledger.record("server", "site-0", 7, "cc")
    ledger.record("site-0", "site-1", 1000, "aa", round=3)
    ledger.record("site-1", "site-0", 2000, "bb", round=3)
    return ledger


def test_bytes_are_counted_by_direction() -> None:
    ledger = star()
    assert (ledger.bytes_up(), ledger.bytes_down(), ledger.total_bytes, ledger.uploads()) == (350, 7, 3357, 2)
    assert (ledger.bytes_up("site-0"), ledger.bytes_down("site-0"), ledger.uploads("site-0")) == (2007, 1100, 2)
    assert ledger.crossings[0] == Crossing("site-0", "server", 100, "aa", 0)
    assert [c.round for c in ledger.crossings] == [0, 0, 0, 3, 3]


def test_a_second_crossing_of_an_ordered_pair_is_refused_even_in_a_later_round() -> None:
    ledger = star()
    with pytest.raises(SecondCrossing, match="site-0 already sent aa to server"):
        ledger.record("site-0", "server", 100, "zz", round=9)
    assert ledger.total_bytes == 3357
    assert ledger.has("server", "site-0")
    assert not ledger.has("server", "site-1")
    ledger.record("server", "site-1", 1, "dd")
    assert ledger.has("server", "site-1")


@pytest.mark.parametrize(
    "values",
    [
        ("a", "a", 1, "d"),
        ("", "b", 1, "d"),
        ("a/b", "b", 1, "d"),
        ("a\n", "b", 1, "d"),
        ("a" * 129, "b", 1, "d"),
        ("a", "b", -1, "d"),
        ("a", "b", 1.0, "d"),
        ("a", "b", True, "d"),
        ("a", "b", 1, ""),
        ("a", "b", 1, "d", -1),
    ],
)
def test_nonsense_is_not_recorded(values: tuple[object, ...]) -> None:
    ledger = Ledger()
    with pytest.raises(BadInput):
        ledger.record(*values)  # type: ignore[arg-type]
    assert ledger.crossings == []


def test_a_saved_ledger_is_the_same_ledger(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "ledger.json"
    star().save(path)
    loaded = Ledger.load(path)
    assert loaded.crossings == star().crossings
    first = path.read_bytes()
    loaded.save(path)
    assert path.read_bytes() == first
    with pytest.raises(SecondCrossing):
        loaded.record("site-1", "server", 1, "x")


def edited(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "ledger.json"
    star().save(path)
    value = json.loads(path.read_text())
    value["crossings"][1] |= changes
    path.write_text(json.dumps(value))
    return path


def test_an_edited_file_cannot_hold_what_record_would_refuse(tmp_path: Path) -> None:
    with pytest.raises(SecondCrossing, match=r"ledger\.json: crossing 1 .*site-0 already sent"):
        Ledger.load(edited(tmp_path, sender="site-0"))
    with pytest.raises(BadInput, match=r"crossing 1 .*itself"):
        Ledger.load(edited(tmp_path, sender="server"))
    with pytest.raises(BadInput, match=r"crossing 1 .*bytes"):
        Ledger.load(edited(tmp_path, bytes=-5))
    with pytest.raises(BadInput, match=r"crossing 1 .*bytes"):
        Ledger.load(edited(tmp_path, bytes="250"))
    with pytest.raises(BadInput, match=r"crossing 1 .*time"):
        Ledger.load(edited(tmp_path, time="noon"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema_version":1,"crossings":{}}',
        '{"schema_version":2,"crossings":[]}',
        '{"schema_version":1,"crossings":[3]}',
        '{"schema_version":1,"crossings":[{"sender":"a"}]}',
    ],
)
def test_other_files_are_not_ledgers(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"other\.json"):
        Ledger.load(path)
    with pytest.raises(BadInput, match="does not exist"):
        Ledger.load(tmp_path / "absent.json")
