"""Accuracy against hours as a table, and settings that concern only some of the methods that are compared."""

from __future__ import annotations

from flyby.runs.config import concerning
from flyby.study.catalogue import read_study
from flyby.study.grid import cells
from flyby.study.hour_tables import by_plan, hour_tables
from flyby.study.writers import markdown_table


def test_a_line_per_method_and_codec() -> None:
    fol = {
        "key": "f",
        "by_hour": {"a": [[0.0, 0.5], [1.5, 0.7]], "b": [[0.0, 0.7]], "c": [[0.0, 0.1]]},
        "contacts": {"hours": 3.0, "exchanges": 12},
    }
    server = {
        "key": "s",
        "by_hour": {"a": [[0.0, 0.4], [1.0, 0.9]], "b": [[0.0, 0.6], [1.0, 0.7]]},
        "contacts": {"hours": 3.0, "delivered": {"a": 0.5, "b": 0.9}},
    }
    assert by_plan(fol)
    assert not by_plan({"key": "x", "by_round": {}})
    (table,) = hour_tables([fol, server], {"f": "fol, int8", "s": "aurora, int8"})
    lines = markdown_table(table)
    assert "the 2 nodes" in lines[0], "c is judged by one of them only"
    assert lines[2:] == [
        "| method | n | crossed | 0 h | 1 h | 2 h | 3 h |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| fol, int8 | 1 | 12 | 60.0 | 60.0 | 70.0 | 70.0 |",
        "| aurora, int8 | 1 | 2 | 50.0 | 80.0 | 80.0 | 80.0 |",
    ]


def test_what_concerns_a_method() -> None:
    asked = ["orient.buffer=3", "train.lr=0.1"]
    assert concerning("fol", ["fol", "aurora"], asked) == asked
    assert concerning("aurora", ["fol", "aurora"], asked) == ["train.lr=0.1"]
    assert concerning("aurora", ["aurora", "fedavg"], asked) == asked, "nobody orients: it is refused as ever"


def test_the_study_on_wildfire_has_every_codec_of_both_ways() -> None:
    _, study = read_study("contacts-wildfire")
    found = [(cell.config.method, *cell.config.contacts.codecs) for cell in cells(study)]
    assert sorted(found) == sorted((m, c) for m in study.methods for c in ("fp32", "fp16", "int8", "int4"))
    assert all(cell.config.contacts.plan == "plan-70.csv" for cell in cells(study))
